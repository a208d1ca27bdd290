"""framework="numpy": arrays, whether or not torch is there."""

import collections
import datetime
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import fastckpt
from objects import saved
from support import QUIET, same

pytestmark = QUIET


def load(obj, **options):
    return fastckpt.load(saved(obj), framework="numpy", **options)


def test_views_share_memory():
    storage = torch.arange(12.0)
    loaded = load([storage[2:], storage.view(3, 4).t(), storage[:3].expand(2, 3), torch.ones(2)])
    assert np.shares_memory(loaded[0], loaded[1])
    loaded[0][0] = 100
    assert loaded[1][2, 0] == loaded[2][1, 2] == 100
    assert not np.shares_memory(loaded[0], loaded[3])
    assert loaded[1].strides == (4, 16)
    assert loaded[2].strides == (0, 4)


@pytest.mark.parametrize("make", [torch.ones, torch.empty], ids=["values", "empty"])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (2, 3, 4)], ids=str)
def test_shapes(make, shape):
    tensor = make(*shape) if shape else torch.tensor(5.0)
    array = load(tensor)
    assert type(array) is np.ndarray
    assert (array.shape, array.dtype) == (tuple(tensor.shape), np.float32)
    assert array.flags.writeable
    assert array.flags.aligned


def test_a_tensor_that_occurs_twice_is_one_array():
    tensor = torch.ones(2)
    one, two = load([tensor, tensor])
    assert one is two


