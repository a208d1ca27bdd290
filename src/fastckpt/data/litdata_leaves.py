"""The leaves of LitData samples: what each serializer's name means, and what number stands for which element type."""

import functools
import pickle

import numpy as np

from ..dtypes import CODE_BY_NAME, DTYPES, numpy_dtype
from ..importing import importing
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
# The columns of leaves of the kinds 0, 1 and 2
SCALARS = ("int64", "float64", "bool")
ELEMENT_TYPES = {native.FLAT_TENSOR: TENSORS, native.FLAT_ARRAY: ARRAYS}

JSON = functools.partial(decode_json, depth=Limits().object_depth)


class Elements:
    """The element types of a framework: tensors and NumPy arrays for "torch", NumPy arrays for "numpy".

    ``rows``, ``new`` and ``from_dlpack`` are what a native Layout takes. Raises ModuleNotFoundError where torch is wanted and not
    installed.
    """

    def __init__(self, framework):
        of_array = {name: (None, numpy_dtype(CODE_BY_NAME[name])) for name in {*TENSORS, *ARRAYS}}
        if framework == "numpy":
            of_tensor, self.new, self.from_dlpack = of_array, (np.empty, np.empty), None
        else:
            with importing:
                from ..loading import require_torch

            require_torch()
            with importing:
                from ..torch_tensors import DLPACK, FROM_DLPACK, empty_tensor, torch_dtype

            codes = {name: CODE_BY_NAME[name] for name in of_array}
            of_tensor = {name: (DLPACK[code], torch_dtype(code)) for name, code in codes.items()}
            self.new, self.from_dlpack = (empty_tensor, np.empty), FROM_DLPACK
        self.rows = [
            element_rows(TENSORS, of_tensor, of_tensor),
            element_rows(ARRAYS, of_array, of_tensor),
            element_rows(SCALARS, of_tensor, of_tensor),
        ]


def element_rows(names, of_leaf, of_column):
    """Rows of (itemsize, DLPack's (code, bits) or None, dtype, and the same two of a column of a batch)."""
    return [
        (DTYPES[CODE_BY_NAME[name]].itemsize, *of_leaf[name], *of_column[name]) for name in names
    ]


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
