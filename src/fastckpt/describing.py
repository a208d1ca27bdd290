"""Tensors and storages of torch as a pickle names them, and where their bytes are."""

from typing import Any, NamedTuple

import numpy as np

from ._describer import Describer
from ._pickler import dump
from .blocks import Block, Moves, interval, make_small, merged
from .needs_torch import torch
from .stand_ins import refusing

# Tensors on these have storages whose bytes torch can copy; others are pickled as their own __reduce_ex__ says.
PLAIN_DEVICES = ("cpu", "cuda", "xpu", "mps")
# Those without a storage class of their own: their storages are bytes.
NEW_DTYPES = torch.storage._new_dtypes()
PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_affine_float_qparams)
NAMED = hasattr(
    torch.Tensor, "has_names"
)  # torch before 2.13 has dimensions with names, and refuses to save them


def describe(obj, protocol=2, *, compact=False, dtype=None):
    """Describe an object: a Description.

    ``compact``: only what tensors look at of their storages. ``dtype``: what floating tensors are cast to.
    Raises what Pickler raises; RuntimeError where two tensors look at the same memory as different types.
    """
    check_dtype(dtype)
    seen = looked_at(obj, protocol) if compact else Views()
    storages = (Storages if dtype is None else Casting)(dtype, seen.kept())
    pickled = storages.dump(obj, protocol)
    del seen  # it held the storages of the first round, so that none of the second could be taken for one of them
    return Description(pickled, storages)


def storages_by_name(values, protocol=2, *, compact=False, dtype=None):
    """({name: numbers of the storages that a value has}, bytes of each storage) of a dict, as ``describe`` would have them."""
    check_dtype(dtype)
    seen = looked_at(values, protocol) if compact else Views()
    storages = Noting(dtype, seen.kept())
    numbers = {}
    for name, value in values.items():
        numbers[name] = storages.noted = set()
        storages.dump(value, protocol)
    del seen
    return numbers, Description(b"", storages).nbytes


def check_dtype(dtype):
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype={dtype!r}: a floating torch.dtype is expected, or None")


def looked_at(obj, protocol):
    """The Views of an object."""
    views = Views()
    views.dump(obj, protocol)
    return views


class Description:
    """A pickle, and what is to be written for its storages, by number.

    ``nbytes`` and ``address`` are columns (an address is 0 where ``blocks`` has a Block); ``storages`` keeps the memory alive.
    """

    def __init__(self, pickled, storages):
        self.pickle, self.storages, self.blocks = pickled, storages, storages.blocks()
        self.made = None  # keeps alive what make_small made
        self.nbytes = np.array(storages.nbytes, dtype=np.int64)
        for number, block in self.blocks.items():
            self.nbytes[number] = block.nbytes
        here = [address or 0 for address in storages.address]
        self.address = np.array(here, dtype=np.int64)
        self.address[list(self.blocks)] = 0
        storages.check_unchanged()

    def make_small(self):
        """Make what is small and not in memory as it is to be written, as far as there is room; it counts as other memory then."""
        places, self.made = make_small(self.blocks)
        for number, address in places.items():
            self.address[number] = address if self.blocks.pop(number).nbytes else 0

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

    def dump(self, obj, protocol):
        """The pickle of an object."""
        describers = {torch.Tensor: self.describe, **refusing(obj)}
        return dump(obj, protocol, describers, self.persistent_id)

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
            if self.cast_to in NEW_DTYPES and dtype.is_floating_point:
                raise TypeError(
                    f"dtype={self.cast_to}: bare storages and tensors with attributes can't be cast to it, for it has no "
                    f"storage class; cast the others before and save without dtype="
                )
            storage_class = kind.storage_class
            numel = storage.nbytes() if kind.units == kind.itemsize else numel * kind.units
        elif torch.is_storage(obj):
            storage, dtype, numel = obj, torch.uint8, obj.nbytes()
            kind = Kind.of(dtype)
            storage_class = torch.serialization.normalize_storage_type(type(obj))
        else:
            return None
        on_cpu = storage.device.type == "cpu"
        key = self.key(storage, dtype, kind.taken_for, on_cpu)
        return storage_class, key, self.location(storage), numel

    def blocks(self):
        """{number: Block} of the storages that are no memory that could be written as it is."""
        chosen = range(len(self.storages))
        if not self.moves and self.cast_to is None:
            chosen = [number for number, address in enumerate(self.address) if address is None]
        blocks = {}
        for number in chosen:
            storage, dtype = self.storages[number], self.dtypes[number]
            move = self.moves.get(storage._cdata)
            cast_to = self.cast_to if dtype.is_floating_point else None
            if move or cast_to not in (None, dtype) or self.address[number] is None:
                address, ranges = self.address[number], move and move.ranges
                blocks[number] = Block(storage, dtype, address, ranges, cast_to)
        return blocks

    def check_unchanged(self):
        """Raise RuntimeError where an object resized a storage while it was pickled."""
        for storage, address, nbytes in zip(self.storages, self.address, self.nbytes, strict=True):
            if storage.nbytes() != nbytes or (
                address is not None and storage.data_ptr() != address
            ):
                raise RuntimeError(
                    "a storage was resized while it was being saved; save it when nobody does that"
                )


