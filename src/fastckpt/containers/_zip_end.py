"""Find the end record of a ZIP and, with it, where its directory lies. Never guesses between two archives."""

from typing import NamedTuple

from .. import _zip
from ..errors import FormatError
from ..importing import importing
from .sniff import DCP_REMEDY

END_NBYTES, LOCATOR_NBYTES, END_64_NBYTES, CENTRAL_NBYTES = 22, 20, 56, 46

# An end record is followed by a comment of at most 65,535 bytes.
COMMENT_REACH = END_NBYTES + 0xFFFF
# Bytes before an end record that belong to it: locator and zip64 end record.
BEFORE = LOCATOR_NBYTES + END_64_NBYTES
# Some tools pad a file behind the archive. Looked at only if nothing is found where it should be.
PADDING_REACH = 1 << 20
# Each signature costs some microseconds; real data has a handful by chance.
MOST_IN_PADDING = 4096

CENTRAL_OFFSET_AT = 42  # where a directory entry says where its record is
MAX16, MAX32 = 0xFFFF, 0xFFFFFFFF


class End(NamedTuple):
    """A usable end record. All positions count from the start of the source."""

    at: int  # where the end record itself lies
    end: int  # one past its comment, where that is all there
    directory: int  # where the directory lies
    nbytes: int  # of the directory
    entries: int  # how many it has
    bias: int  # to be added to the offsets of the entries: bytes before the archive
    rival: int | None = None  # where another directory lies that could be meant as well


class Tail:
    """The last bytes of a source, and single looks at what lies before them."""

    def __init__(self, source, reach):
        self.source = source
        self.start = max(0, source.nbytes - reach)
        self.data = source.read(self.start, source.nbytes - self.start)

    def bytes(self, offset, nbytes):
        """The bytes ``[offset, offset + nbytes)``, as many as there are."""
        if offset < 0 or offset >= self.source.nbytes:
            return b""
        nbytes = min(nbytes, self.source.nbytes - offset)
        if offset >= self.start:
            return self.data[offset - self.start : offset - self.start + nbytes]
        return self.source.read(offset, nbytes)


def find_end(source):
    """Find the end of the archive: (End, other usable Ends before it, Tail).

    The first may have a rival. Raises FormatError, with the reason, where there is none.
    """
    reason = None
    for reach, most in ((COMMENT_REACH, COMMENT_REACH), (PADDING_REACH, MOST_IN_PADDING)):
        tail = Tail(source, reach + BEFORE)
        ends = []
        for at in _zip.find_end_records(tail.data, most):
            try:
                ends.append(read_end(tail, tail.start + at))
            except FormatError as error:
                reason = reason or error  # the last record's is the one to tell
                # Four bytes may be there by chance, with a locator in front they are an archive's end.
                if not ends and _locator(tail, tail.start + at):
                    raise
        if ends or reach >= source.nbytes:
            break
    if not ends:
        raise reason or _no_end(source, tail)
    return ends[0], ends[1:], tail


CUT_IT = f"cut it into its parts (where it is a .distcp file: {DCP_REMEDY})"


def two_directories(end, tail):
    """The error for an end record that two directories could belong to."""
    return _error(
        tail,
        end.at,
        f"there are two directories, at byte {end.rival} (where the end record says) and right before it, "
        f"at byte {end.directory}: two archives in one file, or one in the other's comment; {CUT_IT}",
    )


def comment_nbytes(end, tail):
    """How many bytes of comment the end record speaks of."""
    return _zip.end_record(tail.bytes(end.at, END_NBYTES), 0)[-1]


def end_record_64(end, tail):
    """Where the zip64 end record lies and where its locator says it does; None where there is none."""
    wide = _read_end_64(tail, end.at)
    return None if wide is None else (wide.at, wide.claimed + end.bias)


def read_end(tail, at):
    """Read the end record at ``at`` with the zip64 records before it; FormatError where they are of no use."""
    record = _zip.end_record(tail.bytes(at, END_NBYTES), 0)
    if record is None:
        raise _error(tail, at, "the end record is cut off; the file is truncated", cut=True)
    *numbers, comment_nbytes = record
    stop, bias = at, None
    wide = _read_end_64(tail, at)
    if wide is not None:
        _check_agreement(tail, at, numbers, wide.numbers)
        numbers, stop, bias = wide.numbers, wide.at, wide.at - wide.claimed
    disk, directory_disk, count_here, count, nbytes, offset = numbers
    if (disk, directory_disk) not in ((0, 0), (1, 1)) or count_here != count:
        raise _error(
            tail,
            at,
            f"the end record speaks of {count_here} of {count} entries on disk {disk}; "
            f"this is one part of a split archive, join the parts first",
        )
    if count > nbytes // CENTRAL_NBYTES or (not count and nbytes):
        raise _error(
            tail,
            at,
            f"the end record says {count} entries in {nbytes} bytes, an entry has {CENTRAL_NBYTES} or more",
        )
    if nbytes > stop:
        raise _error(
            tail,
            at,
            f"the end record says that {nbytes} bytes of directory lie before it, there are {stop}; "
            f"the file is truncated or damaged",
            cut=True,
        )
    directory, bias, rival = _place(tail, at, stop, nbytes, offset, count, bias)
    return End(
        at,
        min(at + END_NBYTES + comment_nbytes, tail.source.nbytes),
        directory,
        nbytes,
        count,
        bias,
        rival,
    )


