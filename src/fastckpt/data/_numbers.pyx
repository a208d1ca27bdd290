# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: freethreading_compatible=True
"""Numbers of Python into a column, in one pass: stacking the labels of a batch costs a microsecond instead of ten."""

from cpython.buffer cimport PyBUF_WRITABLE
from cpython.float cimport PyFloat_AS_DOUBLE, PyFloat_CheckExact
from cpython.long cimport PyLong_CheckExact
from libc.stdint cimport int64_t, uint8_t

from .._held cimport Held, hold, release

import numpy as np

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object, int* overflow) except? -1

INT64, FLOAT64, BOOL = np.dtype(np.int64), np.dtype(np.float64), np.dtype(np.bool_)


def column_of(tuple values):
    """A new column of as many int64, float64 or bool: for numbers that are all int, all float or all bool.

    None: there are none, they are something else or of several kinds, or an int has more than 64 bits.
    """
    cdef Held held
    cdef Py_ssize_t i, n = len(values)
    cdef int64_t* whole
    cdef double* real
    cdef uint8_t* flag
    cdef int overflow = 0
    if n == 0:
        return None
    first = values[0]
    held.count = 0
    try:
        if PyLong_CheckExact(first):
            column = np.empty(n, INT64)
            whole = <int64_t*> hold(&held, column, PyBUF_WRITABLE, n * 8)
            for i in range(n):
                value = values[i]
                if not PyLong_CheckExact(value):
                    return None
                whole[i] = PyLong_AsLongLongAndOverflow(value, &overflow)
                if overflow:
                    return None
        elif PyFloat_CheckExact(first):
            column = np.empty(n, FLOAT64)
            real = <double*> hold(&held, column, PyBUF_WRITABLE, n * 8)
            for i in range(n):
                value = values[i]
                if not PyFloat_CheckExact(value):
                    return None
                real[i] = PyFloat_AS_DOUBLE(value)
        elif first is True or first is False:
            column = np.empty(n, BOOL)
            flag = <uint8_t*> hold(&held, column, PyBUF_WRITABLE, n)
            for i in range(n):
                value = values[i]
                if value is not True and value is not False:
                    return None
                flag[i] = value is True
        else:
            return None
    finally:
        release(&held)
    return column
