"""VerifyReport: what verify found, record by record and as findings, for people and for programs."""

from __future__ import annotations

import collections
from dataclasses import asdict, dataclass
from typing import Any

from .findings import Finding
from .terminal import in_lines

OK = "ok"  # its CRC-32 is the one that the file gives
NOT_CHECKED = "not checked"  # the writer stored no CRC-32
NO_CHECKSUM = "no checksum"  # the format has none; the record is there, of the right size
DAMAGED = "damaged"
MISSING = "missing"  # the pickle names it
EXTRA = "extra"  # it lies among the storages, and the pickle does not name it; its CRC-32 is right, or not there
# The ``container`` of what is none of the three.
UNKNOWN = "unknown"
STATES = (OK, NOT_CHECKED, NO_CHECKSUM, EXTRA, DAMAGED, MISSING)

# A person reads some lines of a kind; programs get all.
MOST_LINES = 10


@dataclass(frozen=True, slots=True)
class RecordCheck:
    """How one record fared. ``offset`` is where its bytes begin in the file, ``nbytes`` its size when inflated.

    ``crc32`` is what its bytes give, ``expected_crc32`` what the file says; None where there is no such thing.
    """

    name: str
    state: str
    offset: int | None = None
    nbytes: int | None = None
    crc32: int | None = None
    expected_crc32: int | None = None


@dataclass(frozen=True)
class VerifyReport:
    """What ``verify`` found.

    ``container``: "zip", "legacy", "tar", or "unknown" for what is no checkpoint: then the one finding says what it is instead.
    ``records``: every record, in the order of the directory, then those that are missing. ``findings``: what is wrong; ``ok`` is
    that there are none. ``notes``: what is legal and worth knowing. ``torch_accepts``: whether torch.load(weights_only=True) of
    torch 2.13 would take the file, which checks no checksum, and read the records that are meant, in a process that has allowed
    nothing by add_safe_globals: a report is about the file. ``torch_reasons`` says why not.
    It is None where that cannot be told, and ``torch_untold`` says why: the object is refused here by a rule that torch may not have.
    ``unreached_nbytes``: bytes of storages that no tensor reaches, counted from each tensor's first element to its last.
    """

    name: str
    container: str
    nbytes: int
    records: tuple[RecordCheck, ...]
    findings: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    torch_reasons: tuple[str, ...]
    unreached_nbytes: int
    torch_untold: str | None = None

    def __bool__(self) -> bool:
        return self.ok

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def torch_accepts(self) -> bool | None:
        if self.torch_reasons:
            return False
        return None if self.torch_untold else True

    @property
    def counts(self) -> dict[str, int]:
        """How many records there are in each state."""
        counted = collections.Counter(record.state for record in self.records)
        return {state: counted[state] for state in STATES if counted[state]}

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for json.dumps."""
        return {
            "ok": self.ok,
            **asdict(self),
            "counts": self.counts,
            "torch_accepts": self.torch_accepts,
        }

    def __str__(self) -> str:
        counted = ", ".join(f"{count} {state}" for state, count in self.counts.items())
        verdict = "ok" if self.ok else "DAMAGED"
        lines = [
            f"{self.name}: {verdict} ({self.container}, {self.nbytes} bytes; records: {counted or 'none'})"
        ]
        if self.container == UNKNOWN:
            return in_lines(
                [f"{self.name}: NO CHECKPOINT ({self.nbytes} bytes)", *_lines(self.findings)]
            )
        lines += [f"  damage: {line}" for line in _lines(self.findings)]
        lines += [f"  note: {line}" for line in _lines(self.notes)]
        if self.torch_accepts:
            lines.append("  torch.load(weights_only=True) takes it")
        told = {finding.message for finding in self.findings}
        lines += [
            f"  torch.load(weights_only=True) refuses it{'' if reason in told else f': {reason}'}"
            for reason in self.torch_reasons
        ]
        if self.torch_accepts is None:
            lines.append(
                f"  whether torch.load(weights_only=True) takes it cannot be told: {self.torch_untold}"
            )
        return in_lines(lines)


def _lines(findings):
    """The sentences, the first of each kind and how many more there are."""
    seen = collections.Counter()
    for finding in findings:
        seen[finding.kind] += 1
        if seen[finding.kind] <= MOST_LINES:
            yield finding.message
    for kind, count in seen.items():
        if count > MOST_LINES:
            yield f"{count - MOST_LINES} more of the kind {kind}"
