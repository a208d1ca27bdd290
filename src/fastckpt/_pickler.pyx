# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: freethreading_compatible=True
"""A pickle of an object, with its tensors described rather than stored.

What Python's own pickler does for any object is done here for it too (``__reduce_ex__``, copyreg, names of classes
and functions); plain containers, text, numbers and plain tensors take no Python call, or one.
"""

import _compat_pickle
import copyreg
import functools
import pickle
import sys
import types
from collections import OrderedDict
from itertools import islice

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_Next
from cpython.float cimport PyFloat_AS_DOUBLE
from cpython.object cimport PyObject
from libc.stdint cimport uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object number, int* overflow) except? -1
    int Py_EnterRecursiveCall(const char* where) except -1
    void Py_LeaveRecursiveCall()
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* nbytes) except NULL

cdef enum:
    BATCH = 1000  # members between two MARKs, as Python's own pickler has it
    OP_MARK = 40  # (
    OP_STOP = 46  # .
    OP_POP = 48  # 0
    OP_POP_MARK = 49  # 1
    OP_BINFLOAT = 71  # G
    OP_BININT = 74  # J
    OP_BININT1 = 75  # K
    OP_BININT2 = 77  # M
    OP_NONE = 78  # N
    OP_BINPERSID = 81  # Q
    OP_REDUCE = 82  # R
    OP_BINUNICODE = 88  # X
    OP_APPEND = 97  # a
    OP_BUILD = 98  # b
    OP_GLOBAL = 99  # c
    OP_APPENDS = 101  # e
    OP_BINGET = 104  # h
    OP_LONG_BINGET = 106  # j
    OP_BINPUT = 113  # q
    OP_LONG_BINPUT = 114  # r
    OP_SETITEM = 115  # s
    OP_TUPLE = 116  # t
    OP_SETITEMS = 117  # u
    OP_EMPTY_DICT = 125  # }
    OP_EMPTY_LIST = 93  # ]
    OP_EMPTY_TUPLE = 41  # )
    OP_PROTO = 0x80
    OP_NEWOBJ = 0x81
    OP_TUPLE1 = 0x85
    OP_NEWTRUE = 0x88
    OP_NEWFALSE = 0x89
    OP_LONG1 = 0x8A
    OP_LONG4 = 0x8B
    OP_BINUNICODE8 = 0x8D
    OP_BINBYTES8 = 0x8E
    OP_NEWOBJ_EX = 0x92
    OP_STACK_GLOBAL = 0x93
    OP_BINBYTES = 66  # B
    OP_SHORT_BINBYTES = 67  # C


