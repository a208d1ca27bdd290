# cython: language_level=3, boundscheck=False, wraparound=False, freethreading_compatible=True
"""Local headers of a ZIP: compared with the directory, many at a time, to find where the data of entries begins."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE
from libc.stdint cimport int64_t, uint8_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp

from ._bytes cimport le16, le32
from ._held cimport Held, hold, release
from ._origin cimport READ_OK, READ_SHORT, Origin, origin_read
from ._zip_columns cimport (
    C_HEADER, C_LIMIT, C_NAME, C_NAME_NBYTES, C_STORED, LOCAL_HEADER, LOCAL_NBYTES, check_names, hold_columns,
)

cdef extern from * nogil:
    """
    #define ZIP_SET(p, n) __atomic_store_n((p), (n), __ATOMIC_RELAXED)
    """
    void ZIP_SET(int64_t* p, int64_t n)

cdef enum:
    # Flags that make the bytes something else than the content: encrypted, patch data, strong encryption, masked.
    FLAGS_UNREADABLE = 0x0001 | 0x0020 | 0x0040 | 0x2000

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

UNREADABLE = FLAGS_UNREADABLE
LOCAL_OK = READ_OK
LOCAL_SHORT = READ_SHORT
LOCAL_SIGNATURE = L_SIGNATURE
LOCAL_FLAGS = L_FLAGS
LOCAL_NAME = L_NAME
LOCAL_DATA = L_DATA


cdef struct Wanted:
    const int64_t* cells
    int64_t count
    const uint8_t* directory
    const int64_t* rows  # in the order of their headers
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
    ZIP_SET(w.offsets + row, cell[C_HEADER * w.count] + LOCAL_NBYTES + name_nbytes + le16(p + 28))
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


cdef int check_wanted(const Wanted* w, int64_t directory_nbytes) except -1:
    """See that rows and names lie inside, and rows ascend, so that the walk need not look again."""
    cdef int64_t k, row, last = 0
    check_names(directory_nbytes, w.cells, w.count)
    for k in range(w.nrows):
        row = w.rows[k]
        if row < 0 or row >= w.count or w.cells[C_HEADER * w.count + row] < last:
            raise ValueError("rows must be entries in the order of their headers")
        last = w.cells[C_HEADER * w.count + row]
    return 0


def locate(directory, columns, Py_ssize_t count, rows, offsets, source):
    """Read the local headers of ``rows`` and write where their data begins to ``offsets`` (by row).

    ``rows`` are int64, in the order of their headers; ``source`` is read through its ``fd``, its ``view`` or, one
    window at a time, its ``read``. Returns (status, position in ``rows``): OK, a LOCAL_... status, or an errno.
    """
    cdef Held held
    cdef Wanted w
    cdef int64_t wrong = 0
    cdef int status
    held.count = 0
    try:
        w.directory = <const uint8_t*> hold(&held, directory, PyBUF_SIMPLE, -1)
        w.cells, w.count = hold_columns(&held, columns, count, PyBUF_SIMPLE), count
        w.rows = <const int64_t*> hold(&held, rows, PyBUF_SIMPLE, -1)
        w.nrows = held.view[2].len // 8
        w.offsets = <int64_t*> hold(&held, offsets, PyBUF_WRITABLE, count * 8)
        check_wanted(&w, held.view[0].len)
        if source.view is None and source.fd < 0:
            status = locate_through(&w, source, &wrong)
        else:
            status = locate_in(&w, source, &wrong)
    finally:
        release(&held)
    if status == L_MEMORY:
        raise MemoryError
    return status, wrong


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
