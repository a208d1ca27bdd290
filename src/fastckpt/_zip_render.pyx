# cython: language_level=3, boundscheck=False, wraparound=False, freethreading_compatible=True
"""Renders what stands around the data of a ZIP that is laid out already (see containers/zip_writer.py)."""

from cpython.buffer cimport PyBUF_SIMPLE
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memcpy, memset

from ._held cimport Held, hold, release

cdef enum:
    # The rows of the columns: where the local header, its data and its name (among the names) begin; the data's
    # nbytes; whether the sizes (1) or the position of the header (2) need 64 bits; the checksum; where the content
    # lies in memory, 0 where somebody else writes it.
    W_HEADER, W_OFFSET, W_NBYTES, W_NAME, W_NAME_NBYTES, W_WIDE, W_CRC, W_ADDRESS, W_COLUMNS
    LARGE = 1
    FAR = 2

    LOCAL_NBYTES = 30
    CENTRAL_NBYTES = 46
    PADDING_HEAD_NBYTES = 4
    MAX32 = 0xFFFFFFFF
    UTF8_NAME = 0x0800
    DESCRIPTOR_FOLLOWS = 0x0008

COLUMNS = W_COLUMNS


cdef struct Rows:
    const int64_t* cells
    int64_t count
    const uint8_t* names


cdef inline int64_t cell(const Rows* rows, int column, int64_t row) noexcept nogil:
    return rows.cells[column * rows.count + row]


cdef inline uint8_t* put(uint8_t* p, int64_t number, int width) noexcept nogil:
    cdef int i
    for i in range(width):
        p[i] = <uint8_t> ((number >> (8 * i)) & 0xFF)
    return p + width


cdef inline int64_t zip64_nbytes(int64_t wide) noexcept nogil:
    return 4 * (wide != 0) + 16 * (wide & LARGE != 0) + 8 * (wide & FAR != 0)


cdef uint8_t* put_zip64(uint8_t* p, const Rows* rows, int64_t row, bint stored) noexcept nogil:
    """The zip64 field, nothing where none is needed; a local header has 0 for the ``stored`` size, as torch has it."""
    cdef int64_t wide = cell(rows, W_WIDE, row), nbytes = cell(rows, W_NBYTES, row)
    if wide == 0:
        return p
    p = put(put(p, 1, 2), zip64_nbytes(wide) - 4, 2)
    if wide & LARGE:
        p = put(put(p, nbytes, 8), nbytes if stored else 0, 8)
    if wide & FAR:
        p = put(p, cell(rows, W_HEADER, row), 8)
    return p


cdef uint8_t* put_name(uint8_t* p, const Rows* rows, int64_t row) noexcept nogil:
    cdef int64_t nbytes = cell(rows, W_NAME_NBYTES, row)
    memcpy(p, rows.names + cell(rows, W_NAME, row), nbytes)
    return p + nbytes


cdef inline int64_t flags_of(const Rows* rows, int64_t row) noexcept nogil:
    return UTF8_NAME | DESCRIPTOR_FOLLOWS if cell(rows, W_NBYTES, row) else UTF8_NAME


cdef void put_local(uint8_t* p, const Rows* rows, int64_t row) noexcept nogil:
    """The local header and its padding (APPNOTE 4.3.7): sizes and checksum are 0, the descriptor has them."""
    cdef uint8_t* data = p + cell(rows, W_OFFSET, row) - cell(rows, W_HEADER, row)
    cdef uint8_t* extra = p + LOCAL_NBYTES + cell(rows, W_NAME_NBYTES, row)
    memset(p, 0, LOCAL_NBYTES)
    memcpy(p, b"PK\3\4", 4)
    put(p + 6, flags_of(rows, row), 2)
    put(p + 26, cell(rows, W_NAME_NBYTES, row), 2)
    put(p + 28, data - extra, 2)
    put_name(p + LOCAL_NBYTES, rows, row)
    extra = put_zip64(extra, rows, row, False)
    memcpy(extra, b"FB", 2)
    extra = put(extra + 2, data - extra - PADDING_HEAD_NBYTES, 2)
    memset(extra, b"Z", data - extra)


cdef void put_descriptor(uint8_t* p, const Rows* rows, int64_t row) noexcept nogil:
    """What follows the data: checksum and sizes (4.3.9)."""
    cdef int64_t nbytes = cell(rows, W_NBYTES, row)
    cdef int width = 8 if cell(rows, W_WIDE, row) else 4
    memcpy(p, b"PK\7\10", 4)
    put(put(put(p + 4, cell(rows, W_CRC, row), 4), nbytes, width), nbytes, width)


