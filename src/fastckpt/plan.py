"""Which bytes must be read: whole storages for whole tensors, and the runs of a part of one."""

import operator
from typing import NamedTuple

import numpy as np

from ._plan import roots_of, with_bytes
from .dtypes import DTYPES
from .errors import UnsupportedError

__all__ = [
    "Runs",
    "View",
    "index_view",
    "root_of",
    "roots_of",
    "runs_of",
    "swap_units",
    "with_bytes",
]

# A part is read with the bytes between its elements where they are at most this many times as many,
WASTE = 2
# or lie so near that reading them costs less than asking twice.
NEAR = 4096


def root_of(spec):
    """The storage whose bytes a storage has: itself, or the one it is a slice of."""
    return spec if spec.root is None else spec.root


def swap_units(storages, tensors):
    """How many bytes of each storage swap together, by the dtypes that look at it: {storage index: unit}.

    Raises UnsupportedError where two look at one storage and differ: no order of its bytes is right for both.
    """
    units = {spec.index: DTYPES[spec.dtype].unit for spec in storages}
    seen = {}
    for tensor in tensors:
        root = root_of(tensor.storage)
        unit = DTYPES[tensor.dtype].unit
        if seen.setdefault(root.index, unit) != unit:
            raise UnsupportedError(
                f"storage {root.key!r} is big-endian and holds numbers of {seen[root.index]} bytes for one tensor and of "
                f"{unit} for another; no byte order is right for both"
            )
        units[root.index] = unit
    return units


class View(NamedTuple):
    """A strided part of a storage, in elements."""

    offset: int
    shape: tuple
    stride: tuple


class Runs(NamedTuple):
    """What to read for a View: ``span`` elements from each of ``starts``, one behind the other, and the ``stride`` there."""

    starts: np.ndarray
    span: int
    stride: tuple


def index_view(shape, stride, offset, index):
    """The View that an index (ints, slices, an ellipsis) selects, as NumPy selects it.

    Raises IndexError and TypeError as NumPy does.
    """
    index = index if isinstance(index, tuple) else (index,)
    index = tuple(
        [
            item if isinstance(item, slice) or item is Ellipsis else whole_index(item)
            for item in index
        ]
    )
    dots = sum(i is Ellipsis for i in index)
    if dots > 1:
        raise IndexError("an index can have one ellipsis only")
    missing = len(shape) - (len(index) - dots)
    if missing < 0:
        raise IndexError(f"{len(index) - dots} indices for a tensor of {len(shape)} dimensions")
    at = index.index(Ellipsis) if dots else len(index)
    index = (*index[:at], *[slice(None)] * missing, *index[at + dots :])
    new_shape, new_stride = [], []
    for axis, (item, size, step) in enumerate(zip(index, shape, stride, strict=True)):
        if isinstance(item, slice):
            start, stop, by = item.indices(size)
            if by < 0:
                raise ValueError("a slice must go forward; read it and turn what you get round")
            count = max(0, -(-(stop - start) // by))
            offset += start * step if count else 0
            new_shape.append(count)
            new_stride.append(
                step * by if count > 1 else step
            )  # of one element it means nothing, and must not overflow
        else:
            if not -size <= item < size:
                raise IndexError(
                    f"index {item} is out of bounds for dimension {axis} of size {size}"
                )
            offset += (item + size if item < 0 else item) * step
    return View(offset, tuple(new_shape), tuple(new_stride))


def whole_index(item):
    """The int that an index stands for, be it NumPy's or torch's; TypeError for what selects in any other way."""
    boolean = isinstance(item, bool) or str(getattr(item, "dtype", "")).endswith("bool")
    if hasattr(item, "__index__") and not boolean and tuple(getattr(item, "shape", ())) == ():
        return operator.index(item)
    raise TypeError(
        f"only ints, slices and an ellipsis select a part, not {type(item).__name__}; read it and index what you get"
    )


def runs_of(view, itemsize):
    """The fewest reads for a View that do not read much more than it needs.

    The dimensions that lie densest are read whole, with what is between their elements; the others give one run each.
    """
    numel = 1
    for size in view.shape:
        numel *= size
    if not numel:
        return Runs(np.empty(0, dtype=np.int64), 0, view.stride)
    axes = sorted(
        (a for a, n in enumerate(view.shape) if n > 1 and view.stride[a]),
        key=lambda a: -view.stride[a],
    )
    inner = len(axes)
    span, useful = 1, 1
    best = (1, inner)
    while inner:
        inner -= 1
        axis = axes[inner]
        span += (view.shape[axis] - 1) * view.stride[axis]
        useful *= view.shape[axis]
        if span * itemsize <= max(WASTE * useful * itemsize, NEAR):
            best = (span, inner)
    span, inner = best
    stride = [0] * len(view.shape)
    starts = np.array([view.offset], dtype=np.int64)
    rows = span
    for axis in reversed(axes[:inner]):  # the densest of them varies fastest
        stride[axis] = rows
        rows *= view.shape[axis]
    for axis in axes[:inner]:
        steps = np.arange(view.shape[axis], dtype=np.int64) * view.stride[axis]
        starts = (starts[:, None] + steps[None, :]).reshape(-1)
    for axis in axes[inner:]:
        stride[axis] = view.stride[axis]
    for axis in reversed(
        range(len(stride))
    ):  # one element needs no stride; torch prefers that of a contiguous tensor
        if view.shape[axis] == 1:
            stride[axis] = (
                max(1, stride[axis + 1] * view.shape[axis + 1]) if axis + 1 < len(stride) else 1
            )
    return Runs(starts, span, tuple(stride))
