"""The verification of a legacy stream or a tar."""

from __future__ import annotations

from .checking import Check, NoCheckpoint
from .containers._tar_members import is_of_something_else
from .errors import CheckpointError
from .verify_report import (
    DAMAGED,
    NO_CHECKSUM,
)
from .weights_only import (
    REFUSED_STREAM,
    pickle_reasons,
    stream_reasons,
)


class StreamCheck(Check):
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
            if self.kind == "tar" and is_of_something_else(self.source):
                return NoCheckpoint(self.source).report(error)
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
