"""A ZIP archive read past everything that is wrong with it: which records there are, where, and what was found.

Unlike the reader of checkpoints it refuses nothing that has an end record: each fault becomes a Finding, and the rest is read.
"""

import itertools

import numpy as np

from . import _zip, local_headers
from ._zip_local import UNREADABLE
from .containers._zip_contents import no_pickle
from .containers._zip_directory import (
    DIRECTORY_PROBLEMS,
    LOCAL_NBYTES,
    second_archives,
    unify_separators,
    unusable,
    unusable_rows,
)
from .containers._zip_end import (
    CENTRAL_NBYTES,
    END_NBYTES,
    comment_nbytes,
    end_record_64,
    find_end,
    two_directories,
)
from .containers._zip_names import STORAGE_FOLDERS, RecordNames, find_prefixes, two_checkpoints
from .containers.zip import inflate
from .errors import FormatError
from .findings import Finding
from .local_headers import ABSENT, GOOD, STREAMED, LocalHeaders
from .records import DEFLATED, Records

# Of an entry: where its external attributes stand, and their bit, of MS-DOS, that marks a folder.
ATTRIBUTES, FOLDER_BIT = 38, 0x10
# Two archives in one file are worth a sentence, a thousand are not worth a thousand.
MOST_ARCHIVES = 8


class NoDirectory(FormatError):
    """A ZIP that was cut off before its directory, or whose end says nothing of use."""


