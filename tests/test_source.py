"""Everything that can be handed to load: paths, descriptors, memory, and file objects of every sort."""

# ruff: noqa: SIM115 - tables hold ways to open files; the tests close them

import bz2
import contextlib
import errno
import fcntl
import gc
import gzip
import io
import lzma
import mmap
import os
import pathlib
import re
import socket
import tarfile
import tempfile
import threading
import zipfile

import numpy as np
import pytest
import torch

import fastckpt
from fastckpt.errors import ChecksumError, FormatError
from fastckpt.source import ObjectSource, open_source
from support import same

OBJECT = {
    "w": torch.arange(600.0).reshape(20, 30),
    "b": torch.arange(7),
    "e": torch.empty(0, 3),
    "step": 17,
}


def saved(obj, *, zipped=True):
    out = io.BytesIO()
    torch.save(obj, out, _use_new_zipfile_serialization=zipped)
    return out.getvalue()


ZIP, LEGACY = saved(OBJECT), saved(OBJECT, zipped=False)
FORMS = {"zip": ZIP, "legacy": LEGACY}
JUNK = b"in front of it"


@pytest.fixture(params=FORMS.values(), ids=FORMS)
def data(request):
    return request.param


@pytest.fixture
def path(tmp_path, data):
    path = tmp_path / "model.pt"
    path.write_bytes(data)
    return path


def descriptors():
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def no_leak():
    """No descriptor more than before, and no garbage collection is needed for that."""
    before = descriptors()
    yield
    assert descriptors() == before


class Reads:
    """A file object of a user: only what is needed, and each answer is made by ``answer(wanted bytes)``."""

    def __init__(self, data, answer=lambda part: part):
        self.inner, self.answer = io.BytesIO(data), answer

    def read(self, n=-1):
        return self.answer(self.inner.read(n))

    def seek(self, offset, whence=0):
        return self.inner.seek(offset, whence)

    def tell(self):
        return self.inner.tell()


class SevenBytes(io.RawIOBase):
    """A raw stream that never gives more than seven bytes."""

    def __init__(self, data):
        self.inner = io.BytesIO(data)

    def readinto(self, view):
        return self.inner.readinto(memoryview(view)[:7])

    def seek(self, offset, whence=0):
        return self.inner.seek(offset, whence)

    def tell(self):
        return self.inner.tell()

    def seekable(self):
        return True

    def readable(self):
        return True


class SubBytesIO(io.BytesIO):
    pass


class PathLike:
    def __init__(self, path):
        self.path = path

    def __fspath__(self):
        return self.path


PATHS = {
    "str": os.fspath,
    "bytes": os.fsencode,
    "pathlib": pathlib.Path,
    "PathLike of str": lambda p: PathLike(os.fspath(p)),
    "PathLike of bytes": lambda p: PathLike(os.fsencode(p)),
}


@pytest.mark.parametrize("spell", PATHS.values(), ids=PATHS)
def test_paths(path, spell):
    with no_leak():
        same(OBJECT, fastckpt.load(spell(path)))
        with fastckpt.open(spell(path)) as ckpt:
            assert ckpt.source.name == os.fspath(path)


MEMORY = {
    "bytes": bytes,
    "bytearray": bytearray,
    "memoryview": memoryview,
    "memoryview, read-only of a bytearray": lambda d: memoryview(bytearray(d)).toreadonly(),
    "memoryview, sliced": lambda d: memoryview(JUNK + d + JUNK)[len(JUNK) : -len(JUNK)],
    "memoryview, of chars": lambda d: memoryview(d).cast("c"),
    "memoryview, two dimensions": lambda d: memoryview(d).cast("B", (1, len(d))),
    "numpy's memory": lambda d: np.frombuffer(d, np.uint8).data,
    "BytesIO": io.BytesIO,
    "BytesIO subclass": SubBytesIO,
    "BufferedReader of a BytesIO": lambda d: io.BufferedReader(io.BytesIO(d)),
    "seven bytes at a time": SevenBytes,
    "seven bytes, buffered": lambda d: io.BufferedReader(SevenBytes(d), 64),
    "read, seek and tell only": Reads,
    "read gives bytearrays": lambda d: Reads(d, bytearray),
    "read gives memoryviews": lambda d: Reads(d, memoryview),
}


