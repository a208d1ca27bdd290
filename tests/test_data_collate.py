"""Batches of torch tensors are those of torch's default_collate, which makes some of them more slowly: and so are its errors."""

import collections

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from fastckpt.data._numbers import column_of
from fastckpt.data.collate import collate
from support import same

Pair = collections.namedtuple("Pair", "left right")


class Own(dict):
    pass


class Tensor(torch.Tensor):
    pass


SAMPLES = {
    "int": [1, -(2**63), 2**63 - 1],
    "float": [0.1, float("inf"), -0.0],
    "bool": [True, False],
    "int and bool": [1, True],
    "int and float": [1, 0.5],
    "float and int": [0.5, 1],
    "int too large": [0, 2**63],
    "text": ["a", "b"],
    "bytes": [b"a", b"b"],
    "None": [None, None],
    "NumPy's numbers": [np.float32(1), np.float32(2)],
    "tensor": [torch.ones(2), torch.zeros(2)],
    "tensor without axes": [torch.tensor(1), torch.tensor(2)],
    "tensor with gradient": [torch.ones(2, requires_grad=True)] * 2,
    "tensors of two dtypes": [torch.ones(2), torch.ones(2).long()],
    "tensors of two shapes": [torch.ones(2), torch.ones(3)],
    "sparse": [torch.eye(2).to_sparse()] * 2,
    "parameter": [torch.nn.Parameter(torch.ones(2))] * 2,
    "subclass": [torch.ones(2).as_subclass(Tensor)] * 2,
    "subclass behind a tensor": [torch.ones(2), torch.ones(2).as_subclass(Tensor)],
    "array": [np.arange(6.0).reshape(2, 3)] * 2,
    "array of bytes": [np.zeros((2, 0), "u1")] * 3,
    "array without axes": [np.array(1), np.array(2)],
    "arrays of two dtypes": [np.zeros(2), np.zeros(2, "i4")],
    "arrays of two shapes": [np.zeros(2), np.zeros(3)],
    "array of text": [np.array(["a"])] * 2,
    "array of objects": [np.array([None])] * 2,
    "array and tensor": [np.zeros(2), torch.zeros(2)],
    "dict": [{"a": 1, "b": "x"}, {"b": "y", "a": 2}],
    "dict of more": [{"a": 1}, {"a": 2, "b": 3}],
    "dict of less": [{"a": 1, "b": 2}, {"a": 1}],
    "dict of nothing": [{}, {}],
    "ordered": [collections.OrderedDict(a=1)] * 2,
    "dict and ordered": [{"a": 1}, collections.OrderedDict(a=2)],
    "dict of one's own": [Own(a=1)] * 2,
    "tuple": [(1, "x"), (2, "y")],
    "tuples of two lengths": [(1, 2), (1,)],
    "tuple and list": [(1, 2), [3, 4]],
    "list": [[1, 2.5], [3, 4.5]],
    "lists of two lengths": [[1], [1, 2]],
    "list of nothing": [[], []],
    "namedtuple": [Pair(1, [2]), Pair(3, [4])],
    "nested": [{"a": (1, {"b": [torch.ones(2), 0.5]})}] * 3,
    "dict and int": [{"a": 1}, 1],
    "one": [5],
    "none": [],
}


@pytest.mark.parametrize("samples", SAMPLES.values(), ids=SAMPLES)
@pytest.mark.parametrize("wrap", [list, tuple])
def test_as_torch_does_it(samples, wrap):
    samples = wrap(samples)
    expected, found = outcome(default_collate, samples), outcome(collate, samples)
    assert type(found) is type(expected)
    if isinstance(expected, Exception):
        assert str(found) == str(expected)
    else:
        same(expected, found)


def outcome(function, samples):
    try:
        return function(samples)
    except Exception as error:
        return error


def test_batches_share_nothing_with_samples():
    array, tensor = np.zeros(2), torch.zeros(2)
    for batch in (collate([array]), collate([tensor])):
        batch.add_(1)
    assert not array.any()
    assert not tensor.any()


@pytest.mark.parametrize(
    "values", [(), ("a",), (1, True), (True, 1), (1.0, 1), (2**64,), (1, -(2**63) - 1), (None,)], ids=str
)  # fmt: skip
def test_what_is_no_column(values):
    assert column_of(values) is None