def _locator(tail, at):
    """The zip64 locator in front of the end record at ``at``, or None."""
    return _zip.end_locator_64(tail.bytes(at - LOCATOR_NBYTES, LOCATOR_NBYTES), 0)


class _End64(NamedTuple):
    at: int
    claimed: int  # where its locator says that it lies
    numbers: list


def _read_end_64(tail, at):
    """The zip64 end record in front of an end record, None where there is none, or only a broken one."""
    locator_at, locator = at - LOCATOR_NBYTES, _locator(tail, at)
    if locator is None:
        return None
    _, claimed, disks = locator
    if disks != 1:
        raise _error(
            tail, locator_at, f"the zip64 locator speaks of {disks} disks; join the parts first"
        )
    if claimed > tail.source.nbytes - END_64_NBYTES:
        raise _error(
            tail,
            locator_at,
            f"the zip64 locator points to byte {claimed}, the file has {tail.source.nbytes}; "
            f"the file is truncated or damaged",
        )
    # Where bytes stand before the archive, the record lies later than it is said to.
    nearest = locator_at - END_64_NBYTES
    found = [p for p in {claimed, nearest} if _zip.end_record_64(tail.bytes(p, END_64_NBYTES), 0)]
    if not found:
        return None
    if len(found) == 2:
        raise _error(
            tail, locator_at, f"there are two zip64 end records, at bytes {claimed} and {nearest}"
        )
    nbytes, *numbers = _zip.end_record_64(tail.bytes(found[0], END_64_NBYTES), 0)
    if nbytes < END_64_NBYTES - 12 or nbytes > locator_at - found[0] - 12:
        raise _error(
            tail,
            found[0],
            f"the zip64 end record says that {nbytes} bytes of it follow, "
            f"{END_64_NBYTES - 12} to {locator_at - found[0] - 12} are possible",
        )
    return _End64(found[0], claimed, numbers)


def _check_agreement(tail, at, narrow, wide):
    """A number that the plain end record does have must be the zip64 one."""
    limits = (MAX16, MAX16, MAX16, MAX16, MAX32, MAX32)
    names = (
        "disk",
        "directory disk",
        "entries here",
        "entries",
        "directory bytes",
        "directory offset",
    )
    for name, small, large, limit in zip(names, narrow, wide, limits, strict=True):
        if small not in (limit, large):
            raise _error(
                tail,
                at,
                f"the end record says {name} {small}, the zip64 end record says {large}; the file is damaged",
            )


def _place(tail, at, stop, nbytes, offset, count, bias):
    """Where the directory lies, the bias of its offsets, and a rival. ``stop`` is where the end records begin."""
    nearest = stop - nbytes
    if not count:
        return nearest, 0, None
    if offset == nearest:  # whether it begins as it should is seen when it is read
        return offset, 0, None
    claims = [p for p in (nearest, offset) if p <= nearest and _has_header(tail, p, central=True)]
    if len(claims) == 2:
        return nearest, 0, offset
    if offset in claims:
        return offset, 0, None
    shift = nearest - offset
    if claims and shift > 0 and bias in (None, shift) and _begins_shifted(tail, nearest, shift):
        return nearest, shift, None
    raise _error(
        tail,
        at,
        f"the end record says that the directory is at byte {offset}, "
        + (f"it is at byte {nearest}" if claims else "there is none")
        + "; bytes of the file are missing or damaged",
        cut=True,
    )


def _has_header(tail, offset, *, central):
    return _zip.has_header(tail.bytes(offset, 4), 0, central)


def _begins_shifted(tail, directory, shift):
    """Tell whether the first entry's header lies ``shift`` bytes behind where the directory says."""
    offset = int.from_bytes(tail.bytes(directory + CENTRAL_OFFSET_AT, 4), "little")
    return offset == MAX32 or _has_header(tail, offset + shift, central=False)


def _no_end(source, tail):
    """What to say of a file without any end record."""
    with importing:
        from .sniff import DECODED, TRANSLATED, text_damage

    if (damage := text_damage(tail.data)) is None:
        # Preallocating downloaders leave a file of the right size whose end was never written.
        if source.nbytes > END_NBYTES and not any(tail.data[-END_NBYTES:]):
            damage = f"filled up with zeros to its {source.nbytes} bytes, the download did not finish: get it again"
        else:
            damage = f"truncated after {source.nbytes} bytes; copy or download it again"
    return FormatError(
        f"{source.name}: a ZIP archive without its end record: the file is {damage}",
        cut=damage not in (TRANSLATED, DECODED),
        path=source.name,
        offset=source.nbytes,
    )


def _error(tail, at, message, *, cut=False):
    return FormatError(
        f"{tail.source.name}: end of ZIP archive, byte {at}: {message}",
        cut=cut,
        path=tail.source.name,
        offset=at,
    )
