# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: freethreading_compatible=True
"""The inert descriptions that a pickle turns into: names, storages and tensors. No framework is needed to hold them.

Geometry is checked here, once, when a TensorSpec is made: a view that leaves its storage cannot exist.

None of these can be part of a cycle (they hold text, numbers and each other, downwards), so the garbage
collector need not look at them: it would, often, at every one of the tens of thousands of a large checkpoint.
"""

cimport cython
from cpython.long cimport PyLong_CheckExact

from .dtypes import DTYPES
from .errors import FormatError, short

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object number, int* overflow) except? -1

cdef enum:
    MAX_DTYPES = 64
cdef long long ITEMSIZE[MAX_DTYPES]
cdef long long PACKED[MAX_DTYPES]  # elements in one item
cdef int _code
for _code in range(len(DTYPES)):
    ITEMSIZE[_code] = DTYPES[_code].itemsize
    PACKED[_code] = DTYPES[_code].packed

cdef long long INT64_MAX = 0x7FFFFFFFFFFFFFFF


@cython.final
@cython.no_gc
cdef class Global:
    """A class or function that a pickle names. It is never looked up; ``known`` is its row in our own table."""

    def __init__(self, str module, str name, known=None):
        self.module, self.name, self.known = module, name, known
        self.qualname = f"{module}.{name}"
        self.storage_dtype = -1 if known is None else known.storage_dtype
        self.rebuild = REBUILD_OTHER if known is None else known.rebuild

    def __deepcopy__(self, memo):
        return self

    def __repr__(self):
        return f"<name {self.module}.{self.name}>"


@cython.final
@cython.no_gc
cdef class StorageSpec:
    """``nbytes`` bytes that tensors lie in: record ``key``, or a slice of the storage ``root``."""

    def __repr__(self):
        return f"StorageSpec({self.key!r}, {self.nbytes} bytes, {self.location!r})"


@cython.final
@cython.no_gc
cdef class StorageRef:
    """A storage as one persistent id names it: with the dtype of that id."""

    def __deepcopy__(self, memo):
        return self

    def __repr__(self):
        return f"StorageRef({self.storage.key!r}, {DTYPES[self.dtype].name})"


@cython.final
@cython.no_gc
cdef class TensorSpec:
    """A strided tensor: where it lies in its storage, in elements, checked to lie inside."""

    def __deepcopy__(self, memo):
        return self

    @property
    def itemsize(self):
        return ITEMSIZE[self.dtype]

    @property
    def nbytes(self):
        """Bytes of its elements, each counted once (not what an expanded view would take when copied)."""
        return -(-self.extent // PACKED[self.dtype]) * ITEMSIZE[self.dtype]

    def __repr__(self):
        return f"TensorSpec({DTYPES[self.dtype].name}, {self.shape}, in {self.storage.key!r})"


cdef class Leaf:
    """A leaf of an open checkpoint, which LazyTensor derives from: here is what is made and asked for of every
    tensor when tens of thousands are listed."""

    def __cinit__(self, checkpoint, leaf):
        self._checkpoint, self.leaf = checkpoint, leaf

    @property
    def shape(self):
        if type(self.leaf) is TensorSpec:
            return (<TensorSpec> self.leaf).shape
        return self._other_shape()


cdef StorageRef new_storage(str key, int dtype, long long nbytes, str location, Py_ssize_t index,
                            StorageSpec root, long long offset):
    cdef StorageSpec storage = StorageSpec.__new__(StorageSpec)
    storage.key, storage.dtype, storage.nbytes, storage.location = key, dtype, nbytes, location
    storage.index, storage.root, storage.offset = index, root, offset
    return ref_as(storage, dtype)


cdef StorageRef ref_as(StorageSpec storage, int dtype):
    cdef StorageRef ref = StorageRef.__new__(StorageRef)
    ref.storage, ref.dtype = storage, dtype
    return ref


cdef long long whole_number(object value, str what) except -1:
    """A count from the file as a C integer; only true ints that are not negative pass."""
    cdef int overflow = 0
    cdef long long number
    if not PyLong_CheckExact(value):
        raise FormatError(f"a tensor's {what} is {short(value)}, an int is expected")
    number = PyLong_AsLongLongAndOverflow(value, &overflow)
    if overflow or number < 0:
        raise FormatError(f"a tensor's {what} is {short(value)}, it must lie between 0 and 2**63 - 1")
    return number


cdef TensorSpec new_tensor(StorageRef ref, int dtype, object offset, object shape, object stride):
    """Check that every element lies inside the storage (products and sums cannot wrap), and describe the tensor."""
    cdef TensorSpec spec = TensorSpec.__new__(TensorSpec)
    cdef Py_ssize_t axis, ndim
    cdef long long size, step, span = 1, numel = 1
    cdef long long room = ref.storage.nbytes // ITEMSIZE[dtype] * PACKED[dtype]
    cdef bint empty = False, wraps = False
    spec.storage, spec.dtype, spec.index = ref.storage, dtype, -1
    spec.shape = shape if type(shape) is tuple else tuple(shape)
    spec.stride = stride if type(stride) is tuple else tuple(stride)
    spec.offset = whole_number(offset, "storage offset")
    ndim = len(spec.shape)
    if len(spec.stride) != ndim:
        raise FormatError(f"a tensor has {ndim} sizes and {len(spec.stride)} strides")
    for axis in range(ndim):
        size = whole_number(spec.shape[axis], "size")
        step = whole_number(spec.stride[axis], "stride")
        if size == 0:
            empty = True
            continue
        if numel > INT64_MAX // size:
            wraps = True
        else:
            numel *= size
        # (size - 1) * step elements beyond the ones so far, compared by division so that nothing wraps
        if size > 1 and step > 0:
            if step > (INT64_MAX - span) // (size - 1):
                span = INT64_MAX
            else:
                span += (size - 1) * step
    spec.numel = 0 if empty else numel
    spec.extent = 0 if empty else span
    if not empty and wraps:
        raise FormatError(f"a tensor of shape {spec.shape} has more than 2**63 elements")
    if not empty and (spec.offset > room or span > room - spec.offset):
        raise FormatError(
            f"a tensor of shape {spec.shape}, stride {spec.stride}, offset {spec.offset} reaches beyond its storage "
            f"{ref.storage.key!r}, which has room for {room} elements of {DTYPES[dtype].name}"
        )
    return spec


def tensor_spec(StorageRef ref, int dtype, offset, shape, stride, Py_ssize_t index=-1, bint requires_grad=False):
    """Describe a tensor from Python code; the same checks as for one from a pickle."""
    cdef TensorSpec spec = new_tensor(ref, dtype, offset, shape, stride)
    spec.index, spec.requires_grad = index, requires_grad
    return spec


def storage_spec(str key, int dtype, long long nbytes, str location, Py_ssize_t index,
                 StorageSpec root=None, long long offset=0):
    """Describe a storage from Python code; returns the StorageRef of its own dtype."""
    return new_storage(key, dtype, nbytes, location, index, root, offset)
