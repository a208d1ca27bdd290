"""What load gives is as good as what torch.load gives: in every context, and for everything that is done with it."""

import contextlib
import copy
import gc
import gzip
import io
import multiprocessing
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import weakref

import fastckpt
import numpy as np
import pytest
import torch
from objects import saved, torch_loads
from support import QUIET, same
from torch import nn
from ziprewrite import records_of, rewritten, with_damage

pytestmark = QUIET


needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc/self")


def example():
    shared = torch.arange(24.0)
    return {
        "weight": torch.randn(300, 5),
        "views": [shared[3:], shared.view(4, 6).t(), shared[:2].expand(3, 2)],
        "parameter": nn.Parameter(torch.ones(2)),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "conj": torch.view_as_complex(torch.randn(3, 2)).conj(),
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.5, 1, torch.qint8),
        "channels": torch.quantize_per_channel(torch.ones(3, 2), torch.ones(3), torch.zeros(3), 0, torch.quint8),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(5),
        "meta": torch.empty(2, 3, device="meta"),
        "storage": torch.ones(2).storage(),
        "integers": torch.arange(5, dtype=torch.int32),
        "text": "text",
    }


# -- where from --------------------------------------------------------------------------------------------------------


class Dripping(io.RawIOBase):
    """A seekable file of our own that gives a few bytes at a time."""

    def __init__(self, data):
        self.file = io.BytesIO(data)

    def readable(self):
        return True

    def seekable(self):
        return True

    def seek(self, *args):
        return self.file.seek(*args)

    def tell(self):
        return self.file.tell()

    def readinto(self, view):
        return self.file.readinto(memoryview(view)[:1000])


SOURCES = {
    "str": lambda path, stack: str(path),
    "bytes path": lambda path, stack: os.fsencode(path),
    "Path": lambda path, stack: path,
    "file": lambda path, stack: stack.enter_context(open(path, "rb")),
    "unbuffered file": lambda path, stack: stack.enter_context(open(path, "rb", buffering=0)),
    "descriptor": lambda path, stack: stack.enter_context(open(path, "rb")).fileno(),
    "BytesIO": lambda path, stack: io.BytesIO(path.read_bytes()),
    "bytes": lambda path, stack: path.read_bytes(),
    "bytearray": lambda path, stack: bytearray(path.read_bytes()),
    "memoryview": lambda path, stack: memoryview(path.read_bytes()),
    "array": lambda path, stack: memoryview(np.frombuffer(path.read_bytes(), np.uint8)),
    "an object of our own": lambda path, stack: Dripping(path.read_bytes()),
    "temporary file": lambda path, stack: filled(stack.enter_context(tempfile.NamedTemporaryFile()), path),
    "gzip": lambda path, stack: stack.enter_context(gzip.open(io.BytesIO(gzip.compress(path.read_bytes())))),
}


def filled(file, path):
    file.write(path.read_bytes())
    file.seek(0)
    return file