@pytest.mark.parametrize("wrap", MEMORY.values(), ids=MEMORY)
@pytest.mark.parametrize("threads", [None, 3])
def test_memory_and_objects(data, wrap, threads, monkeypatch):
    if threads:
        monkeypatch.setenv("FASTCKPT_SERIAL_BELOW", "0")
    same(OBJECT, fastckpt.load(wrap(data), threads=threads))
    with fastckpt.open(wrap(data)) as ckpt:
        assert ckpt["w"][3, 4].item() == 94


def test_memoryview_cast_to_items():
    """Items of any size will do; whole ones only, so the archive gets a few bytes behind it."""
    view = memoryview(ZIP + bytes(-len(ZIP) % 8)).cast("Q")
    same(OBJECT, fastckpt.load(view, nbytes=len(ZIP)))


def test_memoryview_with_gaps(data):
    with pytest.raises(TypeError, match="contiguous"):
        fastckpt.load(memoryview(data + data)[::2])


def test_mmap_object(path, data):
    with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        result = fastckpt.load(mapping)
        with fastckpt.open(mapping) as ckpt:
            assert ckpt["b"][2].item() == 2
    same(OBJECT, result)  # the mapping could be closed, and what was loaded has memory of its own


def test_memory_is_let_go(data):
    """Once load is back, also with an error, the buffer may change its size."""
    buffer = bytearray(data)
    fastckpt.load(buffer)
    buffer.append(0)
    with fastckpt.open(buffer):
        pass
    buffer.append(0)
    del buffer[200:]
    with pytest.raises(FormatError) as caught:
        fastckpt.load(buffer)
    buffer.append(0)
    del caught
    stream = io.BytesIO(data[:300])
    with pytest.raises(FormatError):
        fastckpt.load(stream)
    stream.truncate(10)


REGIONS = {
    "path": os.fspath,
    "descriptor": lambda p: os.open(p, os.O_RDONLY),
    "bytes": lambda p: p.read_bytes(),
    "memoryview": lambda p: memoryview(p.read_bytes()),
    "BytesIO": lambda p: io.BytesIO(p.read_bytes()),
    "file": lambda p: open(p, "rb"),
    "object": lambda p: Reads(p.read_bytes()),
}


@pytest.mark.parametrize("wrap", REGIONS.values(), ids=REGIONS)
class TestRegion:
    """``offset`` and ``nbytes`` of every kind of source."""

    @pytest.fixture
    def make(self, wrap, tmp_path):
        made = []

        def of(content):
            path = tmp_path / "region"
            path.write_bytes(content)
            made.append(wrap(path))
            return made[-1]

        yield of
        for f in made:
            if isinstance(f, int):
                os.close(f)
            elif hasattr(f, "close"):
                f.close()

    @pytest.mark.parametrize("behind", [b"", b"x" * 70_000], ids=["at the end", "in the middle"])
    def test_region(self, make, data, behind):
        f = make(JUNK + data + behind)
        region = {"offset": len(JUNK), "nbytes": len(data)}
        same(OBJECT, fastckpt.load(f, **region))
        if hasattr(f, "seek"):
            f.seek(0)
        with fastckpt.open(f, **region) as ckpt:
            same(OBJECT, ckpt.read())

    def test_offset_alone(self, make, data):
        same(OBJECT, fastckpt.load(make(JUNK + data), offset=len(JUNK)))

    def test_more_than_there_is(self, make, data):
        f = make(JUNK + data)
        with no_leak(), pytest.raises(FormatError, match="asked for"):
            fastckpt.load(f, offset=len(JUNK), nbytes=len(data) + 1)

    def test_less_than_there_is(self, make, data):
        with pytest.raises(FormatError):
            fastckpt.load(make(data), nbytes=len(data) - 1)

    def test_behind_the_end(self, make, data):
        with pytest.raises(FormatError, match="empty"):
            fastckpt.load(make(data), offset=len(data) + 10)

    @pytest.mark.parametrize(
        "region", [{"offset": -1}, {"nbytes": -1}, {"offset": 5, "nbytes": -5}]
    )
    def test_negative(self, make, data, region):
        with pytest.raises(ValueError, match="negative"):
            fastckpt.load(make(data), **region)


