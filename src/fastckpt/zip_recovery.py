"""The whole records of a damaged ZIP checkpoint, by its directory where that is right and by local headers where not.

A record is whole where its bytes have the CRC-32 that a directory entry or its own descriptor gives; one whose writer
computed none, where its header and descriptor are both there and agree.
"""

from typing import NamedTuple

import numpy as np

from ._unpickler import PIDS_ZIP, unpickle
from .containers._zip_contents import listed
from .containers._zip_names import (
    BYTEORDER_RECORD,
    PICKLE,
    STORAGE_FOLDERS,
    VERSION_RECORDS,
    is_text,
)
from .containers.zip import NEWEST_VERSION, OLDEST_VERSION, parse_version
from .containers.zip_walk import Claim, Walker
from .containers.zip_writer import SERIALIZATION_ID
from .contents import default_byteorder
from .copying import read_record
from .dtypes import DTYPES
from .errors import FormatError, UnsupportedError, without_object
from .findings import Finding
from .materialize import checksums
from .records import NO_CRC, Records
from .salvage_report import CONTRADICTION
from .second_archives import checkpoint_behind, second_archive, second_pickle
from .zip_claims import DirectoryClaims

FORMAT_VERSION, ALIGNMENT_RECORD = ".format_version", ".storage_alignment"
VERSION, DEFAULT_VERSION = VERSION_RECORDS[-1], b"3\n"
# What the writer makes anew.
OWN_RECORDS = (
    PICKLE,
    BYTEORDER_RECORD,
    VERSION,
    FORMAT_VERSION,
    ALIGNMENT_RECORD,
    SERIALIZATION_ID,
)
# Byte orders by the bytes of their names: enough to tell one whose record is damaged.
BYTEORDERS = {6: "little", 3: "big"}


class Whole(NamedTuple):
    """A record that is whole: where it lies, and the CRC-32 of its content as it was read."""

    claim: Claim
    crc32: int


