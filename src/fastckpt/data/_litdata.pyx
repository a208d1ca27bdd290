# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: freethreading_compatible=True
"""Items of LitData chunks, read by position: neighbours together, in the order of the file, without the GIL.

A Block is a stretch of items that lie back to back in a file, a mapping or memory. Its table of offsets is checked when
it is made; a file that has become shorter since then gives an error.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.errno cimport errno
from libc.stdint cimport int64_t, uint8_t
from libc.stdlib cimport free, malloc
from posix.stat cimport fstat, struct_stat

from .._bytes cimport le32
from .._held cimport Held, hold, release
from .._origin cimport READ_OK, READ_SHORT, Origin, origin_read
from ._litdata_batch cimport Batch
from ._litdata_layout cimport Layout

import os

from .litdata_errors import BadItem

cdef enum:
    # A read costs 0.35 us, about as much as copying this.
    GAP_NBYTES = 4 << 10
    # What one round brings into memory, unless one item is larger: enough for a read to cost little, and little enough
    # for a small L2 and for the allocator to keep.
    ROUND_NBYTES = 256 << 10
    ROUND_ITEMS = 4096
    NO_MEMORY = -10


cdef struct Span:
    const uint8_t* data
    int64_t nbytes


cdef struct Round:
    Span* spans
    uint8_t* scratch
    int64_t capacity
    int64_t wrong  # the position at which reading failed


cdef class Block:
    """``count`` items from ``first`` on of a table (bytes of u32) of offsets, in a Source with ``fd`` or ``view``.

    The offsets count from byte ``shift`` of the source. ``mapping`` is a mapping of all of the source's file.
    Raises BadItem for offsets that descend, or leave the source.
    """
    cdef readonly object source
    cdef readonly Py_ssize_t count
    cdef Origin origin
    cdef bytes table
    cdef const uint8_t* offsets
    cdef int64_t shift
    cdef Py_buffer held
    cdef bint holding, mapped

    def __cinit__(self, source, bytes table not None, int64_t first, int64_t count, int64_t shift, mapping=None):
        self.source, self.table, self.count, self.shift, self.mapped = source, table, count, shift, mapping is not None
        if first < 0 or count < 0 or first + count + 1 > PyBytes_GET_SIZE(table) // 4:
            raise ValueError(f"{count} items from {first} on are not in a table of {len(table)} bytes")
        self.offsets = <const uint8_t*> PyBytes_AS_STRING(table) + 4 * first
        self.origin.fd, self.origin.base, self.origin.nbytes = source.fd, source.base, source.nbytes
        self.origin.memory = NULL
        view = source.view if mapping is None else mapping
        if view is not None:
            PyObject_GetBuffer(view, &self.held, PyBUF_SIMPLE)
            self.holding = True
            self.origin.memory, self.origin.nbytes = <const uint8_t*> self.held.buf, self.held.len
        self.check_table()

    cdef int check_table(self) except -1:
        cdef int64_t i, offset, last = 0
        for i in range(self.count + 1):
            offset = le32(self.offsets + 4 * i)
            if offset < last:
                raise BadItem(f"offset {i} in its table is {offset}, less than the one before it ({last})")
            last = offset
        if begin_of(self, 0) < 0 or begin_of(self, self.count) > self.origin.nbytes:
            raise BadItem(
                f"its items end at byte {begin_of(self, self.count)}, and there are {self.origin.nbytes} bytes"
            )
        return 0

    def __dealloc__(self):
        if self.holding:
            PyBuffer_Release(&self.held)

    def span(self, int64_t item):
        """Where an item lies in the source: (offset, nbytes)."""
        return begin_of(self, item), begin_of(self, item + 1) - begin_of(self, item)


cdef inline int64_t begin_of(Block block, int64_t item) noexcept nogil:
    return block.shift + le32(block.offsets + 4 * item)


# ---- reading


cdef int still_whole(Block block) noexcept nogil:
    """A mapped file that was cut short must not be touched beyond its end, and reads as zeros before that."""
    cdef struct_stat status
    if not block.mapped:
        return READ_OK
    if fstat(block.origin.fd, &status) != 0:
        return errno
    return READ_OK if status.st_size >= block.origin.nbytes else READ_SHORT


cdef int64_t plan_run(Block block, const int64_t* items, int64_t first, int64_t stop, int64_t room,
                      int64_t* end) noexcept nogil:
    """Find one past the last item that is read together with the first, and where that read ends."""
    cdef int64_t i = first + 1, begin = begin_of(block, items[first])
    end[0] = begin_of(block, items[first] + 1)
    while i < stop and begin_of(block, items[i]) - end[0] <= GAP_NBYTES:
        if begin_of(block, items[i] + 1) - begin > room:
            break
        end[0] = max(end[0], begin_of(block, items[i] + 1))
        i += 1
    return i


cdef int64_t plan_round(Block block, const int64_t* items, int64_t first, int64_t stop, int64_t* nbytes) noexcept nogil:
    """Find one past the last item of this round: runs that together are not too large, but one item in any case."""
    cdef int64_t end = 0, i = first, last
    nbytes[0] = 0
    while i < stop:
        last = plan_run(block, items, i, stop, ROUND_NBYTES - nbytes[0], &end)
        end -= begin_of(block, items[i])
        if i > first and end > ROUND_NBYTES - nbytes[0]:
            break
        nbytes[0] += end
        i = last
    return i


cdef int64_t gather(Block block, const int64_t* items, int64_t first, int64_t stop, Round* turn,
                    int* status) noexcept nogil:
    """Bring items into memory, as many as one round takes; returns one past the last of them. They ascend."""
    cdef int64_t i, k, last, begin, end = 0, used = 0, nbytes
    stop = min(stop, first + ROUND_ITEMS)
    turn.wrong = first
    if block.origin.memory != NULL:
        status[0] = still_whole(block)
        for i in range(first, stop):
            turn.spans[i - first].data = block.origin.memory + begin_of(block, items[i])
            turn.spans[i - first].nbytes = begin_of(block, items[i] + 1) - begin_of(block, items[i])
        return stop
    stop = plan_round(block, items, first, stop, &nbytes)
    if nbytes > turn.capacity:
        free(turn.scratch)
        turn.scratch, turn.capacity = <uint8_t*> malloc(nbytes), nbytes
        if turn.scratch == NULL:
            turn.capacity, status[0] = 0, NO_MEMORY
            return stop
    status[0], i = READ_OK, first
    while i < stop:
        last = plan_run(block, items, i, stop, ROUND_NBYTES - used, &end)
        begin = begin_of(block, items[i])
        status[0] = origin_read(&block.origin, begin, turn.scratch + used, end - begin)
        if status[0] != READ_OK:
            turn.wrong = i
            return stop
        for k in range(i, last):
            turn.spans[k - first].data = turn.scratch + used + (begin_of(block, items[k]) - begin)
            turn.spans[k - first].nbytes = begin_of(block, items[k] + 1) - begin_of(block, items[k])
        used += end - begin
        i = last
    return stop


cdef object failure(Block block, int status, int64_t item):
    """The exception for a read that failed."""
    source = block.source
    offset, nbytes = block.span(item)
    if status == READ_SHORT:
        there = os.fstat(source.fd).st_size if source.fd >= 0 else source.nbytes
        return source.short(offset, nbytes, max(0, min(nbytes, there - offset)))
    if status == NO_MEMORY:
        return MemoryError(f"{source.name}: no memory for items from number {item} on")
    return OSError(status, os.strerror(status), source.name)


cdef class Rounds:
    """Rounds of reading some items of a block; gives back its memory with itself."""
    cdef Block block
    cdef Round turn
    cdef Held held
    cdef const int64_t* items
    cdef const int64_t* slots
    cdef int64_t first, last, stop

    def __cinit__(self, Block block, items, slots, int64_t start, int64_t stop):
        cdef int64_t i, before = 0
        self.block, self.last, self.stop = block, start, stop
        self.items = <const int64_t*> hold(&self.held, items, PyBUF_SIMPLE, -1)
        self.slots = <const int64_t*> hold(&self.held, slots, PyBUF_SIMPLE, -1)
        if not 0 <= start <= stop <= min(self.held.view[0].len, self.held.view[1].len) // 8:
            raise ValueError(f"[{start}, {stop}) is not in the columns")
        for i in range(start, stop):
            if not before <= self.items[i] < block.count:
                raise ValueError(f"item {self.items[i]} is not one of {block.count}, or not in ascending order")
            before = self.items[i]
        self.turn.spans = <Span*> malloc(max(1, min(stop - start, ROUND_ITEMS)) * sizeof(Span))
        if self.turn.spans == NULL:
            raise MemoryError

    def __dealloc__(self):
        release(&self.held)
        free(self.turn.spans)
        free(self.turn.scratch)

    cdef int64_t next(self) except -1:
        """Read the next ones: how many there are, 0 at the end."""
        cdef int status = READ_OK
        self.first = self.last
        if self.first == self.stop:
            return 0
        with nogil:
            self.last = gather(self.block, self.items, self.first, self.stop, &self.turn, &status)
        if status != READ_OK:
            raise failure(self.block, status, self.items[self.turn.wrong])
        return self.last - self.first

    cdef int check(self) except -1:
        """What was read from a mapping counts only if the file was whole to the end."""
        cdef int status = still_whole(self.block)
        if status != READ_OK:
            raise failure(self.block, status, self.items[self.first])
        return 0


def read_items(Layout layout, Block block, items, slots, int64_t start, int64_t stop, list samples):
    """Put the items ``items[start:stop]`` (numbers in the block, ascending) into ``samples`` at ``slots[start:stop]``.

    ``items`` and ``slots`` are int64 columns. Raises BadItem, FormatError for a file that is too short, OSError.
    """
    cdef Rounds rounds = Rounds(block, items, slots, start, stop)
    cdef int64_t i = 0, n
    try:
        while True:
            n = rounds.next()
            if n == 0:
                return
            for i in range(n):
                samples[rounds.slots[rounds.first + i]] = layout.decode(
                    rounds.turn.spans[i].data, rounds.turn.spans[i].nbytes
                )
            rounds.check()
    except BadItem as error:
        error.item = rounds.items[rounds.first + i]
        raise


def read_one(Layout layout, Block block, int64_t item):
    """Read one item; from the file, where it is mapped, which then need not be asked whether it is still whole.

    Raises what read_items raises.
    """
    cdef Origin origin = block.origin
    cdef uint8_t* scratch = NULL
    cdef const uint8_t* data
    cdef int64_t begin, nbytes
    cdef int status = READ_OK
    if not 0 <= item < block.count:
        raise ValueError(f"item {item} is not one of {block.count}")
    begin, nbytes = begin_of(block, item), begin_of(block, item + 1) - begin_of(block, item)
    try:
        if origin.memory != NULL and not block.mapped:
            data = origin.memory + begin
        else:
            origin.memory, data = NULL, NULL
            scratch = <uint8_t*> malloc(max(1, nbytes))
            if scratch == NULL:
                status = NO_MEMORY
            else:
                with nogil:
                    status = origin_read(&origin, begin, scratch, nbytes)
                data = scratch
        if status != READ_OK:
            raise failure(block, status, item)
        return layout.decode(data, nbytes)
    except BadItem as error:
        error.item = item
        raise
    finally:
        free(scratch)


def read_raw(Block block, items, int64_t start, int64_t stop):
    """The bytes of ``items[start:stop]``, for whatever unseals them. Raises what read_items raises but for BadItem."""
    cdef Rounds rounds = Rounds(block, items, items, start, stop)
    cdef int64_t i, n
    cdef list raw = []
    while True:
        n = rounds.next()
        if n == 0:
            return raw
        for i in range(n):
            raw.append(PyBytes_FromStringAndSize(<const char*> rounds.turn.spans[i].data, rounds.turn.spans[i].nbytes))
        rounds.check()


def stack_items(Batch batch, Block block, items, slots, int64_t start, int64_t stop):
    """Put the items ``items[start:stop]`` into the rows ``slots[start:stop]`` of a batch. Raises Uneven too."""
    cdef Rounds rounds = Rounds(block, items, slots, start, stop)
    cdef const Span* span
    cdef int64_t i = 0, n
    try:
        while True:
            n = rounds.next()
            if n == 0:
                return
            i, span = 0, rounds.turn.spans
            if not batch.ready:
                batch.prepare(span.data, span.nbytes)
            with nogil:
                for i in range(n):
                    if batch.stack(rounds.slots[rounds.first + i], span[i].data, span[i].nbytes):
                        break
                else:
                    i = n
            if i < n:
                batch.refuse(span[i].data, span[i].nbytes)
            for i in range(n if batch.has_objects else 0):
                batch.list_objects(rounds.slots[rounds.first + i], span[i].data)
            rounds.check()
    except BadItem as error:
        error.item = rounds.items[rounds.first + i]
        raise


def stack_bytes(Batch batch, int64_t row, bytes item not None):
    """Put one item into a row of a batch. Raises BadItem and Uneven."""
    cdef const uint8_t* data = <const uint8_t*> PyBytes_AS_STRING(item)
    cdef int64_t nbytes = PyBytes_GET_SIZE(item)
    if not batch.ready:
        batch.prepare(data, nbytes)
    if batch.stack(row, data, nbytes):
        batch.refuse(data, nbytes)
    if batch.has_objects:
        batch.list_objects(row, data)


# ---- which chunk


def split(begins, positions, items, slots, bint ordered):
    """Divide positions among chunks: a list of (chunk, start, stop), each a stretch of ``items`` and ``slots``.

    ``begins`` (int64, ascending from 0, the end of the last chunk at its end) says where chunks begin. ``slots`` says
    where the positions stand in ascending order; where it is not ``ordered`` yet, they must ascend as they are, or the
    result is None. ``items`` gets their numbers in their chunk.
    """
    cdef Held held
    held.count = 0
    try:
        return split_columns(&held, begins, positions, items, slots, ordered)
    finally:
        release(&held)


cdef object split_columns(Held* held, begins, positions, items, slots, bint ordered):
    cdef const int64_t* begin = <const int64_t*> hold(held, begins, PyBUF_SIMPLE, -1)
    cdef const int64_t* position = <const int64_t*> hold(held, positions, PyBUF_SIMPLE, -1)
    cdef int64_t chunks = held.view[0].len // 8 - 1, n = held.view[1].len // 8
    cdef int64_t* item = <int64_t*> hold(held, items, PyBUF_WRITABLE, n * 8)
    cdef int64_t* slot = <int64_t*> hold(held, slots, PyBUF_WRITABLE, n * 8)
    cdef int64_t i, p, chunk = 0, start = 0, last = 0
    cdef list groups = []
    for i in range(n):
        if not ordered:
            slot[i] = i
        elif not 0 <= slot[i] < n:
            raise ValueError(f"{slot[i]} is not one of {n} positions")
        p = position[slot[i]]
        if p < last:
            return None
        if p >= begin[chunks]:
            raise ValueError(f"position {p} is not one of {begin[chunks]}")
        if p >= begin[chunk + 1]:
            if i > start:
                groups.append((chunk, start, i))
            chunk, start = chunk_of(begin, chunk, chunks, p), i
        item[i], last = p - begin[chunk], p
    if n > start:
        groups.append((chunk, start, n))
    return groups


cdef int64_t chunk_of(const int64_t* begin, int64_t low, int64_t high, int64_t position) noexcept nogil:
    """The chunk in [low, high) that has the position: the last one that begins at it or before."""
    cdef int64_t middle
    while high - low > 1:
        middle = low + (high - low) // 2
        if begin[middle] <= position:
            low = middle
        else:
            high = middle
    return low
