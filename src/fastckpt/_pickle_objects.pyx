# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: freethreading_compatible=True
"""What the opcodes of a pickle mean: names and calls of them, tensors, persistent ids, members and states.

Nothing is imported or called on the file's word: names become Global, calls of known names become what the table says,
other calls become Opaque.
"""

import collections
import types
from argparse import Namespace

from cpython.dict cimport PyDict_CheckExact, PyDict_SetItem
from cpython.list cimport PyList_Append, PyList_CheckExact
from libc.stdint cimport uint64_t

from ._keys cimport LONG_TEXT
from ._spec cimport REBUILD_ORDERED_DICT, REBUILD_TENSOR, REBUILD_TENSOR_V3, Global, TensorSpec
from ._stack cimport Stack
from ._storages cimport MAX_NAME, Storages, key_text, set_bits, sizes_of

from .dtypes import DTYPES, QUANTIZED
from .errors import FormatError, LimitError, UnsafePickleError, short
from .nodes import MISSING, Node, Opaque
from .rebuild import TABLE
from .torch_rows import dtype_code

cdef extern from "Python.h":
    object PyODict_New()
    bint PyTuple_CheckExact(object)
    bint PyUnicode_CheckExact(object)
    Py_ssize_t PyUnicode_GET_LENGTH(object)

# What arguments that make no sense raise.
CONTENT_ERRORS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)

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


cdef class Objects(Stack):
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

    cdef int check_key(self, object key) except -1:
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

    # -- names -------------------------------------------------------------------------------------------------

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
