"""The directory of a ZIP as columns, and what in it cannot be read, or could be meant in two ways."""

import numpy as np

from .. import _zip, _zip_local
from ..errors import FormatError, UnsupportedError
from ..records import DEFLATED, STORED
from ._zip_end import CUT_IT
from ._zip_names import RecordNames

LOCAL_NBYTES, MOST_INFLATION = 30, _zip_local.MOST_INFLATION
METHODS = {
    1: " (shrink)",
    6: " (implode)",
    9: " (deflate64)",
    12: " (bzip2)",
    14: " (lzma)",
    93: " (zstd)",
    95: " (xz)",
}


def unusable_rows(columns):
    """Which entries cannot be read by what the directory says of them."""
    marks = np.empty(columns.shape[1], dtype=bool)
    _zip_local.unusable_rows(columns, len(marks), marks.view(np.uint8))
    return marks


def unusable(flags, method, stored, nbytes):
    """Why an entry cannot be read: the kind of error, and what is wrong with it."""
    if flags & _zip_local.UNREADABLE:
        return UnsupportedError, (
            f"the directory marks it as encrypted or masked (flags {flags:#06x}); save it again without a password"
        )
    if method not in (STORED, DEFLATED):
        return UnsupportedError, (
            f"it is packed with method {method}{METHODS.get(method, '')}; 0 (stored) and 8 (deflate) can be read: "
            f"unpack the archive and pack it again"
        )
    if method == STORED:
        return FormatError, f"it is stored as it is, yet has {nbytes} bytes of content in {stored}"
    return FormatError, (
        f"the directory says that {stored} bytes inflate to {nbytes}; deflate yields {MOST_INFLATION} times at most"
    )


def read_directory(source, end, directory):
    """The columns of all entries, with their limits."""
    columns = np.zeros((_zip.COLUMNS, end.entries), dtype=np.int64)
    status, entry, at = _zip.read_directory(
        directory, columns, end.entries, end.directory, end.bias
    )
    if status != _zip.OK:
        raise FormatError(
            f"{source.name}: ZIP directory entry {entry} of {end.entries} at byte {end.directory + at}: "
            f"{DIRECTORY_PROBLEMS[status]}; the file is damaged",
            path=source.name,
            offset=end.directory + at,
        )
    headers = columns[_zip.HEADER]
    order = None if _zip.is_ascending(headers) else np.argsort(headers, kind="stable")
    if (wrong := _zip.set_limits(columns, order, end.entries, end.directory)) >= 0:
        name = RecordNames(directory, columns, 0)[wrong]
        raise FormatError(
            f"{source.name}: record {name!r} at byte {headers[wrong]}: its {columns[_zip.STORED, wrong]} bytes overlap "
            f"what begins at byte {columns[_zip.LIMIT, wrong]}; the file is damaged or made to deceive",
            path=source.name,
            record=name,
            offset=int(headers[wrong]),
        )
    return columns


DIRECTORY_PROBLEMS = {
    _zip.ENTRY_CUT: "the directory ends before it",
    _zip.ENTRY_SIGNATURE: "its signature (50 4b 01 02) is missing",
    _zip.ENTRY_NAME: "its name, extra field or comment reach over the end of the directory",
    _zip.ENTRY_EXTRA: "its zip64 extra field lacks a number that is said to be there",
    _zip.ENTRY_DISK: "it lies on another disk of a split archive",
    _zip.ENTRY_MASKED: "its fields are masked, the directory is encrypted",
    _zip.ENTRY_HEADER: "its offset lies behind the directory",
    _zip.ENTRY_STORED: "it is larger than the file",
    _zip.ENTRY_NBYTES: "its size has more than 63 bits",
    _zip.ENTRY_LENGTH: "its name, extra field or comment reach over the next entry",
    _zip.ENTRIES_LEFT: "the end record counts no more entries, the directory has bytes left",
}


def check_alone(source, end, others, columns):
    """Refuse a source in which a second archive could be meant."""
    for offset, problem in second_archives(source, end, others, columns):
        raise FormatError(f"{source.name}: {problem}", path=source.name, offset=offset)


def second_archives(source, end, others, columns):
    """Yield where a second archive could be meant, and why; one inside the data of a record is only data."""
    headers = columns[_zip.HEADER]
    start = int(headers.min()) if columns.shape[1] else end.directory
    if start and source.nbytes >= 4 and _zip.has_header(source.read(0, 4), 0, False):
        yield (
            start,
            f"a ZIP archive begins at byte 0, and the one that ends at byte {end.end} begins at byte {start}: two archives in "
            f"one file, or a damaged one with an archive inside; {CUT_IT}",
        )
    for other in others:
        first = headers + LOCAL_NBYTES + columns[_zip.NAME_NBYTES]
        # the whole of it, comment and all: where it says it ends
        if not ((first <= other.directory) & (other.end <= columns[_zip.LIMIT])).any():
            yield (
                other.at,
                f"there are two ZIP end records, at bytes {other.at} and {end.at}, each with a directory: "
                f"two archives in one file, or one hidden in the other's comment; {CUT_IT}",
            )


def unify_separators(directory, columns):
    """The bytes to read names from: backslashes are slashes where no name has a slash, as old Windows tools wrote."""
    if not columns.shape[1] or b"\\" not in directory:
        return directory
    first, nbytes = columns[[_zip.NAME, _zip.NAME_NBYTES], 0].tolist()
    if (
        b"/" in directory[first : first + nbytes]
    ):  # nearly always, and a backslash is a byte of some number
        return directory
    spans = [(at, at + nbytes) for at, nbytes in columns[[_zip.NAME, _zip.NAME_NBYTES]].T.tolist()]
    if any(b"/" in directory[at:stop] for at, stop in spans):
        return directory
    names = bytearray(directory)
    for at, stop in spans:
        names[at:stop] = names[at:stop].replace(b"\\", b"/")
    return names
