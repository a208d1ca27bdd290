"""Reader: samples by number, from wherever they are stored. Storage only: no order, no threads, no device."""

from __future__ import annotations

import abc
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..arguments import kind_of
from ..errors import short
from ._positions import resolve
from .collate import collate
from .tree import cut, merge, odd_rows


def counted(read_batch):
    """Mark a ``_read_batch`` that makes a row for each position, so that nobody counts them after it.

    For readers whose columns have that length from the start: counting two leaves took 1 us where a batch of LitData's takes 10.
    """
    read_batch.counted = True
    return read_batch


class Reader(abc.ABC):
    """Samples 0 to ``len(reader) - 1``; a map-style dataset for ``torch.utils.data.DataLoader`` as it is.

    To write one, give it ``__len__`` and ``_read(positions)``: an int64 column of positions that were checked (0 <= position
    < len), in the order that was asked for and perhaps with repetitions, to a list of as many samples in that order. The rest
    is here. Further hooks, each optional:

    - ``_read_one(position)``: one sample, where that is quicker than ``_read`` of a column of one;
    - ``_read_batch(positions)``: the samples stacked, as ``collate`` of them would be, with no object for each. A tensor, an
      array or a list of texts in it that is not as long as ``positions`` is a RuntimeError;
    - ``cut_batch``, ``merge_batches``: where batches are more than leaves stacked along the first axis; no length is compared then;
    - ``_close()``: give back what was opened; called once, by the first ``close()``.

    What a reader promises, and a subclass keeps:

    - *Samples belong to the caller*: they own their memory, are writable, and stay when the reader is closed. A position that
      is asked for twice gives two samples that share nothing.
    - *Threads*: any method may be called from many threads at once. So reads go by position (``os.pread``, not seek and read),
      what is made on first use is made aside and then assigned, and what cannot be shared has a lock, which is not held while
      waiting for another one. A read that meets ``close()`` ends as if there were none, or raises ValueError; it never crashes.
    - *Forks*: a reader that was opened before a fork works in the child. So no thread is kept that a read needs, and what has a
      position, a lock that another thread may hold, or a thread of its own is opened anew where ``os.getpid()`` is another
      than when it was made.
    - *Pickling*: the copy is made by calling the class with the same arguments again, so nothing that is open travels, and a
      ``spawn`` worker opens the store for itself. Arguments are paths and options, not open files; paths that are relative
      mean the folder that is current there.

    ``framework`` ("torch" or "numpy", a class or instance attribute) says what ``read_batch`` stacks samples into.
    """

    framework: str = "torch"
    _closed = False
    _made_with: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **options: Any):
        self = super().__new__(cls)
        self._made_with = args, options
        return self

    # -- the hooks

    @abc.abstractmethod
    def __len__(self) -> int:
        """How many samples there are."""

    @abc.abstractmethod
    def _read(self, positions: np.ndarray) -> list[Any]:
        """The samples at checked positions (int64, 0 <= position < len), in this order."""

    def _read_one(self, position: int) -> Any:
        return self._take(np.array([position], dtype=np.int64))[0]

    @counted
    def _read_batch(self, positions: np.ndarray) -> Any:
        return collate(self._take(positions), self.framework)

    def cut_batch(self, batch: Any, start: int, end: int) -> Any:
        """Samples ``start`` to ``end`` (exclusive) of what ``read_batch`` gave, as a batch of their own."""
        return cut(batch, start, end)

    def merge_batches(self, batches: list[Any], order: np.ndarray) -> Any:
        """Batches of ``read_batch``, one behind the other, with their samples in another order: ``order[k]`` comes k-th."""
        return merge(batches, order)

    def _close(self) -> None:  # noqa: B027 - a hook, not an omission
        pass

    # -- reading

    def read(self, index: int) -> Any:
        """Read one sample; a negative index counts from the end. Raises IndexError and TypeError as a list does."""
        self.check_open()
        return self._read_one(self._position(index))

    def read_many(self, indices: Iterable[int]) -> list[Any]:
        """Read samples in the order that is asked for: a list, a range, an array or a tensor of whole numbers.

        An index may be negative, and may occur more than once. Raises IndexError, which names the first index that is out of
        range and how many samples there are, TypeError for what is not a whole number, ValueError once the reader is closed.
        """
        self.check_open()
        return self._take(self._positions(indices))

    def read_batch(self, indices: Iterable[int]) -> Any:
        """Read samples stacked: what collating ``read_many(indices)`` gives, along a new first axis of ``len(indices)``.

        Where ``supports_batch`` is True, this makes no object for each sample. Raises what ``read_many`` raises, ValueError for
        no indices at all, and RuntimeError for a ``_read_batch`` that gives more or fewer samples than were asked for.
        """
        self.check_open()
        positions = self._positions(indices)
        if not len(positions):
            raise ValueError(f"{self!r}: a batch of no samples cannot be stacked")
        batch = self._read_batch(positions)
        cls = type(self)  # where it cuts in a way of its own, batches have a form of their own
        counts = (
            not getattr(cls._read_batch, "counted", False) and cls.cut_batch is Reader.cut_batch
        )
        if counts and (odd := odd_rows(batch, len(positions))):
            path, rows = odd
            raise RuntimeError(
                f"{self!r}: _read_batch gave {rows} samples{path and ' in '}{path} where {len(positions)} were asked for; batches "
                "that are not stacked along the first axis need a cut_batch and a merge_batches of their own"
            )
        return batch

    @property
    def supports_batch(self) -> bool:
        """Whether ``read_batch`` makes no object for each sample."""
        return type(self)._read_batch is not Reader._read_batch

    def __getitem__(self, index: int | slice) -> Any:
        """One sample, or a list of the samples of a slice."""
        if isinstance(index, slice):
            return self.read_many(range(*index.indices(len(self))))
        return self.read(index)

    def __getitems__(self, indices: Iterable[int]) -> list[Any]:
        """What torch's DataLoader asks for a batch with."""
        return self.read_many(indices)

    def _take(self, positions):
        if not len(positions):
            return []
        samples = self._read(positions)
        if len(samples) != len(positions):
            raise RuntimeError(
                f"{self!r}: {len(samples)} samples were read where {len(positions)} were asked for"
            )
        return samples

    def _position(self, index):
        try:
            position = operator.index(index)
        except TypeError:
            raise TypeError(
                f"{self!r}: an index is a whole number, not {type(index).__name__}"
            ) from None
        length = len(self)
        if not -length <= position < length:
            raise self._out_of_range(position, length)
        return position + length if position < 0 else position

    def _positions(self, indices):
        """Checked positions, an int64 column that is the caller's own or shared with ``indices``: not to be written to."""
        length = len(self)
        column = resolve(indices, length)
        if column is not None:
            return column
        if isinstance(indices, range) and (bad := first_outside(indices, length)) is not None:
            raise self._out_of_range(bad, length)
        column = as_column(indices, self)
        if not len(column):
            return column
        bad = np.flatnonzero((column < -length) | (column >= length))
        if len(bad):
            raise self._out_of_range(int(column[bad[0]]), length)
        column = column.astype(np.int64, copy=False)
        return column if column.min() >= 0 else np.where(column < 0, column + length, column)

    def _out_of_range(self, index, length):
        return IndexError(
            f"{self!r}: index {short(index)} is out of range; there are {length} samples"
        )

    # -- life

    @property
    def closed(self) -> bool:
        return self._closed

    def check_open(self) -> None:
        """Raise ValueError once the reader is closed."""
        if self._closed:
            raise ValueError(f"{type(self).__name__}: the reader is closed; open it anew")

    def close(self) -> None:
        """Give back what is open. Samples that were read stay; reading more raises ValueError. Closing again does nothing."""
        if not self._closed:
            self._closed = True
            self._close()

    def __enter__(self):
        self.check_open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self):
        self.check_open()
        return _open_again, (type(self), *self._made_with)

    def __repr__(self):
        state = "closed" if self._closed else f"{len(self)} samples"
        return f"<{type(self).__name__}, {state}>"


