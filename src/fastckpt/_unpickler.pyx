# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: freethreading_compatible=True
"""A pickle machine for data alone: every opcode of protocols 0 to 5, and nothing is ever imported or called on the
file's word. Names become Global, calls of known names become what the table says, other calls become Opaque.

Work and memory stay in proportion to the bytes: counts are compared with what is left before anything is allocated,
and the hashing of keys, which can be made exponential, is counted beforehand.
"""

import codecs
import collections
import types
from argparse import Namespace

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.dict cimport PyDict_CheckExact, PyDict_SetItem
from cpython.list cimport PyList_Append, PyList_CheckExact
from cpython.long cimport PyLong_FromLong
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.string cimport memchr, memcpy

from ._bytes cimport le16, le32, le64
from ._keys cimport LONG_TEXT, Keys
from ._spec cimport REBUILD_ORDERED_DICT, REBUILD_TENSOR, REBUILD_TENSOR_V3, Global, TensorSpec
from ._stack cimport Stack
from ._storages cimport MAX_NAME, Storages, key_text, set_bits, sizes_of

from .dtypes import DTYPES, QUANTIZED
from .errors import CheckpointError, FormatError, LimitError, UnsafePickleError, UnsupportedError, short
from .limits import Limits
from .nodes import MISSING, Node, Opaque
from .rebuild import TABLE
from .torch_rows import dtype_code

cdef extern from "Python.h":
    object PyUnicode_DecodeUTF8(const char*, Py_ssize_t, const char* errors)
    object PyODict_New()
    bint PyLong_CheckExact(object)
    bint PyTuple_CheckExact(object)
    bint PyUnicode_CheckExact(object)
    Py_ssize_t PyUnicode_GET_LENGTH(object)

# What a persistent id may be.
PIDS_NONE, PIDS_ZIP, PIDS_LEGACY, PIDS_TAR = range(4)
cdef enum:
    NONE_ALLOWED = 0
    ZIP_STORAGES = 1
    LEGACY_STORAGES = 2
    TAR_OBJECTS = 3

cdef enum:
    # An honest pickle copies what it holds three times at most: text to bytes, to a bytearray or an array.
    COPIES = 4
    SPARE_COPIES = 1 << 16

cdef int64_t WITHOUT_BOUND = 1 << 62
# What arguments that make no sense raise.
cdef tuple CONTENT_ERRORS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)

cdef uint64_t QUANTIZED_BITS = sum(1 << code for code in QUANTIZED)
cdef type OrderedDict = collections.OrderedDict
cdef type Deque = collections.deque
cdef tuple WITH_ATTRIBUTES = (OrderedDict, Namespace, types.SimpleNamespace)

