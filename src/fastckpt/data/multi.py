"""MultiReader: several readers, one behind the other, as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .reader import Reader, counted


class MultiReader(Reader):
    """The samples of several readers, those of the first one first.

    How many each has is asked once, here. A request is handed to each reader that it concerns as one ``read_many``, and
    comes back in the order that was asked for. Closing it closes them. Where samples are mappings, all readers must have the
    same field names: ``check_fields`` compares the first sample of each, and raises ValueError for one that differs.
    """

    def __init__(self, *readers: Reader, check_fields: bool = True):
        if not readers:
            raise ValueError("MultiReader: at least one reader is needed")
        for reader in readers:
            if not isinstance(reader, Reader):
                raise TypeError(f"MultiReader: readers are expected, not {type(reader).__name__}")
        self.readers = readers
        frameworks = {reader.framework for reader in readers}
        if len(frameworks) > 1:
            raise ValueError(
                f"MultiReader: readers of {' and '.join(sorted(frameworks))} cannot be one; open all with the same framework"
            )
        self.framework = frameworks.pop()
        self._ends = np.cumsum([len(reader) for reader in readers], dtype=np.int64)
        if check_fields:
            self._check_fields()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def locate(self, index: int) -> tuple[int, int]:
        """Where a sample comes from: (number of the reader, index there). Raises IndexError."""
        position = self._position(index)
        child = int(np.searchsorted(self._ends, position, side="right"))
        return child, position - self._start(child)

    @property
    def supports_batch(self) -> bool:
        kinds = {type(reader).merge_batches for reader in self.readers}
        return len(kinds) == 1 and all(reader.supports_batch for reader in self.readers)

    def _start(self, child):
        return int(self._ends[child - 1]) if child else 0

    def _check_fields(self):
        expected = of = None
        for number, reader in enumerate(self.readers):
            if not len(reader):
                continue
            sample = reader.read(0)
            found = frozenset(sample) if isinstance(sample, Mapping) else None
            if of is None:
                expected, of = found, number
            elif found != expected:
                raise ValueError(
                    f"MultiReader: reader {number} ({reader!r}) gives {fields(found)}, reader {of} gives {fields(expected)}; "
                    f"all must give the same (check_fields=False does not look)"
                )

    def _parts(self, positions):
        """(reader, where its samples go, their positions there) for each reader that a request concerns."""
        children = np.searchsorted(self._ends, positions, side="right")
        for child in np.flatnonzero(np.bincount(children)).tolist():
            where = np.flatnonzero(children == child)
            yield self.readers[child], where, positions[where] - self._start(child)

    def _read(self, positions):
        samples: list[Any] = [None] * len(positions)
        for reader, where, local in self._parts(positions):
            for k, sample in zip(where.tolist(), reader.read_many(local), strict=True):
                samples[k] = sample
        return samples

    @counted
    def _read_batch(self, positions):
        if not self.supports_batch:
            return super()._read_batch(positions)
        parts = list(self._parts(positions))
        batches = [reader.read_batch(local) for reader, _, local in parts]
        if len(batches) == 1:
            return batches[0]
        return self.merge_batches(
            batches, np.argsort(np.concatenate([where for _, where, _ in parts]))
        )

    def cut_batch(self, batch, start, end):
        return self.readers[0].cut_batch(batch, start, end)

    def merge_batches(self, batches, order):
        return self.readers[0].merge_batches(batches, order)

    def _close(self):
        for reader in self.readers:
            reader.close()


def fields(names):
    return (
        "no mapping"
        if names is None
        else f"the fields {', '.join(sorted(map(str, names))) or '(none)'}"
    )
