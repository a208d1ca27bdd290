# cython: language_level=3
"""The columns of a ZIP directory: an int64 array of shape (COLUMNS, entries)."""

from libc.stdint cimport int64_t

from ._held cimport Held, hold

cdef enum:
    C_HEADER, C_STORED, C_NBYTES, C_CRC, C_METHOD, C_FLAGS, C_NAME, C_NAME_NBYTES, C_LIMIT, C_KIND, C_COLUMNS

cdef enum:
    LOCAL_HEADER = 0x04034B50
    LOCAL_NBYTES = 30

cdef enum:
    METHOD_STORED = 0
    METHOD_DEFLATED = 8
    # Flags that make the bytes something else than the content: encrypted, patch data, strong encryption, masked.
    FLAGS_UNREADABLE = 0x0001 | 0x0020 | 0x0040 | 0x2000
    # Deflate makes at most 258 bytes out of 2 bits; zlib's own documentation gives this ratio.
    MOST_INFLATED = 1032


cdef inline bint is_unusable(const int64_t* cell, int64_t count) noexcept nogil:
    """Whether an entry, by the first of its cells, cannot be read by what the directory says of it."""
    cdef int64_t method = cell[C_METHOD * count], stored = cell[C_STORED * count], nbytes = cell[C_NBYTES * count]
    if cell[C_FLAGS * count] & FLAGS_UNREADABLE:
        return True
    if method == METHOD_STORED:
        return stored != nbytes
    # An empty deflate stream has two bytes; no sum or product here leaves 64 bits.
    return method != METHOD_DEFLATED or nbytes // MOST_INFLATED > stored or (nbytes > 0 and stored == 0)


cdef inline bint has_name_inside(int64_t nbytes, const int64_t* cell, int64_t count) noexcept nogil:
    """Whether the name of an entry lies in the buffer of ``nbytes`` that it is to be read from."""
    cdef int64_t at = cell[C_NAME * count], name_nbytes = cell[C_NAME_NBYTES * count]
    return at >= 0 and name_nbytes >= 0 and at <= nbytes and name_nbytes <= nbytes - at


cdef inline int64_t* hold_columns(Held* held, columns, Py_ssize_t count, int flags) except NULL:
    if count < 0:
        raise ValueError("count is negative")
    return <int64_t*> hold(held, columns, flags, C_COLUMNS * count * 8)


cdef inline int check_names(int64_t nbytes, const int64_t* cells, Py_ssize_t count) except -1:
    """See that every name of the columns lies in its buffer."""
    cdef Py_ssize_t i
    for i in range(count):
        if not has_name_inside(nbytes, cells + i, count):
            raise ValueError("the columns are not of this directory")
    return 0