class ZipRecovery:
    """What is whole of a ZIP checkpoint, however it is damaged.

    ``records`` are the whole records; ``rows`` leads from storage keys to them, ``others`` from the names of those that are
    neither storages nor made anew. ``lost`` has a Finding for each storage that the pickle names and that is lost, by its key;
    ``findings`` what else is wrong. Raises FormatError where the object's pickle is lost, since nothing has a name then.
    """

    kind = "zip"

    def __init__(self, source, *, threads=None, progress=None, limits=None):
        self.source, self.threads, self.progress, self.limits = source, threads, progress, limits
        self.whole, self.problems = {}, {}
        self.unpickled = None
        self.walker, self.directory = Walker(source), DirectoryClaims(source)
        directory = self.directory
        self.prefix, self.no_pickle = directory.prefix, directory.no_pickle
        self.findings = directory.findings
        self._check(directory.claims)
        self._check(directory.guesses)
        if PICKLE not in self.whole:
            self._walk(up_to=PICKLE)
        if PICKLE not in self.whole:
            self._walk()  # for the list of what is whole
            raise self._without_pickle()
        self._read_pickle()
        if any(name not in self.whole for name in self._wanted()):
            self._walk()
        self._sort()

    # -- claims: what directory and local headers say

    def _walk(self, up_to=None):
        """Take what local headers and descriptors say of records that are not whole by now; of all, or ``up_to`` one."""
        if self.prefix is None:
            self.prefix = self._prefix_of_headers()
        sizes = {self.prefix + name: each for name, each in self._sizes().items()}
        claims = {}
        for header, claim in self.walker.walk(self.prefix, sizes):
            name = header.name.removeprefix(self.prefix)
            if claim is not None:
                claims.setdefault(name, []).append(claim)
            elif name not in self.whole:
                self.problems.setdefault(name, self._unsealed(header, sizes.get(header.name)))
            if name == up_to:
                break
        self._check(claims)

    def _prefix_of_headers(self):
        """The folder of the first data.pkl that a local header names."""
        header = self.walker.next_header(0)
        while header is not None and not f"/{header.name}".endswith(f"/{PICKLE}"):
            # One that lies in a record of an archive that is no checkpoint is that record's.
            header = self.walker.next_header(self.directory.ends.get(header.at, header.data))
        if header is None:
            raise self._without_pickle()
        return header.name.removesuffix(PICKLE)

    def _sizes(self):
        """The sizes that the records of storages may have, by name: torch counts whole items of a storage of odd size."""
        if self.unpickled is None:
            return {}
        return {
            self.folder + spec.key: range(spec.nbytes, spec.nbytes + DTYPES[spec.dtype].itemsize)
            for spec in self.unpickled.storages
        }

    # -- which of them are true

    def _check(self, claims):
        """Read what claims claim, and keep those that are whole."""
        flat = [
            (name, claim)
            for name, several in claims.items()
            if name not in self.whole
            for claim in several
        ]
        if not flat:
            return
        records = records_of([(name, claim, claim.crc32) for name, claim in flat])
        crc, failures = checksums(
            self.source,
            records,
            np.arange(len(flat)),
            threads=self.threads,
            progress=self.progress and self.progress.next(then=self.source.nbytes),
        )
        twins = set()
        for i, ((name, claim), found) in enumerate(zip(flat, crc.tolist(), strict=True)):
            if i in failures:
                self._note("unreadable", name, claim.offset, str(failures[i]), whole_sentence=True)
            elif found != claim.crc32 and (claim.crc32 != NO_CRC or not claim.sealed):
                self._note(
                    "crc_mismatch",
                    name,
                    claim.offset,
                    "its local header or descriptor is damaged, and no CRC-32 tells whether its bytes are right"
                    if claim.crc32 == NO_CRC
                    else f"CRC-32 is {found:08x}, {claim.crc32:08x} is expected; it is damaged",
                )
            else:
                before = self.whole.setdefault(name, Whole(claim, found))
                if (before.crc32, before.claim.nbytes) != (found, claim.nbytes):
                    twins.add(name)
        for name in twins:
            del self.whole[name]
            self._note(
                "duplicate", name, None, "there are two records of this name with two contents"
            )

    def _note(self, kind, name, offset, problem, *, whole_sentence=False):
        """Say why a record is not whole."""
        if not whole_sentence:
            where = "" if offset is None else f" at byte {offset}"
            problem = f"{self.source.name}: record {name!r}{where}: {problem}"
        self.problems[name] = Finding(kind, problem, name, offset)

    def _unsealed(self, header, expected):
        """Why a record whose local header is there is not whole."""
        name, left = header.name.removeprefix(self.prefix), self.source.nbytes - header.data
        if expected and expected[0] > left:
            kind = "cut_short"
            problem = (
                f"it takes {expected[0]} bytes, {left} are left; the file is cut short, an interrupted copy or "
                f"download?"
            )
        else:
            kind, problem = (
                "no_descriptor",
                "the data descriptor that seals it is not where it should be; it is damaged or was never written to its end",
            )
        message = f"{self.source.name}: record {name!r} at byte {header.data}: {problem}"
        return Finding(kind, message, name, header.data)

    def _find(self, kind, problem):
        self.findings.append(Finding(kind, str(problem), None, getattr(problem, "offset", None)))

    # -- the object

    def _without_pickle(self):
        """The error where nothing has a name."""
        if self.no_pickle is not None and not self.whole and not self.problems:
            return self.no_pickle
        found = self.problems.get(PICKLE)
        why = found.message if found else f"{self.source.name}: record {PICKLE!r} is not there"
        whole = [name for name in self.whole if name != PICKLE]
        more = f", though {len(whole)} other records are whole: {listed(whole)}" if whole else ""
        return without_object(why, more, path=self.source.name, record=PICKLE)

    def _read_pickle(self):
        whole = self.whole[PICKLE]
        records = records_of([(PICKLE, *whole)])
        self._pickle = read_record(self.source, records, 0)
        try:
            self.unpickled = self.unpickle()
        except FormatError as error:
            self.problems[PICKLE] = Finding("bad_pickle", str(error), PICKLE, whole.claim.offset)
            raise self._without_pickle() from None
        names = {**self.problems, **self.whole}
        self.folder = next(
            (folder for folder in STORAGE_FOLDERS if any(n.startswith(folder) for n in names)),
            STORAGE_FOLDERS[0],
        )

    def unpickle(self, **options):
        """The object once more; ``options`` are those of unpickle."""
        where = f"{self.source.name}: record {PICKLE!r}"
        return unpickle(self._pickle, pids=PIDS_ZIP, where=where, limits=self.limits, **options)

    def pickle_bytes(self):
        return self._pickle

    def _wanted(self):
        names = [self.folder + spec.key for spec in self.unpickled.storages if spec.nbytes]
        return [*names, *self.problems]

    def _sort(self):
        """Say of each record what it is."""
        self.records = records_of([(name, *whole) for name, whole in self.whole.items()])
        row_of = {name: row for row, name in enumerate(self.whole)}
        self.rows, self.lost = {}, {}
        for spec in self.unpickled.storages:
            name = self.folder + spec.key
            row = row_of.pop(name, None)
            if row is not None and self._fits(spec, int(self.records.nbytes[row])):
                self.rows[spec.key] = row
            elif spec.nbytes:
                self.lost[spec.key] = self.problems.pop(name, None) or self._missing(spec, row)
        self.root = self.prefix.rstrip("/")
        if "/" in self.root or not is_text(self.root):
            self.root = None  # torch would not find it
        self._find_others(row_of)
        self.serialization_id = row_of.get(SERIALIZATION_ID)
        self.version = self._find_version(row_of)
        self.byteorder = self._find_byteorder(row_of)
        self.findings += [
            finding for name, finding in self.problems.items() if name not in self.whole
        ]
        self._note_contradictions()
        self._look_for_second_archive()
        self._note_unchecked()

    def _find_others(self, row_of):
        """The records that are copied as they are: of those with nobody to ask for them, the ones that are called so twice."""
        self.others = {}
        for name, row in row_of.items():
            if name in OWN_RECORDS:
                continue
            if is_text(name) and self.whole[name].claim.sealed:
                self.others[name] = row
            else:
                problem = f"record {name!r} has this name in one of two places; it is left out"
                self.findings.append(
                    Finding("name_mismatch", f"{self.source.name}: {problem}", name)
                )

    def _fits(self, spec, nbytes):
        return 0 <= nbytes - spec.nbytes < DTYPES[spec.dtype].itemsize

    def _missing(self, spec, row):
        name = self.folder + spec.key
        if row is None:
            problem = f"storage {spec.key!r} is named by the pickle and is not in the file, which is incomplete"
            return Finding("missing_record", f"{self.source.name}: {problem}", name)
        problem = (
            f"record {name!r} has {self.records.nbytes[row]} bytes, the pickle says {spec.nbytes}"
        )
        return Finding("wrong_size", f"{self.source.name}: {problem}", name)

    def _small(self, name, row_of, default):
        row = row_of.get(name)
        return default if row is None else bytes(read_record(self.source, self.records, row))

    def _find_version(self, row_of):
        """The version record; one that makes no sense is replaced. Raises UnsupportedError for a newer format."""
        for name in VERSION_RECORDS:
            text = self._small(name, row_of, DEFAULT_VERSION)
            version = parse_version(text)
            if version is not None and version > NEWEST_VERSION:
                raise UnsupportedError(
                    f"{self.source.name}: record {name!r}: {text[:20]!r} is a format version above {NEWEST_VERSION}, the "
                    f"newest known; a newer release may read it",
                    path=self.source.name,
                    record=name,
                )
            if version is None or version < OLDEST_VERSION:
                self._find(
                    "version",
                    f"{self.source.name}: record {name!r}: {text[:20]!r} is no format version; {DEFAULT_VERSION!r} is taken for it",
                )
                self.others.pop(name, None)
                text = DEFAULT_VERSION
        return text

    def _find_byteorder(self, row_of):
        """The byte order; of a damaged record its size tells, which has a place of its own in the file."""
        text = self._small(BYTEORDER_RECORD, row_of, b"").decode("latin-1")
        if text in BYTEORDERS.values():
            return text
        if text or BYTEORDER_RECORD in self.problems:
            header = self.walker.next_header(0, self.prefix + BYTEORDER_RECORD)
            found = self.walker.measure(header) if header else None
            order = BYTEORDERS.get(found[0].nbytes) if found else None
            self._find(
                "byteorder",
                f"{self.source.name}: record {BYTEORDER_RECORD!r} is damaged; {order or default_byteorder()} is taken for it",
            )
            return order or default_byteorder()
        return default_byteorder()

    def _note_contradictions(self):
        """Say where local header and descriptor are believed against the directory: two saves may have written the two."""
        for name, (claim, crc32) in self.whole.items():
            said = self.directory.contradiction(name, claim.nbytes, crc32)
            if said is not None:
                problem = (
                    f"its {claim.nbytes} bytes with CRC-32 {crc32:08x} are what its descriptor says, the ZIP directory says "
                    f"{said.nbytes} bytes with CRC-32 {max(0, said.crc32):08x}; it is kept, but what is kept may come from "
                    f"different saves, of which one wrote over the other"
                )
                where = f"{self.source.name}: record {name!r} at byte {claim.offset}"
                self.findings.append(
                    Finding(CONTRADICTION, f"{where}: {problem}", name, claim.offset)
                )

    def _look_for_second_archive(self):
        """Say where another checkpoint begins: behind the directory or, where that is of no use, with a pickle in no whole record."""
        if self.directory.prefix is None:
            at = second_pickle(self.source, [whole.claim for whole in self.whole.values()])
        else:
            at = checkpoint_behind(self.source, self.directory.end)
        if at is not None:
            self.findings.append(second_archive(self.source, at, self.whole[PICKLE].claim.offset))

    def _note_unchecked(self):
        count = sum(
            whole.claim.crc32 == NO_CRC and whole.claim.nbytes > 0 for whole in self.whole.values()
        )
        if count:
            problem = f"{self.source.name}: the writer stored no CRC-32 for {count} records; they were written to their end, and nothing else can be told"
            self._find("no_crc", problem)


def records_of(entries):
    """Records out of (name, claim, CRC-32)."""
    names = [name for name, _, _ in entries]
    columns = np.array(
        [(c.offset, c.nbytes, c.stored, crc32, c.method) for _, c, crc32 in entries], dtype=np.int64
    ).reshape(len(entries), 5)
    return Records(names, *columns.T)
