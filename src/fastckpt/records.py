"""Records: the pieces of a container as columns, one row a record, so that native code can walk them."""

import numpy as np

STORED, DEFLATED = 0, 8  # ZIP's method numbers
NO_CRC = -1  # the writer stored no checksum


class Records:
    """Where records lie. ``offset`` and ``stored_nbytes`` are bytes in the source, ``nbytes`` the size when inflated.

    All columns are C-contiguous int64 arrays of equal length; ``names`` is a sequence of record names for messages.
    ``crc32`` is NO_CRC where there is none; it covers the inflated bytes. ``offset`` is -1 until it is located.
    """

    __slots__ = ("crc32", "method", "names", "nbytes", "offset", "stored_nbytes")

    def __init__(self, names, offset, nbytes, stored_nbytes=None, crc32=None, method=None):
        def column(values):
            return np.ascontiguousarray(values, dtype=np.int64)

        self.names = names
        self.offset = column(offset)
        self.nbytes = column(nbytes)
        self.stored_nbytes = self.nbytes if stored_nbytes is None else column(stored_nbytes)
        count = len(self.offset)
        self.crc32 = column(np.full(count, NO_CRC) if crc32 is None else crc32)
        self.method = column(np.zeros(count) if method is None else method)

    def __len__(self):
        return len(self.offset)

    def take(self, rows):
        """The records of some rows, in that order."""
        return Records(
            [self.names[i] for i in rows],
            self.offset[rows],
            self.nbytes[rows],
            self.stored_nbytes[rows],
            self.crc32[rows],
            self.method[rows],
        )
