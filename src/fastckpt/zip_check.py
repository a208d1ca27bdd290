"""The verification of a ZIP checkpoint."""

from __future__ import annotations

from ._unpickler import PIDS_ZIP, unpickle
from .checking import Check, NoCheckpoint
from .containers._zip_names import (
    BYTEORDER_RECORD,
    PICKLE,
    TORCHSCRIPT_RECORD,
    VERSION_RECORDS,
    folded,
)
from .containers.zip import NEWEST_VERSION, OLDEST_VERSION, parse_version
from .errors import CheckpointError, FormatError, LimitError, UnsupportedError
from .survey import NoDirectory, ZipSurvey
from .verify_report import (
    DAMAGED,
    EXTRA,
    MISSING,
    NOT_CHECKED,
    RecordCheck,
)
from .weights_only import (
    ALIGNMENT_RECORD,
    pickle_reasons,
    zip_reasons,
)


class ZipCheck(Check):
    kind, no_crc = "zip", NOT_CHECKED

    def report(self):
        try:
            survey = self.survey = ZipSurvey(self.source)
        except NoDirectory as error:
            return self.unread("no_directory", error)
        except FormatError as error:  # an archive of something else
            return NoCheckpoint(self.source).report(error)
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
