"""SalvageReport: what salvage kept of a damaged checkpoint, and what is lost."""

from dataclasses import dataclass
from typing import Any

from .findings import Finding
from .ratings import DANGEROUS
from .terminal import in_lines

SHOWN = 20  # names in the text of a report
# Kinds of findings: two places of the file disagree about a record that is kept; there is a checkpoint of which nothing is kept.
CONTRADICTION, SECOND_ARCHIVE = "contradiction", "second_archive"


@dataclass(frozen=True, slots=True)
class SalvageReport:
    """What was kept and what is lost.

    name, out: of the damaged file and of the new one.
    container: "zip", "legacy" or "tar".
    kept: names of the tensors and bare storages in the new file, as ``open`` has them (the path of keys, joined by dots).
    lost: name -> why, of those that are not in it.
    findings: what is wrong with the damaged file, or could not be told of it; and what in the new one is dangerous to unpickle
        (kinds that begin with "dangerous", as ``scan`` has them).
    """

    name: str
    out: str
    container: str
    kept: tuple[str, ...]
    lost: dict[str, str]
    findings: tuple[Finding, ...]

    def __bool__(self) -> bool:
        return self.ok

    @property
    def ok(self) -> bool:
        """Whether nothing is lost, left behind or dangerous, and nothing that is kept is contradicted: all is of one save."""
        return not self.lost and not any(
            each.kind in (CONTRADICTION, SECOND_ARCHIVE) or each.kind.startswith(DANGEROUS)
            for each in self.findings
        )

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values, for json.dumps."""
        return {
            "ok": self.ok,
            "name": self.name,
            "out": self.out,
            "container": self.container,
            "kept": list(self.kept),
            "lost": dict(self.lost),
            "findings": [finding.as_dict() for finding in self.findings],
        }

    def __str__(self) -> str:
        lines = [
            f"{self.name} ({self.container}): {len(self.kept)} tensors kept, {len(self.lost)} lost; written to {self.out}"
        ]
        lines += [f"  lost {name}: {why}" for name, why in list(self.lost.items())[:SHOWN]]
        if len(self.lost) > SHOWN:
            lines.append(f"  and {len(self.lost) - SHOWN} more")
        told = set(self.lost.values())
        lines += [f"  {finding}" for finding in self.findings if finding.message not in told]
        return in_lines(lines)