cdef class Pickler:
    """Pickles one object.

    ``describers`` maps exact types to callables that turn an object into a row (see save_tensor), or into None where it is
    to be pickled like any other. ``persistent_id`` is asked for objects that are no plain value. ``foreign`` has the
    (module, name) of classes that stand for those of another program, which need not be here.
    """

    cdef char* buffer
    cdef Py_ssize_t used, room
    cdef int protocol
    cdef dict memo, describers, names, foreign
    cdef list alive  # what the memo knows by its id must not die
    cdef object persistent_id

    def __cinit__(self, int protocol, dict describers, persistent_id, dict foreign):
        self.protocol, self.describers, self.persistent_id = protocol, describers, persistent_id
        self.foreign = foreign
        self.memo, self.names, self.alive = {}, {}, []

    def __dealloc__(self):
        free(self.buffer)

    # -- bytes

    cdef int reserve(self, Py_ssize_t more) except -1:
        cdef Py_ssize_t room
        cdef char* grown
        if more > self.room - self.used:
            room = max(2 * self.room, self.used + more, 1 << 12)
            grown = <char*> realloc(self.buffer, room)
            if grown == NULL:
                raise MemoryError(f"no memory for a pickle of {room} bytes")
            self.buffer, self.room = grown, room
        return 0

    cdef int op(self, int code) except -1:
        if self.used == self.room:
            self.reserve(1)
        self.buffer[self.used] = <char> code
        self.used += 1
        return 0

    cdef int write(self, const char* data, Py_ssize_t nbytes) except -1:
        self.reserve(nbytes)
        memcpy(self.buffer + self.used, data, nbytes)
        self.used += nbytes
        return 0

    cdef int number(self, int code, uint64_t value, int width) except -1:
        """An opcode with a little-endian argument."""
        cdef int i
        self.reserve(1 + width)
        self.buffer[self.used] = <char> code
        for i in range(width):
            self.buffer[self.used + 1 + i] = <char> (value >> (8 * i))
        self.used += 1 + width
        return 0

    # -- memo

    cdef int memoize(self, object obj) except -1:
        """Remember what is on top of the stack."""
        cdef Py_ssize_t index = len(self.memo)
        self.memo[id(obj)] = index
        self.alive.append(obj)
        return self.put(index)

    cdef int put(self, Py_ssize_t index) except -1:
        return self.number(OP_BINPUT, index, 1) if index < 256 else self.number(OP_LONG_BINPUT, index, 4)

    cdef int get(self, Py_ssize_t index) except -1:
        return self.number(OP_BINGET, index, 1) if index < 256 else self.number(OP_LONG_BINGET, index, 4)

    # -- objects

    cdef int save(self, object obj) except -1:
        cls = type(obj)
        if obj is None:
            return self.op(OP_NONE)
        if cls is bool:
            return self.op(OP_NEWTRUE if obj is True else OP_NEWFALSE)
        if cls is int:
            return self.save_int(obj)
        if cls is float:
            return self.save_float(obj)
        index = self.memo.get(id(obj))
        if index is not None:
            return self.get(index)
        if cls is str:
            self.save_str(obj)
            return self.memoize(obj)
        Py_EnterRecursiveCall(" while pickling an object")
        try:
            if cls is tuple:
                return self.save_tuple(obj)
            if cls is dict:
                self.op(OP_EMPTY_DICT)
                self.memoize(obj)
                return self.save_dict(obj)
            if cls is list:
                self.op(OP_EMPTY_LIST)
                self.memoize(obj)
                return self.save_items(iter(obj))
            describe = self.describers.get(cls)
            if describe is not None:
                row = describe(obj)
                if row is not None:
                    self.save_tensor(row)
                    return self.memoize(obj)
            return self.save_other(obj, cls)
        finally:
            Py_LeaveRecursiveCall()

    cdef int save_int(self, object number) except -1:
        cdef int overflow = 0
        cdef long long value = PyLong_AsLongLongAndOverflow(number, &overflow)
        if not overflow and 0 <= value < 1 << 8:
            return self.number(OP_BININT1, value, 1)
        if not overflow and 0 <= value < 1 << 16:
            return self.number(OP_BININT2, value, 2)
        if not overflow and -(1LL << 31) <= value < 1LL << 31:
            return self.number(OP_BININT, <uint64_t> value, 4)
        data = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
        self.number(OP_LONG1, len(data), 1) if len(data) < 256 else self.number(OP_LONG4, len(data), 4)
        return self.write_bytes(data)

    cdef int save_float(self, object number) except -1:
        cdef double value = PyFloat_AS_DOUBLE(number)
        cdef uint64_t bits
        cdef int i
        memcpy(&bits, &value, 8)
        self.op(OP_BINFLOAT)
        self.reserve(8)
        for i in range(8):  # the one big-endian argument
            self.buffer[self.used + i] = <char> (bits >> (56 - 8 * i))
        self.used += 8
        return 0

    cdef int save_str(self, str text) except -1:
        cdef Py_ssize_t nbytes
        cdef const char* data
        try:
            data = PyUnicode_AsUTF8AndSize(text, &nbytes)
        except UnicodeEncodeError:
            encoded = text.encode("utf-8", "surrogatepass")
            self.text_head(len(encoded))
            return self.write_bytes(encoded)
        self.text_head(nbytes)
        return self.write(data, nbytes)

    cdef int text_head(self, Py_ssize_t nbytes) except -1:
        if nbytes < 1LL << 32:
            return self.number(OP_BINUNICODE, nbytes, 4)
        if self.protocol < 4:
            raise OverflowError(f"a text of {nbytes} bytes needs pickle_protocol=4")
        return self.number(OP_BINUNICODE8, nbytes, 8)

    cdef int write_bytes(self, bytes data) except -1:
        return self.write(PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))

    cdef int save_bytes(self, bytes data) except -1:
        """Protocol 2 has none: they go as text, which Python 2 takes for its own str."""
        if self.protocol < 3:
            import codecs

            args = (str(data, "latin1"), "latin1") if data else ()
            return self.save_reduce(data, codecs.encode if data else bytes, args)
        if len(data) < 256:
            self.number(OP_SHORT_BINBYTES, len(data), 1)
        elif len(data) < 1LL << 32:
            self.number(OP_BINBYTES, len(data), 4)
        elif self.protocol < 4:
            raise OverflowError(f"{len(data)} bytes need pickle_protocol=4")
        else:
            self.number(OP_BINBYTES8, len(data), 8)
        self.write_bytes(data)
        return self.memoize(data)

    cdef int save_tuple(self, tuple items) except -1:
        cdef Py_ssize_t i, n = len(items)
        if n == 0:
            return self.op(OP_EMPTY_TUPLE)
        if n > 3:
            self.op(OP_MARK)
        for item in items:
            self.save(item)
        index = self.memo.get(id(items))
        if index is not None:  # it holds itself, and was saved in there
            if n > 3:
                self.op(OP_POP_MARK)
            else:
                for i in range(n):
                    self.op(OP_POP)
            return self.get(index)
        self.op(OP_TUPLE1 + n - 1 if n <= 3 else OP_TUPLE)
        return self.memoize(items)

    cdef int save_dict(self, dict items) except -1:
        cdef Py_ssize_t at = 0, size = len(items), n = 0
        cdef PyObject* key
        cdef PyObject* value
        while PyDict_Next(items, &at, &key, &value):
            if n % BATCH == 0:
                if n:
                    self.op(OP_SETITEMS)
                self.op(OP_MARK)
            n += 1
            held_key, held = <object> key, <object> value
            self.save(held_key)
            self.save(held)
            if len(items) != size:
                raise RuntimeError("dictionary changed size while it was being pickled")
        if n:
            self.op(OP_SETITEMS)
        return 0

    cdef int save_items(self, object items) except -1:
        """Members of a list, or of what behaves like one."""
        while batch := list(islice(items, BATCH)):
            if len(batch) > 1:
                self.op(OP_MARK)
            for item in batch:
                self.save(item)
            self.op(OP_APPENDS if len(batch) > 1 else OP_APPEND)
        return 0

    cdef int save_pairs(self, object pairs) except -1:
        """Members of what behaves like a dict."""
        while batch := list(islice(pairs, BATCH)):
            if len(batch) > 1:
                self.op(OP_MARK)
            for key, value in batch:
                self.save(key)
                self.save(value)
            self.op(OP_SETITEMS if len(batch) > 1 else OP_SETITEM)
        return 0

    # -- tensors

    cdef int save_tensor(self, tuple row) except -1:
        """A plain tensor: (function, storage class, key, location, numel, offset, shape, stride, requires_grad, more).

        ``more`` are the arguments after the hooks, of which there never are any: a dtype, or metadata.
        """
        function, storage_class, key, location, numel, offset, shape, stride, requires_grad, more = row
        self.save_name(function)
        self.op(OP_MARK)
        self.save_storage(storage_class, key, location, numel)
        self.save_int(offset)
        self.save_numbers(shape)
        self.save_numbers(stride)
        self.op(OP_NEWTRUE if requires_grad else OP_NEWFALSE)
        self.save_name(OrderedDict)
        self.op(OP_EMPTY_TUPLE)
        self.op(OP_REDUCE)
        for value in more:
            self.save(value)
        self.op(OP_TUPLE)
        return self.op(OP_REDUCE)

    cdef int save_storage(self, storage_class, str key, str location, numel) except -1:
        self.op(OP_MARK)
        self.save_word("storage")
        self.save_name(storage_class)
        self.save_str(key)
        self.save_word(location)
        self.save_int(numel)
        self.op(OP_TUPLE)
        return self.op(OP_BINPERSID)

    cdef int save_numbers(self, object numbers) except -1:
        cdef Py_ssize_t n = len(numbers)
        if n == 0:
            return self.op(OP_EMPTY_TUPLE)
        if n > 3:
            self.op(OP_MARK)
        for number in numbers:
            self.save_int(number)
        return self.op(OP_TUPLE1 + n - 1 if n <= 3 else OP_TUPLE)

    cdef int save_word(self, str word) except -1:
        """A text that comes often, remembered by its value."""
        index = self.names.get(word)
        if index is not None:
            return self.get(index)
        self.save_str(word)
        return self.remember(word, word)

    cdef int save_name(self, object obj) except -1:
        """A class or function that comes often."""
        index = self.memo.get(id(obj))
        return self.save_global(obj, None) if index is None else self.get(index)

    cdef int remember(self, object name, object obj) except -1:
        """Remember what is on top of the stack by a name, too."""
        self.names[name] = len(self.memo)
        return self.memoize(obj)

    # -- everything else

    cdef int save_other(self, object obj, type cls) except -1:
        pid = self.persistent_id(obj)
        if pid is not None:
            storage_class, key, location, numel = pid
            return self.save_storage(storage_class, key, location, numel)
        if cls is bytes:
            return self.save_bytes(obj)
        reduce = copyreg.dispatch_table.get(cls)
        if reduce is not None:
            reduced = reduce(obj)
        elif issubclass(cls, type):
            return self.save_type(obj)
        elif cls is FUNCTION:
            return self.save_global(obj, None)
        else:
            reduced = obj.__reduce_ex__(self.protocol)
        if isinstance(reduced, str):
            return self.save_global(obj, reduced)
        if not isinstance(reduced, tuple) or not 2 <= len(reduced) <= 6:
            raise pickle.PicklingError(
                f"__reduce_ex__ of {cls.__qualname__} gives {type(reduced).__name__}, a text or a tuple of two to six is expected"
            )
        return self.save_reduce(obj, *reduced)

    cdef int save_type(self, object cls) except -1:
        if cls in SINGLETONS:
            return self.save_reduce(cls, type, (SINGLETONS[cls],))
        return self.save_global(cls, None)

    def save_reduce(self, obj, function, args, state=None, items=None, pairs=None, setter=None):
        """What __reduce_ex__ gave for an object: a call, then what is added to its result."""
        if not isinstance(args, tuple) or not callable(function):
            raise pickle.PicklingError(f"{type(obj).__qualname__}: __reduce_ex__ has to give a callable and a tuple")
        self.alive.append((function, args, state))  # an id means nothing once its object is gone
        name = getattr(function, "__name__", "")
        if name == "__newobj__" and args:
            self.save_class(obj, args[0])
            self.save(args[1:])
            self.op(OP_NEWOBJ)
        elif name == "__newobj_ex__" and len(args) == 3 and self.protocol >= 4:
            self.save_class(obj, args[0])
            self.save(args[1])
            self.save(args[2])
            self.op(OP_NEWOBJ_EX)
        elif name == "__newobj_ex__" and len(args) == 3:
            cls, positional, keywords = args
            self.save(functools.partial(cls.__new__, cls, *positional, **keywords))
            self.op(OP_EMPTY_TUPLE)
            self.op(OP_REDUCE)
        else:
            self.save(function)
            self.save(args)
            self.op(OP_REDUCE)
        index = self.memo.get(id(obj))
        if index is not None:  # it is among its own arguments, and was saved in there
            self.op(OP_POP)
            return self.get(index)
        self.memoize(obj)
        if items is not None:
            self.save_items(iter(items))
        if pairs is not None:
            self.save_pairs(iter(pairs))
        if state is not None and setter is None:
            self.save(state)
            self.op(OP_BUILD)
        elif state is not None:
            self.save(setter)
            self.save(obj)
            self.save(state)
            self.op(OP_TUPLE1 + 1)
            self.op(OP_REDUCE)
            self.op(OP_POP)
        return 0

    cdef int save_class(self, object obj, object cls) except -1:
        if not hasattr(cls, "__new__") or getattr(obj, "__class__", cls) is not cls:
            raise pickle.PicklingError(f"{type(obj).__qualname__}: __reduce_ex__ names the class {cls!r:.80}, it is another")
        return self.save(cls)

    cdef int save_global(self, object obj, name) except -1:
        """A class or function by its name; only if that name leads back to it."""
        if self.foreign and isinstance(obj, type) and obj in self.foreign:
            module, name = self.foreign[obj]
            return self.write_global(obj, module, name)
        name = name or getattr(obj, "__qualname__", None) or obj.__name__
        module = pickle.whichmodule(obj, name)
        parent, found = resolve(obj, module, name)
        if found is not obj:
            raise pickle.PicklingError(f"{obj!r:.200} is not what {module}.{name} is; it can't be pickled by that name")
        parts = name.split(".")
        if len(parts) > 1 and self.protocol >= 4:
            self.save(module)
            self.save(name)
            self.op(OP_STACK_GLOBAL)
            return self.memoize(obj)
        if len(parts) > 1:
            self.save_reduce(obj, getattr, (parent, parts[len(parts) - 1]))
            return 0
        if self.protocol < 3:  # the names of Python 2
            module, name = _compat_pickle.REVERSE_NAME_MAPPING.get((module, name), (module, name))
            module = _compat_pickle.REVERSE_IMPORT_MAPPING.get(module, module)
        return self.write_global(obj, module, name)

    cdef int write_global(self, object obj, str module, str name) except -1:
        if "\n" in module or "\n" in name:
            raise pickle.PicklingError(f"{module!r}.{name!r}: a name with a line break can't be pickled")
        self.op(OP_GLOBAL)
        self.write_bytes(f"{module}\n{name}\n".encode())
        return self.memoize(obj)


