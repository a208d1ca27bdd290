"""ZIP checkpoints, as torch.save has written them since 1.6: the directory as Records, local headers when asked.

What is relied on must agree with itself: names that occur twice, entries that overlap, local names that differ
and second archives are errors. Entries outside the checkpoint's folder are ignored.
"""

import os
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from .. import _zip, _zip_local, strict_json
from .._crc32 import crc32
from ..errors import ChecksumError, FormatError, UnsupportedError
from ..records import DEFLATED, NO_CRC, STORED, Records
from ._zip_contents import no_pickle
from ._zip_end import find_end, two_directories

PICKLE = "data.pkl"
VERSION_RECORDS = (".data/version", "version")  # the first one counts where both are there
BYTEORDER_RECORD = "byteorder"
TORCHSCRIPT_RECORD = "constants.pkl"
METADATA_RECORD = (
    "metadata.json"  # what a writer has to say beside the object; torch does not look at it
)
METADATA_MOST_NBYTES = 16 << 20  # parsed, it may take thirty times as much
STORAGE_FOLDERS = ("data/", "tensors/")  # the second is torch 1.4's
OLDEST_VERSION, NEWEST_VERSION = 1, 10

# Deflate makes at most 258 bytes out of 2 bits; zlib's own documentation gives this ratio.
MOST_INFLATION = 1032


def open_zip(source, *, verify=True):
    """Read the directory of a ZIP checkpoint and its small records; returns a ZipContainer.

    Raises FormatError, UnsupportedError, or ChecksumError (not with ``verify=False``).
    """
    end, others, tail = find_end(source)
    if end.rival is not None:
        raise two_directories(end, tail)
    directory = tail.bytes(end.directory, end.nbytes)
    columns = _read_directory(source, end, directory)
    _check_alone(source, end, others, columns)
    names = unify_separators(directory, columns)
    prefix = _find_prefix(source, names, columns)
    selected = _select(names, columns, prefix)
    container = ZipContainer(source, end.end, directory, names, selected, prefix, verify)
    if container.byteorder is None:
        _check_no_byteorder(source, names, columns, prefix)
    return container


