"""ZIP checkpoints, as torch.save has written them since 1.6: the directory as Records, local headers when asked.

What is relied on must agree with itself: names that occur twice, entries that overlap, local names that differ
and second archives are errors. Entries outside the checkpoint's folder are ignored.
"""

import os
import zlib

import numpy as np

from .. import _zip, _zip_local, strict_json
from .._crc32 import crc32
from ..errors import ChecksumError, FormatError, UnsupportedError
from ..records import DEFLATED, NO_CRC, Records
from ._zip_contents import no_pickle
from ._zip_directory import (
    LOCAL_NBYTES,
    check_alone,
    read_directory,
    unify_separators,
    unusable,
)
from ._zip_end import find_end, two_directories
from ._zip_names import (
    BYTEORDER_RECORD,
    METADATA_MOST_NBYTES,
    METADATA_RECORD,
    PICKLE,
    STORAGE_FOLDERS,
    TORCHSCRIPT_RECORD,
    VERSION_RECORDS,
    RecordIndex,
    RecordNames,
    find_prefixes,
    two_checkpoints,
)

OLDEST_VERSION, NEWEST_VERSION = 1, 10


def open_zip(source, *, verify=True):
    """Read the directory of a ZIP checkpoint and its small records; returns a ZipContainer.

    Raises FormatError, UnsupportedError, or ChecksumError (not with ``verify=False``).
    """
    end, others, tail = find_end(source)
    if end.rival is not None:
        raise two_directories(end, tail)
    directory = tail.bytes(end.directory, end.nbytes)
    columns = read_directory(source, end, directory)
    check_alone(source, end, others, columns)
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
        status, row = _zip_local.locate(
            self._directory,
            self._columns,
            len(self.records),
            np.asarray(rows, dtype=np.int64),
            self.records.offset,
            self.source,
        )
        if status == _zip_local.LOCAL_UNUSABLE:
            raise self._unusable(row)
        if status != _zip_local.LOCAL_OK:
            raise self._local_error(status, row)

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
