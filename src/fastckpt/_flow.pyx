# cython: language_level=3, boundscheck=False, wraparound=False, freethreading_compatible=True
"""Memory that a stream is made of, or goes to, in the order of its bytes; many pieces of it in one call of the system.

Each segment is summed while it is in cache: on its way in after it was read, on its way out before it is written, so
that a later segment may be the column of sums itself. The loops hold no GIL, raise nothing, and come back every
SLICE bytes, or where the system has a word: a signal, a descriptor that would have to wait, an end, an error. Before
they wait they come back, too: a signal that came while they did not wait interrupts nothing, and Python has to see it.
"""

cimport cython
from cpython.buffer cimport PyBUF_READ, PyBUF_SIMPLE, PyBUF_WRITABLE, PyBUF_WRITE
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.memoryview cimport PyMemoryView_FromMemory
from libc.errno cimport EINVAL, errno
from libc.stdint cimport int64_t, uint8_t, uint32_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from ._held cimport Held, hold, release
from ._pages cimport (
    HUGE_PAGE, PAGES_HUGE, PAGES_OLD, SLOW_NS, Pages, pages_begin, pages_make_huge, pages_populate, pages_take_small,
)

cdef extern from "<sys/uio.h>" nogil:
    struct iovec:
        void* iov_base
        size_t iov_len
    ssize_t readv(int fd, const iovec* parts, int count)
    ssize_t writev(int fd, const iovec* parts, int count)

cdef extern from "<poll.h>" nogil:
    enum:
        POLLIN
    struct pollfd:
        int fd
        short events
    int poll(pollfd* fds, unsigned long count, int timeout)

cdef extern from "<unistd.h>" nogil:
    int usleep(unsigned int microseconds)

cdef extern from "crc32.h" nogil:
    enum:
        CRC32_KERNELS
        CRC32_USABLE
    int crc32_usable(int kernel)
    uint32_t crc32_update(int kernel, uint32_t crc, const void* data, size_t nbytes)

cdef enum:
    MAX_PARTS = 1024  # of one call, what every system grants (IOV_MAX)
    CHUNK_NBYTES = 256 << 10  # fits a small L2 together with what the kernel copies
    MAX_GAP = 64
    SLICE_NBYTES = 32 << 20  # 10 ms: how long Ctrl-C waits where nothing else does
    # An object is handed memory itself from here on; below, a copy is cheaper than a call.
    LARGE_NBYTES = 32 << 10
    # Whoever waits for a sender that is slower is woken for each of its writes, which costs both more than the bytes
    # are worth. Let some more come first, where as much as a chunk is still wanted.
    PAUSE_MICROSECONDS = 100
    IS_ENDED = -1

ENDED = IS_ENDED

cdef uint8_t ZEROS[MAX_GAP]


cdef bint has_more(int fd) noexcept nogil:
    """Whether a read would not have to wait."""
    cdef pollfd wanted
    wanted.fd, wanted.events = fd, POLLIN
    return poll(&wanted, 1, 0) != 0


