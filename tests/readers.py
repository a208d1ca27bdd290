"""Readers for the tests of loaders: in memory, counting, waiting for a word, failing where they are told to.

They import torch only where they make tensors: ``Numbers.framework = "numpy"`` does without.
"""

import threading

import numpy as np

from fastckpt.data import Reader

TIMEOUT = 300  # seconds; nothing waits as long unless it hangs


class Numbers(Reader):
    """Sample i is {"x": i}. ``reads`` are the requests it got, ``bad`` the positions that raise KeyError."""

    def __init__(self, count, bad=()):
        self.count, self.bad, self.reads = count, frozenset(bad), []

    def __len__(self):
        return self.count

    def _read(self, positions):
        self._note(positions.tolist())
        return [{"x": self.number(position)} for position in positions.tolist()]

    def number(self, value):
        if self.framework == "numpy":
            return np.array(value)
        import torch

        return torch.tensor(value)

    def _note(self, positions):
        self.reads.append(positions)
        for position in positions:
            if position in self.bad:
                raise KeyError(position)

    @property
    def seen(self):
        return [position for read in self.reads for position in read]


class Stacked(Numbers):
    """The same with a read_batch of its own."""

    def _read_batch(self, positions):
        self._note(positions.tolist())
        return {"x": self.number(positions)}


class Gate(Numbers):
    """Each read says that it has begun, then waits until its first position is let through."""

    def __init__(self, count, closed=()):
        super().__init__(count)
        self.closed_at = {position: threading.Event() for position in closed}
        self.begun = threading.Semaphore(0)

    def _read(self, positions):
        samples = super()._read(positions)
        self.begun.release()
        if (event := self.closed_at.get(int(positions[0]))) is not None:
            assert event.wait(TIMEOUT)
        return samples

    def wait_for(self, count):
        for _ in range(count):
            assert self.begun.acquire(timeout=TIMEOUT)

    def open(self):
        for event in self.closed_at.values():
            event.set()


def values(batches):
    """The numbers in batches of the readers above."""
    return [batch["x"].tolist() for batch in batches]


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
