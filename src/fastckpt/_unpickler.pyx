# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: freethreading_compatible=True
"""A pickle machine for data alone: every opcode of protocols 0 to 5 is read here, and done by Objects.

Work and memory stay in proportion to the bytes: counts are compared with what is left before anything is allocated,
and the hashing of keys, which can be made exponential, is counted beforehand.
"""

import codecs

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.long cimport PyLong_FromLong
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.string cimport memchr, memcpy

from ._bytes cimport le16, le32, le64
from ._keys cimport Keys
from ._pickle_objects cimport Objects
from ._storages cimport Storages

from ._pickle_objects import CONTENT_ERRORS
from .errors import CheckpointError, FormatError, LimitError, UnsafePickleError, UnsupportedError, short
from .limits import Limits

cdef extern from "Python.h":
    object PyUnicode_DecodeUTF8(const char*, Py_ssize_t, const char* errors)
    bint PyTuple_CheckExact(object)

# What a persistent id may be; _pickle_objects.pxd has them, too.
PIDS_NONE, PIDS_ZIP, PIDS_LEGACY, PIDS_TAR = range(4)

cdef enum:
    # An honest pickle copies what it holds three times at most: text to bytes, to a bytearray or an array.
    COPIES = 4
    SPARE_COPIES = 1 << 16

cdef int64_t WITHOUT_BOUND = 1 << 62


class Truncated(FormatError):
    """The pickle goes on beyond the bytes that are there."""


class Unpickled:
    """What a pickle holds: ``obj``, and by order of appearance all it names.

    ``end`` is the number of bytes up to and with STOP; ``storages`` and ``tensors`` are specs (``index`` is a place),
    ``names`` every Global, ``unknown`` the (qualname, note) of each that is not known to be plain data,
    ``undecodable`` the first Python 2 string that is not in the encoding, or None. ``touched``, of a symbolic one, are
    pairs of what the pickle changes though it is no object that the pickle made (a class, a storage), and an Opaque
    without arguments that holds the changes.
    """

    __slots__ = ("end", "names", "obj", "storages", "tensors", "touched", "undecodable", "unknown")

    def __init__(self, machine, obj, end):
        self.obj, self.end = obj, end
        self.storages, self.tensors = machine.described.storages, machine.described.tensors
        self.names, self.unknown, self.undecodable = machine.names, machine.unknown, machine.undecodable
        self.touched = list(machine.touched.values())


