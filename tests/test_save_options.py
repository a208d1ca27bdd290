"""The options of save: checksums, views, dtypes, metadata, progress, threads, protocols, and what they cost."""

import collections
import io
import os
import signal
import subprocess
import sys
import time
import zipfile

import pytest
import torch
from torch import nn

import fastckpt
from objects import torch_loads
from support import QUIET, needs_true_memory, same

pytestmark = QUIET


def written(obj, **options):
    file = io.BytesIO()
    fastckpt.save(obj, file, **options)
    return file.getvalue()


def sizes(data):
    """{name: bytes} of the storages in a file."""
    infos = zipfile.ZipFile(io.BytesIO(data)).infolist()
    return {i.filename.split("/")[-1]: i.file_size for i in infos if "/data/" in i.filename}


# -- checksums ---------------------------------------------------------------------------------------------------------

TENSORS = {"small": torch.ones(9), "large": torch.arange(100_000), "empty": torch.ones(0)}


@pytest.mark.parametrize("where", ["path", "stream"])
@pytest.mark.parametrize("crc32", [True, False], ids=["with crc32", "without"])
@pytest.mark.parametrize("dtype", [None, torch.float16], ids=["as it is", "cast"])
def test_crc32(where, crc32, dtype, tmp_path):
    path = tmp_path / "model.pt"
    fastckpt.save(TENSORS, path, crc32=crc32, dtype=dtype)
    if where == "stream":
        path.write_bytes(written(TENSORS, crc32=crc32, dtype=dtype))
    archive = zipfile.ZipFile(path)
    assert {info.CRC > 0 for info in archive.infolist() if info.file_size} == {crc32}
    same(torch.load(path, weights_only=True), fastckpt.load(path))
    with fastckpt.open(path) as checkpoint:
        records = checkpoint.info["records"]
        assert checkpoint.info["records_with_crc32"] == (records if crc32 else 1)  # an empty one
    if crc32:
        assert archive.testzip() is None
    elif hasattr(torch.serialization, "set_crc32_options"):  # as torch writes them
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(TENSORS, path)
        finally:
            torch.serialization.set_crc32_options(True)
        theirs = zipfile.ZipFile(path).infolist()
        assert {info.CRC for info in theirs if "/data/" in info.filename} == {0}


# -- views -------------------------------------------------------------------------------------------------------------


def base():
    return torch.arange(10_000.0)


def bytes_as_two_types():
    memory = torch.arange(200, dtype=torch.uint8)
    return [memory[3:9], memory.view(torch.uint16)[50:60]]


# What is saved, and how many bytes its storages have then, in their order.
VIEWS = {
    "a slice": (lambda b: b[5:15], [40]),
    "all of it": (lambda b: b, [40_000]),
    "two apart": (lambda b: [b[5:15], b[900:910]], [80]),
    "two that overlap": (lambda b: [b[5:15], b[10:20]], [60]),
    "two that touch": (lambda b: [b[5:15], b[15:20]], [60]),
    "one in another": (lambda b: [b[0:100], b[40:50], b[40:50]], [400]),
    "from behind": (lambda b: [b[900:910], b[5:15]], [80]),
    "every third": (lambda b: b[10:40:3], [28 * 4]),
    "a column": (lambda b: b.view(100, 100)[:, 7], [4 * (99 * 100 + 1)]),
    "transposed": (lambda b: b[100:200].view(10, 10).t(), [400]),
    "expanded": (lambda b: b[7:8].expand(50, 30), [4]),
    "expanded over nothing": (lambda b: b[7:8].expand(0, 30), [0]),
    "empty, far out": (lambda b: b[10_000:], [0]),
    "empty beside a slice": (lambda b: [b[:0], b[500:500], b[3:5]], [8]),
    "a scalar": (lambda b: b[77], [4]),
    "a parameter": (lambda b: nn.Parameter(b[5:15]), [40]),
    "with attributes, kept whole": (lambda b: attributed(b[5:15]), [40_000]),
    "its bare storage, too": (lambda b: [b[5:15], b.untyped_storage().nbytes(), b.storage()], [40_000]),
    "of two item sizes": (lambda b: bytes_as_two_types(), [200]),
    "two storages": (lambda b: [b[:2], base()[:4], b[4:6]], [16, 16]),
    "one that is negative and conjugate": (lambda b: torch.view_as_complex(b[:20].view(10, 2)).conj()[3:5].imag, [12]),
}  # fmt: skip


