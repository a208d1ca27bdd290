"""What a verification of any container looks at: records by their checksums, and storages by what uses them."""

from __future__ import annotations

import numpy as np

from .dtypes import DTYPES
from .findings import Finding
from .materialize import checksums, mismatch
from .plan import roots_of
from .progress import reporting
from .records import NO_CRC, Records
from .storage_use import shared_storages, unreached_nbytes
from .terminal import printable
from .verify_report import (
    DAMAGED,
    MISSING,
    OK,
    UNKNOWN,
    RecordCheck,
    VerifyReport,
)
from .weights_only import (
    may_be_read,
    refused_names,
    shortened,
)


class Check:
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
                f"the pickle names {shortened([printable(name) for name in names], 10)}, which weights_only=True refuses; scan says what that would do",
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


class NoCheckpoint(Check):
    """Something else: all that is to be said of it is what it is."""

    kind = UNKNOWN

    def report(self, error):
        return self.unread("no_checkpoint", error)
