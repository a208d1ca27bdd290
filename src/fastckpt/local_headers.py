"""The local headers and data descriptors of a ZIP, read in bulk into columns, to be compared with the directory."""

import numpy as np

from . import _zip
from .containers._zip_directory import LOCAL_NBYTES
from .containers._zip_end import MAX32
from .materialize import fill
from .records import Records

LOCAL_HEADER, DESCRIPTOR = 0x04034B50, 0x08074B50
EXTRA_ZIP64 = 1
STREAMED = 0x0008  # a flag: sizes and CRC-32 may be 0 in the local header, and follow the data in a descriptor
# (bytes, where the CRC-32 stands, where the sizes stand, bytes of a size), by how often each is met. The signature is optional,
# and so would be wide sizes without a zip64 extra.
LAYOUTS = ((16, 4, 8, 4), (24, 4, 8, 8), (12, 0, 4, 4), (20, 0, 4, 8))
LEAST_DESCRIPTOR, MOST_DESCRIPTOR = 12, 24


class LocalHeaders:
    """Columns, one row an entry: ``present`` (its signature is there), what it says, and ``data``, where its content begins.

    ``columns`` are those of a directory, whose bytes are ``directory``; all headers must lie before it.
    """

    def __init__(self, source, directory, columns):
        self.source = source
        header, name_nbytes = columns[_zip.HEADER], columns[_zip.NAME_NBYTES]
        blob, starts = read_extents(source, header, LOCAL_NBYTES + name_nbytes)
        head = blob[starts[:, None] + np.arange(LOCAL_NBYTES)]
        self.present = number(head, 0, 4) == LOCAL_HEADER
        self.flags, self.method = number(head, 6, 2), number(head, 8, 2)
        self.crc32, self.stored, self.nbytes = (number(head, at, 4) for at in (14, 18, 22))
        self.name_nbytes, self.extra_nbytes = number(head, 26, 2), number(head, 28, 2)
        self.data = header + LOCAL_NBYTES + self.name_nbytes + self.extra_nbytes
        self.same_name = self.name_nbytes == name_nbytes
        text, directory = memoryview(blob), memoryview(directory)
        spans = zip(starts.tolist(), columns[_zip.NAME].tolist(), name_nbytes.tolist(), strict=True)
        for row, (start, at, n) in enumerate(spans):
            start += LOCAL_NBYTES
            if text[start : start + n] != directory[at : at + n]:
                self.same_name[row] = False
        for row in np.flatnonzero(self.present & ((self.stored == MAX32) | (self.nbytes == MAX32))):
            self._widen(int(row), int(header[row]))

    def _widen(self, row, header):
        """Take sizes that are too large for their fields from the zip64 extra, where that has them."""
        at = header + LOCAL_NBYTES + int(self.name_nbytes[row])
        extra = bytes(
            self.source.read(at, max(0, min(int(self.extra_nbytes[row]), self.source.nbytes - at)))
        )
        while len(extra) >= 4:
            kind, nbytes = (int.from_bytes(extra[i : i + 2], "little") for i in (0, 2))
            content, extra = extra[4 : 4 + nbytes], extra[4 + nbytes :]
            if kind == EXTRA_ZIP64:
                for column in (self.nbytes, self.stored):
                    if column[row] == MAX32 and len(content) >= 8:
                        column[row] = min(int.from_bytes(content[:8], "little"), 2**63 - 1)
                        content = content[8:]
                return

    def differences(self, columns, row):
        """In words, what the header of a row says otherwise than the directory; [] where they agree."""
        crc32 = max(0, int(columns[_zip.CRC, row]))
        pairs = (
            ("CRC-32", int(self.crc32[row]), crc32, "08x"),
            ("stored bytes", int(self.stored[row]), int(columns[_zip.STORED, row]), "d"),
            ("bytes", int(self.nbytes[row]), int(columns[_zip.NBYTES, row]), "d"),
        )
        streamed = self.flags[row] & STREAMED
        found = [
            f"{what} {said:{form}} where the directory says {expected:{form}}"
            for what, said, expected, form in pairs
            if said != expected and not (streamed and said == 0)
        ]
        if self.method[row] != columns[_zip.METHOD, row]:
            found.append(
                f"method {self.method[row]} where the directory says {columns[_zip.METHOD, row]}"
            )
        return found

    def differing(self, columns):
        """The rows that ``differences`` has something to say of."""
        streamed, crc32 = (self.flags & STREAMED) != 0, np.maximum(0, columns[_zip.CRC])
        wrong = self.method != columns[_zip.METHOD]
        for said, expected in (
            (self.crc32, crc32),
            (self.stored, columns[_zip.STORED]),
            (self.nbytes, columns[_zip.NBYTES]),
        ):
            wrong |= (said != expected) & ~(streamed & (said == 0))
        return np.flatnonzero(self.present & wrong)


