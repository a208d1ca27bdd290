"""Checkpoint: an open file as a Mapping of tensors that are read when they are asked for."""

import collections
import contextlib
import copy
import sys
import threading
from collections.abc import Mapping

import numpy as np

from ._spec import TensorSpec
from ._tree import named_tensors, substitute
from .contents import open_contents
from .dtypes import DTYPES
from .errors import FormatError
from .lazy import LazyTensor
from .limits import Limits
from .loading import Reader, check_options, wants_mapping
from .nodes import MISSING, Opaque
from .reading import place_storages
from .selection import dotted, specs_in
from .source import FileSource, open_source


def open(  # noqa: A001 - the verb that people look for
    f,
    *,
    framework="torch",
    mmap=None,
    encoding="utf-8",
    verify=True,
    threads=None,
    unknown="opaque",
    limits=None,
    offset=0,
    nbytes=None,
):
    """Open a checkpoint without reading a tensor; a Checkpoint, to be used in a ``with`` statement or closed.

    The arguments are those of ``load``. Objects of unknown classes are listed as they are, as Opaque.
    Raises FormatError, ChecksumError (of the pickle), UnsupportedError, LimitError and OSError.
    """
    options = {"framework": framework, "mmap": mmap, "encoding": encoding, "verify": verify, "threads": threads}
    options |= {"unknown": unknown, "limits": limits, "offset": offset, "nbytes": nbytes}
    return Checkpoint(f, **options)


