"""LazyTensor: a tensor that is still in the file, and reading what is wanted of it."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from ._spec import Leaf, TensorSpec
from .dtypes import CODE_BY_NAME, DTYPES, QUANTIZED, numpy_dtype
from .errors import UnsupportedError
from .materialize import fill
from .nodes import Opaque, TensorNode
from .numpy_bridge import strided, strided_values
from .plan import View, index_view, root_of, runs_of
from .records import STORED, Records
from .selection import dotted

# Where the TensorSpec stands in nodes that add to a plain tensor without changing its values.
WRAPPERS = ("parameter", "variable", "typed_tensor", "from_type")
# Where other nodes have what is asked of a tensor: the argument itself, or a tensor that has it.
SHAPE_AT = {
    "sparse_coo": 2,
    "sparse_compressed": 4,
    "meta": 1,
    "wrapper_subclass": 2,
    "device_tensor": 0,
}
DTYPE_AT = {
    "sparse_coo": 1,
    "sparse_compressed": 3,
    "nested": 0,
    "meta": 0,
    "wrapper_subclass": 1,
    "device_tensor": 1,
}
GRADIENT_AT = {"parameter": 1, "variable": 1, "meta": 3, "wrapper_subclass": 7, "device_tensor": 3}
GRADIENT_AT |= {"quantized_per_tensor": -1, "quantized_per_channel": -1}


def core_of(leaf):
    """What a tensor is under all that only adds to it: a TensorSpec, another node (Opaque where a function of somebody's
    makes it), None where torch would make an empty one."""
    while isinstance(leaf, TensorNode) and leaf.kind in WRAPPERS:
        leaf = leaf.args[0]
    return leaf


def plain_spec(leaf):
    """The TensorSpec whose values a leaf has, None for other layouts."""
    core = core_of(leaf)
    return core if isinstance(core, TensorSpec) and core.dtype not in QUANTIZED else None


def shape_of(core):
    """The sizes of a tensor; None where it has no such thing, as a nested one."""
    core = getattr(core, "spec", core)  # a quantized node says where its integers lie
    if core is None:
        return (0,)
    if isinstance(core, TensorSpec):
        return core.shape
    if isinstance(core, Opaque):
        return None
    at = SHAPE_AT.get(core.kind)
    found = None if at is None else core.args[at]
    if at is None or isinstance(found, (tuple, list)):
        return None if found is None else tuple(found)
    return shape_of(core_of(found)) if isinstance(found, (TensorSpec, TensorNode)) else None


def dtype_of(leaf):
    """The code of a tensor's dtype."""
    core = core_of(leaf)
    core = getattr(core, "spec", core)
    if core is None:
        return leaf.args[1] if leaf.kind == "typed_tensor" else CODE_BY_NAME["float32"]
    if isinstance(core, TensorSpec):
        return core.dtype
    if isinstance(core, Opaque):
        return None
    at = DTYPE_AT.get(core.kind)
    found = None if at is None else core.args[at]
    return dtype_of(found) if isinstance(found, (TensorSpec, TensorNode)) else found