class Casting(Storages):
    """Storages that are cast on their way."""

    def describe(self, tensor):
        if self.cast_to and tensor.is_quantized and tensor.qscheme() in PER_CHANNEL:
            raise TypeError(
                f"dtype={self.cast_to}: a tensor that is quantized by channel has scales, which would be cast, too; save it "
                f"without dtype="
            )
        return super().describe(tensor)

    def persistent_id(self, obj):
        # A parameter brings its data as a plain tensor.
        tensor = isinstance(obj, torch.Tensor) and not isinstance(obj, torch.nn.Parameter)
        if tensor and self.cast_to not in (None, obj.dtype) and is_float_without_class(obj.dtype):
            raise TypeError(
                f"dtype={self.cast_to}: a tensor of {obj.dtype} that has attributes, or is of a class of its own, can't be cast, "
                f"for it has a storage of bytes; cast it before and save without dtype="
            )
        return super().persistent_id(obj)


def is_float_without_class(dtype):
    return dtype in NEW_DTYPES and dtype.is_floating_point


class Noting(Casting):
    """Storages that are noted as they are met: ``noted`` is a set of their numbers, the caller's."""

    def key(self, storage, dtype, taken_for, on_cpu):
        key = super().key(storage, dtype, taken_for, on_cpu)
        self.noted.add(int(key))
        return key


class Views(Storages):
    """A first round over an object, which finds out what tensors look at."""

    def __init__(self):
        super().__init__()
        self._intervals, self._whole = {}, set()

    def describe(self, tensor):
        row = super().describe(tensor)
        if row is not None:
            offset, shape, stride = row[5], row[6], row[7]
            cdata = tensor.untyped_storage()._cdata
            itemsize, intervals = self._intervals.setdefault(cdata, (tensor.dtype.itemsize, set()))
            if itemsize != tensor.dtype.itemsize:  # uint16 and uint8, say: they count differently
                self._whole.add(cdata)
            start, end = interval(offset, shape, stride)
            if (
                end * itemsize > tensor.untyped_storage().nbytes()
            ):  # freed by resize_, say: torch.save takes it as it is
                self._whole.add(cdata)
            elif start < end:
                intervals.add((start, end))
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
            for cdata, (_, intervals) in self._intervals.items()
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
        taken_for = torch.uint8 if dtype in NEW_DTYPES and written is dtype else dtype
        if written in NEW_DTYPES:
            more = (torch._utils._rebuild_tensor_v3, torch.UntypedStorage)
            return cls(*more, dtype.itemsize, written.itemsize, (written,), taken_for)
        storage_class = getattr(torch, torch.storage._dtype_to_storage_type_map()[written])
        function = None if is_quantized(dtype) else torch._utils._rebuild_tensor_v2
        return cls(function, storage_class, dtype.itemsize, 1, (), taken_for)


def is_quantized(dtype):
    return "qint" in str(dtype) or "quint" in str(dtype)
