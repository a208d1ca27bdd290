# cython: language_level=3, boundscheck=False, wraparound=False, freethreading_compatible=True
"""Local headers of a ZIP: compared with the directory, many at a time, to find where the data of entries begins."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE
from libc.stdint cimport int64_t, uint8_t
from libc.stdlib cimport free, malloc, qsort
from libc.string cimport memcmp

from ._atomic cimport ATOMIC_GET, ATOMIC_SET
from ._bytes cimport le16, le32
from ._held cimport Held, hold, release
from ._origin cimport READ_OK, READ_SHORT, Origin, origin_read
from ._zip_columns cimport (
    C_HEADER, C_LIMIT, C_NAME, C_NAME_NBYTES, C_STORED, FLAGS_UNREADABLE, LOCAL_HEADER, LOCAL_NBYTES, MOST_INFLATED,
    has_name_inside, hold_columns, is_unusable,
)

cdef enum:
    # Headers that lie at most GAP apart are read together. Measured on a page-cached file: a pread of one header takes
    # 0.35 us, and 16 KiB more in the same pread take about as long again.
    GAP = 16 << 10
    WINDOW = 256 << 10

    # negative, so that an errno fits beside them
    L_SIGNATURE = -10
    L_FLAGS = -11
    L_NAME = -12
    L_DATA = -13
    L_MEMORY = -14
    L_UNUSABLE = -15

UNREADABLE = FLAGS_UNREADABLE
LOCAL_OK = READ_OK
LOCAL_SHORT = READ_SHORT
LOCAL_SIGNATURE = L_SIGNATURE
LOCAL_FLAGS = L_FLAGS
LOCAL_NAME = L_NAME
LOCAL_DATA = L_DATA
LOCAL_UNUSABLE = L_UNUSABLE
MOST_INFLATION = MOST_INFLATED


cdef struct Wanted:
    const int64_t* cells
    int64_t count
    const uint8_t* directory
    int64_t* rows  # those that are to be located, in the order of their headers
    int64_t nrows
    int64_t* offsets  # answers, one a row of the columns


cdef int check_header(const Wanted* w, int64_t row, const uint8_t* p) noexcept nogil:
    """Compare a local header, all of which is at ``p``, with its entry, and find where the data begins."""
    cdef const int64_t* cell = w.cells + row
    cdef int64_t name_nbytes = cell[C_NAME_NBYTES * w.count]
    cdef int64_t left = cell[C_LIMIT * w.count] - cell[C_HEADER * w.count] - LOCAL_NBYTES - name_nbytes
    if le32(p) != LOCAL_HEADER:
        return L_SIGNATURE
    if le16(p + 6) & FLAGS_UNREADABLE:
        return L_FLAGS
    if le16(p + 26) != name_nbytes:
        return L_NAME
    if memcmp(p + LOCAL_NBYTES, w.directory + cell[C_NAME * w.count], name_nbytes) != 0:
        return L_NAME
    if cell[C_STORED * w.count] > left - le16(p + 28):
        return L_DATA
    # Threads that read the same record may both find it.
    ATOMIC_SET(w.offsets + row, cell[C_HEADER * w.count] + LOCAL_NBYTES + name_nbytes + le16(p + 28))
    return READ_OK


cdef int64_t plan_window(const Wanted* w, int64_t first, int64_t* nbytes) noexcept nogil:
    """Choose how many headers from ``first`` on to read at once; returns one past the last of them."""
    cdef int64_t i = first + 1
    cdef int64_t start = w.cells[C_HEADER * w.count + w.rows[first]]
    cdef int64_t end = start + LOCAL_NBYTES + w.cells[C_NAME_NBYTES * w.count + w.rows[first]]
    cdef int64_t header, header_end
    while i < w.nrows:
        header = w.cells[C_HEADER * w.count + w.rows[i]]
        header_end = header + LOCAL_NBYTES + w.cells[C_NAME_NBYTES * w.count + w.rows[i]]
        if header - end > GAP or header_end - start > WINDOW:
            break
        end = header_end
        i += 1
    nbytes[0] = end - start
    return i


cdef int walk_headers(const Wanted* w, const Origin* origin, int64_t shift, int64_t first, int64_t last,
                      int64_t* wrong) noexcept nogil:
    """Check the headers of rows[first:last]. ``shift`` is where the origin begins in the source."""
    cdef uint8_t* window = NULL
    cdef const uint8_t* bytes_
    cdef int64_t stop, nbytes, start, k
    cdef int status = READ_OK
    while first < last and status == READ_OK:
        wrong[0] = first
        stop = plan_window(w, first, &nbytes)
        start = w.cells[C_HEADER * w.count + w.rows[first]] - shift
        if origin.memory != NULL:
            if start < 0 or start > origin.nbytes or nbytes > origin.nbytes - start:
                return READ_SHORT
            bytes_ = origin.memory + start
        else:
            if window == NULL:
                # a name is at most 65,535 bytes, and the first header is read whatever its length
                window = <uint8_t*> malloc(WINDOW + LOCAL_NBYTES + 65536)
                if window == NULL:
                    return L_MEMORY
            status = origin_read(origin, start, window, nbytes)
            bytes_ = window
        for k in range(first, stop):
            if status != READ_OK:
                break
            wrong[0] = k
            status = check_header(w, w.rows[k], bytes_ + (w.cells[C_HEADER * w.count + w.rows[k]] - shift - start))
        first = stop
    free(window)
    return status


cdef struct Place:
    int64_t header
    int64_t row


cdef int by_header(const void* a, const void* b) noexcept nogil:
    cdef int64_t x = (<const Place*> a).header, y = (<const Place*> b).header
    return (x > y) - (x < y)


cdef int put_in_order(Wanted* w) noexcept nogil:
    """Sort the rows by their headers."""
    cdef Place* places = <Place*> malloc(w.nrows * sizeof(Place))
    cdef int64_t k
    if places == NULL:
        return L_MEMORY
    for k in range(w.nrows):
        places[k].header, places[k].row = w.cells[C_HEADER * w.count + w.rows[k]], w.rows[k]
    qsort(places, w.nrows, sizeof(Place), by_header)
    for k in range(w.nrows):
        w.rows[k] = places[k].row
    free(places)
    return READ_OK


cdef int choose(Wanted* w, const int64_t* rows, int64_t nrows, int64_t directory_nbytes, int64_t* wrong) except? -1000:
    """Keep the rows that are not located yet, in the order of their headers, and see that they can be read at all."""
    cdef const int64_t* cell
    cdef int64_t k, last = 0
    cdef bint ascending = True
    w.nrows = 0
    for k in range(nrows):
        if not 0 <= rows[k] < w.count:
            raise ValueError(f"row {rows[k]} is not one of {w.count}")
        if ATOMIC_GET(w.offsets + rows[k]) >= 0:
            continue
        cell = w.cells + rows[k]
        if not has_name_inside(directory_nbytes, cell, w.count):
            raise ValueError("the columns are not of this directory")
        if is_unusable(cell, w.count):
            wrong[0] = rows[k]
            return L_UNUSABLE
        ascending = ascending and cell[C_HEADER * w.count] >= last
        last = cell[C_HEADER * w.count]
        w.rows[w.nrows] = rows[k]
        w.nrows += 1
    return READ_OK if ascending else put_in_order(w)


def locate(directory, columns, Py_ssize_t count, rows, offsets, source):
    """Read the local headers of ``rows`` and write where their data begins to ``offsets``, by row, unless it is known.

    ``rows`` are int64; ``source`` is read through its ``fd``, its ``view`` or, one window at a time, its ``read``.
    Returns (status, row): OK, a LOCAL_... status, or an errno.
    """
    cdef Held held
    cdef Wanted w
    cdef const int64_t* given
    cdef int64_t wrong = 0
    cdef int status
    held.count, w.rows = 0, NULL
    try:
        w.directory = <const uint8_t*> hold(&held, directory, PyBUF_SIMPLE, -1)
        w.cells, w.count = hold_columns(&held, columns, count, PyBUF_SIMPLE), count
        given = <const int64_t*> hold(&held, rows, PyBUF_SIMPLE, -1)
        w.offsets = <int64_t*> hold(&held, offsets, PyBUF_WRITABLE, count * 8)
        w.rows = <int64_t*> malloc(max(8, held.view[2].len))
        if w.rows == NULL:
            raise MemoryError
        status = choose(&w, given, held.view[2].len // 8, held.view[0].len, &wrong)
        if status == READ_OK and w.nrows:
            if source.view is None and source.fd < 0:
                status = locate_through(&w, source, &wrong)
            else:
                status = locate_in(&w, source, &wrong)
            wrong = w.rows[wrong]
    finally:
        free(w.rows)
        release(&held)
    if status == L_MEMORY:
        raise MemoryError
    return status, wrong


def unusable_rows(columns, Py_ssize_t count, marks):
    """Put into ``marks``, a column of bytes, which entries cannot be read by what the directory says of them."""
    cdef Held held
    cdef const int64_t* cells
    cdef uint8_t* mark
    cdef Py_ssize_t i
    held.count = 0
    try:
        cells = hold_columns(&held, columns, count, PyBUF_SIMPLE)
        mark = <uint8_t*> hold(&held, marks, PyBUF_WRITABLE, count)
        for i in range(count):
            mark[i] = is_unusable(cells + i, count)
    finally:
        release(&held)


cdef int locate_in(const Wanted* w, source, int64_t* wrong) except? -1000:
    """Walk all headers in one go, in a descriptor or in memory."""
    cdef Held held
    cdef Origin origin
    cdef int status
    held.count = 0
    try:
        origin.fd, origin.base, origin.nbytes, origin.memory = source.fd, source.base, source.nbytes, NULL
        if source.view is not None:
            origin.memory = <const uint8_t*> hold(&held, source.view, PyBUF_SIMPLE, -1)
            origin.nbytes = held.view[0].len
        with nogil:
            status = walk_headers(w, &origin, 0, 0, w.nrows, wrong)
        return status
    finally:
        release(&held)


cdef int locate_through(const Wanted* w, source, int64_t* wrong) except? -1000:
    """Walk the headers window by window, each fetched by the source itself."""
    cdef Held held
    cdef Origin origin
    cdef int64_t first = 0, stop, nbytes, start
    cdef int status = READ_OK
    held.count = 0
    while first < w.nrows and status == READ_OK:
        stop = plan_window(w, first, &nbytes)
        start = w.cells[C_HEADER * w.count + w.rows[first]]
        try:
            origin.memory = <const uint8_t*> hold(&held, source.read(start, nbytes), PyBUF_SIMPLE, nbytes)
            origin.nbytes = nbytes
            status = walk_headers(w, &origin, start, first, stop, wrong)
        finally:
            release(&held)
        first = stop
    return status