# The opcodes that say what is to be done, rather than what there is: what an Opaque keeps, and an observer is told.
cdef dict OPCODE_NAMES = {
    c'R': "REDUCE", c'o': "OBJ", c'i': "INST", 0x81: "NEWOBJ", 0x92: "NEWOBJ_EX", c'c': "GLOBAL", 0x93: "STACK_GLOBAL",
    c'b': "BUILD", c'a': "APPEND", c'e': "APPENDS", c's': "SETITEM", c'u': "SETITEMS", 0x90: "ADDITEMS",
    c'P': "PERSID", c'Q': "BINPERSID", 0x82: "EXT1", 0x83: "EXT2", 0x84: "EXT4",
}


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
cdef class Machine(Stack):
    cdef const uint8_t* start
    cdef const uint8_t* p
    cdef const uint8_t* end
    cdef const uint8_t* op_at  # the opcode being executed, for messages
    cdef int pids
    cdef dict tar_objects
    cdef str encoding, errors
    cdef object limits
    cdef int64_t copies_left
    cdef Keys keys  # None: nothing is checked
    cdef bint tolerant, symbolic
    cdef object observe  # what is told of each name, call and change; or None
    cdef dict globals_
    cdef readonly Storages described
    cdef readonly list names, unknown
    cdef readonly object undecodable
    cdef readonly dict touched  # id of an object -> (it, an Opaque with what is done to it)

    def __init__(self, Storages described):
        self.described, self.globals_, self.names, self.unknown, self.touched = described, {}, [], [], {}

    # -- for the table of known names --------------------------------------------------------------------------

    def note_unknown(self, qualname, note=""):
        self.unknown.append((qualname, note))

    cpdef int spend(self, Py_ssize_t count) except -1:
        """Account for a copy of ``count`` bytes or members: a few bytes suffice to copy an object once more."""
        self.copies_left -= count
        if self.copies_left < 0:
            raise LimitError("the pickle copies the same objects over and over, out of proportion to its length")
        return 0

    def update(self, mapping, pairs):
        """mapping[key] = value for pairs, keys checked."""
        self.spend(len(pairs))
        for key, value in pairs:
            self.check_key(key)
            mapping[key] = value

    cdef inline int check_key(self, object key) except -1:
        return 0 if self.keys is None else self.keys.check(key)

    def check_keys(self, items):
        self.spend(len(items))
        for item in items:
            self.check_key(item)

    def tensor(self, ref, offset, size, stride, dtype=None, bint requires_grad=False):
        """A strided tensor in a storage that a persistent id named."""
        return self.add_tensor(ref, dtype, offset, size, stride, requires_grad)

    cdef TensorSpec add_tensor(self, object ref, object dtype, object offset, object size, object stride,
                               bint requires_grad):
        sizes = sizes_of(size)
        self.spend(len(sizes))
        return self.described.tensor(ref, dtype, offset, sizes, sizes_of(stride), requires_grad)

    cpdef object call(self, object callee, tuple args):
        """What calling a Global with these arguments gives."""
        cdef Global name
        if type(callee) is not Global:
            if isinstance(callee, Opaque):
                return Opaque(name_of_result(callee), (callee, *args))
            raise FormatError(f"{short(callee)} is called, only a class or function can be")
        name = callee
        if name.rebuild:
            return self.rebuild(name, args)
        if name.known is None:
            return Opaque(name.qualname, args)
        if self.tolerant:
            return self.call_or_keep(name, args)
        if name.known.call is None:
            raise UnsafePickleError(f"{name.qualname} may be named, but a call of it with {short(args)} is no data",
                                    qualname=name.qualname)
        return name.known.call(self, args)

    cdef object call_or_keep(self, Global name, tuple args):
        """The same for a pickle that is going to be run anyway: what the table refuses is somebody's own business."""
        if name.known.call is not None:
            try:
                return name.known.call(self, args)
            except CONTENT_ERRORS:
                pass
        return Opaque(name.qualname, args)

    # -- symbolic ----------------------------------------------------------------------------------------------

    cdef int note(self, object subject, object detail) except -1:
        """Tell the observer what the opcode being executed does."""
        if self.observe is not None:
            self.observe(self.op_at - self.start, OPCODE_NAMES[self.op_at[0]], subject, detail)
        return 0

    cdef object symbol(self, object callee, object args, object kwargs):
        """A call as the pickle says it, whatever is called and whatever stands in the place of arguments."""
        cdef str opcode = OPCODE_NAMES[self.op_at[0]]
        if type(callee) is Global:
            qualname = (<Global> callee).qualname
        elif isinstance(callee, Opaque):
            qualname = name_of_result(callee)
        else:
            raise FormatError(f"{short(callee)} is called, only a class or function can be")
        made = Opaque(qualname, args, kwargs, MISSING, opcode == "NEWOBJ" or opcode == "NEWOBJ_EX", callee, opcode)
        self.note(made, None)
        return made

    cdef object unnamed(self, str what, tuple args):
        """What the pickle refers to without naming it."""
        made = Opaque(what, args, opcode=OPCODE_NAMES[self.op_at[0]])
        self.note(made, None)
        return made

    cdef object stand_in(self, object target):
        """The Opaque that takes what is done to ``target``, which is not a container that the opcode is for."""
        if isinstance(target, Opaque):
            return target
        if id(target) not in self.touched:
            name = target.qualname if type(target) is Global else short(target)
            self.touched[id(target)] = target, Opaque(name)
        return self.touched[id(target)][1]

    cdef int change(self, object target, object values) except -1:
        """Do what the opcode says to an object of an unknown class; ``values`` are a state, items or flat pairs."""
        cdef str opcode = OPCODE_NAMES[self.op_at[0]]
        self.note(target, values)
        held = self.stand_in(target)
        cdef bint built = held.state is not MISSING
        if opcode == "BUILD" and not built and not held.later:
            held.state = values
        elif opcode[:6] == "APPEND" and not built and not held.pairs and not held.later:
            held.items.extend(values)
        elif opcode[:7] == "SETITEM" and not built and not held.later:
            try:
                for key in values[::2]:
                    self.check_key(key)
                held.pairs.update(dict(zip(values[::2], values[1::2])))
            except TypeError:  # a key that cannot be hashed; the class may not ask for it
                self.add_later(held, opcode, values)
        else:
            self.add_later(held, opcode, values)
        return 0

    cdef int add_later(self, held, str opcode, values) except -1:
        if not held.later:
            held.later = []
        held.later.append((opcode, values))
        return 0

    # -- tensors -----------------------------------------------------------------------------------------------

    cdef object rebuild(self, Global name, tuple args):
        cdef Py_ssize_t n = len(args)
        cdef object dtype = None
        cdef Py_ssize_t extra = 6  # where metadata stands
        if name.rebuild == REBUILD_ORDERED_DICT:
            return PyODict_New() if n == 0 else name.known.call(self, args)
        if name.rebuild == REBUILD_TENSOR:
            if n != 4:
                raise FormatError(f"{name.name} has {n} arguments, 4 are expected")
            return self.dense(args, None, False)
        if name.rebuild == REBUILD_TENSOR_V3:
            if n > 6:
                dtype = dtype_code(args[6])
            extra = 7
        if n != extra and n != extra + 1:
            raise FormatError(f"{name.name} has {n} arguments, {extra} or {extra + 1} are expected")
        if type(args[4]) is not bool:
            raise FormatError(f"a tensor's requires_grad is {short(args[4])}, a bool is expected")
        tensor = self.dense(args, dtype, args[4])
        if n == extra + 1 and args[extra] is not None:
            set_bits(tensor, args[extra])
        return tensor

    cdef TensorSpec dense(self, tuple args, object dtype, bint requires_grad):
        cdef TensorSpec spec = self.add_tensor(args[0], dtype, args[1], args[2], args[3], requires_grad)
        if QUANTIZED_BITS >> spec.dtype & 1:
            raise FormatError(f"a tensor of {DTYPES[spec.dtype].name} has no quantizer, which says what its integers "
                              f"mean")
        return spec

    # -- persistent ids ----------------------------------------------------------------------------------------

    cdef object persistent(self, object pid):
        if self.observe is None:
            return self.resolved(pid)
        self.note(pid, None)
        try:
            return self.resolved(pid)
        except CONTENT_ERRORS:
            return Opaque("persistent id", (pid,), opcode=OPCODE_NAMES[self.op_at[0]])

    cdef object resolved(self, object pid):
        if self.pids == ZIP_STORAGES or self.pids == LEGACY_STORAGES:
            if PyTuple_CheckExact(pid) and len(pid):
                kind = pid[0]
                if kind == "storage" or kind == b"storage":
                    return self.described.from_id(pid, 5 if self.pids == ZIP_STORAGES else 6)
                if self.pids == LEGACY_STORAGES and (kind == "module" or kind == b"module") and len(pid) == 4:
                    return pid[1]  # (kind, class, source file, source): the class, by name alone
            raise FormatError(f"a persistent id is {short(pid)}, ('storage', class, key, location, count) is expected")
        if self.pids == TAR_OBJECTS:
            if isinstance(pid, tuple) and len(pid) == 3:
                return pid[0]
            try:
                key = int(pid)
            except (TypeError, ValueError):
                raise FormatError(f"a persistent id is {short(pid)}, a number is expected") from None
            if key not in self.tar_objects:
                raise FormatError(f"persistent id {short(key)} is neither a tensor nor a storage of the file")
            return self.tar_objects[key]
        raise FormatError("a persistent id where none can be; a data.pkl taken out of its archive? "
                          "pass the whole archive")

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

    cdef object named(self, object module, object name):
        cdef Global found
        if not PyUnicode_CheckExact(module) or not PyUnicode_CheckExact(name):
            if self.symbolic and (isinstance(module, Opaque) or isinstance(name, Opaque)):
                return self.unnamed("a computed name", (module, name))
            raise FormatError(f"a class is named by {short(module)} and {short(name)}, two strings are expected")
        # Whoever observes is told of it first, and looks at its beginning.
        bounded = not self.symbolic and self.observe is None
        if bounded and PyUnicode_GET_LENGTH(module) + PyUnicode_GET_LENGTH(name) > MAX_NAME:
            raise FormatError(f"a class is named by more than {MAX_NAME} characters")
        key = (module, name)
        found = self.globals_.get(key)
        if found is None:
            found = Global(module, name, TABLE.get(key))
            self.globals_[key] = found
            self.names.append(found)
            if found.known is None:
                self.unknown.append((found.qualname, ""))
        if self.observe is not None:
            self.note(found, None)
        return found

    # -- filling containers ------------------------------------------------------------------------------------

    cdef int append_all(self, object target, Py_ssize_t at) except -1:
        cdef Py_ssize_t i
        if self.symbolic and not PyList_CheckExact(target):
            return self.change(target, list(self.take_tuple(at)))
        if PyList_CheckExact(target):
            for i in range(at, self.depth):
                PyList_Append(target, <object> self.items[i])
        elif type(target) is Deque:
            for i in range(at, self.depth):
                target.append(<object> self.items[i])
        elif isinstance(target, Opaque):
            for i in range(at, self.depth):
                target.items.append(<object> self.items[i])
        else:
            raise FormatError(f"an item is appended to {short(target)}, a list is expected")
        return self.drop_to(at)

    cdef int set_all(self, object target, Py_ssize_t at) except -1:
        cdef Py_ssize_t i
        if (self.depth - at) & 1:
            raise FormatError("a dict is filled with a key that has no value")
        if self.symbolic and not PyDict_CheckExact(target):
            return self.change(target, list(self.take_tuple(at)))
        if isinstance(target, Opaque):
            target = target.pairs
        elif not isinstance(target, dict):
            raise FormatError(f"an item is set in {short(target)}, a dict is expected")
        for i in range(at, self.depth, 2):
            key = <object> self.items[i]
            if not PyUnicode_CheckExact(key) or PyUnicode_GET_LENGTH(key) >= LONG_TEXT:
                self.check_key(key)
            if PyDict_CheckExact(target):
                PyDict_SetItem(target, key, <object> self.items[i + 1])
            else:
                target[key] = <object> self.items[i + 1]
        return self.drop_to(at)

    cdef int add_all(self, object target, Py_ssize_t at) except -1:
        cdef Py_ssize_t i
        if self.symbolic and type(target) is not set:
            return self.change(target, list(self.take_tuple(at)))
        if type(target) is not set and not isinstance(target, Opaque):
            raise FormatError(f"a member is added to {short(target)}, a set is expected")
        for i in range(at, self.depth):
            member = <object> self.items[i]
            if type(target) is set:
                self.check_key(member)
                target.add(member)
            else:
                target.items.append(member)
        return self.drop_to(at)

    cdef int build(self, object target, object state) except -1:
        if self.symbolic:
            self.change(target, state)
        elif self.tolerant:
            try:
                self.set_state(target, state)
            except CONTENT_ERRORS:
                pass
        else:
            self.set_state(target, state)
        return 0

    cdef int set_state(self, object target, object state) except -1:
        if isinstance(target, Node):
            target.set_state(self, state)
        elif type(target) in WITH_ATTRIBUTES:
            if isinstance(state, tuple) and len(state) == 2 and state[1] is None:
                state = state[0]
            if not isinstance(state, dict):
                raise FormatError(f"the state of a {type(target).__name__} is {short(state)}, a dict is expected")
            self.spend(len(state))
            for name, value in state.items():
                name = key_text(name)
                self.check_key(name)
                target.__dict__[name] = value
        else:
            raise FormatError(f"a state is given to {short(target)}, which has none")
        return 0

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

    cdef object new_object(self, object cls, object args, object kwargs):
        if self.symbolic:
            return self.symbol(cls, args, kwargs)
        if not PyTuple_CheckExact(args) or not isinstance(kwargs, dict):
            raise FormatError(f"the arguments of a new object are {short(args)} and {short(kwargs)}, "
                              f"a tuple and a dict are expected")
        if type(cls) is Global and (<Global> cls).known is None or isinstance(cls, Opaque):
            return Opaque(cls.qualname, args, kwargs, new=True)
        if kwargs:
            raise FormatError(f"{short(cls)} is made with keyword arguments, which none of the known classes takes")
        return self.call(cls, args)


cdef object name_of_result(callee):
    """What a call of an Opaque is called; the name does not grow with each call of a result."""
    return callee.qualname if callee.qualname.endswith("()") else f"{callee.qualname}()"


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
