"""ZIP checkpoints laid out as torch lays them out: where each record will lie, from names and sizes alone.

Positions come first, so that data may be written anywhere, in any order, by many threads; the CRC-32s are
wanted for what stands around the data, which ``frames`` makes when all are known.
"""

import hashlib
import os
import struct

import numpy as np

from .. import _zip_render
from ._zip_end import END_64_NBYTES, END_NBYTES, LOCATOR_NBYTES, MAX16, MAX32

MOST_ALIGNMENT = 1 << 16  # an extra field holds no more
ALIGNMENT = 64  # bytes; every record's data begins at a multiple of it
SERIALIZATION_ID = ".data/serialization_id"
SERIALIZATION_ID_NBYTES = 40

DESCRIPTOR_FOLLOWS = 0x0008  # a flag of headers
PADDING_HEAD_NBYTES = 4  # of the extra field that aligns the data
ZIP64 = 1  # the extra field with 64-bit sizes and offset
# APPNOTE 4.3.7
LOCAL = np.dtype(
    [("signature", "S4"), ("needed", "<u2"), ("flags", "<u2"), ("method", "<u2"), ("time", "<u4"), ("crc32", "<u4"),
     ("stored", "<u4"), ("nbytes", "<u4"), ("name_nbytes", "<u2"), ("extra_nbytes", "<u2")]
)  # fmt: skip
CENTRAL_NBYTES = 46
# APPNOTE 4.3.14 to 4.3.16
END_64, LOCATOR, END = (
    struct.Struct("<4sQHHIIQQQQ"),
    struct.Struct("<4sIQI"),
    struct.Struct("<4sHHHHIIH"),
)
END_RECORDS_NBYTES = END_64_NBYTES + LOCATOR_NBYTES + END_NBYTES