def _open_again(cls, args, options):
    return cls(*args, **options)


def first_outside(indices, length):
    """The first index of a range that is out of range; None if none is. Takes no memory, however long the range is."""
    if not indices or (-length <= indices[0] < length and -length <= indices[-1] < length):
        return None
    start, step = indices.start, indices.step
    if not -length <= start < length:
        return start
    steps = -((start - length) // step) if step > 0 else (start + length) // -step + 1
    return start + steps * step


def as_column(indices, where):
    """Whole numbers of any kind as a column; TypeError, which begins with ``where``, for what is none."""
    if not hasattr(indices, "__array__"):
        if not hasattr(indices, "__iter__") and not hasattr(indices, "__getitem__"):
            raise TypeError(
                f"{where!r}: indices are whole numbers in a list, a range or one axis, not {kind_of(indices)}"
            )
        indices = range_column(indices) if isinstance(indices, range) else list(indices)
    column = np.asarray(indices)
    if column.ndim == 1 and not column.size:
        return column.astype(np.int64)
    if column.dtype == object and all(hasattr(item, "__index__") for item in column.flat):
        return column  # of numbers too large for any machine: they are out of range, and keep their value until that is said
    if column.ndim != 1 or column.dtype.kind not in "iu":
        found = f"{type(indices).__name__} of {column.dtype}, shape {column.shape}"
        raise TypeError(
            f"{where!r}: indices are whole numbers in a list, a range or one axis, not {found}"
        )
    return column


def range_column(indices):
    """A range as a column; it is not made longer than its numbers allow, and keeps those that no int64 holds."""
    try:
        return np.arange(indices.start, indices.stop, indices.step)
    except OverflowError:
        return list(indices)
