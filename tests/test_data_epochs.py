"""Epochs: their ends, interrupts, forks, and going on in the middle of one."""

import gc
import itertools
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from fastckpt.data import DataLoader
from readers import TIMEOUT, Gate, Numbers, batches_of, values
from support import forks_among_threads

# ---- ends


def join_threads():
    for thread in threading.enumerate():
        if thread.name == "loader":
            thread.join(TIMEOUT)
            assert not thread.is_alive()


@pytest.mark.parametrize("how", ["dropped", "closed", "broken off"])
def test_an_epoch_that_nobody_wants_ends_at_once(how):
    """It would wait for ever for the reads that hang, if it waited."""
    gate = Gate(50, closed=range(2, 50))
    loader = DataLoader(gate, num_workers=2, prefetch_depth=2)
    epoch = iter(loader)
    gate.wait_for(3)
    assert next(epoch)["x"] == 0
    gate.wait_for(1)
    if how == "dropped":
        del epoch
    elif how == "closed":
        epoch.close()
        assert list(epoch) == []
    else:
        del epoch
        for batch in loader:
            assert batch["x"] == 0
            break
    gate_reads = len(gate.reads)
    assert gate_reads <= 10
    gate.open()
    join_threads()
    assert len(gate.reads) == gate_reads  # what was under way ended, and nothing else was begun


def test_a_dropped_epoch_lets_go_of_its_batches_and_threads():
    class Batch(dict):
        pass

    made = []

    def collate(samples):
        batch = Batch(x=samples)
        made.append(weakref.ref(batch))
        return batch

    epoch = iter(DataLoader(Numbers(6), num_workers=2, prefetch_depth=8, collate_fn=collate))
    next(epoch)
    del epoch
    join_threads()
    gc.collect()
    assert made
    assert not [batch for batch in made if batch() is not None]


def test_len_of_what_is_left():
    loader = DataLoader(Numbers(7), 2, num_workers=2)
    epoch = iter(loader)
    left = []
    for _ in epoch:
        left.append(len(epoch))
    assert (len(loader), left) == (4, [3, 2, 1, 0])


def run_python(code):
    tests = Path(__file__).resolve().parent
    code = f"import sys; sys.path.insert(0, {str(tests)!r})\n" + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


PRELUDE = """
import os, signal, threading, time
from fastckpt.data import DataLoader
from readers import Gate, Numbers, values
Numbers.framework = "numpy"
"""

INTERRUPT = """
gate = Gate(4, closed=[0])
epoch = iter(DataLoader(gate, num_workers=WORKERS))

def interrupt():
    gate.wait_for(1)
    time.sleep(0.05)  # so that the other thread waits
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
try:
    next(epoch)  # nothing but Ctrl-C ends it: the read hangs until the gate is opened below
except KeyboardInterrupt:
    gate.open()
else:
    raise SystemExit("no KeyboardInterrupt")
assert values(epoch) == [[0], [1], [2], [3]]
"""


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_ctrl_c_ends_a_wait_and_the_epoch_goes_on(workers):
    run_python(PRELUDE + INTERRUPT.replace("WORKERS", str(workers)))


def test_the_interpreter_does_not_wait_for_an_epoch():
    # 2000 reads of 50 ms may be begun, more than the test waits for; only those under way are waited for.
    run_python(PRELUDE + """
class Slow(Numbers):
    def _read(self, positions):
        time.sleep(0.05)
        return super()._read(positions)
kept = iter(DataLoader(Slow(2000), num_workers=1, prefetch_depth=1999))
next(kept)
""")  # fmt: skip


IN_CHILD = """
def in_child(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
        os._exit(1)
    for _ in range(600):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert status == 0, status
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    raise SystemExit("the child hangs")
"""

