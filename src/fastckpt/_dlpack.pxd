# cython: language_level=3
"""Memory handed over as a DLPack capsule (the structures of github.com/dmlc/dlpack's dlpack.h, version 0).

A maker fills a DLManagedTensor, allocated together with room for shape and strides, and wraps it in a capsule that is
named DLPACK_UNUSED. Whoever takes the capsule calls the deleter once, from any thread, perhaps without the GIL.
"""

from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint64_t

cdef extern from "Python.h":
    # Declared with bare pointers: a destructor must not count references to an object that is being destroyed.
    object PyCapsule_New(void*, const char*, void (*)(PyObject*) noexcept)
    bint PyCapsule_IsValid(PyObject*, const char*)
    void* PyCapsule_GetPointer(PyObject*, const char*)

cdef struct DLDataType:
    uint8_t code
    uint8_t bits
    uint16_t lanes

cdef struct DLTensor:
    void* data
    int32_t device_type
    int32_t device_id
    int32_t ndim
    DLDataType dtype
    int64_t* shape
    int64_t* strides
    uint64_t byte_offset

cdef struct DLManagedTensor:
    DLTensor tensor
    void* context
    void (*deleter)(DLManagedTensor*) noexcept nogil

cdef enum:
    ON_CPU = 1

cdef extern from *:
    """
    #define DLPACK_UNUSED "dltensor"
    """
    const char* DLPACK_UNUSED


cdef inline void describe(DLManagedTensor* managed, void* data, int ndim, int64_t* shape, int64_t* strides,
                          int dtype_code, int dtype_bits) noexcept nogil:
    """Fill in a CPU tensor; context and deleter are left to the caller."""
    managed.tensor.data = data
    managed.tensor.device_type, managed.tensor.device_id = ON_CPU, 0
    managed.tensor.ndim = ndim
    managed.tensor.dtype.code, managed.tensor.dtype.bits, managed.tensor.dtype.lanes = dtype_code, dtype_bits, 1
    managed.tensor.shape, managed.tensor.strides, managed.tensor.byte_offset = shape, strides, 0


cdef inline void drop_unused(PyObject* capsule) noexcept:
    """The destructor of a capsule that nobody took over."""
    cdef DLManagedTensor* managed
    if PyCapsule_IsValid(capsule, DLPACK_UNUSED):
        managed = <DLManagedTensor*> PyCapsule_GetPointer(capsule, DLPACK_UNUSED)
        managed.deleter(managed)