cdef uint8_t* put_central(uint8_t* p, const Rows* rows, int64_t row) noexcept nogil:
    """The entry of the directory (4.3.12)."""
    cdef int64_t wide = cell(rows, W_WIDE, row)
    cdef int64_t nbytes = MAX32 if wide & LARGE else cell(rows, W_NBYTES, row)
    memset(p, 0, CENTRAL_NBYTES)
    memcpy(p, b"PK\1\2", 4)
    put(p + 8, flags_of(rows, row), 2)
    put(p + 16, cell(rows, W_CRC, row), 4)
    put(p + 20, nbytes, 4)
    put(p + 24, nbytes, 4)
    put(p + 28, cell(rows, W_NAME_NBYTES, row), 2)
    put(p + 30, zip64_nbytes(wide), 2)
    put(p + 42, MAX32 if wide & FAR else cell(rows, W_HEADER, row), 4)
    return put_zip64(put_name(p + CENTRAL_NBYTES, rows, row), rows, row, True)


cdef int64_t put_range(uint8_t* out, const Rows* rows, int64_t row, int64_t begin, int64_t end) noexcept nogil:
    """Everything of the archive's bytes from ``begin`` to ``end``; how many bytes were put, from ``row`` on."""
    cdef int64_t header, offset, nbytes, behind, done = 0
    for row in range(row, rows.count):
        header, offset = cell(rows, W_HEADER, row), cell(rows, W_OFFSET, row)
        nbytes = cell(rows, W_NBYTES, row)
        behind = offset + nbytes + (24 if cell(rows, W_WIDE, row) else 16)
        if header >= end:
            break
        if header >= begin and offset <= end:
            put_local(out + (header - begin), rows, row)
            done += offset - header
        if not nbytes:
            continue
        if offset >= begin and offset + nbytes <= end and cell(rows, W_ADDRESS, row):
            memcpy(out + (offset - begin), <const uint8_t*> cell(rows, W_ADDRESS, row), nbytes)
            done += nbytes
        if offset + nbytes >= begin and behind <= end:
            put_descriptor(out + (offset + nbytes - begin), rows, row)
            done += behind - offset - nbytes
    return done


cdef int check(const Rows* rows, int64_t names_nbytes, int64_t row) except -1:
    """See that the columns fit together: nothing that is put lies outside of its place."""
    cdef int64_t at = cell(rows, W_NAME, row), nbytes = cell(rows, W_NAME_NBYTES, row)
    cdef int64_t head = LOCAL_NBYTES + nbytes + zip64_nbytes(cell(rows, W_WIDE, row)) + PADDING_HEAD_NBYTES
    if at < 0 or not 0 <= nbytes <= 0xFFFF or at > names_nbytes - nbytes:
        raise ValueError(f"row {row}: its name is not among the names")
    if (
        cell(rows, W_HEADER, row) < 0 or cell(rows, W_NBYTES, row) < 0
        or cell(rows, W_OFFSET, row) - cell(rows, W_HEADER, row) < head
    ):
        raise ValueError(f"row {row}: a position or a size that no layout has")
    return 0


def render(columns, names, int64_t count, int64_t row, int64_t begin, int64_t end):
    """The archive's bytes from ``begin`` to ``end``: local headers, descriptors, and contents that have an address.

    ``columns`` is an int64 array of (COLUMNS, ``count``), ``row`` the first row of which something lies there.
    The caller answers for the addresses. Raises ValueError for a range that cuts through something, or has data in it
    without an address, and for columns that contradict themselves.
    """
    cdef Held held
    cdef Rows rows
    cdef int64_t i
    held.count = 0
    if not (0 <= row and 0 <= begin <= end):
        raise ValueError(f"{row=}, {begin=}, {end=}: no place in an archive")
    try:
        rows.cells = <const int64_t*> hold(&held, columns, PyBUF_SIMPLE, W_COLUMNS * count * 8)
        rows.names = <const uint8_t*> hold(&held, names, PyBUF_SIMPLE, -1)
        rows.count = count
        for i in range(row, count):
            if cell(&rows, W_HEADER, i) >= end:
                break
            check(&rows, held.view[1].len, i)
        out = PyBytes_FromStringAndSize(NULL, end - begin)
        if put_range(<uint8_t*> PyBytes_AS_STRING(out), &rows, row, begin, end) != end - begin:
            raise ValueError(f"bytes {begin} to {end} have data between them that lies elsewhere, or end in a header")
        return out
    finally:
        release(&held)


def directory(columns, names, int64_t count):
    """The directory of an archive: an entry a row."""
    cdef Held held
    cdef Rows rows
    cdef int64_t i, nbytes = 0
    cdef uint8_t* p
    held.count = 0
    try:
        rows.cells = <const int64_t*> hold(&held, columns, PyBUF_SIMPLE, W_COLUMNS * count * 8)
        rows.names = <const uint8_t*> hold(&held, names, PyBUF_SIMPLE, -1)
        rows.count = count
        for i in range(count):
            check(&rows, held.view[1].len, i)
            nbytes += CENTRAL_NBYTES + cell(&rows, W_NAME_NBYTES, i) + zip64_nbytes(cell(&rows, W_WIDE, i))
        out = PyBytes_FromStringAndSize(NULL, nbytes)
        p = <uint8_t*> PyBytes_AS_STRING(out)
        for i in range(count):
            p = put_central(p, &rows, i)
        return out
    finally:
        release(&held)
