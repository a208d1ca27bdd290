"""ZarrReader: samples of a Zarr store, of graphs of atoms or plain rows."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np

from ..errors import FormatError, UnsupportedError, short
from ..importing import importing
from ..limits import Limits
from ..loading import check_types, require_torch
from .reader import Reader, counted
from .zarr_batch import GraphBatch
from .zarr_integrity import IntegrityReport, inspect
from .zarr_layout import ATOM, EDGE, ROW, open_layout
from .zarr_window import AMBIGUOUS, Window, edge_bases, edge_bounds

CACHE_BYTES = 256 << 20


class ZarrReader(Reader):
    """Samples of a Zarr store, which is never written to.

    Two layouts are read, and told apart by themselves:

    - the graphs of nvalchemi's ``AtomicDataZarrWriter``. A sample is a dict of its fields: those of atoms [atoms, …], those of edges
      [edges, …], those of the whole system [1, …], those of levels of the store's own as they are defined (a product of two levels
      is [left, right, …]). Numbers of atoms in ``neighbor_list`` count from the sample's first atom. Deleted samples are skipped, and
      rows of an append that was cut off are not seen;
    - plain rows: a group of arrays of equal length, of which a sample is a dict of row i of each, or a single array, of which
      a sample is row i.

    A store that was replaced is a FormatError when its arrays are read, where these have another form now; rows that were
    appended are no error. Other values in arrays of the same form are not noticed; nor is, where the store is no folder, a new
    form of an array that was read already, whose bytes are then taken for what they are not. ``refresh()`` looks again.

    A chunk that is missing reads as the array's fill value, as the format has it, also where it was deleted.

    Fields come in the order in which the store names them, or in that of ``fields``. Samples of one call are parts of common
    blocks of memory, in which no two overlap. Stores that are folders are decoded by tensorstore, where it is installed.

    store: a path, a URL, or a store object of zarr's, not an open group or array. A path to a zip file needs zarr's ZipStore.
    fields: names of the fields to read; nothing else is. None reads all.
    repair: read what writers got wrong. Edges that an append left unshifted are shifted: where each append began is found from
        all edges, which are read once for it. ``edge_index``, the name and shape [2, edges] of early writers, becomes
        ``neighbor_list``. Without it both are errors.
    cache_bytes: at most so much memory is kept for decoded chunks, the least recently used ones being dropped. Reads are
        fastest where all chunks of the fields fit.
    limits: a Limits; ``zarr_chunks`` and ``zarr_nbytes`` bound what one sample takes, since chunks need not be there.
    framework: "torch" or "numpy"; None for torch where it is installed.

    Raises FileNotFoundError where there is nothing, FormatError for what is no Zarr store or contradicts itself, UnsupportedError
    for elements that the framework has no type for, KeyError for a field that is not there, ImportError without zarr, TypeError for an open group or array; LimitError, also
    when a sample is read that is larger than ``limits`` say.
    """

    def __init__(
        self,
        store: Any,
        *,
        fields: Iterable[str] | None = None,
        repair: bool = False,
        cache_bytes: int = CACHE_BYTES,
        framework: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._store = store
        self._repair = bool(repair)
        self._chosen = checked_fields(fields)
        self._cache_bytes = checked_size(cache_bytes)
        check_types(None, limits)
        self._limits = limits or Limits()
        self.framework = checked_framework(framework)
        self._layout: Any = None
        self._bases: Any = None
        self.refresh()

    def refresh(self) -> None:
        """Look at the store again, after it was written to; everything cached is dropped.

        The new view takes the place of the old one at once, and only when all of it is there: where this raises, the reader goes
        on as before. Samples may have other numbers afterwards.
        """
        self.check_open()
        layout = open_layout(
            self._store, self._chosen, self._repair, self._cache_bytes, self._limits
        )
        if self.framework == "torch":
            for field in layout.fields:
                check_torch_has(layout.where, field.rows)
        self._layout = layout

    def check_integrity(self, *, edges: bool = True) -> IntegrityReport:
        """Compare the arrays of the store with each other, whatever ``fields`` says: an ``IntegrityReport``.

        ``edges=False`` leaves the edges unread; what remains needs pointers, masks and metadata alone. Damage inside of chunks
        of other fields is not looked for, nor chunks that are missing; of plain rows no chunk is read. Raises LimitError where a pointer or a mask is larger than ``limits`` say.
        """
        self.check_open()
        return inspect(self._store, edges=edges, limits=self._limits)

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields of a sample, in order; none where samples are no dicts."""
        return () if self._layout.single else tuple(field.name for field in self._layout.fields)

    def counts(self, level: str = ATOM) -> np.ndarray:
        """How many rows each sample has at a level ("atom", "edge", one of the store's own): int64 [len(reader)].

        Known without reading a field; for samplers that look at sizes. Raises KeyError for a level that is not there.
        """
        self.check_open()
        layout = self._layout
        pointer = layout.pointers.get(level)
        if pointer is None:
            there = ", ".join(layout.pointers) or "none"
            raise KeyError(f"{layout.where}: no level {level!r} has a pointer; there are: {there}")
        return np.diff(pointer)[layout.samples]

    def __len__(self) -> int:
        return len(self._layout.samples)

    def _read(self, positions):
        layout, window = self._window(positions)
        columns = []
        for field, rows in zip(layout.fields, window.gather(layout.fields), strict=True):
            if field.edges:
                rows = self._local(layout, window, field, rows, np.zeros_like(positions))
            columns.append(self._parts(layout, window, field, rows))
        if layout.single:
            return columns[0]
        names = [field.name for field in layout.fields]
        return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]

    def read_batch(self, indices: Iterable[int]) -> Any:
        """Read samples as one batch, without an object for each.

        Plain rows are stacked: [samples, …]. Of graphs

        - fields of atoms, edges and other levels with pointers lie one behind the other: [rows of all samples, …]; products of levels
          stay flat;
        - fields of systems are stacked: [samples, …];
        - ``neighbor_list`` counts atoms through the whole batch, so that it indexes the fields of atoms as they lie there;
        - for each level with pointers that occurs ``atoms_ptr``, ``edges_ptr`` or ``<level>_ptr`` is added, int64 [samples + 1]: the
          rows of sample i are ``ptr[i]`` to ``ptr[i + 1]``; and with atoms ``atoms_batch``, int64 [atoms]: whose each atom is.

        Raises what ``read_many`` raises, and ValueError for no indices at all.
        """
        return super().read_batch(indices)

    @counted
    def _read_batch(self, positions):
        layout, window = self._window(positions)
        batch = {}
        for field, rows in zip(layout.fields, window.gather(layout.fields), strict=True):
            if field.edges:
                rows = self._local(layout, window, field, rows, window.offsets(ATOM)[:-1])
            batch[field.name] = rows
        if layout.single:
            return self._value(batch[""])
        if layout.pointers:
            form = GraphBatch(layout)
            batch = form.put(batch, {level: window.span(level)[1] for level in form.pointers})
        return {name: self._value(values) for name, values in batch.items()}

    def cut_batch(self, batch, start, end):
        layout = self._layout
        if not layout.pointers:
            return super().cut_batch(batch, start, end)
        return GraphBatch(layout).cut(batch, start, end)

    def merge_batches(self, batches, order):
        layout = self._layout
        if not layout.pointers:
            return super().merge_batches(batches, order)
        return GraphBatch(layout).merge(batches, order)

    def _window(self, positions):
        layout = self._layout  # once: refresh() may put another in its place
        if len(positions) and int(positions.max()) >= len(layout.samples):
            raise self._out_of_range(int(positions.max()), len(layout.samples))
        return layout, Window(layout, positions)

    def _parts(self, layout, window, field, rows):
        if field.level == ROW:
            return [self._value(rows[i, ...]) for i in range(len(rows))]
        bounds = window.offsets(field.level).tolist()
        pieces = [rows[a:b] for a, b in pairwise(bounds)]
        axes = layout.products.get(field.level)
        if axes:
            left, right = (window.counts(axis).tolist() for axis in axes)
            shape = field.rows.shape
            pieces = [
                piece.reshape(a, b, *shape) for piece, a, b in zip(pieces, left, right, strict=True)
            ]
        return [self._value(piece) for piece in pieces]

    def _local(self, layout, window, field, edges, begins):
        """Edges between atoms that are numbered from ``begins[i]`` on in sample i."""
        if not self._repair:
            return window.renumber(field, edges, window.span(ATOM)[0], begins)
        bases = self._found_bases(layout, field)[window.physical]
        bad = (bases < 0) & (window.span(EDGE)[1] > 0)
        if bad.any():
            i = int(bad.argmax())
            why = "several" if bases[i] == AMBIGUOUS else "none"
            raise FormatError(
                f"{layout.where}: array {field.rows.path!r}, {window.name(i)}: of the numbers that the first atom may go by in its "
                f"edges {why} fit the samples around it; the edges cannot be repaired, fields= leaves them out"
            )
        return window.renumber(field, edges, bases, begins)

    def _found_bases(self, layout, field):
        known = self._bases
        if known is None or known[0] is not layout:
            pointer = layout.pointers[ATOM]
            if pointer[0] != 0 or (np.diff(pointer) < 0).any():
                raise FormatError(
                    f"{layout.where}: the pointer of atoms falls, or does not begin at 0; edges cannot be repaired by it"
                )
            known = self._bases = layout, edge_bases(pointer, edge_bounds(layout, field))
        return known[1]

    def _value(self, array):
        if self.framework == "numpy":
            return array
        with importing:
            import torch

        return torch.from_numpy(array)


