"""Whether the arrays of a Zarr store agree with each other: every disagreement as a finding."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..errors import CheckpointError, LimitError
from ..findings import Finding
from ..limits import Limits
from .zarr_layout import (
    ATOM,
    EDGE,
    alchemi_entries,
    alchemi_field,
    alchemi_layout,
    committed_samples,
    is_edges,
    is_nvalchemi,
    is_old,
    missing_fields,
    plain_entries,
    whole,
)
from .zarr_rows import Arrays
from .zarr_store import array_at, arrays_of, child, describe, open_store
from .zarr_window import edge_bases, edge_bounds, outside


@dataclass(frozen=True)
class IntegrityReport:
    """What ``check_integrity`` found in the store ``name``; ``ok`` is that there is nothing.

    Kinds of findings: "bad_metadata", "missing_array", "short_array", "interrupted_append" (an array is longer than what is
    committed; readers don't see the rest), "length_mismatch", "bad_pointer", "mask_mismatch", "old_layout" and "unshifted_edges"
    (``repair=True`` reads them), "bad_edges", "damaged_array".
    """

    name: str
    samples: int
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return not self.findings

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for json.dumps."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        head = f"{self.name}: {'ok' if self.ok else 'DAMAGED'} (samples: {self.samples})"
        return "\n".join([head, *(f"  {finding.message}" for finding in self.findings)])


def inspect(store, *, edges=True, limits=None):
    """Compare what a store says of itself with its arrays; raises only where there is no store, or LimitError."""
    where = describe(store)
    root = open_store(store, where)
    inspection = _Inspection(where, root, limits or Limits())
    if not hasattr(root, "members"):
        samples = root.shape[0] if root.shape else 0
    elif is_nvalchemi(where, root):
        samples = inspection.alchemi(edges)
    else:
        samples = inspection.rows()
    return IntegrityReport(where, samples, tuple(inspection.findings))


class _Inspection:
    def __init__(self, where, root, limits):
        self.where, self.root, self.limits, self.findings = where, root, limits, []

    def note(self, kind, message, path=None):
        self.findings.append(Finding(kind, f"{self.where}: {message}", path))

    def attempt(self, kind, path, work, *args):
        """What ``work`` gives; None, and a finding, where it raises."""
        try:
            return work(*args)
        except LimitError:  # which the caller set, and says nothing of the store
            raise
        except CheckpointError as error:
            self.findings.append(Finding(kind, str(error), path))
            return None

    def rows(self):
        entries = self.attempt("bad_metadata", None, plain_entries, self.where, self.root, None)
        lengths = [(entry.path, entry.array.shape[:1]) for entry in entries or ()]
        for path, length in lengths:
            if length != lengths[0][1]:
                self.note(
                    "length_mismatch",
                    f"array {path!r} has {sum(length)} rows, {lengths[0][0]!r} has {sum(lengths[0][1])}",
                    path,
                )
        return sum(lengths[0][1]) if lengths else 0

    def alchemi(self, edges):
        if self.root.attrs.get("num_samples") is None:
            self.note("bad_metadata", "the attribute 'num_samples' is missing, a count is expected")
        committed = self.attempt("bad_metadata", None, committed_samples, self.where, self.root)
        entries = self.attempt("bad_metadata", None, alchemi_entries, self.where, self.root)
        if committed is None or entries is None:
            return committed or 0
        for kind, name in missing_fields(self.where, self.root, entries):
            self.note(
                "missing_array",
                f"the store names a field {name!r} in {kind!r}, and has no array for it",
            )
        mask = self.column("meta/samples_mask", committed)
        totals, pointers = {}, {}
        for level, path in self.pointer_paths():
            pointers[level] = self.pointer(path, committed)
            totals[level] = None if pointers[level] is None else int(pointers[level][-1])
        for level, path in ((ATOM, "meta/atoms_mask"), (EDGE, "meta/edges_mask")):
            self.level_mask(path, mask, pointers[level])
        for entry in entries:
            self.length(entry, totals.get(entry.level, committed))
        if edges and mask is not None and totals[ATOM] is not None and totals[EDGE] is not None:
            self.attempt("damaged_array", None, self.edges)
        return committed

    def pointer_paths(self):
        own = self.attempt("bad_metadata", None, child, self.where, self.root, "meta/level_ptrs")
        names = sorted(arrays_of(self.where, own)) if hasattr(own, "arrays") else []
        return [
            (ATOM, "meta/atoms_ptr"),
            (EDGE, "meta/edges_ptr"),
            *((name, f"meta/level_ptrs/{name}") for name in names),
        ]

    def column(self, path, length):
        """The committed part of a pointer or mask; None, and a finding, where it is not there."""
        array = self.attempt("bad_metadata", path, array_at, self.where, self.root, path)
        kind = "missing_array" if array is None else "short_array"
        values = self.attempt(kind, path, whole, self.where, self.root, path, length, self.limits)
        if values is not None:
            self.surplus(path, array.shape[0], length)
        return values

    def surplus(self, path, found, expected):
        if found > expected:
            self.note(
                "interrupted_append",
                f"array {path!r} has {found} rows, {expected} are committed; an append was cut off, and what it left is not seen",
                path,
            )

    def pointer(self, path, committed):
        values = self.column(path, committed + 1)
        if values is None:
            return None
        falls = np.flatnonzero(np.diff(values) < 0)
        if values[0] != 0 or len(falls):
            i = int(falls[0]) if len(falls) else 0
            what = (
                f"falls from {values[i]} to {values[i + 1]} at {i}"
                if len(falls)
                else f"begins at {values[0]}"
            )
            self.note(
                "bad_pointer", f"array {path!r} {what}; a pointer begins at 0 and never falls", path
            )
            return None
        return values

    def level_mask(self, path, samples_mask, pointer):
        if (
            pointer is None
            or self.attempt("bad_metadata", path, child, self.where, self.root, path) is None
        ):
            return  # readers do without a mask of rows
        mask = self.column(path, int(pointer[-1]))
        if mask is None or samples_mask is None:
            return
        expected = np.repeat(samples_mask.astype(bool), np.diff(pointer))
        wrong = np.flatnonzero(mask.astype(bool) != expected)
        if len(wrong):
            row = int(np.searchsorted(pointer, wrong[0], side="right")) - 1
            self.note(
                "mask_mismatch",
                f"array {path!r} disagrees with meta/samples_mask in {len(wrong)} rows, first in those of row {row} of the store",
                path,
            )

    def length(self, entry, expected):
        """Compare the rows of a field's array with the rows that its level has; None where that is not known."""
        field = self.attempt("bad_metadata", entry.path, alchemi_field, self.where, entry, True)
        if field is None:
            return
        if is_old(entry):
            self.note(
                "old_layout",
                f"array {entry.path!r} has shape {entry.array.shape}, as early writers left it; repair=True reads it",
                entry.path,
            )
        found = field.rows.length
        if expected is not None and found < expected:
            self.note(
                "short_array",
                f"array {entry.path!r} has {found} rows, {expected} are committed; the samples at its end are lost",
                entry.path,
            )
        elif expected is not None:
            self.surplus(entry.path, found, expected)

    def edges(self):
        arrays = Arrays(lambda: self.root, cache_bytes=0, limits=self.limits)
        entries = alchemi_entries(self.where, self.root, repair=True)
        entries = [entry for entry in entries if is_edges(entry)]
        layout = alchemi_layout(self.where, self.root, entries, arrays, repair=True)
        pointer = layout.pointers[ATOM]
        for field in layout.fields:
            bounds = edge_bounds(layout, field)
            wrong = np.flatnonzero(outside(pointer, bounds))
            if not len(wrong):
                continue
            bases, i = edge_bases(pointer, bounds)[wrong], int(wrong[0])
            path = field.rows.path
            bad = int((bases < 0).sum())
            which = f"{bad} of {len(wrong)}" if bad else f"{len(wrong)}"
            remedy = (
                "which cannot be repaired"
                if bad
                else "left unshifted by an append; repair=True shifts them"
            )
            self.note(
                "bad_edges" if bad else "unshifted_edges",
                f"array {path!r}: edges of {len(wrong)} samples lead out of them, first those of row {i} of the store: "
                f"atoms {bounds[i, 0]} to {bounds[i, 1]}, {pointer[i]} to {pointer[i + 1] - 1} are expected ({which} {remedy})",
                path,
            )
