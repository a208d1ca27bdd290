"""The rows of some samples of a store: where they are, and all of them gathered, field by field."""

import numpy as np

from .._rows import move_numbers, value_bounds
from ..errors import FormatError
from .zarr_layout import ATOM, EDGE
from .zarr_rows import Plan, offsets


class Window:
    """Samples of a layout, by number and in any order, repetitions included.

    ``physical`` are their rows in the store. Raises FormatError where a pointer leads out of the store; it names the sample.
    """

    def __init__(self, layout, samples, physical=None):
        self.layout = layout
        self.samples = samples
        self.physical = layout.samples[samples] if physical is None else physical
        self._spans, self._offsets, self._plans = {}, {}, {}

    def span(self, level):
        """First row and number of rows of each sample, in arrays of a level."""
        if level not in self._spans:
            self._spans[level] = self._find(level)
        return self._spans[level]

    def offsets(self, level):
        """Where the rows of each sample begin among those gathered, and where the last one's end."""
        if level not in self._offsets:
            self._offsets[level] = offsets(self.span(level)[1])
        return self._offsets[level]

    def counts(self, level):
        """How many rows each sample has, as the pointer says; one where there is none."""
        pointer = self.layout.pointers.get(level)
        if pointer is None:
            return np.ones(len(self.physical), np.int64)
        return pointer[self.physical + 1] - pointer[self.physical]

    def _find(self, level):
        pointer = self.layout.pointers.get(level)
        if pointer is None:
            return self.physical, self.counts(level)
        starts, ends = pointer[self.physical], pointer[self.physical + 1]
        bad = (starts < 0) | (ends < starts)
        if bad.any():
            i = int(bad.argmax())
            raise FormatError(
                f"{self.layout.where}: {self.name(i)}: the pointer of level {level!r} goes from {starts[i]} to {ends[i]}; "
                "pointers that never fall are expected, check_integrity() lists what is wrong"
            )
        counts = ends - starts
        axes = self.layout.products.get(level)
        if axes:
            left, right = (self.counts(axis) for axis in axes)
            bad = left * right != counts
            if bad.any():
                i = int(bad.argmax())
                raise FormatError(
                    f"{self.layout.where}: {self.name(i)}: level {level!r} has {counts[i]} rows, "
                    f"{left[i]} x {right[i]} are expected ({axes[0]!r} x {axes[1]!r})"
                )
        return starts, counts

    def name(self, i):
        """What messages call the i-th of these samples."""
        row = int(self.physical[i])
        return f"sample {int(self.samples[i])} (row {row} of the store)"

    def gather(self, fields):
        """The rows of each field, those of the samples one behind the other: a list of new arrays.

        Raises FormatError where an array is shorter than its pointers say, or cannot be decoded, LimitError where a sample is
        larger than Limits allow.
        """
        wanted, limits = [], self.layout.arrays.limits
        for field in fields:
            starts, counts = self.span(field.level)
            ends, rows = starts + counts, field.rows
            outside = (ends > rows.length) & (counts > 0)
            if outside.any():
                i = int(outside.argmax())
                raise FormatError(
                    f"{self.layout.where}: array {rows.path!r} has {rows.length} rows, {self.name(i)} needs rows {starts[i]} to "
                    f"{ends[i] - 1}; the array was cut off, check_integrity() lists what is wrong"
                )
            if (counts > rows.most_rows(limits)).any():
                i = int(counts.argmax())
                raise rows.too_much(self.name(i), int(counts[i]), limits)
            key = field.level, rows.block_rows
            if key not in self._plans:
                self._plans[key] = Plan(starts, counts, rows.block_rows)
            wanted.append((rows, self._plans[key], rows.empty(int(self.offsets(field.level)[-1]))))
        self.layout.arrays.gather(wanted)
        return [target for _, _, target in wanted]

    def renumber(self, field, values, bases, new_starts):
        """Turn the global numbers of atoms in gathered edges into numbers that begin at ``new_starts[i]`` in sample i.

        ``bases`` is the number that the first atom of each sample goes by. Returns the edges. Raises FormatError for
        an edge that leads out of its sample.
        """
        counts = self.span(EDGE)[1]
        atoms = self.span(ATOM)[1]
        if values.dtype.itemsize < 4 or values.dtype.kind == "u":
            values = values.astype(np.int64)
        if len(atoms) and int((new_starts + atoms).max()) > np.iinfo(values.dtype).max:
            values = values.astype(np.int64)
        width = values.size // max(1, len(values))
        table = np.stack([counts * width, bases, atoms, new_starts], axis=1)
        bad = move_numbers(values, table, values.dtype.itemsize)
        if bad >= 0:
            start = int(counts[:bad].sum())
            found = values[start : start + int(counts[bad])]
            raise FormatError(
                f"{self.layout.where}: array {field.rows.path!r}, {self.name(bad)}: the edges are between atoms {found.min()} and "
                f"{found.max()}, {bases[bad]} to {bases[bad] + atoms[bad] - 1} are expected; a writer that appended left them "
                "unshifted (repair=True shifts such ones), or the store is damaged"
            )
        return values


