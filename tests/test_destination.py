"""Where save writes: paths that are replaced in one step, open files, pipes, anything with write()."""

import contextlib
import errno
import gzip
import io
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import zipfile

import pytest
import torch

import fastckpt
from support import same

OLD = {"which": "old", "a": torch.arange(60_000), "b": torch.ones(3)}
NEW = {"which": "new", "a": torch.arange(90_000) * 2, "b": torch.zeros(7)}

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc/self")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")


@pytest.fixture
def path(tmp_path):
    """A file that is there already."""
    path = tmp_path / "model.pt"
    fastckpt.save(OLD, path)
    return path


@pytest.fixture(params=["nameless", "named"])
def kind(request, monkeypatch):
    """With O_TMPFILE, and without it."""
    if request.param == "named":
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    return request.param


def check(path, expected, *others):
    """The file is whole, and nothing else lies beside it."""
    same(expected, torch.load(path, weights_only=True))
    assert zipfile.ZipFile(path).testzip() is None
    assert sorted(os.listdir(path.parent)) == sorted([path.name, *others])


# -- paths -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_", [str, os.fsencode, lambda p: p], ids=["str", "bytes", "Path"])
def test_a_path(as_, tmp_path, kind):
    fastckpt.save(NEW, as_(tmp_path / "model.pt"))
    check(tmp_path / "model.pt", NEW)
    fastckpt.save(OLD, as_(tmp_path / "model.pt"))
    check(tmp_path / "model.pt", OLD)


def test_a_path_from_here(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    fastckpt.save(NEW, "model.pt")
    fastckpt.save(NEW, "./model.pt")
    check(tmp_path / "model.pt", NEW)


@pytest.mark.parametrize("name", ["x" * 255, "ü" * 127, "a b\n.pt", ".pt", b"\xff.pt"], ids=repr)
def test_odd_names(name, tmp_path, kind):
    folder = os.fspath(tmp_path) if isinstance(name, str) else os.fsencode(tmp_path)
    for obj in (OLD, NEW):
        fastckpt.save(obj, os.path.join(folder, name))
    assert os.listdir(folder) == [name]
    same(NEW, fastckpt.load(os.path.join(folder, name)))


@pytest.mark.parametrize("there", [True, False], ids=["to a file", "to nothing yet"])
def test_a_link_is_followed(there, tmp_path, kind):
    folder = tmp_path / "blobs"
    folder.mkdir()
    link = tmp_path / "model.pt"
    link.symlink_to(os.path.join("blobs", "file"))
    if there:
        fastckpt.save(OLD, folder / "file")
    fastckpt.save(NEW, link)
    assert link.is_symlink()
    check(folder / "file", NEW)


def test_a_link_to_itself(tmp_path):
    link = tmp_path / "model.pt"
    link.symlink_to(link)
    with pytest.raises(OSError, match=r"loop|Too many") as raised:
        fastckpt.save(NEW, link)
    assert raised.value.errno == errno.ELOOP


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o664, 0o400, 0o777])
def test_permissions_stay(mode, path, kind):
    path.chmod(mode)
    fastckpt.save(NEW, path)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    check(path, NEW)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_a_new_file_gets_the_umask(umask, tmp_path, kind):
    before = os.umask(umask)
    try:
        fastckpt.save(NEW, tmp_path / "model.pt")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model.pt").stat().st_mode) == 0o666 & ~umask


@needs_root
def test_the_owner_stays(path, kind):
    os.chown(path, 65534, 65533)
    fastckpt.save(NEW, path)
    assert (path.stat().st_uid, path.stat().st_gid) == (65534, 65533)