def test_descriptor(path, data):
    """A descriptor is read from its beginning, wherever it stands, and stays where it is."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.lseek(fd, 5, os.SEEK_SET)
        with no_leak():
            same(OBJECT, fastckpt.load(fd))
        assert os.lseek(fd, 0, os.SEEK_CUR) == 5
    finally:
        os.close(fd)
    with pytest.raises(OSError, match=r"Bad file descriptor") as caught:
        fastckpt.load(fd)
    assert caught.value.errno == errno.EBADF


def test_descriptor_may_be_closed_after_open(path):
    fd = os.open(path, os.O_RDONLY)
    with fastckpt.open(fd) as ckpt:
        os.close(fd)
        same(OBJECT["w"], ckpt["w"].read())


def test_descriptor_of_a_pipe():
    reading, writing = os.pipe()
    try:
        with no_leak(), pytest.raises(OSError, match="read it into memory first"):
            fastckpt.load(reading)
    finally:
        os.close(reading)
        os.close(writing)


# -- file objects


HANDLES = {
    "rb": lambda p: open(p, "rb"),
    "unbuffered": lambda p: open(p, "rb", buffering=0),
    "small buffer": lambda p: open(p, "rb", buffering=16),
    "r+b": lambda p: open(p, "r+b"),
    "r+b, unbuffered": lambda p: open(p, "r+b", buffering=0),
    "FileIO": lambda p: io.FileIO(p),
    "fdopen": lambda p: os.fdopen(os.open(p, os.O_RDONLY), "rb"),
    "BytesIO": lambda p: io.BytesIO(p.read_bytes()),
    "BytesIO subclass": lambda p: SubBytesIO(p.read_bytes()),
    "read, seek and tell only": lambda p: Reads(p.read_bytes()),
    "seven bytes": lambda p: SevenBytes(p.read_bytes()),
}


@pytest.fixture(params=HANDLES.values(), ids=HANDLES)
def handle(request, tmp_path):
    """Opens a file of the given content; closed at the end."""
    with contextlib.ExitStack() as stack:

        def opened(content):
            path = tmp_path / "handle"
            path.write_bytes(content)
            f = request.param(path)
            return stack.enter_context(f) if hasattr(f, "close") else f

        yield opened


def test_position_after_a_load(handle, data):
    """Read from where the handle stands, left where the checkpoint ends: behind an archive's comment or a stream's last storage."""
    f = handle(JUNK + data)
    f.seek(len(JUNK))
    with no_leak():
        same(OBJECT, fastckpt.load(f))
    assert f.tell() == len(JUNK + data)
    assert f.read(1) == b""


def test_two_streams_in_one_file(handle):
    other = {"second": torch.ones(3)}
    f = handle(JUNK + LEGACY + saved(other, zipped=False) + b"tail")
    f.seek(len(JUNK))
    same(OBJECT, fastckpt.load(f))
    same(other, fastckpt.load(f))
    assert f.read() == b"tail"


def test_as_torch_leaves_it(path):
    """The position after a load is torch's own."""
    with open(path, "rb") as ours, open(path, "rb") as theirs:
        same(torch.load(theirs), fastckpt.load(ours))
        if path.read_bytes()[:2] != b"PK":
            assert ours.tell() == theirs.tell()


def test_position_after_a_failure(data):
    """A failure leaves a real file where it was: nothing seeks in it."""
    with tempfile.TemporaryFile() as f:
        f.write(JUNK + data[:-300])
        f.seek(len(JUNK))
        with pytest.raises(FormatError):
            fastckpt.load(f)
        assert f.tell() == len(JUNK)


def test_open_leaves_the_position(handle, data):
    f = handle(data)
    with fastckpt.open(f) as ckpt:
        same(OBJECT["w"], ckpt["w"].read())
        if isinstance(f, io.IOBase) and not isinstance(f, SevenBytes):
            assert not f.closed
    assert not getattr(f, "closed", False)