class ZipContainer:
    """The records of one checkpoint in a ZIP: names count from its folder, ``root``."""

    def __init__(self, source, end, directory, names, columns, prefix, verify):
        self.source = source
        self.end = end  # where the archive ends in the source
        self.root = prefix[:-1].decode("utf-8", "surrogateescape")
        self.verify = verify
        self._directory = directory
        self._columns = columns
        skip = len(prefix)
        self.records = Records(
            RecordNames(names, columns, skip),
            np.full(columns.shape[1], -1),
            columns[_zip.NBYTES],
            columns[_zip.STORED],
            columns[_zip.CRC],
            columns[_zip.METHOD],
        )
        for self.folder in STORAGE_FOLDERS:
            self.storages, others, twice = _zip.index_names(
                names, columns, columns.shape[1], skip, self.folder.encode()
            )
            if self.storages:
                break
        else:
            self.folder = STORAGE_FOLDERS[0]
        self.index = RecordIndex(self.storages, others, self.folder)
        self._refuse_twins(twice)
        self.is_torchscript = TORCHSCRIPT_RECORD in others
        # What is always read is located at once; storages wait until they are wanted.
        small = (PICKLE, BYTEORDER_RECORD, *VERSION_RECORDS)
        self.locate([others[name] for name in small if name in others])
        self.version = self._read_version(others)
        self.byteorder = self._read_byteorder(others)

    def _refuse_twins(self, twice):
        used = (PICKLE, BYTEORDER_RECORD, TORCHSCRIPT_RECORD, *VERSION_RECORDS)
        for name in twice:
            if name.startswith(self.folder) or name in used:
                raise self.error(
                    "there are two records of this name and readers differ in which one they take; "
                    "the file is damaged or made to deceive",
                    name,
                )

    def _read_version(self, others):
        name = next((name for name in VERSION_RECORDS if name in others), None)
        if name is None:
            return None
        text = bytes(self.read_record(name))
        version = parse_version(text)
        if version is None or version < OLDEST_VERSION:
            raise self.error(
                f"{text[:20]!r} is not a version number; {OLDEST_VERSION} to {NEWEST_VERSION} are",
                name,
            )
        if version > NEWEST_VERSION:
            raise self.error(
                f"{text[:20]!r} is a format version above {NEWEST_VERSION}, the newest known; a newer release may read it",
                name,
                kind=UnsupportedError,
            )
        return version

    def _read_byteorder(self, others):
        if BYTEORDER_RECORD not in others:
            return None
        text = bytes(self.read_record(BYTEORDER_RECORD))
        if text not in (b"little", b"big"):
            raise self.error(
                f"{text[:20]!r} is not a known byte order; b'little' and b'big' are",
                BYTEORDER_RECORD,
            )
        return text.decode()

    def metadata(self):
        """What the metadata record says, parsed; None where there is none, or where it is not JSON of finite numbers."""
        row = self.index.get(METADATA_RECORD)
        if row is None or self.records.nbytes[row] > METADATA_MOST_NBYTES:
            return None
        data = self.read_row(row)
        try:
            return strict_json.parse(data)
        except (ValueError, RecursionError):
            return None

    def locate(self, rows):
        """Find where the data of some rows begins: fills ``records.offset``, in as few reads as it takes.

        Checks their local headers against the directory. Raises FormatError or UnsupportedError, naming the record.
        """
        rows = np.asarray(rows, dtype=np.int64)
        rows = rows[self.records.offset[rows] < 0]
        if not len(rows):
            return
        self._check_usable(rows)
        headers = self._columns[_zip.HEADER][rows]
        if not _zip.is_ascending(headers):
            rows = rows[np.argsort(headers, kind="stable")]
        status, wrong = _zip_local.locate(
            self._directory,
            self._columns,
            len(self.records),
            rows,
            self.records.offset,
            self.source,
        )
        if status != _zip_local.LOCAL_OK:
            raise self._local_error(status, int(rows[wrong]))

    def _check_usable(self, rows):
        """See that entries can be read at all, by what the directory says of them."""
        flags = self._columns[_zip.FLAGS][rows]
        method, stored, nbytes = (
            c[rows] for c in (self.records.method, self.records.stored_nbytes, self.records.nbytes)
        )
        wrong = unusable_rows(flags, method, stored, nbytes)
        if wrong.any():
            raise self._unusable(int(rows[wrong.argmax()]))

    def _unusable(self, row):
        columns = (self.records.method, self.records.stored_nbytes, self.records.nbytes)
        kind, problem = unusable(
            int(self._columns[_zip.FLAGS, row]), *(int(column[row]) for column in columns)
        )
        return self.error(problem, self.records.names[row], kind=kind)

    def _local_error(self, status, row):
        name = self.records.names[row]
        at = int(self._columns[_zip.HEADER, row])
        if status > 0:
            return OSError(status, os.strerror(status), self.source.name)
        if status == _zip_local.LOCAL_SHORT:
            return self.source.short(at, LOCAL_NBYTES)
        head = bytes(self.source.read(at, LOCAL_NBYTES))
        if status == _zip_local.LOCAL_SIGNATURE:
            problem = f"a local header (50 4b 03 04) should be there, found is {head[:4].hex(' ')}"
        elif status == _zip_local.LOCAL_FLAGS:
            problem = f"its local header marks it as encrypted or masked (flags {head[7]:02x}{head[6]:02x})"
        elif status == _zip_local.LOCAL_NAME:
            nbytes = min(
                int.from_bytes(head[26:28], "little"), self.source.nbytes - at - LOCAL_NBYTES
            )
            found = bytes(self.source.read(at + LOCAL_NBYTES, nbytes)).decode(
                "utf-8", "backslashreplace"
            )
            problem = f"its local header calls it {found!r}, the directory does not"
        else:
            limit = int(self._columns[_zip.LIMIT, row])
            problem = f"its {self.records.stored_nbytes[row]} bytes reach over byte {limit}, where something else begins"
        return self.error(f"{problem}; the file is damaged", name, at)

    def offset_of(self, row):
        """Where the data of a row begins."""
        if self.records.offset[row] < 0:
            self.locate([row])
        return int(self.records.offset[row])

    def read_record(self, name):
        """Read one record whole, inflated and (unless ``verify`` is off) checked: bytes or bytearray.

        Raises KeyError for a name that is not there.
        """
        return self.read_row(self.index[name])

    def read_row(self, row):
        """Read the record of a row, as ``read_record`` does."""
        name, offset = self.records.names[row], self.offset_of(row)
        data = self.source.read(offset, int(self.records.stored_nbytes[row]))
        if self.records.method[row] == DEFLATED:
            data = inflate(data, int(self.records.nbytes[row]))
            if data is None:
                raise self.error(
                    f"the deflated bytes do not inflate to the {self.records.nbytes[row]} bytes that the directory says; "
                    f"the file is damaged",
                    name,
                    offset,
                )
        expected = int(self.records.crc32[row])
        if self.verify and expected != NO_CRC and (actual := crc32(data)) != expected:
            raise ChecksumError(
                f"{self.source.name}: record {name!r} at byte {offset}: CRC-32 is {actual:08x}, the directory says "
                f"{expected:08x}; the file is damaged (verify=False reads it anyway)",
                expected=expected,
                actual=actual,
                path=self.source.name,
                record=name,
                offset=offset,
            )
        return data

    def error(self, problem, record, offset=None, *, kind=FormatError):
        """An error about one record, in the form that all have."""
        if offset is None and record in self.index:
            offset = int(self._columns[_zip.HEADER, self.index[record]])
        where = "" if offset is None else f" at byte {offset}"
        return kind(
            f"{self.source.name}: record {record!r}{where}: {problem}",
            path=self.source.name,
            record=record,
            offset=offset,
        )


