"""load in many threads and processes at once, and with many threads of its own."""

import concurrent.futures
import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

import fastckpt
from objects import saved
from support import QUIET, forks_among_threads, same

pytestmark = QUIET


@pytest.fixture(autouse=True)
def parallel(monkeypatch):
    monkeypatch.setenv("FASTCKPT_SERIAL_BELOW", "0")


SHAPES = {
    "many small": [16] * 3000,
    "one huge": [5_000_000],
    "small and huge": [16] * 500 + [3_000_000] + [1] * 500,
    "around a block": [(1 << 19) + n for n in (-1, 0, 1)],
    "empty ones": [0, 5, 0, 0, 7],
    "a single byte": [1],
    "nothing": [],
}


@pytest.mark.parametrize("threads", [1, 2, 3, 16, 1000])
@pytest.mark.parametrize("shape", SHAPES)
def test_threads(shape, threads):
    obj = [torch.arange(n, dtype=torch.int32) + i for i, n in enumerate(SHAPES[shape])]
    same(obj, fastckpt.load(saved(obj), threads=threads))


@pytest.mark.parametrize("source", ["path", "bytes", "one file object each"])
def test_eight_callers_at_once(source, tmp_path):
    obj = {"large": torch.arange(1 << 19), "small": [torch.full((5,), i) for i in range(100)]}
    path = tmp_path / "file.pt"
    torch.save(obj, path)
    data = path.read_bytes()
    barrier = threading.Barrier(8)

    def load(_):
        barrier.wait()
        if source == "one file object each":
            with open(path, "rb") as file:
                return fastckpt.load(file, threads=3)
        return fastckpt.load(path if source == "path" else data, threads=3)

    for _ in range(3):
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for loaded in pool.map(load, range(8)):
                same(obj, loaded)


def test_no_thread_is_left():
    before = threading.active_count()
    fastckpt.load(saved([torch.ones(1 << 20)]), threads=4)
    assert threading.active_count() == before


def test_an_error_in_one_of_many(tmp_path):
    data = bytearray(saved([torch.full((1000,), float(i)) for i in range(300)]))
    at = data.index(torch.full((1000,), 250.0).numpy().tobytes())
    data[at + 5] ^= 1
    with pytest.raises(fastckpt.ChecksumError, match="data/250"):
        fastckpt.load(bytes(data), threads=4)


PRELUDE = """
import os, signal, sys, time
import torch, fastckpt
path = sys.argv[1]

def load():
    # Looked at through NumPy: an operation of torch's in a child hangs where its parent had one.
    loaded = fastckpt.load(path, threads=3)
    assert loaded["a"].numpy().sum() == sum(range(1 << 16)) and len(loaded["b"]) == 100
    return loaded

def in_child(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(1)
    for _ in range(400):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert status == 0, status
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    sys.exit("the child hangs")
"""

AMONG_THREADS = "while another thread loads"
FORKS = {
    "fork, load in the child": "in_child(load)",
    "load, fork, load in both": "load(); in_child(load); load()",
    "torch, load, fork, load": "torch.ones(1 << 22).sum(); load(); in_child(load)",
    "load, torch, fork, load": "load(); torch.set_num_threads(4); torch.ones(1 << 22).sum(); in_child(load)",
    "grandchild": "load(); in_child(lambda: (load(), in_child(load)))",
    "what was loaded before is there in the child": """
loaded = load()
def look():
    assert loaded["a"].numpy().sum() == sum(range(1 << 16))
    loaded["a"].numpy()[:] = 0
in_child(look)
assert loaded["a"].numpy().sum() == sum(range(1 << 16))
""",
    AMONG_THREADS: """
import threading
stop = []
def forever():
    while not stop:
        load()
thread = threading.Thread(target=forever)
thread.start()
for _ in range(4):
    in_child(load)
stop.append(1)
thread.join()
""",
    "a child that ends in a thread's load": """
import threading
def work():
    threading.Thread(target=load, daemon=True).start()
in_child(work)
load()
""",
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
@pytest.mark.parametrize(
    "how",
    [pytest.param(how, marks=[forks_among_threads] * (how == AMONG_THREADS)) for how in FORKS],
)
def test_fork(how, tmp_path):
    path = tmp_path / "file.pt"
    torch.save({"a": torch.arange(1 << 16), "b": [torch.ones(3)] * 100}, path)
    code = PRELUDE + textwrap.dedent(FORKS[how])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_huge(tmp_path):
    obj = [
        torch.arange(200 << 20, dtype=torch.uint8),
        *(torch.full((7,), i) for i in range(10_000)),
    ]
    path = tmp_path / "file.pt"
    torch.save(obj, path)
    for threads in (1, 2, 7):
        same(obj, fastckpt.load(path, threads=threads))