def test_handle_may_be_closed_after_open(path):
    with open(path, "rb") as f:
        ckpt = fastckpt.open(f)
    with ckpt:
        same(OBJECT, ckpt.read())


def test_written_and_not_flushed(tmp_path, data):
    """What a handle of a user still holds back counts."""
    with open(tmp_path / "f", "w+b") as f:
        f.write(data)
        f.seek(0)
        same(OBJECT, fastckpt.load(f))
    with tempfile.NamedTemporaryFile() as f:
        f.write(JUNK + data)
        f.seek(len(JUNK))
        same(OBJECT, fastckpt.load(f))
        assert f.tell() == len(JUNK + data)


@pytest.mark.parametrize("max_size", [10, 1 << 20], ids=["on disk", "in memory"])
def test_spooled(data, max_size):
    with tempfile.SpooledTemporaryFile(max_size) as f:
        f.write(data)
        f.seek(0)
        same(OBJECT, fastckpt.load(f))


@pytest.mark.parametrize("module", [gzip, bz2, lzma], ids=lambda m: m.__name__)
def test_compressed_handles(tmp_path, data, module):
    path = tmp_path / "model.pt.packed"
    path.write_bytes(module.compress(data))
    with module.open(path) as f, no_leak():
        same(OBJECT, fastckpt.load(f))
        assert f.tell() == len(data)
        f.seek(0)
        with fastckpt.open(f) as ckpt:
            assert ckpt["b"][-1].item() == 6
    with pytest.raises(FormatError, match=f"{module.__name__.replace('lzma', 'xz|lzma')}"):
        fastckpt.load(path)


def test_members_of_archives(tmp_path, data):
    with tarfile.open(tmp_path / "a.tar", "w") as packed:
        info = tarfile.TarInfo("model.pt")
        info.size = len(data)
        packed.addfile(info, io.BytesIO(data))
    with tarfile.open(tmp_path / "a.tar") as packed:
        same(OBJECT, fastckpt.load(packed.extractfile("model.pt")))
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(tmp_path / "a.zip", "w", method) as packed:
            packed.writestr("model.pt", data)
        with zipfile.ZipFile(tmp_path / "a.zip") as packed, packed.open("model.pt") as f:
            same(OBJECT, fastckpt.load(f))


@pytest.mark.parametrize(
    "wrap", [Reads, SevenBytes, SubBytesIO, io.BytesIO], ids=lambda c: c.__name__
)
def test_threads_share_an_object(data, wrap):
    """One object, one position, many readers."""
    with fastckpt.open(wrap(data)) as ckpt:
        rows, failed = [None] * 20, []

        def read(row):
            try:
                rows[row] = ckpt["w"][row]
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=read, args=(row,)) for row in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        same(OBJECT["w"], torch.stack(rows))


# -- objects that misbehave


class ReadsInto(Reads):
    """``readinto`` reads, and claims what ``claim(bytes read, bytes wanted)`` says."""

    def __init__(self, data, claim):
        super().__init__(data)
        self.claim = claim

    def readinto(self, view):
        return self.claim(self.inner.readinto(view), len(view))


class SometimesNone(Reads):
    """A stream that is not always ready."""

    calls = 0

    def read(self, n=-1):
        self.calls += 1
        return None if n and self.calls % 3 else super().read(n)


class NoSeek(io.RawIOBase):
    def readable(self):
        return True

    def readinto(self, view):
        return 0


class OnlyRead:
    def read(self, n=-1):
        return b""