@needs_root
def test_another_group_may_do_no_more_than_all(path, kind, monkeypatch):
    """Where owner and group can't be kept, the group's permissions belong to another group."""

    def fchown(*args):
        raise PermissionError(errno.EPERM, "no")

    path.chmod(0o664)
    monkeypatch.setattr(os, "fchown", fchown)
    fastckpt.save(NEW, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_another_name_of_the_file_keeps_the_old_content(path, kind):
    other = path.with_name("other.pt")
    os.link(path, other)
    fastckpt.save(NEW, path)
    check(path, NEW, "other.pt")
    same(OLD, torch.load(other, weights_only=True))


# -- who reads the old file --------------------------------------------------------------------------------------------

READERS = {
    "lazily loaded": lambda path: fastckpt.open(path),
    "mapped": lambda path: fastckpt.load(path, mmap=True),
    "mapped by torch": lambda path: torch.load(path, mmap=True, weights_only=True),
    "loaded": lambda path: fastckpt.load(path),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_saving_over_the_file_that_tensors_come_from(read, path, kind):
    old = read(path)
    if isinstance(old, fastckpt.Checkpoint):
        with old:
            fastckpt.save({"a": old["a"].read(), "new": torch.ones(1)}, path)
            assert torch.equal(old["b"].read(), OLD["b"])
    else:
        fastckpt.save({"a": old["a"], "new": torch.ones(1)}, path)
        assert torch.equal(old["b"], OLD["b"])
    check(path, {"a": OLD["a"], "new": torch.ones(1)})


def test_an_open_reader_goes_on(path, kind):
    with open(path, "rb") as reader:
        head = reader.read(1000)
        fastckpt.save(NEW, path)
        data = head + reader.read()
    same(OLD, fastckpt.load(data))


# -- open files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffering", [-1, 0], ids=["buffered", "raw"])
@pytest.mark.parametrize("mode", ["wb", "w+b", "xb"])
def test_a_file_open_for_writing(mode, buffering, tmp_path):
    path = tmp_path / "model.pt"
    with open(path, mode, buffering=buffering) as file:
        file.write(b"before")
        fastckpt.save(NEW, file)
        position = file.tell()
        file.write(b"behind")
    data = path.read_bytes()
    assert (data[:6], data[position:]) == (b"before", b"behind")
    same(NEW, fastckpt.load(data[6:position]))


def test_a_file_open_for_appending(path):
    old = path.read_bytes()
    with open(path, "ab") as file:
        fastckpt.save(NEW, file)
        assert file.tell() > len(old)
        file.write(b"behind")
    data = path.read_bytes()
    assert (data[: len(old)], data[-6:]) == (old, b"behind")
    same(NEW, fastckpt.load(data[len(old) : -6]))


@pytest.mark.parametrize("read", [0, 10, 100])
def test_a_file_open_for_reading_and_writing(read, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 5_000_000)
    with open(path, "r+b") as file:
        file.read(read)
        fastckpt.save(NEW, file)
        end = file.tell()
        assert file.read(1) == b"x"
    data = path.read_bytes()
    assert len(data) == 5_000_000
    assert data[:read] == b"x" * read
    same(NEW, fastckpt.load(data[read:end]))


@pytest.mark.parametrize("flags", [0, os.O_APPEND], ids=["by position", "appending"])
def test_a_descriptor(flags, tmp_path):
    path = tmp_path / "model.pt"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | flags)
    try:
        os.write(fd, b"before")
        fastckpt.save(NEW, fd)
        os.write(fd, b"behind")
    finally:
        os.close(fd)
    data = path.read_bytes()
    assert (data[:6], data[-6:]) == (b"before", b"behind")
    same(NEW, fastckpt.load(data[6:-6]))


def test_a_descriptor_that_is_closed(tmp_path):
    fd = os.open(tmp_path / "x", os.O_WRONLY | os.O_CREAT)
    os.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        fastckpt.save(NEW, fd)


@pytest.mark.parametrize(
    "make",
    [
        tempfile.TemporaryFile,
        tempfile.NamedTemporaryFile,
        tempfile.SpooledTemporaryFile,
        io.BytesIO,
    ],
)
def test_temporary_files(make):
    with make() as file:
        file.write(b"12345")
        fastckpt.save(NEW, file)
        end = file.tell()
        file.seek(5)
        same(NEW, torch.load(io.BytesIO(file.read(end)), weights_only=True))


def test_gzip(tmp_path):
    with gzip.open(tmp_path / "model.pt.gz", "wb", compresslevel=1) as file:
        fastckpt.save(NEW, file)
    with gzip.open(tmp_path / "model.pt.gz") as file:
        same(NEW, torch.load(file, weights_only=True))


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda path: open(path, "w"), TypeError),  # noqa: SIM115
        (lambda path: tempfile.NamedTemporaryFile("w"), TypeError),  # noqa: SIM115
        (lambda path: io.StringIO(), TypeError),
        (lambda path: open(path, "rb"), OSError),  # noqa: SIM115
        (lambda path: open(path, "rb", buffering=0), OSError),  # noqa: SIM115
    ],
    ids=["text", "temporary text", "StringIO", "read only", "raw and read only"],
)
def test_files_that_take_no_bytes(make, error, path, tmp_path):
    with (
        make(path if error is OSError else tmp_path / "text") as file,
        pytest.raises(error) as raised,
    ):
        fastckpt.save(NEW, file)
    if error is TypeError:
        assert "open it with 'wb'" in str(raised.value)


def test_a_file_that_is_closed(tmp_path):
    file = open(tmp_path / "model.pt", "wb")  # noqa: SIM115
    file.close()
    with pytest.raises(ValueError, match="closed"):
        fastckpt.save(NEW, file)


# -- streams -----------------------------------------------------------------------------------------------------------


class Taking:
    """Takes what ``take(nbytes)`` says, and says so."""

    def __init__(self, take):
        self.take, self.data = take, bytearray()

    def write(self, view):
        taken = self.take(len(view))
        self.data += view[: len(view) if taken is None else max(0, taken)]
        return taken


