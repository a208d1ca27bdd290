"""verify: read a whole checkpoint, compare all that can be compared, and say everything that is wrong with it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from ._unpickler import PIDS_ZIP, unpickle
from .containers import sniff
from .containers.legacy import LegacyContainer
from .containers.tar import TarContainer
from .containers.zip import (
    BYTEORDER_RECORD,
    NEWEST_VERSION,
    OLDEST_VERSION,
    PICKLE,
    TORCHSCRIPT_RECORD,
    VERSION_RECORDS,
    folded,
    parse_version,
)
from .dtypes import DTYPES
from .errors import CheckpointError, FormatError, LimitError, UnsupportedError
from .findings import Finding
from .loading import check_types
from .materialize import checksums, mismatch
from .plan import roots_of
from .progress import reporting
from .records import NO_CRC, Records
from .shard_index import check_region, is_index, weights_of
from .source import open_source
from .storage_use import shared_storages, unreached_nbytes
from .survey import NoDirectory, ZipSurvey
from .terminal import printable
from .verify_report import (
    DAMAGED,
    EXTRA,
    MISSING,
    NO_CHECKSUM,
    NOT_CHECKED,
    OK,
    UNKNOWN,
    RecordCheck,
    VerifyReport,
)
from .weights_only import (
    ALIGNMENT_RECORD,
    REFUSED_STREAM,
    may_be_read,
    pickle_reasons,
    refused_names,
    shortened,
    stream_reasons,
    zip_reasons,
)
from .workers import check_threads

if TYPE_CHECKING:
    from ._annotations import CheckpointFile, Progress
    from .limits import Limits
    from .sharded_reports import ShardedReport


def verify(
    f: CheckpointFile,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
    limits: Limits | None = None,
    offset: int = 0,
    nbytes: int | None = None,
) -> VerifyReport | ShardedReport:
    """Read a whole checkpoint, compare all that can be compared, and report everything that is wrong with it.

    The arguments are those of ``load``. Nothing is loaded and torch is not needed; one bad thing hides no other. A folder of
    shards, or their index, gives a ShardedReport: shard by shard.
    What is no checkpoint, or was cut off before its directory, gives a report that says so (``ok`` is False). Raises OSError,
    and TypeError and ValueError for arguments that cannot be honoured.
    """
    check_types(progress, limits)
    check_threads(threads)
    f = weights_of(f)
    if is_index(f):
        from .sharded_reports import report_on_shards

        check_region(f, offset, nbytes)
        verify_one = functools.partial(verify, threads=threads, progress=progress, limits=limits)
        return report_on_shards(f, verify_one, compare=True)
    source = open_source(f, offset, nbytes)
    try:
        return verify_source(source, threads=threads, progress=progress, limits=limits)
    finally:
        source.close()


def verify_source(source, **options):
    """The report on an open source; the options are those of ``verify``."""
    with source.in_use():
        try:
            kind = sniff.kind(source)
        except FormatError as error:
            return _NoCheckpoint(source, **options).report(error)
        if kind == "zip":
            return _ZipCheck(source, **options).report()
        return _StreamCheck(
            source, LegacyContainer if kind == "legacy" else TarContainer, **options
        ).report()


class _Check:
    """One verification under way: what both kinds of containers have in common."""

    kind: str | None = None
    unpickled = None

    def __init__(self, source, *, threads=None, progress=None, limits=None):
        self.source, self.threads, self.progress, self.limits = source, threads, progress, limits
        self.damage, self.notes, self.reasons = [], [], []
        self.records = Records([], [], [])
        self.bad = {}  # rows that are refused before they are read: what is said of them means nothing
        self.missing, self.states = [], {}
        self.actual = {}  # the CRC-32 of each row
        self.untold = None  # why it cannot be told what torch makes of the file
        self.unreached = 0

    def add(self, findings, kind, problem, record=None, offset=None):
        findings.append(Finding(kind, f"{self.source.name}: {problem}", record, offset))

    def add_error(self, kind, error):
        """An error that reading would have raised is a finding here."""
        self.damage.append(
            Finding(
                kind, str(error), getattr(error, "record", None), getattr(error, "offset", None)
            )
        )

    def unread(self, kind, error):
        """The report on what cannot be read at all."""
        self.add_error(kind, error)
        if may_be_read(self.source):
            self.untold = str(error)
        else:
            self.reasons.append(str(error))
        return self.finish(())

    def read_records(self, rows):
        """Read records whole; the state of each by its CRC-32."""
        rows = np.array(rows, dtype=np.int64)
        with reporting(self.progress, self.source.name) as tell:
            crc, failures = checksums(
                self.source, self.records, rows, threads=self.threads, progress=tell
            )
        expected = self.records.crc32[rows]
        for i, (row, found, said) in enumerate(
            zip(rows.tolist(), crc.tolist(), expected.tolist(), strict=True)
        ):
            if i in failures:
                self.states[row] = DAMAGED
                self._add_failure(row, failures[i])
                continue
            self.actual[row] = found
            self.states[row] = self.no_crc if said == NO_CRC else OK
            if said not in (NO_CRC, found):
                self.states[row] = DAMAGED
                self.add_error(
                    "crc_mismatch", mismatch(self.source, self.records, row, found, said)
                )

    def _add_failure(self, row, error):
        name, offset = self.records.names[row], int(self.records.offset[row])
        self.damage.append(Finding("unreadable", str(error), name, offset))
        # torch goes on with what memory held where a record does not inflate.
        self.untold = self.untold or str(error)

    def look_at_storages(self, storages):
        """Compare the storages that the pickle names with the rows of ``storages``, and see what of them is used."""
        wanted = [spec for spec in roots_of(self.unpickled.storages) if spec.location != "meta"]
        for spec in wanted:
            row = storages.get(spec.key)
            if row is not None:
                if row not in self.bad:
                    self._compare_size(spec, row)
            elif spec.nbytes:
                self.missing.append(
                    RecordCheck(self.record_name(spec.key), MISSING, None, spec.nbytes)
                )
                self.add(
                    self.damage,
                    "missing_record",
                    f"storage {spec.key!r} is named by the pickle and is not in the file, which is incomplete",
                    self.record_name(spec.key),
                )
        self._look_at_use()

    def _compare_size(self, spec, row):
        name, there = self.records.names[row], int(self.records.nbytes[row])
        if there == spec.nbytes:
            return
        kind = "short_storage" if there < spec.nbytes else "long_storage"
        # torch counts whole items of a storage of odd size, and writes all bytes
        tolerable = 0 <= there - spec.nbytes < DTYPES[spec.dtype].itemsize
        self.add(
            self.notes if tolerable else self.damage,
            kind,
            f"record {name!r} has {there} bytes, the pickle says {spec.nbytes}",
            name,
        )
        if not tolerable:
            self.states[row] = DAMAGED

    def _look_at_use(self):
        for spec, count in zip(*unreached_nbytes(self.unpickled), strict=True):
            self.unreached += count
            name = self.record_name(spec.key)
            self.add(
                self.notes,
                "unreached_bytes",
                f"record {name!r}: {count} of its {spec.nbytes} bytes are reached by no tensor (from first to last element)",
                name,
            )
        for spec, names in shared_storages(self.unpickled):
            name = self.record_name(spec.key)
            shown = shortened([repr(each) for each in names])
            self.add(self.notes, "shared_storage", f"record {name!r} is shared by {shown}", name)
        if names := refused_names(self.unpickled.names):
            self.add(
                self.notes,
                "refused_name",
                f"the pickle names {shortened([printable(name) for name in names], 10)}, which weights_only=True refuses; scan says what they would do",
            )

    def checks(self, rows):
        """Every record's RecordCheck."""
        records = self.records
        columns = (records.offset, records.nbytes, records.crc32)
        for row in rows:
            offset, nbytes, crc32 = (int(column[row]) for column in columns)
            yield RecordCheck(
                records.names[row],
                self.states[row],
                None if offset < 0 else offset,
                nbytes,
                self.actual.get(row),
                None if crc32 == NO_CRC else crc32,
            )

    def finish(self, rows):
        return VerifyReport(
            self.source.name,
            self.kind,
            self.source.nbytes,
            (*self.checks(rows), *self.missing),
            tuple(self.damage),
            tuple(self.notes),
            tuple(dict.fromkeys(self.reasons)),
            self.unreached,
            self.untold,
        )


