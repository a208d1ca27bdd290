"""Which bytes are read: storages, what swaps together, and the runs of a part of a tensor."""

import operator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastckpt._spec import storage_spec, tensor_spec
from fastckpt.dtypes import CODE_BY_NAME
from fastckpt.errors import UnsupportedError
from fastckpt.plan import NEAR, WASTE, View, index_view, roots_of, runs_of, swap_units

FLOAT, SHORT, BYTE = CODE_BY_NAME["float32"], CODE_BY_NAME["int16"], CODE_BY_NAME["uint8"]
COMPLEX = CODE_BY_NAME["complex64"]


def storage(index, dtype=FLOAT, root=None, offset=0, nbytes=64):
    return storage_spec(str(index), dtype, nbytes, "cpu", index, root, offset).storage


class TestStorages:
    def test_roots(self):
        a, b = storage(0), storage(1)
        view, other = storage(2, root=a, offset=4, nbytes=8), storage(3, root=a, offset=8, nbytes=8)
        assert sorted(roots_of([view, b, other, a]), key=lambda spec: spec.key) == [a, b]
        assert roots_of([]) == []

    def test_swap_units(self):
        a, b, c = storage(0), storage(1, BYTE), storage(2, COMPLEX)
        view = storage(3, root=a, offset=4, nbytes=8)
        assert swap_units([a, b, c], []) == {
            0: 4,
            1: 1,
            2: 4,
        }  # of a complex number each part swaps alone

        def tensor(spec, dtype):
            ref = storage_spec(
                spec.key, spec.dtype, spec.nbytes, "cpu", spec.index, spec.root, spec.offset
            )
            return tensor_spec(ref, dtype, 0, (1,), (1,))

        assert swap_units([a, b], [tensor(b, SHORT)]) == {
            0: 4,
            1: 2,
        }  # untyped bytes that a tensor gives a type
        assert swap_units([a], [tensor(a, FLOAT), tensor(view, FLOAT)])[0] == 4
        with pytest.raises(UnsupportedError, match="no byte order is right for both"):
            swap_units([a], [tensor(a, FLOAT), tensor(view, SHORT)])


# -- what an index selects


def strided(view):
    """The elements of a View, which are their own positions."""
    flat = np.arange(100_000)
    return np.lib.stride_tricks.as_strided(
        flat[view.offset :], view.shape, [8 * n for n in view.stride]
    )


TENSORS = {
    "no dimensions": ((), (), 3),
    "one": ((7,), (1,), 2),
    "matrix": ((5, 6), (6, 1), 0),
    "transposed": ((6, 5), (1, 6), 4),
    "gaps": ((4, 5), (30, 3), 1),
    "expanded": ((4, 3), (0, 1), 9),
    "overlapping": ((5, 4), (1, 1), 0),
    "three": ((3, 4, 5), (20, 5, 1), 0),
    "permuted": ((5, 3, 4), (1, 20, 5), 0),
    "a size of one": ((3, 1, 4), (4, 999, 1), 0),
    "empty": ((0, 4), (4, 1), 0),
    "empty inside": ((3, 0, 2), (2, 2, 1), 5),
    "four": ((2, 3, 2, 5), (60, 10, 5, 1), 7),
}
INDICES = {
    "all": ...,
    "nothing": (),
    "first": 0,
    "last": -1,
    "numpy's int": np.int16(1),
    "numpy's 0-d array": np.array(1),
    "torch's int": torch.tensor(1),
    "slice": slice(1, 3),
    "open slices": (slice(None, 2), slice(1, None)),
    "step": slice(None, None, 2),
    "step over the end": slice(0, 100, 3),
    "negative slice": slice(-3, -1),
    "empty slice": slice(3, 1),
    "far slice": slice(10**30, 10**31),
    "ints": (1, 2),
    "int, slice": (2, slice(1, 3)),
    "ellipsis, int": (..., 1),
    "int, ellipsis, int": (0, ..., -1),
    "ellipsis in the middle of slices": (slice(1, 2), ..., slice(0, 1)),
    "ellipsis for nothing": (0, 0, ..., 0),
    "far int": 100,
    "far negative int": -100,
    "huge int": 10**30,
    "second of all": (slice(None), 1),
    "too many": (0,) * 5,
    "two ellipses": (..., ...),
}


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_index_view(tensor, index):
    """As NumPy indexes, and an IndexError where it raises one."""
    shape, stride, offset = tensor
    whole = strided(View(offset, shape, stride))
    plain = int(index) if isinstance(index, (np.ndarray, torch.Tensor)) else index
    try:
        expected = whole[plain]
    except IndexError:
        with pytest.raises(IndexError):
            index_view(shape, stride, offset, index)
        return
    view = index_view(shape, stride, offset, index)
    assert view.shape == np.shape(expected)
    assert np.array_equal(strided(view), expected)


