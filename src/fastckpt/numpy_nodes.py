"""NumPy's pickles as data: dtypes, arrays and scalars of NumPy 1 and 2, made without NumPy's own pickle functions."""

import math
import re

import numpy as np

from .errors import FormatError
from .nodes import MISSING, Node, Opaque

PLAIN_TYPE = re.compile(r"[<>|=]?[?a-zA-Z][0-9]{0,9}")
DATETIME_UNITS = ("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as", "generic")


class DtypeNode(Node):
    """A numpy.dtype, complete once BUILD has said its byte order and fields."""

    __slots__ = ("dtype",)

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def set_state(self, machine, state):
        if not isinstance(state, tuple) or not 5 <= len(state) <= 9:
            raise FormatError(f"a numpy dtype's state is {state!r:.80}; a tuple of eight is expected")
        _, order, base, names, fields = state[:5]
        order = text(order) if order is not None else "|"
        if order not in ("<", ">", "=", "|"):
            raise FormatError(f"a numpy dtype's byte order is {order!r:.20}; one of '<>=|' is expected")
        if base is not None:
            inner, shape = base
            self.dtype = np.dtype((dtype_of(inner), shape_of(shape)))
        elif names:
            self.dtype = structured(names, fields, state)
        elif self.dtype.kind in "Mm" and len(state) > 8:
            unit, count = datetime_unit(state[8])
            self.dtype = np.dtype(f"{self.dtype.kind}8[{count}{unit}]" if unit != "generic" else f"{self.dtype.kind}8")
        if order in "<>" and not names:
            self.dtype = self.dtype.newbyteorder(order)

    def build(self, bridge):
        return self.dtype


def text(value):
    return value.decode("latin-1") if isinstance(value, bytes) else value


def structured(names, fields, state):
    """A dtype with named fields at given offsets."""
    names = [text(name) for name in names]
    fields = {text(name): field for name, field in fields.items()}
    spec = {
        "names": names,
        "formats": [dtype_of(fields[name][0]) for name in names],
        "offsets": [fields[name][1] for name in names],
    }
    if any(len(fields[name]) > 2 for name in names):
        spec["titles"] = [fields[name][2] if len(fields[name]) > 2 else None for name in names]
    if isinstance(state[5], int) and state[5] >= 0:
        spec["itemsize"] = state[5]
    flags = state[7] if len(state) > 7 else 0
    return np.dtype(spec, align=bool(isinstance(flags, int) and flags & 0x80))


def datetime_unit(metadata):
    """(unit, count) out of ({}, (unit, numerator, denominator, event))."""
    _, (unit, numerator, *_) = metadata
    unit = text(unit)
    if unit not in DATETIME_UNITS or type(numerator) is not int or not 0 < numerator < 2**31:
        raise FormatError(f"a numpy datetime unit is {metadata!r:.80}; like ({{}}, (b'ns', 1, 1, 1)) is expected")
    return unit, numerator


def dtype_of(value):
    if isinstance(value, DtypeNode):
        return value.dtype
    raise FormatError(f"a numpy dtype is expected, the pickle has {type(value).__name__}")


def shape_of(value):
    value = (value,) if type(value) is int else value
    if type(value) is not tuple or any(type(n) is not int or n < 0 for n in value):
        raise FormatError(f"a numpy shape is {value!r:.80}; a tuple of ints is expected")
    return value


def make_dtype(machine, args):
    """numpy.dtype(type string, align, copy)."""
    kind = text(args[0])
    if not isinstance(kind, str) or not PLAIN_TYPE.fullmatch(kind):
        raise FormatError(f"a numpy dtype is called {kind!r:.80}; a type string like 'f4' is expected")
    return DtypeNode(np.dtype(kind))


def raw_bytes(data):
    """Array bytes; Python 2 wrote them as str, which latin-1 turns back."""
    if isinstance(data, str):
        return data.encode("latin-1")
    if isinstance(data, (bytes, bytearray)):
        return data
    raise FormatError(f"the data of a numpy array is {type(data).__name__}; bytes are expected")


def make_array(data, dtype, shape, order):
    """An array of its own memory, of exactly the bytes that are there."""
    data, shape = raw_bytes(data), shape_of(shape)
    wanted = math.prod(shape) * dtype.itemsize
    if len(data) != wanted:
        raise FormatError(f"a numpy array of shape {shape} and {dtype} needs {wanted} bytes, the pickle has {len(data)}")
    if not wanted:
        return np.ndarray(shape, dtype, buffer=bytearray(dtype.itemsize), strides=strides_of(shape, dtype, order))
    array = np.empty(shape, dtype, order=order)
    array[...] = np.ndarray(shape, dtype, buffer=data, order=order)
    return array


def strides_of(shape, dtype, order):
    """The strides that NumPy's own unpickling gives an array; np.empty gives one without elements others."""
    strides, step = [], dtype.itemsize
    for size in shape if order == "F" else reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides if order == "F" else strides[::-1]


class ArrayNode(Node):
    """A numpy.ndarray of the kind that BUILD fills."""

    __slots__ = ("array",)

    def __init__(self):
        super().__init__()
        self.array = MISSING

    def set_state(self, machine, state):
        if not isinstance(state, tuple) or len(state) not in (4, 5):
            raise FormatError(f"a numpy array's state is {state!r:.80}; (version, shape, dtype, order, data) is expected")
        shape, dtype, fortran, data = state[-4:]
        dtype = dtype_of(dtype)
        if dtype.hasobject:  # its data are objects of any class: not an array that we can vouch for
            self.array = Opaque("numpy.ndarray", (shape, str(dtype)), state=data)
            self.args = (self.array,)
            machine.note_unknown("numpy.ndarray", "of Python objects")
            return
        array = make_array(data, dtype, shape, "F" if fortran else "C")
        # NumPy turns foreign bytes round here, and only here: protocol 5 keeps them.
        self.array = array if dtype.isnative or dtype.names else array.astype(dtype.newbyteorder("="))

    def build(self, bridge):
        if self.array is MISSING:
            return np.empty(0, np.int8)
        return self.args[0] if self.args else self.array


def reconstruct(machine, args):
    """numpy.core.multiarray._reconstruct(ndarray, (0,), b'b'): an empty array that BUILD fills."""
    cls = args[0]
    if getattr(cls, "qualname", None) != "numpy.ndarray":
        return Opaque(getattr(cls, "qualname", "numpy.ndarray"), args)
    return ArrayNode()


def scalar(machine, args):
    """numpy.core.multiarray.scalar(dtype, bytes)."""
    dtype = dtype_of(args[0])
    if dtype.hasobject:
        machine.note_unknown("numpy.core.multiarray.scalar", "of a Python object")
        return Opaque("numpy.core.multiarray.scalar", (str(dtype), *args[1:]))
    return make_array(args[1], dtype, (), "C")[()]


def frombuffer(machine, args):
    """numpy.core.numeric._frombuffer(bytes, dtype, shape, order): what protocol 5 writes."""
    data, dtype, shape, order = args[:4]
    dtype = dtype_of(dtype)
    if dtype.hasobject or order not in ("C", "F"):
        raise FormatError(f"a numpy array of {dtype} in order {order!r:.20} cannot be made from bytes")
    return make_array(data, dtype, shape, order)
