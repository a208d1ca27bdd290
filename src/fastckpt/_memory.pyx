# cython: language_level=3, boundscheck=False, wraparound=False, freethreading_compatible=True
"""Fresh memory for storages: regions of it, cut into buffers that each give back what nobody else needs.

A region is a private anonymous mapping that begins on a huge page, or plain heap memory where it is small. It
goes when the last buffer in it dies; before that, each huge page of it goes with the last buffer that touches it.
"""

cimport cython
from libc.errno cimport errno
from libc.string cimport strerror
from posix.mman cimport MAP_FAILED, MAP_NORESERVE, MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap, munmap
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport INT64_MAX, int64_t
from libc.stdlib cimport calloc, free

from ._held cimport Held, hold, release
from ._pages cimport PAGES_HUGE, PAGES_OLD, SLOW_NS, pages_begin, pages_make_huge, pages_populate, pages_take_small
from ._pages cimport Pages as State

cdef extern from * nogil:
    """
    #include <stdlib.h>
    #include <sys/mman.h>
    #include <unistd.h>
    #ifndef MAP_ANONYMOUS
    #define MAP_ANONYMOUS MAP_ANON
    #endif

    enum { MEMORY_HUGE = 2 << 20 };

    /* nbytes (whole pages) from a huge page's boundary on; NULL where there are none. */
    static char *memory_map(size_t nbytes) {
        char *p, *start;
        p = mmap(NULL, nbytes + MEMORY_HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED) return NULL;
        start = p + (-(size_t)p & (MEMORY_HUGE - 1));
        if (start > p) munmap(p, start - p);
        munmap(start + nbytes, MEMORY_HUGE - (start - p));
        return start;
    }

    /* Advice; a kernel that knows no huge pages is as good, only slower. */
    static void memory_advise(char *p, size_t nbytes, int huge) {
    #ifdef MADV_HUGEPAGE
        madvise(p, nbytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    #else
        (void)p, (void)nbytes, (void)huge;
    #endif
    }

    static void memory_unmap(char *p, size_t nbytes) { munmap(p, nbytes); }

    static char *memory_heap(size_t nbytes) {
        void *p;
        return posix_memalign(&p, 64, nbytes) ? NULL : p;
    }

    static void memory_give_back(char *p, size_t nbytes) {
    #ifdef __linux__ /* elsewhere it is a hint, and may keep or keep charging the pages */
        madvise(p, nbytes, MADV_DONTNEED);
    #else
        (void)p, (void)nbytes;
    #endif
    }

    static void memory_will_need(void* p, size_t nbytes)
    {
    #ifdef MADV_WILLNEED
        madvise(p, nbytes, MADV_WILLNEED);
    #else
        (void)p, (void)nbytes;
    #endif
    }

    static size_t memory_page(void) { return (size_t)sysconf(_SC_PAGESIZE); }

    #define MEMORY_MORE(p) ((void)__atomic_add_fetch((p), 1, __ATOMIC_RELAXED))
    #define MEMORY_LESS(p) __atomic_sub_fetch((p), 1, __ATOMIC_ACQ_REL)
    """
    enum:
        MEMORY_HUGE
    char* memory_map(size_t nbytes)
    void memory_advise(char* p, size_t nbytes, int huge)
    void memory_unmap(char* p, size_t nbytes)
    char* memory_heap(size_t nbytes)
    void memory_give_back(char* p, size_t nbytes)
    size_t memory_page()
    void memory_will_need(void* p, size_t nbytes)
    void MEMORY_MORE(int* p)
    int MEMORY_LESS(int* p)


cdef struct Region:
    char* start
    size_t nbytes
    bint mapped
    int buffers  # that are alive in it
    int* page_buffers  # the same for each huge page; NULL where one buffer has it all


cdef void region_drop(Region* region) noexcept nogil:
    if MEMORY_LESS(&region.buffers):
        return
    if region.mapped:
        memory_unmap(region.start, region.nbytes)
    else:
        free(region.start)
    free(region.page_buffers)
    free(region)


