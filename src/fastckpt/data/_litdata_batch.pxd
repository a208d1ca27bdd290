# cython: language_level=3
"""A batch that is filled row by row, one column for each leaf."""

from libc.stdint cimport int64_t, uint8_t

from ._litdata_layout cimport MAX_RANK, Layout

cdef enum:
    MOST_HEADER = 8 + 4 * MAX_RANK


cdef struct Column:
    uint8_t* data
    bint is_stacked  # otherwise the column is a list of objects
    int64_t row_nbytes
    int64_t leaf_nbytes  # of each leaf, with its header
    int64_t header_nbytes
    bint is_bool
    uint8_t header[MOST_HEADER]


cdef class Batch:
    cdef Layout layout
    cdef readonly int64_t rows
    cdef readonly list columns
    cdef Column* places
    cdef bint ready, has_objects

    cdef int prepare(self, const uint8_t* item, int64_t nbytes) except -1
    cdef int prepare_column(self, Py_ssize_t leaf, const uint8_t* data, int64_t nbytes) except -1
    cdef bint stack(self, int64_t row, const uint8_t* item, int64_t nbytes) noexcept nogil
    cdef int refuse(self, const uint8_t* item, int64_t nbytes) except -1
    cdef int list_objects(self, int64_t row, const uint8_t* item) except -1
