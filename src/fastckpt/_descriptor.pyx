# cython: language_level=3, freethreading_compatible=True
"""A descriptor that somebody owns from the moment in which there is one."""

cimport cython
from cpython.exc cimport PyErr_SetFromErrno
from libc.errno cimport EINTR, errno

cdef extern from "<unistd.h>" nogil:
    int close(int fd)


@cython.final
cdef class Owned:
    """The descriptor that ``call(*args)`` gives, as os.open and os.dup do; closed when nobody holds this.

    A signal's handler that raises as the call comes back would lose a number on its way into a variable: Python looks
    for signals between a call and what is done with its result. Here nothing comes between.
    """

    cdef readonly int fd

    def __cinit__(self, call, *args):
        self.fd = -1
        self.fd = call(*args)

    def __dealloc__(self):
        if self.fd >= 0:
            close(self.fd)

    def close(self):
        """Close it, once."""
        cdef int fd = self.fd
        self.fd = -1
        if fd >= 0 and close(fd) and errno != EINTR:  # then it is closed all the same
            PyErr_SetFromErrno(OSError)
