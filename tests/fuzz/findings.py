"""What was found wrong, each kind a few times: the bytes, and a text that says how it came about."""

import collections
import hashlib
import pathlib

MOST_ALIKE = 3  # findings of one kind at one place that are kept


class Findings:
    def __init__(self, folder):
        self.folder = pathlib.Path(folder).absolute()
        self.alike = collections.Counter()

    @property
    def count(self):
        return self.alike.total()

    def add(self, finding, mutant):
        """Save a finding, unless there are enough of its kind."""
        key = (finding.kind, finding.way, finding.key)
        self.alike[key] += 1
        if self.alike[key] > MOST_ALIKE:
            return
        digest = hashlib.sha256(mutant.data).hexdigest()[:12]
        folder = self.folder / f"{finding.kind}-{finding.way}-{digest}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "mutant.pt").write_bytes(mutant.data)
        text = f"{finding.kind} in {finding.way}, mutant {mutant.index} of {mutant.name}: {', '.join(mutant.steps)}\n\n{finding.text}\n"
        (folder / "report.txt").write_text(text, errors="backslashreplace")

    def report(self):
        if not self.alike:
            return "no findings"
        lines = [f"{count:5} {' | '.join(key)}" for key, count in self.alike.most_common()]
        return "\n".join([f"{self.count} findings, saved under {self.folder}", *lines])
