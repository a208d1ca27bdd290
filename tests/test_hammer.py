"""Eight threads start together on one thing, again and again; each checks all that it gets. No test waits for a time."""

import os
import signal
import threading

import numpy as np
import pytest
import torch

import fastckpt
from objects import saved
from streamcraft import Pid, floats, tar_checkpoint
from support import forks_among_threads
from ziprewrite import rewritten

THREADS = 8
NUMEL = 3000
COUNT = 12


def content(i):
    return torch.arange(NUMEL, dtype=torch.float32) + i


OBJECT = {f"k{i}": content(i) for i in range(COUNT)} | {"n": {"again": content(3)}}


def tar():
    names = range(COUNT + 1)
    storages = [(100 + i, "FloatStorage", floats(*content(i).tolist()), NUMEL) for i in names]
    tensors = [(200 + i, 100 + i, (NUMEL,), (1,), 0) for i in names]
    obj = {f"k{i}": Pid(str(200 + i)) for i in range(COUNT)}
    return tar_checkpoint(obj | {"n": {"again": Pid("203")}}, tensors, storages)


ZIP = saved(OBJECT)
FILES = {
    "zip": ZIP,
    "deflated": rewritten(ZIP, method=8),
    "legacy": saved(OBJECT, legacy=True),
    "tar": tar(),
}


class Slow:
    """A file object of a user: whoever shares it must take turns."""

    def __init__(self, data):
        self.data, self.at, self.inside = data, 0, threading.Lock()

    def seek(self, offset, whence=0):
        self.at = offset + (0, self.at, len(self.data))[whence]
        return self.at

    def tell(self):
        return self.at

    def read(self, n=-1):
        assert self.inside.acquire(blocking=False), "two threads read at once"
        try:
            part = self.data[self.at :][: n if n >= 0 else None]
            self.at += len(part)
            return part
        finally:
            self.inside.release()


ROADS = {
    "path": lambda path: path,
    "bytes": lambda path: path.read_bytes(),
    "object": lambda path: Slow(path.read_bytes()),
}


@pytest.fixture(autouse=True)
def parallel(monkeypatch):
    monkeypatch.setenv("FASTCKPT_SERIAL_BELOW", "0")


@pytest.fixture(params=FILES)
def path(request, tmp_path):
    path = tmp_path / "model.pt"
    path.write_bytes(FILES[request.param])
    return path


def together(*works):
    """Run each of them on a thread of its own, all let go at once; what one raises is raised here."""
    barrier, raised = threading.Barrier(len(works)), []

    def run(work):
        try:
            barrier.wait()
            work()
        except BaseException as error:
            raised.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def is_right(loaded):
    assert list(loaded) == [*(f"k{i}" for i in range(COUNT)), "n"]
    for i in range(COUNT):
        assert np.array_equal(np.asarray(loaded[f"k{i}"]), content(i).numpy()), i
    assert np.array_equal(np.asarray(loaded["n"]["again"]), content(3).numpy())


def test_load(path):
    def load():
        is_right(fastckpt.load(path, threads=3))

    for _ in range(3):
        together(*[load] * THREADS)


def acts(ckpt, seed):
    """What one thread does with a handle, in an order of its own."""
    order = np.random.default_rng(seed)

    def names():
        assert len(ckpt) == COUNT + 1
        assert list(ckpt)[-1] == "n.again"

    def slices():
        i = int(order.integers(COUNT))
        start = int(order.integers(NUMEL - 10))
        part = ckpt[f"k{i}"][start : start + 10]
        assert np.array_equal(np.asarray(part), content(i).numpy()[start : start + 10])

    def one():
        i = int(order.integers(COUNT))
        assert np.array_equal(np.asarray(ckpt[f"k{i}"].read()), content(i).numpy())

    def into():
        i = int(order.integers(COUNT))
        out = np.empty(NUMEL, np.float32)
        ckpt[f"k{i}"].read(out=out)
        assert np.array_equal(out, content(i).numpy())

    def everything():
        is_right(ckpt.read())

    def tree():
        assert next(iter(ckpt.tree)) == "k0"
        assert ckpt.info["tensors"] == COUNT + 1

    return [[names, slices, one, into, everything, tree][i] for i in order.permutation(6)]


