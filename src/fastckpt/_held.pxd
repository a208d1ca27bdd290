# cython: language_level=3
"""Buffers held for the length of a function: ``hold`` each, and ``release`` all of them in one ``finally``."""

from cpython.buffer cimport PyBuffer_Release, PyObject_GetBuffer


cdef struct Held:
    Py_buffer view[5]
    int count  # set it to 0 before the first hold


cdef inline void* hold(Held* held, obj, int flags, Py_ssize_t nbytes) except NULL:
    """Keep a buffer of ``nbytes`` bytes (-1: any number); PyBUF_SIMPLE or PyBUF_WRITABLE."""
    cdef Py_buffer* view = &held.view[held.count]
    PyObject_GetBuffer(obj, view, flags)
    held.count += 1
    if nbytes != -1 and view.len != nbytes:
        raise ValueError(f"a buffer of {nbytes} bytes is needed, this one has {view.len}")
    # an empty buffer may point nowhere, and NULL means an error
    return view.buf if view.buf != NULL else <void*> view


cdef inline void release(Held* held) noexcept:
    while held.count:
        held.count -= 1
        PyBuffer_Release(&held.view[held.count])
