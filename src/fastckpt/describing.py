"""Tensors and storages of torch as a pickle names them, and where their bytes are."""

from typing import Any, NamedTuple

import numpy as np
import torch

from ._describer import Describer
from ._pickler import dump
from .blocks import Block, Moves, merged

# Tensors on these have storages whose bytes torch can copy; others are pickled as their own __reduce_ex__ says.
PLAIN_DEVICES = ("cpu", "cuda", "xpu", "mps")
# Those without a storage class of their own: their storages are bytes.
NEW_DTYPES = torch.storage._new_dtypes()
NAMED = hasattr(
    torch.Tensor, "has_names"
)  # torch before 2.13 has dimensions with names, and refuses to save them


def describe(obj, protocol=2, *, compact=False, dtype=None):
    """Describe an object: a Description.

    ``compact``: only what tensors look at of their storages. ``dtype``: what floating tensors are cast to.
    Raises what Pickler raises; RuntimeError where two tensors look at the same memory as different types.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype={dtype!r}: a floating torch.dtype is expected, or None")
    moves, seen = {}, None
    if compact:
        seen = Views()
        dump(obj, protocol, {torch.Tensor: seen.describe}, seen.persistent_id)
        moves = seen.kept()
    storages = Storages(dtype, moves)
    pickled = dump(obj, protocol, {torch.Tensor: storages.describe}, storages.persistent_id)
    del seen  # it held the storages of the first round, so that none of the second could be taken for one of them
    return Description(pickled, storages)


class Description:
    """A pickle, and what is to be written for its storages, by number.

    ``nbytes`` and ``address`` are columns (an address is 0 where ``blocks`` has a Block); ``storages`` keeps the memory alive.
    """

    def __init__(self, pickled, storages):
        self.pickle, self.storages, self.blocks = pickled, storages, storages.blocks()
        self.nbytes = np.array(storages.nbytes, dtype=np.int64)
        for number, block in self.blocks.items():
            self.nbytes[number] = block.nbytes
        here = [address or 0 for address in storages.address]
        self.address = np.array(here, dtype=np.int64)
        self.address[list(self.blocks)] = 0

    def extents(self):
        """Memory that is to be written as it is: int64 columns of (number, address, nbytes), in the order of the numbers."""
        number = np.flatnonzero(self.address)
        columns = np.array([number, self.address[number], self.nbytes[number]])
        parts = [(n, *e) for n, block in self.blocks.items() for e in block.extents or ()]
        if parts:
            columns = np.hstack([columns, np.array(parts, dtype=np.int64).T])
            columns = columns[:, np.argsort(columns[0], kind="stable")]
        return columns


class Storages(Describer):
    """The storages of one pickle: ``describe`` gives rows for tensors, ``persistent_id`` for bare storages."""

    def __init__(self, cast_to=None, moves=None):
        tagger = torch.serialization._package_registry[0][1]
        super().__init__(torch.strided, moves or {}, tagger is torch.serialization._cpu_tag, NAMED)
        self.cast_to = cast_to

    def new_kind(self, dtype):
        return Kind.of(dtype, self.cast_to)

    def has_plain_device(self, tensor):
        return tensor.device.type in PLAIN_DEVICES

    def location(self, storage):
        return torch.serialization.location_tag(storage)

    def metadata(self, tensor):
        return torch._utils.get_tensor_metadata(tensor)

    def persistent_id(self, obj):
        """(class, key, location, numel) of a storage, None for anything else."""
        if isinstance(obj, torch.storage.TypedStorage):
            storage, dtype, numel = obj._untyped_storage, obj.dtype, obj._size()
            kind = Kind.of(dtype, self.cast_to)
            storage_class, numel = kind.storage_class, numel * kind.units
        elif torch.is_storage(obj):
            storage, dtype, numel = obj, torch.uint8, obj.nbytes()
            kind = Kind.of(dtype)
            storage_class = torch.serialization.normalize_storage_type(type(obj))
        else:
            return None
        on_cpu = storage.device.type == "cpu"
        key = self.key(storage, dtype, kind.taken_for, on_cpu, storage)
        return storage_class, key, self.location(storage), numel

    def blocks(self):
        """{number: Block} of the storages that are no memory that could be written as it is."""
        chosen = range(len(self.holders))
        if not self.moves and self.cast_to is None:
            chosen = [number for number, address in enumerate(self.address) if address is None]
        blocks = {}
        for number in chosen:
            storage, dtype = storage_of(self.holders[number]), self.dtypes[number]
            move = self.moves.get(storage._cdata)
            cast_to = self.cast_to if dtype.is_floating_point else None
            if move or cast_to not in (None, dtype) or self.address[number] is None:
                address, ranges = self.address[number], move and move.ranges
                blocks[number] = Block(storage, dtype, address, ranges, cast_to)
        return blocks


def storage_of(holder):
    """The storage of a tensor, or the storage itself."""
    return holder.untyped_storage() if isinstance(holder, torch.Tensor) else holder


class Views(Storages):
    """A first round over an object, which finds out what tensors look at."""

    def __init__(self):
        super().__init__()
        self._intervals, self._whole = {}, set()

    def describe(self, tensor):
        row = super().describe(tensor)
        if row is not None:
            offset, shape, stride = row[5], row[6], row[7]
            intervals = self._intervals.setdefault(tensor.untyped_storage()._cdata, set())
            if 0 not in shape:
                last = sum([(size - 1) * step for size, step in zip(shape, stride, strict=True)])
                intervals.add((offset, offset + last + 1))
        return row

    def persistent_id(self, obj):
        row = super().persistent_id(obj)
        if row is not None:
            storage = getattr(obj, "_untyped_storage", obj)
            self._whole.add(storage._cdata)
        return row

    def kept(self):
        """{_cdata: Moves} of storages that nobody asks for as such."""
        return {
            cdata: Moves(merged(intervals))
            for cdata, intervals in self._intervals.items()
            if cdata not in self._whole
        }


class Kind(NamedTuple):
    """How tensors of a dtype are written: ``function`` is None where their own __reduce_ex__ knows better.

    ``itemsize`` is that of the dtype in memory, ``units`` what the storage counts in an element, ``more`` the arguments behind
    those that all tensors have, ``taken_for`` the dtype that the storage is taken for.
    """

    function: Any
    storage_class: type
    itemsize: int
    units: int
    more: tuple
    taken_for: torch.dtype

    @classmethod
    def of(cls, dtype, cast_to=None):
        written = cast_to if cast_to is not None and dtype.is_floating_point else dtype
        taken_for = torch.uint8 if dtype in NEW_DTYPES else dtype
        if written in NEW_DTYPES:
            more = (torch._utils._rebuild_tensor_v3, torch.UntypedStorage)
            return cls(*more, dtype.itemsize, written.itemsize, (written,), taken_for)
        storage_class = getattr(torch, torch.storage._dtype_to_storage_type_map()[written])
        function = None if is_quantized(dtype) else torch._utils._rebuild_tensor_v2
        return cls(function, storage_class, dtype.itemsize, 1, (), taken_for)


def is_quantized(dtype):
    return "qint" in str(dtype) or "quint" in str(dtype)