@cython.final
cdef class Machine(Objects):
    cdef const uint8_t* p
    cdef const uint8_t* end
    cdef str encoding, errors
    cdef object limits
    cdef readonly object undecodable

    # -- reading arguments -------------------------------------------------------------------------------------

    cdef inline const uint8_t* need(self, uint64_t nbytes) except NULL:
        """The next bytes, checked to be there, and past them."""
        cdef const uint8_t* at = self.p
        if nbytes > <uint64_t> (self.end - self.p):
            raise Truncated(f"{nbytes} more bytes are needed and {self.end - self.p} are left; the pickle is cut short")
        self.p += nbytes
        return at

    cdef bytes line(self):
        """The rest of a text line, without its newline."""
        cdef const uint8_t* at = self.p
        cdef const uint8_t* newline = <const uint8_t*> memchr(at, 10, self.end - at) if self.end > at else NULL
        if newline == NULL:
            raise Truncated("a text argument has no newline; the pickle is cut short")
        self.p = newline + 1
        return PyBytes_FromStringAndSize(<const char*> at, newline - at)

    cdef object python2_text(self, bytes raw):
        """A Python 2 str: text in the caller's encoding, bytes where that is asked for or does not fit."""
        if self.encoding == "bytes":
            return raw
        try:
            return raw.decode(self.encoding, self.errors)
        except UnicodeDecodeError:
            if self.undecodable is None:
                self.undecodable = raw
            return raw

    cdef object int_text(self, bytes raw):
        digits = raw.strip().rstrip(b"Ll")
        if len(digits) > self.limits.int_digits:
            raise LimitError(f"an int of {len(digits)} digits; {self.limits.int_digits} are allowed "
                             f"(Limits.int_digits)")
        try:
            return int(digits)
        except ValueError:
            pass
        try:
            return int(digits, 0 if self.symbolic else 10)  # an unpickler takes 0x10, which no pickler writes
        except ValueError:
            raise FormatError(f"{raw[:40]!r} is not a decimal int") from None

    # -- the loop ----------------------------------------------------------------------------------------------

    cdef object run(self):
        """Execute up to STOP; the object on top of the stack."""
        cdef int op
        cdef uint64_t n
        cdef Py_ssize_t mark
        cdef object value, other
        while True:
            self.op_at = self.p
            op = self.need(1)[0]
            if op == c'h':  # BINGET
                self.get(self.need(1)[0])
            elif op == c'q':  # BINPUT
                self.put(self.need(1)[0], self.p - self.start)
            elif op == c'j':  # LONG_BINGET
                self.get(le32(self.need(4)))
            elif op == c'r':  # LONG_BINPUT
                self.put(le32(self.need(4)), self.p - self.start)
            elif op == c'X':  # BINUNICODE
                n = le32(self.need(4))
                self.push(text_at(self.need(n), n))
            elif op == c'K':  # BININT1
                self.push(PyLong_FromLong(self.need(1)[0]))
            elif op == c'M':  # BININT2
                self.push(PyLong_FromLong(le16(self.need(2))))
            elif op == c'J':  # BININT
                self.push(PyLong_FromLong(<int32_t> le32(self.need(4))))
            elif op == c'(':
                self.mark()
            elif op == c't':
                mark = self.pop_mark()
                self.push(self.take_tuple(mark))
            elif op == c')':
                self.push(())
            elif op == 0x85 or op == 0x86 or op == 0x87:  # TUPLE1 TUPLE2 TUPLE3
                self.push(self.take_tuple(self.depth - (op - 0x84)))
            elif op == c'Q':  # BINPERSID
                self.push(self.persistent(self.pop()))
            elif op == c'R':  # REDUCE
                value = self.pop()
                other = self.pop()
                if self.symbolic:
                    self.push(self.symbol(other, value, None))
                    continue
                if not PyTuple_CheckExact(value):
                    raise FormatError(f"the arguments of a call are {short(value)}, a tuple is expected")
                self.push(self.call(other, value))
            elif op == 0x88:
                self.push(True)
            elif op == 0x89:
                self.push(False)
            elif op == c'N':
                self.push(None)
            elif op == c'G':  # BINFLOAT
                self.push(big_endian_double(self.need(8)))
            elif op == c'u':  # SETITEMS
                mark = self.pop_mark()
                self.set_all(self.under(mark), mark)
            elif op == c's':  # SETITEM
                mark = self.depth - 2
                self.set_all(self.under(mark), mark)
            elif op == c'e':  # APPENDS
                mark = self.pop_mark()
                self.append_all(self.under(mark), mark)
            elif op == c'a':  # APPEND
                mark = self.depth - 1
                self.append_all(self.under(mark), mark)
            elif op == c'}':
                self.push({})
            elif op == c']':
                self.push([])
            elif op == c'b':  # BUILD
                value = self.pop()
                self.build(self.top(), value)
            elif op == c'c':  # GLOBAL
                value = self.line()
                self.push(self.named(name_text(value), name_text(self.line())))
            elif op == 0x93:  # STACK_GLOBAL
                value = self.pop()
                self.push(self.named(self.pop(), value))
            elif op == 0x94:  # MEMOIZE
                self.put(self.n_memo, self.p - self.start)  # the number of entries so far
            elif op == 0x8c:  # SHORT_BINUNICODE
                n = self.need(1)[0]
                self.push(text_at(self.need(n), n))
            elif op == c'.':
                return self.pop()
            else:
                self.run_rare(op)

    cdef int run_rare(self, int op) except -1:
        """The opcodes that no torch.save of today writes for a tensor."""
        cdef uint64_t n
        cdef Py_ssize_t mark
        if op == 0x80:  # PROTO
            n = self.need(1)[0]
            if n > 5:
                raise UnsupportedError(f"pickle protocol {n}; 0 to 5 are known")
        elif op == 0x95:  # FRAME
            n = le64(self.need(8))
            if n > <uint64_t> (self.end - self.p):
                raise Truncated(f"a frame of {n} bytes and {self.end - self.p} are left; the pickle is cut short")
        elif op == 0x8d:  # BINUNICODE8
            n = le64(self.need(8))
            self.push(text_at(self.need(n), n))
        elif op == c'C' or op == c'B' or op == 0x8e or op == 0x96:  # bytes of 1-, 4- and 8-byte lengths, BYTEARRAY8
            n = self.need(1)[0] if op == c'C' else le32(self.need(4)) if op == c'B' else le64(self.need(8))
            value = PyBytes_FromStringAndSize(<const char*> self.need(n), n)
            self.push(bytearray(value) if op == 0x96 else value)
        elif op == c'U' or op == c'T':  # SHORT_BINSTRING BINSTRING
            n = self.need(1)[0] if op == c'U' else le32(self.need(4))
            self.push(self.python2_text(PyBytes_FromStringAndSize(<const char*> self.need(n), n)))
        elif op == 0x8a or op == 0x8b:  # LONG1 LONG4
            n = self.need(1)[0] if op == 0x8a else le32(self.need(4))
            if op == 0x8b and n > 0x7FFFFFFF:
                raise FormatError("an int of negative length")
            self.push(int.from_bytes(PyBytes_FromStringAndSize(<const char*> self.need(n), n), "little", signed=True))
        elif op == c'0':  # POP, of an object or of a MARK
            if self.depth > self.fence:
                self.drop_to(self.depth - 1)
            else:
                self.pop_mark()
        elif op == c'1':  # POP_MARK
            mark = self.pop_mark()
            self.drop_to(mark)
        elif op == c'2':  # DUP
            self.push(self.top())
        elif op == c'l':
            mark = self.pop_mark()
            self.push(list(self.take_tuple(mark)))
        elif op == c'd':
            self.run_dict()
        elif op == 0x8f:
            self.push(set())
        elif op == 0x90:  # ADDITEMS
            mark = self.pop_mark()
            self.add_all(self.under(mark), mark)
        elif op == 0x91:  # FROZENSET
            mark = self.pop_mark()
            members = self.take_tuple(mark)
            self.check_keys(members)
            self.push(frozenset(members))
        elif op == c'I':
            raw = self.line()
            self.push(True if raw == b"01" else False if raw == b"00" else self.int_text(raw))
        elif op == c'L':
            self.push(self.int_text(self.line()))
        elif op == c'F':
            raw = self.line()
            try:
                self.push(float(raw))
            except ValueError:
                raise FormatError(f"{raw[:40]!r} is not a float") from None
        elif op == c'S':
            self.push(self.python2_text(unquoted(self.line())))
        elif op == c'V':
            self.push(self.line().decode("raw-unicode-escape"))
        else:
            self.run_calls(op)
        return 0

    cdef int run_dict(self) except -1:
        cdef Py_ssize_t mark = self.pop_mark()
        result = {}
        self.set_all(result, mark)
        return self.push(result)

    cdef int run_calls(self, int op) except -1:
        """Text memo and ids, and the older and newer ways to make an object."""
        cdef Py_ssize_t mark
        if op == c'p':
            self.put(self.memo_index(), self.p - self.start)
        elif op == c'g':
            self.get(self.memo_index())
        elif op == c'P':  # PERSID
            self.push(self.persistent(name_text(self.line())))
        elif op == 0x81:  # NEWOBJ
            args = self.pop()
            self.push(self.new_object(self.pop(), args, {}))
        elif op == 0x92:  # NEWOBJ_EX
            kwargs = self.pop()
            args = self.pop()
            self.push(self.new_object(self.pop(), args, kwargs))
        elif op == c'i':  # INST
            module = name_text(self.line())
            name = name_text(self.line())
            mark = self.pop_mark()
            args = self.take_tuple(mark)
            cls = self.named(module, name)
            self.push(self.symbol(cls, args, None) if self.symbolic else self.call(cls, args))
        elif op == c'o':  # OBJ
            mark = self.pop_mark()
            args = self.take_tuple(mark)
            if not args:
                raise FormatError("an object is made without a class")
            cls, args = args[0], args[1:]
            self.push(self.symbol(cls, args, None) if self.symbolic else self.call(cls, args))
        elif op == 0x82 or op == 0x83 or op == 0x84:  # EXT1 EXT2 EXT4
            n = self.need(1)[0] if op == 0x82 else le16(self.need(2)) if op == 0x83 else le32(self.need(4))
            if self.symbolic:
                return self.push(self.unnamed(f"copyreg extension {n}", None))
            raise UnsafePickleError(f"entry {n} of the extension registry is named; what it is, is not in the file",
                                    qualname=f"copyreg extension {n}")
        elif op == 0x98 and self.symbolic:  # READONLY_BUFFER changes nothing of what the pickle has itself
            self.top()
        elif op == 0x97 or op == 0x98:  # NEXT_BUFFER READONLY_BUFFER
            raise UnsupportedError("the pickle refers to out-of-band buffers, which were written somewhere else")
        else:
            raise FormatError(f"byte {op:#04x} is not a pickle opcode")
        return 0

    cdef int64_t memo_index(self) except? -1:
        index = self.int_text(self.line())
        if not 0 <= index < 1 << 62:
            raise FormatError(f"memo index {short(index)} is out of range")
        return index

