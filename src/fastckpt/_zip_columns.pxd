# cython: language_level=3
"""The columns of a ZIP directory: an int64 array of shape (COLUMNS, entries)."""

from libc.stdint cimport int64_t

from ._held cimport Held, hold

cdef enum:
    C_HEADER, C_STORED, C_NBYTES, C_CRC, C_METHOD, C_FLAGS, C_NAME, C_NAME_NBYTES, C_LIMIT, C_KIND, C_COLUMNS

cdef enum:
    LOCAL_HEADER = 0x04034B50
    LOCAL_NBYTES = 30


cdef inline int64_t* hold_columns(Held* held, columns, Py_ssize_t count, int flags) except NULL:
    if count < 0:
        raise ValueError("count is negative")
    return <int64_t*> hold(held, columns, flags, C_COLUMNS * count * 8)


cdef inline int check_names(int64_t nbytes, const int64_t* cells, Py_ssize_t count) except -1:
    """See that every name of the columns lies in the buffer of ``nbytes`` that it is to be read from."""
    cdef Py_ssize_t i
    cdef int64_t at, name_nbytes
    for i in range(count):
        at, name_nbytes = cells[C_NAME * count + i], cells[C_NAME_NBYTES * count + i]
        if at < 0 or name_nbytes < 0 or at > nbytes or name_nbytes > nbytes - at:
            raise ValueError("the columns are not of this directory")
    return 0