class ZipSurvey:
    """What a ZIP holds. ``damage`` and ``notes`` are lists of Findings; ``bad`` maps the rows that can't be read to one.

    ``records`` has a row for each entry that is a file, with its name from the checkpoint's folder (``root``) on, or whole where
    it lies elsewhere; ``index`` maps names to rows, ``storages`` storage keys. Raises NoDirectory where there is no end record,
    FormatError where nothing looks like a checkpoint.
    """

    def __init__(self, source):
        self.source, self.damage, self.notes, self.bad = source, [], [], {}
        try:
            self.end, others, tail = find_end(source)
        except FormatError as error:
            raise NoDirectory(
                f"{error}; salvage gets out what is there without it, if the pickle of the object is",
                path=error.path,
                offset=error.offset,
            ) from None
        self._read_directory(tail)
        self._look_for_second_archives(others, tail)
        self._find_root()
        self._index()
        self._read_local_headers()
        self._find_unclaimed()
        self._look_behind_the_end(tail)

    def _find(self, kind, problem, row=None, offset=None, *, damage=True):
        """Note a finding, about a row where one is given."""
        name = None if row is None else self.names[row]
        if offset is None and row is not None and self.columns[_zip.HEADER, row] >= 0:
            offset = int(self.columns[_zip.HEADER, row])
        where = "" if name is None else f"record {name!r}: "
        where = where if name is None or offset is None else f"record {name!r} at byte {offset}: "
        finding = Finding(kind, f"{self.source.name}: {where}{problem}", name, offset)
        (self.damage if damage else self.notes).append(finding)
        return finding

    # -- the directory

    def _read_directory(self, tail):
        end = self.end
        directory = tail.bytes(end.directory, end.nbytes)
        room = max(end.entries, end.nbytes // CENTRAL_NBYTES + 1)
        columns = np.empty((_zip.COLUMNS, room), dtype=np.int64)
        status, places = np.empty(room, dtype=np.int64), np.empty(room, dtype=np.int64)
        count = _zip.survey_directory(
            directory, columns, room, end.directory, end.bias, status, places
        )
        self.directory, self.entry_status, self.places = directory, status[:count], places[:count]
        self.columns = np.ascontiguousarray(columns[:, :count])
        self.text = unify_separators(directory, self.columns)
        self.all_names = self.names = list(RecordNames(self.text, self.columns, 0))
        if count != end.entries:
            self._find(
                "entry_count",
                f"the end record counts {end.entries} entries, the directory has {count}",
                offset=end.at,
            )
        for row in np.flatnonzero(self.entry_status):
            at = end.directory + int(places[row])
            self.bad[int(row)] = self._find(
                "directory_entry",
                f"ZIP directory entry {row} of {count} at byte {at}: {DIRECTORY_PROBLEMS[int(self.entry_status[row])]}; "
                f"the file is damaged",
                int(row) if self.names[row] else None,
                at,
            )
        self.good = np.flatnonzero(self.entry_status == _zip.OK)
        entries = np.frombuffer(directory, dtype=np.uint8)
        marked = entries[places[self.good] + ATTRIBUTES] & FOLDER_BIT != 0
        marked &= self.columns[_zip.STORED, self.good] > 0
        self.marked = set(self.good[marked].tolist())  # rows with data that are said to be folders
        self._set_limits()

    def _set_limits(self):
        """Say what each entry must not reach into, and which do by what the directory says alone."""
        columns = np.ascontiguousarray(self.columns[:, self.good])
        order = np.argsort(columns[_zip.HEADER], kind="stable")
        _zip.set_limits(columns, order, len(self.good), self.end.directory)
        self.columns[:, self.good] = columns
        room = columns[_zip.LIMIT] - columns[_zip.HEADER] - LOCAL_NBYTES - columns[_zip.NAME_NBYTES]
        for row in self.good[room < columns[_zip.STORED]].tolist():
            self._refuse_overlap(row)

    def _refuse_overlap(self, row):
        self.bad[row] = self._find(
            "overlap",
            f"its {self.columns[_zip.STORED, row]} bytes reach over byte {self.columns[_zip.LIMIT, row]}, where something else "
            f"begins; the file is damaged or made to deceive",
            row,
        )

    def _look_for_second_archives(self, others, tail):
        if self.end.rival is not None:
            self.damage.append(
                Finding("second_archive", str(two_directories(self.end, tail)), None, self.end.at)
            )
        columns = self.columns[:, self.good]
        found = second_archives(self.source, self.end, others, columns)
        for offset, problem in itertools.islice(found, MOST_ARCHIVES):
            # What begins at byte 0 may well be the record of an entry that is bad.
            if offset >= self.end.directory or not self.entry_status.any():
                self._find("second_archive", problem, offset=offset)

    # -- names

    def _find_root(self):
        prefixes = find_prefixes(self.text, self.columns)
        if not prefixes and not self.bad:
            raise no_pickle(self.source, self.names)
        if len(prefixes) > 1:
            self._find("two_checkpoints", f"a ZIP archive with {two_checkpoints(prefixes)}")
        # Where the entry of data.pkl is gone: the folder that torch would take.
        first = next((name for name in self.names if name), "")
        self.root = prefixes[0] if prefixes else first.partition("/")[0] + "/"

    def _index(self):
        folders = self.columns[_zip.KIND] == _zip.IS_FOLDER
        self.names = [name.removeprefix(self.root) for name in self.all_names]
        self.index, twins = {}, set()
        # An entry without even a name is a finding already.
        self.rows = [row for row, name in enumerate(self.all_names) if name and not folders[row]]
        for row in self.rows:
            inside = self.all_names[row].startswith(self.root)
            if inside and self.index.setdefault(self.names[row], row) != row:
                twins.add(row)
        for self.folder in STORAGE_FOLDERS:
            self.storages = {
                name.removeprefix(self.folder): row
                for name, row in self.index.items()
                if name.startswith(self.folder)
            }
            if self.storages:
                break
        else:
            self.folder = STORAGE_FOLDERS[0]
        for row in sorted(twins):
            self._find(
                "duplicate",
                "there are two records of this name and readers differ in which one they take; "
                "the file is damaged or made to deceive",
                row,
            )
        for row in sorted(self.marked.intersection(self.rows)):
            self._find(
                "marked_as_folder",
                f"its attributes mark it as a folder, yet it has {self.columns[_zip.STORED, row]} bytes, none of which torch "
                "reads: a storage is whatever its memory was; the file is damaged",
                row,
            )
        columns = self.columns
        self.records = Records(
            self.names,
            np.full(len(self.names), -1),
            columns[_zip.NBYTES],
            columns[_zip.STORED],
            columns[_zip.CRC],
            columns[_zip.METHOD],
        )
        self.flags = columns[_zip.FLAGS]

    # -- local headers

    def _read_local_headers(self):
        columns = np.ascontiguousarray(self.columns[:, self.good])
        local = self.local = LocalHeaders(self.source, self.directory, columns)
        names = ("FLAGS", "METHOD", "STORED", "NBYTES", "LIMIT")
        flags, method, stored, nbytes, limit = (columns[getattr(_zip, name)] for name in names)
        for i in np.flatnonzero(unusable_rows(columns)):
            _, problem = unusable(*(int(c[i]) for c in (flags, method, stored, nbytes)))
            self._refuse(i, "unusable_entry", problem)
        for i in np.flatnonzero(~local.present):
            self._refuse(
                i,
                "local_header",
                "a local header (50 4b 03 04) should be there, and is not; the file is damaged",
            )
        for i in np.flatnonzero(local.present & ~local.same_name):
            self._find(
                "name_mismatch",
                "its local header has another name than the directory; the file is damaged or made to deceive",
                self.good[i],
            )
        for i in local.differing(columns):
            said = ", ".join(local.differences(columns, i))
            self._find("local_mismatch", f"its local header says {said}", self.good[i])
        for i in np.flatnonzero(local.present & (local.flags != flags)):
            hidden = bool(local.flags[i] & UNREADABLE)
            self._find(
                "flags_mismatch",
                f"its local header has the flags {local.flags[i]:#06x}, the directory {flags[i]:#06x}"
                + (
                    ", which do not mark it as encrypted or masked; the file is damaged"
                    if hidden
                    else ""
                ),
                self.good[i],
                damage=hidden,
            )
        for i in np.flatnonzero(local.present & (stored > limit - local.data)):
            if int(self.good[i]) not in self.bad:
                self._refuse_overlap(int(self.good[i]))
        self.records.offset[self.good[local.present]] = local.data[local.present]
        self._read_descriptors(columns)

    def _refuse(self, i, kind, problem):
        row = int(self.good[i])
        finding = self._find(kind, f"{problem}", row)
        self.bad.setdefault(row, finding)

    def _read_descriptors(self, columns):
        local = self.local
        self.tails = np.zeros(len(self.good), dtype=np.int64)  # bytes of descriptors
        fit = np.array([int(row) not in self.bad for row in self.good], dtype=bool)
        rows = np.flatnonzero(fit & ((local.flags & STREAMED) != 0))
        at = local.data[rows] + columns[_zip.STORED][rows]
        status, self.tails[rows] = local_headers.read_descriptors(
            self.source,
            at,
            columns[_zip.LIMIT][rows] - at,
            np.maximum(0, columns[_zip.CRC][rows]),
            columns[_zip.STORED][rows],
            columns[_zip.NBYTES][rows],
        )
        for i in np.flatnonzero(status != GOOD):
            absent = status[i] == ABSENT
            self._find(
                "no_descriptor" if absent else "descriptor_mismatch",
                f"a data descriptor should follow its data at byte {at[i]}, there is none"
                if absent
                else f"at byte {at[i]} there is no data descriptor with the sizes and the CRC-32 of the directory",
                self.good[rows[i]],
                damage=not absent,
            )

    # -- what belongs to nothing

    def _find_unclaimed(self):
        """Find the bytes before the end of the directory that neither a record nor a header takes."""
        columns = self.columns[:, self.good]
        header, limit = columns[_zip.HEADER], columns[_zip.LIMIT]
        stop = np.clip(self.local.data + columns[_zip.STORED] + self.tails, header, limit)
        # Whatever a bad record really is, it is the one that lies there.
        bad = np.array([int(row) in self.bad for row in self.good], dtype=bool)
        stop = np.where(bad, limit, stop)
        directory = self.end.directory
        for begin, end in local_headers.gaps(
            np.append(header, directory), np.append(stop, directory)
        ):
            self._unclaimed(begin, end)

    def _unclaimed(self, begin, end):
        self._find(
            "unclaimed_bytes",
            f"{end - begin} bytes at byte {begin} belong to no record",
            offset=begin,
            damage=False,
        )

    def _look_behind_the_end(self, tail):
        end, source = self.end, self.source
        begin = end.directory + end.nbytes
        first_record, claimed = end_record_64(end, tail) or (end.at, end.at)
        if first_record != claimed:
            self._find(
                "locator_mismatch",
                f"the zip64 end record lies at byte {first_record}, its locator says {claimed}",
                offset=first_record,
            )
        if begin < first_record:
            self._unclaimed(begin, first_record)
        said, there = comment_nbytes(end, tail), source.nbytes - end.at - END_NBYTES
        if said > there:
            self._find(
                "comment_length",
                f"the end record says that {said} bytes of comment follow, {there} are there; the file is damaged or cut off",
                offset=end.at,
            )
        elif said < there:
            self._find(
                "trailing_bytes",
                f"{there - said} bytes follow the end of the archive at byte {end.end}",
                offset=end.end,
                damage=False,
            )

    # -- content

    def read(self, row):
        """The content of a record, None where it is not to be had; its CRC-32 is not looked at."""
        if row in self.bad:
            return None
        records = self.records
        data = self.source.read(int(records.offset[row]), int(records.stored_nbytes[row]))
        if records.method[row] == DEFLATED:
            return inflate(data, int(records.nbytes[row]))
        return data
