"""pin_memory=True: storages in page-locked memory. Without an accelerator there is none, so torch's pool is stood in for."""

import pytest
import torch

import fastckpt
from fastckpt import pinned
from fastckpt.memory import ALIGNMENT, OWN_FROM, SHARED_MOST
from objects import saved, torch_loads
from support import QUIET, same

pytestmark = QUIET
MIB = 1 << 20


def example():
    shared = torch.arange(100.0)
    return {
        "a": torch.randn(50, 4),
        "views": [shared[3:], shared.view(10, 10).t()],
        "empty": torch.ones(0),
        "parameter": torch.nn.Parameter(torch.ones(7, dtype=torch.bfloat16)),
    }


@pytest.fixture
def locked(monkeypatch):
    """The arrays that were asked of the pool, which is ordinary memory here unless there is an accelerator."""
    asked = []

    def lock(nbytes):
        there = (
            torch.accelerator.is_available()
            if hasattr(torch, "accelerator")
            else torch.cuda.is_available()
        )
        asked.append(torch.empty(nbytes, dtype=torch.uint8, pin_memory=there).numpy())
        return asked[-1]

    monkeypatch.setattr(pinned, "lock", lock)
    return asked


def lies_in(tensor, arrays):
    start = tensor.untyped_storage().data_ptr()
    return any(array.ctypes.data <= start < array.ctypes.data + array.nbytes for array in arrays)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_load(locked, legacy, tmp_path):
    path = tmp_path / "file.pt"
    path.write_bytes(saved(example(), legacy=legacy))
    loaded = fastckpt.load(path, pin_memory=True)
    same(torch_loads(path.read_bytes()), loaded)
    assert all(lies_in(t, locked) for t in (loaded["a"], *loaded["views"], loaded["parameter"]))
    assert loaded["views"][0].data_ptr() % ALIGNMENT == 3 * 4


def test_open(locked, tmp_path):
    path = tmp_path / "file.pt"
    path.write_bytes(saved(example()))
    with fastckpt.open(path, pin_memory=True) as checkpoint:
        assert lies_in(checkpoint["a"].read(), locked)
        assert lies_in(checkpoint["a"][3:5], locked)


def test_without_accelerator(tmp_path):
    if not isinstance(failure_of(lambda: torch.empty(1, pin_memory=True)), RuntimeError):
        pytest.skip("there is an accelerator")
    path = tmp_path / "file.pt"
    path.write_bytes(saved(example()))
    with pytest.raises(RuntimeError, match="pin_memory=True needs an accelerator"):
        fastckpt.load(path, pin_memory=True)


def failure_of(call):
    try:
        call()
    except Exception as error:
        return error


@pytest.mark.parametrize("options", [{"mmap": True}, {"framework": "numpy"}], ids=str)
def test_what_it_is_not_for(options, tmp_path):
    path = tmp_path / "file.pt"
    path.write_bytes(saved(example()))
    for read in (fastckpt.load, fastckpt.open):
        with pytest.raises(TypeError, match="pin_memory=True is for torch tensors that are read"):
            read(path, pin_memory=True, **options)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([0], [(0, 1)]),
        ([64] * 1000, [(0, 1000)]),
        ([OWN_FROM, 64, 64, OWN_FROM, OWN_FROM], [(0, 1), (1, 3), (3, 4), (4, 5)]),
        ([20 * MIB] * 4, [(0, 2), (2, 4)]),
        ([30 * MIB, 30 * MIB, 64], [(0, 2), (2, 3)]),
    ],
    ids=["none", "empty", "small together", "big alone", "bounded", "enough"],
)
def test_regions(sizes, expected):
    import numpy as np

    found = pinned.regions(np.array(sizes, dtype=np.int64))
    assert found == expected
    assert all(sum(sizes[a:b]) <= SHARED_MOST or b - a == 1 for a, b in found)
