"""Batches of graphs: rows of all samples one behind the other, with pointers; and how such are cut and joined."""

import numpy as np

from ..errors import UnsupportedError, short
from ..importing import importing
from .zarr_layout import ATOM, EDGE
from .zarr_rows import offsets, ranges

PLURAL = {ATOM: "atoms", EDGE: "edges"}


class GraphBatch:
    """What a batch of a layout consists of, whatever samples are in it: fields, and pointers of the levels that occur.

    ``pointers``: {level: the name of its pointer in a batch}. Raises UnsupportedError for a field of such a name.
    """

    def __init__(self, layout):
        self.fields = layout.fields
        levels = dict.fromkeys(field.level for field in layout.fields)
        if any(field.edges for field in layout.fields):
            levels[ATOM] = None
        self.pointers = {
            level: f"{PLURAL.get(level, level)}_ptr" for level in levels if level in layout.pointers
        }
        self.owner = f"{PLURAL[ATOM]}_batch" if ATOM in self.pointers else None
        added = {*self.pointers.values(), self.owner}
        for field in layout.fields:
            if field.name in added:
                raise UnsupportedError(
                    f"{layout.where}: a field is called {field.name!r}, as a batch calls its pointers; fields= leaves it out"
                )

    def put(self, fields, spans):
        """A batch out of gathered fields and, by level, how many rows each sample has."""
        batch = dict(fields)
        for level, name in self.pointers.items():
            batch[name] = offsets(spans[level])
        if self.owner:
            counts = spans[ATOM]
            batch[self.owner] = np.repeat(np.arange(len(counts)), counts)
        return batch

    def cut(self, batch, start, end):
        """Samples ``start`` to ``end`` of a batch, as a batch."""
        self._check(batch)
        rows = {
            level: (int(batch[name][start]), int(batch[name][end]))
            for level, name in self.pointers.items()
        }
        part = {}
        for field in self.fields:
            first, last = rows.get(field.level, (start, end))
            part[field.name] = batch[field.name][first:last]
            if field.edges:
                part[field.name] = part[field.name] - rows[ATOM][0]
        for level, name in self.pointers.items():
            part[name] = batch[name][start : end + 1] - rows[level][0]
        if self.owner:
            first, last = rows[ATOM]
            part[self.owner] = batch[self.owner][first:last] - start
        return part

    def merge(self, batches, order):
        """Batches one behind the other, with their samples in another order: ``order[k]`` is the one that comes k-th."""
        for batch in batches:
            self._check(batch)
        counts = {
            level: np.concatenate([np.diff(np.asarray(batch[name])) for batch in batches])
            for level, name in self.pointers.items()
        }
        index = {
            level: ranges(offsets(column)[:-1][order], column[order])
            for level, column in counts.items()
        }
        spans = {level: column[order] for level, column in counts.items()}
        fields = {}
        for field in self.fields:
            values = _joined([batch[field.name] for batch in batches])
            values = _taken(values, index.get(field.level, order))
            if field.edges:
                before = [np.asarray(batch[self.pointers[ATOM]])[:-1] for batch in batches]
                moved = offsets(spans[ATOM])[:-1] - np.concatenate(before)[order]
                moved = np.repeat(moved, spans[EDGE]).astype(np.int64)
                values = values + _like(values, moved.reshape(-1, *[1] * (values.ndim - 1)))
            fields[field.name] = values
        return {
            name: _like(batches[0][name], value) for name, value in self.put(fields, spans).items()
        }

    def _check(self, batch):
        expected = {field.name for field in self.fields} | set(self.pointers.values())
        if not isinstance(batch, dict) or not expected <= batch.keys():
            raise ValueError(f"a batch of {sorted(expected)} is expected, this is {short(batch)}")


def _joined(arrays):
    if isinstance(arrays[0], np.ndarray):
        return np.concatenate(arrays)
    with importing:
        import torch

    return torch.cat(arrays)


def _taken(values, index):
    return values[_like(values, index)]


def _like(other, values):
    """An array as what ``other`` is: an array, or a torch tensor."""
    if isinstance(other, np.ndarray) or not isinstance(values, np.ndarray):
        return values
    with importing:
        import torch

    return torch.from_numpy(values)