PLAIN = {
    "none": None,
    "numbers": [1, 2**70, 1.5, True, 2j],
    "text": {"a": "b", 5: b"bytes"},
    "containers": (
        collections.OrderedDict(a=1),
        {1, 2},
        frozenset("a"),
        collections.deque([1], 3),
        collections.Counter("aab"),
    ),
    "dates": [datetime.date(2020, 1, 2), datetime.timedelta(3)],
    "arrays": [np.arange(3), np.float32(1.5), np.dtype("i4")],
    "range": range(3),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_objects(name):
    same(PLAIN[name], load(PLAIN[name]))


def test_names_of_torch_are_text():
    assert load([torch.float32, torch.device("cuda", 1), torch.device("cpu"), torch.strided]) == [
        "torch.float32", "cuda:1", "cpu", "torch.strided",
    ]  # fmt: skip
    assert load([torch.Size([2, 3])]) == [(2, 3)]


def test_parameters_and_attributes():
    parameter = nn.Parameter(torch.ones(2))
    parameter.tag = "x"
    tensor = torch.zeros(2)
    tensor.note = {"a": 1}
    loaded = load([parameter, tensor, nn.Parameter(torch.ones(1), requires_grad=False)])
    assert [array.tolist() for array in loaded] == [[1, 1], [0, 0], [1]]
    assert {type(array) for array in loaded} == {np.ndarray}


def test_storage():
    array = load(torch.arange(3, dtype=torch.int16).storage())
    assert (array.dtype, array.tolist()) == (np.int16, [0, 1, 2])


NO_TWIN = {
    "sparse_coo": torch.eye(3).to_sparse,
    "sparse_csr": torch.eye(3).to_sparse_csr,
    "sparse_bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "meta": lambda: torch.empty(2, device="meta"),
    "qint8": lambda: torch.quantize_per_tensor(torch.ones(3), 0.5, 1, torch.qint8),
    "quint8": lambda: torch.quantize_per_channel(
        torch.ones(3, 2), torch.ones(3), torch.zeros(3), 0, torch.quint8
    ),
}


@pytest.mark.parametrize("kind", NO_TWIN)
class TestNoTwin:
    def test_named(self, kind):
        with pytest.raises(
            fastckpt.UnsupportedError,
            match=f"NumPy has nothing for a {kind} tensor; framework='torch' has",
        ):
            load([NO_TWIN[kind]()])

    def test_parts(self, kind):
        opaque, rest = load([NO_TWIN[kind](), torch.ones(2)], unknown="opaque")
        assert opaque.qualname == f"torch.{kind}"
        assert rest.tolist() == [1, 1]

    def test_does_not_hide_the_rest(self, kind):
        loaded = load({"a": NO_TWIN[kind](), "b": torch.ones(2)}, keys=["b"])
        assert loaded["b"].tolist() == [1, 1]


def test_parts_of_a_sparse_tensor():
    opaque = load(torch.eye(2).to_sparse(), unknown="opaque")
    indices, values, size, coalesced = opaque.args
    assert indices.tolist() == [[0, 1], [0, 1]]
    assert values.tolist() == [1, 1]
    assert (size, coalesced) == ((2, 2), True)


def test_classes_that_are_allowed_are_torchs_business():
    with pytest.raises(fastckpt.UnsafePickleError, match=r"collections.namedtuple|Point"):
        load(Point(1, 2))
    assert load(Point(1, 2), unknown="opaque").qualname == f"{__name__}.Point"


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_without_torch(legacy, tmp_path):
    """In a process where torch cannot be imported."""
    obj = {"a": torch.arange(6.0).view(2, 3), "half": torch.ones(2, dtype=torch.bfloat16), "text": "x",
           "size": torch.Size([1]), "device": torch.device("cpu"), "parameter": nn.Parameter(torch.ones(1))}  # fmt: skip
    path = tmp_path / "file.pt"
    path.write_bytes(saved(obj, legacy=legacy))
    code = """
import sys
sys.modules["torch"] = None
import fastckpt
loaded = fastckpt.load(sys.argv[1], framework="numpy", threads=2)
assert loaded["a"].tolist() == [[0, 1, 2], [3, 4, 5]], loaded
assert loaded["half"].astype(float).tolist() == [1, 1] or loaded["half"].tolist() == [0x3F80] * 2
assert [loaded[name] for name in ("text", "size", "device")] == ["x", (1,), "cpu"]
try:
    fastckpt.load(sys.argv[1])
except ImportError as error:
    assert "torch" in str(error)
else:
    sys.exit("no ImportError")
"""
    for below in ("0", ""):
        environment = {**os.environ, "FASTCKPT_SERIAL_BELOW": below}
        done = subprocess.run(
            [sys.executable, "-c", code, str(path)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr


WITHOUT_TORCH = """
import io, sys
sys.modules["torch"] = None
import fastckpt
path, stream = sys.argv[1], io.BytesIO(open(sys.argv[2], "rb").read())
opened = fastckpt.open(path)
calls = {
    "load": lambda: fastckpt.load(path),
    "trusted": lambda: fastckpt.load(path, weights_only=False),
    "pinned": lambda: fastckpt.load(path, pin_memory=True),
    "read": lambda: opened["a"].read(),
    "slice": lambda: opened["a"][:1],
    "load_into": lambda: fastckpt.load_into({}, path),
    "save": lambda: fastckpt.save({}, path),
    "save_sharded": lambda: fastckpt.save_sharded({}, "folder"),
    "dump": lambda: fastckpt.stream.dump({}, io.BytesIO()),
    "stream": lambda: fastckpt.stream.load(stream),
}
for name, call in calls.items():
    try:
        call()
    except ModuleNotFoundError as error:
        print(name, "pip install torch brings it" in str(error), error.name)
"""


def test_what_needs_torch_says_so(tmp_path):
    path, stream = tmp_path / "model.pt", tmp_path / "stream"
    torch.save({"a": torch.ones(3)}, path)
    with open(stream, "wb") as file:
        fastckpt.stream.dump({"a": torch.ones(3)}, file)
    run = [sys.executable, "-c", WITHOUT_TORCH, str(path), str(stream)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run(run, capture_output=True, text=True, env=environment, check=True).stdout
    names = "load trusted pinned read slice load_into save save_sharded dump stream".split()
    assert out.splitlines() == [f"{name} True torch" for name in names]