@cython.final
cdef class Flow:
    """Segments of memory and how far they are: ``row`` is the first that is not done, ``done`` all bytes so far."""

    cdef Held held
    cdef const int64_t* address
    cdef const int64_t* nbytes
    cdef const int64_t* gap
    cdef uint32_t* crc
    cdef readonly Py_ssize_t rows, row
    cdef readonly int64_t done
    cdef int64_t in_row  # bytes of that segment and of the gap behind it that are done, or waiting in parts
    cdef int kernel
    cdef Pages pages
    cdef int64_t made  # the last huge page that was
    cdef iovec parts[MAX_PARTS]
    cdef int first, count  # of parts that wait to be written
    cdef uint8_t sink[MAX_GAP]
    cdef uint8_t* scratch
    cdef bint through_scratch

    def __cinit__(self, address, nbytes, gap, crc=None, int kernel=0, huge=None, int64_t slow_page_ns=SLOW_NS):
        """``address`` (0: read and dropped), ``nbytes``, ``gap`` (zeros behind the segment, at most 64): int64 columns.

        ``crc`` (None: not wanted) is a uint32 column, which is gone on with. The caller answers for the addresses.
        ``huge`` says that the memory is fresh, and whether huge pages were asked for (None: it may be in use); they are
        slow from ``slow_page_ns`` on.
        """
        cdef Py_ssize_t row
        self.rows = len(address)
        if crc is not None and not (0 <= kernel < CRC32_KERNELS and crc32_usable(kernel) == CRC32_USABLE):
            raise ValueError(f"kernel={kernel}: not a CRC-32 kernel of this CPU")
        self.kernel = kernel
        self.made = -1
        pages_begin(&self.pages, huge, slow_page_ns)
        self.address = <const int64_t*> hold(&self.held, address, PyBUF_SIMPLE, self.rows * 8)
        self.nbytes = <const int64_t*> hold(&self.held, nbytes, PyBUF_SIMPLE, self.rows * 8)
        self.gap = <const int64_t*> hold(&self.held, gap, PyBUF_SIMPLE, self.rows * 8)
        if crc is not None:
            self.crc = <uint32_t*> hold(&self.held, crc, PyBUF_WRITABLE, self.rows * 4)
        for row in range(self.rows):
            if self.nbytes[row] < 0 or not 0 <= self.gap[row] <= MAX_GAP:
                raise ValueError(f"segment {row} has {self.nbytes[row]} bytes and a gap of {self.gap[row]}")
        self.scratch = <uint8_t*> malloc(CHUNK_NBYTES)
        if self.scratch == NULL:
            raise MemoryError()

    def __dealloc__(self):
        free(self.scratch)
        release(&self.held)

    # -- one batch of parts

    cdef bint add(self, const void* data, int64_t nbytes) noexcept nogil:
        self.parts[self.count].iov_base, self.parts[self.count].iov_len = <void*> data, nbytes
        self.count += 1
        return self.count < MAX_PARTS

    cdef int64_t gather(self, Py_ssize_t end, bint outgoing) noexcept nogil:
        """Gather parts from where things are, up to segment ``end``; how many bytes they have.

        Outgoing parts are summed, and count as done for the next batch.
        """
        cdef Py_ssize_t row = self.row
        cdef int64_t at = self.in_row, total = 0, n
        self.first = self.count = 0
        while row < end and total < CHUNK_NBYTES and self.count < MAX_PARTS:
            if at < self.nbytes[row]:
                n = min(self.nbytes[row] - at, CHUNK_NBYTES - total)
                if self.address[row] == 0:
                    if self.count:
                        break
                    self.add(self.scratch, n)  # alone: there is one scratch
                    return n
                if outgoing and self.crc != NULL:
                    self.crc[row] = crc32_update(self.kernel, self.crc[row], <uint8_t*> self.address[row] + at, n)
                self.add(<uint8_t*> self.address[row] + at, n)
            else:
                n = self.nbytes[row] + self.gap[row] - at
                if n:
                    self.add(&ZEROS[0] if outgoing else &self.sink[0], n)
            at += n
            total += n
            if at == self.nbytes[row] + self.gap[row]:
                row += 1
                at = 0
        if outgoing:
            self.row, self.in_row = row, at
        return total

    # -- in

    cdef void arrived(self, int64_t nbytes) noexcept nogil:
        """Go on by bytes that are in their places."""
        cdef int64_t n
        cdef const uint8_t* data
        self.done += nbytes
        while nbytes:
            if self.in_row < self.nbytes[self.row]:
                n = min(nbytes, self.nbytes[self.row] - self.in_row)
                if self.crc != NULL:
                    data = <uint8_t*> self.address[self.row] + self.in_row if self.address[self.row] else self.scratch
                    self.crc[self.row] = crc32_update(self.kernel, self.crc[self.row], data, n)
            else:
                n = min(nbytes, self.nbytes[self.row] + self.gap[self.row] - self.in_row)
            self.in_row += n
            nbytes -= n
            if self.in_row == self.nbytes[self.row] + self.gap[self.row]:
                self.row += 1
                self.in_row = 0

    cdef void pass_empty(self, Py_ssize_t end) noexcept nogil:
        """Go past segments that have no bytes, and no gap."""
        while self.row < end and self.in_row == self.nbytes[self.row] + self.gap[self.row]:
            self.row += 1
            self.in_row = 0

    cdef void make_pages(self) noexcept nogil:
        """Make the pages that parts go to: while the system copies, it holds what the sender is waiting for."""
        cdef int64_t start, stop
        cdef int i = 0
        while i < self.count:
            start = <int64_t> self.parts[i].iov_base
            stop = start + self.parts[i].iov_len
            i += 1
            if start == <int64_t> self.scratch or start == <int64_t> &self.sink[0]:
                continue
            if self.pages.kind == PAGES_HUGE:
                if start // HUGE_PAGE == self.made:
                    start = (start | (HUGE_PAGE - 1)) + 1
                self.made = (stop - 1) // HUGE_PAGE
                if pages_make_huge(&self.pages, start, stop):
                    pages_take_small(self.address + self.row, self.nbytes + self.row, self.rows - self.row)
            else:
                while i < self.count and 0 <= <int64_t> self.parts[i].iov_base - stop <= MAX_GAP:
                    stop = <int64_t> self.parts[i].iov_base + self.parts[i].iov_len
                    i += 1
                pages_populate(start, stop)

    cdef int receive_some(self, int fd, Py_ssize_t end) noexcept nogil:
        cdef int64_t left = SLICE_NBYTES, total
        cdef ssize_t n
        while left > 0:
            self.pass_empty(end)
            if self.row == end:
                return 0
            total = self.gather(end, False)
            if self.pages.kind != PAGES_OLD:
                self.make_pages()
            n = readv(fd, self.parts, self.count)
            if n < 0:
                return errno
            if n == 0:
                return IS_ENDED
            self.arrived(n)
            left -= n
            if n < total and not has_more(fd):
                if total == CHUNK_NBYTES:
                    usleep(PAUSE_MICROSECONDS)
                break
        self.pass_empty(end)
        return 0

    def receive(self, int fd, Py_ssize_t end):
        """Read from ``fd`` up to segment ``end``, or a slice of that: 0, ENDED where the stream is, or an errno."""
        cdef int status
        self.check(end)
        with nogil:
            status = self.receive_some(fd, end)
        return status

    def place(self, Py_ssize_t end):
        """Where the next bytes go, for an object to fill: a writable memoryview; None where segment ``end`` is reached.

        After ``filled`` the view must not be used any more.
        """
        cdef int64_t total
        self.check(end)
        self.pass_empty(end)
        if self.row == end:
            return None
        total = self.gather(end, False)
        if self.pages.kind != PAGES_OLD:
            self.make_pages()
        self.through_scratch = self.parts[0].iov_len < LARGE_NBYTES
        if self.through_scratch:
            return PyMemoryView_FromMemory(<char*> self.scratch, total, PyBUF_WRITE)
        return PyMemoryView_FromMemory(<char*> self.parts[0].iov_base, self.parts[0].iov_len, PyBUF_WRITE)

    def filled(self, Py_ssize_t nbytes):
        """The first ``nbytes`` of the last place are there."""
        cdef Py_ssize_t n, left = nbytes
        cdef const uint8_t* data = self.scratch
        if not 0 <= nbytes <= self.gathered():
            raise ValueError(f"{nbytes} bytes are more than there was room for")
        if self.through_scratch:
            while left:
                n = min(left, <Py_ssize_t> self.parts[self.first].iov_len)
                if self.parts[self.first].iov_base != self.scratch:
                    memcpy(self.parts[self.first].iov_base, data, n)
                self.first += 1
                data += n
                left -= n
        self.first = self.count = 0
        self.arrived(nbytes)

    cdef Py_ssize_t gathered(self):
        cdef Py_ssize_t total = 0, i
        for i in range(self.first, self.count):
            total += self.parts[i].iov_len
        return total

    cdef int check(self, Py_ssize_t end) except -1:
        if end < self.row or end > self.rows:
            raise ValueError(f"segment {end} is none of {self.row} to {self.rows}")
        return 0

    # -- out

    cdef void written(self, int64_t nbytes) noexcept nogil:
        """Drop parts, or the front of one, that were written."""
        cdef iovec* part
        self.done += nbytes
        while nbytes:
            part = self.parts + self.first
            if <int64_t> part.iov_len > nbytes:
                part.iov_base = <uint8_t*> part.iov_base + nbytes
                part.iov_len -= nbytes
                return
            nbytes -= part.iov_len
            self.first += 1

    cdef int send_some(self, int fd, Py_ssize_t end) noexcept nogil:
        cdef int64_t left = SLICE_NBYTES
        cdef ssize_t n
        while left > 0:
            if self.first == self.count:
                self.pass_empty(end)
                if self.row == end:
                    return 0
                self.gather(end, True)
            n = writev(fd, self.parts + self.first, self.count - self.first)
            if n < 0:
                return errno
            if n == 0:
                return EINVAL
            self.written(n)
            left -= n
            if self.first < self.count:  # a signal has cut it short, or there is no more room
                return 0
        return 0

    def send(self, int fd, Py_ssize_t end):
        """Write to ``fd`` up to segment ``end``, or a slice of that: 0 or an errno. All is sent when ``sent(end)``."""
        cdef int status
        self.check(end)
        with nogil:
            status = self.send_some(fd, end)
        return status

    def sent(self, Py_ssize_t end):
        """Whether everything before segment ``end`` was written."""
        if self.first == self.count:
            self.pass_empty(end)
        return self.row == end and self.first == self.count

    def piece(self, Py_ssize_t end):
        """The next bytes, for an object to write all of: a memoryview or bytes; None at segment ``end``."""
        cdef int64_t total
        cdef int i
        cdef bytes joined
        cdef char* target
        self.check(end)
        self.pass_empty(end)
        if self.row == end:
            return None
        with nogil:
            total = self.gather(end, True)
        self.done += total
        i, self.first = 0, self.count
        if self.count == 1:
            return PyMemoryView_FromMemory(<char*> self.parts[0].iov_base, total, PyBUF_READ)
        joined = PyBytes_FromStringAndSize(NULL, total)
        target = PyBytes_AS_STRING(joined)
        for i in range(self.count):
            memcpy(target, self.parts[i].iov_base, self.parts[i].iov_len)
            target += self.parts[i].iov_len
        return joined
