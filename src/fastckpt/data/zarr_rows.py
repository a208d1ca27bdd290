"""Rows of Zarr arrays, gathered in any order through a bounded cache of decoded chunks."""

import collections
import math
import os
import threading
from typing import Any, NamedTuple

import numpy as np

from .._rows import copy_rows
from ..errors import FormatError, LimitError, UnsupportedError
from ..limits import Limits
from .zarr_store import array_anew, metadata_file, translated, version_of
from .zarr_tensorstore import quicker

# What one call into zarr may decode: it decodes the chunks of a call side by side, and all of them are in memory at once.
READ_NBYTES = 64 << 20
# A few runs of chunks are read as slices, more of them by one orthogonal selection: 512 chunks of one row took 580 ms as slices,
# 96 ms at once (zarr 3.1.6); 8 slices of large chunks took as long as their selection.
MOST_SLICES = 4
MOST_ROWS = 1 << 61  # so that sums of their numbers are int64


class Rows:
    """One array as rows along ``axis``, in blocks: the rows of one chunk, whole, whichever way the others are cut.

    ``path`` names the array in its store, ``shape`` is that of one row, ``dtype`` in the machine's byte order. Raises
    UnsupportedError for elements that have no fixed size, FormatError for sizes that cannot be.
    """

    def __init__(self, where, path, array, axis=0):
        if not array.shape:
            raise UnsupportedError(f"{where}: array {path!r} has no axis, so it has no rows")
        self.where, self.path, self.axis = where, path, axis
        self.length = array.shape[axis]
        self.shape = array.shape[:axis] + array.shape[axis + 1 :]
        self.chunks = array.chunks
        if max(array.shape) > MOST_ROWS:
            raise FormatError(
                f"{where}: array {path!r} has shape {array.shape}, sizes that cannot be; its metadata is damaged"
            )
        dtype = np.dtype(array.dtype)
        if dtype.hasobject or dtype.kind not in "biufcmMSUV":
            raise UnsupportedError(
                f"{where}: array {path!r} has elements of {dtype}, which have no fixed size; fields= leaves it out"
            )
        self.dtype = dtype.newbyteorder("=")
        self.row_nbytes = self.dtype.itemsize * int(np.prod(self.shape, dtype=object))
        self.block_rows = max(1, min(array.chunks[axis], self.length))
        across = [
            max(1, -(-n // max(1, chunk)))
            for i, (n, chunk) in enumerate(zip(array.shape, array.chunks, strict=True))
            if i != axis
        ]
        self.block_chunks = math.prod(across)

    def check(self, array):
        """Raise FormatError for an array that does not have these rows any more. It may have got more of them."""
        if (
            array.chunks != self.chunks
            or self._shape_of(array.shape[self.axis]) != array.shape
            or array.shape[self.axis] < self.length
            or np.dtype(array.dtype).newbyteorder("=") != self.dtype
        ):
            found = f"it has shape {array.shape} of {array.dtype} in chunks of {array.chunks}"
            raise self._changed(found, self.length, f" in chunks of {self.chunks}")

    def _changed(self, found, count, how=""):
        return FormatError(
            f"{self.where}: the store has changed: array {self.path!r}: {found}, {self._shape_of(count)} of {self.dtype}{how} is "
            "expected; refresh() looks at it again"
        )

    def _shape_of(self, count):
        return (*self.shape[: self.axis], count, *self.shape[self.axis :])

    def most_rows(self, limits):
        """How many rows may be wanted for one thing, such as a sample."""
        if self.block_rows * self.row_nbytes > limits.zarr_nbytes:
            return 0
        by_chunks = limits.zarr_chunks // self.block_chunks * self.block_rows
        return min(by_chunks, limits.zarr_nbytes // max(1, self.row_nbytes))

    def too_much(self, what, count, limits):
        """The LimitError for more rows than that."""
        chunks = -(-count // self.block_rows) * self.block_chunks
        nbytes = max(count, self.block_rows) * self.row_nbytes
        found = f"{chunks} chunks, and Limits.zarr_chunks allows {limits.zarr_chunks}"
        if chunks <= limits.zarr_chunks:
            found = f"{nbytes} bytes, and Limits.zarr_nbytes allows {limits.zarr_nbytes}"
        return LimitError(
            f"{self.where}: array {self.path!r}: {what} takes {found}; the metadata is damaged, or limits= has to raise that"
        )

    def empty(self, count):
        return np.empty((count, *self.shape), self.dtype)

    def read(self, array, blocks):
        """Decode blocks, given by ascending numbers: a list of as many arrays of rows, which share no memory."""
        starts = np.asarray(blocks) * self.block_rows
        ends = np.minimum(starts + self.block_rows, self.length)
        first_of_runs = np.flatnonzero(np.concatenate([[True], starts[1:] != ends[:-1]]))
        with translated(
            f"{self.where}: array {self.path!r}: rows {starts[0]} to {ends[-1] - 1} cannot be decoded; a chunk is damaged, or its "
            "codec is missing"
        ):
            if len(first_of_runs) > MOST_SLICES:
                selected = ranges(starts, ends - starts)
                runs = [self._oriented(array.oindex[self._along(selected)], len(selected))]
            else:
                last_of_runs = np.append(first_of_runs[1:] - 1, len(blocks) - 1)
                bounds = zip(
                    starts[first_of_runs].tolist(), ends[last_of_runs].tolist(), strict=True
                )
                runs = [
                    self._oriented(array[self._along(slice(start, end))], end - start)
                    for start, end in bounds
                ]
        if len(runs) == len(blocks):
            return runs
        # Copies, so that a block that is dropped gives its memory back.
        sizes = (ends - starts).tolist()
        return [block.copy() for block in _cut(runs, sizes)]

    def _along(self, selection):
        return (slice(None),) * self.axis + (selection,)

    def _oriented(self, array, count):
        # What follows counts in bytes of rows, and casts without a word.
        if array.shape != self._shape_of(count) or array.dtype.newbyteorder("=") != self.dtype:
            raise self._changed(f"what was read has shape {array.shape} of {array.dtype}", count)
        return np.ascontiguousarray(np.moveaxis(array, self.axis, 0), self.dtype)


def _cut(runs, sizes):
    """The runs of rows, cut into pieces of these sizes; no piece lies in two runs."""
    runs, at = iter(runs), 0
    run = next(runs)
    for size in sizes:
        if at == len(run):
            run, at = next(runs), 0
        yield run[at : at + size]
        at += size


class Plan:
    """Which blocks hold the rows ``starts[i]`` to ``starts[i] + counts[i]`` of each sample, and where these go.

    ``blocks`` are numbers in ascending order; ``pieces[bounds[k]:bounds[k + 1]]`` is what to copy out of block k: first row in
    the block, first row in the result, number of rows. In the result samples lie one behind the other.
    """

    def __init__(self, starts, counts, block_rows):
        if len(starts) == 1 and self._is_one_piece(int(starts[0]), int(counts[0]), block_rows):
            return
        ends = starts + counts
        spans = np.where(counts > 0, (ends - 1) // block_rows - starts // block_rows + 1, 0)
        sample = np.repeat(np.arange(len(starts)), spans)
        block = ranges(starts // block_rows, spans)
        first = np.maximum(starts[sample], block * block_rows)
        last = np.minimum(ends[sample], block * block_rows + block_rows)
        target = (np.cumsum(counts) - counts)[sample] + first - starts[sample]
        pieces = np.stack([first - block * block_rows, target, last - first], axis=1)
        order = np.argsort(block, kind="stable")
        self.pieces = pieces[order]
        block = block[order]
        firsts = np.flatnonzero(np.append(True, block[1:] != block[:-1])[: len(block)])
        self.blocks = block[firsts].tolist()
        self.bounds = [*firsts.tolist(), len(order)]

    def _is_one_piece(self, start, count, block_rows):
        """One sample in one block is what random reads ask for, and columns of one row cost most of its time."""
        block = start // block_rows
        if not count or (start + count - 1) // block_rows != block:
            return False
        self.pieces = np.array([(start - block * block_rows, 0, count)])
        self.blocks, self.bounds = [block], [0, 1]
        return True

    def copy(self, k, block, rows, target):
        pieces = self.pieces[self.bounds[k] : self.bounds[k + 1]]
        bad = copy_rows(target, block, pieces, rows.row_nbytes)
        if bad >= 0:
            raise FormatError(
                f"{rows.where}: array {rows.path!r}: block {self.blocks[k]} has {len(block)} rows, "
                f"rows {pieces[bad, 0]} to {pieces[bad, 0] + pieces[bad, 2] - 1} of it are wanted"
            )


class Cache:
    """Decoded blocks by (path, number), the least recently used ones dropped above ``limit`` bytes."""

    def __init__(self, limit, blocks=()):
        self.limit = limit
        self._blocks = collections.OrderedDict(blocks)
        self._nbytes = sum(block.nbytes for block in self._blocks.values())
        self._lock = threading.Lock()

    def get(self, key):
        with self._lock:
            block = self._blocks.get(key)
            if block is not None:
                self._blocks.move_to_end(key)
            return block

    def put(self, key, block):
        if block.nbytes > self.limit:
            return
        with self._lock:
            before = self._blocks.pop(key, None)
            self._blocks[key] = block
            self._nbytes += block.nbytes - (0 if before is None else before.nbytes)
            while self._nbytes > self.limit:
                self._nbytes -= self._blocks.popitem(last=False)[1].nbytes

    def copied(self):
        """One of the same blocks with a lock of its own: that of this one may be held by a thread that did not survive a fork."""
        return Cache(self.limit, self._blocks)


class Arrays:
    """The arrays of an open store in this process, their cache and their locks; opened anew after a fork."""

    def __init__(self, open_root, cache_bytes, limits=None):
        self._open_root, self._cache_bytes = open_root, cache_bytes
        self.limits = limits or Limits()
        self._here = None

    def here(self):
        here = self._here
        if here is None or here.pid != os.getpid():
            cache = Cache(self._cache_bytes) if here is None else here.cache.copied()
            here = self._here = _Here(self._open_root(), cache)
        return here

    def gather(self, wanted):
        """Fill arrays with rows: ``wanted`` are (Rows, Plan, array that takes the rows).

        What is cached is copied first, for all of them, before what has to be read displaces it.
        """
        here, missing = self.here(), []
        for rows, plan, target in wanted:
            absent = []
            for k, number in enumerate(plan.blocks):
                block = here.cache.get((rows.path, number))
                if block is None:
                    absent.append(k)
                else:
                    plan.copy(k, block, rows, target)
            missing.append(absent)
        for (rows, plan, target), absent in zip(wanted, missing, strict=True):
            step = max(1, READ_NBYTES // max(1, rows.block_rows * rows.row_nbytes))
            for i in range(0, len(absent), step):
                some = absent[i : i + step]
                blocks = here.read(rows, [plan.blocks[k] for k in some])
                for k, block in zip(some, blocks, strict=True):
                    plan.copy(k, block, rows, target)


class _Opened(NamedTuple):
    array: Any
    file: Any  # see version_of
    version: Any


class _Here:
    def __init__(self, root, cache):
        self.pid, self.root, self.cache = os.getpid(), root, cache
        self._opened, self._locks = {}, {}

    def array(self, rows):
        """The array that has these rows, opened again where its metadata were written anew; FormatError if it has others now."""
        known = self._opened.get(rows.path)
        if known is None or version_of(known.file) != known.version:
            known = self._opened[rows.path] = self._open(rows)
        return known.array

    def _open(self, rows):
        file = metadata_file(self.root, rows.path)
        # Before they are read: if they are written meanwhile, the next read sees it.
        version = version_of(file)
        with translated(
            f"{rows.where}: array {rows.path!r} cannot be opened as it was before; refresh() looks at the store again"
        ):
            array = array_anew(self.root, rows.path)
            rows.check(array)
            return _Opened(quicker(array), file, version)

    def read(self, rows, numbers):
        """Blocks that were not cached a moment ago. Threads that want the same ones wait for the first of them."""
        with self._locks.setdefault(rows.path, threading.Lock()):
            blocks = {number: self.cache.get((rows.path, number)) for number in numbers}
            absent = [number for number in numbers if blocks[number] is None]
            if absent:
                found = rows.read(self.array(rows), absent)
                for number, block in zip(absent, found, strict=True):
                    blocks[number] = block
                    self.cache.put((rows.path, number), block)
        return [blocks[number] for number in numbers]


def offsets(counts):
    """Where each of samples that lie one behind the other begins, and where the last one ends: int64."""
    bounds = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=bounds[1:])
    return bounds


def ranges(starts, counts):
    """The numbers ``starts[i]`` to ``starts[i] + counts[i]`` of each i, one behind the other."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - counts), counts)
