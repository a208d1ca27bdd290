"""LazyTensor: a tensor that is still in the file, and reading what is wanted of it."""

import numpy as np

from ._spec import TensorSpec
from .dtypes import DTYPES, QUANTIZED, numpy_dtype
from .errors import UnsupportedError
from .materialize import fill
from .memory import allocate
from .nodes import TensorNode
from .plan import View, index_view, root_of, runs_of
from .records import STORED, Records

# Where the TensorSpec stands in nodes that add to a plain tensor without changing its values.
WRAPPERS = ("parameter", "variable", "typed_tensor", "from_type")
SHAPE_AT = {"sparse_coo": 2, "sparse_compressed": 4, "meta": 1, "wrapper_subclass": 2}
DTYPE_AT = {"meta": 0, "wrapper_subclass": 1, "device_tensor": 1}


def plain_spec(leaf):
    """The TensorSpec whose values a leaf has, None for other layouts."""
    while isinstance(leaf, TensorNode) and leaf.kind in WRAPPERS:
        leaf = leaf.args[0]
    return leaf if isinstance(leaf, TensorSpec) and leaf.dtype not in QUANTIZED else None


class LazyTensor:
    """A tensor of an open checkpoint. Its shape and dtype are known, its values are read when asked for.

    ``t[...]`` takes ints, slices and an ellipsis, and reads the bytes of that part alone (not verified: a checksum
    covers a whole record). Attributes, sizes in elements where no unit is named: ``name``, ``shape``, ``dtype`` (text such
    as "bfloat16"), ``stride``, ``storage_offset``, ``numel``, ``nbytes``, ``requires_grad``, ``kind`` ("strided", "parameter",
    "sparse_coo" ...), ``storage`` (key and nbytes of the storage it lies in).
    """

    __slots__ = ("_checkpoint", "leaf", "path", "spec")

    def __init__(self, checkpoint, path, leaf):
        self._checkpoint, self.path, self.leaf = checkpoint, path, leaf
        self.spec = plain_spec(leaf)

    @property
    def name(self):
        return ".".join([str(key) for key in self.path])

    @property
    def kind(self):
        return "strided" if isinstance(self.leaf, TensorSpec) else self.leaf.kind

    @property
    def shape(self):
        if self.spec is not None:
            return self.spec.shape
        if hasattr(self.leaf, "spec"):
            return self.leaf.spec.shape
        at = SHAPE_AT.get(self.kind)
        return None if at is None else tuple(self.leaf.args[at])

    @property
    def dtype(self):
        code = self._code()
        return None if code is None else DTYPES[code].name

    def _code(self):
        if self.spec is not None:
            return self.spec.dtype
        if hasattr(self.leaf, "spec"):
            return self.leaf.spec.dtype
        if self.kind in DTYPE_AT:
            return self.leaf.args[DTYPE_AT[self.kind]]
        values = {"sparse_coo": 1, "sparse_compressed": 3, "nested": 0}.get(self.kind)
        inner = None if values is None else plain_spec(self.leaf.args[values])
        return None if inner is None else inner.dtype

    @property
    def stride(self):
        return self._plain("stride").stride

    @property
    def storage_offset(self):
        return self._plain("storage_offset").offset

    @property
    def storage(self):
        return self._plain("storage").storage

    @property
    def numel(self):
        return self.spec.numel if self.spec is not None else int(np.prod(self.shape or (0,), dtype=object))

    @property
    def nbytes(self):
        code = self._code()
        return self.numel * (DTYPES[code].itemsize if code is not None else 0)

    @property
    def requires_grad(self):
        if self.kind in ("parameter", "variable"):
            return self.leaf.args[1]
        return self.spec is not None and self.spec.requires_grad

    def _plain(self, what):
        if self.spec is None:
            raise UnsupportedError(f"{self.name}: a {self.kind} tensor has no {what}; read() gives it whole")
        return self.spec

    def __len__(self):
        if not self.shape:
            raise TypeError("len() of a tensor without dimensions")
        return self.shape[0]

    def __repr__(self):
        kind = "" if self.kind == "strided" else f", {self.kind}"
        return f"LazyTensor({self.name!r}, {self.dtype}, shape={self.shape}{kind})"

    # -- reading

    def read(self, out=None):
        """The tensor as ``load`` gives it: with the whole of its storage, verified, which it shares with other tensors of
        this checkpoint that were read and are still there. ``t[...]`` reads its own elements alone, into memory of its own.

        ``out``: a writable buffer, array or tensor of the same dtype and size, which is filled (row by row) and returned.
        """
        if out is not None:
            return self._read_into(out)
        return self._checkpoint.read_leaf(self.leaf)

    def __getitem__(self, index):
        spec = self._plain("part")
        return self._view(index_view(spec.shape, spec.stride, spec.offset, index), self._checkpoint.framework)

    def torch(self):
        """The tensor as torch gives it, whatever the checkpoint was opened for."""
        return self._checkpoint.read_leaf(self.leaf, "torch")

    def numpy(self):
        """The tensor's elements as a NumPy array of its own."""
        if self.spec is None:
            return self._checkpoint.read_leaf(self.leaf, "numpy")
        return self._view(View(self.spec.offset, self.spec.shape, self.spec.stride), "numpy")

    def __array__(self, dtype=None, copy=None):
        if copy is False:
            raise ValueError(f"{self.name} is in a file: an array of it is always a copy")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def _view(self, view, framework):
        owner, start, stride = self._read(view)
        if framework == "numpy":
            return self._as_array(owner, start, view.shape, stride, numpy_dtype(self.spec.dtype), values=True)
        return self._checkpoint.torch_view(owner, start, view.shape, stride, self.spec)

    def _as_array(self, owner, start, shape, stride, dtype, values):
        step = dtype.itemsize
        flat = np.empty(1, dtype) if owner is None else np.frombuffer(owner, dtype, memoryview(owner).nbytes // step)
        array = np.lib.stride_tricks.as_strided(flat[start:], shape, [n * step for n in stride])
        if values and self.spec.conj:
            array = array.conj()
        return -array if values and self.spec.neg else array

    def _read(self, view):
        """(owner, first element, stride) of memory that holds a View; owner is None where it has no elements."""
        spec, contents = self.spec, self._checkpoint.contents
        storage = spec.storage
        root = root_of(storage)
        base = storage.offset // spec.itemsize
        runs = runs_of(view, spec.itemsize)
        if not len(runs.starts):
            return None, 0, view.stride
        row = self._checkpoint.row_of(root)
        span, record = runs.span * spec.itemsize, contents.records
        whole = span == root.nbytes and len(runs.starts) == 1
        if whole or self._checkpoint.swapped or record.method[row] != STORED or storage.offset % spec.itemsize:
            return self._checkpoint.whole_storage(spec.storage), view.offset, view.stride
        offsets = record.offset[row] + (base + runs.starts) * spec.itemsize
        part = Records([record.names[row]] * len(offsets), offsets, np.full(len(offsets), span))
        memory = allocate([span * len(offsets)])
        addresses = memory.address[0] + span * np.arange(len(offsets), dtype=np.int64)
        options = {"verify": False, "threads": self._checkpoint.threads}
        fill(contents.source, part, np.arange(len(offsets)), addresses, **options)
        return memory.owners[0], 0, runs.stride

    def _read_into(self, out):
        spec = self._plain("values to fill a buffer with")
        raw = np.dtype(f"V{spec.itemsize}")
        target = self._checkpoint.writable_bytes(out, spec)
        owner, start, stride = self._read(View(spec.offset, spec.shape, spec.stride))
        values = spec.conj or spec.neg
        dtype = numpy_dtype(spec.dtype) if values else raw
        if owner is not None:
            array = self._as_array(owner, start, spec.shape, stride, dtype, values)
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
