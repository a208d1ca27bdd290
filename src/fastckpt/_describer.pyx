# cython: language_level=3, boundscheck=False, wraparound=False
# cython: freethreading_compatible=True
"""The rows of plain tensors, for a pickler: the part of describing that is done for each of tens of thousands."""


cdef class Describer:
    """Numbers the storages of one pickle in the order in which they are met: columns of their ``nbytes``, ``address``
    (None where that is not the CPU's), ``dtypes``, and the ``storages`` themselves, which must outlive what an object
    does while it is pickled: a tensor may get another storage meanwhile.

    ``kinds``: dtype -> Kind, filled by ``new_kind(dtype)`` as dtypes are met; ``moves`` says for storages (by their
    _cdata) where elements go; ``plain_cpu``: whether "cpu" is what storages on the CPU are tagged with, as it is unless
    somebody registered another tagger before torch's; ``strided`` is torch's layout of that name.
    """

    cdef readonly dict kinds, keys, types, moves
    cdef readonly list nbytes, address, dtypes, storages
    cdef object strided
    cdef bint plain_cpu, named

    def __init__(self, strided, dict moves, bint plain_cpu, bint named):
        self.kinds, self.keys, self.types, self.moves = {}, {}, {}, moves
        self.nbytes, self.address, self.dtypes, self.storages = [], [], [], []
        self.strided, self.plain_cpu, self.named = strided, plain_cpu, named

    def describe(self, tensor):
        """The row of a tensor (see Pickler.save_tensor); None for what its own __reduce_ex__ knows better."""
        cdef bint on_cpu = tensor.is_cpu
        if (
            tensor.layout is not self.strided
            or not (on_cpu or self.has_plain_device(tensor))
            or tensor.is_nested
            or tensor.__dict__
            or tensor._backward_hooks  # an empty dict after torch.load
            or (self.named and tensor.has_names())
        ):
            return None
        dtype = tensor.dtype
        kind = self.kinds.get(dtype)
        if kind is None:
            kind = self.kinds[dtype] = self.new_kind(dtype)
        function, storage_class, itemsize, units, more, taken_for = kind
        if function is None:
            return None
        storage = tensor.untyped_storage()
        offset = tensor.storage_offset()
        key = self.key(storage, dtype, taken_for, on_cpu)
        move = self.moves.get(storage._cdata) if self.moves else None
        if move is not None:
            numel, offset = move.count * units, move(offset, tensor.shape, tensor.stride())
        elif units == itemsize:  # in bytes, of which there may be more than whole elements
            numel = storage.nbytes()
        else:
            numel = storage.nbytes() // itemsize * units
        if tensor.is_neg() or tensor.is_conj():
            more = (*more, self.metadata(tensor))
        location = "cpu" if on_cpu and self.plain_cpu else self.location(storage)
        return (function, storage_class, key, location, numel, offset, tensor.shape, tensor.stride(),
                tensor.requires_grad, more)

    cpdef str key(self, storage, dtype, taken_for, bint on_cpu):
        """The key of a storage that is looked at as ``dtype``; ``taken_for`` is what the file will say."""
        address = storage.data_ptr()  # 0 on the meta device, and where nothing is allocated
        if address and self.types.setdefault(address, taken_for) is not taken_for:
            raise RuntimeError(
                f"two tensors look at the same memory as {self.types[address]} and as {taken_for}, which a checkpoint "
                f"can't express; clone one of them"
            )
        cdata = storage._cdata
        key = self.keys.get(cdata)
        if key is None:
            key = self.keys[cdata] = str(len(self.storages))
            self.storages.append(storage)
            self.nbytes.append(storage.nbytes())
            self.address.append(address if on_cpu else None)
            self.dtypes.append(dtype)
        return key
