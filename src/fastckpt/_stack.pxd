# cython: language_level=3
"""The pickle machine's stack, marks and memo."""

from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint8_t


cdef class Stack:
    cdef PyObject** items
    cdef Py_ssize_t depth, room
    cdef Py_ssize_t* marks
    cdef Py_ssize_t n_marks, marks_room
    cdef Py_ssize_t fence  # nothing below may be popped: where the last mark stands
    cdef PyObject** memo
    cdef Py_ssize_t memo_room, n_memo
    cdef dict far_memo  # entries whose index is out of proportion to the pickle
    cdef uint8_t* fetched  # by index, whether the pickle ever fetches the entry; NULL where nobody looked
    cdef int64_t fetched_room

    cdef int push(self, object value) except -1
    cdef object pop(self)
    cdef object top(self)
    cdef object under(self, Py_ssize_t at)
    cdef int drop_to(self, Py_ssize_t at) except -1
    cdef int mark(self) except -1
    cdef Py_ssize_t pop_mark(self) except -1
    cdef tuple take_tuple(self, Py_ssize_t at)
    cdef int put(self, int64_t index, int64_t position) except -1
    cdef int grow_memo(self, Py_ssize_t index) except -1
    cdef int get(self, int64_t index) except -1
    cdef int look_ahead(self, const uint8_t* start, const uint8_t* end) except -1
