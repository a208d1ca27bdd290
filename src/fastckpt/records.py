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
        def column(values, default):
            return np.ascontiguousarray(default if values is None else values, dtype=np.int64)

        self.names = names
        self.offset = column(offset, None)
        self.nbytes = column(nbytes, None)
        self.stored_nbytes = column(stored_nbytes, self.nbytes)
        self.crc32 = column(crc32, np.full(len(self.offset), NO_CRC))
        self.method = column(method, np.zeros(len(self.offset)))

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
