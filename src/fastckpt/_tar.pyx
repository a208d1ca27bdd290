# cython: language_level=3, boundscheck=False, wraparound=False, freethreading_compatible=True
"""One tar header, read from its 512 bytes; docs/format.md names every field."""

from cpython.buffer cimport PyBUF_SIMPLE
from libc.stdint cimport INT64_MAX, int64_t, uint8_t
from libc.string cimport memchr, memcmp

from ._held cimport Held, hold, release

cdef enum:
    BLOCK_NBYTES = 512
    NAME_NBYTES = 100
    SIZE_AT = 124
    SIZE_NBYTES = 12
    CHECKSUM_AT = 148
    CHECKSUM_NBYTES = 8
    TYPE_AT = 156
    MAGIC_AT = 257
    PREFIX_AT = 345
    PREFIX_NBYTES = 155

BLOCK = BLOCK_NBYTES


cdef int64_t number(const uint8_t* p, int nbytes) noexcept nogil:
    """Read a number field: octal digits between blanks, or base 256 behind a first byte 0x80; -1 if it is neither."""
    cdef int64_t value = 0
    cdef int i = 0
    if p[0] == 0x80:
        for i in range(1, nbytes):
            if value > (INT64_MAX >> 8):
                return -1
            value = (value << 8) | p[i]
        return value
    while i < nbytes and (p[i] == c" " or p[i] == 0):
        i += 1
    while i < nbytes and c"0" <= p[i] <= c"7":
        value = (value << 3) | (p[i] - c"0")  # 12 digits have 36 bits
        i += 1
    while i < nbytes:
        if p[i] == 0:
            break  # what follows an end is not looked at
        if p[i] != c" ":
            return -1
        i += 1
    return value


cdef bint checksum_holds(const uint8_t* p) noexcept nogil:
    """Compare the sum of all bytes, the checksum's own taken as blanks; old tools added signed bytes."""
    cdef int64_t expected = number(p + CHECKSUM_AT, CHECKSUM_NBYTES)
    cdef int64_t plain = 0, signed_ = 0
    cdef int i
    cdef uint8_t byte
    for i in range(BLOCK_NBYTES):
        byte = c" " if CHECKSUM_AT <= i < CHECKSUM_AT + CHECKSUM_NBYTES else p[i]
        plain += byte
        signed_ += byte if byte < 128 else <int64_t> byte - 256
    return expected == plain or expected == signed_


cdef inline bytes text(const uint8_t* p, int nbytes):
    cdef const uint8_t* end = <const uint8_t*> memchr(p, 0, nbytes)
    return p[: (nbytes if end == NULL else end - p)]


def header(block):
    """Read a header: (name, type, nbytes), all zeros as False; None where its checksum or size is wrong.

    ``name`` and ``type`` are bytes. ``block`` has 512 bytes.
    """
    cdef Held held
    cdef const uint8_t* p
    cdef int64_t nbytes
    cdef bytes name, prefix
    held.count = 0
    try:
        p = <const uint8_t*> hold(&held, block, PyBUF_SIMPLE, BLOCK_NBYTES)
        if p[0] == 0 and memcmp(p, p + 1, BLOCK_NBYTES - 1) == 0:
            return False
        nbytes = number(p + SIZE_AT, SIZE_NBYTES)
        if nbytes < 0 or not checksum_holds(p):
            return None
        name = text(p, NAME_NBYTES)
        # GNU's magic is "ustar ", and it has other things where the prefix is.
        if memcmp(p + MAGIC_AT, b"ustar\0", 6) == 0:
            prefix = text(p + PREFIX_AT, PREFIX_NBYTES)
            if prefix:
                name = prefix + b"/" + name
        return name, p[TYPE_AT : TYPE_AT + 1], nbytes
    finally:
        release(&held)
