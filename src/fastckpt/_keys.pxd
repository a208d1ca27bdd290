# cython: language_level=3
"""Dict keys and set members, and what it costs to hash and compare them."""

from libc.stdint cimport int64_t

cdef enum:
    LONG_TEXT = 64  # from here on the length of a text counts


cdef class Keys:
    cdef object items  # what the limit is; None: there is none
    cdef int64_t items_left
    cdef Py_ssize_t max_depth, max_collisions
    cdef dict by_hash  # hash -> the key that has it, or a list of those that do

    cdef int check(self, object key) except -1
    cdef int count(self, int64_t items) except -1
    cdef int count_members(self, object key, Py_ssize_t level) except -1
    cdef int tell_apart(self, object key) except -1