def attributed(tensor):
    tensor.note = "kept"
    return tensor


@pytest.mark.parametrize("where", ["path", "stream"])
@pytest.mark.parametrize(("make", "nbytes"), VIEWS.values(), ids=VIEWS)
def test_compact_views(make, nbytes, where, tmp_path):
    obj = make(base())
    path = tmp_path / "model.pt"
    if where == "path":
        fastckpt.save(obj, path, views="compact")
    else:
        path.write_bytes(written(obj, views="compact"))
    assert list(sizes(path.read_bytes()).values()) == nbytes
    assert zipfile.ZipFile(path).testzip() is None
    again = fastckpt.load(path)
    flat = [each for each in flattened(obj) if isinstance(each, torch.Tensor)]
    flat_again = [each for each in flattened(again) if isinstance(each, torch.Tensor)]
    for expected, actual in zip(flat, flat_again, strict=True):
        assert actual.stride() == expected.stride()
        assert torch.equal(actual, expected)
    same(torch_loads(path.read_bytes()), again)


def flattened(obj):
    return obj if isinstance(obj, list) else [obj]


def test_compact_views_share_what_they_shared():
    memory = base()
    a, b, c = torch_loads(written([memory[5:15], memory[10:20], memory[900:910]], views="compact"))
    assert a.untyped_storage()._cdata == b.untyped_storage()._cdata == c.untyped_storage()._cdata
    a[5] = -1
    assert b[0] == -1


def test_compact_is_smaller():
    memory = torch.randn(1_000_000)
    rows = {f"row {i}": memory[i * 1000 : i * 1000 + 10] for i in range(100)}
    whole, compact = written(rows), written(rows, views="compact")
    assert len(whole) > 4_000_000
    assert len(compact) < 30_000
    assert all(torch.equal(rows[name], value) for name, value in torch_loads(compact).items())


# -- dtypes ------------------------------------------------------------------------------------------------------------

FLOATS = [
    getattr(torch, name)
    for name in "float16 bfloat16 float32 float64 float8_e4m3fn float8_e5m2".split()
    if hasattr(torch, name)
]


