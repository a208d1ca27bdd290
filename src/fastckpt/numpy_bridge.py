"""Memory into NumPy arrays, without torch. Names of torch's (dtypes, devices) come out as text."""

import numpy as np

from .dtypes import DTYPES, QUANTIZED, numpy_dtype
from .errors import UnsupportedError, short
from .nodes import MISSING, Opaque, TorchName
from .refusal import unsafe_name


def strided(flat, start, shape, stride):
    """A strided view of a flat array, from element ``start`` on; ``stride`` is in elements.

    numpy.lib.stride_tricks.as_strided spells the dtype as text, and that of float8_e5m2 has none that can be read back.
    """
    # The stride of an axis of one element may be any number of 64 bits; none is taken then.
    strides = [min(n * flat.itemsize, 2**62) for n in stride]
    try:
        return np.ndarray(
            shape, flat.dtype, flat[start:] if 0 not in shape else flat[:0], strides=strides
        )
    except ValueError as error:
        raise UnsupportedError(
            f"NumPy cannot have an array of shape {shape!r:.80} and this layout: {error}"
        ) from None


def strided_values(flat, start, shape, stride, spec):
    """A strided view of a flat array whose elements are the values of ``spec``, resolved before they are repeated."""
    if not (spec.conj or spec.neg) or 0 in shape:
        return resolved(strided(flat, start, shape, stride), spec)
    end = start + 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    return strided(resolved(flat[start:end], spec), 0, shape, stride)


def resolved(array, spec):
    """The values of a view that is conjugated or negated when it is looked at.

    Raises UnsupportedError where NumPy has only the bits.
    """
    row = DTYPES[spec.dtype]
    if (spec.conj or spec.neg) and row.raw and array.dtype == row.raw:
        raise UnsupportedError(
            f"a conjugated or negated view of {row.name}, of which NumPy has the bits only"
        )
    array = (
        np.asarray(array.conj()) if spec.conj else array
    )  # of an array without dimensions NumPy makes a scalar
    return np.asarray(-array) if spec.neg else array


class NumpyBridge:
    """``places[spec.index]`` is (owner, byte offset) of each storage's memory."""

    allowed: dict[str, type] = {}  # noqa: RUF012 - nothing is: classes that users allow are torch's business

    def __init__(self, places, *, unknown="error", where=""):
        self.places, self.unknown, self.where = places, unknown, where

    def flat(self, spec, code):
        """A storage as a flat array of one dtype, with whole elements only."""
        dtype = numpy_dtype(code)
        if spec.nbytes < dtype.itemsize:
            return np.empty(0, dtype)
        owner, offset = self.places[spec.index]
        if owner is None:
            raise UnsupportedError(
                f"{self.where}storage {spec.key!r} is on the meta device, it has no values"
            )
        return np.frombuffer(owner, dtype, count=spec.nbytes // dtype.itemsize, offset=offset)

    def forget(self, index):
        """Nothing is kept here of a storage."""

    def tensors(self, specs):
        return [self.tensor(spec) for spec in specs]

    def tensor(self, spec):
        if spec.dtype in QUANTIZED:
            return None
        flat = self.flat(spec.storage, spec.dtype)
        return strided_values(flat, spec.offset, spec.shape, spec.stride, spec)

    def storage(self, ref):
        return self.flat(ref.storage, ref.dtype)

    def name(self, path):
        return f"torch.{path}"

    def named(self, name):
        value = name.known.value if name.known is not None else MISSING
        if isinstance(value, TorchName):
            return self.name(value.path)
        return value if value is not MISSING else self.opaque(Opaque(name.qualname))

    def size(self, sizes):
        return sizes

    def device(self, kind, index=None):
        return kind if index is None else f"{kind}:{index}"

    def parameter(self, data, requires_grad):
        return np.empty(0, np.float32) if data is None else data

    variable = parameter

    def typed_tensor(self, data, code):
        return np.empty(0, numpy_dtype(code)) if data is None else data

    def from_type(self, tensor, cls):
        return (
            tensor
            if cls in ("torch.Tensor", "torch.nn.Parameter")
            else Opaque(getattr(cls, "qualname", short(cls)), (tensor,))
        )

    def device_tensor(self, data, code, device, requires_grad):
        return np.asarray(data).astype(numpy_dtype(code))

    def set_state(self, node, obj, state):
        if isinstance(obj, Opaque):
            obj.state = state  # an array has no place for the attributes of a tensor

    def keeps(self, opaque):
        if self.unknown != "opaque":
            raise unsafe_name(self.where, opaque.qualname)
        return True

    def opaque(self, node):
        self.keeps(node)
        return node

    def _no_twin(self, kind, *args):
        """What NumPy has no type for: named where it is met, kept as its parts where stand-ins are wanted."""
        if self.unknown == "opaque":
            return Opaque(f"torch.{kind}", args)
        raise UnsupportedError(
            f"{self.where}NumPy has nothing for a {kind} tensor; framework='torch' has, unknown='opaque' keeps its parts"
        )

    def sparse_coo(self, *args):
        return self._no_twin("sparse_coo", *args)

    def sparse_compressed(self, layout, *args):
        return self._no_twin(layout, *args)

    def _quantized(self, spec, *args):
        row, array = DTYPES[spec.dtype], self.flat(spec.storage, spec.dtype)
        if row.packed == 1 and spec.numel:  # several in a byte have no strides
            array = strided(array, spec.offset, spec.shape, spec.stride)
        return self._no_twin(row.name, array, *args)

    quantized_per_tensor = quantized_per_channel = _quantized

    def nested(self, *args):
        return self._no_twin("nested", *args)

    def meta(self, code, size, stride, requires_grad):
        return self._no_twin("meta", DTYPES[code].name, size, stride)

    def wrapper_subclass(self, cls, *args):
        return Opaque(getattr(cls, "qualname", short(cls)), args)

    def generator(self, *args):
        return self._no_twin("Generator", *args)
