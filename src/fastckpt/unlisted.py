"""Records of a ZIP by their local headers: those that no directory lists, which salvage and other readers may find, too."""

from . import _zip
from ._crc32 import crc32
from .containers import sniff
from .containers._zip_directory import LOCAL_NBYTES, MOST_INFLATION
from .containers.zip import inflate
from .containers.zip_walk import Walker
from .errors import LimitError
from .records import DEFLATED, NO_CRC

WINDOW_NBYTES = 1 << 20


class Stretch:
    """Some bytes of a source as one of their own: what a Walker is to stay in."""

    def __init__(self, source, begin, end):
        self.source, self.begin, self.nbytes, self.name = source, begin, end - begin, source.name

    def read(self, offset, nbytes):
        return self.source.read(self.begin + offset, nbytes)


def find_header(source, begin, end):
    """Where the signature of a local header stands in a stretch of bytes; None where it does not."""
    while begin < end:
        window = bytes(source.read(begin, min(WINDOW_NBYTES, end - begin)))
        if (at := window.find(sniff.LOCAL_HEADER)) >= 0:
            return begin + at
        begin += max(1, len(window) - 3)  # it may lie across two windows
    return None


def records_between(source, begin, end, steps_left):
    """Every record whose local header stands between two bytes, and the steps that are left; LimitErrors end the list.

    A record is (name, where its header stands, method, offset, stored bytes, bytes): what header or descriptor say, or up to the
    next header where none of them tells; then ``bytes`` is None. One inside of another is a record, too: who is right is not asked.
    """
    walker = Walker(Stretch(source, begin, end))
    walker.steps_left = steps_left
    records, error = [], None
    try:
        header = walker.next_header(0)
        while header is not None:
            found = walker.measure(header)
            following = walker.next_header(header.at + 1)
            if found:
                claim = found[0]
                offset, stored, nbytes = claim.offset, claim.stored, claim.nbytes
            else:
                last = following.at if following else end - begin
                offset, stored, nbytes = header.data, max(0, last - header.data), None
            records.append(
                (header.name, begin + header.at, header.method, begin + offset, stored, nbytes)
            )
            header = following
    except LimitError as caught:
        error = caught
    return records, walker.steps_left, error


def local_header(source, header):
    """The first bytes of a local header, and where the data behind it begins."""
    nbytes = max(0, min(LOCAL_NBYTES, source.nbytes - header))
    local, offset = bytes(source.read(header, nbytes)), header + LOCAL_NBYTES
    if nbytes == LOCAL_NBYTES:
        offset += int.from_bytes(local[26:28], "little")
        offset += int.from_bytes(local[28:30], "little")
    return local, offset


def is_whole(source, entry):
    """Whether a record is what an entry of the directory, its columns, says that it is; what is not to be read is not."""
    stored, nbytes, crc = (entry[c] for c in (_zip.STORED, _zip.NBYTES, _zip.CRC))
    local, offset = local_header(source, entry[_zip.HEADER])
    if not local.startswith(sniff.LOCAL_HEADER) or stored > source.nbytes - offset:
        return False
    data = source.read(offset, stored)
    if entry[_zip.METHOD] == DEFLATED:
        if nbytes // MOST_INFLATION > stored:
            return False
        data = inflate(data, nbytes)
    return data is not None and (crc == NO_CRC or crc32(data) == crc)
