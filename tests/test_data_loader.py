"""The loader: order, samplers, bounds, errors."""

import gc
import inspect
import itertools
import sys
import threading
import time
import weakref

import numpy as np
import pytest
import torch

from fastckpt.data import DataLoader, Dataset, stack, window
from fastckpt.data.checks import NOT_HERE
from fastckpt.data.window import Window
from readers import TIMEOUT, Gate, Numbers, Stacked, batches_of, drain, values
from support import alarms

WORKERS = [0, 1, 3]
each_workers = pytest.mark.parametrize("workers", WORKERS)

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
        ({"batch_size": None}, TypeError, "batch_size=None: .* iterating over the dataset gives"),
        ({"batch_size": None, "sampler": [0]}, TypeError, "batch_size=None: a whole number"),
        ({"timeout": 5}, TypeError, "timeout: .* threads, there are no processes"),
        ({"prefetch_factor": 2}, TypeError, "prefetch_factor: .*: prefetch_depth="),
        ({"persistent_workers": True}, TypeError, "persistent_workers: .* threads"),
        ({"worker_init_fn": print}, TypeError, "worker_init_fn: .* threads"),
        ({"multiprocessing_context": "spawn"}, TypeError, "multiprocessing_context: .* threads"),
        ({"batchsize": 2}, TypeError, "unexpected keyword argument 'batchsize'"),
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
    for text in ("train.pt", b"train.pt"):
        with pytest.raises(TypeError, match=r"not (str|bytes); CheckpointReader\(path\)"):
            DataLoader(text)


def test_all_that_torchs_loader_takes_is_taken_or_refused_with_a_reason():
    theirs, ours = (
        inspect.signature(loader).parameters for loader in (torch.utils.data.DataLoader, DataLoader)
    )
    assert NOT_HERE.keys() >= theirs.keys() - ours.keys()
    assert not NOT_HERE.keys() & ours.keys()


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
    assert [taken(window) for _ in range(20_000)] == list(range(20_000))


def taken(window):
    """The result of the next job of a Window."""
    job = window.next_out
    result = window.get(job)
    window.release(job)
    return result


def who_does_it(job):
    return threading.current_thread().name


class TestHelping:
    """Over samples in memory the caller makes a batch that no thread has begun, rather than wait for it."""

    @pytest.fixture
    def idle(self, monkeypatch):
        """A window of jobs that have a thread, which has done all that it may do."""
        monkeypatch.setattr(window, "HURRY", float("inf"))
        made = Window(who_does_it, 100, 2, 1, helps=True)
        while not made.idle:
            time.sleep(0)
        yield made
        made.stop()

    def test_who_comes_back_at_once_is_not_made_to_wait(self, idle):
        me = threading.current_thread().name
        assert [taken(idle) for _ in range(5)] == ["loader"] * 2 + [me] * 3

    def test_who_computes_meanwhile_has_batches_made_ahead(self, idle, monkeypatch):
        monkeypatch.setattr(window, "HURRY", 0.0)
        for _ in range(20):
            assert taken(idle) == "loader"  # which wakes the thread
            while not idle.idle:
                time.sleep(0)

    @pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
    def test_what_ends_a_program_costs_no_batch(self, error):
        ended = []

        def collate(samples):
            if samples == [3] and threading.current_thread() is threading.main_thread():
                ended.append(True)
                if len(ended) == 1:
                    raise error
            return {"x": np.array(samples)}

        def starts(self, number):  # none: the caller does it all
            self.threads.append(threading.current_thread())

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Window, "_start_threads", starts)
            epoch = iter(DataLoader([1, 2, 3, 4], num_workers=1, collate_fn=collate))
        assert [next(epoch)["x"].tolist() for _ in range(2)] == [[1], [2]]
        with pytest.raises(error):
            next(epoch)
        assert values(epoch) == [[3], [4]]

    @pytest.mark.parametrize("kind", [list, tuple, dict])
    def test_every_batch_comes_once(self, kind):
        samples = [{"x": i} for i in range(999)]
        dataset = dict(enumerate(samples)) if kind is dict else kind(samples)
        for hurry in (0, 1, window.HURRY):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(window, "HURRY", hurry)
                assert values(DataLoader(dataset, 2, num_workers=2)) == batches_of(999, 2)


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


class Stop(BaseException):
    """What a signal's handler raises."""


@pytest.mark.parametrize("fuse", [1, 3])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_signals_cost_no_batch(num_workers, fuse):
    """Wherever a signal comes while the loader is asked for a batch, that batch is the next one."""

    def stop(*_):
        if asking:
            raise Stop

    asking, found, stops = False, [], 0
    epoch = iter(DataLoader(Numbers(600), num_workers=num_workers, fuse=fuse))
    gc.disable()  # whose callbacks would be interrupted, too, and what they raise is lost
    try:
        with alarms(stop, 2e-4, 3e-4):
            while True:
                try:
                    asking = True
                    for batch in epoch:
                        asking = False
                        found += batch["x"].tolist()
                        asking = True
                    asking = False
                    break
                except Stop:
                    asking, stops = False, stops + 1
    finally:
        asking = False
        gc.enable()
    assert found == list(range(600))
    assert stops
    assert len(epoch) == 0


def test_an_epoch_that_its_own_samples_lead_back_to_is_collected():
    class Keeps(Numbers):
        epoch = None

    threads, kept = threading.active_count(), []
    for _ in range(3):
        samples = Keeps(100)
        samples.epoch = iter(DataLoader(samples, 2, num_workers=2))
        next(samples.epoch)
        kept.append(weakref.ref(samples))
        del samples
    until = time.monotonic() + TIMEOUT
    while threading.active_count() > threads and time.monotonic() < until:
        gc.collect()
        time.sleep(0.001)
    assert [ref() for ref in kept] == [None] * 3
    assert threading.active_count() == threads
