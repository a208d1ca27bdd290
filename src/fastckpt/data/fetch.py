"""Fetch: several batches out of one read, each a result or an error of its own."""

from typing import Any, NamedTuple

from .collate import collator
from .dataset import Dataset
from .reader import Reader


class Outcome(NamedTuple):
    """A batch on its way (see Transfer), or why there is none."""

    batch: Any = None
    arrived: Any = None
    error: BaseException | None = None


class Plain:
    """A map-style dataset that is none of ours, with what Fetch wants of a reader."""

    framework = "torch"

    def __init__(self, dataset):
        self.dataset = dataset
        self._items = getattr(dataset, "__getitems__", None)

    def read_many(self, indices):
        if hasattr(indices, "tolist"):
            indices = indices.tolist()  # a dataset may be a list, which takes no number of NumPy's
        if self._items is None:
            dataset = self.dataset
            return [dataset[index] for index in indices]
        samples = self._items(list(indices))
        if len(samples) != len(indices):
            raise ValueError(
                f"{type(self.dataset).__name__}.__getitems__ gave {len(samples)} samples where {len(indices)} were asked for"
            )
        return samples


class Fetch:
    """Called with a span of batches of an Order, gives an Outcome for each; what is raised is one of them.

    What ends a program (KeyboardInterrupt, SystemExit) passes through where the caller's thread may be the one that reads: where
    there are no others (``threads``), and over samples in memory, where that helps them.

    All are read at once; where that fails, one by one, so that what is wrong with one is not the others' fault.
    """

    def __init__(self, dataset, collate_fn, transfer, threads):
        self.dataset = dataset if isinstance(dataset, Dataset) else None
        self.stacked = collate_fn is None and getattr(dataset, "supports_batch", False)
        self.reader = dataset.reader if self.dataset else dataset
        if not isinstance(self.reader, Reader):
            self.reader, self.stacked = Plain(dataset), False
        else:
            self.reader.check_open()
        self.read = self.reader.read_batch if self.stacked else self.reader.read_many
        self.collate_fn = collate_fn
        if collate_fn is None and not self.stacked:
            self.collate_fn = collator(self.reader.framework)
        # Samples are there, and taking them never waits.
        self.in_memory = type(dataset) in (list, tuple, dict)
        self.transfer = transfer
        self.catches = BaseException if threads and not self.in_memory else Exception

    def __call__(self, order, first, last):
        if last - first > 1:
            indices, sizes = order.joined(first, last)
            try:
                parts = self._parts(self.read(indices), indices, sizes)
            except self.catches:
                pass  # it is met again below, by the batch that it belongs to
            else:
                return [self._outcome(self._finish, *part) for part in parts]
        return [self._outcome(self._read_one, order[batch]) for batch in range(first, last)]

    def _parts(self, found, indices, sizes):
        """[(what was read of it, its indices)] for each batch."""
        parts, start = [], 0
        for size in sizes:
            end = start + size
            part = self.reader.cut_batch(found, start, end) if self.stacked else found[start:end]
            parts.append((part, indices[start:end]))
            start = end
        return parts

    def _read_one(self, indices):
        return self._finish(self.read(indices), indices)

    def _finish(self, part, indices):
        """A batch of what the reader gave: stacked already, or samples."""
        if self.stacked:
            return self.dataset.check_batch(part) if self.dataset else part
        return self.collate_fn(self.dataset.prepare(part, indices) if self.dataset else part)

    def _outcome(self, make, *args):
        try:
            return Outcome(*self.transfer.start(make(*args)))
        except StopIteration as error:  # it would end the epoch, without a word
            said = RuntimeError("a reader, transform or collate_fn raised StopIteration")
            said.__cause__ = error
            return Outcome(error=said)
        except self.catches as error:
            return Outcome(error=error)
