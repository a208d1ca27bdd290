"""verify and scan of a checkpoint in several files: a report on each, and what is wrong between them and their index."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import CheckpointError, FormatError
from .findings import Finding
from .ratings import DANGEROUS, KNOWN, UNKNOWN
from .scanning import ScanReport
from .shard_index import ShardIndex
from .sharded import ShardedCheckpoint, check_saves, in_words
from .source import open_source
from .terminal import in_lines
from .verify_report import VerifyReport


@dataclass(frozen=True, slots=True)
class ShardedReport:
    """What ``verify`` or ``scan`` found in a folder of shards, or by way of their index.

    name: of the index.
    shards: the VerifyReport or ScanReport of each file that is there, by its name.
    index_findings, index_notes: what is wrong with the index, or between it and its shards; what is worth knowing.
    """

    name: str
    shards: Mapping[str, VerifyReport | ScanReport]
    index_findings: tuple[Finding, ...]
    index_notes: tuple[Finding, ...]

    def __bool__(self) -> bool:
        return self.ok

    @property
    def ok(self) -> bool:
        """Whether nothing was found, in any of the files."""
        return not self.index_findings and all(report.ok for report in self.shards.values())

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Those of the index, and of every file."""
        return (
            *self.index_findings,
            *(found for report in self.shards.values() for found in report.findings),
        )

    @property
    def notes(self) -> tuple[Finding, ...]:
        """The same of notes."""
        return (
            *self.index_notes,
            *(note for report in self.shards.values() for note in report.notes),
        )

    @property
    def rating(self) -> str:
        """Of a scan: the worst that was found, "known", "unknown" or "dangerous". A shard that was not looked at is unknown."""
        found = {report.rating for report in self.shards.values()}  # type: ignore[union-attr]  # of a scan
        if DANGEROUS in found:
            return DANGEROUS
        return KNOWN if self.ok else UNKNOWN

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for json.dumps."""
        return {
            "ok": self.ok,
            "name": self.name,
            "findings": [finding.as_dict() for finding in self.index_findings],
            "notes": [note.as_dict() for note in self.index_notes],
            "shards": {file: report.as_dict() for file, report in self.shards.items()},
        }

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "NOT OK"
        lines = [
            f"{self.name}: {verdict} (an index; files that were looked at: {len(self.shards)})"
        ]
        lines += [f"  {finding}" for finding in (*self.index_findings, *self.index_notes)]
        return "\n".join([in_lines(lines), *map(str, self.shards.values())])


def report_on_shards(path, report_on, *, compare):
    """A ShardedReport of an index; ``report_on(source)`` reports on a file, which is no other index. ``compare``: see that shards have what the index says.

    What is wrong with the index is a finding, and hides no shard that is there. Raises OSError where the index is not to be read.
    """
    problems, findings, notes, shards, save_ids = [], [], [], {}, {}
    try:
        index = ShardIndex(path, problems)
    except FormatError as error:
        return ShardedReport(error.path, {}, (Finding("bad_index", str(error)),), ())
    findings += [Finding("bad_index", str(error)) for error in problems]
    for file, names in index.shards.items():
        try:
            source = open_source(index.path_of(file))
            try:
                shards[file] = report_on(source)
            finally:
                source.close()
        except (CheckpointError, OSError) as error:
            findings.append(Finding("unreadable", f"{index.path}: shard {file!r}: {error}"))
            continue
        if compare and shards[file].ok:
            try:
                with ShardedCheckpoint(
                    path, index=index, keys=names, framework="numpy"
                ) as checkpoint:
                    notes += stray_notes(checkpoint)
                    save_ids |= checkpoint.save_ids
            except CheckpointError as error:
                findings.append(Finding("contradiction", str(error)))
    try:
        check_saves(index, save_ids)
    except FormatError as error:
        findings.append(Finding("contradiction", str(error)))
    return ShardedReport(index.path, shards, tuple(findings), tuple(notes))


def stray_notes(checkpoint):
    """What is in a shard, and is not what the index says is there."""
    strays = checkpoint.strays()
    return [Finding("strays", f"{checkpoint.name}: {in_words(strays)}")] if strays else []