class _NoCheckpoint(_Check):
    """Something else: all that is to be said of it is what it is."""

    kind = UNKNOWN

    def report(self, error):
        return self.unread("no_checkpoint", error)


class _ZipCheck(_Check):
    kind, no_crc = "zip", NOT_CHECKED

    def report(self):
        try:
            survey = self.survey = ZipSurvey(self.source)
        except NoDirectory as error:
            return self.unread("no_directory", error)
        except FormatError as error:  # an archive of something else
            return _NoCheckpoint(self.source).report(error)
        self.records, self.damage, self.notes = survey.records, survey.damage, survey.notes
        self.bad, self.states = survey.bad, dict.fromkeys(survey.bad, DAMAGED)
        self.read_records([row for row in survey.rows if row not in survey.bad])
        self._read_pickle()
        self._look_at_small_records()
        if self.unpickled is not None:
            self.look_at_storages(survey.storages)
            self._look_for_extra()
            self._note_unchecked()
        self._look_for_other_case()
        self.reasons += zip_reasons(survey, self.unpickled)
        return self.finish(survey.rows)

    def record_name(self, key):
        return self.survey.folder + key

    def _read_pickle(self):
        row = self.survey.index.get(PICKLE)
        data = None if row is None else self.survey.read(row)
        if row is None:
            self.missing.append(RecordCheck(PICKLE, MISSING))
            problem = f"record {PICKLE!r} is missing, which says what the others mean"
            self.add(self.damage, "missing_record", problem, PICKLE)
        if data is None:
            self.untold = f"record {PICKLE!r} is not to be had"
            return
        where = f"{self.source.name}: record {PICKLE!r}"
        gradients = TORCHSCRIPT_RECORD not in self.survey.index
        try:
            self.unpickled = unpickle(
                data, pids=PIDS_ZIP, where=where, gradients=gradients, limits=self.limits
            )
        except CheckpointError as error:
            self.add_error("bad_pickle", error)
            self._foretell(data, where, error)
        else:
            self.reasons += pickle_reasons(self.unpickled, data)

    def _foretell(self, data, where, error):
        """What torch makes of a pickle that is refused here: one that does not run, or names too much, it refuses, too."""
        try:
            symbolic = unpickle(
                data,
                pids=PIDS_ZIP,
                where=where,
                symbolic=True,
                observe=lambda *event: None,  # so that persistent ids may be anything
                limits=self.limits,
            )
        except (LimitError, UnsupportedError):
            self.untold = str(error)
        except CheckpointError:
            self.reasons.append(str(error))
        else:
            self.reasons += pickle_reasons(symbolic, data)
            self.untold = str(error)

    def _look_at_small_records(self):
        survey = self.survey
        name = next((name for name in VERSION_RECORDS if name in survey.index), None)
        text = None if name is None else survey.read(survey.index[name])
        if text is not None:
            version = parse_version(bytes(text))
            if version is None or not OLDEST_VERSION <= version <= NEWEST_VERSION:
                found = f"record {name!r}: {bytes(text[:20])!r} is no format version that is known; {OLDEST_VERSION} to {NEWEST_VERSION} are"
                self.add(self.damage, "unsupported_version", found, name)
        elif name is None:
            self.add(self.notes, "no_version", "there is no version record, and torch wants one")
        row = survey.index.get(BYTEORDER_RECORD)
        text = None if row is None else survey.read(row)
        if text is not None and bytes(text) not in (b"little", b"big"):
            found = f"record {BYTEORDER_RECORD!r}: {bytes(text[:20])!r} is no byte order; b'little' and b'big' are"
            self.add(self.damage, "unknown_byteorder", found, BYTEORDER_RECORD)

    def _look_for_extra(self):
        named = {spec.key for spec in self.unpickled.storages}
        for key, row in self.survey.storages.items():
            if key not in named:
                if self.states[row] != DAMAGED:
                    self.states[row] = EXTRA
                name = self.record_name(key)
                problem = (
                    f"record {name!r} lies among the storages, and the pickle does not name it"
                )
                self.add(self.notes, "extra_record", problem, name)

    def _look_for_other_case(self):
        """Find what torch, to which a name in capitals is the same name, may take for a record that is used."""
        survey = self.survey
        used = {PICKLE, BYTEORDER_RECORD, TORCHSCRIPT_RECORD, ALIGNMENT_RECORD, *VERSION_RECORDS}
        if self.unpickled is not None:
            used.update(self.record_name(spec.key) for spec in self.unpickled.storages)
        meant = {folded(survey.root + name): name for name in sorted(used)}
        for row in survey.rows:
            whole = survey.all_names[row]
            name = meant.get(folded(whole))
            if name is not None and whole != survey.root + name:
                said = f"record {survey.names[row]!r} is to torch, which compares names without case, a record {name!r}"
                problem = f"{said}, which it is not; the file is damaged or made to deceive"
                self.add(self.damage, "name_in_other_case", problem, survey.names[row])
                self.reasons.append(f"{said}, and it may read the wrong one")

    def _note_unchecked(self):
        count = sum(state == NOT_CHECKED for state in self.states.values())
        if count:
            self.add(
                self.notes,
                "no_crc",
                f"the writer stored no CRC-32 for {count} records; they were read, and nothing could be compared",
            )


