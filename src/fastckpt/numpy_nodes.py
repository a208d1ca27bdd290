"""NumPy's pickles as data: dtypes, arrays and scalars of NumPy 1 and 2, made without NumPy's own pickle functions."""

import math
import re

import numpy as np

from ._spec import Global
from .errors import FormatError, LimitError
from .nodes import MISSING, Node, Opaque, short

PLAIN_TYPE = re.compile(r"[<>|=]?[?bBhHiIlLqQuefdgFDGcmMOSUV][0-9]{0,10}")
DATETIME_UNITS = ("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as", "generic")
MAX_DIMENSIONS = 64  # of any NumPy
MAX_FIELDS = 100_000  # of one dtype, fields of fields counted: dtypes that share fields have 2**depth of them


class DtypeNode(Node):
    """A numpy.dtype, complete once BUILD has said its byte order and fields."""

    __slots__ = ("dtype", "fields")

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype
        self.fields = 1

    def set_state(self, machine, state):
        if not isinstance(state, tuple) or not 5 <= len(state) <= 9:
            raise FormatError(
                f"a numpy dtype's state is {short(state)}; a tuple of eight is expected"
            )
        _, order, base, names, fields = state[:5]
        order = text(order) if order is not None else "|"
        if order not in ("<", ">", "=", "|"):
            raise FormatError(
                f"a numpy dtype's byte order is {short(order)}; one of '<>=|' is expected"
            )
        if base is not None:
            inner, shape = base
            self.dtype, self.fields = np.dtype((dtype_of(inner), shape_of(shape))), inner.fields
        elif isinstance(names, tuple):
            self.fields = count_fields(machine, names, fields)
            self.dtype = structured(names, fields, state)
        elif self.dtype.kind in "Mm" and len(state) > 8:
            unit, count = datetime_unit(state[8])
            self.dtype = np.dtype(
                f"{self.dtype.kind}8[{count}{unit}]" if unit != "generic" else f"{self.dtype.kind}8"
            )
        if order in "<>" and names is None:
            self.dtype = self.dtype.newbyteorder(order)

    def build(self, bridge):
        return self.dtype

    def __repr__(self):
        return f"<numpy.dtype {str(self.dtype)[:40]}>"


def count_fields(machine, names, fields):
    """How many fields a dtype has in all; what NumPy does with it takes time in proportion."""
    machine.spend(len(names))
    total = 1 + sum(
        field[0].fields if isinstance(field[0], DtypeNode) else 1 for field in fields.values()
    )
    if total > MAX_FIELDS:
        raise LimitError(
            f"a numpy dtype has more than {MAX_FIELDS} fields, fields of fields counted"
        )
    return total


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
        raise FormatError(
            f"a numpy datetime unit is {short(metadata)}; like ({{}}, (b'ns', 1, 1, 1)) is expected"
        )
    return unit, numerator


def dtype_of(value):
    if isinstance(value, DtypeNode):
        return value.dtype
    raise FormatError(f"a numpy dtype is expected, the pickle has {type(value).__name__}")


def shape_of(value):
    value = (value,) if type(value) is int else value
    sizes = value if type(value) is tuple and len(value) <= MAX_DIMENSIONS else (None,)
    if any(type(n) is not int or not 0 <= n < 2**63 for n in sizes):
        raise FormatError(
            f"a numpy shape is {short(value)}; a tuple of up to {MAX_DIMENSIONS} sizes is expected"
        )
    return value


def make_dtype(machine, args):
    """numpy.dtype(type string, align, copy); one of another scalar class, such as numpy.record or bfloat16, is opaque."""
    kind = text(args[0])
    if isinstance(kind, Global):
        if kind.known is not None:
            machine.note_unknown("numpy.dtype", f"of {kind.qualname}")
        return Opaque("numpy.dtype", args)
    if not isinstance(kind, str) or not PLAIN_TYPE.fullmatch(kind):
        raise FormatError(
            f"a numpy dtype is called {short(kind)}; a type string like 'f4' is expected"
        )
    return DtypeNode(np.dtype(kind))


