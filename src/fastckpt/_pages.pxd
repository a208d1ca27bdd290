# cython: language_level=3
"""Pages of fresh memory, made just before the bytes arrive that go there.

A huge page is one fault instead of 512, and takes 0.1 to 0.4 ms. Where the system has none at hand, because it must
move memory about first, or has given it back to the host of a virtual machine, one takes 4 to 6 ms, and small pages
for the same bytes 0.4 to 1: those it has. So huge ones are timed, and once they are slow the rest goes to small ones.
"""

from libc.stdint cimport int64_t

cdef extern from * nogil:
    """
    #include <stdint.h>
    #include <sys/mman.h>
    #include <time.h>
    #include <unistd.h>

    /* Write a byte, and say how long that took. */
    static int64_t pages_touch(int64_t address)
    {
        struct timespec before, after;
        clock_gettime(CLOCK_MONOTONIC, &before);
        *(volatile char*)(uintptr_t)address = 0;
        clock_gettime(CLOCK_MONOTONIC, &after);
        return (after.tv_sec - before.tv_sec) * INT64_C(1000000000) + (after.tv_nsec - before.tv_nsec);
    }

    /* Take the whole pages in [start, end) to be small ones, where they are not there yet. */
    static void pages_advise_small(int64_t start, int64_t end)
    {
    #ifdef MADV_NOHUGEPAGE
        int64_t page = sysconf(_SC_PAGESIZE);
        start = (start + page - 1) & -page;
        end &= -page;
        if (start < end)
            madvise((void*)(uintptr_t)start, end - start, MADV_NOHUGEPAGE);
    #else
        (void)start, (void)end;
    #endif
    }

    /* Make all pages of [start, end) in one call. A kernel before 5.14 declines: they are made as they are written. */
    static void pages_populate(int64_t start, int64_t end)
    {
    #ifdef __linux__
    #ifndef MADV_POPULATE_WRITE
    #define MADV_POPULATE_WRITE 23
    #endif
        int64_t page = sysconf(_SC_PAGESIZE);
        start &= -page;
        end = (end + page - 1) & -page;
        madvise((void*)(uintptr_t)start, end - start, MADV_POPULATE_WRITE);
    #else
        (void)start, (void)end;
    #endif
    }

    #define PAGES_GET(p) __atomic_load_n((p), __ATOMIC_RELAXED)
    #define PAGES_SET(p, n) __atomic_store_n((p), (n), __ATOMIC_RELAXED)
    #define PAGES_SWAP(p, n) __atomic_exchange_n((p), (n), __ATOMIC_RELAXED)
    """
    int64_t pages_touch(int64_t address)
    void pages_advise_small(int64_t start, int64_t end)
    void pages_populate(int64_t start, int64_t end)
    int PAGES_GET(int* p)
    void PAGES_SET(int* p, int n)
    int PAGES_SWAP(int* p, int n)

cdef enum:
    HUGE_PAGE = 2 << 20
    SMALL_PAGE = 4 << 10  # at least
    THERE_NS = 20_000  # a touch takes less where the page was there already, or is a small one
    SLOW_NS = 2_000_000
    MOST_SLOW = 4  # in a row; each that is quick makes up for half a slow one
    PAGES_OLD = 0  # memory that may be in use: nothing is made, nothing written ahead
    PAGES_HUGE = 1
    PAGES_SMALL = 2


cdef struct Pages:  # of one fill, for all its threads
    int kind
    int score  # two for each huge page that was slow, less one for each that was not
    int64_t slow_ns


cdef inline int pages_begin(Pages* pages, object huge, int64_t slow_ns) except -1:
    """Get ready for memory of which ``Allocation.huge`` says None, or whether huge pages were asked for."""
    pages.kind = PAGES_OLD if huge is None else PAGES_HUGE if huge else PAGES_SMALL
    pages.score, pages.slow_ns = 0, slow_ns
    return 0


cdef inline bint pages_make_huge(Pages* pages, int64_t start, int64_t end) noexcept nogil:
    """Make the huge pages of [start, end), which is about to be written. True once: they are slow, take small ones."""
    cdef int64_t took
    cdef int score
    while start < end:
        took = pages_touch(start)
        if took > min(THERE_NS, pages.slow_ns):
            score = max(0, PAGES_GET(&pages.score) + (2 if took > pages.slow_ns else -1))
            PAGES_SET(&pages.score, score)
            if score >= 2 * MOST_SLOW:
                return PAGES_SWAP(&pages.kind, PAGES_SMALL) == PAGES_HUGE
        start = (start | (HUGE_PAGE - 1)) + 1
    return False


cdef inline void pages_take_small(const int64_t* address, const int64_t* nbytes, Py_ssize_t rows) noexcept nogil:
    """Have what is not there yet go to small pages, neighbours in one call: all threads have to wait for each."""
    cdef int64_t start = 0, end = 0
    cdef Py_ssize_t row
    for row in range(rows):
        if address[row] == 0:  # kept nowhere
            continue
        if not 0 <= address[row] - end < SMALL_PAGE:
            pages_advise_small(start, end)
            start = address[row]
        end = address[row] + nbytes[row]
    pages_advise_small(start, end)