MISBEHAVING = {
    "None now and then": (lambda: SometimesNone(ZIP), None, ""),
    "None for ever": (lambda: Reads(ZIP, lambda part: None), FormatError, "only 0 are there"),
    "nothing": (lambda: Reads(ZIP, lambda part: b""), FormatError, "only 0 are there"),
    "too much": (lambda: Reads(ZIP, lambda part: part + b"x"), OSError, r"read\(\d+\) gave \d+ bytes"),
    "text": (lambda: Reads(ZIP, lambda part: part.decode("latin-1")), TypeError, "text mode; open it with 'rb'"),
    "a list": (lambda: Reads(ZIP, list), TypeError, "list"),
    "readinto that claims too much": (lambda: ReadsInto(ZIP, lambda got, n: n + 1), OSError, "readinto"),
    "readinto that claims a negative count": (lambda: ReadsInto(ZIP, lambda got, n: -1), OSError, "readinto"),
    "readinto that is not there": (lambda: NotImplementedReadInto(ZIP), None, ""),
    "cannot seek": (NoSeek, TypeError, "cannot seek; read it into memory first"),
    "has read only": (OnlyRead, TypeError, "cannot seek; read it into memory first"),
    "raises": (lambda: Reads(ZIP, raising), OSError, "the cable"),
}  # fmt: skip


class NotImplementedReadInto(Reads):
    def readinto(self, view):
        raise NotImplementedError


def raising(part):
    raise OSError(errno.EIO, "the cable is out")


@pytest.mark.parametrize(("make", "error", "words"), MISBEHAVING.values(), ids=MISBEHAVING)
def test_misbehaving_objects(make, error, words):
    if error is None:
        same(OBJECT, fastckpt.load(make()))
        return
    with no_leak(), pytest.raises(error, match=words):
        fastckpt.load(make())
    with no_leak(), pytest.raises(error, match=words):
        fastckpt.open(make())


def closed_handle(p):
    f = open(p, "rb")
    f.close()
    return f


def closed_bytes(p):
    f = io.BytesIO(p.read_bytes())
    f.close()
    return f


def pipe_handle(p):
    reading, writing = os.pipe()
    os.close(writing)
    return os.fdopen(reading, "rb")


HOPELESS = {
    "text mode": (lambda p: open(p), TypeError, "text mode; open it with 'rb'"),
    "text mode, latin-1": (lambda p: open(p, encoding="latin-1"), TypeError, "text mode; open it with 'rb'"),
    "StringIO": (lambda p: io.StringIO("PK\3\4"), TypeError, "text mode; open it with 'rb'"),
    "closed file": (closed_handle, ValueError, "closed"),
    "closed BytesIO": (closed_bytes, ValueError, "closed"),
    "write only": (lambda p: open(p.with_name("new"), "wb"), OSError, "not readable|read"),
    "pipe": (pipe_handle, TypeError, "read it into memory first"),
    "None": (lambda p: None, TypeError, "NoneType"),
    "True": (lambda p: True, TypeError, "bool"),
    "a list": (lambda p: [p], TypeError, "list"),
    "an array": (lambda p: np.zeros(3), TypeError, "ndarray"),
    "a tensor": (lambda p: torch.zeros(3), TypeError, "Tensor"),
    "a float": (lambda p: 1.5, TypeError, "float"),
    "empty path": (lambda p: "", FileNotFoundError, "No such file"),
    "NUL in a path": (lambda p: "a\0b", ValueError, "null byte"),
    "missing": (lambda p: p.with_name("missing.pt"), FileNotFoundError, "No such file.*missing.pt"),
    "missing folder": (lambda p: p / "x", NotADirectoryError, "model.pt/x"),
    "folder": (lambda p: p.parent, IsADirectoryError, "a folder without pytorch_model.bin"),
    "/dev/zero": (lambda p: "/dev/zero", OSError, "not a regular file; copy what it holds"),
    "/dev/null": (lambda p: "/dev/null", OSError, "not a regular file; copy what it holds"),
    "missing bytes path": (lambda p: os.fsencode(p.with_name("missing")), FormatError, "plain text.*begins with"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "error", "words"), HOPELESS.values(), ids=HOPELESS)
@pytest.mark.parametrize("verb", [fastckpt.load, fastckpt.open], ids=["load", "open"])
def test_hopeless(tmp_path, make, error, words, verb):
    path = tmp_path / "model.pt"
    path.write_bytes(ZIP)
    f = make(path)
    try:
        with no_leak(), pytest.raises(error, match=words):
            verb(f)
    finally:
        if hasattr(f, "close"):
            f.close()