class Checkpoint(Mapping):
    """Name -> LazyTensor of an open checkpoint.

    A name is the path of keys joined by dots (``"encoder.layers.0.weight"``; list positions are keys). Where two paths read
    alike, both are listed as tuples of keys, which always work: ``ckpt["a", "b"]`` or ``ckpt[("a.b",)]``.
    May be used from many threads, after a fork, and (opened by path) pickled: it then opens the file again, and
    refuses one that has changed.
    """

    def __init__(self, f, *, framework, mmap, encoding, verify, threads, unknown, limits, offset, nbytes):
        check_options(framework, unknown, True, None, None)
        self.framework, self.threads, self.verify, self.unknown = framework, threads, verify, unknown
        self.limits = limits or Limits()
        self._options = {"framework": framework, "mmap": mmap, "encoding": encoding, "verify": verify, "threads": threads}
        self._options |= {"unknown": unknown, "limits": limits, "offset": offset, "nbytes": nbytes}
        self._lock = threading.Lock()
        self.source = open_source(f, offset, nbytes)
        try:
            self.map_file = wants_mapping(mmap, self.source)
            self.contents = open_contents(self.source, encoding=encoding, limits=limits, verify=verify)
        except BaseException:
            self.source.close()
            raise
        self.swapped = self.contents.byteorder != sys.byteorder
        self._leaves = self._by_path = None
        self._lazy = {}
        self._rows = {}

    # -- the mapping

    def _index(self):
        """Name -> (path, leaf), and path -> leaf, made on first use."""
        if self._leaves is None:
            found = named_tensors(self.contents.unpickled.obj)
            names = [path[0] if len(path) == 1 and type(path[0]) is str else dotted(path) for path, _ in found]
            leaves = dict(zip(names, found, strict=True))
            if len(leaves) != len(found):
                count = collections.Counter(names)
                leaves = {
                    path if count[name] > 1 else name: (path, leaf)
                    for name, (path, leaf) in zip(names, found, strict=True)
                }
            self._leaves = leaves
        return self._leaves

    def __getitem__(self, name):
        self.source.check_open()
        leaves = self._index()
        found = leaves.get(name)
        if found is None and isinstance(name, tuple):
            if self._by_path is None:
                self._by_path = {typed(path): (path, leaf) for path, leaf in leaves.values()}
            found = self._by_path.get(typed(name))
        if found is None:
            alike = [path for path in leaves if isinstance(path, tuple) and dotted(path) == name]
            if alike:
                raise KeyError(f"{name!r} is ambiguous; use one of {', '.join(map(repr, alike[:4]))}")
            raise KeyError(name)
        return self._lazy_tensor(*found)

    def _lazy_tensor(self, path, leaf):
        """One LazyTensor for each tensor of the file, however many names it has."""
        lazy = self._lazy.get(id(leaf))
        if lazy is None:
            lazy = self._lazy.setdefault(id(leaf), LazyTensor(self, path, leaf))
        return lazy

    def __iter__(self):
        self.source.check_open()
        return iter(self._index())

    def __len__(self):
        self.source.check_open()
        return len(self._index())

    def __repr__(self):
        state = "closed" if self.source.closed else f"{len(self)} tensors"
        return f"<{type(self).__name__} {self.source.name!r}, {self.contents.kind}, {state}>"

    # -- the object

    @property
    def tree(self):
        """The object with LazyTensors in place of its tensors; everything else is as ``load`` gives it.

        Storages are kept as StorageRef, names of torch's as text, objects of unknown classes as Opaque.
        """
        self.source.check_open()
        unpickled = self.contents.unpickle_again()
        lazy = [self._lazy_tensor((), spec) for spec in self.contents.unpickled.tensors]
        return substitute(unpickled.obj, LazyBridge(self), lazy, self.limits.object_depth)

    @property
    def info(self):
        """What is known of the file: a dict of plain values, for people and programs to read."""
        self.source.check_open()
        contents = self.contents
        with_crc = int((contents.records.crc32 >= 0).sum())
        return {
            "name": self.source.name,
            "container": contents.kind,
            "nbytes": self.source.nbytes,
            "byteorder": contents.byteorder,
            "version": getattr(getattr(contents, "archive", None), "version", None),
            "torchscript": getattr(getattr(contents, "archive", None), "is_torchscript", False),
            "tensors": len(self._index()),
            "storages": len(contents.unpickled.storages),
            "records": len(contents.records),
            "records_with_crc32": with_crc,
            "unknown": sorted({qualname for qualname, _ in contents.unpickled.unknown}),
        }

    def read(self, names=None):
        """Read many tensors in one plan: they share storages as in the file, and each whole record is verified.

        names: a list of names gives a dict; None, or ``tree``, gives the whole object; any nesting of dicts, lists and tuples
        that holds LazyTensors of this checkpoint gives the same nesting of tensors.
        """
        self.source.check_open()
        if names is None:
            return self._read_all()
        if isinstance(names, (list, tuple, set)) and all(isinstance(n, str) or isinstance(n, tuple) for n in names):
            names = {name: self[name] for name in names}
        lazy = {}
        _collect(names, lazy)
        made = self._make([tensor.leaf for tensor in lazy.values()])
        memo = {id(tensor): tensors for tensor, tensors in zip(lazy.values(), made, strict=True)}
        memo[id(memo)] = list(lazy.values())
        return copy.deepcopy(names, memo)

    def _read_all(self):
        unpickled = self.contents.unpickle_again()
        reader = self._reader()
        reader.refuse(unpickled.unknown)
        reader.refuse_undecodable(unpickled)
        return reader.make(unpickled.obj, unpickled.storages, unpickled.tensors, self.limits)

    def _reader(self, framework=None):
        options = {"verify": self.verify, "threads": self.threads, "map_file": self.map_file}
        return Reader(self.contents, framework or self.framework, self.unknown, None, **options)

    def _make(self, leaves, framework=None):
        """Real tensors for leaves of the object, which stay as they are."""
        leaves = [leaf if isinstance(leaf, TensorSpec) else copy.deepcopy(leaf) for leaf in leaves]
        storages, tensors, _ = specs_in(leaves)
        return self._reader(framework).make(leaves, storages, tensors, self.limits)

    # -- for LazyTensor

    def read_leaf(self, leaf, framework=None):
        """One tensor of any layout."""
        self.source.check_open()
        return self._make([leaf], framework)[0]

    def row_of(self, root):
        """The row of a storage's record, located."""
        self.source.check_open()
        row = self._rows.get(root.index)
        if row is None:
            from .contents import storage_rows

            with self._lock:
                row = self._rows[root.index] = int(storage_rows(self.contents, [root])[0])
        return row

    def whole_storage(self, storage):
        """All bytes of a storage, verified: a writable buffer of them."""
        self.source.check_open()
        options = {"verify": self.verify, "threads": self.threads, "map_file": self.map_file}
        places = place_storages(self.contents, [storage], self.contents.unpickled.tensors, **options)
        owner, offset = places[storage.index]
        if offset == 0 and memoryview(owner).nbytes == storage.nbytes:
            return owner
        return np.frombuffer(owner, np.uint8, storage.nbytes, offset)

    def torch_view(self, owner, start, shape, stride, spec):
        """A torch tensor over memory of ours."""
        from .torch_bridge import view_tensor

        return view_tensor(owner, start, shape, stride, spec)

    def writable_bytes(self, out, spec):
        """The flat bytes of a buffer, array or CPU tensor that takes the values of ``spec``; ValueError where it does not."""
        numel = 1
        for size in spec.shape:
            numel *= size
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(out, torch.Tensor):
            from .torch_bridge import bytes_of

            return bytes_of(out, spec)
        view = memoryview(out)
        if view.readonly or not view.c_contiguous:
            raise ValueError("out: a writable buffer without gaps is needed")
        if isinstance(out, np.ndarray) and out.dtype.itemsize != spec.itemsize:
            raise ValueError(f"out: an array of {out.dtype}, the tensor is of {DTYPES[spec.dtype].name}")
        if view.nbytes != numel * spec.itemsize:
            raise ValueError(f"out: a buffer of {view.nbytes} bytes, the tensor has {numel * spec.itemsize}")
        return np.frombuffer(out, np.uint8) if view.nbytes else np.empty(0, np.uint8)

    # -- life

    def close(self):
        """Close the file. Tensors that were read stay; reading more raises ValueError."""
        self.source.close()

    def __enter__(self):
        self.source.check_open()
        return self

    def __exit__(self, *error):
        self.close()

    def __reduce__(self):
        self.source.check_open()
        if not isinstance(self.source, FileSource) or self.source.path is None:
            raise TypeError(f"{self.source.name}: only a checkpoint that was opened by its path can be pickled")
        return _open_again, (self.source.path, self._options, self.source.fingerprint)


