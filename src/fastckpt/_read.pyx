# cython: language_level=3, boundscheck=False, wraparound=False, freethreading_compatible=True
"""Fills memory from many extents of one origin, by several threads, with the CRC-32 of each extent.

Extents are cut into pieces where the destination crosses a multiple of the unit, pieces are gathered into units
of about that size, and threads take units in the order of the file. Nothing is raised while that runs: each
extent gets a status. No Python object is touched by more than the calling thread.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBUF_WRITE, PyBuffer_Release, PyObject_GetBuffer
from cpython.memoryview cimport PyMemoryView_FromMemory
from cython.parallel cimport parallel, prange
from libc.errno cimport ENOMEM
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from ._atomic cimport ATOMIC_ADD, ATOMIC_GET, ATOMIC_SET
from ._origin cimport READ_OK, READ_SHORT, Origin, origin_read
from ._pages cimport (
    HUGE_PAGE, PAGES_GET, PAGES_HUGE, PAGES_SMALL, SLOW_NS, Pages, pages_begin, pages_make_huge, pages_populate,
    pages_take_small,
)
from ._threads cimport team_of

cdef extern from "crc32.h" nogil:
    enum:
        CRC32_KERNELS
        CRC32_USABLE
    int crc32_usable(int kernel)
    uint32_t crc32_update(int kernel, uint32_t crc, const void* data, size_t nbytes)
    uint32_t crc32_join(uint32_t first, uint32_t second, uint64_t second_nbytes)

cdef extern from * nogil:
    """
    #ifdef _OPENMP
    #define READ_OPENMP _OPENMP
    #else
    #define READ_OPENMP 0
    #endif
    """
    int READ_OPENMP

cdef enum:
    READ_STOPPED = -2  # not read, because another extent failed or the caller gave up
    # Units of 2, 4, 8 and 16 MiB reach 0.91, 0.89, 0.91 and 0.89 of what the memory allows (1 GB, two threads, EPYC,
    # noise 0.02), chunks of 128, 256 and 512 KiB 0.89, 0.91 and 0.89: a chunk fits a small L2 together with its source.
    UNIT_NBYTES = 8 << 20
    CHUNK_NBYTES = 256 << 10
    # Pieces up to this size are read together with near neighbours. 32 MiB in such pieces, singly and together:
    # 1 KiB 18.5 and 6.8 ms, 8 KiB 4.7 and 2.8, 32 KiB 3.0 and 2.7, 64 KiB 2.8 and 2.7, 128 KiB 2.4 and 2.5.
    NEIGHBOUR_NBYTES = 32 << 10
    # A read costs 0.35 us, about as much as copying this.
    GAP_NBYTES = 4 << 10
    # What the control column holds.
    DONE = 0
    STOP = 1

STATUS_OK, STATUS_SHORT, STATUS_STOPPED = READ_OK, READ_SHORT, READ_STOPPED
OPENMP = READ_OPENMP  # 0 where the compiler had none: every fill is serial then


cdef struct Piece:
    int64_t row
    int64_t offset
    int64_t nbytes
    int64_t address  # 0: nothing is kept, only the CRC is wanted
    uint32_t crc
    int status


cdef struct Job:
    Origin origin
    Piece* pieces
    int64_t* starts  # unit u is pieces[starts[u]:starts[u + 1]]
    int64_t units
    int64_t chunk
    bint want_crc
    bint want_scratch
    bint go_on  # an extent that cannot be read stops no other
    int kernel
    int64_t* control
    const int64_t* address
    const int64_t* nbytes
    int64_t rows
    Pages pages


# ---- planning


cdef int64_t count_pieces(
    const int64_t* nbytes, int64_t rows, int64_t unit, const int64_t* status
) noexcept nogil:
    """At most how many pieces the extents that are to be read fall into."""
    cdef int64_t row, count = 0
    for row in range(rows):
        if nbytes[row] > 0 and status[row] == READ_OK:
            count += nbytes[row] // unit + 2
    return count


cdef bint lies_within(const Origin* origin, int64_t offset, int64_t nbytes) noexcept nogil:
    return offset >= 0 and nbytes >= 0 and offset <= origin.nbytes and nbytes <= origin.nbytes - offset


cdef void plan(
    Job* job, const int64_t* offset, const int64_t* nbytes, const int64_t* address, int64_t rows, int64_t unit,
    const int64_t* status
) noexcept nogil:
    """Cut extents at multiples of ``unit`` in the destination, and gather pieces into units.

    A unit ends where its destination enters another block of ``unit`` bytes, so that no two threads fault in the
    same huge page (it costs 22 %); it goes on over scattered small ones until there is half a unit of work.
    """
    cdef Piece* piece = job.pieces
    cdef int64_t row, done, key, take, block, last_block = -1, filled = 0
    job.units = 0
    for row in range(rows):
        done = 0
        while done < nbytes[row] and status[row] == READ_OK:
            key = (address[row] if address[row] else offset[row]) + done
            take = min(nbytes[row] - done, unit - (key & (unit - 1)))
            block = key // unit
            if job.units == 0 or filled + take > unit or (block != last_block and filled >= unit // 2):
                job.starts[job.units] = piece - job.pieces
                job.units += 1
                filled = 0
            piece.row, piece.offset, piece.nbytes = row, offset[row] + done, take
            piece.address = address[row] + done if address[row] else 0
            piece.crc, piece.status = 0, READ_STOPPED
            if piece.address == 0 or take <= NEIGHBOUR_NBYTES:
                job.want_scratch = True
            filled += take
            last_block = block
            done += take
            piece += 1
    job.starts[job.units] = piece - job.pieces


# ---- pages for what is to be read


cdef void make_pages(Job* job, const Piece* piece, int64_t done, int64_t nbytes) noexcept nogil:
    """Make the pages that the next bytes of a piece go to."""
    cdef int64_t start = piece.address + done
    cdef int kind = PAGES_GET(&job.pages.kind)
    if kind == PAGES_HUGE:
        if done and (start - 1) // HUGE_PAGE == start // HUGE_PAGE:
            start = (start | (HUGE_PAGE - 1)) + 1  # this one is there
        if pages_make_huge(&job.pages, start, piece.address + done + nbytes):
            pages_take_small(job.address, job.nbytes, job.rows)
    elif kind == PAGES_SMALL:
        pages_populate(start, start + nbytes)


# ---- reading


cdef int read_piece(Job* job, Piece* piece, uint8_t* scratch) noexcept nogil:
    """Read a piece chunk by chunk, each summed while it is in cache."""
    cdef int64_t n, done = 0
    cdef const uint8_t* target
    cdef int status
    while done < piece.nbytes:
        if ATOMIC_GET(job.control + STOP):
            return READ_STOPPED
        n = min(job.chunk, piece.nbytes - done)
        if piece.address:
            target = <uint8_t*> piece.address + done
            make_pages(job, piece, done, n)
            status = origin_read(&job.origin, piece.offset + done, <void*> target, n)
        elif job.origin.memory != NULL:
            target, status = job.origin.memory + piece.offset + done, READ_OK
        else:
            target = scratch
            status = origin_read(&job.origin, piece.offset + done, scratch, n) if scratch != NULL else ENOMEM
        if status != READ_OK:
            return status
        if job.want_crc:
            piece.crc = crc32_update(job.kernel, piece.crc, target, n)
        ATOMIC_ADD(job.control + DONE, n)
        done += n
    return READ_OK


cdef int64_t neighbours(const Job* job, int64_t first, int64_t last, int64_t* end) noexcept nogil:
    """Find the last piece (exclusive) that is worth one read together with the first, and where that read ends."""
    cdef Piece* piece = job.pieces + first
    cdef int64_t begin = piece.offset, i = first
    end[0] = begin
    while i < last and piece.nbytes <= NEIGHBOUR_NBYTES:
        if piece.offset < begin or piece.offset - end[0] > GAP_NBYTES:
            break
        if piece.offset + piece.nbytes - begin > job.chunk:
            break
        end[0] = max(end[0], piece.offset + piece.nbytes)
        i += 1
        piece += 1
    return i


cdef bint read_together(Job* job, int64_t first, int64_t last, int64_t end, uint8_t* scratch) noexcept nogil:
    """Read pieces and what lies between them at once. False: nothing was done, read them singly to see which fails."""
    cdef Piece* piece
    cdef int64_t i, begin = job.pieces[first].offset, nbytes = 0, huge_page = -1
    cdef const uint8_t* data
    if origin_read(&job.origin, begin, scratch, end - begin) != READ_OK:
        return False
    for i in range(first, last):
        piece = job.pieces + i
        data = scratch + (piece.offset - begin)
        if piece.address:
            if PAGES_GET(&job.pages.kind) == PAGES_HUGE and piece.address // HUGE_PAGE != huge_page:
                make_pages(job, piece, 0, piece.nbytes)
                huge_page = piece.address // HUGE_PAGE
            memcpy(<void*> piece.address, data, piece.nbytes)
        if job.want_crc:
            piece.crc = crc32_update(job.kernel, 0, data, piece.nbytes)
        piece.status = READ_OK
        nbytes += piece.nbytes
    ATOMIC_ADD(job.control + DONE, nbytes)
    return True


cdef void read_unit(Job* job, int64_t unit, uint8_t* scratch) noexcept nogil:
    """Read one unit; it needs nothing but the job, so that any pool of threads can call it."""
    cdef int64_t end = 0, together, i = job.starts[unit], last = job.starts[unit + 1]
    cdef Piece* piece
    while i < last and not ATOMIC_GET(job.control + STOP):
        if scratch != NULL and job.origin.memory == NULL:
            together = neighbours(job, i, last, &end)
            if together - i > 1 and read_together(job, i, together, end, scratch):
                i = together
                continue
        piece = job.pieces + i
        piece.status = read_piece(job, piece, scratch)
        if piece.status != READ_OK and not job.go_on:
            ATOMIC_SET(job.control + STOP, 1)
        i += 1


cdef uint8_t* new_scratch(const Job* job) noexcept nogil:
    return <uint8_t*> malloc(job.chunk) if job.want_scratch else NULL


cdef void read_serially(Job* job) noexcept nogil:
    cdef uint8_t* scratch = new_scratch(job)
    cdef int64_t unit
    for unit in range(job.units):
        read_unit(job, unit, scratch)
    free(scratch)


cdef void read_in_parallel(Job* job, int num_threads) noexcept nogil:
    cdef uint8_t* scratch = NULL
    cdef int64_t unit
    with parallel(num_threads=num_threads):
        scratch = new_scratch(job)
        for unit in prange(job.units, schedule="dynamic", chunksize=1):
            read_unit(job, unit, scratch)
        free(scratch)


cdef int64_t gather(const Job* job, int64_t* crc, int64_t* status) noexcept nogil:
    """Join what was found for pieces into columns of extents; how many extents are not READ_OK."""
    cdef Piece* piece = job.pieces
    cdef Piece* end = job.pieces + job.starts[job.units]
    cdef int64_t failed = 0
    while piece < end:
        if job.want_crc:
            crc[piece.row] = crc32_join(<uint32_t> crc[piece.row], piece.crc, piece.nbytes)
        if piece.status != READ_OK:
            failed += status[piece.row] == READ_OK
            # what went wrong says more than that reading stopped
            if status[piece.row] == READ_OK or status[piece.row] == READ_STOPPED:
                status[piece.row] = piece.status
        piece += 1
    return failed


# ---- from Python


cdef int64_t check_extents(
    const Origin* origin, const int64_t* offset, const int64_t* nbytes, int64_t rows, int64_t* crc, int64_t* status
) noexcept nogil:
    """Clear the result columns; how many extents leave the origin (then nothing is to be read)."""
    cdef int64_t row, outside = 0
    for row in range(rows):
        if crc != NULL:
            crc[row] = 0
        if lies_within(origin, offset[row], nbytes[row]):
            status[row] = READ_OK
        else:
            status[row] = READ_SHORT
            outside += 1
    return outside


cdef int64_t unit_for(const int64_t* nbytes, int64_t rows, int64_t unit, int num_threads) noexcept nogil:
    """Halve the unit, down to a huge page, until each thread has four: then none waits long for the last."""
    cdef int64_t row, total = 0
    for row in range(rows):
        if nbytes[row] > unit * num_threads * 4:
            return unit
        total += nbytes[row]
        if total > unit * num_threads * 4:
            return unit
    while unit > HUGE_PAGE and total < unit * num_threads * 4:
        unit //= 2
    return unit


cdef int64_t run(
    Job* job, const int64_t* offset, const int64_t* nbytes, const int64_t* address, int64_t rows,
    int64_t unit, int num_threads, int64_t* crc, int64_t* status
) noexcept nogil:
    """Plan, read, join: how many extents failed, -1 where there is no memory for the plan."""
    cdef int64_t failed, most
    cdef int64_t outside = check_extents(&job.origin, offset, nbytes, rows, crc, status)
    if outside and not job.go_on:
        return outside
    job.address, job.nbytes, job.rows = address, nbytes, rows
    if num_threads > 1:
        unit = unit_for(nbytes, rows, unit, num_threads)
    most = count_pieces(nbytes, rows, unit, status)
    job.pieces = <Piece*> malloc((most + 1) * sizeof(Piece))
    job.starts = <int64_t*> malloc((most + 1) * sizeof(int64_t))
    if job.pieces == NULL or job.starts == NULL:
        failed = -1
    else:
        plan(job, offset, nbytes, address, rows, unit, status)
        num_threads = team_of(min(num_threads, job.units))
        if num_threads == 1:
            read_serially(job)
        else:
            read_in_parallel(job, num_threads)
        failed = outside + gather(job, crc, status)
    free(job.starts)
    free(job.pieces)
    return failed


def fill(
    int fd, int64_t base, view, int64_t origin_nbytes,
    offset, nbytes, address, crc, status, control,
    *, int kernel=0, int num_threads=1, bint go_on=False, huge=None,
    int64_t unit_nbytes=UNIT_NBYTES, int64_t chunk_nbytes=CHUNK_NBYTES, int64_t slow_page_ns=SLOW_NS,
):
    """Read extents into memory and return how many failed.

    The origin is ``view`` (bytes-like), or where that is None the descriptor ``fd`` from ``base`` on. ``offset``,
    ``nbytes``, ``address`` are int64 columns, best in the order of the file; an address of 0 keeps nothing and
    sums only. ``crc`` (None: not wanted) and ``status`` are int64 columns that get the results, ``control`` two
    int64: the bytes done so far, and a flag that anyone may set to stop. ``num_threads`` 1 touches no OpenMP. With
    ``go_on`` an extent that cannot be read keeps no other from being read. ``huge`` says that the memory is fresh, and
    whether huge pages were asked for (None: it may be in use); they are slow from ``slow_page_ns`` on.
    The caller answers for the addresses. Raises ValueError for columns or numbers that cannot be.
    """
    cdef Py_buffer[7] buffers
    cdef int taken = 0
    cdef int64_t rows, failed
    cdef Job job
    if num_threads < 1:
        raise ValueError(f"num_threads={num_threads}: at least 1 is needed")
    if unit_nbytes < 1 or unit_nbytes & (unit_nbytes - 1) or chunk_nbytes < 1:
        raise ValueError(f"{unit_nbytes=}, {chunk_nbytes=}: a power of two and a size are needed")
    if crc is not None and not (0 <= kernel < CRC32_KERNELS and crc32_usable(kernel) == CRC32_USABLE):
        raise ValueError(f"kernel={kernel}: not a CRC-32 kernel of this CPU")
    try:
        for column, flags in (
            (offset, PyBUF_SIMPLE), (nbytes, PyBUF_SIMPLE), (address, PyBUF_SIMPLE), (status, PyBUF_WRITABLE),
            (control, PyBUF_WRITABLE), (status if crc is None else crc, PyBUF_WRITABLE),
        ):
            PyObject_GetBuffer(column, &buffers[taken], flags)
            taken += 1
        rows = buffers[0].len // sizeof(int64_t)
        for i in range(taken):
            if buffers[i].len != <Py_ssize_t> sizeof(int64_t) * (2 if i == 4 else rows):
                raise ValueError(f"column {i} has {buffers[i].len} bytes, {rows} rows of int64 (or 2 for control) fit")
        job.origin.fd, job.origin.base, job.origin.memory, job.origin.nbytes = fd, base, NULL, origin_nbytes
        if view is not None:
            PyObject_GetBuffer(view, &buffers[taken], PyBUF_SIMPLE)
            taken += 1
            job.origin.memory, job.origin.nbytes = <const uint8_t*> buffers[6].buf, min(origin_nbytes, buffers[6].len)
        job.control, job.chunk = <int64_t*> buffers[4].buf, chunk_nbytes
        pages_begin(&job.pages, huge, slow_page_ns)
        job.want_crc, job.want_scratch, job.go_on, job.kernel = crc is not None, False, go_on, kernel
        with nogil:
            failed = run(
                &job, <int64_t*> buffers[0].buf, <int64_t*> buffers[1].buf, <int64_t*> buffers[2].buf, rows,
                unit_nbytes, num_threads, <int64_t*> buffers[5].buf if job.want_crc else NULL, <int64_t*> buffers[3].buf
            )
    finally:
        for i in range(taken):
            PyBuffer_Release(&buffers[i])
    if failed < 0:
        raise MemoryError(f"no memory for a plan of {rows} extents")
    return failed


def view_of(int64_t address, Py_ssize_t nbytes):
    """Make a writable memoryview of memory that the caller keeps alive longer than the view."""
    if nbytes < 0 or (nbytes and not address):
        raise ValueError(f"{nbytes} bytes at address {address}: no such memory")
    return PyMemoryView_FromMemory(<char*> address, nbytes, PyBUF_WRITE) if nbytes else memoryview(bytearray())
