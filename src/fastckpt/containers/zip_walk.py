"""The records of a ZIP archive by their local headers: for archives whose directory is gone, or cannot be believed.

torch leaves sizes and checksum out of its local headers and writes them behind the data, into a descriptor. A record
counts only where all of that is there and agrees.
"""

import re
from typing import NamedTuple

from .. import _zip_local
from ..errors import LimitError
from ..records import DEFLATED, NO_CRC, STORED
from ._zip_directory import MOST_INFLATION
from ._zip_end import MAX32
from .zip_writer import DESCRIPTOR_FOLLOWS, LOCAL, ZIP64, data_offset

LOCAL_SIGNATURE, DESCRIPTOR_SIGNATURE = b"PK\3\4", b"PK\7\10"
SIGNATURES = re.compile(rb"PK(?:\x03\x04|\x07\x08)")
# Bytes that are looked at together: few at first, since what is looked for is mostly near.
FIRST_WINDOW, LAST_WINDOW = 1 << 10, 1 << 20
# Each takes some microseconds; the largest checkpoints have tens of thousands of records.
MOST_STEPS = 1 << 19
WIDE_DESCRIPTOR_NBYTES = 24


class Header(NamedTuple):
    """A local header at byte ``at``; its data begins at byte ``data``. Sizes and checksum may all be 0."""

    at: int
    name: str
    flags: int
    method: int
    crc32: int
    stored: int
    nbytes: int
    data: int


class Claim(NamedTuple):
    """What a place in the file says of a record: where its ``stored`` bytes lie, and what they are.

    ``crc32`` is NO_CRC where none was computed; ``sealed`` says that a local header, and a descriptor where there must be one,
    agree, which shows at least that the record was written to its end.
    """

    offset: int
    stored: int
    nbytes: int
    method: int
    crc32: int
    sealed: bool


def number(data, at, nbytes):
    return int.from_bytes(data[at : at + nbytes], "little")


def read_header(source, at, prefix=""):
    """The local header at a byte; None where there is none of a record that can be read and whose name begins so."""
    if at < 0 or at > source.nbytes - LOCAL.itemsize:
        return None
    fixed = source.read(at, LOCAL.itemsize)
    flags, method = number(fixed, 6, 2), number(fixed, 8, 2)
    if fixed[:4] != LOCAL_SIGNATURE or flags & _zip_local.UNREADABLE:
        return None
    name_nbytes, extra_nbytes = number(fixed, 26, 2), number(fixed, 28, 2)
    data = at + LOCAL.itemsize + name_nbytes + extra_nbytes
    if method not in (STORED, DEFLATED) or not name_nbytes or data > source.nbytes:
        return None
    rest = source.read(at + LOCAL.itemsize, name_nbytes + extra_nbytes)
    name = bytes(rest[:name_nbytes]).decode("utf-8", "surrogateescape")
    if not name.startswith(prefix):
        return None
    nbytes, stored = wide_sizes(rest[name_nbytes:], number(fixed, 22, 4), number(fixed, 18, 4))
    return Header(at, name, flags, method, number(fixed, 14, 4), stored, nbytes, data)


