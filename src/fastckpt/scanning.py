"""What the pickles of a file would do if Python's own unpickler ran them, found out without running them."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .errors import LimitError
from .findings import Finding
from .importing import importing
from .limits import Limits
from .observing import Observer, shown
from .pickles import PickleWalk
from .ratings import DANGEROUS, KNOWN, UNKNOWN
from .shard_index import is_index, weights_of
from .source import open_source
from .terminal import in_lines

if TYPE_CHECKING:
    from .sharded_reports import ShardedReport

RATINGS = (KNOWN, UNKNOWN, DANGEROUS)  # from the best to the worst


@dataclass(frozen=True, slots=True)
class Name:
    """A class or function that a pickle names at byte ``offset`` of the pickle; an unpickler imports its module.

    rating: "known" to be plain data, "dangerous" with a reason in a few words, or "unknown".
    module, name: as the file spells them, long or unprintable ones shortened and escaped.
    """

    offset: int
    opcode: str
    module: str
    name: str
    rating: str
    reason: str

    @property
    def qualname(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True)
class Call:
    """What an unpickler would call at byte ``offset`` of the pickle, with arguments as a short text.

    A state, items or pairs that an object of an unknown class is given are calls of its methods, with opcode BUILD and the like.
    """

    offset: int
    opcode: str
    callee: str
    arguments: str
    rating: str


@dataclass(frozen=True, slots=True)
class PickleReport:
    """One pickle. ``record`` is the name of the piece it stands in, ``what`` its part there.

    offset: where it begins in the file, None where its record is compressed.
    nbytes: its length, None where it could not be executed up to its end.
    calls_not_listed: how many harmless calls there are beyond Limits.scan_events.
    """

    record: str | None
    what: str
    offset: int | None
    nbytes: int | None
    names: tuple[Name, ...]
    calls: tuple[Call, ...]
    calls_not_listed: int


@dataclass(frozen=True, slots=True)
class ScanReport:
    """What the pickles of a file say.

    name: of the file. kind: "zip", "legacy", "tar", or "pickle" for a file that is no checkpoint.
    pickles: every pickle that was found, in the order of the file.
    findings: what speaks against running them, the worst first, one for each name or cause.
    notes: what is worth to be known and changes nothing: bytes behind a pickle's end, pickles that are data of another.
    """

    name: str
    kind: str
    pickles: tuple[PickleReport, ...]
    findings: tuple[Finding, ...]
    notes: tuple[Finding, ...]

    def __bool__(self) -> bool:
        return self.ok

    @property
    def ok(self) -> bool:
        """Whether all was read, and everything that is named is known to be plain data (load makes not all of that)."""
        return not self.findings

    @property
    def rating(self) -> str:
        """The worst that was found: "known", "unknown" or "dangerous". What could not be read is unknown."""
        if self.ok:
            return KNOWN
        return DANGEROUS if any(f.kind.startswith(DANGEROUS) for f in self.findings) else UNKNOWN

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok, "rating": self.rating}

    def __str__(self) -> str:
        names = {name.qualname for pickle in self.pickles for name in pickle.names}
        is_named = any(f.kind.startswith(UNKNOWN) for f in self.findings)
        verdict = {
            KNOWN: "nothing but plain data" if self.pickles else "no pickle was found",
            UNKNOWN: "something that is not known" if is_named else "not all of it could be read",
            DANGEROUS: "DANGEROUS",
        }
        summary = f"{self.name}: {verdict[self.rating]}; {self.kind}, pickles: {len(self.pickles)}, different names: {len(names)}"
        return in_lines([summary, *map(str, self.findings), *map(str, self.notes)])


def scan(f, *, limits: Limits | None = None) -> ScanReport | ShardedReport:
    """Say what every pickle in ``f`` would do if it were unpickled; a ScanReport. Nothing is imported, called or looked up.

    f: path (str, bytes, PathLike), descriptor, bytes-like object, mmap, or seekable binary file object, of a checkpoint in any
        of its three containers or of anything else with a pickle in it: bare ones, all that stand one behind the other, those in
        any record of an archive and in archives inside of it, arrays of objects in the .npy format.
        A folder with shards, or their index, gives a ShardedReport.
    limits: a Limits; scan_events bounds what is listed.

    What is damaged or broken off is reported together with all that could be read; so is what is compressed inside of an archive,
    which is not unpacked (but for ZIP's own deflate).
    Raises FormatError (with what the file looks like instead) where there is no pickle, TypeError, OSError.
    """
    f = weights_of(f)
    if is_index(f):
        with importing:
            from .sharded_reports import report_on_shards

        return report_on_shards(f, functools.partial(scan_source, limits=limits), compare=False)
    source = open_source(f)
    try:
        return scan_source(source, limits)
    finally:
        source.close()


def scan_source(source, limits=None):
    """The report on an open source."""
    limits = limits or Limits()
    observer = Observer(limits)
    kind = PickleWalk(observer, source, limits).run()
    return _report(source.name, kind, observer)


def _report(name, kind, observer):
    findings, notes, pickles = [], [], []
    for seen in observer.observations:
        names = tuple(Name(*fields) for fields in seen.names)
        calls = tuple(Call(*fields) for fields in seen.calls)
        offset = seen.at if seen.in_file else None
        pickles.append(
            PickleReport(seen.record, seen.what, offset, seen.nbytes, names, calls, seen.counted)
        )
        findings += _findings(name, seen, names, calls)
        notes += [
            _finding(
                name,
                seen,
                "nested_pickle",
                at,
                "a call is given bytes that are a pickle; they are data here",
            )
            for at in seen.nested
        ]
    for record, error, in_file in observer.damaged:
        findings.append(_damage(name, record, error, in_file))
    for record, offset, nbytes in observer.behind:
        where = _where(name, record, offset)
        sentence = f"{where}: {nbytes} bytes that belong to nothing"
        notes.append(Finding("trailing_bytes", sentence, record, offset))
    worst = sorted(findings, key=lambda f: not f.kind.startswith(DANGEROUS))
    return ScanReport(name, kind, tuple(pickles), tuple(worst), tuple(notes))


def _findings(name, seen, names, calls):
    """What speaks against one pickle."""
    uses = Counter((n.module, n.name) for n in names)
    called = {}
    for call in calls:
        called.setdefault(call.callee, call)
    for found in names:
        if found.rating != KNOWN and (count := uses.pop((found.module, found.name), 0)):
            text = shown(found.qualname)
            sentence = f"the pickle names {text}"
            sentence += (
                f", which {found.reason}"
                if found.reason
                else ", which is not known to be plain data"
            )
            if text in called:
                call = called[text]
                sentence += f", and calls it ({call.opcode}) with {call.arguments}"
            sentence += f" ({count} times)" if count > 1 else ""
            yield _finding(name, seen, f"{found.rating}_name", found.offset, sentence)
    for (rating, sentence), (offset, count) in seen.oddities.items():
        sentence += f" ({count} times)" if count > 1 else ""
        yield _finding(name, seen, f"{rating}_use", offset, sentence)
    if seen.error is not None:
        yield _damage(name, seen.record, seen.error, seen.in_file)


def _finding(name, seen, kind, at, sentence):
    """A finding about byte ``at`` of a pickle."""
    offset = seen.at + at if seen.in_file else None
    where = _where(name, seen.record, offset)
    where += f": {seen.what}" + ("" if seen.in_file else f", byte {at}")
    return Finding(kind, f"{where}: {sentence}", seen.record, offset)


def _damage(name, record, error, in_file):
    kind = "limit" if isinstance(error, LimitError) else "broken"
    text = str(error).removeprefix(f"{name}: ")
    if record is not None and not text.startswith("record "):
        text = f"record {shown(record)!r}: {text}"
    offset = getattr(error, "offset", None) if in_file else None
    return Finding(kind, f"{name}: {shown(text, 400)}", record, offset)


def _where(name, record, offset):
    where = name if record is None else f"{name}: record {shown(record)!r}"
    return where if offset is None else f"{where} at byte {offset}"
