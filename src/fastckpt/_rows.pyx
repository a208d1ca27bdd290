# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, freethreading_compatible=True
"""Rows of samples: copied from where they were decoded to where they belong, and numbers in them moved."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

from ._held cimport Held, hold, release

ctypedef fused integer:
    int32_t
    int64_t

# Below this the GIL is kept: getting it back from a busy thread takes longer than the copy.
cdef enum:
    GIL_KEPT_BELOW = 65536


def copy_rows(target, source, pieces, Py_ssize_t row_nbytes):
    """Copy runs of rows of ``row_nbytes`` bytes.

    ``pieces`` is an int64 table of (first row in ``source``, first row in ``target``, number of rows). Returns -1, or
    the first piece that does not lie inside of both; nothing is copied then.
    """
    cdef Held held
    cdef const char* source_at
    cdef char* target_at
    cdef const int64_t* piece
    cdef Py_ssize_t n, bad
    cdef int64_t total = 0
    if row_nbytes <= 0:
        return -1
    held.count = 0
    try:
        target_at = <char*> hold(&held, target, PyBUF_WRITABLE, -1)
        source_at = <const char*> hold(&held, source, PyBUF_SIMPLE, -1)
        piece = <const int64_t*> hold(&held, pieces, PyBUF_SIMPLE, -1)
        n = held.view[2].len // 24
        bad = first_outside(piece, n, held.view[1].len // row_nbytes, held.view[0].len // row_nbytes, &total)
        if bad >= 0:
            return bad
        if total < GIL_KEPT_BELOW // row_nbytes:
            copy_pieces(target_at, source_at, piece, n, row_nbytes)
        else:
            with nogil:
                copy_pieces(target_at, source_at, piece, n, row_nbytes)
    finally:
        release(&held)
    return -1


cdef Py_ssize_t first_outside(
    const int64_t* piece, Py_ssize_t n, int64_t source_rows, int64_t target_rows, int64_t* total
) noexcept nogil:
    cdef Py_ssize_t i
    cdef int64_t rows
    for i in range(n):
        rows = piece[3 * i + 2]
        if rows < 0 or rows > source_rows or rows > target_rows:
            return i
        if piece[3 * i] < 0 or piece[3 * i] > source_rows - rows:
            return i
        if piece[3 * i + 1] < 0 or piece[3 * i + 1] > target_rows - rows:
            return i
        # Saturated: pieces may overlap, and only "large" matters.
        total[0] = total[0] + rows if total[0] < GIL_KEPT_BELOW else GIL_KEPT_BELOW
    return -1


cdef void copy_pieces(
    char* target, const char* source, const int64_t* piece, Py_ssize_t n, Py_ssize_t row_nbytes
) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        memcpy(
            target + piece[3 * i + 1] * row_nbytes,
            source + piece[3 * i] * row_nbytes,
            piece[3 * i + 2] * row_nbytes,
        )


def value_bounds(values, counts, bounds, Py_ssize_t itemsize):
    """Put the smallest and the largest of each sample's integers into ``bounds``, an int64 table of a row for each.

    ``values`` are integers of ``itemsize`` bytes (4 or 8), ``counts`` an int64 column of how many of them each sample
    has, one behind the other. A sample that has none gets 0 and -1.
    """
    cdef Held held
    cdef const void* value
    cdef const int64_t* count
    cdef int64_t* bound
    cdef Py_ssize_t n
    held.count = 0
    try:
        value = <const void*> hold(&held, values, PyBUF_SIMPLE, -1)
        count = <const int64_t*> hold(&held, counts, PyBUF_SIMPLE, -1)
        n = held.view[1].len // 8
        bound = <int64_t*> hold(&held, bounds, PyBUF_WRITABLE, n * 16)
        check_counts(count, 1, n, held.view[0].len // checked_itemsize(itemsize))
        with nogil:
            if itemsize == 4:
                find_bounds[int32_t](<const int32_t*> value, count, bound, n)
            else:
                find_bounds[int64_t](<const int64_t*> value, count, bound, n)
    finally:
        release(&held)


def move_numbers(values, table, Py_ssize_t itemsize):
    """Renumber in place what samples refer to: each integer of a sample becomes ``value - start + new_start``.

    ``values`` are integers of ``itemsize`` bytes (4 or 8). ``table`` is int64, with a row for each sample: how many
    integers it has, ``start`` and ``size`` of the range that they lie in, ``new_start``; none is negative. Returns -1,
    or the first sample with a value outside of its range; its values and those behind it are not changed.
    """
    cdef Held held
    cdef void* value
    cdef const int64_t* row
    cdef Py_ssize_t n, bad
    held.count = 0
    try:
        value = hold(&held, values, PyBUF_WRITABLE, -1)
        row = <const int64_t*> hold(&held, table, PyBUF_SIMPLE, -1)
        n = held.view[1].len // 32
        check_counts(row, 4, n, held.view[0].len // checked_itemsize(itemsize))
        with nogil:
            if itemsize == 4:
                bad = move[int32_t](<int32_t*> value, row, n)
            else:
                bad = move[int64_t](<int64_t*> value, row, n)
    finally:
        release(&held)
    return bad


cdef Py_ssize_t checked_itemsize(Py_ssize_t itemsize) except -1:
    if itemsize != 4 and itemsize != 8:
        raise ValueError(f"integers of 4 or 8 bytes are handled, not of {itemsize}")
    return itemsize


cdef int check_counts(const int64_t* count, Py_ssize_t stride, Py_ssize_t n, int64_t left) except -1:
    cdef Py_ssize_t i
    for i in range(n):
        if count[i * stride] < 0 or count[i * stride] > left:
            raise ValueError(f"sample {i} has {count[i * stride]} values, there are {left} left")
        left -= count[i * stride]
    return 0


cdef void find_bounds(const integer* value, const int64_t* count, int64_t* bound, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    cdef int64_t k
    cdef integer low, high
    for i in range(n):
        bound[2 * i] = 0
        bound[2 * i + 1] = -1
        if count[i] > 0:
            low = high = value[0]
            for k in range(count[i]):
                low = value[k] if value[k] < low else low
                high = value[k] if value[k] > high else high
            bound[2 * i] = low
            bound[2 * i + 1] = high
            value += count[i]


cdef Py_ssize_t move(integer* value, const int64_t* row, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    cdef int64_t k, count, start, size, new_start
    cdef bint outside
    for i in range(n):
        count = row[4 * i]
        start = row[4 * i + 1]
        size = row[4 * i + 2]
        new_start = row[4 * i + 3]
        outside = False
        for k in range(count):
            outside |= value[k] < start or value[k] - start >= size
        if outside:
            return i
        for k in range(count):
            value[k] = <integer> (value[k] - start + new_start)
        value += count
    return -1
