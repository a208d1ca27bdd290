# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: freethreading_compatible=True
"""The element counts that stand before the storages of a legacy stream, compared with what the pickle says."""

from cpython.buffer cimport PyBUF_SIMPLE
from libc.stdint cimport int64_t, uint8_t

from ._bytes cimport sle64
from ._held cimport Held, hold, release
from ._origin cimport READ_OK, Origin, origin_read

cdef enum:
    WINDOW = 1 << 16  # bytes; counts that lie this near to each other are read together
    COUNT_NBYTES = 8

WRONG_COUNT = -2
cdef enum:
    WRONG = -2


cdef struct Cursor:
    uint8_t window[WINDOW]
    int64_t at  # where the window begins in the source
    int64_t nbytes


cdef int count_at(const Origin* origin, Cursor* cursor, int64_t offset, int64_t next_offset,
                  int64_t* count) noexcept nogil:
    """The integer at ``offset``, out of a window that reaches further where the next one is near."""
    cdef int status
    cdef int64_t room
    if offset < cursor.at or offset - cursor.at > cursor.nbytes - COUNT_NBYTES:
        room = WINDOW if next_offset - offset < WINDOW // 4 else COUNT_NBYTES
        if room > origin.nbytes - offset:
            room = origin.nbytes - offset
        if room < COUNT_NBYTES:
            room = COUNT_NBYTES  # origin_read says that it is not there
        status = origin_read(origin, offset, cursor.window, room)
        if status != READ_OK:
            return status
        cursor.at, cursor.nbytes = offset, room
    count[0] = sle64(cursor.window + (offset - cursor.at))
    return READ_OK


cdef int compare(const Origin* origin, Py_ssize_t n, const int64_t* offset, const int64_t* expected,
                 int64_t* found, Py_ssize_t* row) noexcept nogil:
    cdef Cursor cursor
    cdef int status
    cdef Py_ssize_t i
    cursor.at = cursor.nbytes = 0
    for i in range(n):
        row[0] = i
        status = count_at(origin, &cursor, offset[i], offset[i + 1] if i + 1 < n else offset[i] + WINDOW, found)
        if status != READ_OK:
            return status
        if found[0] != expected[i]:
            return WRONG
    return READ_OK


def compare_counts(source, offset, expected):
    """Compare the count at each ascending ``offset`` with ``expected`` (int64 columns): (status, row, count found).

    The status is 0, WRONG_COUNT, -1 where the source ends before a count, or an errno.
    """
    cdef Held held
    cdef Origin origin
    cdef Py_ssize_t n = len(offset), row = 0
    cdef int64_t found = 0
    cdef int status
    cdef const int64_t* offset_at
    cdef const int64_t* expected_at
    held.count = 0
    try:
        origin.fd, origin.base, origin.nbytes = source.fd, source.base, source.nbytes
        origin.memory = NULL
        if source.view is not None:
            origin.memory = <const uint8_t*> hold(&held, source.view, PyBUF_SIMPLE, -1)
        offset_at = <const int64_t*> hold(&held, offset, PyBUF_SIMPLE, n * 8)
        expected_at = <const int64_t*> hold(&held, expected, PyBUF_SIMPLE, n * 8)
        with nogil:
            status = compare(&origin, n, offset_at, expected_at, &found, &row)
    finally:
        release(&held)
    return status, row, found
