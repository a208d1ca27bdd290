"""How the storages of a stream lie behind each other: one record each, and in our own format sums between them."""

import numpy as np

ALIGNMENT = 64  # of the data of each storage, in bytes from the start of the stream
# Records whose data begins in the same MiB of data are a group, which is received, checked and handed on together.
GROUP_NBYTES = 1 << 20
SUM_NBYTES = 4


class Layout:
    """The order of bytes behind the head of a stream, for records of ``nbytes`` bytes.

    ``alignment``: zeros fill each record up to a multiple of it. ``sums``: behind each group stand the CRC-32s of its
    records, filled up alike. ``ends[g]`` is the first record behind group g.
    """

    def __init__(self, nbytes, alignment=1, sums=False):
        self.nbytes = np.ascontiguousarray(nbytes, dtype=np.int64)
        self.alignment, self.sums = alignment, sums
        self.gap = -self.nbytes % alignment
        padded = self.nbytes + self.gap
        group = (np.cumsum(padded) - padded) // GROUP_NBYTES
        last = np.flatnonzero(group[1:] != group[:-1])
        self.ends = np.append(last + 1, len(group)) if len(group) else last

    def segments(self, records, address, nbytes):
        """Segments for a Flow: ``records[i]`` is the record that segment i of memory belongs to, in order; see Segments."""
        return Segments(self, records, address, nbytes)


class Segments:
    """Columns of a Flow. ``records`` is the record of each segment, -1 - g for the sums of group g.

    ``ends[g]`` is the first segment behind group g, ``crc`` what the Flow sums, ``said`` where sums that arrive go.
    """

    def __init__(self, layout, records, address, nbytes):
        last = np.append(records[1:] != records[:-1], True)[: len(records)]
        gap = np.where(last, layout.gap[records], 0)
        self.ends = np.searchsorted(records, layout.ends)
        self.said = np.zeros(len(layout.nbytes), dtype=np.uint32)
        self.records, self.address, self.nbytes, self.gap = records, address, nbytes, gap
        if layout.sums:
            self._insert_sums(layout)
        columns = (self.address, self.nbytes, self.gap)
        self.address, self.nbytes, self.gap = [np.ascontiguousarray(c, np.int64) for c in columns]
        self.crc = np.zeros(len(self.records), dtype=np.uint32)

    def _insert_sums(self, layout):
        first = np.append(0, layout.ends[:-1]).astype(np.int64)[: len(layout.ends)]
        nbytes = (layout.ends - first) * SUM_NBYTES
        self.records = np.insert(self.records, self.ends, -1 - np.arange(len(self.ends)))
        self.address = np.insert(
            self.address, self.ends, self.said.ctypes.data + first * SUM_NBYTES
        )
        self.nbytes = np.insert(self.nbytes, self.ends, nbytes)
        self.gap = np.insert(self.gap, self.ends, -nbytes % layout.alignment)
        self.ends = self.ends + 1 + np.arange(len(self.ends))

    def send_own_sums(self):
        """Let the sums that go out be those that the Flow makes; each record has one segment then."""
        block = np.flatnonzero(self.records < 0)
        begin = np.append(0, block[:-1] + 1)[: len(block)]
        self.address[block] = self.crc.ctypes.data + begin * SUM_NBYTES
