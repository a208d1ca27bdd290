"""The order of an epoch: which samples make up which batch. Decided before the first is read."""

import itertools
import zlib

import numpy as np

from ..importing import importing
from .reader import as_column


class Order:
    """The batches of an epoch: ``len``, ``order[b]`` (the indices of batch b), ``spans`` of several that are read together."""

    def __init__(self, indices, ends):
        # Sample indices of all batches in a row, and one past the last of each batch, both in the order of the epoch.
        self._indices, self._ends = indices, ends

    def __len__(self):
        return len(self._ends)

    def _start(self, batch):
        return int(self._ends[batch - 1]) if batch else 0

    def __getitem__(self, batch):
        return self._indices[self._start(batch) : int(self._ends[batch])]

    def joined(self, first, last):
        """The indices of batches ``first`` to ``last`` (exclusive) in a row, and how many of them each has."""
        starts = [self._start(batch) for batch in range(first, last + 1)]
        sizes = [end - start for start, end in itertools.pairwise(starts)]
        return self._indices[starts[0] : starts[-1]], sizes

    def crc32(self):
        """A checksum of the whole order, by which a state knows it again."""
        crc = 0
        for part in (self._indices, self._ends):
            if isinstance(part, range):  # as the column that it stands for, in pieces
                pieces = [part[i : i + 65536] for i in range(0, len(part), 65536)]
                columns = [np.arange(p.start, p.stop, p.step, dtype=np.int64) for p in pieces]
            elif isinstance(part, np.ndarray):
                columns = [np.ascontiguousarray(part, dtype=np.int64)]
            else:
                columns = [repr(part).encode()]
            for column in columns:
                crc = zlib.crc32(column, crc)
        return crc


class Ends:
    """Where batches of equal size end, without a column of them: ``ends[b] == min((b + 1) * size, total)``."""

    def __init__(self, total, size, drop_last):
        self.total, self.size = total, size
        self.count = batch_count(total, size, drop_last)

    def __len__(self):
        return self.count

    def __getitem__(self, batch):
        return min((batch + 1) * self.size, self.total)

    def __repr__(self):
        return f"{self.count} of {self.size} of {self.total}"


def batch_count(total, size, drop_last):
    return total // size if drop_last else -(-total // size)


def equal_batches(indices, size, drop_last):
    """The Order of batches of ``size`` samples; the last may be smaller, or is left out."""
    return Order(indices, Ends(len(indices), size, drop_last))


def given_batches(batches):
    """The Order of the batches that a batch sampler gives."""
    batches = [batch if isinstance(batch, (list, tuple)) else list(batch) for batch in batches]
    ends = np.cumsum([len(batch) for batch in batches], dtype=np.int64)
    return Order(compact([index for batch in batches for index in batch]), ends)


def compact(indices):
    """What a sampler gives: a column where it gives whole numbers, else the list of keys that it is."""
    indices = list(indices)
    try:
        column = as_column(indices, "the sampler")
    except (TypeError, ValueError):  # other keys; tuples of several lengths, say
        return indices
    return column if column.dtype != object else indices


def shuffled(length, generator, seed, epoch):
    """Numbers 0 to length - 1 in random order: of ``generator`` (torch's or NumPy's), else of (seed, epoch) alone."""
    if generator is None:
        return np.random.default_rng([seed, epoch]).permutation(length)
    if isinstance(generator, np.random.Generator):
        return generator.permutation(length)
    with importing:
        import torch

    return torch.randperm(length, generator=generator).numpy()
