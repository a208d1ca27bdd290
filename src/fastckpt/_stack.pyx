# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: freethreading_compatible=True
"""The pickle machine's stack, marks and memo, as arrays.

Pickles number nearly everything they make and fetch nearly nothing again. So one look over the opcodes tells which
entries are fetched, and the others are not kept: the tuples of arguments, some for each tensor, die at once, and
neither memory nor the garbage collector sees tens of thousands of them.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Realloc
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.string cimport memchr, memset

from ._bytes cimport le32, le64
from ._held cimport Held, hold, release

from .errors import FormatError

cdef extern from "Python.h":
    PyObject* PyTuple_New(Py_ssize_t) except NULL
    void PyTuple_SET_ITEM(PyObject*, Py_ssize_t, PyObject*)
    void Py_XDECREF(PyObject*)

cdef enum:
    FEW = 64  # entries that the arrays start with

# What follows each opcode: 0 to 8 bytes, or one of these. The order is that of pickletools.opcodes' argument kinds.
cdef enum:
    COUNT1 = 9  # a length of 1, 4 or 8 bytes, and as many bytes
    COUNT4 = 10
    COUNT8 = 11
    LINE = 12  # text up to a newline
    TWO_LINES = 13
    NOT_AN_OPCODE = 14

cdef uint8_t ARGUMENT[256]
memset(ARGUMENT, NOT_AN_OPCODE, 256)


cdef int set_argument(int kind, bytes opcodes) except -1:
    cdef Py_ssize_t i
    for i in range(len(opcodes)):  # not over the bytes themselves, which are signed in C
        ARGUMENT[<uint8_t> opcodes[i]] = kind
    return 0


set_argument(0, b"(.012NQRabdoels)]}tu\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94\x97\x98")
set_argument(1, b"Khq\x80\x82")
set_argument(2, b"M\x83")
set_argument(4, b"Jjr\x84")
set_argument(8, b"G\x95")
set_argument(COUNT1, b"UC\x8a\x8c")
set_argument(COUNT4, b"TXB\x8b")
set_argument(COUNT8, b"\x8d\x8e\x96")
set_argument(LINE, b"FILPSVgp")
set_argument(TWO_LINES, b"ci")


cdef const uint8_t* after_argument(int op, const uint8_t* p, const uint8_t* end) noexcept nogil:
    """Where the next opcode is; NULL where this one is none, or its argument is not all there."""
    cdef int kind = ARGUMENT[op]
    cdef unsigned long long n = kind
    cdef int _line
    if kind >= LINE:
        if kind == NOT_AN_OPCODE:
            return NULL
        for _line in range(kind - LINE + 1):
            p = <const uint8_t*> memchr(p, 10, end - p) if p < end else NULL
            if p == NULL:
                return NULL
            p += 1
        return p
    if kind >= COUNT1:
        n = 1 if kind == COUNT1 else 4 if kind == COUNT4 else 8
        if n > <unsigned long long> (end - p):
            return NULL
        if kind == COUNT1:
            n, p = p[0], p + 1
        elif kind == COUNT4:
            n, p = le32(p), p + 4
        else:
            n, p = le64(p), p + 8
    if n > <unsigned long long> (end - p):
        return NULL
    return p + n


def argument_kinds():
    """How each of the 256 opcodes' arguments are skipped, for the test that compares them with pickletools."""
    return [ARGUMENT[op] for op in range(256)]


def opcodes_of(data):
    """The opcodes of the pickle that ``data`` (bytes-like) begins with, each once, up to STOP or what is no opcode."""
    cdef Py_buffer view
    cdef const uint8_t* p
    cdef const uint8_t* end
    cdef uint8_t seen[256]
    cdef int op = 0
    memset(seen, 0, 256)
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        p = <const uint8_t*> view.buf
        end = p + view.len
        with nogil:
            while p != NULL and p < end and op != c'.':
                op = p[0]
                seen[op] = 1
                p = after_argument(op, p + 1, end)
    finally:
        PyBuffer_Release(&view)
    return bytes([op for op in range(256) if seen[op]])


