"""Reading in processes of their own: forked ones, interrupted ones, and one without torch."""

import os
import subprocess
import sys
import textwrap

import pytest

from support import forks_among_threads

PRELUDE = """
import os, signal, sys, threading, time, zlib
import numpy as np
from fastckpt import materialize
from fastckpt.records import Records
from fastckpt.source import open_source

data = np.random.default_rng(0).bytes(8 << 20)
records = Records(["a", "b"], [0, 4 << 20], [4 << 20] * 2, crc32=[zlib.crc32(data[:4 << 20]), zlib.crc32(data[4 << 20:])])
source = open_source(data)

def load():
    (owners, *_), verified = materialize.read_storages(source, records, [0, 1], threads=4)
    assert verified == 2 and bytes(owners[1]) == data[4 << 20:]
"""

FORK = """
def in_child(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    for _ in range(600):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert status == 0, status
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    sys.exit("the child hangs")

load()
in_child(load)
load()
in_child(lambda: in_child(load))
"""

FORK_WHILE_LOADING = """
stop = []
def forever():
    while not stop:
        load()
thread = threading.Thread(target=forever)
thread.start()
for _ in range(5):
    in_child(load)
stop.append(True)
thread.join()
"""

TORCH_TOO = """
in_child(lambda: torch.ones(1 << 20).sum())
torch.set_num_threads(4)
torch.ones(1 << 22).sum()
in_child(load)
"""

INTERRUPT = """
told = []
rows = np.zeros(1_000_000, dtype=np.int64)  # 4 TB: it would take minutes
threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
reading = materialize._Fill(source, records, rows, True, THREADS, None)
try:
    reading.read(np.zeros(len(rows), dtype=np.int64))
except KeyboardInterrupt:
    pass
else:
    sys.exit("no KeyboardInterrupt")
done = int(reading.control[0])  # its thread has ended, or it would count on
time.sleep(0.05)
assert done == int(reading.control[0]) < reading.total
load()
"""


def run_python(*parts, **environment):
    environment = os.environ | {"FASTCKPT_SERIAL_BELOW": "0"} | environment
    code = "\n".join(map(textwrap.dedent, parts))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
class TestFork:
    def test_without_torch(self):
        run_python(PRELUDE, FORK)

    @forks_among_threads
    def test_while_another_thread_loads(self):
        run_python(PRELUDE, FORK, FORK_WHILE_LOADING)

    @pytest.mark.parametrize("order", ["torch first", "torch last"])
    def test_with_torch(self, order):
        pytest.importorskip("torch")
        parts = ["import torch", PRELUDE] if order == "torch first" else [PRELUDE, "import torch"]
        run_python(*parts, FORK, TORCH_TOO)


@pytest.mark.parametrize("threads", ["1", "2", "4"])
def test_interrupt(threads):
    run_python(PRELUDE, INTERRUPT.replace("THREADS", threads))


def test_loading_needs_no_torch():
    run_python(PRELUDE, "load(); assert 'torch' not in sys.modules")
