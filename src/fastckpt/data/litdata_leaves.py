"""The leaves of LitData samples: what each serializer's name means, and what number stands for which element type."""

import functools
import pickle

import numpy as np

from ..dtypes import CODE_BY_NAME, DTYPES, numpy_dtype
from ..limits import Limits
from . import _litdata_layout as native
from ._litdata_json import decode_json

KINDS = {
    "int": native.INT,
    "float": native.FLOAT,
    "bool": native.BOOL,
    "str": native.TEXT,
    "text": native.TEXT,
    "bytes": native.BYTES,
    "tensor": native.TENSOR,
    "no_header_tensor": native.FLAT_TENSOR,
    "numpy": native.ARRAY,
    "no_header_numpy": native.FLAT_ARRAY,
    "json": native.CALL,
    "pickle": native.CALL,
}
# Files of other formats, which are handed out as they are.
MEDIA = frozenset(
    "jpeg jpeg_array pil image audio video graph tiff tifffile pdf mesh nifti file".split()
)
FLAT = (native.FLAT_TENSOR, native.FLAT_ARRAY)

# By number. The writer uses the higher of two that mean the same.
TENSORS = (
    "float32 float32 float64 float64 complex64 complex64 complex128 complex128 float16 float16 bfloat16 "
    "uint8 int8 int16 int16 int32 int32 int64 int64 bool uint16"
).split()
# 14 to 17 are objects and text: they are not read.
ARRAYS = (
    "int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128 bool"
).split()
ELEMENT_TYPES = {native.FLAT_TENSOR: TENSORS, native.FLAT_ARRAY: ARRAYS}

JSON = functools.partial(decode_json, depth=Limits().object_depth)


class Elements:
    """Makes the element types of a framework: tensors and NumPy arrays for "torch", NumPy arrays for "numpy".

    ``tensors`` and ``arrays`` are what a native Layout takes: (new, rows), a row of (itemsize, DLPack code and bits, dtype, dtype
    of a column of a batch). ``columns`` is what it makes columns with: (new, dtypes of int, float and bool leaves).
    Raises ModuleNotFoundError where torch is wanted and not installed.
    """

    def __init__(self, framework):
        if framework == "numpy":
            new, dtype, self.from_dlpack = np.empty, numpy_dtype, None
            self.tensors = new, [numpy_row(name, numpy_dtype) for name in TENSORS]
        else:
            from ..loading import require_torch

            require_torch()
            from ..torch_bridge import DLPACK, FROM_DLPACK, empty_tensor, torch_dtype

            new, dtype, self.from_dlpack = empty_tensor, torch_dtype, FROM_DLPACK
            self.tensors = new, []
            for code in map(CODE_BY_NAME.get, TENSORS):
                row = DTYPES[code].itemsize, DLPACK[code], torch_dtype(code), torch_dtype(code)
                self.tensors[1].append(row)
        self.arrays = np.empty, [numpy_row(name, dtype) for name in ARRAYS]
        self.columns = new, [dtype(CODE_BY_NAME[name]) for name in ("int64", "float64", "bool")]


def numpy_row(name, column_dtype):
    code = CODE_BY_NAME[name]
    return DTYPES[code].itemsize, None, numpy_dtype(code), column_dtype(code)


def describe_leaf(name, decoders, allow_pickle):
    """What a leaf's name in index.json means: (name, kind, number of the element type, callable), or None if it is unknown.

    ``decoders`` has callables of bytes by the name before the colon, and goes first. ValueError: a number that is none.
    """
    key, _, detail = name.partition(":")
    if key in decoders:
        return name, native.CALL, 0, decoders[key]
    if key in MEDIA:
        return name, native.BYTES, 0, None
    kind = KINDS.get(key)
    if kind is None or (key == "pickle" and not allow_pickle):
        return None
    if kind in FLAT:
        if not detail.isdecimal() or len(detail) > 3 or int(detail) >= len(ELEMENT_TYPES[kind]):
            raise ValueError(detail)
        return name, kind, int(detail), None
    return name, kind, 0, {"json": JSON, "pickle": pickle.loads}.get(key)
