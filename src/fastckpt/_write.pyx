# cython: language_level=3, boundscheck=False, wraparound=False, freethreading_compatible=True
"""Writes memory to a file by position, by several threads, with the CRC-32 of each extent.

The twin of _read: extents are cut into chunks, threads take chunks in the order given, each is summed and written
while it is in cache. Nothing is raised while that runs; the first failure stops all.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cython.parallel cimport prange
from libc.errno cimport EINTR, ENOSPC, errno
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

from ._atomic cimport ATOMIC_ADD, ATOMIC_GET, ATOMIC_SET
from ._threads cimport team_of

cdef extern from "<unistd.h>" nogil:
    ssize_t pwrite(int fd, const void* data, size_t nbytes, int64_t offset)

cdef extern from "crc32.h" nogil:
    enum:
        CRC32_KERNELS
        CRC32_USABLE
    int crc32_usable(int kernel)
    uint32_t crc32_update(int kernel, uint32_t crc, const void* data, size_t nbytes)
    uint32_t crc32_join(uint32_t first, uint32_t second, uint64_t second_nbytes)

cdef enum:
    CHUNK_NBYTES = 1 << 20
    # What the control column holds, as in _read.
    DONE = 0
    STOP = 1


cdef struct Chunk:
    int64_t row
    const uint8_t* data
    int64_t nbytes
    int64_t offset
    uint32_t crc


cdef struct Job:
    int fd  # -1: nothing is written, only summed
    Chunk* chunks
    int64_t count
    bint want_crc
    int kernel
    int64_t* control
    int64_t error


cdef int64_t count_chunks(const int64_t* nbytes, int64_t rows, int64_t chunk) noexcept nogil:
    cdef int64_t row, count = 0
    for row in range(rows):
        count += nbytes[row] // chunk + (nbytes[row] % chunk != 0)
    return count


cdef void plan(
    Job* job, const int64_t* address, const int64_t* nbytes, const int64_t* offset, int64_t rows, int64_t chunk_nbytes
) noexcept nogil:
    cdef Chunk* chunk = job.chunks
    cdef int64_t row, done
    for row in range(rows):
        done = 0
        while done < nbytes[row]:
            chunk.row, chunk.offset, chunk.crc = row, offset[row] + done, 0
            chunk.data = <const uint8_t*> address[row] + done
            chunk.nbytes = min(chunk_nbytes, nbytes[row] - done)
            done += chunk.nbytes
            chunk += 1


cdef int write_all(int fd, const uint8_t* data, int64_t nbytes, int64_t offset) noexcept nogil:
    """0 or an errno; a write may be cut short by a signal, or by a disk that is about to be full."""
    cdef ssize_t n
    while nbytes > 0:
        n = pwrite(fd, data, nbytes, offset)
        if n < 0:
            if errno == EINTR:
                continue
            return errno
        if n == 0:
            return ENOSPC
        data += n
        nbytes -= n
        offset += n
    return 0


cdef void write_chunk(Job* job, Chunk* chunk) noexcept nogil:
    cdef int error
    if ATOMIC_GET(job.control + STOP):
        return
    if job.want_crc:
        chunk.crc = crc32_update(job.kernel, 0, chunk.data, chunk.nbytes)
    if job.fd >= 0:
        error = write_all(job.fd, chunk.data, chunk.nbytes, chunk.offset)
        if error:
            ATOMIC_SET(&job.error, error)
            ATOMIC_SET(job.control + STOP, 1)
            return
    ATOMIC_ADD(job.control + DONE, chunk.nbytes)


cdef void run(Job* job, int num_threads) noexcept nogil:
    cdef int64_t i
    if num_threads == 1:
        for i in range(job.count):
            write_chunk(job, job.chunks + i)
    else:
        for i in prange(job.count, schedule="dynamic", chunksize=1, num_threads=num_threads):
            write_chunk(job, job.chunks + i)


cdef void join_sums(const Job* job, int64_t* crc) noexcept nogil:
    cdef Chunk* chunk
    cdef int64_t i
    for i in range(job.count):
        chunk = job.chunks + i
        crc[chunk.row] = crc32_join(<uint32_t> crc[chunk.row], chunk.crc, chunk.nbytes)


def write(int fd, address, nbytes, offset, crc, control, *, int kernel=0, int num_threads=1,
          int64_t chunk_nbytes=CHUNK_NBYTES):
    """Write extents of memory to ``fd``, each at its offset; the errno of what failed, else 0.

    ``address``, ``nbytes``, ``offset`` are int64 columns, best in the order of the file; ``crc`` (None: not wanted)
    gets the CRC-32 of each. ``control``: two int64, the bytes done so far and a flag that anyone may set to stop. With
    ``fd`` -1 nothing is written. The caller answers for the addresses. Raises ValueError for numbers that cannot be,
    MemoryError.
    """
    cdef Py_buffer[5] buffers
    cdef int taken = 0
    cdef int64_t rows, row
    cdef Job job
    if num_threads < 1 or chunk_nbytes < 1:
        raise ValueError(f"{num_threads=}, {chunk_nbytes=}: at least 1 is needed")
    if crc is not None and not (0 <= kernel < CRC32_KERNELS and crc32_usable(kernel) == CRC32_USABLE):
        raise ValueError(f"kernel={kernel}: not a CRC-32 kernel of this CPU")
    job.chunks = NULL
    try:
        for column, flags in ((address, PyBUF_SIMPLE), (nbytes, PyBUF_SIMPLE), (offset, PyBUF_SIMPLE),
                              (control, PyBUF_WRITABLE), (control if crc is None else crc, PyBUF_WRITABLE)):
            PyObject_GetBuffer(column, &buffers[taken], flags)
            taken += 1
        rows = buffers[0].len // sizeof(int64_t)
        for i in range(taken):
            if buffers[i].len != <Py_ssize_t> sizeof(int64_t) * (2 if i == 3 or (i == 4 and crc is None) else rows):
                raise ValueError(f"column {i} has {buffers[i].len} bytes, {rows} rows of int64 (or 2 for control) fit")
        job.fd, job.control, job.error = fd, <int64_t*> buffers[3].buf, 0
        job.kernel, job.want_crc = kernel, crc is not None
        for row in range(rows):
            if (<int64_t*> buffers[1].buf)[row] < 0 or (<int64_t*> buffers[2].buf)[row] < 0:
                raise ValueError(f"row {row}: a size or an offset is negative")
        job.count = count_chunks(<int64_t*> buffers[1].buf, rows, chunk_nbytes)
        job.chunks = <Chunk*> malloc((job.count + 1) * sizeof(Chunk))
        if job.chunks == NULL:
            raise MemoryError(f"no memory for a plan of {job.count} chunks")
        with nogil:
            plan(&job, <int64_t*> buffers[0].buf, <int64_t*> buffers[1].buf, <int64_t*> buffers[2].buf, rows,
                 chunk_nbytes)
            run(&job, team_of(min(num_threads, job.count)))
            if job.want_crc:
                for row in range(rows):
                    (<int64_t*> buffers[4].buf)[row] = 0
                join_sums(&job, <int64_t*> buffers[4].buf)
        return job.error
    finally:
        free(job.chunks)
        for i in range(taken):
            PyBuffer_Release(&buffers[i])