cdef Region* region_new(size_t nbytes, bint shared, bint huge, size_t heap_below) noexcept nogil:
    """Make a region that counts one buffer, the maker's; NULL where there is no memory."""
    cdef Region* region = <Region*> calloc(1, sizeof(Region))
    cdef size_t page = memory_page(), up, tail
    if region == NULL:
        return NULL
    region.buffers = 1
    region.nbytes = nbytes if nbytes else 1
    if nbytes < heap_below:
        region.start = memory_heap(region.nbytes)
    else:
        region.mapped = True
        region.nbytes += -region.nbytes & (page - 1)
        # A last huge page that is partly used is taken whole where that wastes little (1.6 %), because memory
        # counts; otherwise the mapping ends before it is full, and the system uses small pages there.
        up = -region.nbytes & (MEMORY_HUGE - 1)
        if huge and up <= region.nbytes // 64:
            region.nbytes += up
        region.start = memory_map(region.nbytes)
        if region.start != NULL:
            tail = region.nbytes & (MEMORY_HUGE - 1)
            memory_advise(region.start, region.nbytes - tail if huge else region.nbytes, huge)
        if shared:
            region.page_buffers = <int*> calloc(region.nbytes // MEMORY_HUGE + 1, sizeof(int))
    if region.start == NULL or (shared and region.mapped and region.page_buffers == NULL):
        region.mapped = region.mapped and region.start != NULL
        region_drop(region)
        return NULL
    return region


@cython.final
@cython.no_gc
cdef class Storage:
    """A writable buffer of fresh memory."""

    cdef Region* region
    cdef char* start
    cdef Py_ssize_t nbytes

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.start, self.nbytes, 0, flags)

    def __len__(self):
        return self.nbytes

    def __dealloc__(self):
        cdef Region* region = self.region
        cdef size_t page, offset
        if region == NULL:
            return
        if region.page_buffers != NULL and self.nbytes:
            offset = self.start - region.start
            for page in range(offset // MEMORY_HUGE, (offset + self.nbytes - 1) // MEMORY_HUGE + 1):
                if MEMORY_LESS(&region.page_buffers[page]) == 0 and region.buffers > 1:
                    offset = page * MEMORY_HUGE
                    memory_give_back(region.start + offset, min(<size_t> MEMORY_HUGE, region.nbytes - offset))
        region_drop(region)


cdef Storage storage_in(Region* region, size_t offset, int64_t nbytes):
    cdef Storage storage = Storage.__new__(Storage)
    cdef size_t page
    storage.start, storage.nbytes = region.start + offset, nbytes
    if region.page_buffers != NULL and nbytes:
        for page in range(offset // MEMORY_HUGE, (offset + nbytes - 1) // MEMORY_HUGE + 1):
            MEMORY_MORE(&region.page_buffers[page])
    MEMORY_MORE(&region.buffers)
    storage.region = region
    return storage


cdef int64_t padded(int64_t nbytes, int64_t alignment) noexcept nogil:
    return nbytes + (-nbytes & (alignment - 1))


cdef int64_t region_end(
    const int64_t* sizes, int64_t first, int64_t rows,
    int64_t own_from, int64_t most, int64_t alignment, int64_t* nbytes
) noexcept nogil:
    """Which rows (up to, exclusive) share a region with the first, passing over those with their own."""
    cdef int64_t row
    nbytes[0] = 0
    for row in range(first, rows):
        if sizes[row] < own_from:
            if nbytes[0] and padded(sizes[row], alignment) > most - nbytes[0]:
                return row
            nbytes[0] += padded(sizes[row], alignment)
    return rows


cdef list cut(
    const int64_t* sizes, int64_t* address, int64_t rows,
    int64_t own_from, int64_t most, int64_t heap_below, int64_t alignment, bint huge
):
    cdef list owners = []
    cdef Region* shared = NULL
    cdef Region* region
    cdef int64_t row, offset = 0, end = 0, nbytes = 0
    try:
        for row in range(rows):
            if sizes[row] >= own_from:
                region = region_new(sizes[row], False, huge, heap_below)
                if region == NULL:
                    raise MemoryError(f"no {sizes[row]} bytes of memory for a storage")
                try:
                    owners.append(storage_in(region, 0, sizes[row]))
                finally:
                    region_drop(region)
            else:
                if row >= end or shared == NULL:
                    if shared != NULL:
                        region_drop(shared)
                    end = region_end(sizes, row, rows, own_from, most, alignment, &nbytes)
                    offset = 0
                    shared = region_new(nbytes, True, huge, heap_below)
                    if shared == NULL:
                        raise MemoryError(f"no {nbytes} bytes of memory for storages")
                owners.append(storage_in(shared, offset, sizes[row]))
                offset += padded(sizes[row], alignment)
            address[row] = <int64_t> (<Storage> owners[row]).start
    finally:
        if shared != NULL:
            region_drop(shared)
    return owners


def allocate(
    sizes, address, *, int64_t own_from, int64_t shared_most, int64_t heap_below, int64_t alignment, bint huge
):
    """Allocate a writable buffer for each size (int64 column), write their ``address`` column, return the buffers.

    Sizes from ``own_from`` on get a region of their own, the others share, in order, regions of at most
    ``shared_most`` bytes; regions under ``heap_below`` are heap memory. ``alignment``: a power of two, at most 64
    where heap memory is used. Raises MemoryError; then nothing stays allocated.
    """
    cdef Py_buffer size_buffer, address_buffer
    cdef const int64_t* size
    cdef int64_t rows, row, total = 0
    PyObject_GetBuffer(sizes, &size_buffer, PyBUF_SIMPLE)
    try:
        PyObject_GetBuffer(address, &address_buffer, PyBUF_WRITABLE)
        try:
            if size_buffer.len != address_buffer.len or size_buffer.len % sizeof(int64_t):
                raise ValueError(f"{size_buffer.len} and {address_buffer.len} bytes: two int64 columns fit together")
            size, rows = <const int64_t*> size_buffer.buf, size_buffer.len // sizeof(int64_t)
            for row in range(rows):
                if size[row] < 0:
                    raise ValueError(f"size {row} is {size[row]}: a size cannot be negative")
                if size[row] > (INT64_MAX >> 1) - total:
                    raise MemoryError(f"more than {total} bytes of memory are asked for")
                total += size[row]
            return cut(size, <int64_t*> address_buffer.buf, rows, own_from, shared_most, heap_below, alignment, huge)
        finally:
            PyBuffer_Release(&address_buffer)
    finally:
        PyBuffer_Release(&size_buffer)


@cython.final
cdef class Pages:
    """Pages of fresh memory on their way: for those who fill it by calls that cannot make them."""

    cdef Held held
    cdef const int64_t* address
    cdef const int64_t* nbytes
    cdef Py_ssize_t rows
    cdef State state

    def __cinit__(self, address, nbytes, huge, int64_t slow_page_ns=SLOW_NS):
        """Columns of what will be filled, and Allocation.huge; huge pages are slow from ``slow_page_ns`` on."""
        self.rows = len(address)
        self.address = <const int64_t*> hold(&self.held, address, PyBUF_SIMPLE, self.rows * 8)
        self.nbytes = <const int64_t*> hold(&self.held, nbytes, PyBUF_SIMPLE, self.rows * 8)
        pages_begin(&self.state, huge, slow_page_ns)

    def __dealloc__(self):
        release(&self.held)

    def make(self, int64_t start, int64_t nbytes):
        """Make the pages of bytes that are about to be written."""
        with nogil:
            if self.state.kind == PAGES_HUGE:
                if pages_make_huge(&self.state, start, start + nbytes):
                    pages_take_small(self.address, self.nbytes, self.rows)
            elif self.state.kind != PAGES_OLD and nbytes:
                pages_populate(start, start + nbytes)


cdef enum:
    # The system reads no more than its own readahead for each wish, which is 128 KiB unless somebody set it.
    READ_AHEAD_STEP = 128 << 10


@cython.final
cdef class Mapping:
    """A private, writable mapping of a file. It holds no descriptor, as Python's own would, for each living load."""

    cdef void* start
    cdef Py_ssize_t nbytes

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.start, self.nbytes, 0, flags)

    def __len__(self):
        return self.nbytes

    def will_need(self, Py_ssize_t start, Py_ssize_t stop):
        """Have the system read these bytes of the file ahead of their use; it may decline."""
        stop = min(stop, self.nbytes)
        start = max(0, start) // READ_AHEAD_STEP * READ_AHEAD_STEP
        with nogil:
            while start < stop:
                memory_will_need(<char*> self.start + start, min(READ_AHEAD_STEP, stop - start))
                start += READ_AHEAD_STEP

    def __dealloc__(self):
        if self.start != NULL:
            munmap(self.start, self.nbytes)


def map_file(int fd, Py_ssize_t nbytes):
    """Map the first ``nbytes`` (more than 0) of a file, copy on write: (Mapping, its address). Raises OSError."""
    cdef Mapping mapping = Mapping.__new__(Mapping)
    cdef void* start = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, 0)
    if start == MAP_FAILED:
        raise OSError(errno, strerror(errno).decode())
    mapping.start, mapping.nbytes = start, nbytes
    return mapping, <int64_t> start
