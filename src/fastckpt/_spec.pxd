# cython: language_level=3
"""The inert descriptions that a pickle turns into, for native code that makes or reads many of them."""

cimport cython


@cython.final
cdef class Global:
    cdef readonly str module
    cdef readonly str name
    cdef readonly str qualname  # made once: the file decides how long it is, and how often it is asked for
    cdef readonly object known  # the row of the table of known names, or None
    cdef readonly int storage_dtype  # dtype code where this is a storage class, else -1
    cdef readonly int rebuild  # one of the REBUILD_ numbers below


cdef enum:
    REBUILD_OTHER = 0
    REBUILD_TENSOR = 1  # torch._utils._rebuild_tensor
    REBUILD_TENSOR_V2 = 2
    REBUILD_TENSOR_V3 = 3
    REBUILD_ORDERED_DICT = 4


@cython.final
cdef class StorageSpec:
    cdef readonly str key
    cdef readonly int dtype  # of the first id that named it
    cdef readonly long long nbytes
    cdef readonly str location
    cdef readonly Py_ssize_t index  # its place among the storages of its pickle
    cdef readonly StorageSpec root  # the storage this one is a slice of, or None
    cdef readonly long long offset  # bytes from the start of root


@cython.final
cdef class StorageRef:
    cdef readonly StorageSpec storage
    cdef readonly int dtype


@cython.final
cdef class TensorSpec:
    cdef readonly StorageSpec storage
    cdef readonly int dtype
    cdef readonly long long offset  # elements of dtype from the start of the storage
    cdef readonly tuple shape
    cdef readonly tuple stride
    cdef readonly long long numel
    cdef readonly long long extent  # elements from the first to one past the last that a view touches
    cdef readonly bint requires_grad
    cdef readonly bint conj
    cdef readonly bint neg
    cdef readonly Py_ssize_t index  # its place among the tensors of its pickle


cdef StorageRef new_storage(str key, int dtype, long long nbytes, str location, Py_ssize_t index,
                            StorageSpec root, long long offset)
cdef StorageRef ref_as(StorageSpec storage, int dtype)
cdef TensorSpec new_tensor(StorageRef ref, int dtype, object offset, object shape, object stride)


cdef class Leaf:
    cdef readonly object _checkpoint
    cdef readonly object leaf
