# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, freethreading_compatible=True
"""Columns of records: what they claim before they are read, and their checksums after."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE
from libc.stdint cimport int64_t

from ._atomic cimport ATOMIC_GET
from ._held cimport Held, hold, release
from ._zip_columns cimport METHOD_DEFLATED, MOST_INFLATED

cdef enum:
    NOT_SUMMED = -1


def first_impossible(offset, nbytes, stored_nbytes, method, Py_ssize_t count, rows, int64_t source_nbytes):
    """The first record that does not lie in its source, or claims more than it can hold: its position in ``rows``.

    -1 where there is none. Columns are int64, ``count`` long; ``rows`` are int64, too.
    """
    cdef Held held
    cdef const int64_t* offset_at
    cdef const int64_t* nbytes_at
    cdef const int64_t* stored_at
    cdef const int64_t* method_at
    cdef const int64_t* row
    cdef Py_ssize_t i, n
    cdef int64_t stored, begin
    held.count = 0
    try:
        offset_at = <const int64_t*> hold(&held, offset, PyBUF_SIMPLE, count * 8)
        nbytes_at = <const int64_t*> hold(&held, nbytes, PyBUF_SIMPLE, count * 8)
        stored_at = <const int64_t*> hold(&held, stored_nbytes, PyBUF_SIMPLE, count * 8)
        method_at = <const int64_t*> hold(&held, method, PyBUF_SIMPLE, count * 8)
        row = <const int64_t*> hold(&held, rows, PyBUF_SIMPLE, -1)
        n = held.view[4].len // 8
        for i in range(n):
            if not 0 <= row[i] < count:
                raise ValueError(f"row {row[i]} is not one of {count}")
            stored = stored_at[row[i]]
            begin = ATOMIC_GET(offset_at + row[i])  # another thread may be finding it as well
            if begin < 0 or stored < 0 or stored > source_nbytes - begin:
                return i
            if nbytes_at[row[i]] < 0:
                return i
            # What lies in a source has so few bytes that their product with the ratio keeps its 63 bits.
            if nbytes_at[row[i]] > (MOST_INFLATED * (stored + 1) if method_at[row[i]] == METHOD_DEFLATED else stored):
                return i
    finally:
        release(&held)
    return -1


def compare(crc, crc32, nbytes, Py_ssize_t count, rows, wrong):
    """Compare checksums that were computed, one for each of ``rows``, with those in the column ``crc32``.

    A writer that computes none writes 0, which no bytes have, too. Returns (how many there were to compare, how many of
    them are wrong); the positions in ``rows`` of the wrong ones go into ``wrong``, an int64 column as long as ``rows``.
    """
    cdef Held held
    cdef const int64_t* said
    cdef const int64_t* nbytes_at
    cdef const int64_t* found
    cdef const int64_t* row
    cdef int64_t* bad
    cdef Py_ssize_t i, n, known = 0, failed = 0
    held.count = 0
    try:
        said = <const int64_t*> hold(&held, crc32, PyBUF_SIMPLE, count * 8)
        nbytes_at = <const int64_t*> hold(&held, nbytes, PyBUF_SIMPLE, count * 8)
        row = <const int64_t*> hold(&held, rows, PyBUF_SIMPLE, -1)
        n = held.view[2].len // 8
        found = <const int64_t*> hold(&held, crc, PyBUF_SIMPLE, n * 8)
        bad = <int64_t*> hold(&held, wrong, PyBUF_WRITABLE, n * 8)
        for i in range(n):
            if not 0 <= row[i] < count:
                raise ValueError(f"row {row[i]} is not one of {count}")
            if said[row[i]] == NOT_SUMMED or (said[row[i]] == 0 and nbytes_at[row[i]]):
                continue
            known += 1
            if found[i] != said[row[i]]:
                bad[failed] = i
                failed += 1
    finally:
        release(&held)
    return known, failed
