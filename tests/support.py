"""What several test files need."""

import collections
import contextlib
import os
import signal

import numpy as np
import pytest
import torch

# Under scripts/sanitize.py freed memory is kept for a while, and every object has a margin.
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")
forks_among_threads = pytest.mark.skipif(
    SANITIZED,
    reason="a child that is forked meanwhile can find the sanitizer's own allocator locked",
)
needs_true_memory = pytest.mark.skipif(SANITIZED, reason="the sanitizer takes memory of its own")

TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])

# What torch says once in a process about the kinds of tensors that tests make.
QUIET = [
    pytest.mark.filterwarnings(
        "ignore:.*(beta state|prototype stage|deprecated|experimental|Sparse invariant)"
    ),
    pytest.mark.filterwarnings("ignore:Detected pickle protocol"),
]


@contextlib.contextmanager
def alarms(handler, first, every=0.0):
    """SIGALRM after ``first`` seconds, and then as often as ``every`` says, to a handler in Python.

    What stays behind is a handler that does nothing. A thread that took a signal from the system may
    hand it to Python after the timer has stopped; if Python had no handler any more it would raise
    OSError wherever the main thread happens to be.
    """
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, first, every)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, lambda *_: None)


def same(expected, actual, path="obj", memo=None):
    """Assert that two objects are equal to the bit: types, values, tensors with their geometry, and what is shared."""
    memo = {} if memo is None else memo
    assert type(expected) is type(actual), f"{path}: {type(actual)} instead of {type(expected)}"
    if isinstance(expected, (torch.Tensor, dict, list, collections.deque)):
        key = id(expected)
        if key in memo:
            assert memo[key][0] is actual, f"{path}: not the object that occurred before"
            return
        memo[key] = (actual, expected)
    if isinstance(expected, tuple):  # one may be in another 2**depth times
        pair = (id(expected), id(actual))
        if pair in memo:
            return
        memo[pair] = (expected, actual)
    if isinstance(expected, torch.Tensor):
        same_tensor(expected, actual, path, memo)
    elif isinstance(expected, dict):
        same(list(expected), list(actual), f"{path}.keys()", {})
        for key in expected:
            same(expected[key], actual[key], f"{path}[{key!r}]", memo)
        if hasattr(expected, "__dict__"):
            same(vars(expected), vars(actual), f"vars({path})", memo)
    elif isinstance(expected, (list, tuple, collections.deque)):
        assert len(expected) == len(actual), (
            f"{path}: {len(actual)} items instead of {len(expected)}"
        )
        for i, (a, b) in enumerate(zip(expected, actual, strict=True)):
            same(a, b, f"{path}[{i}]", memo)
    elif isinstance(expected, torch.storage.TypedStorage):
        assert expected.dtype == actual.dtype, (
            f"{path}: a storage of {actual.dtype} instead of {expected.dtype}"
        )
        same_storage(expected._untyped_storage, actual._untyped_storage, path, memo)
    elif isinstance(expected, (np.ndarray, np.generic)):
        assert expected.dtype == actual.dtype, path
        assert expected.shape == actual.shape, path
        if expected.dtype == object:
            same(expected.tolist(), actual.tolist(), path, memo)
        else:
            assert expected.tobytes() == actual.tobytes(), path
    elif isinstance(expected, float):
        assert np.float64(expected).tobytes() == np.float64(actual).tobytes(), path
    elif isinstance(expected, complex):
        assert np.complex128(expected).tobytes() == np.complex128(actual).tobytes(), path
    else:
        assert expected == actual, f"{path}: {actual!r} instead of {expected!r}"
        if isinstance(expected, (set, frozenset)):
            assert sorted(map(repr, expected)) == sorted(map(repr, actual)), path


def same_tensor(expected, actual, path, memo):
    for name in (
        "dtype",
        "layout",
        "device",
        "requires_grad",
        "is_leaf",
        "is_quantized",
        "is_nested",
    ):
        assert getattr(expected, name) == getattr(actual, name), f"{path}.{name}"
    if expected.is_nested:
        same(expected.values(), actual.values(), f"{path}.values()", {})
        same(expected._nested_tensor_size(), actual._nested_tensor_size(), f"{path}.sizes", {})
        return
    assert expected.shape == actual.shape, path
    expected_parts, actual_parts = parts_of(expected), parts_of(actual)
    if expected_parts:
        for name in expected_parts:
            same(expected_parts[name], actual_parts[name], f"{path}.{name}", {})
        return
    for name in ("stride", "storage_offset", "is_conj", "is_neg"):
        assert getattr(expected, name)() == getattr(actual, name)(), f"{path}.{name}()"
    same_storage(expected.untyped_storage(), actual.untyped_storage(), path, memo)
    same(expected.__dict__, actual.__dict__, f"vars({path})", memo)


def parts_of(tensor):
    """The plain tensors and numbers that a tensor of another layout consists of; {} for a strided one."""
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return {
            "indices": tensor._indices(),
            "values": tensor._values(),
            "coalesced": tensor.is_coalesced(),
        }
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return {
            "crow": tensor.crow_indices(),
            "col": tensor.col_indices(),
            "values": tensor.values(),
        }
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return {
            "ccol": tensor.ccol_indices(),
            "row": tensor.row_indices(),
            "values": tensor.values(),
        }
    if tensor.is_quantized:
        per_tensor = tensor.qscheme() == torch.per_tensor_affine
        how = (
            {"scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}
            if per_tensor
            else {
                "scales": tensor.q_per_channel_scales(),
                "zero_points": tensor.q_per_channel_zero_points(),
                "axis": tensor.q_per_channel_axis(),
            }
        )
        return {**how, "integers": tensor.int_repr(), "stride": tensor.stride()}
    return {}


def same_storage(expected, actual, path, memo):
    assert expected.nbytes() == actual.nbytes(), (
        f"{path}: {actual.nbytes()} bytes instead of {expected.nbytes()}"
    )
    assert expected.device == actual.device, path
    if not expected.nbytes() or expected.device.type == "meta":
        return
    key = ("storage", expected._cdata)
    if key in memo:
        assert memo[key] == actual._cdata, (
            f"{path}: not the storage that it shares with another tensor"
        )
        return
    memo[key] = actual._cdata
    memo[("alive", expected._cdata)] = (expected, actual)
    assert bytes_of(expected) == bytes_of(actual), f"{path}: other bytes"


def bytes_of(storage):
    return torch.tensor([], dtype=torch.uint8).set_(storage).numpy().tobytes()


def flags_at(*addresses):
    """What the system notes of the mappings at addresses, in two letters each: "hg" for huge pages, "nh" for none."""
    found = {}
    with open("/proc/self/smaps") as f:
        for line in f:
            if "-" in (head := line.split()[0]) and not head.endswith(":"):
                start, end = (int(x, 16) for x in head.split("-"))
            elif head == "VmFlags:":
                found |= {a: line.split()[1:] for a in addresses if start <= a < end}
    return [found[address] for address in addresses]