class LazyTensor(Leaf):
    """A tensor of an open checkpoint. Its shape and dtype are known, its values are read when asked for.

    ``t[...]`` takes ints, slices and an ellipsis, and reads the bytes of that part alone (not verified: a checksum
    covers a whole record). Attributes, sizes in elements where no unit is named: ``name``, ``shape``, ``dtype`` (text such
    as "bfloat16"), ``ndim``, ``stride``, ``storage_offset``, ``numel``, ``nbytes``, ``requires_grad``, ``kind`` ("strided",
    "parameter", "sparse_coo" ...), ``storage`` (key and nbytes of the storage it lies in).

    Pickling it, as torch.save would, keeps a handle of the file and none of the values; ``save`` refuses it.
    """

    __slots__ = ()

    @property
    def spec(self) -> TensorSpec | None:
        """The TensorSpec whose values it has, None for other layouts."""
        leaf = self.leaf
        return leaf if type(leaf) is TensorSpec else plain_spec(leaf)

    def __eq__(self, other: object) -> bool:
        """Two are equal that stand for one tensor of one open checkpoint; values are not compared."""
        if not isinstance(other, LazyTensor):
            return NotImplemented
        return self.leaf is other.leaf and self._checkpoint is other._checkpoint

    def __hash__(self) -> int:
        return hash((id(self._checkpoint), id(self.leaf)))

    @property
    def checkpoint(self):
        """The open Checkpoint that it is read from."""
        return self._checkpoint

    @property
    def path(self) -> tuple[Any, ...]:
        """The keys that lead to the tensor; the first such path, where there are several."""
        return self._checkpoint.path_of(self.leaf)

    @property
    def name(self) -> str:
        return dotted(self.path)

    @property
    def kind(self) -> str:
        if isinstance(self.leaf, TensorSpec):
            return "strided"
        return self.leaf.args[0] if self.leaf.kind == "sparse_compressed" else self.leaf.kind

    def _other_shape(self):
        """Its sizes, where it is no TensorSpec."""
        return shape_of(core_of(self.leaf))

    @property
    def dtype(self) -> str | None:
        code = dtype_of(self.leaf)
        return None if code is None else DTYPES[code].name

    @property
    def stride(self) -> tuple[int, ...]:
        return self._plain("stride").stride

    @property
    def storage_offset(self) -> int:
        return self._plain("storage_offset").offset

    @property
    def storage(self):
        return self._plain("storage").storage

    @property
    def numel(self) -> int:
        if self.spec is not None:
            return self.spec.numel
        if self.kind == "nested":
            return self.leaf.args[0].numel
        shape = self.shape
        return 0 if shape is None else math.prod(shape)

    @property
    def nbytes(self) -> int:
        code = dtype_of(self.leaf)
        return self.numel * (DTYPES[code].itemsize if code is not None else 0)

    @property
    def requires_grad(self) -> bool:
        leaf = self.leaf
        while isinstance(leaf, TensorNode):
            if leaf.kind in GRADIENT_AT:
                return leaf.args[GRADIENT_AT[leaf.kind]]
            leaf = leaf.args[0] if leaf.kind in WRAPPERS else None
        return isinstance(leaf, TensorSpec) and leaf.requires_grad

    def _plain(self, what):
        if self.spec is None:
            raise UnsupportedError(
                f"{self.name}: a {self.kind} tensor has no {what}; read() gives it whole"
            )
        return self.spec

    @property
    def ndim(self) -> int | None:
        """How many dimensions it has; None where it has no shape."""
        return None if self.shape is None else len(self.shape)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a tensor without dimensions")
        return self.shape[0]

    def __repr__(self):
        kind = "" if self.kind == "strided" else f", {self.kind}"
        return f"LazyTensor({self.name!r}, {self.dtype}, shape={self.shape}{kind})"

    # -- reading

    def read(self, out: Any = None) -> Any:
        """The tensor as ``load`` gives it: with the whole of its storage, verified, which it shares with other tensors of
        this checkpoint that were read and are still there. ``t[...]`` reads its own elements alone, into memory of its own.

        ``out``: a writable buffer, array or tensor of the same dtype and size, which is filled (row by row) and returned.
        """
        if out is not None:
            return self._read_into(out)
        return self._checkpoint.read_leaf(self.leaf)

    def __getitem__(self, index: Any) -> Any:
        spec = self._plain("part")
        return self._view(
            index_view(spec.shape, spec.stride, spec.offset, index), self._checkpoint.framework
        )

    def torch(self) -> Any:
        """The tensor as torch gives it, whatever the checkpoint was opened for."""
        return self._checkpoint.read_leaf(self.leaf, "torch")

    def numpy(self) -> np.ndarray:
        """The tensor's elements as a NumPy array of its own; UnsupportedError where NumPy has nothing like it."""
        if self.spec is None:
            array = self._checkpoint.read_leaf(self.leaf, "numpy")
            return array if isinstance(array, np.ndarray) else self._plain("form in NumPy")
        return self._view(View(self.spec.offset, self.spec.shape, self.spec.stride), "numpy")

    def __array__(self, dtype=None, copy=None):
        if copy is False:
            raise ValueError(f"{self.name} is in a file: an array of it is always a copy")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def _view(self, view, framework):
        owner, start, stride = self._read(view)
        if framework == "numpy":
            return self.as_array(
                owner, start, view.shape, stride, numpy_dtype(self.spec.dtype), values=True
            )
        return self._checkpoint.torch_view(
            owner, start, view.shape, stride, self.spec
        ).requires_grad_(self.requires_grad)

    def as_array(self, owner, start, shape, stride, dtype, values):
        """A strided array over a buffer (None: without elements) that holds elements of this tensor."""
        step = dtype.itemsize
        flat = (
            np.empty(1, dtype)
            if owner is None
            else np.frombuffer(owner, dtype, memoryview(owner).nbytes // step)
        )
        if values:
            return strided_values(flat, start, shape, stride, self.spec)
        return strided(flat, start, shape, stride)

    def __reduce__(self):
        """To be found again, by its path, in a checkpoint that is opened anew; see Checkpoint."""
        if self._checkpoint[self.path] != self:
            raise TypeError(
                f"{self!r} has no name of its own in the checkpoint; pickle the Checkpoint instead"
            )
        return operator.getitem, (self._checkpoint, self.path)

    def _read(self, view):
        """(owner, first element, stride) of memory that holds a View; owner is None where it has no elements."""
        with self._checkpoint.source.in_use():
            return self._read_runs(view)

    def _read_runs(self, view):
        spec, contents = self.spec, self._checkpoint.contents
        if spec.storage.location == "meta":
            raise UnsupportedError(
                f"{self.name}: a tensor on the meta device has no values; read() gives it"
            )
        runs = runs_of(view, spec.itemsize)
        if not len(runs.starts):
            return None, 0, view.stride
        root, span = root_of(spec.storage), runs.span * spec.itemsize
        whole = span == root.nbytes and len(runs.starts) == 1
        base = None if whole else self.offset_in_file()
        if base is None:
            return self._checkpoint.whole_storage(spec.storage), view.offset, view.stride
        row, record = self._checkpoint.row_of(root), contents.records
        offsets = base + runs.starts * spec.itemsize
        part = Records([record.names[row]] * len(offsets), offsets, np.full(len(offsets), span))
        memory = self._checkpoint.allocate([span * len(offsets)])
        addresses = memory.address[0] + span * np.arange(len(offsets), dtype=np.int64)
        options = {"verify": False, "threads": self._checkpoint.threads, "huge": memory.huge}
        rows = np.arange(len(offsets))
        fill(contents.source, part, rows, addresses, memory.owners, **options)
        return memory.owners[0], 0, runs.stride

    def offset_in_file(self):
        """Byte of the source where its storage begins; None where its bytes do not lie there as they are in memory, or are
        mapped: then the storage is taken whole. Called while the source is in use.
        """
        checkpoint, spec = self._checkpoint, self.spec
        storage, records = spec.storage, checkpoint.contents.records
        row = checkpoint.row_of(root_of(storage))
        if (
            checkpoint.swapped
            or records.method[row] != STORED
            or storage.offset % spec.itemsize
            or checkpoint.maps(row, spec)
        ):
            return None
        return int(records.offset[row]) + storage.offset

    def _read_into(self, out):
        spec = self._plain("values to fill a buffer with")
        raw = np.dtype(f"V{spec.itemsize}")
        target = self._checkpoint.writable_bytes(out, spec)
        if (spec.conj or spec.neg) and hasattr(
            out, "copy_"
        ):  # torch can what NumPy cannot, for complex32
            out.detach().copy_(self.torch())
            return out
        owner, start, stride = self._read(View(spec.offset, spec.shape, spec.stride))
        values = spec.conj or spec.neg
        dtype = numpy_dtype(spec.dtype) if values else raw
        if owner is not None:
            array = self.as_array(owner, start, spec.shape, stride, dtype, values)
            target.view(dtype).reshape(spec.shape)[...] = array
        return out


class LazyStorage:
    """A bare storage of an open checkpoint: ``dtype`` (text), ``nbytes``, ``key``; ``read()`` gives its contents."""

    __slots__ = ("_checkpoint", "leaf")

    def __init__(self, checkpoint, ref):
        self._checkpoint, self.leaf = checkpoint, ref

    @property
    def key(self):
        return self.leaf.storage.key

    @property
    def dtype(self):
        return DTYPES[self.leaf.dtype].name

    @property
    def nbytes(self):
        return self.leaf.storage.nbytes

    def read(self):
        """The storage: a torch.TypedStorage, or a flat array under framework="numpy"."""
        return self._checkpoint.read_leaf(self.leaf)

    def __repr__(self):
        return f"LazyStorage({self.key!r}, {self.dtype}, {self.nbytes} bytes)"