cdef object text_at(const uint8_t* at, uint64_t n):
    return PyUnicode_DecodeUTF8(<const char*> at, n, "surrogatepass")


cdef object name_text(bytes raw):
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise FormatError(f"a name {raw[:40]!r} is not UTF-8") from None


cdef object big_endian_double(const uint8_t* at):
    cdef uint64_t bits = 0
    cdef double value
    cdef int i
    for i in range(8):
        bits = bits << 8 | at[i]
    memcpy(&value, &bits, 8)
    return value


cdef bytes unquoted(bytes line):
    """The bytes of a quoted text string."""
    line = line.strip()
    if len(line) < 2 or line[0] != line[len(line) - 1] or line[:1] not in (b"'", b'"'):
        raise FormatError(f"a text string {line[:40]!r} is not quoted")
    try:
        return codecs.escape_decode(line[1:len(line) - 1])[0]
    except DeprecationWarning as warning:  # where warnings are errors
        raise FormatError(f"a text string {line[:40]!r}: {warning}") from None


def unpickle(data, *, int pids=0, tar_objects=None, storages=(), tensors=(), encoding="utf-8", errors="strict",
             limits=None, where="pickle", offset=0, bint gradients=True, bint tolerant=False, bint symbolic=False,
             observe=None):
    """Execute the pickle that ``data`` (bytes-like) begins with; an Unpickled.

    ``pids`` says what persistent ids may be; ``storages`` and ``tensors`` are specs that exist already, which those of
    this pickle follow; without ``gradients`` no tensor gets requires_grad. ``where`` opens the message of every error,
    ``offset`` is where in it ``data`` begins. With ``tolerant`` what the table of known names refuses is Opaque: for a
    pickle that will be run by Python's own unpickler, and is read for its storages alone. With ``symbolic`` no row of
    that table is asked: every call of a name is an Opaque that holds it as the pickle says it (see Opaque for its
    ``opcode``, ``callee`` and ``later``), a name that is not called a Global; persistent ids stay what they are.

    ``observe(offset, opcode, subject, detail)`` is called, of a symbolic one, at each name (a Global), call (the
    Opaque), change of what is no plain container (the target, the values), persistent id (as the pickle has it) and
    extension (an Opaque); offsets count from the start of ``data``. An observed pickle may hold persistent ids of any
    kind: those that make no sense are Opaque.
    Raises FormatError (Truncated where the bytes end first), UnsafePickleError, UnsupportedError and LimitError;
    LookupError for an encoding or a way to treat errors that Python does not know.
    """
    cdef Py_buffer view
    cdef Machine machine = Machine(Storages(storages, tensors, gradients))
    limits = limits or Limits()
    machine.pids, machine.tar_objects, machine.encoding, machine.errors = pids, tar_objects, encoding, errors
    machine.limits, machine.tolerant, machine.symbolic, machine.observe = limits, tolerant, symbolic, observe
    if encoding != "bytes":
        codecs.lookup(encoding)  # the caller's mistake, not the file's
        codecs.lookup_error(errors)
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        machine.start = <const uint8_t*> view.buf
        machine.p = machine.op_at = machine.start
        machine.end = machine.start + view.len
        machine.copies_left = WITHOUT_BOUND
        if not tolerant:
            machine.copies_left = COPIES * view.len + SPARE_COPIES
            machine.keys = Keys(limits, view.len)
        machine.look_ahead(machine.start, machine.end)
        try:
            obj = machine.run()
        except CheckpointError as error:
            place = offset + (machine.op_at - machine.start)
            located = type(error)(f"{where} at byte {place}: {error}", offset=place)
            located.__dict__.update({k: v for k, v in error.__dict__.items() if v is not None})
            raise located from None
        except CONTENT_ERRORS as error:
            place = offset + (machine.op_at - machine.start)
            raise FormatError(f"{where} at byte {place}: {type(error).__name__}: {error}; "
                              f"the file is damaged, or no torch.save wrote it", offset=place) from error
        return Unpickled(machine, obj, machine.p - machine.start)
    finally:
        PyBuffer_Release(&view)
