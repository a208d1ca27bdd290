# cython: language_level=3
"""Little-endian loads from bytes that the caller has checked to be there. No alignment is assumed."""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef inline uint16_t le16(const uint8_t* p) noexcept nogil:
    return <uint16_t> (p[0] | (p[1] << 8))


cdef inline uint32_t le32(const uint8_t* p) noexcept nogil:
    return <uint32_t> p[0] | (<uint32_t> p[1] << 8) | (<uint32_t> p[2] << 16) | (<uint32_t> p[3] << 24)


cdef inline uint64_t le64(const uint8_t* p) noexcept nogil:
    return <uint64_t> le32(p) | (<uint64_t> le32(p + 4) << 32)


cdef inline int64_t sle64(const uint8_t* p) noexcept nogil:
    return <int64_t> le64(p)
