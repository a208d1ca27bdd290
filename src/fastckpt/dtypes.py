"""One table of every dtype: its torch name, its storage class, its size, and its NumPy twin.

A dtype is known inside the library by its *code*, its position in ``DTYPES``.
"""

from typing import NamedTuple

from .importing import importing


class DType(NamedTuple):
    """One row: ``itemsize`` in bytes, ``unit`` the bytes that swap together under another byte order."""

    name: str  # as torch spells it, without "torch."
    storage: (
        str | None
    )  # the typed storage class, None for dtypes that are saved through UntypedStorage
    itemsize: int
    unit: int
    numpy: str | None  # a NumPy dtype of the same values, None where NumPy itself has none
    ml_dtypes: str | None = None  # the ml_dtypes name of the same values
    raw: str | None = None  # NumPy dtype of the bare bits where neither is there
    packed: int = 1  # elements in one item


DTYPES: tuple[DType, ...] = (
    DType("float64", "DoubleStorage", 8, 8, "f8"),
    DType("float32", "FloatStorage", 4, 4, "f4"),
    DType("float16", "HalfStorage", 2, 2, "f2"),
    DType("bfloat16", "BFloat16Storage", 2, 2, None, "bfloat16", "u2"),
    DType("int64", "LongStorage", 8, 8, "i8"),
    DType("int32", "IntStorage", 4, 4, "i4"),
    DType("int16", "ShortStorage", 2, 2, "i2"),
    DType("int8", "CharStorage", 1, 1, "i1"),
    DType("uint8", "ByteStorage", 1, 1, "u1"),
    DType("bool", "BoolStorage", 1, 1, "?"),
    DType("complex128", "ComplexDoubleStorage", 16, 8, "c16"),
    DType("complex64", "ComplexFloatStorage", 8, 4, "c8"),
    DType("qint8", "QInt8Storage", 1, 1, None, None, "i1"),
    DType("quint8", "QUInt8Storage", 1, 1, None, None, "u1"),
    DType("qint32", "QInt32Storage", 4, 4, None, None, "i4"),
    DType("quint4x2", "QUInt4x2Storage", 1, 1, None, None, "u1", 2),
    DType("quint2x4", "QUInt2x4Storage", 1, 1, None, None, "u1", 4),
    DType("float8_e5m2", None, 1, 1, None, "float8_e5m2", "u1"),
    DType("float8_e4m3fn", None, 1, 1, None, "float8_e4m3fn", "u1"),
    DType("float8_e5m2fnuz", None, 1, 1, None, "float8_e5m2fnuz", "u1"),
    DType("float8_e4m3fnuz", None, 1, 1, None, "float8_e4m3fnuz", "u1"),
    DType("float8_e8m0fnu", None, 1, 1, None, "float8_e8m0fnu", "u1"),
    # Two values in a byte, which torch counts as one element; ml_dtypes keeps one in a byte, so its type has another meaning.
    DType("float4_e2m1fn_x2", None, 1, 1, None, None, "u1"),
    DType("bits8", None, 1, 1, None, None, "u1"),
    DType("bits16", None, 2, 2, None, None, "u2"),
    DType("bits1x8", None, 1, 1, None, None, "u1"),
    DType("bits2x4", None, 1, 1, None, None, "u1"),
    DType("bits4x2", None, 1, 1, None, None, "u1"),
    DType("complex32", None, 4, 2, None, None, "u4"),
    DType("uint16", None, 2, 2, "u2"),
    DType("uint32", None, 4, 4, "u4"),
    DType("uint64", None, 8, 8, "u8"),
)

CODE_BY_NAME = {dtype.name: code for code, dtype in enumerate(DTYPES)}
CODE_BY_STORAGE = {dtype.storage: code for code, dtype in enumerate(DTYPES) if dtype.storage}
UINT8 = CODE_BY_NAME["uint8"]  # what a byte of an UntypedStorage is

# Names that occur in files as dtype objects but never as the dtype of a dense tensor.
SUB_BYTE_NAMES = tuple(f"{sign}{bits}" for sign in ("int", "uint") for bits in range(1, 8))

QUANTIZED = frozenset(
    CODE_BY_NAME[n] for n in ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")
)
COMPLEX = frozenset(CODE_BY_NAME[n] for n in ("complex32", "complex64", "complex128"))
FLOATING = (
    frozenset(c for c, d in enumerate(DTYPES) if d.name.startswith(("float", "bfloat"))) | COMPLEX
)
# what may carry a gradient


def numpy_dtype(code):
    """The NumPy dtype of a code: its own, ml_dtypes' where that is installed, else the bare bits."""
    with importing:
        import numpy as np

    dtype = DTYPES[code]
    if dtype.numpy:
        return np.dtype(dtype.numpy)
    if dtype.ml_dtypes:
        try:
            with importing:
                import ml_dtypes
        except ModuleNotFoundError:
            pass
        else:
            return np.dtype(getattr(ml_dtypes, dtype.ml_dtypes))
    return np.dtype(dtype.raw)
