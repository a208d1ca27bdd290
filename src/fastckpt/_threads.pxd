# cython: language_level=3
"""How many threads a parallel region can have: libgomp ends the process where it cannot make one.

The limits of a container (pids.max), of a user, and of the address space are met there. As many threads as are wanted
are made and ended first, 20 us each, and libgomp finds their stacks ready.
"""

cdef extern from * nogil:
    """
    #define THREADS_MAX 64
    #ifdef _OPENMP
    #include <pthread.h>
    static void* threads_wait(void* gate)
    {
        pthread_mutex_lock(gate);
        pthread_mutex_unlock(gate);
        return NULL;
    }

    static int threads_beside(int wanted)
    {
        pthread_t threads[THREADS_MAX];
        pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
        int started = 0, i;
        pthread_mutex_lock(&gate);
        while (started < wanted && pthread_create(&threads[started], NULL, threads_wait, &gate) == 0)
            started++;
        pthread_mutex_unlock(&gate);
        for (i = 0; i < started; i++)
            pthread_join(threads[i], NULL);
        return started;
    }
    #else
    static int threads_beside(int wanted) { return wanted; }
    #endif
    """
    int THREADS_MAX
    int threads_beside(int wanted)  # at most THREADS_MAX


cdef inline int team_of(long long wanted) noexcept nogil:
    """How many of ``wanted`` threads (64 at most) can work at once, this one among them; at least 1."""
    if wanted <= 1:
        return 1
    return 1 + threads_beside(<int> min(wanted, THREADS_MAX) - 1)