@pytest.fixture(scope="module", params=["zip", "legacy"])
def path(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("load") / "file.pt"
    path.write_bytes(saved(example(), legacy=request.param == "legacy"))
    return path


@pytest.fixture(scope="module")
def expected():
    return torch_loads(saved(example()))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("threads", [None, 1, 2])
def test_sources(source, threads, path, expected):
    with contextlib.ExitStack() as stack:
        loaded = fastckpt.load(SOURCES[source](path, stack), threads=threads)
        result = {**expected, **{name: loaded[name] for name in ("weight", "conj")}}  # random in each file
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
    obj = example()
    data, expected = saved(obj, legacy=legacy), torch_loads(saved(obj))
    with CONTEXTS[context]():
        loaded = fastckpt.load(data)
    same(expected, loaded)


@pytest.mark.parametrize("context", CONTEXTS)
def test_contexts_of_a_pickle_that_is_run(context):
    obj = example()
    if "meta" in context:  # torch's own functions, which the pickle calls, make these where the context says
        del obj["sparse"], obj["csr"]
    data = saved(obj)
    expected = torch_loads(data)
    with CONTEXTS[context]():
        loaded = fastckpt.load(data, weights_only=False)
    same(expected, loaded)


KINDS = (
    "weight views parameter half conj sparse csr quantized channels nested empty scalar meta storage integers"
).split()


@pytest.mark.parametrize("name", KINDS)
def test_inference_mode(name):
    """Tensors made in inference mode are inference tensors, in torch.load as here."""
    data = saved(example()[name])
    with torch.inference_mode():
        expected, loaded = torch_loads(data), fastckpt.load(data)
        if isinstance(expected, torch.Tensor):
            assert loaded.is_inference() == expected.is_inference()
    if name not in ("nested", "sparse", "csr"):  # their parts cannot be looked at from outside
        same(expected, loaded)


# -- what is done with the result --------------------------------------------------------------------------------------

DENSE = ("weight", "parameter", "half", "conj", "empty", "scalar", "integers", "quantized", "channels", "sparse", "csr")


@pytest.mark.parametrize("name", DENSE)
class TestUse:
    def loaded(self, name):
        obj = example()[name]
        return torch_loads(saved(obj)), fastckpt.load(saved(obj))

    @pytest.mark.parametrize("protocol", [2, 5])
    def test_pickle(self, name, protocol):
        expected, loaded = self.loaded(name)
        same(expected, pickle.loads(pickle.dumps(loaded, protocol)))

    def test_deepcopy(self, name):
        expected, loaded = self.loaded(name)
        for duplicate in (copy.copy, copy.deepcopy) if name != "csr" else (copy.copy,):  # torch has no deep copy of it
            same(duplicate(expected), duplicate(loaded))

    def test_save_again(self, name):
        expected, loaded = self.loaded(name)
        assert len(saved(loaded)) == len(saved(expected))
        same(expected, torch_loads(saved(loaded)))
        same(expected, fastckpt.load(saved(loaded)))

    def test_arithmetic_in_place(self, name):
        expected, loaded = self.loaded(name)
        if expected.is_quantized:
            return
        with torch.no_grad():
            same(expected.mul_(3), loaded.mul_(3))


def test_share_memory():
    loaded = fastckpt.load(saved({"a": torch.arange(6.0), "b": torch.ones(2)}))
    tensor = loaded["a"].share_memory_()
    assert tensor.is_shared()
    assert tensor.tolist() == [0, 1, 2, 3, 4, 5]
    assert not loaded["b"].is_shared()


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_resize(legacy):
    """Within its storage a tensor may take another shape; no loaded storage grows, as none of torch.load does from a ZIP file."""
    tensor = fastckpt.load(saved([torch.arange(6.0)], legacy=legacy))[0]
    assert tensor.resize_(2, 2).tolist() == [[0, 1], [2, 3]]
    assert not tensor.untyped_storage().resizable()
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.resize_(100)
    tensor.set_(torch.arange(100.0))
    assert tensor.numel() == 100


def test_training_goes_on():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(fastckpt.load(saved(list(model.parameters()))), lr=1)
    weight, bias = optimizer.param_groups[0]["params"]
    assert weight.is_leaf and weight.requires_grad
    torch.nn.functional.linear(torch.ones(3), weight, bias).sum().backward()
    optimizer.step()
    assert torch.equal(weight.detach(), model.weight.detach() - 1)


def test_numpy_shares_memory():
    tensor = fastckpt.load(saved([torch.arange(4.0)]))[0]
    tensor.numpy()[0] = 7
    assert tensor[0] == 7
    assert torch.utils.dlpack.from_dlpack(tensor).data_ptr() == tensor.data_ptr()


def test_alignment():
    loaded = fastckpt.load(saved([torch.ones(n, dtype=torch.int8) for n in (1, 3, 64, 65, 1000, 5 << 20)]))
    assert [tensor.data_ptr() % 64 for tensor in loaded] == [0] * 6


def test_a_tensor_owns_its_storage():
    loaded = fastckpt.load(saved([torch.ones(3), torch.ones(5), torch.ones(7)[2:]]))
    assert [tensor.untyped_storage().nbytes() for tensor in loaded] == [12, 20, 28]
    assert len({tensor.untyped_storage().data_ptr() for tensor in loaded}) == 3


def in_worker(path, queue):
    queue.put(fastckpt.load(path)["a"].sum().item())


class Samples(torch.utils.data.Dataset):
    def __init__(self, path):
        self.path, self.table = path, fastckpt.load(path)

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return self.table["a"][i] + fastckpt.load(self.path, keys=["a"])["a"][i]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
@pytest.mark.parametrize("below", ["0", ""], ids=["parallel", "serial"])
def test_data_loader(below, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTCKPT_SERIAL_BELOW", below)
    path = tmp_path / "file.pt"
    torch.save({"a": torch.arange(6.0)}, path)
    torch.ones(1 << 20).sum()  # a pool of torch's own, in this process
    loader = torch.utils.data.DataLoader(
        Samples(path), batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=60
    )
    assert torch.cat(list(loader)).tolist() == [0, 2, 4, 6, 8, 10]


@pytest.mark.slow
def test_spawned_process(tmp_path):
    path = tmp_path / "file.pt"
    torch.save({"a": torch.arange(6.0)}, path)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=in_worker, args=(str(path), queue))
    process.start()
    assert queue.get(timeout=120) == 15
    process.join()


# -- memory ------------------------------------------------------------------------------------------------------------


MEMORY = """
import gc, os, sys, torch, fastckpt

def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
"""

GIVEN_BACK = """
path, size = sys.argv[1], int(sys.argv[2])
fastckpt.load(path)
before = resident()
for _ in range(3):
    loaded = fastckpt.load(path)
    assert resident() - before > 0.8 * size
    del loaded
    assert resident() - before < 0.3 * size, (resident() - before) / size
"""

SMALL_KEPT = """
path, size = sys.argv[1], int(sys.argv[2])
fastckpt.load(path)
before = resident()
kept = [fastckpt.load(path)["small"] for _ in range(4)]
assert resident() - before < 0.3 * size
"""


def run_python(*parts, arguments):
    done = subprocess.run(
        [sys.executable, "-c", "".join(parts), *map(str, arguments)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@needs_proc
@pytest.mark.parametrize("sizes", [[64 << 20], [1 << 20] * 64, [10_000] * 6_000], ids=["one", "many", "small"])
def test_memory_is_given_back(sizes, tmp_path):
    path = tmp_path / "file.pt"
    torch.save([torch.ones(n, dtype=torch.int8) for n in sizes], path)
    run_python(MEMORY, GIVEN_BACK, arguments=[path, sum(sizes)])


@needs_proc
def test_a_small_tensor_of_a_large_file_can_be_kept(tmp_path):
    """Storages from 32 MiB up have memory of their own, which goes without the small ones."""
    path = tmp_path / "file.pt"
    torch.save({"small": torch.ones(4), "large": torch.ones(48 << 20, dtype=torch.int8)}, path)
    run_python(MEMORY, SMALL_KEPT, arguments=[path, 48 << 20])


def test_nothing_is_kept_alive():
    data = saved({"a": torch.ones(3), "custom": [torch.ones(1)]})
    loaded = fastckpt.load(data)
    ghosts = [weakref.ref(loaded["a"]), weakref.ref(loaded["a"].untyped_storage())]
    del loaded
    gc.collect()
    assert [ghost() for ghost in ghosts] == [None, None]


# -- checksums ---------------------------------------------------------------------------------------------------------


class TestVerify:
    DATA = saved({f"t{i}": torch.full((n,), i, dtype=torch.float32) for i, n in enumerate((1, 10, 1000, 100_000))})
    RECORDS = tuple(name for name in records_of(DATA) if name.startswith("data/"))

    @pytest.mark.parametrize("record", RECORDS)
    @pytest.mark.parametrize("threads", [1, 2])
    @pytest.mark.parametrize("below", ["0", ""], ids=["parallel", "serial"])
    def test_a_flipped_byte(self, record, threads, below, tmp_path, monkeypatch):
        monkeypatch.setenv("FASTCKPT_SERIAL_BELOW", below)
        path = tmp_path / "file.pt"
        path.write_bytes(with_damage(self.DATA, record))
        for source in (path, path.read_bytes(), Dripping(path.read_bytes())):
            with pytest.raises(fastckpt.ChecksumError, match=f"'{record}' at byte .*verify=False reads it anyway") as caught:
                fastckpt.load(source, threads=threads)
            assert caught.value.record.endswith(record)
            loaded = fastckpt.load(source, verify=False, threads=threads)
            number = int(record.removeprefix("data/"))
            differs = [i for i in range(4) if not (loaded[f"t{i}"] == i).all()]
            assert differs == [number]

    def test_numpy(self):
        with pytest.raises(fastckpt.ChecksumError):
            fastckpt.load(with_damage(self.DATA, "data/1"), framework="numpy")

    def test_weights_only_false(self):
        with pytest.raises(fastckpt.ChecksumError):
            fastckpt.load(with_damage(self.DATA, "data/1"), weights_only=False)

    def test_the_pickle(self):
        with pytest.raises(fastckpt.ChecksumError, match="data.pkl"):
            fastckpt.load(with_damage(self.DATA, "data.pkl"))

    def test_several(self):
        with pytest.raises(fastckpt.ChecksumError, match="data/1.*2 more records are wrong"):
            fastckpt.load(with_damage(self.DATA, "data/1", "data/2", "data/3"))

    def test_checksums_that_were_not_computed(self):
        fastckpt.load(with_damage(rewritten(self.DATA, crc=0), "data/1"))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("below", ["0", ""], ids=["parallel", "serial"])
def test_progress(threads, below, monkeypatch):
    monkeypatch.setenv("FASTCKPT_SERIAL_BELOW", below)
    told = []
    fastckpt.load(TestVerify.DATA, threads=threads, progress=lambda done, total: told.append((done, total)))
    total = 4 * (1 + 10 + 1000 + 100_000)
    assert told[-1] == (total, total)
    assert told == sorted(told)


def test_errors_of_progress_come_through():
    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fastckpt.load(TestVerify.DATA, progress=stop)


def test_path_without_a_file(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        fastckpt.load(tmp_path / "nothing.pt")
    assert pathlib.Path(caught.value.filename).name == "nothing.pt"
