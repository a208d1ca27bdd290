/* What the machine allows: one file, in the page cache, read into fresh memory on huge pages, nothing looked at.
 *
 *     read_limit FILE THREADS
 *
 * prints the GB/s of one read. Threads take units of 8 MiB from a counter and read them in pieces that fit the L2
 * cache, as the library does; it cannot be faster than this, for each byte it reads is summed as well.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define HUGE_PAGE ((size_t)2 << 20)
#define UNIT ((size_t)8 << 20)
#define PIECE ((size_t)256 << 10)
#define MOST_THREADS 256

static struct {
    int fd;
    size_t nbytes;
    char *memory;
    atomic_size_t next;
    atomic_int failed;
} job;

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* nbytes of fresh memory from a huge page's boundary on; *base and *span are for munmap. */
static char *fresh_memory(size_t nbytes, char **base, size_t *span) {
    char *start;
    *span = nbytes + 2 * HUGE_PAGE;
    *base = mmap(NULL, *span, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*base == MAP_FAILED) {
        perror("mmap");
        exit(1);
    }
    start = *base + (-(uintptr_t)*base & (HUGE_PAGE - 1));
#ifdef MADV_HUGEPAGE
    madvise(start, nbytes + HUGE_PAGE, MADV_HUGEPAGE);
#endif
    return start;
}

/* A host may have taken free memory away: touch as much as is needed until two passes are alike. */
static void touch_memory(size_t nbytes) {
    double before = 1e9;
    for (int pass = 0; pass < 10; pass++) {
        char *base;
        size_t span;
        char *memory = fresh_memory(nbytes, &base, &span);
        double took = seconds();
        memset(memory, 1, nbytes);
        took = seconds() - took;
        munmap(base, span);
        if (took > 0.8 * before) return;
        before = took;
    }
}

static void *read_units(void *unused) {
    size_t start;
    while ((start = atomic_fetch_add(&job.next, UNIT)) < job.nbytes) {
        size_t end = job.nbytes - start < UNIT ? job.nbytes : start + UNIT;
        while (start < end) {
            size_t wanted = end - start < PIECE ? end - start : PIECE;
            ssize_t got = pread(job.fd, job.memory + start, wanted, (off_t)start);
            if (got <= 0) {
                if (got < 0 && errno == EINTR) continue;
                atomic_store(&job.failed, 1);
                return unused;
            }
            start += (size_t)got;
        }
    }
    return unused;
}

static double read_file(int threads) {
    pthread_t ids[MOST_THREADS];
    double start = seconds();
    int made = 1;
    while (made < threads && !pthread_create(&ids[made], NULL, read_units, NULL)) made++;
    read_units(NULL);
    for (int i = 1; i < made; i++) pthread_join(ids[i], NULL);
    if (made < threads) atomic_store(&job.failed, 1);
    return seconds() - start;
}

int main(int argc, char **argv) {
    struct stat status;
    char *base;
    size_t span;
    int threads = argc == 3 ? atoi(argv[2]) : 0;
    if (threads < 1 || threads > MOST_THREADS) {
        fprintf(stderr, "usage: read_limit FILE THREADS\n");
        return 2;
    }
    job.fd = open(argv[1], O_RDONLY);
    if (job.fd < 0 || fstat(job.fd, &status)) {
        perror(argv[1]);
        return 1;
    }
    job.nbytes = (size_t)status.st_size;
    touch_memory(job.nbytes);
    job.memory = fresh_memory(job.nbytes, &base, &span);
    double took = read_file(threads);
    if (job.failed) {
        fprintf(stderr, "%s: could not be read by %d threads\n", argv[1], threads);
        return 1;
    }
    printf("%.3f\n", (double)job.nbytes / took / 1e9);
    return 0;
}