FORKED_EPOCH = """
gate = Gate(10, closed=[3])
loader = DataLoader(gate, num_workers=2, prefetch_depth=1)
epoch = iter(loader)
assert next(epoch)["x"] == 0
gate.wait_for(4)
while not {1, 2} <= set(epoch._window.ready):
    time.sleep(0.01)

def child():
    assert [next(epoch)["x"].item() for _ in range(2)] == [1, 2]  # what was there
    for _ in range(2):
        try:
            next(epoch)
        except RuntimeError as error:
            assert "started before fork()" in str(error) and "iter(loader)" in str(error), error
        else:
            raise SystemExit("no error")
    gate.open()
    assert values(loader) == [[i] for i in range(10)]  # the loader has threads of its own here

in_child(child)
gate.open()
assert values(epoch) == [[i] for i in range(1, 10)]
"""

FORKED_ALWAYS = """
reader = Numbers(2000)
loader = DataLoader(reader, 4, num_workers=3)
for k, batch in enumerate(loader):
    if k % 100 == 50:  # other threads hold whatever locks there are
        in_child(lambda: values(loader))
inline = iter(DataLoader(reader, 4))
next(inline)
in_child(lambda: [len(values(inline)), 499].index(499))  # without threads there is nothing to lose
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
class TestFork:
    def test_an_epoch_gives_what_it_has_then_says_so(self):
        run_python(PRELUDE + IN_CHILD + FORKED_EPOCH)

    @forks_among_threads
    def test_a_loader_works_in_children_that_are_forked_at_any_time(self):
        run_python(PRELUDE + IN_CHILD + FORKED_ALWAYS)


# ---- going on in the middle


def resumed(make, taken, through=lambda state: state):
    """(an epoch in one go, the same in two processes' worth of loaders with ``taken`` batches before the break, the reader)"""
    whole = values(make(Numbers(20)))
    loader = make(Numbers(20))
    epoch = iter(loader)
    before = values(itertools.islice(epoch, taken))
    state = through(loader.state_dict())
    reader = Numbers(20)
    other = make(reader)
    other.load_state_dict(state)
    assert other.state_dict() == state
    epoch = iter(other)
    assert len(epoch) == len(whole) - taken
    return whole, before + values(epoch), reader


KINDS = {
    "sequential": lambda reader: DataLoader(reader, 3),
    "shuffled": lambda reader: DataLoader(reader, 3, shuffle=True, seed=1),
    "threads": lambda reader: DataLoader(reader, 3, shuffle=True, seed=1, num_workers=2),
    "fused": lambda reader: DataLoader(reader, 3, shuffle=True, seed=1, num_workers=2, fuse=3),
    "distributed": lambda reader: DataLoader(
        reader, 3, sampler=torch.utils.data.DistributedSampler(reader, 1, 0, seed=4)
    ),
    "batch sampler": lambda reader: DataLoader(reader, batch_sampler=batches_of(20, 6)),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("taken", [0, 1, 4])
def test_resuming(make, taken):
    taken = min(taken, len(make(Numbers(20))))
    whole, again, reader = resumed(make, taken, lambda state: pickle.loads(pickle.dumps(state)))
    assert again == whole
    assert sorted(reader.seen) == sorted(itertools.chain(*whole[taken:]))  # and nothing else


def test_resuming_a_generator():
    def make(reader, seed):
        return DataLoader(reader, 3, shuffle=True, generator=torch.Generator().manual_seed(seed))

    loader = make(Numbers(20), 1)
    values(loader)
    epoch = iter(loader)
    next(epoch)
    state, rest = loader.state_dict(), values(epoch)
    other = make(Numbers(20), 2)
    other.load_state_dict(state)
    assert values(other) == rest
    assert values(other) == values(loader)  # and the epoch behind it


def test_the_seed_of_a_state_overrules_the_loaders_own():
    first, other = (DataLoader(Numbers(20), 3, shuffle=True, seed=seed) for seed in (1, 2))
    other.load_state_dict(first.state_dict())
    assert other.seed == 1
    assert [values(other) for _ in range(2)] == [values(first) for _ in range(2)]


def test_a_state_is_what_was_handed_out():
    loader = DataLoader(Numbers(10), num_workers=2, prefetch_depth=4)
    assert loader.state_dict()["start"] == 0
    epoch = iter(loader)
    next(epoch)
    assert [loader.state_dict()[name] for name in ("epoch", "start")] == [0, 1]
    del epoch  # broken off: the state stays
    assert loader.state_dict()["start"] == 1
    values(loader)
    assert [loader.state_dict()[name] for name in ("epoch", "start")] == [2, 0]


def test_a_state_behind_the_last_batch_leaves_none():
    loader = DataLoader(Numbers(3))
    epoch = iter(loader)
    [next(epoch) for _ in range(3)]
    state = loader.state_dict()
    loader = DataLoader(Numbers(3))
    loader.load_state_dict(state)
    assert (values(loader), loader.epoch) == ([], 1)
    assert values(loader) == [[0], [1], [2]]


@pytest.mark.parametrize("kind", ["shuffled", "distributed"])
def test_an_epoch_that_is_set_counts_for_the_state(kind):
    """Also where the one before was left early."""
    loader = KINDS[kind](Numbers(20))
    next(iter(loader))
    loader.set_epoch(5)
    other = KINDS[kind](Numbers(20))
    other.load_state_dict(loader.state_dict())
    assert values(other) == values(loader)
    assert other.epoch == loader.epoch == 6


def test_errors_count_as_handed_out():
    loader = DataLoader(Numbers(3, bad=[1]))
    epoch = iter(loader)
    next(epoch)
    with pytest.raises(KeyError):
        next(epoch)
    assert loader.state_dict()["start"] == 2


@pytest.mark.parametrize(
    "other",
    [
        lambda reader: DataLoader(reader, 4, shuffle=True, seed=1),
        lambda reader: DataLoader(reader, 3, sampler=torch.utils.data.RandomSampler(reader)),
        lambda reader: DataLoader(Numbers(19), 3, shuffle=True, seed=1),
    ],
    ids=["batch size", "random sampler", "another data set"],
)
def test_another_order_is_refused(other):
    loader = DataLoader(Numbers(20), 3, shuffle=True, seed=1)
    next(iter(loader))
    changed = other(Numbers(20))
    changed.load_state_dict(loader.state_dict())
    for _ in range(2):
        with pytest.raises(ValueError, match="another order"):
            iter(changed)
    changed.set_epoch(0)
    assert len(values(changed)) == len(changed)


STATE = {
    "epoch": 1,
    "start": 2,
    "batches": 7,
    "crc32": 5,
    "generator": None,
    "seed": 1,
    "sampler_epoch": None,
}
# What is no state for a loader, the loader, and what is said.
NO_STATES = {
    "none": (None, {"seed": 1}, "not a NoneType"),
    "nothing in it": ({}, {"seed": 1}, "it has no epoch, start, batches"),
    "a part": ({k: v for k, v in STATE.items() if k != "crc32"}, {"seed": 1}, "it has no crc32"),
    "a fraction": (STATE | {"start": 3.5}, {"seed": 1}, "start=3.5"),
    "negative": (STATE | {"start": -1}, {"seed": 1}, "start=-1"),
    "a text": (STATE | {"epoch": "1"}, {"seed": 1}, "epoch='1'"),
    "no seed": (STATE | {"seed": None}, {"seed": 1}, "it has no seed"),
    "no generator": (STATE, {"generator": np.random.default_rng(1)}, "none of a generator"),
    "torch's generator": (
        STATE | {"seed": None, "generator": torch.Generator().get_state()}, {"generator": np.random.default_rng(1)}, "another kind of generator"
    ),
    "NumPy's generator": (
        STATE | {"seed": None, "generator": np.random.default_rng(1).bit_generator.state}, {"generator": torch.Generator()}, "another kind of generator"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NO_STATES)
def test_what_is_no_state_changes_nothing(case):
    state, options, words = NO_STATES[case]
    loader = DataLoader(Numbers(20), 3, shuffle=True, **options)
    before = repr(loader.state_dict())
    with pytest.raises(ValueError, match=words):
        loader.load_state_dict(state)
    assert repr(loader.state_dict()) == before


def test_beginning_with_a_batch():
    reader = Numbers(6)
    loader = DataLoader(reader)
    loader.set_epoch(3, start=4)
    assert values(loader) == [[4], [5]]
    assert reader.seen == [4, 5]
    assert loader.epoch == 4
    loader.set_epoch(0, start=7)
    with pytest.raises(ValueError, match="start=7: the epoch has 6 batches"):
        iter(loader)