class ZipLayout:
    """Where the records of an archive lie: int64 columns of bytes from its start, one row a record.

    ``header`` is where the local header of a record lies, ``offset`` its data, ``end`` one past its descriptor; ``directory``
    is where the directory begins, ``total`` the bytes of the archive. Nothing is compressed.
    """

    def __init__(self, names, nbytes, alignment=ALIGNMENT):
        """``names`` are the records' whole names (str), ``nbytes`` their sizes; ``alignment`` is in bytes.

        Raises ValueError for sizes, names or an alignment that no archive can have.
        """
        if not 1 <= alignment <= MOST_ALIGNMENT:
            raise ValueError(f"alignment={alignment}: 1 to {MOST_ALIGNMENT} bytes are possible")
        names = [name.encode("utf-8", "surrogateescape") for name in names]
        self.nbytes = np.array(nbytes, dtype=np.int64)
        self.alignment = alignment
        if len(names) != len(self.nbytes):
            raise ValueError(f"{len(names)} names for {len(self.nbytes)} records")
        self._name_nbytes = np.array([len(name) for name in names], dtype=np.int64)
        self._names = b"".join(names)
        if self._name_nbytes.max(initial=0) > MAX16:
            raise ValueError(f"a record's name has {self._name_nbytes.max()} bytes, {MAX16} fit")
        if self.nbytes.min(initial=0) < 0 or self.nbytes.sum(dtype=np.float64) > 2.0**62:
            raise ValueError("the sizes of the records are negative, or have more than 62 bits")
        self._place()

    def _place(self):
        # The zip64 threshold is reached *at* the largest 32-bit number. Whether a header lies beyond it changes
        # where the data behind it lies, never where the header itself does: two rounds suffice.
        self._large = self.nbytes >= MAX32
        self._far = np.zeros(len(self.nbytes), dtype=bool)
        self._place_once()
        far = self.header >= MAX32
        if far.any():
            self._far = far
            self._place_once()
        self._extra_nbytes = self._zip64_nbytes + PADDING_HEAD_NBYTES + self._padding
        if self._extra_nbytes.max(initial=0) > MAX16:
            raise ValueError(
                f"alignment={self.alignment}: {self._padding.max()} bytes of padding, which an extra field can't hold"
            )
        self.directory = int(self.end[-1]) if len(self.end) else 0
        self.total = self.directory + self._directory_nbytes() + END_RECORDS_NBYTES

    def _place_once(self):
        self._zip64_nbytes = _zip64_nbytes(self._large, self._far)
        head = LOCAL.itemsize + self._name_nbytes + self._zip64_nbytes + PADDING_HEAD_NBYTES
        descriptor = np.where(self._large | self._far, 24, 16) * (self.nbytes > 0)
        behind = self.nbytes + descriptor
        # Data begins at multiples of the alignment, so the distances between beginnings are multiples, too.
        step = head.copy()
        step[1:] += behind[:-1]
        step += -step % self.alignment
        self.offset = np.cumsum(step)
        self.end = self.offset + behind
        self.header = np.concatenate([[0], self.end[:-1]])[: len(self.end)]
        self._padding = self.offset - self.header - head

    def _directory_nbytes(self):
        return int((CENTRAL_NBYTES + self._name_nbytes + self._zip64_nbytes).sum())

    def columns(self, crc32, address=0):
        """What ``render`` and ``frames`` go by: ``crc32`` are the checksums of the records, ``address`` (0: elsewhere) says where
        the content of each lies."""
        names = np.cumsum(self._name_nbytes) - self._name_nbytes
        wide = self._large + 2 * self._far
        places = (self.header, self.offset, self.nbytes, names, self._name_nbytes, wide)
        columns = np.empty((8, len(self.nbytes)), dtype=np.int64)
        for column, values in zip(columns, (*places, crc32, address), strict=True):
            column[:] = values
        return columns

    def render(self, columns, begin, end):
        """The archive's bytes from ``begin`` to ``end``, each the beginning or the end of a record, of its data, or of all: headers,
        descriptors, and data that has an address."""
        count = len(self.nbytes)
        row = int(np.searchsorted(self.end, begin, side="right"))
        data = _zip_render.render(columns, self._names, count, row, begin, min(end, self.directory))
        if end > self.directory:
            data += _zip_render.directory(columns, self._names, count) + self._end_records()
        return data

    def frames(self, crc32):
        """What stands around the data: (offset, bytes) in ascending order, one more than there are records.

        The first begins the archive, the last ends it. ``crc32`` are the checksums of the records.
        """
        columns = self.columns(crc32)
        starts = [0, *(self.offset + self.nbytes).tolist()]
        stops = [*self.offset.tolist(), self.total]
        return [
            (start, self.render(columns, start, stop))
            for start, stop in zip(starts, stops, strict=True)
        ]

    def _end_records(self):
        """zip64 end record, its locator, and the plain end record: torch writes all three, always."""
        count, nbytes, at = len(self.nbytes), self._directory_nbytes(), self.directory
        few = min(count, MAX16)
        return (
            END_64.pack(b"PK\6\6", END_64_NBYTES - 12, 0x031E, 0x2D, 0, 0, count, count, nbytes, at)
            + LOCATOR.pack(b"PK\6\7", 0, at + nbytes, 1)
            + END.pack(b"PK\5\6", 0, 0, few, few, min(nbytes, MAX32), min(at, MAX32), 0)
        )


def data_offset(header, name_nbytes, nbytes, alignment=ALIGNMENT):
    """Where the data of a record begins whose local header lies at byte ``header`` of the archive."""
    large, far = nbytes >= MAX32, header >= MAX32
    end = header + LOCAL.itemsize + name_nbytes + _zip64_nbytes(large, far) + PADDING_HEAD_NBYTES
    return end + -end % alignment


def _zip64_nbytes(large, far):
    """How long the zip64 field of a record is, in the file; columns or single values."""
    return 16 * large + 8 * far + 4 * (large | far)


def archive_name(path=None):
    """What torch calls the folder inside an archive at ``path``: its name without the last extension."""
    name = "" if path is None else os.path.basename(os.fsdecode(path).replace("\\", "/"))
    if "." in name:
        name = name[: name.rindex(".")]
    return name if name and name.isascii() else "archive"


def serialization_id(names, crc32):
    """Forty digits that tell one archive from another: twenty from the records' names, twenty from their checksums.

    torch takes another sum, which differs between its own builds, and shows it in its logs alone.
    """
    parts = ("\n".join(names).encode("utf-8", "surrogateescape"), np.array(crc32, "<u4").tobytes())
    numbers = [
        int.from_bytes(hashlib.blake2b(part, digest_size=8).digest(), "little") for part in parts
    ]
    return b"".join(b"%020d" % number for number in numbers)