def checked_fields(fields):
    if fields is None:
        return None
    if isinstance(fields, (str, bytes)):
        raise TypeError(f"fields={fields!r}: a list of names is expected")
    names = tuple(fields)
    if not all(isinstance(name, str) and name for name in names):
        raise TypeError(f"fields={short(names)}: names are expected")
    if not names or len(set(names)) != len(names):
        raise ValueError(f"fields={names!r:.200}: at least one name is expected, and none twice")
    return names


def checked_size(cache_bytes):
    if type(cache_bytes) is not int or cache_bytes < 0:
        raise ValueError(
            f"cache_bytes={cache_bytes!r:.80}: a number of bytes, 0 or more, is expected"
        )
    return cache_bytes


def checked_framework(framework):
    if framework not in (None, "torch", "numpy"):
        raise ValueError(f"framework {framework!r:.80} is invalid (expected one of: torch, numpy)")
    if framework is None:
        return "torch" if importlib.util.find_spec("torch") else "numpy"
    if framework == "torch":
        require_torch()
    return framework


def check_torch_has(where, rows):
    with importing:
        import torch

    try:
        torch.from_numpy(np.empty(0, rows.dtype))
    except TypeError:
        raise UnsupportedError(
            f"{where}: array {rows.path!r} is of {rows.dtype}, which torch has no type for; framework='numpy' gives it as it is, "
            "fields= leaves it out"
        ) from None