@pytest.mark.parametrize("take", [lambda n: n, lambda n: None, lambda n: min(n, 1000), lambda n: (n + 1) // 2],
                         ids=["all", "without a word", "a thousand", "half"])  # fmt: skip
def test_short_writes(take):
    file = Taking(take)
    fastckpt.save(NEW, file)
    same(NEW, fastckpt.load(bytes(file.data)))


@pytest.mark.parametrize(
    "take", [lambda n: 0, lambda n: -1, lambda n: n + 1], ids=["nothing", "less", "more"]
)
def test_writes_that_lie(take):
    with pytest.raises(OSError, match=r"write\(\) of \d+ bytes says that it took"):
        fastckpt.save(NEW, Taking(take))


def test_a_stream_that_fails():
    def fail(nbytes):
        raise ZeroDivisionError("own")

    with pytest.raises(ZeroDivisionError, match="own"):
        fastckpt.save(NEW, Taking(fail))


@contextlib.contextmanager
def drained(fd, pause=0):
    """What comes out of a descriptor, read by a thread."""
    found = bytearray()

    def read():
        time.sleep(pause)
        while data := os.read(fd, 50_000):
            found.extend(data)

    thread = threading.Thread(target=read)
    thread.start()
    yield found
    thread.join()


PIPES = {
    "descriptor": lambda fd: fd,
    "file": lambda fd: open(fd, "wb", closefd=False),  # noqa: SIM115
    "raw file": lambda fd: open(fd, "wb", buffering=0, closefd=False),  # noqa: SIM115
}


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "not blocking"])
@pytest.mark.parametrize("wrap", PIPES.values(), ids=PIPES)
def test_a_pipe(wrap, blocking):
    out, into = os.pipe()
    os.set_blocking(into, blocking)
    with drained(out, pause=0.1) as found:
        try:
            file = wrap(into)
            if not isinstance(file, int):
                file.write(b"before")
            fastckpt.save(NEW, file)
            if not isinstance(file, int):
                file.close()
        finally:
            os.close(into)
    os.close(out)
    same(NEW, fastckpt.load(bytes(found.removeprefix(b"before"))))


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "not blocking"])
def test_a_pipe_that_nobody_reads(blocking):
    out, into = os.pipe()
    os.set_blocking(into, blocking)
    os.close(out)
    with pytest.raises(BrokenPipeError):
        fastckpt.save(NEW, into)
    os.close(into)


@pytest.mark.parametrize("buffering", [None, 0], ids=["buffered", "raw"])
def test_a_socket(buffering):
    ours, theirs = socket.socketpair()
    with theirs, drained(theirs.fileno()) as found, ours:
        with ours.makefile("wb", buffering=buffering) as file:
            fastckpt.save(NEW, file)
        ours.shutdown(socket.SHUT_WR)
    same(NEW, fastckpt.load(bytes(found)))


def test_a_socket_that_does_not_wait():
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs, drained(theirs.fileno(), pause=0.1) as found, ours:
        with ours.makefile("wb") as file:
            fastckpt.save(NEW, file)
        ours.shutdown(socket.SHUT_WR)
    same(NEW, fastckpt.load(bytes(found)))


def test_a_named_pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    found = []

    def read():
        with open(path, "rb") as file:
            found.append(file.read())

    thread = threading.Thread(target=read)
    thread.start()
    fastckpt.save(NEW, path)
    thread.join()
    same(NEW, fastckpt.load(found[0]))
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert os.listdir(tmp_path) == ["pipe"]


STDOUT = """
import os, torch, fastckpt
for path in ("/dev/stdout", "/proc/self/fd/1"):
    os.write(1, b"before")
    fastckpt.save({"a": torch.arange(60_000)}, path)
    os.write(1, b"after")
"""


@needs_proc
@pytest.mark.parametrize("mode", ["w+b", "a+b"])
@pytest.mark.parametrize("into", ["a pipe", "a file", "a deleted file"])
def test_a_descriptor_by_its_path(into, mode, tmp_path):
    """It is written where it is: whoever has it open sees what was written, and goes on behind that."""
    if into == "a pipe":
        data = subprocess.run(
            [sys.executable, "-c", STDOUT], capture_output=True, check=True
        ).stdout
    else:
        with open(tmp_path / "out.pt", mode) as file:
            if into == "a deleted file":
                os.unlink(tmp_path / "out.pt")
            subprocess.run([sys.executable, "-c", STDOUT], stdout=file, check=True)
            file.seek(0)
            data = file.read()
        assert os.listdir(tmp_path) == (["out.pt"] if into == "a file" else [])
    first, second, end = (part.removeprefix(b"before") for part in data.split(b"after"))
    assert not end
    for part in (first, second):
        same({"a": torch.arange(60_000)}, fastckpt.load(part))


@needs_proc
def test_a_descriptor_of_another_process(tmp_path):
    """Is a file by another name, and replaced as one."""
    path = tmp_path / "model.pt"
    fastckpt.save(OLD, path)
    script = "import sys; print('open', flush=True); sys.stdin.read()"
    with (
        open(path, "r+b") as file,
        subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[file.fileno()],
        ) as process,
    ):
        process.stdout.readline()
        fastckpt.save(NEW, f"/proc/{process.pid}/fd/{file.fileno()}")
        process.stdin.close()
    same(NEW, fastckpt.load(path))
    assert os.listdir(tmp_path) == ["model.pt"]
