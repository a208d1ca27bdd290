"""The bytes of storages that are to be written: memory as it is, or what has to be made of it piece by piece."""

import functools

import numpy as np

from . import workers
from .needs_torch import torch

# What is staged at a time.
STAGE_NBYTES = 8 << 20
# Blocks up to this size are made together, so that they can be written together, in so much room.
SMALL_NBYTES, SMALL_ROOM_NBYTES, ALIGNMENT = 16 << 10, 4 << 20, 16
# torch copies on one thread, the caller's, what has fewer elements than 32,768 (GRAIN_SIZE in ATen/TensorIterator.h).
SERIAL_NUMEL = 1 << 14


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

    def elements(self):
        """(the storage as a tensor, the ranges of it that are to be copied, the dtype that they get)."""
        dtype, ranges = self.dtype, self.ranges
        if self.cast_to is None:  # as they are: not every dtype can be copied
            size = dtype.itemsize
            whole = [(0, self.nbytes)]
            ranges = whole if ranges is None else [(a * size, b * size) for a, b in ranges]
            dtype = torch.uint8
        flat = torch.empty(0, dtype=dtype, device=self.storage.device).set_(self.storage)
        return flat, ranges, self.cast_to or dtype

    def make(self, stage):
        """Put all of the bytes into a uint8 tensor on the CPU, on this thread."""
        flat, ranges, to = self.elements()
        gather(stage.view(to), flat, ranges)

    def staged(self):
        """The bytes of any block in pieces: yields uint8 arrays, each of which overwrites the one before."""
        flat, ranges, to = self.elements()
        step = STAGE_NBYTES // max(flat.itemsize, to.itemsize)
        stage = torch.empty(min(step, sum([b - a for a, b in ranges])), dtype=to)
        for batch in batches(ranges, step):
            copy = functools.partial(gather, stage, flat, batch)
            # In a forked process torch's parallel kernels hang on a thread that was there before; those of a device need this
            # thread's state. To start a thread takes longer than many a tensor.
            is_parallel = flat.is_cpu and any(end - start > SERIAL_NUMEL for start, end in batch)
            count = workers.apart(copy) if is_parallel else copy()
            yield stage[:count].view(torch.uint8).numpy()


def make_small(blocks):
    """Make the bytes of small blocks ahead, as many as there is room for.

    Returns ({number of the block: address of its bytes}, what they lie in).
    """
    places, end = {}, 0
    for number, block in blocks.items():
        # Of both sizes: torch must copy it on one thread, whatever it is cast to.
        is_small = max(block.nbytes, block.storage.nbytes()) <= SMALL_NBYTES
        if is_small and end + block.nbytes <= SMALL_ROOM_NBYTES:
            places[number] = end
            end += block.nbytes + -block.nbytes % ALIGNMENT
    room = torch.empty(end, dtype=torch.uint8, device="cpu")
    for number, at in places.items():
        blocks[number].make(room[at : at + blocks[number].nbytes])
    return {number: room.data_ptr() + at for number, at in places.items()}, room


def batches(ranges, most):
    """Lists of ranges of ``most`` elements in all, those that are longer in parts."""
    batch, left = [], most
    for start, end in ranges:
        while start < end:
            stop = min(end, start + left)
            batch.append((start, stop))
            left -= stop - start
            start = stop
            if not left:
                yield batch
                batch, left = [], most
    if batch:
        yield batch


def gather(stage, flat, ranges):
    """Copy ranges of a tensor to the beginning of a stage, one behind the other; how many elements that are."""
    at = 0
    for start, end in ranges:
        stage[at : at + end - start].copy_(flat[start:end])
        at += end - start
    return at


def merged(intervals):
    """Sorted intervals [(start, end)] with those that touch or overlap joined."""
    joined = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def interval(offset, shape, stride):
    """(first element, one past the last) that a view looks at; both are ``offset`` where it is empty."""
    if 0 in shape:
        return offset, offset
    return offset, offset + sum([(n - 1) * step for n, step in zip(shape, stride, strict=True)]) + 1


class Moves:
    """Where elements go when only ``ranges`` of a storage are kept, one behind the other."""

    def __init__(self, ranges):
        self.ranges = ranges
        self._starts = np.array([start for start, _ in ranges], dtype=np.int64)
        lengths = [end - start for start, end in ranges]
        self._shift = self._starts - np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
        self.count = sum(lengths)

    def __call__(self, offset, shape, stride):
        """The new offset of a view, which lies in one of the ranges.

        Raises RuntimeError where it does not: a second round over the object met a view that the first had not.
        """
        start, end = interval(offset, shape, stride)
        if start == end:
            return 0
        at = int(np.searchsorted(self._starts, start, "right")) - 1
        if at < 0 or end > self.ranges[at][1]:
            raise RuntimeError(
                'views="compact" pickles an object twice, and it gave other tensors the second time; save it with views="whole"'
            )
        return start - int(self._shift[at])
