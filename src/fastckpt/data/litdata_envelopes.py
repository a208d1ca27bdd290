"""How items lie in a LitData chunk: back to back, each sealed for itself, or in frames that are compressed.

Each reads items by their numbers in the chunk: ``read(layout, columns, start, stop, samples)``, ``read_one(layout, item)`` and
``stack(batch, columns, start, stop)``, where columns are (items, slots), int64, items ascending. ``nbytes`` is the memory that it
holds, ``opened`` whether it holds a descriptor.
"""

import contextlib

import numpy as np

from ..source import MemorySource
from . import _litdata as native
from .litdata_errors import BadItem

# A row of the table of frames: its items, where it is, and how many bytes it has compressed and inflated
FRAME = np.dtype(
    [("first", "<u4"), ("items", "<u4"), ("offset", "<u8"), ("nbytes", "<u4"), ("inflated", "<u4")]
)
# Items that are unsealed one by one are brought into memory so many at a time.
SEALED_ITEMS = 256


class Plain:
    """Items back to back, in a file or in memory."""

    def __init__(self, block, nbytes):
        self.block, self.opened = block, block.source.fd >= 0
        self.nbytes = nbytes + (0 if self.opened else block.source.nbytes)

    def read(self, layout, columns, start, stop, samples):
        native.read_items(layout, self.block, *columns, start, stop, samples)

    def read_one(self, layout, item):
        return native.read_one(layout, self.block, item)

    def stack(self, batch, columns, start, stop):
        native.stack_items(batch, self.block, *columns, start, stop)


class Sealed(Plain):
    """Items of which each is compressed or encrypted for itself."""

    def __init__(self, block, nbytes, unseal):
        super().__init__(block, nbytes)
        self.unseal = unseal

    def read(self, layout, columns, start, stop, samples):
        def decode(slot, data):
            samples[slot] = layout.decode_bytes(data)

        self._each(decode, columns, start, stop)

    def read_one(self, layout, item):
        samples = [None]
        columns = np.array([item], dtype=np.int64), np.zeros(1, dtype=np.int64)
        self.read(layout, columns, 0, 1, samples)
        return samples[0]

    def stack(self, batch, columns, start, stop):
        def stack(slot, data):
            native.stack_bytes(batch, slot, data)

        self._each(stack, columns, start, stop)

    def _each(self, use, columns, start, stop):
        items, slots = columns
        for first in range(start, stop, SEALED_ITEMS):
            last = min(first + SEALED_ITEMS, stop)
            sealed = native.read_raw(self.block, items, first, last)
            for k, data in enumerate(sealed, first):
                try:
                    use(int(slots[k]), bytes(self.unseal(data)))
                except BadItem as error:
                    error.item = int(items[k])
                    raise


class Framed:
    """Items in frames, each frame compressed; a few inflated frames are kept, and items are decoded only when asked for."""

    def __init__(self, source, table, frames, count, inflate, cache, number):
        self.source, self.table, self.frames, self.nbytes = (
            source,
            table,
            frames,
            len(table) + frames.nbytes,
        )
        self.inflate, self.cache, self.number = inflate, cache, number
        self.opened = source.fd >= 0
        self.begins = np.zeros(len(frames) + 1, dtype=np.int64)
        np.cumsum(frames["items"], out=self.begins[1:])
        if (self.begins[:-1] != frames["first"]).any() or self.begins[-1] != count:
            raise BadItem(
                f"its {len(frames)} frames do not follow each other to make {count} items"
            )

    def frame(self, number):
        """The inflated frame: a chunk of its own."""
        frame = self.cache.get((self.number, number))
        if frame is None:
            frame = self._inflate(number)
            self.cache.put((self.number, number), frame)
        return frame

    def _inflate(self, number):
        first, count, offset, nbytes, inflated = self.frames[number].tolist()
        if offset > self.source.nbytes or nbytes > self.source.nbytes - offset:
            raise BadItem(
                f"frame {number} has {nbytes} bytes at byte {offset}, and there are {self.source.nbytes} bytes"
            )
        begin, end = (
            int.from_bytes(self.table[4 * i : 4 * i + 4], "little") for i in (first, first + count)
        )
        if end - begin != inflated:
            raise BadItem(
                f"frame {number} has {inflated} bytes inflated, and its items have {end - begin}"
            )
        data = self.inflate(self.source.read(offset, nbytes), (inflated,))
        source = MemorySource(data, self.source.name)
        return Plain(native.Block(source, self.table, first, count, -begin), 0)

    def read(self, layout, columns, start, stop, samples):
        self._each(lambda frame, *where: frame.read(layout, *where, samples), columns, start, stop)

    def stack(self, batch, columns, start, stop):
        self._each(lambda frame, *where: frame.stack(batch, *where), columns, start, stop)

    def read_one(self, layout, item):
        number = int(self.begins.searchsorted(item, "right")) - 1
        first = int(self.begins[number])
        with counted_from(first, number):
            return self.frame(number).read_one(layout, item - first)

    def _each(self, use, columns, start, stop):
        wanted, slots = columns[0][start:stop], columns[1][start:stop]
        items, unused = np.empty((2, stop - start), dtype=np.int64)
        for number, first, last in native.split(self.begins, wanted, items, unused, False):
            with counted_from(int(self.begins[number]), number):
                use(self.frame(number), (items, slots), first, last)


@contextlib.contextmanager
def counted_from(first, frame):
    """What is wrong with an item of a frame, told of the item by its number in the chunk; or told of the frame."""
    try:
        yield
    except BadItem as error:
        if error.item is not None:
            error.item += first
            raise
        raise BadItem(f"frame {frame}: {error}") from None
