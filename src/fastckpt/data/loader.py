"""DataLoader: batches in the order of the epoch, made ahead of it by threads."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Never

from ..arguments import at_least
from .checks import check_samplers, check_state, refuse_others
from .dataset import Dataset
from .device import Transfer
from .fetch import Fetch, Outcome
from .order import Order, batch_count, compact, equal_batches, given_batches, shuffled
from .window import Window


class DataLoader:
    """Iterating over it is an epoch: batches in order, whoever made them first. ``len(loader)`` is how many.

    dataset: a Reader, a Dataset of ours, or any map-style dataset (a list is one). Where a reader stacks samples by itself
        (``supports_batch``) and ``collate_fn`` is None, batches come through its ``read_batch``.
    batch_size, shuffle, sampler, batch_sampler, collate_fn, drop_last: as torch's DataLoader takes them, but that batch_size=None
        (no batches) is refused. They decide which samples, in which order. A sampler is asked for all of an epoch before the first sample is read, so it must end.
    num_workers: how many threads make batches; 0 makes each when it is asked for, on the caller's thread.
    prefetch_depth: how many more than ``num_workers`` may be begun and not handed out. Nothing is allocated for it.
    fuse: how many consecutive batches are one read of the store. The bound above then counts reads.
    pin_memory: put tensors into page-locked memory, which needs an accelerator.
    seed: shuffles by (seed, epoch) alone; None takes one of torch's generator where torch is loaded, else of the system. Of no
        effect without ``shuffle``.
    generator: shuffle by a torch.Generator or numpy.random.Generator instead. The order is not that of torch's DataLoader, which
        draws from the generator for its processes before it shuffles; ``sampler=RandomSampler(...)`` gives one order to both.
    others: none are taken; those that torch has for its processes (timeout, prefetch_factor, persistent_workers, worker_init_fn,
        multiprocessing_context) are a TypeError that says what to do instead.

    An error that a batch raises (its type is kept) is raised in that batch's place, and the next ``next()`` goes on with the batch
    behind it. What a sampler or ``len(dataset)`` raises, ``iter(loader)`` raises. Several epochs may be under way at once;
    one thread at a time takes from each. ``epoch`` is the number of the epoch that is begun next, from 0; it counts by itself.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Iterable[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        *,
        prefetch_depth: int = 2,
        fuse: int = 1,
        generator: Any = None,
        seed: int | None = None,
        **others: Never,
    ):
        refuse_others(others)
        check_samplers(
            dataset, batch_size, shuffle, sampler, batch_sampler, drop_last, seed, generator
        )
        self.dataset = dataset
        self.sampler: Any = sampler
        self.batch_sampler: Any = batch_sampler
        self.batch_size = at_least(1, "batch_size", batch_size)
        self.num_workers = at_least(0, "num_workers", num_workers)
        self.prefetch_depth = at_least(0, "prefetch_depth", prefetch_depth)
        self.fuse = at_least(1, "fuse", fuse)
        self.shuffle, self.drop_last = bool(shuffle), bool(drop_last)
        self.collate_fn, self.pin_memory, self.generator = collate_fn, bool(pin_memory), generator
        if seed is None and self.shuffle and generator is None:
            seed = fresh_seed()
        self.seed = None if seed is None else at_least(0, "seed", seed)
        device = dataset.device if isinstance(dataset, Dataset) else None
        self._transfer = Transfer(device, self.pin_memory)
        self.epoch = 0
        self._start = 0  # the batch that the next epoch begins with
        self._expected: dict[str, Any] | None = None  # the state that the next epoch goes on from
        self._epoch: Epoch | None = None  # the one that was begun last

    def __len__(self) -> int:
        """How many batches an epoch has."""
        if self.batch_sampler is not None:
            return len(self.batch_sampler)
        samples = self.dataset if self.sampler is None else self.sampler
        return batch_count(len(samples), self.batch_size, self.drop_last)

    def __iter__(self) -> Batches:
        """Begin an epoch."""
        generator_state = self._generator_state()
        order = self._order()
        if self._expected is not None:
            self._check_expected(order)
        elif self._start > len(order):
            raise ValueError(f"start={self._start}: the epoch has {len(order)} batches")
        epoch = Epoch(self.epoch, order, self._start, generator_state)
        fetch = Fetch(self.dataset, self.collate_fn, self._transfer, bool(self.num_workers))
        batches = Batches(epoch, fetch, self)
        self._epoch, self._start, self._expected = epoch, 0, None
        self.epoch += 1
        return batches

    def _order(self) -> Order:
        if self.batch_sampler is not None:
            return given_batches(self.batch_sampler)
        if self.sampler is not None:
            indices = compact(self.sampler)
        elif self.shuffle:
            indices = shuffled(len(self.dataset), self.generator, self.seed, self.epoch)
        else:
            indices = range(len(self.dataset))
        return equal_batches(indices, self.batch_size, self.drop_last)

    # -- where an epoch is

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Let the next epoch be number ``epoch``, and begin with batch ``start``: those before it are not read.

        Tells the sampler, too, if it has a ``set_epoch``, as torch's DistributedSampler does. An epoch that was left early is
        forgotten: ``state_dict`` is about this one.
        """
        self.epoch, self._start = at_least(0, "epoch", epoch), at_least(0, "start", start)
        self._epoch = self._expected = None
        if (sampler := self._epoch_sampler()) is not None:
            sampler.set_epoch(self.epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch that was begun last is, or that the next has not begun: a dict for ``load_state_dict``.

        What was handed out counts, not what was made ahead; so does a batch that failed. Values are plain, but for the state of a ``generator``.
        """
        if self._epoch is not None and not self._epoch.ended:
            epoch = self._epoch
            state = epoch.state_dict()
        elif self._expected is not None:
            return dict(self._expected)
        else:
            state = {"epoch": self.epoch, "start": self._start, "batches": None, "crc32": None}
            state["generator"] = self._generator_state()
        sampler = self._epoch_sampler()
        return state | {"seed": self.seed, "sampler_epoch": getattr(sampler, "epoch", None)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next epoch go on where ``state`` was taken, without reading what was handed out by then.

        Its seed takes the place of the loader's own, from here on.
        Raises ValueError for what is no state of a loader like this one; nothing has changed then. ``iter(loader)`` raises it if
        the order is no longer the same: other batches, or a sampler that is random and has not been set back.
        """
        state = check_state(state, self)
        if state["generator"] is not None and self.generator is not None:
            set_generator_state(self.generator, state["generator"])
        self.epoch, self._start = state["epoch"], state["start"]
        self.seed, self._epoch = state["seed"], None
        self._expected = dict(state) if state["crc32"] is not None else None
        if state["sampler_epoch"] is not None and (sampler := self._epoch_sampler()) is not None:
            sampler.set_epoch(state["sampler_epoch"])

    def _check_expected(self, order):
        expected = self._expected
        if (len(order), order.crc32()) != (expected["batches"], expected["crc32"]):
            raise ValueError(
                f"the epoch has {len(order)} batches in another order than the {expected['batches']} when the state was taken; "
                f"resume with the same data, batch size and sampler (one that is random needs its generator set back), "
                f"or begin with set_epoch"
            )

    def _epoch_sampler(self):
        """Whoever wants to know the number of the epoch."""
        candidates = (
            self.sampler,
            self.batch_sampler,
            getattr(self.batch_sampler, "sampler", None),
        )
        return next((s for s in candidates if hasattr(s, "set_epoch")), None)

    def _generator_state(self):
        return None if self.generator is None else generator_state(self.generator)

    def __repr__(self):
        return f"<{type(self).__name__} of {self.dataset!r:.200}, {self.num_workers} workers>"


class Epoch:
    """Where an epoch is: its number, its order, and how many batches were handed out. Holds no thread and no batch."""

    def __init__(self, number, order, start, generator):
        self.number, self.order, self.delivered, self.generator = number, order, start, generator
        self.ended = False

    def state_dict(self):
        return {
            "epoch": self.number,
            "start": self.delivered,
            "batches": len(self.order),
            "crc32": self.order.crc32(),
            "generator": self.generator,
        }


class Batches(Iterator[Any]):
    """An epoch under way. ``len`` is how many batches are left; dropping it, or ``close()``, cancels the rest at once."""

    def __init__(self, epoch, fetch, loader):
        self._epoch, self._start, self._fuse = epoch, epoch.delivered, loader.fuse
        self._finish = loader._transfer.finish
        self._read = (
            -1
        )  # the read whose Outcomes are in ``_made``; what was handed out of them is None
        self._made: list[Any] = []
        self._user: dict[str, tuple[int, int]] = {}  # the process and thread in __next__
        order, start, fuse, count = epoch.order, epoch.delivered, loader.fuse, len(epoch.order)

        def run(read):
            first = start + read * fuse
            last = min(first + fuse, count)
            try:
                return fetch(order, first, last)
            except fetch.catches as error:  # out of memory, say
                return [Outcome(error=error)] * (last - first)

        self._window = Window(
            run,
            batch_count(count - start, fuse, drop_last=False),
            loader.num_workers + loader.prefetch_depth,
            loader.num_workers,
            helps=fetch.in_memory,
        )

    def __iter__(self) -> Batches:
        return self

    def __len__(self) -> int:
        return len(self._epoch.order) - self._epoch.delivered

    def __next__(self) -> Any:
        # A note and no lock: Ctrl-C cannot leave it behind for its own thread, nor a fork for its child.
        me = (os.getpid(), threading.get_ident())
        user = self._user.setdefault("now", me)
        if user != me and user[0] == me[0]:
            raise RuntimeError("another thread waits for a batch of this epoch; one at a time can")
        try:
            made, place = self._outcomes()
            outcome = made[place]
            batch = None if outcome.error else self._finish(outcome.batch, outcome.arrived)
        finally:
            self._user.pop("now", None)
        # Ctrl-C may come after any call: until here the same batch would be next, from here on nothing is called.
        self._epoch.delivered += 1
        made[place] = None
        if outcome.error is None:
            return batch
        try:
            raise outcome.error
        finally:
            del outcome, made  # or the traceback would hold itself

    def _outcomes(self):
        """The Outcomes of the read that has the next batch, and its place among them."""
        if not len(self):
            self._epoch.ended = True
            self.close()
            raise StopIteration
        read, place = divmod(self._epoch.delivered - self._start, self._fuse)
        if self._read != read:
            self._made = self._window.get(read)
            self._read = read
        if self._window.next_out == read:
            self._window.release(read)
        return self._made, place

    def close(self) -> None:
        """Cancel what is not handed out, and return at once: batches that are being made end by themselves."""
        self._window.stop()
        self._read, self._made = -1, []

    def __del__(self):
        if hasattr(self, "_window"):
            self.close()


def fresh_seed():
    """A seed that ``torch.manual_seed`` decides, where torch is loaded."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return int(torch.randint(2**63 - 1, (), dtype=torch.int64))
    return int.from_bytes(os.urandom(7), "little")


def generator_state(generator):
    if hasattr(generator, "get_state"):
        return generator.get_state()
    return generator.bit_generator.state


def set_generator_state(generator, state):
    try:
        if hasattr(generator, "set_state"):
            generator.set_state(state)
        else:
            generator.bit_generator.state = state
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"state: it is of another kind of generator than {generator!r:.100}: {error}"
        ) from None
