"""Rows of the tensors of an open checkpoint, for many tensors at once: one fill, straight into what is given out."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ._spec import TensorSpec
from .dtypes import numpy_dtype
from .errors import UnsupportedError
from .importing import importing
from .lazy import LazyTensor, core_of
from .materialize import fill
from .plan import root_of
from .records import Records


class Column(NamedTuple):
    """A tensor whose rows lie in the file as they are in memory; all in bytes."""

    lazy: LazyTensor
    record: str
    offset: int  # of row 0, in the source
    step: int  # from one row to the next
    nbytes: int  # of a row


class Rows:
    """The first axis of tensors that are equally long there. ``read(positions)`` gives {name: tensor of these rows}.

    A tensor that does not lie in the file row by row (it is deflated, of the other byte order, quantized, transposed) is read
    whole when it is first wanted, and kept. Rows are not verified: a checksum covers a whole record.
    Raises ValueError where lengths differ or a tensor has no axis, UnsupportedError for layouts that have no rows.
    """

    def __init__(self, checkpoint, names):
        self.checkpoint = checkpoint
        self.names = list(names)
        self.count = self._common_length()
        self._columns = {}
        with checkpoint.source.in_use():
            for name in self.names:
                column = column_of(checkpoint[name])
                if column is not None:
                    self._columns[name] = column
        self._whole: dict[Any, Any] = {}

    def _common_length(self):
        first, count = None, 0
        for name in self.names:
            lazy = self.checkpoint[name]
            # NumPy has no quantized arrays
            whole = lazy.spec is None and self.checkpoint.framework == "torch"
            if lazy.spec is None and not (whole and lazy.kind.startswith("quantized")):
                raise UnsupportedError(
                    f"{self._where(name)}: a {lazy.kind} tensor has no rows that can be read; leave it out with keys="
                )
            if not lazy.shape:
                raise ValueError(
                    f"{self._where(name)}: a tensor without dimensions has no rows; leave it out with keys="
                )
            if is_repeated(lazy):
                raise UnsupportedError(
                    f"{self._where(name)}: a row is larger than all that the file holds of it, which is repeated; leave it "
                    f"out with keys="
                )
            if first is None:
                first, count = name, lazy.shape[0]
            elif lazy.shape[0] != count:
                raise ValueError(
                    f"{self._where(name)} has {lazy.shape[0]} rows, {first!r} has {count}; all tensors must have as many "
                    f"(keys= chooses some)"
                )
        return count

    def _where(self, name):
        return f"{self.checkpoint.source.name}: {name!r}"

    def read(self, positions):
        """Rows at checked positions (int64), stacked in this order: {name: tensor or array of its own memory}."""
        with self.checkpoint.source.in_use():
            memory = self._read_columns(positions)
            return {
                name: self._taken(memory[name], self._columns[name], len(positions))
                if name in memory
                else self._chosen(name, positions)
                for name in self.names
            }

    def _read_columns(self, positions):
        """{name: buffer} for all columns, filled in one go. Positions that follow each other are one read."""
        columns = self._columns
        memory = self.checkpoint.allocate(
            [column.nbytes * len(positions) for column in columns.values()]
        )
        follows = np.zeros(len(positions), dtype=bool)
        np.equal(positions[1:], positions[:-1] + 1, out=follows[1:])
        starts = np.flatnonzero(~follows)
        joined = starts, np.append(starts[1:], len(positions)) - starts
        single = np.arange(len(positions)), np.ones(len(positions), dtype=np.int64)
        names, offsets, sizes, addresses = [], [], [], []
        for column, address in zip(columns.values(), memory.address.tolist(), strict=True):
            starts, lengths = joined if column.step == column.nbytes else single
            names += [column.record] * len(starts)
            offsets.append(column.offset + positions[starts] * column.step)
            sizes.append(lengths * column.nbytes)
            addresses.append(address + starts * column.nbytes)
        if names:
            extents = Records(names, np.concatenate(offsets), np.concatenate(sizes))
            fill(
                self.checkpoint.source,
                extents,
                np.arange(len(names)),
                np.concatenate(addresses),
                memory.owners,
                verify=False,
                threads=self.checkpoint.threads,
                huge=memory.huge,
            )
        return dict(zip(columns, memory.owners, strict=True))

    def _taken(self, owner, column, count):
        spec = column.lazy.spec
        shape = (count, *spec.shape[1:])
        if not column.nbytes:
            owner = None
        if self.checkpoint.framework == "numpy":
            dtype, stride = numpy_dtype(spec.dtype), contiguous(shape)
            return column.lazy.as_array(owner, 0, shape, stride, dtype, values=True)
        with importing:
            from .torch_tensors import dense_tensor

        return dense_tensor(owner, spec.dtype, shape)

    def _chosen(self, name, positions):
        whole = self._whole.get(name)
        if whole is None:
            whole = self._whole.setdefault(name, self.checkpoint[name].read())
        if self.checkpoint.framework == "numpy":
            return whole[positions]
        with importing:
            import torch

        return whole.detach()[torch.from_numpy(positions)]


def spec_of(lazy):
    """The TensorSpec of a plain tensor, or of a quantized one's integers."""
    return lazy.spec or core_of(lazy.leaf).spec


def is_repeated(lazy):
    """Whether a row has more bytes than the storage it lies in: memory that the file does not back."""
    spec = spec_of(lazy)
    return bool(spec.shape[0]) and math.prod(spec.shape[1:]) * spec.itemsize > spec.storage.nbytes


def column_of(lazy):
    """The Column of a tensor; None for one that must be read whole. Called while the source is in use."""
    spec = lazy.spec
    if not isinstance(spec, TensorSpec) or spec.conj or spec.neg or spec.storage.location == "meta":
        return None
    dense = contiguous(spec.shape)
    if any(
        n > 1 and a != b for n, a, b in zip(spec.shape[1:], spec.stride[1:], dense[1:], strict=True)
    ):
        return None
    nbytes = math.prod(spec.shape[1:]) * spec.itemsize
    if not nbytes or not spec.shape[0]:
        return Column(lazy, "", 0, 0, nbytes)
    base = lazy.offset_in_file()
    if base is None:
        return None
    records, row = lazy._checkpoint.contents.records, lazy._checkpoint.row_of(root_of(spec.storage))
    offset = base + spec.offset * spec.itemsize
    return Column(lazy, records.names[row], offset, spec.stride[0] * spec.itemsize, nbytes)


def contiguous(shape):
    """The strides, in elements, of a tensor without gaps."""
    stride = [1] * len(shape)
    for axis in reversed(range(len(shape) - 1)):
        stride[axis] = stride[axis + 1] * max(1, shape[axis + 1])
    return tuple(stride)
