"""Tensors and storages of torch as a pickle names them, and where their bytes are."""

import torch

from ._pickler import dump
from .blocks import Block, Moves, merged

# Tensors on these have storages whose bytes torch can copy; others are pickled as their own __reduce_ex__ says.
PLAIN_DEVICES = ("cpu", "cuda", "xpu", "mps")
NAMED = hasattr(
    torch.Tensor, "has_names"
)  # torch before 2.13 has dimensions with names, and refuses to save them


def describe(obj, protocol=2, *, compact=False, dtype=None):
    """(pickle, Blocks in the order of their keys) of an object.

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
    return pickled, storages.blocks()


class Storages:
    """The storages of one pickle: ``describe`` gives rows for tensors, ``persistent_id`` for bare storages.

    ``moves`` says for storages (by their _cdata) which elements are kept, and where they go.
    """

    def __init__(self, cast_to=None, moves=None):
        self.cast_to, self.moves = cast_to, moves or {}
        self._found, self._keys, self._types, self._kinds = [], {}, {}, {}
        tagger = torch.serialization._package_registry[0][1]
        self._cpu_is_cpu = tagger is torch.serialization._cpu_tag

    def describe(self, tensor):
        """The row of a plain tensor (see Pickler); None for what its own __reduce_ex__ knows better."""
        if not is_plain(tensor):
            return None
        dtype = tensor.dtype
        kind = self._kinds.get(dtype)
        if kind is None:
            kind = self._kinds[dtype] = Kind(dtype, self.cast_to)
        if kind.function is None:
            return None
        storage, offset, more = tensor.untyped_storage(), tensor.storage_offset(), kind.more
        on_cpu = tensor.is_cpu
        key = self.key(storage, dtype, kind.saved_as, on_cpu)
        move = self.moves.get(storage._cdata) if self.moves else None
        if move is None:
            numel = storage.nbytes() // dtype.itemsize
        else:
            numel, offset = move.count, move(offset) if tensor.numel() else 0
        if tensor.is_conj() or tensor.is_neg():
            more = (*more, torch._utils.get_tensor_metadata(tensor))
        return (
            kind.function,
            kind.storage_class,
            key,
            "cpu" if on_cpu and self._cpu_is_cpu else torch.serialization.location_tag(storage),
            numel * kind.units,
            offset,
            tensor.shape,
            tensor.stride(),
            tensor.requires_grad,
            more,
        )

    def persistent_id(self, obj):
        """(class, key, location, numel) of a storage, None for anything else."""
        if isinstance(obj, torch.storage.TypedStorage):
            storage, dtype, numel = obj._untyped_storage, obj.dtype, obj._size()
            kind = Kind(dtype, self.cast_to)
            storage_class, numel = kind.storage_class, numel * kind.units
        elif torch.is_storage(obj):
            storage, dtype, numel = obj, torch.uint8, obj.nbytes()
            storage_class = torch.serialization.normalize_storage_type(type(obj))
        else:
            return None
        on_cpu = storage.device.type == "cpu"
        key = self.key(storage, dtype, saved_as(dtype), on_cpu)
        return storage_class, key, torch.serialization.location_tag(storage), numel

    def key(self, storage, dtype, taken_for, on_cpu):
        """The key of a storage that is looked at as ``dtype``; ``taken_for`` is what the file will say."""
        address = storage.data_ptr()  # 0 on the meta device, and where nothing is allocated
        if address and self._types.setdefault(address, taken_for) is not taken_for:
            raise RuntimeError(
                f"two tensors look at the same memory as {self._types[address]} and as {taken_for}, which a checkpoint "
                f"can't express; clone one of them"
            )
        key = self._keys.get(storage._cdata)
        if key is None:
            key = self._keys[storage._cdata] = str(len(self._found))
            self._found.append((storage, dtype, address if on_cpu else None))
        return key

    def blocks(self):
        """What is to be written, in the order of the keys."""
        if not self.moves and self.cast_to is None:
            return [Block(*found) for found in self._found]
        blocks = []
        for storage, dtype, address in self._found:
            move = self.moves.get(storage._cdata)
            cast_to = self.cast_to if dtype.is_floating_point else None
            blocks.append(Block(storage, dtype, address, move and move.ranges, cast_to))
        return blocks


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


class Kind:
    """How tensors of a dtype are written: function None where there is no simple way.

    ``units``: what the storage counts in an element; ``more``: arguments behind those that all tensors have.
    """

    def __init__(self, dtype, cast_to=None):
        self.saved_as = saved_as(dtype)
        if cast_to is not None and dtype.is_floating_point:
            dtype = cast_to
        self.function, self.units, self.more = None, 1, ()
        if dtype in NEW_DTYPES:
            self.function, self.storage_class = (
                torch._utils._rebuild_tensor_v3,
                torch.UntypedStorage,
            )
            self.units, self.more = dtype.itemsize, (dtype,)
            return
        name = torch.storage._dtype_to_storage_type_map()[dtype]
        self.storage_class = getattr(torch, name)
        if not is_quantized(dtype):
            self.function = torch._utils._rebuild_tensor_v2


def is_plain(tensor):
    """Whether a row says all there is to a tensor."""
    return (
        tensor.layout is torch.strided
        and (tensor.is_cpu or tensor.device.type in PLAIN_DEVICES)
        and not tensor.is_nested
        and not tensor.__dict__
        and not tensor._backward_hooks
        and not (NAMED and tensor.has_names())
    )


def is_quantized(dtype):
    return "qint" in str(dtype) or "quint" in str(dtype)


def saved_as(dtype):
    """The dtype that a storage is taken for: those without a storage class of their own are bytes."""
    return torch.uint8 if dtype in NEW_DTYPES else dtype


NEW_DTYPES = torch.storage._new_dtypes()
