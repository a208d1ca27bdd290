"""load from everything that holds bytes, and in every context that torch has."""

import contextlib
import gzip
import io
import os
import sys
import tempfile

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fastckpt
from objects import Dripping, one_of_each, saved, torch_loads
from support import QUIET, TORCH, same
from ziprewrite import with_damage

pytestmark = QUIET

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc/self")


# -- where from --------------------------------------------------------------------------------------------------------


def opened(path, stack, **how):
    return stack.enter_context(open(path, "rb", **how))


def temporary(path, stack):
    file = stack.enter_context(tempfile.NamedTemporaryFile())  # noqa: SIM115 - the stack does
    file.write(path.read_bytes())
    file.seek(0)
    return file


def compressed(path, stack):
    return stack.enter_context(gzip.GzipFile(fileobj=io.BytesIO(gzip.compress(path.read_bytes()))))


SOURCES = {
    "str": lambda path, stack: str(path),
    "bytes path": lambda path, stack: os.fsencode(path),
    "Path": lambda path, stack: path,
    "file": opened,
    "unbuffered file": lambda path, stack: opened(path, stack, buffering=0),
    "descriptor": lambda path, stack: opened(path, stack).fileno(),
    "BytesIO": lambda path, stack: io.BytesIO(path.read_bytes()),
    "bytes": lambda path, stack: path.read_bytes(),
    "bytearray": lambda path, stack: bytearray(path.read_bytes()),
    "memoryview": lambda path, stack: memoryview(path.read_bytes()),
    "array": lambda path, stack: memoryview(np.frombuffer(path.read_bytes(), np.uint8)),
    "an object of our own": lambda path, stack: Dripping(path.read_bytes()),
    "temporary file": temporary,
    "gzip": compressed,
}


@pytest.fixture(scope="module", params=["zip", "legacy"])
def path(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("load") / "file.pt"
    path.write_bytes(saved(one_of_each(), legacy=request.param == "legacy"))
    return path


@pytest.fixture(scope="module")
def expected():
    return torch_loads(saved(one_of_each()))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("threads", [None, 1, 2])
def test_sources(source, threads, path, expected):
    with contextlib.ExitStack() as stack:
        loaded = fastckpt.load(SOURCES[source](path, stack), threads=threads)
        result = {
            **expected,
            **{name: loaded[name] for name in ("weight", "conj")},
        }  # random in each file
        same(result, loaded)


@pytest.mark.parametrize("make", [io.BytesIO, Dripping, None], ids=["BytesIO", "own", "file"])
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_position_afterwards(make, legacy, tmp_path):
    """A legacy stream ends where it says, and another may follow; a ZIP file goes to the end of its last record."""
    data = saved([torch.ones(3)], legacy=legacy)
    path = tmp_path / "file.pt"
    path.write_bytes(b"1234" + data + (data if legacy else b""))
    with make(path.read_bytes()) if make else open(path, "rb") as file:
        file.seek(4)
        same([torch.ones(3)], fastckpt.load(file))
        assert file.tell() == 4 + len(data)
        if legacy:
            same([torch.ones(3)], fastckpt.load(file))
            assert file.tell() == 4 + 2 * len(data)


@pytest.mark.parametrize("make", [bytes, bytearray, io.BytesIO], ids=lambda make: make.__name__)
@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_memory_is_copied(make, framework):
    data = saved([torch.arange(4.0)])
    source = make(data)
    loaded = fastckpt.load(source, framework=framework)[0]
    loaded[:] = 9
    assert (source.getvalue() if make is io.BytesIO else bytes(source)) == data
    if make is bytearray:
        source[:] = b"\0" * len(data)
        source.append(0)  # nothing holds it
        assert loaded.tolist() == [9] * 4
    if make is io.BytesIO:
        source.write(b"more")


@needs_proc
@pytest.mark.parametrize("damaged", [False, True])
def test_descriptors_are_closed(damaged, tmp_path):
    data = saved([torch.ones(100)])
    path = tmp_path / "file.pt"
    path.write_bytes(with_damage(data, "data/0") if damaged else data)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with contextlib.suppress(fastckpt.ChecksumError):
            fastckpt.load(path)
    assert len(os.listdir("/proc/self/fd")) == before


# -- contexts ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Watching(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


CONTEXTS = {
    "set_default_device meta": lambda: default_device("meta"),
    "with device meta": lambda: torch.device("meta"),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "deterministic": deterministic,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "torch function mode": Watching,
    "check sparse": lambda: torch.sparse.check_sparse_tensor_invariants(),
}


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_contexts(context, legacy):
    obj = one_of_each()
    data, expected = saved(obj, legacy=legacy), torch_loads(saved(obj))
    with CONTEXTS[context]():
        loaded = fastckpt.load(data)
    same(expected, loaded)


@pytest.mark.parametrize("context", CONTEXTS)
def test_contexts_of_a_pickle_that_is_run(context):
    obj = one_of_each()
    if (
        "meta" in context
    ):  # torch's own functions, which the pickle calls, make these where the context says
        del obj["sparse"], obj["csr"]
    data = saved(obj)
    expected = torch_loads(data)
    with CONTEXTS[context]():
        loaded = fastckpt.load(data, weights_only=False)
    same(expected, loaded)


@pytest.mark.skipif(TORCH < (2, 8), reason="older fake tensors are elsewhere")
@pytest.mark.parametrize("location", [None, "cpu", "meta", {"cpu": "meta"}], ids=repr)
@pytest.mark.parametrize("weights_only", [True, False])
def test_fake_tensors(location, weights_only):
    """Under FakeTensorMode nothing is read, and the tensors know where they would be."""
    data = saved(
        {"a": torch.ones(3), "b": torch.ones(4, 5)[1:].t(), "p": nn.Parameter(torch.ones(2))}
    )
    damaged = with_damage(data, "data/0", "data/1", "data/2")
    with FakeTensorMode():
        expected = torch_loads(data, location)
        loaded = fastckpt.load(damaged, location, weights_only=weights_only)
    for name, tensor in expected.items():
        assert loaded[name].device == tensor.device
        assert loaded[name].requires_grad == tensor.requires_grad
        assert (loaded[name].shape, loaded[name].stride()) == (tensor.shape, tensor.stride())
        assert type(loaded[name]) is type(tensor)


KINDS = (
    "weight views parameter half conj sparse csr quantized channels nested empty scalar meta storage integers"
).split()


@pytest.mark.parametrize("name", KINDS)
def test_inference_mode(name):
    """Tensors made in inference mode are inference tensors, in torch.load as here."""
    data = saved(one_of_each()[name])
    with torch.inference_mode():
        expected, loaded = torch_loads(data), fastckpt.load(data)
        if isinstance(expected, torch.Tensor):
            assert loaded.is_inference() == expected.is_inference()
    if name not in ("nested", "sparse", "csr"):  # their parts cannot be looked at from outside
        same(expected, loaded)