def read_descriptors(source, at, room, crc32, stored, nbytes):
    """What stands behind the data of streamed entries: (status, nbytes) in columns.

    ``at`` is where data ends and ``room`` how many bytes there are up to something else; a descriptor is GOOD where it says what
    the other columns say, WRONG where it says something else, ABSENT where there is no room for one.
    """
    room = np.clip(room, 0, MOST_DESCRIPTOR)
    blob, starts = read_extents(source, at, room)
    blob = np.concatenate([blob, np.zeros(MOST_DESCRIPTOR, np.uint8)])
    data = blob[starts[:, None] + np.arange(MOST_DESCRIPTOR)]
    signed = (number(data, 0, 4) == DESCRIPTOR) & (room >= LAYOUTS[0][0])
    status = np.where(room >= LEAST_DESCRIPTOR, WRONG, ABSENT)
    found = np.where(room >= MOST_DESCRIPTOR, MOST_DESCRIPTOR, np.minimum(room, LAYOUTS[0][0]))
    for length, crc_at, sizes_at, size in reversed(LAYOUTS):
        mask = MAX32 if size == 4 else -1
        good = (room >= length) & (number(data, crc_at, 4) == crc32)
        good &= number(data, sizes_at, size) == stored & mask
        good &= number(data, sizes_at + size, size) == nbytes & mask
        good &= signed | (crc_at == 0)
        status[good], found[good] = GOOD, length
    return status, found


GOOD, WRONG, ABSENT = range(3)


def record_ends(source, directory, columns):
    """Where each entry ends, descriptor and all, by its local header; where it begins, if that is not there or of another name."""
    header, limit, stored = columns[_zip.HEADER], columns[_zip.LIMIT], columns[_zip.STORED]
    local = LocalHeaders(source, directory, columns)
    ends = np.where(
        local.present & local.same_name, np.clip(local.data + stored, header, limit), header
    )
    rows = np.flatnonzero((ends > header) & ((local.flags & STREAMED) != 0))
    crc32, nbytes = np.maximum(0, columns[_zip.CRC]), columns[_zip.NBYTES]
    at, room = ends[rows], limit[rows] - ends[rows]
    ends[rows] += read_descriptors(source, at, room, crc32[rows], stored[rows], nbytes[rows])[1]
    return ends


def gaps(begins, ends):
    """(begin, end) of the bytes before the last of some extents that none of them takes."""
    order = np.argsort(begins, kind="stable")
    begins, reached = begins[order], np.maximum.accumulate(np.insert(ends[order], 0, 0))
    return [(int(reached[i]), int(begins[i])) for i in np.flatnonzero(begins > reached[:-1])]


def number(data, at, nbytes):
    """A little-endian number of each row of a matrix of bytes, as int64."""
    found = np.zeros(len(data), dtype=np.uint64)
    for i in range(nbytes):
        found |= data[:, at + i].astype(np.uint64) << np.uint64(8 * i)
    return found.astype(np.int64)


def read_extents(source, offset, nbytes):
    """Read many short extents, each cut where the source ends and zeros from there on: (their bytes, where each begins).

    Raises what reading raises where the source has become shorter.
    """
    starts = np.cumsum(nbytes) - nbytes
    blob = np.zeros(int(nbytes.sum()), dtype=np.uint8)
    there = np.clip(source.nbytes - offset, 0, nbytes)
    records = Records([], offset, there)
    order = np.argsort(offset, kind="stable")
    fill(source, records, order, blob.ctypes.data + starts[order], blob, verify=False)
    return blob, starts