@pytest.mark.parametrize("road", ROADS)
def test_one_handle(path, road):
    """Fresh each time, so that whatever a handle makes on first use is made by many at once."""
    for turn in range(4):
        with fastckpt.open(ROADS[road](path), threads=2) as ckpt:

            def work(seed, ckpt=ckpt):
                for act in acts(ckpt, seed):
                    act()

            together(*[lambda seed=seed: work(seed) for seed in range(turn, turn + THREADS)])


@pytest.mark.parametrize("road", ROADS)
def test_close_while_others_read(path, road):
    """A read gives what is right or says that the checkpoint is closed."""
    for turn in range(6):
        ckpt = fastckpt.open(ROADS[road](path), threads=2)

        def read(seed, ckpt=ckpt):
            try:
                for _ in range(20):
                    for act in acts(ckpt, seed):
                        act()
            except ValueError as error:
                if "the checkpoint is closed" not in str(error):
                    raise

        def close(ckpt=ckpt):
            for _ in range(20):
                ckpt["k1"][5:9]
            ckpt.close()

        together(close, *[lambda seed=seed: read(seed) for seed in range(turn, turn + THREADS - 1)])
        with pytest.raises(ValueError, match="closed"):
            ckpt["k1"].read()


@forks_among_threads
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
def test_fork_while_others_read(path):
    """Children that are made in the middle read through the handle they inherit, and so do those around them."""
    with fastckpt.open(path, framework="numpy", threads=2) as ckpt:
        stop, statuses = threading.Event(), []

        def read(seed):
            while not stop.is_set():
                for act in acts(ckpt, seed):
                    act()

        def fork():
            try:
                for child in range(6):
                    pid = os.fork()
                    if pid == 0:
                        status = 1
                        try:
                            for act in acts(ckpt, child):
                                act()
                            is_right(fastckpt.load(path, framework="numpy", threads=3))
                            status = 0
                        finally:
                            os._exit(status)
                    statuses.append(os.waitpid(pid, 0)[1])
            finally:
                stop.set()

        together(fork, *[lambda seed=seed: read(seed) for seed in range(THREADS - 1)])
    assert statuses == [0] * 6


class Waiting(Slow):
    """A file object whose reads can be made to wait."""

    def __init__(self, data):
        super().__init__(data)
        self.hold, self.entered, self.go_on = False, threading.Event(), threading.Event()

    def read(self, n=-1):
        if self.hold:
            self.entered.set()
            self.go_on.wait()
        return super().read(n)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
def test_fork_while_another_thread_is_inside_a_read(path):
    """Whatever that thread holds, it holds for ever in the child, where it is not."""
    file = Waiting(path.read_bytes())
    with fastckpt.open(file, framework="numpy") as ckpt:
        file.hold = True
        reader = threading.Thread(target=lambda: ckpt["k1"].read())
        reader.start()
        file.entered.wait()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                file.hold = False
                assert np.array_equal(ckpt["k2"].read(), content(2).numpy())
                assert np.array_equal(ckpt["k1"][5:9], content(1).numpy()[5:9])
                status = 0
            finally:
                os._exit(status)
        for _ in range(600):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                break
            threading.Event().wait(0.05)
        else:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        file.go_on.set()
        reader.join()
    assert done, "the child hangs"
    assert status == 0


def test_load_into_many(path):
    """Targets of their own, from one file."""
    targets = [
        {name: torch.zeros(NUMEL) for name in [*list(OBJECT)[:-1], "n.again"]}
        for _ in range(THREADS)
    ]
    together(
        *[lambda target=target: fastckpt.load_into(target, path, threads=2) for target in targets]
    )
    for target in targets:
        for i in range(COUNT):
            assert torch.equal(target[f"k{i}"], content(i))


def test_load_into_one(path):
    """All write the same to one memory."""
    target = {name: torch.zeros(NUMEL) for name in [*list(OBJECT)[:-1], "n.again"]}
    together(*[lambda: fastckpt.load_into(target, path, threads=2)] * THREADS)
    assert torch.equal(target["k7"], content(7))


def test_tensors_are_let_go_by_others(path):
    """Memory that storages share is given back page by page, by whichever thread comes last."""

    def load_and_drop():
        for _ in range(5):
            loaded = fastckpt.load(path, threads=2)
            kept = loaded.pop("k5")
            del loaded
            assert torch.equal(kept, content(5))

    together(*[load_and_drop] * THREADS)
