"""The loader: order, bounds, errors, ends, forks, interrupts, and going on in the middle of an epoch."""

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

from fastckpt.data import CheckpointReader, DataLoader, Dataset, Reader, stack
from fastckpt.data.window import Window
from readers import TIMEOUT, Gate, Numbers, Stacked, values

WORKERS = [0, 1, 3]
each_workers = pytest.mark.parametrize("workers", WORKERS)


def batches_of(count, size):
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]


def drain(batches):
    """What an epoch gives: values, and errors in their places."""
    found = []
    while True:
        try:
            found.append(next(batches)["x"].tolist())
        except StopIteration:
            return found
        except Exception as error:
            found.append(error)


# ---- order


@each_workers
@pytest.mark.parametrize("kind", [Numbers, Stacked])
@pytest.mark.parametrize("fuse", [1, 2, 7])
@pytest.mark.parametrize("count", [0, 1, 4, 5, 23])
def test_batches_in_order(workers, kind, fuse, count):
    reader = kind(count)
    loader = DataLoader(reader, batch_size=4, num_workers=workers, fuse=fuse)
    expected = batches_of(count, 4)
    assert len(loader) == len(expected)
    for _ in range(2):
        assert values(loader) == expected
    assert sorted(reader.seen) == sorted([*range(count)] * 2)  # each read once an epoch


def test_a_slow_first_batch_comes_first():
    gate = Gate(8, closed=[0])
    batches = iter(DataLoader(gate, batch_size=2, num_workers=3))
    gate.wait_for(4)  # all others are read
    gate.open()
    assert values(batches) == batches_of(8, 2)


@each_workers
def test_drop_last(workers):
    loader = DataLoader(Numbers(7), batch_size=3, drop_last=True, num_workers=workers)
    assert (len(loader), values(loader)) == (2, [[0, 1, 2], [3, 4, 5]])


@each_workers
def test_any_map_style_dataset(workers):
    class Squares(torch.utils.data.Dataset):
        def __len__(self):
            return 5

        def __getitem__(self, index):
            assert type(index) is int
            return {"x": index**2}

    for dataset in ([{"x": i**2} for i in range(5)], Squares()):
        assert values(DataLoader(dataset, 2, num_workers=workers)) == [[0, 1], [4, 9], [16]]
        shuffled = DataLoader(dataset, 5, shuffle=True, num_workers=workers)
        assert sorted(values(shuffled)[0]) == [0, 1, 4, 9, 16]


def test_getitems_is_preferred_and_counted():
    class Many:
        lacks = 0

        def __len__(self):
            return 4

        def __getitem__(self, index):
            raise AssertionError("one by one")

        def __getitems__(self, indices):
            return [{"x": i} for i in indices][self.lacks :]

    assert values(DataLoader(Many(), 2)) == [[0, 1], [2, 3]]
    Many.lacks = 1
    with pytest.raises(ValueError, match="gave 1 samples where 2 were asked for"):
        next(iter(DataLoader(Many(), 2)))


@pytest.mark.parametrize("name", ["a list", "a reader"])
def test_default_batches_are_torchs(name):
    samples = [{"a": i, "b": (float(i), "text"), "c": torch.full((2,), i)} for i in range(5)]

    class Samples(Numbers):
        def _read(self, positions):
            return [samples[position] for position in positions]

    dataset = samples if name == "a list" else Samples(5)
    expected = list(torch.utils.data.DataLoader(samples, batch_size=2))
    assert repr(list(DataLoader(dataset, batch_size=2))) == repr(expected)


def test_native_batches_make_no_samples():
    class Native(Stacked):
        def _read(self, positions):
            raise AssertionError("sample by sample")

    assert values(DataLoader(Native(5), batch_size=2)) == [[0, 1], [2, 3], [4]]
    assert values(DataLoader(Native(5), batch_size=2, fuse=2)) == [[0, 1], [2, 3], [4]]
    with pytest.raises(AssertionError, match="sample by sample"):  # a collate_fn wants to see them
        next(iter(DataLoader(Native(5), collate_fn=lambda samples: samples)))


def test_numpy_batches():
    reader = Numbers(4)
    reader.framework = "numpy"
    assert isinstance(next(iter(DataLoader(reader, 2)))["x"], np.ndarray)
    assert isinstance(next(iter(DataLoader([1, 2], 2, collate_fn=stack))), np.ndarray)