def raw_bytes(data):
    """Array bytes; Python 2 wrote them as str, which latin-1 turns back."""
    if isinstance(data, str):
        return data.encode("latin-1")
    if isinstance(data, (bytes, bytearray)):
        return data
    raise FormatError(f"the data of a numpy array is {type(data).__name__}; bytes are expected")


def make_array(machine, data, dtype, shape, order):
    """An array of its own memory, of exactly the bytes that are there."""
    data, shape = raw_bytes(data), shape_of(shape)
    machine.spend(len(data))
    wanted = math.prod(shape) * dtype.itemsize
    if len(data) != wanted or math.prod(shape) >= 2**63:
        raise FormatError(
            f"a numpy array of shape {shape} and {dtype} needs {wanted} bytes, the pickle has {len(data)}"
        )
    if not wanted:
        return np.ndarray(shape, dtype, buffer=bytearray(), strides=strides_of(shape, dtype, order))
    array = np.empty(shape, dtype, order=order)
    # As bytes: an assignment of items would leave the gaps between their fields as they are in fresh memory.
    array.reshape(-1, order=order).view(np.uint8)[:] = np.frombuffer(data, np.uint8)
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
            raise FormatError(
                f"a numpy array's state is {short(state)}; (version, shape, dtype, order, data) is expected"
            )
        shape, dtype, fortran, data = state[-4:]
        if isinstance(dtype, Opaque):
            self.array = Opaque("numpy.ndarray", (shape, dtype), state=data)
            self.args = (self.array,)
            return
        dtype = dtype_of(dtype)
        if dtype.hasobject:  # its data are objects of any class: not an array that we can vouch for
            self.array = Opaque("numpy.ndarray", (shape, str(dtype)), state=data)
            self.args = (self.array,)
            machine.note_unknown("numpy.ndarray", "of Python objects")
            return
        self.array = make_array(machine, data, dtype, shape, "F" if fortran else "C")
        if not dtype.isnative and not dtype.names:
            # NumPy turns foreign bytes round here, and only here: protocol 5 keeps them.
            native = dtype.newbyteorder("=")
            self.array = self.array.astype(native) if self.array.size else self.array.view(native)

    def build(self, bridge):
        if self.array is MISSING:
            return np.empty(0, np.int8)
        return self.args[0] if self.args else self.array

    def __repr__(self):
        return "<numpy.ndarray>"


def reconstruct(machine, args):
    """numpy.core.multiarray._reconstruct(ndarray, (0,), b'b'): an empty array that BUILD fills."""
    cls = args[0]
    if getattr(cls, "qualname", None) != "numpy.ndarray":
        return Opaque(getattr(cls, "qualname", "numpy.ndarray"), args)
    return ArrayNode()


def scalar(machine, args):
    """numpy.core.multiarray.scalar(dtype, bytes)."""
    if isinstance(args[0], Opaque):
        return Opaque("numpy.core.multiarray.scalar", args)
    dtype = dtype_of(args[0])
    if dtype.hasobject:
        machine.note_unknown("numpy.core.multiarray.scalar", "of a Python object")
        return Opaque("numpy.core.multiarray.scalar", (str(dtype), *args[1:]))
    array = make_array(machine, args[1], dtype, (), "C")
    if (
        dtype.kind == "U"
        and array.nbytes
        and array.reshape(1).view(dtype.byteorder + "u4").max() > 0x10FFFF
    ):
        raise FormatError("a numpy string has a character beyond those of Unicode")
    return array[()]


def frombuffer(machine, args):
    """numpy.core.numeric._frombuffer(bytes, dtype, shape, order[, axes]): what protocol 5 writes; axes are those of order K."""
    data, dtype, shape, order, axes = (*args, None)[:5]
    if isinstance(dtype, Opaque):
        return Opaque("numpy.core.numeric._frombuffer", args)
    dtype = dtype_of(dtype)
    transposed = order == "K" and isinstance(axes, tuple) and len(axes) == len(shape_of(shape))
    if dtype.hasobject or not (transposed or order in ("C", "F")):
        raise FormatError(
            f"a numpy array of {dtype} in order {short(order)} cannot be made from bytes"
        )
    array = make_array(machine, data, dtype, shape, "C" if transposed else order)
    return array.transpose(axes) if transposed else array