REFUSED = {
    "None": None,
    "True": True,
    "numpy's bool": np.True_,
    "torch's bool": torch.tensor(True),
    "list": [0, 1],
    "array": np.array([0, 1]),
    "array of one": np.array([1]),
    "tensor": torch.tensor([0, 1]),
    "float": 1.0,
    "text": "a",
    "range": range(2),
    "set": {1},
    "slice of floats": slice(0.5, None),
}


@pytest.mark.parametrize("index", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize(
    "wrap", [lambda i: i, lambda i: (0, i), lambda i: (..., i)], ids=["alone", "second", "last"]
)
def test_refused_indices(index, wrap):
    with pytest.raises(TypeError, match=r"select a part|slice indices"):
        index_view((3, 4), (4, 1), 0, wrap(index))


@pytest.mark.parametrize("step", [-1, -2, 0])
def test_refused_steps(step):
    with pytest.raises(ValueError, match=r"forward|zero"):
        index_view((3, 4), (4, 1), 0, slice(None, None, step))


# -- the runs of a view


@st.composite
def views(draw):
    """A View of any shape, whose strides may be dense, have gaps, overlap or be zero."""
    ndim = draw(st.integers(0, 4))
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=ndim, max_size=ndim)))
    stride = tuple(
        draw(
            st.lists(
                st.sampled_from((0, 1, 2, 3, 5, 7, 30, 200, 1500)), min_size=ndim, max_size=ndim
            )
        )
    )
    return View(draw(st.integers(0, 50)), shape, stride)


def ordered(draw, shape):
    """Contiguous strides of some order of the dimensions."""
    order = draw(st.permutations(range(len(shape))))
    stride, step = [0] * len(shape), 1
    for axis in order:
        stride[axis] = step
        step *= shape[axis]
    return tuple(stride)


@st.composite
def permuted_views(draw):
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=5)))
    return View(draw(st.integers(0, 9)), shape, ordered(draw, shape))


def read(runs, flat):
    return np.concatenate([flat[start : start + runs.span] for start in runs.starts])


@settings(max_examples=500, deadline=None)
@given(views() | permuted_views(), st.sampled_from([1, 2, 4, 8, 16, 5000]))
def test_runs(view, itemsize):
    """They hold the elements of the view, lie inside what it spans, and are few and not much too long."""
    runs = runs_of(view, itemsize)
    expected = strided(view)
    if not expected.size:
        assert len(runs.starts) == 0
        return
    memory = read(runs, np.arange(100_000))
    assert len(memory) == len(runs.starts) * runs.span
    actual = np.lib.stride_tricks.as_strided(memory, view.shape, [8 * n for n in runs.stride])
    assert np.array_equal(actual, expected)
    assert memory.max() <= expected.max()
    assert memory.min() >= expected.min()
    assert len(runs.starts) <= expected.size
    useful = expected.size // len(runs.starts)
    assert runs.span * itemsize <= max(WASTE * useful * itemsize, NEAR, itemsize)


def view_of(index, shape=(1000, 1000)):
    return index_view(shape, (shape[1], 1), 0, index)


COUNTS = {
    "rows": (view_of(slice(10, 20)), 1, 10_000),
    "a row": (view_of(5), 1, 1000),
    "an element": (view_of((5, 5)), 1, 1),
    "half of each row": (view_of((slice(0, 10), slice(0, 500))), 1, 9500),
    "a quarter of each row": (view_of((slice(0, 10), slice(0, 250))), 10, 250),
    "some of each row": (view_of((slice(0, 10), slice(0, 100))), 10, 100),
    "a column": (view_of((slice(None), 3)), 1000, 1),
    "a column, of short rows": (view_of((slice(None), 3), (30, 30)), 1, 29 * 30 + 1),
    "every other row": (view_of(slice(0, 100, 2)), 1, 99_000),
    "every third row": (view_of(slice(0, 99, 3)), 33, 1000),
    "expanded": (View(7, (50, 1000), (0, 1)), 1, 1000),
    "unfolded": (View(0, (991, 10), (1, 1)), 1, 1000),
    "a single one, with strides": (View(7, (1, 1), (500, 500)), 1, 1),
}


@pytest.mark.parametrize(("view", "count", "span"), COUNTS.values(), ids=COUNTS)
def test_how_many_runs(view, count, span):
    runs = runs_of(view, 4)
    assert (len(runs.starts), runs.span) == (count, span)


def test_huge_views():
    """Nothing is counted out element by element, and nothing wraps."""
    runs = runs_of(View(0, (2**40, 2**20), (0, 1)), 8)
    assert (runs.span, runs.stride) == (2**20, (0, 1))
    runs = runs_of(View(2**61, (1,), (2**61,)), 1)
    assert (runs.starts.tolist(), runs.span) == ([2**61], 1)
    assert operator.index(runs.starts[0]) == 2**61


def test_strides_of_single_elements():
    """What was contiguous stays so to the letter: a stride of 0 where there is one element keeps torch from viewing it as bytes."""
    for shape in ((1,), (1, 5), (5, 1), (3, 1, 4), (1, 1), (2, 3, 1, 1)):
        stride = torch.empty(shape).stride()
        assert runs_of(View(0, shape, stride), 4).stride == stride