class _StreamCheck(_Check):
    """A legacy stream or a tar: their structure is compared, since that is all there is."""

    no_crc = NO_CHECKSUM

    def __init__(self, source, container, **options):
        super().__init__(source, **options)
        self.container, self.kind = container, container.kind

    def report(self):
        problems, rows = [], []
        self.add(
            self.notes,
            "no_checksums",
            "the format has no checksums; sizes and counts were compared, and nothing else can be",
        )
        try:
            contents = self.container(self.source, problems, limits=self.limits)
        except CheckpointError as error:
            self.add_error("bad_stream", error)
            if self.kind == "tar" or REFUSED_STREAM.search(str(error)):
                self.reasons.append(str(error))
            else:
                self.untold = str(error)
        else:
            rows = self._look_into(contents, problems)
        return self.finish(rows)

    def record_name(self, key):
        return key

    def _look_into(self, contents, problems):
        self.records, self.unpickled = contents.records, contents.unpickled
        self.read_records(range(len(self.records)))
        told = set()
        for error in problems:
            self.add_error("bad_storage", error)
            told.add(error.record)
            if error.record in contents.rows:
                self.states[contents.rows[error.record]] = DAMAGED
        if self.unpickled is None:
            self.reasons += map(str, problems)
        else:
            self.look_at_storages(contents.rows)
            # What was told already need not be told as missing, too.
            self.damage = [
                each
                for each in self.damage
                if each.kind != "missing_record" or each.record not in told
            ]
            self.reasons += pickle_reasons(self.unpickled, contents.pickle_bytes())
            self.reasons += stream_reasons(contents)
        self._look_for_leftovers(contents)
        return range(len(self.records))

    def _look_for_leftovers(self, contents):
        if contents.kind == "legacy":
            left = {"trailing_bytes": self.source.nbytes - contents.end}
            if contents.problems:
                left = {}
        else:
            left = contents.left
        for what, count in left.items():
            if count and what == "trailing_bytes":
                problem = f"{count} bytes follow the last storage at byte {contents.end}"
                self.add(self.notes, what, problem, offset=contents.end)
            elif count:
                problem = f"member {what!r} has {count} bytes behind what it should hold"
                self.add(self.notes, "unclaimed_bytes", problem, what)