@pytest.mark.parametrize("fuse", [1, 2, 3])
def test_fused_batches_are_one_read(fuse):
    reader = Numbers(12)
    assert values(DataLoader(reader, batch_size=2, fuse=fuse)) == batches_of(12, 2)
    assert reader.reads == batches_of(12, 2 * fuse)


# ---- samplers decide the order, and nothing else does


def test_shuffling_depends_on_seed_and_epoch_alone():
    def orders(seed, epochs, **options):
        loader = DataLoader(Numbers(50), 50, shuffle=True, seed=seed, **options)
        return [values(loader)[0] for _ in range(epochs)]

    first, second = orders(7, 2)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(50))
    assert orders(7, 2, num_workers=2) == [first, second]
    assert orders(8, 1) != [first]
    loader = DataLoader(Numbers(50), 50, shuffle=True, seed=7)
    loader.set_epoch(1)
    assert values(loader) == [second]


def test_manual_seed_decides_where_no_seed_is_given():
    def order():
        torch.manual_seed(3)
        return values(DataLoader(Numbers(50), 50, shuffle=True))

    assert order() == order()


@pytest.mark.parametrize(
    "make", [lambda: torch.Generator().manual_seed(5), lambda: np.random.default_rng(5)], ids=["torch", "numpy"]
)  # fmt: skip
def test_generator(make):
    def epochs():
        loader = DataLoader(Numbers(30), 30, shuffle=True, generator=make())
        return [values(loader), values(loader)]

    first, second = epochs()
    assert first != second
    assert epochs() == [first, second]


@each_workers
def test_samplers(workers):
    loader = DataLoader(Numbers(10), 2, sampler=[9, 0, 9], num_workers=workers)
    assert (len(loader), values(loader)) == (2, [[9, 0], [9]])
    loader = DataLoader(Numbers(10), batch_sampler=[[1], [2, 3], (4, 5, 6)], fuse=2)
    assert (len(loader), values(loader)) == (3, [[1], [2, 3], [4, 5, 6]])
    keys = DataLoader({"a": {"x": 1}, "b": {"x": 2}}, 2, sampler=["b", "a"], num_workers=workers)
    assert values(keys) == [[2, 1]]


def test_requests_reach_storage_in_the_samplers_order():
    reader = Numbers(100)
    order = [50, 3, 99, 3, 0, 51]
    values(DataLoader(reader, 3, sampler=order, fuse=2))
    assert reader.reads == [order]


def test_distributed_sampler():
    reader = Numbers(11)
    ranks = [
        torch.utils.data.DistributedSampler(reader, num_replicas=2, rank=rank, seed=1)
        for rank in range(2)
    ]
    loaders = [DataLoader(reader, 3, sampler=sampler, num_workers=1) for sampler in ranks]
    epochs = []
    for epoch in range(2):
        [loader.set_epoch(epoch) for loader in loaders]
        assert [sampler.epoch for sampler in ranks] == [epoch] * 2
        epochs.append([list(itertools.chain(*values(loader))) for loader in loaders])
        assert [len(part) for part in epochs[-1]] == [6, 6]  # padded by wrap-around
        assert set(itertools.chain(*epochs[-1])) == set(range(11))
    assert epochs[0] != epochs[1]
    unshuffled = torch.utils.data.DistributedSampler(reader, 2, 1, shuffle=False)
    assert values(DataLoader(reader, 6, sampler=unshuffled)) == [[1, 3, 5, 7, 9, 0]]


class BadSampler:
    def __init__(self, first):
        self.first = first

    def __iter__(self):
        yield self.first
        raise OSError("the sampler's own")

    def __len__(self):
        return 5


class BadLength(Numbers):
    def __len__(self):
        raise OSError("the data set's own")