cdef unsigned long long argument_nbytes(int op, const uint8_t* p, const uint8_t* end) noexcept nogil:
    """How many bytes an argument has at least, as far as those that are there tell."""
    cdef int kind = ARGUMENT[op]
    cdef unsigned long long width
    if kind >= LINE:
        return end - p + 1 if kind == LINE else max(end - p + 1, 2)
    if kind < COUNT1:
        return kind
    width = 1 if kind == COUNT1 else 4 if kind == COUNT4 else 8
    if width > <unsigned long long> (end - p):
        return width
    return width + min(p[0] if width == 1 else le32(p) if width == 4 else le64(p), 1ULL << 62)


def skim(data, Py_ssize_t at):
    """Go over the opcodes of a pickle that is still arriving, from the one at ``at`` on: (at, needed).

    ``at`` is then the first opcode that is not there with all of its argument, or behind STOP; ``needed`` the bytes
    from there on that must follow before the pickle can end: 0 where it has ended, -1 where there is no opcode.
    """
    cdef Held held
    cdef Py_ssize_t size = len(data)
    cdef const uint8_t* start
    cdef const uint8_t* end
    cdef const uint8_t* p
    cdef const uint8_t* after
    held.count = 0
    try:
        start = <const uint8_t*> hold(&held, data, PyBUF_SIMPLE, size)
        p, end = start + at, start + size
        while p < end:
            after = after_argument(p[0], p + 1, end)
            if after == NULL:
                if ARGUMENT[p[0]] == NOT_AN_OPCODE:
                    return p - start, -1
                return p - start, 2 + argument_nbytes(p[0], p + 1, end)
            if p[0] == c'.':
                return after - start, 0
            p = after
        return p - start, 1
    finally:
        release(&held)


cdef bint find_fetched(const uint8_t* p, const uint8_t* end, uint8_t* fetched, int64_t room) noexcept nogil:
    """Set the bit of each entry that BINGET or LONG_BINGET fetches; False where looking ahead does not pay.

    It does not where entries are numbered in more than one way, or by text, or beyond ``room``.
    """
    cdef int64_t index
    cdef const uint8_t* argument
    cdef bint numbered = False, memoized = False
    cdef int op
    while p < end:
        op = p[0]
        argument = p + 1
        if ARGUMENT[op] < COUNT1:
            p = argument + ARGUMENT[op]
            if p > end:
                return False
            if op == c'q' or op == c'r':
                numbered = True
            elif op == c'h' or op == c'j':
                index = argument[0] if op == c'h' else le32(argument)
                if index >= room:
                    return False
                fetched[index >> 3] |= 1 << (index & 7)
            elif op == 0x94:  # MEMOIZE
                memoized = True
            elif op == c'.':
                return not (numbered and memoized)
        else:
            p = after_argument(op, argument, end)
            if p == NULL or op == c'g' or op == c'p':
                return False
    return False


