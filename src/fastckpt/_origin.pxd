# cython: language_level=3
"""Where native code reads from: a descriptor or memory, by position, without the GIL.

An Origin is the native face of a Source that has ``fd`` or ``view``; the caller keeps that Source alive.
"""

from libc.errno cimport EINTR, errno
from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memcpy
from posix.types cimport off_t
from posix.unistd cimport pread

cdef enum:
    READ_OK = 0
    READ_SHORT = -1  # the file ends before the last byte that was asked for
    # a positive status is an errno


cdef struct Origin:
    int fd
    int64_t base  # where offset 0 lies in the descriptor
    const uint8_t* memory  # NULL where the descriptor counts
    int64_t nbytes


cdef inline int origin_read(const Origin* origin, int64_t offset, void* target, int64_t nbytes) noexcept nogil:
    """Fill ``target`` with all of ``[offset, offset + nbytes)``: READ_OK, READ_SHORT or an errno."""
    cdef Py_ssize_t got
    cdef int64_t done = 0
    if offset < 0 or nbytes < 0 or offset > origin.nbytes or nbytes > origin.nbytes - offset:
        return READ_SHORT
    if origin.memory != NULL:
        memcpy(target, origin.memory + offset, nbytes)
        return READ_OK
    while done < nbytes:
        got = pread(origin.fd, <uint8_t*> target + done, nbytes - done, <off_t> (origin.base + offset + done))
        if got > 0:
            done += got
        elif got == 0:
            return READ_SHORT
        elif errno != EINTR:
            return errno
    return READ_OK
