# cython: language_level=3
"""The storages and tensors that one pickle describes."""

from libc.stdint cimport int64_t

from ._spec cimport StorageRef, TensorSpec

cdef enum:
    MAX_NAME = 0xFFFF  # characters; no record of a ZIP has a longer name


cdef class Storages:
    cdef dict by_key
    cdef readonly list storages, tensors
    cdef bint gradients  # whether tensors may get requires_grad

    cdef StorageRef from_id(self, tuple pid, Py_ssize_t members)
    cdef StorageRef view(self, StorageRef root, object view, int64_t itemsize)
    cdef TensorSpec tensor(self, object ref, object dtype, object offset, tuple size, tuple stride, bint requires_grad)


cdef int set_bits(TensorSpec spec, object metadata) except -1
cdef object key_text(object key)
cdef tuple sizes_of(object sizes)