cdef class Stack:
    def __cinit__(self):
        self.far_memo = {}

    def __dealloc__(self):
        cdef Py_ssize_t i
        for i in range(self.depth):
            Py_XDECREF(self.items[i])
        for i in range(self.memo_room):
            Py_XDECREF(self.memo[i])
        PyMem_Free(self.items)
        PyMem_Free(self.marks)
        PyMem_Free(self.memo)
        PyMem_Free(self.fetched)

    # -- the stack

    cdef int push(self, object value) except -1:
        if self.depth == self.room:
            self.items = <PyObject**> grown(self.items, &self.room, sizeof(PyObject*))
        Py_INCREF(value)
        self.items[self.depth] = <PyObject*> value
        self.depth += 1
        return 0

    cdef object pop(self):
        cdef object value
        if self.depth <= self.fence:
            raise empty()
        self.depth -= 1
        value = <object> self.items[self.depth]
        Py_DECREF(value)
        return value

    cdef object top(self):
        if self.depth <= self.fence:
            raise empty()
        return <object> self.items[self.depth - 1]

    cdef object under(self, Py_ssize_t at):
        """The object below position ``at``, which the opcode fills."""
        if at <= self.fence or at > self.depth:
            raise empty()
        return <object> self.items[at - 1]

    cdef int drop_to(self, Py_ssize_t at) except -1:
        while self.depth > at:
            self.depth -= 1
            Py_XDECREF(self.items[self.depth])
        return 0

    cdef int mark(self) except -1:
        if self.n_marks == self.marks_room:
            self.marks = <Py_ssize_t*> grown(self.marks, &self.marks_room, sizeof(Py_ssize_t))
        self.marks[self.n_marks] = self.fence = self.depth
        self.n_marks += 1
        return 0

    cdef Py_ssize_t pop_mark(self) except -1:
        """Where the objects above the last mark begin."""
        if self.n_marks == 0:
            raise FormatError("the opcode needs a MARK and there is none")
        self.n_marks -= 1
        self.fence = self.marks[self.n_marks - 1] if self.n_marks else 0
        return self.marks[self.n_marks]

    cdef tuple take_tuple(self, Py_ssize_t at):
        """The objects from ``at`` up, moved into a tuple."""
        cdef Py_ssize_t i, n = self.depth - at
        cdef PyObject* items
        cdef object result
        if n < 0 or at < self.fence:
            raise empty()
        items = PyTuple_New(n)
        for i in range(n):
            PyTuple_SET_ITEM(items, i, self.items[at + i])
        self.depth = at
        result = <object> items
        Py_DECREF(result)
        return <tuple> result

    # -- the memo

    cdef int look_ahead(self, const uint8_t* start, const uint8_t* end) except -1:
        """See which entries the pickle fetches, so that only those are kept."""
        cdef bint pays
        # Every entry takes a byte at least: an honest index is below the number of bytes.
        self.fetched_room = end - start
        self.fetched = <uint8_t*> PyMem_Calloc((self.fetched_room >> 3) + 1, 1)
        if self.fetched == NULL:
            raise MemoryError()
        with nogil:
            pays = find_fetched(start, end, self.fetched, self.fetched_room)
        if not pays:
            PyMem_Free(self.fetched)
            self.fetched = NULL
        return 0

    cdef int put(self, int64_t index, int64_t position) except -1:
        """Store the top of the stack; ``position`` is how many bytes of the pickle were executed."""
        cdef object value
        if self.depth <= self.fence:
            raise empty()
        if self.fetched != NULL and (index >= self.fetched_room or not self.fetched[index >> 3] >> (index & 7) & 1):
            self.n_memo += 1  # exact for MEMOIZE, which needs it: such a pickle numbers in no other way
            return 0
        value = <object> self.items[self.depth - 1]
        if index < 0:
            raise FormatError(f"memo index {index} is negative")
        if index >= self.memo_room:
            # An honest pickle numbers its entries one by one. Where an index is far from that, a table is too dear.
            if index > 4 * position + FEW:
                self.n_memo += index not in self.far_memo
                self.far_memo[index] = value
                return 0
            self.grow_memo(index)
        Py_INCREF(value)
        self.n_memo += self.memo[index] == NULL
        Py_XDECREF(self.memo[index])
        self.memo[index] = <PyObject*> value
        return 0

    cdef int grow_memo(self, Py_ssize_t index) except -1:
        cdef Py_ssize_t room = max(self.memo_room, index)
        self.memo = <PyObject**> grown(self.memo, &room, sizeof(PyObject*))
        memset(self.memo + self.memo_room, 0, (room - self.memo_room) * sizeof(PyObject*))
        self.memo_room = room
        for far in [far for far in self.far_memo if far < self.memo_room]:
            kept = self.far_memo.pop(far)
            Py_INCREF(kept)
            self.memo[<Py_ssize_t> far] = <PyObject*> kept
        return 0

    cdef int get(self, int64_t index) except -1:
        if 0 <= index < self.memo_room and self.memo[index] != NULL:
            self.push(<object> self.memo[index])
        elif index in self.far_memo:
            self.push(self.far_memo[index])
        else:
            raise FormatError(f"memo entry {index} is fetched and was never stored")
        return 0


cdef object empty():
    return FormatError("the stack is empty where the opcode needs an object")


cdef void* grown(void* array, Py_ssize_t* room, size_t itemsize) except NULL:
    """An array of more than ``room`` entries, which is set to how many."""
    cdef Py_ssize_t more = room[0] * 2 + FEW
    cdef void* larger = PyMem_Realloc(array, more * itemsize)
    if larger == NULL:
        raise MemoryError()
    room[0] = more
    return larger