def wide_sizes(extra, *sizes):
    """Sizes of a header, those that are too large for it out of the zip64 field."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = number(extra, at, 2), number(extra, at + 2, 2)
        if kind == ZIP64:
            numbers = [
                number(extra, i, 8) for i in range(at + 4, min(at + 4 + length, len(extra)) - 7, 8)
            ]
            return [numbers.pop(0) if size == MAX32 and numbers else size for size in sizes]
        at += 4 + length
    return sizes


def read_descriptor(source, header, stored):
    """The Claim of a record of so many stored bytes, and where it ends; None where no descriptor says the same."""
    at = header.data + stored
    if stored < 0 or at > source.nbytes - 16:
        return None
    data = source.read(at, min(WIDE_DESCRIPTOR_NBYTES, source.nbytes - at))
    if data[:4] != DESCRIPTOR_SIGNATURE:
        return None
    for width in (4, 8):
        end = 8 + 2 * width
        nbytes = number(data, 8 + width, width)
        fits = len(data) >= end and number(data, 8, width) == stored
        if fits and is_possible(header.method, stored, nbytes):
            claim = Claim(
                header.data, stored, nbytes, header.method, checksum(data, 4, nbytes), True
            )
            return claim, at + end
    return None


def is_possible(method, stored, nbytes):
    """Whether so many stored bytes can hold so many."""
    return nbytes <= MOST_INFLATION * (stored + 1) if method == DEFLATED else nbytes == stored


def checksum(data, at, nbytes):
    """A checksum field, NO_CRC where it says that none was computed."""
    return number(data, at, 4) or (NO_CRC if nbytes else 0)


def claim_of(source, header, sizes=()):
    """The Claim of a record by its header, and where it ends, or by a descriptor behind one of ``sizes``; None where none says so."""
    if not header.flags & DESCRIPTOR_FOLLOWS:
        end = header.data + header.stored
        if end > source.nbytes or not is_possible(header.method, header.stored, header.nbytes):
            return None
        crc32 = header.crc32 or (NO_CRC if header.nbytes else 0)
        claim = Claim(header.data, header.stored, header.nbytes, header.method, crc32, True)
        return claim, end
    sizes = (header.stored,) if header.stored else sizes
    found = (read_descriptor(source, header, stored) for stored in sizes)
    return next((each for each in found if each), None)


class Walker:
    """Walks through an archive from its beginning. Raises LimitError where so much is damaged that no honest file is that."""

    def __init__(self, source):
        self.source, self.steps_left = source, MOST_STEPS

    def _step(self):
        self.steps_left -= 1
        if self.steps_left < 0:
            raise LimitError(
                f"{self.source.name}: more than {MOST_STEPS} ZIP headers and descriptors, or what looks like them, had to be "
                f"looked at; no torch.save writes so many",
                path=self.source.name,
            )

    def walk(self, prefix, sizes):
        """(Header, Claim) of one record after the other, if its name begins with ``prefix``; None for a Claim that fails.

        ``sizes`` has the sizes that a record may have, by whole name. Where a record fails, its neighbours are still found: one of
        known size is passed over, so that nothing inside it is taken for a record.
        """
        header = self.next_header(0, prefix)
        while header is not None:
            self._step()
            expected = sizes.get(header.name)
            found = self.measure(header, expected)
            if found is None and expected:
                # An extra field of a wrong length; torch's writer leaves no choice where the data begins.
                name_nbytes = len(header.name.encode("utf-8", "surrogateescape"))
                header = header._replace(data=data_offset(header.at, name_nbytes, expected[0]))
                found = self.measure(header, expected)
            if found is not None:
                claim, end = found
            else:
                claim, end = None, header.at + LOCAL.itemsize
                if expected:
                    end = header.data + expected[0]
            yield header, claim
            header = read_header(self.source, end, prefix) or self.next_header(end, prefix)

    def next_header(self, start, prefix=""):
        """The first local header from ``start`` on, None where no more follow."""
        for at, signature in self._scan(start):
            if signature == LOCAL_SIGNATURE and (header := read_header(self.source, at, prefix)):
                return header
        return None

    def measure(self, header, expected=None):
        """As ``claim_of``; where no sizes are expected, a descriptor is looked for, up to the next local header."""
        found = claim_of(self.source, header, expected or ())
        if found or not header.flags & DESCRIPTOR_FOLLOWS:
            return found
        if header.stored or expected is not None and header.method == STORED:
            return None
        folder = header.name.partition("/")[0]
        for at, signature in self._scan(header.data):
            if signature == DESCRIPTOR_SIGNATURE:
                if found := read_descriptor(self.source, header, at - header.data):
                    return found
            elif read_header(self.source, at, folder):
                return None
        return None

    def _scan(self, start):
        """(where, which) of the signatures of local headers and descriptors from ``start`` on."""
        nbytes = FIRST_WINDOW
        while start < self.source.nbytes:
            window = self.source.read(start, min(nbytes, self.source.nbytes - start))
            for found in SIGNATURES.finditer(window):
                self._step()
                yield start + found.start(), bytes(found[0])
            start += max(1, len(window) - 3)  # a signature may lie across two windows
            nbytes = min(4 * nbytes, LAST_WINDOW)
