"""What the world does meanwhile: signals, changing files, limits of the system, an end of the process.

Whatever happens, a load gives the right object or an error, and leaves no descriptor, thread or memory behind.
"""

import errno
import gc
import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import torch

import fastckpt
from fastckpt.errors import CheckpointError, ChecksumError
from objects import saved
from support import SANITIZED, alarms, needs_true_memory, same
from ziprewrite import rewritten

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

MIB = 1 << 20
OBJECT = {"large": torch.arange(MIB // 4), "small": [torch.full((9,), float(i)) for i in range(40)]}
FORMS = {"zip": saved(OBJECT), "legacy": saved(OBJECT, legacy=True)}


@pytest.fixture(autouse=True)
def parallel(monkeypatch):
    monkeypatch.setenv("FASTCKPT_SERIAL_BELOW", "0")


@pytest.fixture(params=FORMS)
def path(request, tmp_path):
    path = tmp_path / f"{request.param}.pt"
    path.write_bytes(FORMS[request.param])
    return path


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def descriptors_left():
    try:
        os.close(os.dup(0))
    except OSError:
        return False
    return True


def is_right(loaded):
    large, small = loaded["large"], loaded["small"]
    return bool((large == OBJECT["large"]).all()) and len(small) == 40 and small[7][8] == 7


# -- signals


class Little:
    """A file object that answers with at most so many bytes, and now and then says that there are none yet."""

    def __init__(self, data, most):
        self.data, self.most, self.at, self.turn = data, most, 0, 0

    def seek(self, offset, whence=0):
        self.at = offset + (0, self.at, len(self.data))[whence]
        return self.at

    def tell(self):
        return self.at

    def read(self, n=-1):
        self.turn += 1
        if n and self.turn % 5 == 0:
            return None
        part = self.data[self.at : self.at + min(n, self.most)]
        self.at += len(part)
        return part


ROADS = {
    "path": lambda path: path,
    "file": lambda path: open(path, "rb"),  # noqa: SIM115
    "bytes": lambda path: path.read_bytes(),
    "short reads": lambda path: Little(path.read_bytes(), 5000),
}


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("options", [{"threads": 1}, {"threads": 3}], ids=["serial", "parallel"])
def test_interrupted_system_calls(path, road, options):
    seen, rounds = [], 0
    with alarms(lambda *_: seen.append(1), 0.0005, 0.0005):
        while len(seen) < 20 or rounds < 3:
            source = ROADS[road](path)
            assert is_right(fastckpt.load(source, **options))
            if road == "file":
                source.close()
            rounds += 1


def test_interrupted_pipe(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    feeder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent("""
            import sys, time
            data = sys.stdin.buffer.read()
            with open(sys.argv[1], "wb", buffering=0) as fifo:
                for at in range(0, len(data), 200_000):
                    fifo.write(data[at:at + 200_000])
                    time.sleep(0.005)
        """), os.fspath(fifo)],
        stdin=subprocess.PIPE,
    )  # fmt: skip
    feeder.stdin.write(FORMS["zip"])
    feeder.stdin.close()
    seen = []
    with alarms(lambda *_: seen.append(1), 0.0005, 0.0005):
        assert is_right(fastckpt.load(fifo))
    assert seen
    assert feeder.wait() == 0


def run_python(code, *arguments, **options):
    """Start Python on some code, with what it needs to load."""
    prelude = """
        import os, resource, signal, sys, threading, time
        import numpy as np
        import fastckpt
        path = sys.argv[1]
        def load(**options):
            loaded = fastckpt.load(path, framework="numpy", **options)
            assert loaded["large"][-1] == len(loaded["large"]) - 1 and len(loaded["small"]) == 40
            return loaded
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(code), *map(str, arguments)],
        env={**os.environ, "FASTCKPT_SERIAL_BELOW": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )  # fmt: skip


INTERRUPTED = """
    import random
    class Interruption(Exception):
        pass
    left = 0
    def handler(number, frame):
        global left
        left -= 1
        if left >= 0:
            raise Interruption
    signal.signal(signal.SIGALRM, handler)
    sys.unraisablehook = lambda unraisable: None  # one that is raised in a destructor goes nowhere
    def attempt(often):
        "Load while a handler raises, up to three times: None where it did."
        global left
        while True:
            try:
                left = 3
                signal.setitimer(signal.ITIMER_REAL, often, often)
                loaded = load(**options)
                left = 0
                return loaded
            except Interruption:
                while True:
                    try:
                        left = 0
                        signal.setitimer(signal.ITIMER_REAL, 0)
                        return None
                    except Interruption:
                        pass
    def tasks():
        return len(os.listdir("/proc/self/task"))
    threads = tasks()  # NumPy has some
    load(**options)
    fds, ended, done, randomness = len(os.listdir("/proc/self/fd")), 0, 0, random.Random(4)
    while (ended < 100 or done < 10) and ended < 500:
        if attempt(randomness.uniform(1e-4, 4e-3)) is None:
            ended += 1
        else:
            done += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    load(**options)
    assert len(os.listdir("/proc/self/fd")) == fds
    for _ in range(100):
        if tasks() > threads:
            time.sleep(0.02)
    assert tasks() == threads
    print("survived")
"""


@pytest.mark.parametrize("options", [{"threads": 1}, {"threads": 3}, {"mmap": True}], ids=str)
def test_interrupted_loads_leave_nothing(tmp_path, options):
    """A handler raises at any time, and again while the first is handled: no memory is written to that is gone."""
    path = tmp_path / "model.pt"
    path.write_bytes(FORMS["zip"])
    child = run_python(INTERRUPTED.replace("**options", f"**{options}"), path)
    output, errors = child.communicate(timeout=300)
    assert (child.returncode, output) == (0, "survived\n"), errors


FOREVER = """
    load(threads=THREADS)
    print("ready", flush=True)
    while True:
        load(threads=THREADS)
"""


@pytest.mark.parametrize("threads", [1, 3])
def test_ctrl_c(path, threads):
    """A process that gets SIGINT while it loads ends by a KeyboardInterrupt, and by nothing else."""
    randomness = random.Random(9)
    for _ in range(4):
        child = run_python(FOREVER.replace("THREADS", str(threads)), path)
        assert child.stdout.readline() == "ready\n"
        threading.Event().wait(randomness.uniform(0, 0.05))
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=300)
        assert child.returncode == -signal.SIGINT, errors
        assert errors.rstrip().endswith("KeyboardInterrupt"), errors
        assert "Fatal" not in errors


SHUTDOWNS = {
    "a daemon that loads": """
        thread = threading.Thread(target=forever, daemon=True)
        thread.start()
        began.wait()
        time.sleep(float(sys.argv[2]))
    """,
    "many daemons on one handle": """
        checkpoint = fastckpt.open(path, framework="numpy", threads=3)
        def load(**options):
            assert checkpoint["large"].read()[5] == 5 and checkpoint["small.7"][8] == 7
        for _ in range(4):
            threading.Thread(target=forever, daemon=True).start()
        began.wait()
        time.sleep(float(sys.argv[2]))
    """,
    "sys.exit from another thread's sight": """
        thread = threading.Thread(target=forever)
        thread.start()
        began.wait()
        threading.Timer(float(sys.argv[2]), stop.append, [True]).start()
        sys.exit(0)
    """,
    "a handle that nobody closed": """
        checkpoint = fastckpt.open(path, framework="numpy")
        kept = checkpoint["large"].read()
    """,
}


@pytest.mark.parametrize("how", SHUTDOWNS)
def test_shutdown_while_loading(path, how):
    code = """
        began, stop = threading.Event(), []
        def forever():
            while not stop:
                load(threads=3)
                began.set()
    """
    for delay in (0, 0.003, 0.02):
        child = run_python(textwrap.dedent(code) + textwrap.dedent(SHUTDOWNS[how]), path, delay)
        _, errors = child.communicate(timeout=300)
        assert (child.returncode, errors) == (0, "")


# -- the file changes while it is read

OTHER = {"large": torch.arange(MIB // 4).flip(0), "small": [torch.full((9,), -1.0)] * 40}


def changes(path, how, randomness):
    """Do to the file what others may, and put it right again."""
    good = FORMS["zip"]
    if how == "cut":
        os.truncate(path, randomness.randrange(len(good)))
    elif how == "overwritten":
        with open(path, "r+b") as f:
            f.seek(randomness.randrange(len(good) - 4096))
            f.write(bytes(range(256)) * 16)
    elif how == "replaced":
        path.with_name("next").write_bytes(saved(OTHER))
        os.replace(path.with_name("next"), path)
    elif how == "removed":
        path.unlink()
    path.with_name("next").write_bytes(good)
    os.replace(path.with_name("next"), path)


@pytest.mark.parametrize("how", ["cut", "overwritten", "replaced", "removed"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_file_that_changes_all_the_time(tmp_path, how, threads):
    path = tmp_path / "model.pt"
    path.write_bytes(FORMS["zip"])
    before, stop = descriptors(), threading.Event()

    def change():
        randomness = random.Random(how)
        while not stop.wait(0.0005):
            changes(path, how, randomness)

    changer = threading.Thread(target=change)
    changer.start()
    try:
        for _ in range(60):
            try:
                loaded = fastckpt.load(path, threads=threads)
            except (CheckpointError, FileNotFoundError):
                continue
            others = how == "replaced" and bool((loaded["large"] == OTHER["large"]).all())
            assert others or is_right(loaded)
    finally:
        stop.set()
        changer.join()
    assert descriptors() == before
    assert is_right(fastckpt.load(path, threads=threads))


# -- limits of the system


def test_no_descriptor_is_left(path):
    """Opening is an error with the name of the file; what is open goes on."""
    fastckpt.load(path)
    fastckpt.load(path, mmap=True)
    limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), []
    with fastckpt.open(path) as ckpt:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 5, limits[1]))
        try:
            while descriptors_left():
                taken.append(os.dup(0))
            for act in (fastckpt.load, fastckpt.open, lambda path: fastckpt.load(path, mmap=True)):
                with pytest.raises(OSError, match=path.name) as caught:
                    act(path)
                assert caught.value.errno == errno.EMFILE
            same(OBJECT, ckpt.read())
            assert ckpt["large"][5].item() == 5
            os.close(taken.pop())
            same(OBJECT, fastckpt.load(path, threads=3))
            same(OBJECT, fastckpt.load(path, mmap=True))
        finally:
            for fd in taken:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


MEMORY = """
    if ACT == "save":
        import torch
        obj = {"large": torch.arange(4 << 20), "small": [torch.ones(2)] * 40}
        def act():
            fastckpt.save(obj, path, threads=THREADS)
    else:
        def act():
            load(threads=THREADS)
    act()
    now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    done = 0
    for room in range(0, 200 << 20, 3 << 20):
        resource.setrlimit(resource.RLIMIT_AS, (now + room, resource.RLIM_INFINITY))
        try:
            act()
        except MemoryError as error:
            pass
        else:
            done += 1
    assert done
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    load()
    print("survived")
"""


@needs_true_memory
@pytest.mark.parametrize("threads", [1, 2, 16])
@pytest.mark.parametrize("act", ["load", "save"])
def test_memory_runs_out(tmp_path, act, threads):
    """However little there is, for the storages or for the stacks of threads: a MemoryError, or the work is done."""
    path = tmp_path / "model.pt"
    torch.save({"large": torch.arange(4 * MIB), "small": [torch.ones(2)] * 40}, path)
    child = run_python(MEMORY.replace("ACT", repr(act)).replace("THREADS", str(threads)), path)
    output, errors = child.communicate(timeout=300)
    assert (child.returncode, output) == (0, "survived\n"), errors


THREADS = """
    load()
    data = open(path, "rb").read()
    if os.geteuid() == 0:  # root is above such limits
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    path, running = data, 0
    for task in os.listdir("/proc"):
        if task.isdigit():
            try:
                if os.stat(f"/proc/{task}").st_uid == os.geteuid():
                    running += len(os.listdir(f"/proc/{task}/task"))
            except FileNotFoundError:
                pass
    running = max(running, len(os.listdir("/proc/self/task")))
    for more in (0, 1, 2, 3, 5):
        resource.setrlimit(resource.RLIMIT_NPROC, (running + more, resource.getrlimit(resource.RLIMIT_NPROC)[1]))
        for threads in (1, 2, 16):
            load(threads=threads)
    print("survived")
"""


@pytest.mark.parametrize("form", ["stored", "deflated"])
def test_threads_run_out(tmp_path, form):
    """Some threads, or none, can be had: those do the work."""
    path = tmp_path / "model.pt"
    numel = 1000 if form == "deflated" else 2 * MIB
    data = saved({"large": torch.arange(numel), "small": [torch.ones(2) for _ in range(40)]})
    path.write_bytes(rewritten(data, method=8) if form == "deflated" else data)
    child = run_python(THREADS, path)
    output, errors = child.communicate(timeout=300)
    assert (child.returncode, output) == (0, "survived\n"), errors


# -- nothing is left


BROKEN = {
    "a cut file": FORMS["zip"][:-100],
    "a damaged pickle": FORMS["zip"].replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v9"),
    "a damaged number": FORMS["zip"].replace(np.arange(8).tobytes(), bytes(64)),
    "an unknown class": FORMS["legacy"].replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v9"),
    "a cut stream": FORMS["legacy"][:-10],
}  # fmt: skip


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("kind", ["path", "bytes", "object"])
def test_failing_loads_leave_nothing(tmp_path, content, kind):
    path = tmp_path / "model.pt"
    path.write_bytes(content)

    def rounds(count):
        for _ in range(count):
            source = {"path": path, "bytes": content}.get(kind) or Little(content, MIB)
            with pytest.raises(CheckpointError):
                fastckpt.load(source, threads=3)
        gc.collect()

    rounds(10)
    before = descriptors(), threading.active_count()
    start = resident()
    rounds(100)
    assert (descriptors(), threading.active_count()) == before
    if not SANITIZED:
        assert resident() - start < 20 * MIB  # a hundred times the file are 200


def test_failing_reads_of_an_open_handle_leave_nothing(tmp_path):
    path = tmp_path / "model.pt"
    path.write_bytes(BROKEN["a damaged number"])
    with fastckpt.open(path, threads=3) as ckpt:
        for count in (10, 100):
            start = descriptors(), threading.active_count(), resident()
            for _ in range(count):
                with pytest.raises(ChecksumError):
                    ckpt["large"].read()
                with pytest.raises(ChecksumError):
                    ckpt.read()
                assert ckpt["small.3"].read()[0] == 3
        assert (descriptors(), threading.active_count()) == start[:2]
        if not SANITIZED:
            assert resident() - start[2] < 20 * MIB
