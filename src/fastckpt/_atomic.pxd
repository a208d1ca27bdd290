# cython: language_level=3
"""Numbers that one thread reads while another writes them: whole ones, in no particular order."""

from libc.stdint cimport int64_t

cdef extern from * nogil:
    """
    #define ATOMIC_GET(p) __atomic_load_n((p), __ATOMIC_RELAXED)
    #define ATOMIC_SET(p, n) __atomic_store_n((p), (n), __ATOMIC_RELAXED)
    #define ATOMIC_ADD(p, n) ((void) __atomic_fetch_add((p), (n), __ATOMIC_RELAXED))
    """
    int64_t ATOMIC_GET(const int64_t* p)
    void ATOMIC_SET(int64_t* p, int64_t n)
    void ATOMIC_ADD(int64_t* p, int64_t n)