cdef object FUNCTION = types.FunctionType
cdef dict SINGLETONS = {type(None): None, type(NotImplemented): NotImplemented, type(...): ...}


cdef tuple resolve(object obj, str module, str name):
    """(parent, what a name leads to)."""
    try:
        __import__(module)
        found = parent = sys.modules[module]
        for part in name.split("."):
            if part == "<locals>":
                raise AttributeError(part)
            parent, found = found, getattr(found, part)
    except (ImportError, KeyError, AttributeError):
        raise pickle.PicklingError(f"{obj!r:.200} can't be pickled: it is not found as {module}.{name}") from None
    return parent, found


def dump(obj, int protocol=2, dict describers=None, persistent_id=None, dict foreign=None):
    """The pickle of an object, as bytes.

    ``describers``, ``persistent_id`` and ``foreign`` are those of Pickler. Raises PicklingError, and what an object's
    own ``__reduce_ex__`` raises, as Python's pickler does; RecursionError where nesting is too deep for that.
    """
    if not 2 <= protocol <= pickle.HIGHEST_PROTOCOL:
        raise ValueError(f"pickle_protocol={protocol}: 2 to {pickle.HIGHEST_PROTOCOL} are known")
    cdef Pickler pickler = Pickler(protocol, describers or {}, persistent_id or (lambda obj: None), foreign or {})
    pickler.number(OP_PROTO, protocol, 1)
    pickler.save(obj)
    pickler.op(OP_STOP)
    return PyBytes_FromStringAndSize(pickler.buffer, pickler.used)