def _open_again(path, options, fingerprint):
    checkpoint = Checkpoint(path, **options)
    if checkpoint.source.fingerprint != fingerprint:
        checkpoint.close()
        raise FormatError(f"{path}: the file has changed since the checkpoint was opened; open it anew", path=path)
    return checkpoint


def typed(path):
    """A path whose keys of different types differ: 0, "0" and False are three keys."""
    return tuple([(type(key), key) for key in path])


def _collect(value, found):
    """The LazyTensors in a nesting of containers and stand-ins, by id."""
    todo, seen = [value], set()
    while todo:
        value = todo.pop()
        if isinstance(value, LazyTensor):
            found[id(value)] = value
        elif id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, dict):
                todo += value.values()
                todo += value.keys()
                todo += vars(value).values() if hasattr(value, "__dict__") else ()
            elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
                todo += value
            elif isinstance(value, Opaque):
                todo += [value.args, value.kwargs, value.state, value.items, value.pairs]
            else:
                with contextlib.suppress(TypeError):
                    todo += vars(value).values() if type(value).__module__ in ("argparse", "types") else ()


class LazyBridge:
    """Makes the tree of an open checkpoint: nothing is read, and no framework is needed."""

    def __init__(self, checkpoint):
        self.checkpoint = checkpoint

    def lazy(self, node):
        return self.checkpoint._lazy_tensor((), node)

    def storage(self, ref):
        return ref

    def name(self, path):
        return f"torch.{path}"

    def named(self, name):
        value = name.known.value if name.known is not None else MISSING
        if value is MISSING:
            return Opaque(name.qualname)
        return self.name(value.path) if hasattr(value, "path") else value

    def size(self, sizes):
        return sizes

    def device(self, kind, index=None):
        return kind if index is None else f"{kind}:{index}"

    def keeps(self, opaque):
        return True

    def opaque(self, node):
        return node