@each_workers
@pytest.mark.parametrize(
    "make",
    [
        lambda **o: DataLoader(Numbers(5), sampler=BadSampler(0), **o),
        lambda **o: DataLoader(Numbers(5), batch_sampler=BadSampler([0]), **o),
        lambda **o: DataLoader(BadLength(5), **o),
    ],
    ids=["sampler", "batch_sampler", "length"],
)
def test_what_a_sampler_raises_iter_raises(make, workers):
    with pytest.raises(OSError, match="own"):
        iter(make(num_workers=workers))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "batch_size=0: at least 1"),
        ({"batch_size": None}, TypeError, "batch_size=None: a whole number"),
        ({"num_workers": -1}, ValueError, "num_workers=-1"),
        ({"prefetch_depth": 1.5}, TypeError, r"prefetch_depth=1\.5"),
        ({"fuse": 0}, ValueError, "fuse=0"),
        ({"sampler": [0], "shuffle": True}, ValueError, "sampler and shuffle"),
        ({"batch_sampler": [[0]], "batch_size": 2}, ValueError, "batch_sampler decides all"),
        ({"batch_sampler": [[0]], "drop_last": True}, ValueError, "batch_sampler decides all"),
        ({"seed": 1, "generator": torch.Generator()}, ValueError, "seed and generator"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_arguments_that_make_no_sense(options, error, message):
    with pytest.raises(error, match=message):
        DataLoader(Numbers(3), **options)


def test_what_is_no_dataset():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([1])

    for dataset in (5, iter([1]), Stream()):
        with pytest.raises(TypeError, match="map-style"):
            DataLoader(dataset)


# ---- the window


@pytest.mark.parametrize(
    ("workers", "prefetch", "batches", "width"),
    [(2, 2, 20, 4), (2, 5, 20, 7), (3, 1, 20, 4), (1, 0, 20, 1), (2, 100, 6, 6)],
)
def test_no_more_is_begun_than_the_window_holds(workers, prefetch, batches, width):
    gate = Gate(batches, closed=[0])
    epoch = iter(DataLoader(gate, num_workers=workers, prefetch_depth=prefetch))
    gate.wait_for(width if workers > 1 else 1)
    assert not gate.begun.acquire(timeout=0.1)
    gate.open()
    assert values(epoch) == batches_of(batches, 1)


def test_the_window_moves_with_what_is_handed_out():
    gate = Gate(100, closed=[2])
    epoch = iter(DataLoader(gate, num_workers=2, prefetch_depth=1))
    gate.wait_for(3)
    assert [next(epoch)["x"].tolist() for _ in range(2)] == [[0], [1]]
    gate.wait_for(2)  # 3 and 4, beside 2, which hangs
    assert not gate.begun.acquire(timeout=0.1)
    gate.open()
    assert values(epoch) == batches_of(100, 1)[2:]


def test_fused_reads_are_what_the_window_counts():
    gate = Gate(100, closed=[0])
    epoch = iter(DataLoader(gate, batch_size=2, fuse=5, num_workers=2, prefetch_depth=1))
    gate.wait_for(3)
    assert not gate.begun.acquire(timeout=0.1)
    gate.open()
    assert values(epoch) == batches_of(100, 2)


def test_a_huge_prefetch_allocates_nothing():
    loader = DataLoader(Numbers(3), num_workers=2, prefetch_depth=2**62)
    assert values(loader) == [[0], [1], [2]]
    for count, asked, width in ((3, 2**100, 3), (0, 5, 1), (5, 0, 1)):
        window = Window(lambda job: job, count, asked, 2)
        assert window.width == width
        window.stop()


def test_no_wake_up_is_lost():
    window = Window(lambda job: job, 20_000, 2, 2)
    assert [window.next() for _ in range(20_000)] == list(range(20_000))


def test_without_workers_there_is_no_thread():
    class Where(Numbers):
        def _read(self, positions):
            assert threading.current_thread() is threading.main_thread()
            return super()._read(positions)

    reader = Where(6)
    epoch = iter(DataLoader(reader, prefetch_depth=4))
    assert not reader.reads  # nothing is read before it is asked for
    next(epoch)
    assert reader.reads == [[0]]
    assert len(values(epoch)) == 5


def test_the_caller_works_where_the_system_gives_no_thread(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert values(DataLoader(Numbers(5), 2, num_workers=2)) == [[0, 1], [2, 3], [4]]


def test_several_epochs_at_once():
    loader = DataLoader(Numbers(6), 2, num_workers=2)
    pairs = [(a["x"].tolist(), b["x"].tolist()) for a in loader for b in loader]
    expected = batches_of(6, 2)
    assert pairs == list(itertools.product(expected, expected))


def test_one_thread_at_a_time():
    gate = Gate(3, closed=[0])
    epoch = iter(DataLoader(gate, num_workers=1))
    thread = threading.Thread(target=lambda: next(epoch))
    thread.start()
    gate.wait_for(1)
    while not epoch._user:
        pass
    with pytest.raises(RuntimeError, match="another thread"):
        next(epoch)
    gate.open()
    thread.join(TIMEOUT)
    assert values(epoch) == [[1], [2]]


# ---- errors


@each_workers
@pytest.mark.parametrize("kind", [Numbers, Stacked])
@pytest.mark.parametrize("fuse", [1, 3, 10])
def test_an_error_belongs_to_its_batch(workers, kind, fuse):
    reader = kind(20, bad=[5, 18])
    found = drain(iter(DataLoader(reader, batch_size=2, num_workers=workers, fuse=fuse)))
    expected = batches_of(20, 2)
    for batch, bad in ((2, 5), (9, 18)):
        assert type(found[batch]) is KeyError
        assert found[batch].args == (bad,)
        expected[batch] = found[batch]
    assert found == expected


@each_workers
def test_errors_of_user_code_keep_their_type(workers):
    class Own(Exception):
        pass

    def collate(samples):
        if samples[0]["x"] == 1:
            raise Own("here")
        return samples[0]

    found = drain(iter(DataLoader(Numbers(3), collate_fn=collate, num_workers=workers)))
    assert type(found[1]) is Own
    assert found[::2] == [0, 2]


@each_workers
@pytest.mark.parametrize("fuse", [1, 3])
def test_stop_iteration_does_not_end_an_epoch(workers, fuse):
    class Stops(Numbers):
        def _read(self, positions):
            if 1 in positions:
                next(iter([]))
            return super()._read(positions)

    found = drain(iter(DataLoader(Stops(3), num_workers=workers, fuse=fuse)))
    assert type(found[1]) is RuntimeError
    assert "StopIteration" in str(found[1])
    assert found[::2] == [[0], [2]]


def test_what_ends_a_thread_is_raised_by_the_one_who_waits():
    class Exits(Numbers):
        def _read(self, positions):
            if 1 in positions:
                sys.exit("no")
            return super()._read(positions)

    epoch = iter(DataLoader(Exits(3), num_workers=2))
    next(epoch)
    with pytest.raises(SystemExit, match="no"):
        next(epoch)
    assert values(epoch) == [[2]]


def test_an_index_out_of_range_belongs_to_its_batch():
    found = drain(iter(DataLoader(Numbers(3), sampler=[0, 7, 2], num_workers=1)))
    assert type(found[1]) is IndexError
    assert found[::2] == [[0], [2]]


def test_a_closed_reader_is_an_error_at_once():
    reader = Numbers(3)
    reader.close()
    for dataset in (reader, Dataset(reader)):
        with pytest.raises(ValueError, match="closed"):
            iter(DataLoader(dataset))


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


# ---- Dataset


class Samples(Reader):
    def __init__(self, *samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def _read(self, positions):
        return [self.samples[position] for position in positions]


GOOD = {"x": torch.zeros(2), "n": {"y": 1}, "t": (1.0, "a")}
BAD = {
    "lacks a field": ({"x": torch.zeros(2), "n": {"y": 1}}, "it lacks 't'"),
    "has a field": (GOOD | {"z": 1}, "it has 'z'"),
    "inner field": (GOOD | {"n": {}}, r"\['n'\] lacks 'y'"),
    "dtype": (GOOD | {"x": torch.zeros(2).double()}, r"\['x'\] is Tensor of torch\.float64 with 1 axes instead of Tensor of torch\.float32"),
    "axes": (GOOD | {"x": torch.zeros(2, 2)}, "2 axes instead of"),
    "type": (GOOD | {"n": {"y": 1.0}}, r"\['n'\]\['y'\] is float instead of int"),
    "tuple": (GOOD | {"t": (1.0, "a", 2)}, "a tuple of 3 instead of a tuple of 2"),
    "kind": ([1], "it is list instead of a mapping"),
}  # fmt: skip


class TestDataset:
    @pytest.mark.parametrize(("bad", "said"), BAD.values(), ids=BAD)
    def test_samples_of_another_form(self, bad, said):
        reader = Samples(GOOD, GOOD | {"x": torch.zeros(5)}, bad)
        dataset = Dataset(reader)
        assert len(dataset[1]["x"]) == 5  # sizes may differ
        with pytest.raises(
            ValueError, match=f"sample 2 does not have the form of sample 0: .*{said}"
        ):
            dataset.read_many([0, 2])
        for unchecked in (Dataset(reader, validate=False), Dataset(reader, skip_validation=True)):
            assert unchecked[2] is bad

    def test_a_check_of_ones_own(self):
        def check(sample):
            if sample["x"] == 2:
                raise ArithmeticError("two")

        dataset = Dataset(Stacked(4), validate=check)
        assert not dataset.supports_batch  # it wants to see each sample
        found = drain(iter(DataLoader(dataset)))
        assert type(found[2]) is ArithmeticError
        assert drain(iter(DataLoader(Dataset(Stacked(4), validate=check, skip_validation=True))))

    def test_stacked_batches_are_checked_as_a_whole(self):
        class Drifts(Stacked):
            def _read_batch(self, positions):
                batch = super()._read_batch(positions)
                return {"x": batch["x"].double()} if 3 in positions else batch

        found = drain(iter(DataLoader(Dataset(Drifts(6)), batch_size=2)))
        assert found[::2] == [[0, 1], [4, 5]]
        assert "a batch does not have the form of sample 0: ['x'] is Tensor" in str(found[1])

    @each_workers
    @pytest.mark.parametrize("fuse", [1, 2])
    def test_one_bad_sample_fails_its_batch_alone(self, workers, fuse):
        reader = Samples(GOOD, GOOD, BAD["dtype"][0], GOOD)
        loader = DataLoader(Dataset(reader), num_workers=workers, fuse=fuse)
        found = drain(iter(loader))
        assert type(found[2]) is ValueError
        assert [len(found[i][0]) for i in (0, 1, 3)] == [2] * 3

    @each_workers
    def test_transform(self, workers):
        dataset = Dataset(Stacked(4), transform=lambda sample: {"x": sample["x"] * 10})
        assert values(DataLoader(dataset, 2, num_workers=workers)) == [[0, 10], [20, 30]]
        assert dataset[-1]["x"] == 30

    def test_device(self):
        dataset = Dataset(Stacked(4), device="meta")  # as good as any device that is not the CPU
        assert (
            dataset[0]["x"].device.type == dataset.__getitems__([1])[0]["x"].device.type == "meta"
        )
        assert dataset.read_many([0])[0]["x"].device.type == "cpu"
        for workers in (0, 2):
            batches = list(DataLoader(dataset, 2, num_workers=workers))
            assert [(b["x"].device.type, len(b["x"])) for b in batches] == [("meta", 2)] * 2
        assert Dataset(Stacked(1), device="cpu")[0]["x"] == 0

    def test_device_needs_torch(self):
        reader = Numbers(1)
        reader.framework = "numpy"
        with pytest.raises(ValueError, match="framework='torch' for device"):
            Dataset(reader, device="cpu")

    def test_torch_loads_from_it_in_processes(self):
        loader = torch.utils.data.DataLoader(Dataset(Numbers(5)), 2, num_workers=2)
        assert values(loader) == [[0, 1], [2, 3], [4]]
        assert len(pickle.loads(pickle.dumps(Dataset(Numbers(5), device="cpu")))) == 5

    def test_what_is_no_reader(self):
        with pytest.raises(TypeError, match="a Reader is expected, not list"):
            Dataset([1, 2])
        with pytest.raises(TypeError, match="validate=3"):
            Dataset(Numbers(1), validate=3)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_pinning_needs_an_accelerator():
    with pytest.raises(RuntimeError, match="pin_memory=True needs an accelerator"):
        DataLoader(Numbers(1), pin_memory=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@each_workers
def test_cuda(workers):
    dataset = Dataset(Stacked(1000), device="cuda")
    batches = list(DataLoader(dataset, 10, num_workers=workers, fuse=3))
    assert all(batch["x"].is_cuda for batch in batches)
    assert values(batches) == batches_of(1000, 10)
    [pinned, *_] = DataLoader(Stacked(10), 10, pin_memory=True)
    assert pinned["x"].is_pinned()


# ---- training


@pytest.mark.parametrize("workers", [0, 2])
def test_a_training_loop(tmp_path, workers):
    torch.manual_seed(0)
    x = torch.randn(200, 4)
    torch.save({"x": x, "y": x @ torch.tensor([1.0, -2, 3, 0.5])}, tmp_path / "train.pt")
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with CheckpointReader(tmp_path / "train.pt") as reader:
        loader = DataLoader(Dataset(reader), 20, shuffle=True, seed=0, num_workers=workers)
        for _ in range(15):
            for batch in loader:
                loss = torch.nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    assert loss < 1e-3