LOCAL_NBYTES = 30
METHODS = {
    1: " (shrink)",
    6: " (implode)",
    9: " (deflate64)",
    12: " (bzip2)",
    14: " (lzma)",
    93: " (zstd)",
    95: " (xz)",
}


def unusable_rows(flags, method, stored, nbytes):
    """Which entries, given in columns, cannot be read by what the directory says of them."""
    wrong = (flags & _zip_local.UNREADABLE) != 0
    wrong |= (method != STORED) & (method != DEFLATED)
    wrong |= (method == STORED) & (stored != nbytes)
    # an empty deflate stream has two bytes; no sum or product here leaves 64 bits
    wrong |= (method == DEFLATED) & (nbytes // MOST_INFLATION > stored)
    return wrong | (nbytes > 0) & (stored == 0)


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


class RecordNames(Sequence):
    """The names of rows, decoded when one is asked for: 70,000 strings that nobody looks at take 10 ms."""

    __slots__ = ("_at", "_nbytes", "_skip", "_text")

    def __init__(self, text, columns, skip):
        self._text, self._skip = text, skip
        self._at, self._nbytes = columns[_zip.NAME], columns[_zip.NAME_NBYTES]

    def __len__(self):
        return len(self._at)

    def __getitem__(self, row):
        at, nbytes = int(self._at[row]), int(self._nbytes[row])
        return bytes(self._text[at + self._skip : at + nbytes]).decode("utf-8", "surrogateescape")


def folded(name):
    """A name as torch compares it: its ASCII letters small."""
    try:
        return name.encode("utf-8", "surrogateescape").lower()
    except UnicodeEncodeError:  # a pickle's; no record is called so
        return name.encode("utf-8", "surrogatepass").lower()


def is_text(name):
    """Whether a name is one in UTF-8."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


class RecordIndex(Mapping):
    """Name -> row of every record, over the dict of storages and the dict of the others."""

    __slots__ = ("_folder", "_others", "_storages")

    def __init__(self, storages, others, folder):
        self._storages, self._others, self._folder = storages, others, folder

    def __getitem__(self, name):
        if name.startswith(self._folder):
            key = name[len(self._folder) :]
            if key in self._storages:
                return self._storages[key]
        return self._others[name]

    def __len__(self):
        return len(self._storages) + len(self._others)

    def __iter__(self):
        yield from self._others
        for key in self._storages:
            yield self._folder + key


def parse_version(text):
    """Read a version as torch does: blanks, a sign, digits, anything behind them; None where there is no number."""
    text = text.lstrip(b" \t\n\v\f\r")
    text = text.removeprefix(b"+")
    digits = len(text) - len(text.lstrip(b"0123456789"))
    if not digits:
        return None
    # a number of a thousand digits is not worth converting
    return int(text[:digits]) if digits < 20 else NEWEST_VERSION + 1


def inflate(data, nbytes):
    """Inflate a raw deflate stream to exactly ``nbytes`` bytes; None where it is not one that does."""
    if not nbytes and not data:
        return b""  # some tools write no stream at all for empty content
    stream = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        # one byte more than announced shows that there is more, without making it all
        content = stream.decompress(data, nbytes + 1)
    except zlib.error:
        return None
    return content if stream.eof and len(content) == nbytes else None


def _read_directory(source, end, directory):
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


def _check_alone(source, end, others, columns):
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
            f"one file, or a damaged one with an archive inside; cut it into its parts",
        )
    for other in others:
        first = headers + LOCAL_NBYTES + columns[_zip.NAME_NBYTES]
        # the whole of it, comment and all: where it says it ends
        if not ((first <= other.directory) & (other.end <= columns[_zip.LIMIT])).any():
            yield (
                other.at,
                f"there are two ZIP end records, at bytes {other.at} and {end.at}, each with a directory: "
                f"two archives in one file, or one hidden in the other's comment; cut it into its parts",
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


def _find_prefix(source, names, columns):
    """What the names of the checkpoint's records begin with: the folder of data.pkl and its slash."""
    prefixes = find_prefixes(names, columns)
    if not prefixes:
        raise no_pickle(source, RecordNames(names, columns, 0))
    if len(prefixes) > 1:
        raise FormatError(
            f"{source.name}: a ZIP archive with {two_checkpoints(prefixes)}", path=source.name
        )
    return prefixes[0].encode("utf-8", "surrogateescape")


def find_prefixes(names, columns):
    """The folders of checkpoints, each with its slash; only one should there be."""
    _zip.set_kinds(names, columns, columns.shape[1])
    text = RecordNames(names, columns, 0)
    rows = np.flatnonzero(columns[_zip.KIND] == _zip.IS_PICKLE)
    prefixes = sorted(
        dict.fromkeys(text[row].removesuffix(PICKLE) for row in rows),
        key=lambda prefix: prefix.count("/"),
    )
    # a storage may have any key, and TorchScript code any module name
    inside = (
        tuple(prefixes[0] + folder for folder in (*STORAGE_FOLDERS, "code/")) if prefixes else ()
    )
    return prefixes[:1] + [other for other in prefixes[1:] if not other.startswith(inside)]


def two_checkpoints(prefixes):
    return (
        f"two checkpoints, {prefixes[0] + PICKLE!r} and {prefixes[1] + PICKLE!r}; "
        f"unpack it and pack each folder into an archive of its own"
    )


def _check_no_byteorder(source, names, columns, prefix):
    """See that no byte order is missed because its name is damaged in the directory, where nothing has a checksum.

    Numbers would come out with their bytes in the wrong order, each record of them verified.
    """
    expected = prefix + BYTEORDER_RECORD.encode()
    for row in np.flatnonzero(columns[_zip.NAME_NBYTES] == len(expected)):
        at, name_at = int(columns[_zip.HEADER, row]), int(columns[_zip.NAME, row])
        name = bytes(names[name_at : name_at + len(expected)])
        if name.startswith(tuple(prefix + folder.encode() for folder in STORAGE_FOLDERS)):
            continue  # the names of storages are compared when they are read
        # An entry has room for its name: what reaches into the next one was refused.
        if source.read(at + LOCAL_NBYTES, len(expected)) == expected:
            shown = name.decode("utf-8", "backslashreplace")
            raise FormatError(
                f"{source.name}: record {BYTEORDER_RECORD!r} at byte {at}: the directory calls it {shown!r}; "
                f"the file is damaged",
                path=source.name,
                record=BYTEORDER_RECORD,
                offset=at,
            )


def _select(names, columns, prefix):
    """The columns of the files under ``prefix``."""
    count = columns.shape[1]
    rows = np.empty(count, dtype=np.int64)
    found = _zip.rows_under(names, columns, count, prefix, rows)
    return columns if found == count else np.ascontiguousarray(columns[:, rows[:found]])