def mixed():
    memory = torch.linspace(-3, 3, 50)
    return {
        "float32": memory,
        "view": memory[10:30].view(4, 5).t(),
        "float64": torch.linspace(0, 1, 7, dtype=torch.float64),
        "bfloat16": torch.ones(3, dtype=torch.bfloat16),
        "integers": torch.arange(9),
        "complex": torch.ones(2, dtype=torch.complex64),
        "bool": torch.tensor([True, False]),
        "parameter": nn.Parameter(torch.ones(2)),
        "sparse": torch.eye(3).to_sparse(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(0.5),
        "number": 1.5,
    }


ROOMS = {"made ahead": 4 << 20, "some ahead": 400, "in pieces": 0}


@pytest.fixture(params=ROOMS.values(), ids=ROOMS)
def room(request, monkeypatch):
    """How many small blocks are made before anything is written."""
    monkeypatch.setattr("fastckpt.blocks.SMALL_ROOM_NBYTES", request.param)


@pytest.mark.parametrize("views", ["whole", "compact"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dtype(dtype, views, room):
    obj = mixed()
    data = written(obj, dtype=dtype, views=views)
    assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None
    again = torch_loads(data)
    same(again, fastckpt.load(data))
    for name, tensor in obj.items():
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            continue
        expected = tensor.detach().to(dtype) if tensor.is_floating_point() else tensor
        actual = again[name].detach()
        assert actual.dtype == expected.dtype, name
        assert actual.stride() == tensor.stride(), name
        assert torch.equal(actual.to(torch.complex128), expected.to(torch.complex128)), name
    assert again["view"].untyped_storage()._cdata == again["float32"].untyped_storage()._cdata
    assert again["sparse"].dtype == dtype
    assert again["parameter"].requires_grad


def test_small_blocks(room, tmp_path):
    """Aligned, whatever stands between them, and none of them larger than what is left of the room."""
    obj = [torch.full((n,), n / 2, dtype=torch.float64) for n in (*range(20), 1500, 3000, 5, 0, 7)]
    obj += [torch.arange(n) for n in range(3)]
    for views in ("whole", "compact"):
        for dtype in (torch.float32, torch.float8_e4m3fn):
            fastckpt.save(obj, tmp_path / "by position", dtype=dtype, views=views)
            in_order = written(obj, dtype=dtype, views=views)
            for data in ((tmp_path / "by position").read_bytes(), in_order):
                assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None
                for expected, found in zip(obj, torch_loads(data), strict=True):
                    expected = expected.to(dtype) if expected.is_floating_point() else expected
                    assert expected.dtype == found.dtype
                    assert torch.equal(expected.double(), found.double())


def test_dtype_in_pieces(monkeypatch):
    from fastckpt import blocks

    monkeypatch.setattr(blocks, "STAGE_NBYTES", 1000)
    tensor = torch.arange(10_001, dtype=torch.float64)
    assert torch.equal(torch_loads(written(tensor, dtype=torch.float32)), tensor.float())


@pytest.mark.parametrize("views", ["whole", "compact"])
@pytest.mark.parametrize("stage", [24, 1000], ids=["3 elements", "125 elements"])
def test_many_ranges_in_pieces(monkeypatch, stage, views, room):
    """Ranges that fit into a stage together, just not, and not at all."""
    from fastckpt import blocks

    monkeypatch.setattr(blocks, "STAGE_NBYTES", stage)
    memory = torch.arange(2000, dtype=torch.float64)
    obj = [memory[10 * i : 10 * i + n] for i, n in enumerate((1, 1, 1, 2, 2, 3, 4, 7, 0, 9) * 9)]
    obj.append(memory[1000:1900])
    for expected, actual in zip(
        obj, torch_loads(written(obj, dtype=torch.float32, views=views)), strict=True
    ):
        assert torch.equal(expected.float(), actual)


@pytest.mark.parametrize("numel", [1, 3_000_000], ids=["at the bound of one thread", "large"])
def test_dtype_in_a_forked_process(tmp_path, numel):
    """torch's own casts hang there, once the parent has computed with torch; small ones do not."""
    from fastckpt.blocks import SERIAL_NUMEL

    whole = torch.arange(3_000_000.0) * 2
    tensor = whole[: max(numel, SERIAL_NUMEL)].clone()
    process = os.fork()
    if not process:
        fastckpt.save(tensor, tmp_path / "model.pt", dtype=torch.float16)
        os._exit(0)
    for _ in range(300):
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            break
        time.sleep(0.1)
    else:
        os.kill(process, signal.SIGKILL)
    assert (ended, status) == (process, 0)
    assert torch.equal(torch.load(tmp_path / "model.pt", weights_only=True), tensor.half())


@pytest.mark.parametrize("dtype", ["float16", torch.int8, torch.complex64, torch.bool, 5], ids=str)
def test_dtypes_that_are_none(dtype):
    with pytest.raises(TypeError, match="a floating"):
        written({}, dtype=dtype)


class OwnTensor(torch.Tensor):
    pass


def test_what_a_cast_would_break():
    young = torch.ones(8, dtype=torch.float8_e5m2)
    with pytest.raises(RuntimeError, match="clone one of them"):
        written([young, young.view(torch.uint8)], dtype=torch.float16)
    by_channel = torch.quantize_per_channel(
        torch.ones(3, 2), torch.tensor([0.1, 0.2, 0.3]), torch.zeros(3), 0, torch.quint8
    )
    with pytest.raises(TypeError, match="scales"):
        written(by_channel, dtype=torch.float16)
    written([young, young.view(torch.uint8)], dtype=torch.float8_e5m2)
    for bare in (torch.ones(2).storage(), attributed(torch.ones(2))):
        assert torch_loads(written(bare, dtype=torch.float16)).dtype == torch.float16
        with pytest.raises(TypeError, match="no storage class"):
            written(bare, dtype=torch.float8_e5m2)
    for held in (attributed(torch.ones(2).to(torch.float8_e5m2)), young.as_subclass(OwnTensor)):
        with pytest.raises(TypeError, match="storage of bytes"):
            written(held, dtype=torch.float16)
        written(held, dtype=torch.float8_e5m2)


# -- metadata ----------------------------------------------------------------------------------------------------------

METADATA = {
    "a dict": {"step": 5, "loss": 0.25, "tags": ["a", None, True], "größe": "\ud800"},
    "a text": "text",
    "zero": 0,
    "an empty list": [],
}


@pytest.mark.parametrize("metadata", METADATA.values(), ids=METADATA)
def test_metadata(metadata, tmp_path):
    path = tmp_path / "model.pt"
    fastckpt.save(TENSORS, path, metadata=metadata)
    with fastckpt.open(path) as checkpoint:
        assert checkpoint.info["metadata"] == metadata
    same(TENSORS, torch.load(path, weights_only=True))
    same(TENSORS, fastckpt.load(path))


@pytest.mark.parametrize(
    ("metadata", "error"),
    [({1: {2}}, TypeError), (object(), TypeError), (float("nan"), ValueError), ("x" * (16 << 20), ValueError)],
    ids=["a set", "an object", "nan", "too much"],
)  # fmt: skip
def test_metadata_that_json_cannot_say(metadata, error, tmp_path):
    with pytest.raises(error, match=r"^metadata: "):
        fastckpt.save(TENSORS, tmp_path / "model.pt", metadata=metadata)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "text",
    [b"{", b"\xff", b"[" * 100_000, b"", b"NaN", b'{"a": -Infinity}', b"[1e999]", b"9" * 5000],
    ids=["cut", "latin", "deep", "empty", "nan", "infinity", "too large", "too many digits"],
)
def test_a_metadata_record_of_somebody_elses(text, tmp_path):
    path = tmp_path / "model.pt"
    path.write_bytes(written(TENSORS))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("archive/metadata.json", text)
    with fastckpt.open(path) as checkpoint:
        assert checkpoint.info["metadata"] is None
        assert len(checkpoint) == 3


def test_no_metadata(tmp_path):
    torch.save(TENSORS, tmp_path / "zip.pt")
    torch.save(TENSORS, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    for name in ("zip.pt", "legacy.pt"):
        with fastckpt.open(tmp_path / name) as checkpoint:
            assert checkpoint.info["metadata"] is None


# -- progress ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("serial", ["0", "100000000"], ids=["threads", "serial"])
@pytest.mark.parametrize("crc32", [True, False], ids=["with crc32", "without"])
@pytest.mark.parametrize("where", ["path", "stream"])
def test_progress(where, crc32, serial, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTCKPT_SERIAL_BELOW", serial)
    told = []
    obj = {
        "a": torch.ones(3_000_000),
        "b": torch.ones(5),
        "c": torch.ones(2_000_000, dtype=torch.float64),
    }
    total = sum(tensor.nbytes for tensor in obj.values())
    path = tmp_path / "model.pt" if where == "path" else io.BytesIO()
    fastckpt.save(obj, path, progress=lambda *args: told.append(args), crc32=crc32)
    assert told[-1][:2] == (total, total)
    assert {each[1:] for each in told} == {(total, str(path) if where == "path" else "<BytesIO>")}
    done = [each[0] for each in told]
    assert done == sorted(done)
    if where == "stream":
        assert len(done) > 4


def test_progress_of_nothing():
    told = []
    written({}, progress=lambda *args: told.append(args))
    assert told == [(0, 0, "<BytesIO>")]


def test_progress_that_fails(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTCKPT_SERIAL_BELOW", "0")

    def fail(*args):
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        fastckpt.save(TENSORS, tmp_path / "model.pt", progress=fail)
    assert os.listdir(tmp_path) == []


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 7, 64, 1000, None])
def test_threads(threads, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTCKPT_SERIAL_BELOW", "0")
    path = tmp_path / "archive.pt"
    fastckpt.save(TENSORS, path, threads=threads)
    assert path.read_bytes() == written(TENSORS, threads=1)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickle_protocol(protocol):
    data = written(TENSORS, pickle_protocol=protocol)
    assert zipfile.ZipFile(io.BytesIO(data)).read("archive/data.pkl")[:2] == bytes([0x80, protocol])
    same(TENSORS, torch_loads(data))


WRONG = {
    "protocol 1": ({"pickle_protocol": 1}, ValueError, "pickle_protocol=1: 2 to 5"),
    "protocol 6": ({"pickle_protocol": 6}, ValueError, "pickle_protocol=6"),
    "protocol as text": ({"pickle_protocol": "2"}, TypeError, "str"),
    "no thread": ({"threads": 0}, ValueError, "at least 1"),
    "half a thread": ({"threads": 0.5}, TypeError, "a number is expected"),
    "alignment 0": ({"alignment": 0}, ValueError, "alignment=0"),
    "alignment -64": ({"alignment": -64}, ValueError, "alignment=-64"),
    "alignment of a fraction": ({"alignment": 64.0}, TypeError, "float"),
    "alignment beyond all": ({"alignment": 2**70}, ValueError, "alignment="),
    "another view": ({"views": "part"}, ValueError, "expected one of: whole, compact"),
    "progress": ({"progress": 5}, TypeError, "progress=5"),
}


@pytest.mark.parametrize(("options", "error", "words"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(options, error, words, tmp_path):
    path = tmp_path / "model.pt"
    path.write_bytes(b"old")
    with pytest.raises(error, match=words):
        fastckpt.save(TENSORS, path, **options)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["model.pt"]


@pytest.mark.parametrize(
    "f", [None, 1.5, object(), ["model.pt"], True], ids=["None", "float", "object", "list", "True"]
)
def test_wrong_destinations(f):
    with pytest.raises(TypeError, match="a path or a binary file object is expected"):
        fastckpt.save(TENSORS, f)


# -- memory ------------------------------------------------------------------------------------------------------------

PEAK = """
import os, sys, torch, fastckpt

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])

obj = {"large": torch.ones(20_000_000), "rows": [torch.ones(16_000) for _ in range(1000)]}
SAVES = {
    "a path": lambda: fastckpt.save(obj, sys.argv[1]),
    "a cast": lambda: fastckpt.save(obj, sys.argv[1], dtype=torch.float64),
    "compact views": lambda: fastckpt.save([obj["large"][5:-9], obj["rows"]], sys.argv[1], views="compact"),
    "a stream": lambda: fastckpt.save(obj, "/dev/null"),
}
for name, save in SAVES.items():
    save()  # what is imported and made once does not count
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # peak() counts from here
    before = peak()
    save()
    print(name, peak() - before >> 10, sep=":")
"""


@needs_true_memory
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc/self")
def test_peak_memory(tmp_path):
    """At most 16 MiB beyond an object of 144 MB in a thousand and one storages."""
    arguments = [sys.executable, "-c", PEAK, str(tmp_path / "model.pt")]
    environment = {**os.environ, "FASTCKPT_HUGEPAGES": "0"}
    found = subprocess.run(arguments, capture_output=True, text=True, check=True, env=environment)
    peaks = dict(line.split(":") for line in found.stdout.splitlines())
    assert len(peaks) == 4
    assert {name: mib for name, mib in peaks.items() if int(mib) > 16} == {}


class TestStoragesThatChange:
    """What a tensor's memory is when it is written: torch.save holds the storage that it met."""

    def test_another_storage_while_it_is_pickled(self):
        class Late:
            def __init__(self, tensor):
                self.tensor = tensor

            def __reduce__(self):
                self.tensor.data = torch.zeros(1)
                self.others = [torch.full((1 << 18,), 7.0) for _ in range(4)]
                return collections.OrderedDict, ()

        tensor = torch.arange(1 << 18, dtype=torch.float32)
        expected = tensor.clone()
        file = io.BytesIO()
        fastckpt.save({"tensor": tensor, "late": Late(tensor)}, file)
        assert torch.equal(torch_loads(file.getvalue())["tensor"], expected)

    def test_a_storage_that_is_resized_while_it_is_pickled(self):
        class Late:
            def __init__(self, tensor):
                self.tensor = tensor

            def __reduce__(self):
                self.tensor.untyped_storage().resize_(0)
                return collections.OrderedDict, ()

        tensor = torch.arange(1000.0)
        with pytest.raises(RuntimeError, match="resized while it was being saved"):
            fastckpt.save({"tensor": tensor, "late": Late(tensor)}, io.BytesIO())

    @pytest.mark.parametrize("nbytes", [0, 16])
    @pytest.mark.parametrize("dtype", [None, torch.float16], ids=str)
    def test_compact_views_beyond_their_storage(self, nbytes, dtype):
        tensor = torch.arange(1000.0)
        tensor.untyped_storage().resize_(nbytes)
        file = io.BytesIO()
        fastckpt.save({"tensor": tensor}, file, views="compact", dtype=dtype)
        with zipfile.ZipFile(file) as archive:
            assert archive.testzip() is None
            expected = nbytes if dtype is None else nbytes // 2
            assert archive.getinfo("archive/data/0").file_size == expected

    def test_other_views_in_the_second_round(self):
        class Counting:
            def __init__(self, base):
                self.base, self.i = base, 0

            def __reduce__(self):
                self.i += 1
                return list, (), None, iter([self.base[self.i * 100 : self.i * 100 + 3]])

        with pytest.raises(RuntimeError, match="gave other tensors the second time"):
            fastckpt.save(Counting(torch.arange(1000.0)), io.BytesIO(), views="compact")
