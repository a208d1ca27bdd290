# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: freethreading_compatible=True
"""The storages and tensors that one pickle describes: persistent ids and geometry into specs, as they appear."""

from ._spec cimport Global, StorageSpec, new_storage, new_tensor, ref_as

from .dtypes import COMPLEX, DTYPES, FLOATING
from .errors import FormatError, short
from .nodes import Node, Opaque

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object, int* overflow) except? -1
    bint PyLong_CheckExact(object)
    bint PyTuple_CheckExact(object)
    bint PyUnicode_CheckExact(object)
    Py_ssize_t PyUnicode_GET_LENGTH(object)

cdef frozenset COMPLEX_CODES = COMPLEX
cdef frozenset FLOATING_CODES = FLOATING
cdef int64_t INT64_MAX = 0x7FFFFFFFFFFFFFFF
cdef enum:
    MAX_DTYPES = 64
cdef int64_t ITEMSIZE[MAX_DTYPES]
cdef int _code
for _code in range(len(DTYPES)):
    ITEMSIZE[_code] = DTYPES[_code].itemsize


cdef class Storages:
    """``storages`` and ``tensors`` are lists of specs; the ``index`` of each is its place there."""

    def __init__(self, storages=(), tensors=(), bint gradients=True):
        self.by_key, self.storages, self.tensors, self.gradients = {}, list(storages), list(tensors), gradients

    cdef TensorSpec tensor(self, object ref, object dtype, object offset, tuple size, tuple stride, bint requires_grad):
        """A strided tensor in a storage that a persistent id named; ``dtype`` None takes that of the id."""
        cdef TensorSpec spec
        cdef int code
        if type(ref) is not StorageRef:
            raise FormatError(f"a tensor lies in {short(ref)}, a storage is expected")
        code = (<StorageRef> ref).dtype if dtype is None else dtype
        spec = new_tensor(ref, code, offset, size, stride)
        if requires_grad and code not in FLOATING_CODES:
            raise FormatError(f"a tensor of {DTYPES[code].name} wants a gradient, only floating types have one")
        spec.requires_grad = requires_grad and self.gradients
        spec.index = len(self.tensors)
        self.tensors.append(spec)
        return spec

    cdef StorageRef from_id(self, tuple pid, Py_ssize_t members):
        """A storage out of ("storage", class, key, location, count), and in legacy files a view of it."""
        cdef Py_ssize_t n = len(pid)
        cdef int overflow = 0, dtype
        cdef int64_t numel, itemsize
        cdef StorageSpec storage
        cdef StorageRef ref
        if n != members:
            raise FormatError(f"a storage's persistent id has {n} members, {members} are expected")
        cls, key, location, count = pid[1], pid[2], pid[3], pid[4]
        if type(cls) is not Global or (<Global> cls).storage_dtype < 0:
            raise FormatError(f"the storage type is {cls.qualname if type(cls) is Global else short(cls)}, which is "
                              f"not one that is known; the file may be from a newer torch, or crafted")
        dtype = (<Global> cls).storage_dtype
        itemsize = ITEMSIZE[dtype]
        if not PyUnicode_CheckExact(key):
            key = key_text(key)
        if not PyUnicode_CheckExact(location):
            location = key_text(location)
        if PyUnicode_GET_LENGTH(key) > MAX_NAME:
            raise FormatError(f"a storage is named by more than {MAX_NAME} characters")
        if not PyLong_CheckExact(count):
            raise FormatError(f"storage {key!r} has {short(count)} elements, an int is expected")
        numel = PyLong_AsLongLongAndOverflow(count, &overflow)
        if overflow or numel < 0 or numel > INT64_MAX // itemsize:
            raise FormatError(f"storage {key!r} has {short(count)} elements of {itemsize} bytes, no file can hold them")
        found = self.by_key.get(key)
        if found is None:
            ref = new_storage(key, dtype, numel * itemsize, location, len(self.storages), None, 0)
            self.storages.append(ref.storage)
            self.by_key[key] = ref.storage
        else:
            storage = found
            if storage.nbytes != numel * itemsize:
                raise FormatError(f"storage {key!r} has {storage.nbytes} bytes in one place of the pickle and "
                                  f"{numel * itemsize} in another")
            ref = ref_as(storage, dtype)
        if n == 6 and pid[5] is not None:
            return self.view(ref, pid[5], itemsize)
        return ref

    cdef StorageRef view(self, StorageRef root, object view, int64_t itemsize):
        """A slice of a storage, as torch 0.1.10 to 0.4.1 wrote them: (view key, offset, size) in elements."""
        cdef int64_t room = root.storage.nbytes // itemsize
        cdef StorageSpec storage
        cdef StorageRef ref
        if not isinstance(view, tuple) or len(view) != 3:
            raise FormatError(f"a storage view is {short(view)}, (key, offset, size) is expected")
        key, offset, size = view
        if (type(offset) is not int or type(size) is not int or offset < 0 or size < 0 or size > room
                or offset > room - size):
            raise FormatError(f"a view of {short(size)} elements at {short(offset)} lies outside its storage "
                              f"{root.storage.key!r}, which has {room}")
        name = ("view", key_text(key))
        found = self.by_key.get(name)
        if found is None:
            ref = new_storage(name[1], root.dtype, size * itemsize, root.storage.location, len(self.storages),
                              root.storage, offset * itemsize)
            self.storages.append(ref.storage)
            self.by_key[name] = ref.storage
            return ref
        storage = found
        if storage.root is not root.storage or storage.nbytes != size * itemsize or storage.offset != offset * itemsize:
            raise FormatError(f"storage view {name[1]!r} is described twice, differently")
        return ref_as(found, root.dtype)


cdef int set_bits(TensorSpec spec, object metadata) except -1:
    """The lazy conjugate and negative of a view. torch writes them only where they are true, and looks at no value."""
    if not isinstance(metadata, dict):
        raise FormatError(f"a tensor's metadata is {short(metadata)}, a dict is expected")
    spec.conj = "conj" in metadata
    spec.neg = "neg" in metadata
    if spec.conj and spec.dtype not in COMPLEX_CODES:
        raise FormatError(f"a tensor of {DTYPES[spec.dtype].name} is marked as conjugate, only complex ones can be")
    return 0


cdef object key_text(object key):
    """A storage key, location or attribute name as text; old files have ints and bytes."""
    if PyUnicode_CheckExact(key):
        return key
    if isinstance(key, bytes):
        return key.decode("latin-1")
    if type(key) is int:
        return str(key)
    if isinstance(key, Opaque) and key.qualname == "_codecs.encode" and type(key.args) is tuple and key.args:
        return key_text(key.args[0])  # bytes in a symbolic pickle of protocol 2
    raise FormatError(f"a name is {short(key)}, a string is expected")


cdef tuple sizes_of(object sizes):
    """Sizes or strides as a tuple, whatever sequence they come in (a torch.Size is a node here)."""
    if PyTuple_CheckExact(sizes):
        return sizes
    if isinstance(sizes, Node) and getattr(sizes, "kind", None) == "size":
        return sizes.args[0]
    if isinstance(sizes, list):
        return tuple(sizes)
    raise FormatError(f"a tensor's sizes are {short(sizes)}, a tuple is expected")
