"""What is left when a save fails, is interrupted or killed: the old file, whole, and nothing beside it."""

import errno
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import time
import zipfile

import pytest
import torch

import fastckpt
from fastckpt import destination
from support import same

OLD = {"which": "old", "a": torch.arange(60_000), "b": torch.ones(3)}
NEW = {"which": "new", "a": torch.arange(90_000) * 2, "b": torch.zeros(7)}

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives its rights away")


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


# -- where nothing can be written --------------------------------------------------------------------------------------

IMPOSSIBLE = {
    "no folder": ("missing/model.pt", FileNotFoundError),
    "a folder": ("folder", IsADirectoryError),
    "a folder with a slash": ("folder/", IsADirectoryError),
    "no folder with a slash": ("missing/", IsADirectoryError),
    "a file as a folder": ("model.pt/x.pt", NotADirectoryError),
    "a file with a slash": ("model.pt/", NotADirectoryError),
    "too long a name": ("x" * 300, OSError),
}


@pytest.mark.parametrize(("name", "error"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_no_place(name, error, path):
    (path.parent / "folder").mkdir()
    where = f"{path.parent}/{name}"
    with pytest.raises(error) as raised:
        fastckpt.save(NEW, where)
    assert raised.value.filename == where
    check(path, OLD, "folder")


def test_an_empty_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError):
        fastckpt.save(NEW, "")


def as_nobody(script, *arguments):
    """Run a script that gives up its rights after it has imported all; its output."""
    prefix = "import os, sys, torch, fastckpt\nfastckpt.save({}, os.devnull)\nos.setegid(65534)\nos.seteuid(65534)\n"
    return subprocess.run(
        [sys.executable, "-c", prefix + script, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@needs_root
def test_a_folder_that_is_read_only():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        out = as_nobody(
            "try: fastckpt.save({}, sys.argv[1])\nexcept PermissionError as error: print(error)",
            f"{folder}/model.pt",
        )
        assert "Permission denied" in out
        assert f"{folder}/model.pt" in out
        assert os.listdir(folder) == []


# Modes of a folder and of the file in it, as others than the owner see them; what save is told; what is in the file then.
PROTECTED = {
    "a file that is read-only": (0o777, 0o644, {}, "it is there, and not to be written", "old"),
    "a folder that is read-only": (
        0o755,
        0o666,
        {},
        "a new file has to be made in its folder",
        "old",
    ),
    "a folder that can't be made durable": (
        0o733,
        0o666,
        {"fsync": True},
        "Permission denied",
        "old",
    ),
    "a folder that is closed to reading": (0o733, 0o666, {}, "saved", "new"),
}


@needs_root
@pytest.mark.parametrize("case", PROTECTED)
def test_what_is_protected_stays_as_it_is(case):
    folder_mode, mode, options, words, content = PROTECTED[case]
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.pt"
        fastckpt.save("old", path)
        os.chmod(path, mode)
        os.chmod(folder, folder_mode)
        script = f"try: fastckpt.save('new', sys.argv[1], **{options!r})\nexcept PermissionError as error: print(error)\nelse: print('saved')"
        assert words in as_nobody(script, path)
        assert fastckpt.load(path) == content
        assert os.listdir(folder) == ["model.pt"]


def test_a_full_device():
    with pytest.raises(OSError, match="No space left on device: '/dev/full'") as raised:
        fastckpt.save(NEW, "/dev/full")
    assert raised.value.errno == errno.ENOSPC


LIMITED = """
import resource, sys, torch, fastckpt
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    fastckpt.save({"a": torch.ones(int(sys.argv[3])), "b": torch.ones(5)}, sys.argv[1])
except OSError as error:
    print(error.errno, error.filename)
"""


@pytest.mark.parametrize(
    ("limit", "numel"), [(100_000, 500_000), (1000, 10)], ids=["in a storage", "in the headers"]
)
def test_no_room_for_a_file(limit, numel, path):
    arguments = [sys.executable, "-c", LIMITED, str(path), str(limit), str(numel)]
    found = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert found.stdout.split() == [str(errno.EFBIG), str(path)]
    check(path, OLD)


# -- failures on the way -----------------------------------------------------------------------------------------------


class Fails:
    def __reduce__(self):
        raise LookupError("own")


@pytest.mark.parametrize("where", ["over a file", "new"])
def test_an_object_that_fails(where, path, kind):
    name = path if where == "over a file" else path.with_name("new.pt")
    with pytest.raises(LookupError, match="own"):
        fastckpt.save({**NEW, "fails": Fails()}, name)
    check(path, OLD)


STEPS = ["fchmod", "pwrite", "link", "replace"]


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_fails(step, path, kind, monkeypatch):
    if step == "link" and kind == "named":
        pytest.skip("nothing is linked")

    def fail(*args, **options):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="Input/output error") as raised:
        fastckpt.save(NEW, path)
    assert raised.value.errno == errno.EIO
    monkeypatch.undo()
    check(path, OLD)


def test_a_progress_that_fails(path, kind):
    def fail(*args):
        raise LookupError("own")

    with pytest.raises(LookupError, match="own"):
        fastckpt.save(NEW, path, progress=fail)
    check(path, OLD)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc/self")
def test_no_descriptor_is_left_open(path, kind):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        fastckpt.save(NEW, path)
        with pytest.raises(LookupError):
            fastckpt.save({**NEW, "fails": Fails()}, path)
        with pytest.raises(ZeroDivisionError):
            fastckpt.save(NEW, path, progress=lambda *args: 1 // 0)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("fsync", [True, False])
def test_fsync(fsync, path, kind, monkeypatch):
    synced = []

    def note(fd):
        synced.append(stat.S_ISDIR(os.fstat(fd).st_mode))
        real(fd)

    real = os.fsync
    monkeypatch.setattr(os, "fsync", note)
    fastckpt.save(NEW, path, fsync=fsync)
    assert synced == ([False, True] if fsync else [])
    with open(path, "r+b") as file:
        fastckpt.save(OLD, file, fsync=fsync)
    assert synced == ([False, True, False] if fsync else [])


# -- signals -----------------------------------------------------------------------------------------------------------

INTERRUPTED = 42
WEIGHTS = {f"w{i}": torch.full((1_000_000,), float(i)) for i in range(4)}


def save_until_stopped(path, ready):
    """Save over and over, in a process of its own."""
    code = 1
    try:
        number = fastckpt.load(path)["number"]
        while True:
            number += 1
            fastckpt.save({"number": number, **WEIGHTS}, path)
            os.write(ready, b".")
    except KeyboardInterrupt:
        code = INTERRUPTED
    finally:
        os._exit(code)


def stopped(path, with_signal):
    """Let a process save until a signal stops it, at any moment; how it ended."""
    out, ready = os.pipe()
    process = os.fork()
    if not process:
        save_until_stopped(path, ready)
    os.read(out, 1)
    time.sleep(random.random() / 20)
    os.kill(process, with_signal)
    _, status = os.waitpid(process, 0)
    os.close(out)
    os.close(ready)
    return os.waitstatus_to_exitcode(status)


def check_rounds(path, before):
    """The file is a whole one, of a round later than ``before``; which."""
    obj = torch.load(path, weights_only=True)
    assert obj["number"] > before
    assert [obj[f"w{i}"].unique().tolist() for i in range(4)] == [[0.0], [1.0], [2.0], [3.0]]
    assert zipfile.ZipFile(path).testzip() is None
    return obj["number"]


def stop_in_rounds(folder, with_signal, rounds):
    path, number = folder / "model.pt", 0
    fastckpt.save({"number": 0}, path)
    for _ in range(rounds):
        code = stopped(path, with_signal)
        assert code == (INTERRUPTED if with_signal == signal.SIGINT else -with_signal)
        number = check_rounds(path, number)
        for name in set(os.listdir(folder)) - {path.name}:
            # Killed between having a name and having this one: rare, and then it is whole.
            assert with_signal == signal.SIGKILL
            assert hasattr(os, "O_TMPFILE"), name
            check_rounds(folder / name, number)
            os.unlink(folder / name)


@pytest.mark.parametrize("with_signal", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill -9"])
def test_stopped(with_signal, tmp_path):
    stop_in_rounds(tmp_path, with_signal, 5)


@pytest.mark.slow
@pytest.mark.parametrize("with_signal", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill -9"])
def test_stopped_often(with_signal, tmp_path):
    stop_in_rounds(tmp_path, with_signal, 100)


@pytest.mark.parametrize("nameless", [True, False], ids=["without a name", "with one"])
def test_a_place_that_is_taken_meanwhile(nameless, path, monkeypatch):
    """FileExistsError of the path, not of what became of it on the way."""
    if not nameless:
        monkeypatch.delattr(os, "O_TMPFILE")
    new = path.parent / "new.pt"
    file = destination.Replacement(str(new), str(new), fsync=False, exclusive=True)
    new.write_bytes(b"theirs")
    with pytest.raises(FileExistsError) as raised:
        file.commit(0)
    file.abort()
    assert (raised.value.filename, raised.value.filename2) == (str(new), None)
    assert new.read_bytes() == b"theirs"
    assert sorted(os.listdir(path.parent)) == ["model.pt", "new.pt"]


@pytest.mark.parametrize("fd", [-1, -(1 << 40), 1 << 31, 1 << 40])
@pytest.mark.parametrize(
    "use", [fastckpt.load, lambda fd: fastckpt.save(NEW, fd)], ids=["load", "save"]
)
def test_no_descriptor(use, fd):
    with pytest.raises(OSError, match="Bad file descriptor") as raised:
        use(fd)
    assert raised.value.errno == errno.EBADF


def test_what_can_be_named_is_named():
    """naming() leaves alone what has a name, and what is no error of the system's."""
    for error in (OSError(2, "no", "x"), OSError("just words"), ValueError("no")):
        with pytest.raises(type(error)) as raised, destination.naming("y"):
            raise error
        assert getattr(raised.value, "filename", "x") in ("x", None)
