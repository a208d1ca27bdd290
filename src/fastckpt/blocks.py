"""The bytes of storages that are to be written: memory as it is, or what has to be made of it piece by piece."""

import numpy as np
import torch

# What is staged at a time; a piece that is cast is there twice.
STAGE_NBYTES = 8 << 20


class Block:
    """The bytes of one record: those of ``storage`` (torch, untyped), or of ``ranges`` of it, cast where ``cast_to`` says.

    ``ranges`` are [(first element, last element exclusive)], None for all; elements are those of ``dtype``. ``address`` is where
    a storage on the CPU lies, None for any other. ``extents``: [(address, nbytes)] of what is in memory as it is to be written,
    None where it has to be made.
    """

    __slots__ = ("cast_to", "dtype", "extents", "nbytes", "ranges", "storage")

    def __init__(self, storage, dtype, address=None, ranges=None, cast_to=None):
        self.storage, self.dtype, self.extents = storage, dtype, None
        self.cast_to = None if cast_to is dtype else cast_to
        self.ranges = ranges
        if self.cast_to is not None and ranges is None:
            self.ranges = [(0, storage.nbytes() // dtype.itemsize)]
        if self.ranges is None:
            self.nbytes = storage.nbytes()  # an odd end belongs to no element, and is kept
            self.extents = None if address is None else [(address, self.nbytes)]
            return
        size = dtype.itemsize
        self.nbytes = sum([b - a for a, b in self.ranges]) * (self.cast_to or dtype).itemsize
        if address is not None and self.cast_to is None:
            self.extents = [(address + a * size, (b - a) * size) for a, b in self.ranges]

    def staged(self):
        """The bytes of any block in pieces: yields uint8 arrays; each is gone when the next one comes."""
        dtype, ranges = self.dtype, self.ranges
        if ranges is None:
            dtype, ranges = torch.uint8, [(0, self.nbytes)]
        flat = torch.empty(0, dtype=dtype, device=self.storage.device).set_(self.storage)
        step = STAGE_NBYTES // max(dtype.itemsize, (self.cast_to or dtype).itemsize)
        for start, end in ranges:
            for at in range(start, end, step):
                piece = flat[at : min(at + step, end)].detach()
                piece = piece.to(device="cpu", dtype=self.cast_to or dtype)
                yield piece.view(torch.uint8).numpy()


def merged(intervals):
    """Sorted intervals [(start, end)] with those that touch or overlap joined."""
    joined = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


class Moves:
    """Where elements go when only ``ranges`` of a storage are kept, one behind the other."""

    def __init__(self, ranges):
        self.ranges = ranges
        self._starts = np.array([start for start, _ in ranges], dtype=np.int64)
        lengths = [end - start for start, end in ranges]
        self._shift = self._starts - np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
        self.count = sum(lengths)

    def __call__(self, offset):
        """The new place of the element at ``offset``, which one of the ranges has."""
        return offset - int(self._shift[np.searchsorted(self._starts, offset, "right") - 1])