# Edges of a pass over all of them are read in windows of about as many rows.
PASS_ROWS = 1 << 21


def edge_bounds(layout, field):
    """The smallest and the largest number in the edges of each committed sample: int64 [committed, 2], 0 and -1 for none.

    Deleted samples, whose data may be zeroed, have none. Reads all edges once.
    """
    bounds = np.full((layout.committed, 2), (0, -1), np.int64)
    ends = np.cumsum(Window(layout, np.arange(len(layout.samples))).span(EDGE)[1])
    first = 0
    while first < len(ends):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + PASS_ROWS, side="right")))
        window = Window(layout, np.arange(first, last))
        (values,) = window.gather([field])
        values = np.ascontiguousarray(values, np.int64)
        found = np.empty((last - first, 2), np.int64)
        width = values.size // max(1, len(values))
        value_bounds(values, window.span(EDGE)[1] * width, found, 8)
        bounds[window.physical] = found
        first = last
    return bounds


AMBIGUOUS, BROKEN = -1, -2


def edge_bases(pointer, bounds):
    """The number that the first atom of each sample goes by in its edges, also where a writer began to count anew.

    ``pointer`` is that of atoms, int64 [n + 1], ``bounds`` what ``edge_bounds`` gives. Numbers should be global, so that the
    first atom of sample i has ``pointer[i]``; but some writers count from zero again in each append: then it has
    ``pointer[i] - pointer[first]``, with the first sample of that append. Nothing in a store says where appends began; it is
    found so that the edges of all samples stay inside of them, with as few doubts as possible. Samples whose numbers can be
    global are taken so. Gives AMBIGUOUS where several fit, BROKEN where none does; both matter only to samples with edges.
    """
    n = len(bounds)
    begins = pointer.tolist()
    if not outside(pointer, bounds).any():
        return pointer[:-1].copy()
    # Samples that an append may have begun with, ascending; those that have no atoms would add nothing new.
    candidates = []
    left = 0  # candidates before it are out
    least, most = [0] * n, [0] * n  # the first and the last candidate that fit, by sample
    for i, (low, high) in enumerate(bounds.tolist()):
        if len(candidates) == left or begins[i] > begins[candidates[-1]]:
            candidates.append(i)
        if low <= high:
            lowest, highest = begins[i] - low, begins[i + 1] - high
            kept_left, kept_right = left, len(candidates)
            while kept_left < kept_right and begins[candidates[kept_left]] < lowest:
                kept_left += 1
            while kept_left < kept_right and begins[candidates[kept_right - 1]] >= highest:
                kept_right -= 1
            if kept_left == kept_right:
                least[i] = most[i] = BROKEN
                continue
            left = kept_left
            del candidates[kept_right:]
        least[i], most[i] = candidates[left], candidates[-1]
    return _settle(begins, least, most)


def outside(pointer, bounds):
    """Whether the numbers of each sample lead out of it, if they are global: bool [n]."""
    there = bounds[:, 0] <= bounds[:, 1]
    return there & ((bounds[:, 0] < pointer[:-1]) | (bounds[:, 1] >= pointer[1:]))


def _settle(begins, least, most):
    """From the last sample back: what a later sample of the same append has settled holds for the earlier ones, too."""
    bases = np.empty(len(least), np.int64)
    append = None  # first sample of the append that is being walked through
    for i in range(len(least) - 1, -1, -1):
        if append is not None and i < append:
            append = None
        if least[i] == BROKEN:
            bases[i] = BROKEN
            continue
        if append is None and (least[i] == most[i] or least[i] == 0):
            append = least[i]
        bases[i] = AMBIGUOUS if append is None else begins[i] - begins[append]
    return bases