def test_socket(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the name of a socket must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s")
        with no_leak(), pytest.raises(OSError, match="'s'"):
            fastckpt.load("s")


def test_missing_has_name_and_errno(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        fastckpt.load(tmp_path / "missing.pt")
    assert caught.value.errno == errno.ENOENT
    assert caught.value.filename == os.fspath(tmp_path / "missing.pt")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_forbidden(path):
    path.chmod(0)
    with pytest.raises(PermissionError, match=r"model\.pt"):
        fastckpt.load(path)


def test_fifo(tmp_path, data):
    """A pipe with a name can be read once, from front to back; that is enough."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(data,))
    writer.start()
    with no_leak():
        same(OBJECT, fastckpt.load(path))
    writer.join()


# -- the file changes


def test_symlink(path):
    link = path.with_name("link.pt")
    link.symlink_to(path)
    with fastckpt.open(link) as ckpt:
        link.unlink()
        link.symlink_to("/nowhere")
        same(OBJECT, ckpt.read())
    with pytest.raises(FileNotFoundError, match=r"link\.pt"):
        fastckpt.load(link)


@pytest.mark.parametrize("change", ["unlink", "replace", "rename"])
def test_the_name_goes_away(path, change):
    """What was opened is read, whatever happens to its name."""
    with fastckpt.open(path) as ckpt:
        if change == "unlink":
            path.unlink()
        elif change == "replace":
            other = path.with_name("other")
            other.write_bytes(saved({"w": torch.zeros(1)}))
            other.replace(path)
        else:
            path.rename(path.with_name("elsewhere"))
        same(OBJECT, ckpt.read())
        assert ckpt["w"][1, 1].item() == 31


@pytest.mark.parametrize("nbytes", [0, 100, 700])
def test_truncated_after_open(path, nbytes):
    """A file that shrinks is an error that says so."""
    with fastckpt.open(path) as ckpt:
        os.truncate(path, nbytes)
        for read in (
            ckpt.read,
            ckpt["w"].read,
            lambda: ckpt["w"][:],
            lambda: ckpt["w"][-1],
            ckpt["w"].numpy,
        ):
            with pytest.raises(FormatError, match="shorter than the") as caught:
                read()
            wanted, got = re.findall(r"(\d+) bytes at .* only (\d+) are", str(caught.value))[0]
            assert int(got) < int(wanted)
        same(OBJECT["e"], ckpt["e"].read())


def test_overwritten_after_open(tmp_path):
    """The checksum tells; a legacy stream has none."""
    path = tmp_path / "model.pt"
    path.write_bytes(ZIP)
    with fastckpt.open(path) as ckpt, open(path, "r+b") as f:
        f.seek(ZIP.index(OBJECT["w"].numpy().tobytes()) + 5)
        f.write(b"?")
        f.flush()
        with pytest.raises(ChecksumError, match="CRC-32"):
            ckpt["w"].read()
        same(OBJECT["b"], ckpt["b"].read())
    with fastckpt.open(path, verify=False) as ckpt:
        ckpt["w"].read()


def test_grown_after_open(path, data):
    with fastckpt.open(path) as ckpt:
        with open(path, "ab") as f:
            f.write(data)
        same(OBJECT, ckpt.read())


def test_object_that_shrinks(data):
    f = Reads(data)
    with fastckpt.open(f) as ckpt:
        f.inner.truncate(300)
        with pytest.raises(FormatError, match="shorter than the"):
            ckpt["w"].read()


def test_bytes_io_cannot_shrink_while_open(data):
    f = io.BytesIO(data)
    with fastckpt.open(f) as ckpt:
        with pytest.raises(BufferError):
            f.truncate(10)
        same(OBJECT, ckpt.read())
    f.truncate(10)


# -- descriptors


def test_one_descriptor_from_open_to_close(path):
    before = descriptors()
    ckpt = fastckpt.open(path)
    assert descriptors() == before + 1
    fd = ckpt.source.fd
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    ckpt.read()
    ckpt["w"][2]
    assert (ckpt.source.fd, descriptors()) == (fd, before + 1)
    ckpt.close()
    assert descriptors() == before
    ckpt.close()


def test_file_objects_lend_their_descriptor(path):
    with open(path, "rb") as f, fastckpt.open(f) as ckpt:
        assert ckpt.source.fd != f.fileno()
        assert fcntl.fcntl(ckpt.source.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_forgotten_handle(path):
    with no_leak():
        ckpt = fastckpt.open(path)
        ckpt["w"].read()
        del ckpt
        gc.collect()


BROKEN = {
    "empty": b"",
    "text": b"hello\n",
    "cut": ZIP[:-200],
    "damaged pickle": ZIP.replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v9"),
    "unknown global": LEGACY.replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v9"),
    "damaged data": ZIP.replace(OBJECT["w"].numpy().tobytes(), bytes(2400)),
    "legacy cut": LEGACY[:-10],
    "tar": bytes(257) + b"ustar" + bytes(762),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize(
    "make",
    [os.fspath, lambda p: open(p, "rb"), lambda p: Reads(p.read_bytes())],
    ids=["path", "file", "object"],
)
def test_no_leak_on_errors(tmp_path, content, make):
    path = tmp_path / "broken"
    path.write_bytes(content)
    f = make(path)
    with no_leak():
        with pytest.raises(ValueError, match=r"broken|Reads"):
            fastckpt.load(f)
        with (
            pytest.raises(ValueError, match=r"broken|Reads"),
            fastckpt.open(f, unknown="error") as ckpt,
        ):
            ckpt.read()
    if hasattr(f, "close"):
        f.close()


@pytest.mark.parametrize(
    "options",
    [
        {"threads": -1},
        {"mmap": True, "map_location": 5},
        {"framework": "jax"},
        {"unknown": "x"},
        {"keys": ["no"]},
        {"keys": 5},
    ],
    ids=repr,
)
def test_no_leak_on_bad_arguments(path, options):
    with no_leak(), pytest.raises((TypeError, ValueError, KeyError)):
        fastckpt.load(path, **options)


@pytest.mark.parametrize("kind", ["path", "descriptor", "file"])
def test_a_failed_open_closes_once(path, kind):
    """A second close, when the error dies, would close a descriptor that meanwhile belongs to somebody else."""
    with open(path, "rb") as f:
        source = {"path": path, "descriptor": f.fileno(), "file": f}[kind]
        before = descriptors()
        try:
            fastckpt.load(source, nbytes=10**9)
        except FormatError as error:
            kept = error
        assert descriptors() == before
        others = [os.open(path, os.O_RDONLY) for _ in range(3)]
        kept.__traceback__ = None
        del kept
        gc.collect()
        for fd in others:
            os.close(fd)


def test_mmap_wants_a_descriptor(path, data):
    same(OBJECT, fastckpt.load(path, mmap=True))
    with open(path, "rb") as f:
        same(OBJECT, fastckpt.load(f, mmap=True))
    for f in (data, io.BytesIO(data), Reads(data)):
        with pytest.raises(ValueError, match="pass its path"):
            fastckpt.load(f, mmap=True)


def test_mapped_region(tmp_path, data):
    """A mapping begins at a page, a checkpoint anywhere; and a whole file is mapped however small the region."""
    path = tmp_path / "region"
    for front in (b"", b"x", b"x" * 4096, b"x" * 5000):
        path.write_bytes(front + data + b"behind")
        with no_leak():
            loaded = fastckpt.load(path, mmap=True, offset=len(front), nbytes=len(data))
            same(OBJECT, loaded)
            loaded["w"].fill_(5)
            del loaded
        assert path.read_bytes() == front + data + b"behind"  # copy on write


def test_finish_is_for_objects_only():
    source = open_source(ZIP)
    source.finish(5)
    assert source.read(0, 2) == b"PK"
    source.close()
    for read in (
        lambda: source.read(0, 1),
        lambda: source.readinto(0, memoryview(bytearray(1))),
        source.check_open,
    ):
        with pytest.raises(ValueError, match="closed"):
            read()


def test_object_source_reads_by_position(data):
    source = ObjectSource(io.BytesIO(JUNK + data), start=len(JUNK))
    assert source.nbytes == len(data)
    assert source.read(10, 5) == data[10:15]
    with pytest.raises(FormatError, match="2 are there"):
        source.read(len(data) - 2, 3)
