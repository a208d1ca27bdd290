# cython: language_level=3, boundscheck=False, wraparound=False, freethreading_compatible=True
"""CRC-32 of bytes-like objects, by a kernel that can be named; ZIP's and zlib's polynomial.

The choice of a kernel is a number that native readers pass on (``kernel_id``); nothing here remembers it.
"""

import os

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint32_t, uint64_t

cdef extern from "crc32.h" nogil:
    enum:
        CRC32_KERNELS
        CRC32_NOT_BUILT
        CRC32_USABLE
    const char* crc32_kernel_name(int kernel)
    int crc32_usable(int kernel)
    int crc32_best()
    uint32_t crc32_update(int kernel, uint32_t crc, const void* data, size_t nbytes)
    uint32_t crc32_join(uint32_t first, uint32_t second, uint64_t second_nbytes)

# Below this, giving the GIL away and getting it back costs more than the sum itself (1 us at 16 GB/s).
cdef enum:
    GIL_KEPT_BELOW = 16384


def all_kernels():
    """Name every kernel there is, on any CPU."""
    return tuple([crc32_kernel_name(kernel).decode() for kernel in range(CRC32_KERNELS)])


def kernels():
    """Name the kernels that this CPU can run, the portable one first."""
    return tuple([name for kernel, name in enumerate(all_kernels()) if crc32_usable(kernel) == CRC32_USABLE])


def default_kernel():
    """Name the kernel that is used when none is asked for.

    The fastest, or what ``FASTCKPT_CRC`` demands: ValueError for an unknown name, RuntimeError for a kernel that
    cannot run here.
    """
    return all_kernels()[kernel_id(None)]


def kernel_id(name=None):
    """Turn a kernel's name into its number; None asks for ``default_kernel()``. Raises like it."""
    asked = ""
    if name is None:
        name = os.environ.get("FASTCKPT_CRC")
        if not name:
            return crc32_best()
        asked = "FASTCKPT_CRC: "
    names = all_kernels()
    if name not in names:
        raise ValueError(f"{asked}CRC-32 kernel {name!r} is unknown (expected one of: {', '.join(names)})")
    kernel = names.index(name)
    usable = crc32_usable(kernel)
    if usable != CRC32_USABLE:
        why = "is not built for this platform" if usable == CRC32_NOT_BUILT else "needs a CPU feature that is missing"
        raise RuntimeError(f"{asked}CRC-32 kernel {name!r} {why} (usable here: {', '.join(kernels())})")
    return kernel


def crc32(data, value=0, kernel=None):
    """Compute the CRC-32 of ``data``, continuing from ``value`` (the CRC of what came before)."""
    cdef int number = kernel_id(kernel)
    cdef uint32_t crc = value & 0xFFFFFFFF
    cdef Py_buffer buffer
    PyObject_GetBuffer(data, &buffer, PyBUF_SIMPLE)
    try:
        if buffer.len < GIL_KEPT_BELOW:
            crc = crc32_update(number, crc, buffer.buf, buffer.len)
        else:
            with nogil:
                crc = crc32_update(number, crc, buffer.buf, buffer.len)
    finally:
        PyBuffer_Release(&buffer)
    return crc


def combine(crc1, crc2, nbytes2):
    """Compute the CRC-32 of two pieces put together from theirs and the length of the second."""
    if nbytes2 < 0:
        raise ValueError(f"nbytes2={nbytes2}: a length cannot be negative")
    return crc32_join(crc1 & 0xFFFFFFFF, crc2 & 0xFFFFFFFF, nbytes2)
