"""Checkpoint: an open file as a Mapping of tensors that are read when they are asked for."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ._spec import TensorSpec
from ._tree import named_tensors, substitute
from .contents import open_contents
from .dtypes import DTYPES, numpy_dtype
from .errors import FormatError
from .importing import importing
from .lazy import LazyTensor, core_of
from .lazy_bridge import LazyBridge
from .limits import Limits
from .loading import Reader, allocator, check_options, wants_mapping
from .memory import huge_pages
from .nodes import duplicate
from .plan import roots_of
from .progress import check as check_progress
from .reading import place_storages, usable_in_place
from .selection import name_list, specs_in
from .shard_index import is_index, weights_of
from .source import FileSource, open_source
from .tensor_index import TensorIndex

if TYPE_CHECKING:
    from ._annotations import CheckpointFile, Framework, MapLocation, Mmap, Progress, Unknown
    from .sharded import ShardedCheckpoint
    from .verify_report import VerifyReport


def open(
    f: CheckpointFile,
    *,
    framework: Framework = "torch",
    map_location: MapLocation = None,
    mmap: Mmap = None,
    encoding: str = "utf-8",
    verify: bool = True,
    threads: int | None = None,
    pin_memory: bool = False,
    unknown: Unknown = "opaque",
    limits: Limits | None = None,
    offset: int = 0,
    nbytes: int | None = None,
) -> Checkpoint | ShardedCheckpoint:
    """Open a checkpoint without reading a tensor; a Checkpoint, to be used in a ``with`` statement or closed.

    The arguments are those of ``load``. Objects of unknown classes are listed as they are, as Opaque.
    A folder of shards, or their index, gives a ShardedCheckpoint.
    Raises FormatError, ChecksumError (of the pickle), UnsupportedError, LimitError and OSError.
    """
    f = weights_of(f)
    options = {
        "framework": framework, "map_location": map_location, "mmap": mmap, "encoding": encoding, "verify": verify,
        "threads": threads, "pin_memory": pin_memory, "unknown": unknown, "limits": limits, "offset": offset, "nbytes": nbytes,
    }  # fmt: skip
    if is_index(f):
        with importing:
            from .sharded import ShardedCheckpoint

        return ShardedCheckpoint(f, **options)
    return Checkpoint(f, **options)


class Checkpoint(Mapping[Any, LazyTensor]):
    """Name -> LazyTensor of an open checkpoint.

    A name is the path of keys joined by dots (``"encoder.layers.0.weight"``; list positions are keys). Where two paths read
    alike, both are listed as tuples of keys, which always work: ``ckpt["a", "b"]`` or ``ckpt[("a.b",)]``.
    May be used from many threads, after a fork, and (opened by path) pickled: it then opens the file again, and
    refuses one that has changed.
    """

    def __init__(self, f, **options):
        self._options = options
        self.framework, self.unknown, self.map_location = (
            options["framework"],
            options["unknown"],
            options["map_location"],
        )
        self.threads, self.verifies, limits = (
            options["threads"],
            options["verify"],
            options["limits"],
        )
        check_options(self.framework, self.unknown, True, None, self.map_location)
        self.limits = limits or Limits()
        self.allocate = allocator(options["pin_memory"], self.framework, options["mmap"])
        self.source = open_source(f, options["offset"], options["nbytes"])
        try:
            self.map_file = wants_mapping(options["mmap"], self.source)
            self.contents = open_contents(
                self.source, encoding=options["encoding"], limits=limits, verify=self.verifies
            )
        except BaseException:
            self.source.close()
            raise
        self.swapped = self.contents.byteorder != sys.byteorder
        self._tensors = None
        self._rows = {}
        # Storages that somebody still holds: whoever reads another tensor of one shares it, as after a load.
        self._alive = weakref.WeakValueDictionary()

    # -- the mapping

    def _index(self):
        """The TensorIndex, made on first use."""
        if self._tensors is None:
            self._tensors = TensorIndex(self.root)
        return self._tensors

    def __getitem__(self, name: str | tuple) -> LazyTensor:
        if self.source.closed:
            self.source.check_open()
        tensors = self._tensors or self._index()
        leaf = tensors.leaves.get(name)
        if leaf is None and (leaf := tensors.get(name)) is None:
            raise tensors.missing(name)
        return LazyTensor(self, leaf)

    def __contains__(self, name: object) -> bool:
        self.source.check_open()
        return self._index().get(name) is not None

    def get(self, name: Any, default: Any = None) -> Any:
        """The LazyTensor of a name, ``default`` where there is none."""
        if name not in self:  # an error would look for names that are near
            return default
        return self[name]

    def __iter__(self) -> Iterator[Any]:
        self.source.check_open()
        return iter(self._index().leaves)

    def __len__(self) -> int:
        self.source.check_open()
        return len(self._index().leaves)

    def __repr__(self):
        state = "closed" if self.source.closed else f"{len(self)} tensors"
        return f"<{type(self).__name__} {self.source.name!r}, {self.contents.kind}, {state}>"

    # -- the object

    @property
    def root(self):
        """The inert object."""
        return self.contents.unpickled.obj

    @property
    def parts(self):
        """The files that it consists of, as Checkpoints."""
        return (self,)

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.source.name

    @property
    def metadata(self) -> Any:
        """What ``save`` was given as metadata; None where there is none."""
        self.source.check_open()
        archive = getattr(self.contents, "archive", None)  # of a ZIP
        return archive.metadata() if archive else None

    @property
    def tree(self) -> Any:
        """The object with LazyTensors in place of its tensors and LazyStorages in place of bare storages.

        Everything else is as ``load`` gives it; objects of unknown classes are Opaque, whatever ``unknown`` says of those that
        torch.serialization.add_safe_globals allows: nothing of theirs is called with handles for tensors. ``read()`` makes them.
        """
        with self.source.in_use():
            unpickled = self.contents.unpickle_again()
        if self.unknown == "error":
            self._reader().refuse(self.contents.unpickled.unknown)
        lazy = [LazyTensor(self, spec) for spec in self.contents.unpickled.tensors]
        # Both objects come from one pickle, so their leaves have one order, but for those in sets.
        pairs = zip(
            named_tensors(unpickled.obj), named_tensors(self.contents.unpickled.obj), strict=True
        )
        known = {id(leaf): original for (_, leaf), (_, original) in pairs if alike(leaf, original)}
        return substitute(unpickled.obj, LazyBridge(self, known), lazy, self.limits)

    @property
    def info(self) -> dict[str, Any]:
        """What is known of the file: a dict of plain values, for people and programs to read."""
        self.source.check_open()
        contents = self.contents
        archive = getattr(contents, "archive", None)  # of a ZIP
        crc32 = contents.records.crc32
        with_crc = int(
            ((crc32 > 0) | (crc32 == 0) & (contents.records.nbytes == 0)).sum()
        )  # 0 says that none was computed
        return {
            "name": self.source.name,
            "container": contents.kind,
            "nbytes": self.source.nbytes,
            "byteorder": contents.byteorder,
            "version": getattr(archive, "version", None),
            "torchscript": getattr(archive, "is_torchscript", False),
            "tensors": len(self),
            "storages": len(contents.unpickled.storages),
            "records": len(contents.records),
            "records_with_crc32": with_crc,
            "metadata": self.metadata,
            "unknown": sorted({qualname for qualname, _ in contents.unpickled.unknown}),
            "huge_pages": huge_pages(),
        }

    def verify(self, *, progress: Progress | None = None) -> VerifyReport:
        """Read all of the open file and report everything that is wrong with it, as the function ``verify`` does."""
        with importing:
            from .verifying import verify_source

        check_progress(progress)
        options = {"threads": self.threads, "limits": self.limits}
        return verify_source(self.source, progress=progress, **options)

    def read(self, names: Iterable[str | tuple] | None = None) -> Any:
        """Read many tensors in one plan, each as its ``read()`` gives it: {name: tensor}; None reads the whole object."""
        with self.source.in_use():
            if names is None:
                return self._read_all()
            names = name_list(names)
            return dict(zip(names, self._make([self[name].leaf for name in names]), strict=True))

    def _read_all(self):
        unpickled = self.contents.unpickle_again()
        reader = self._reader()
        reader.refuse(self.contents.unpickled.unknown)
        reader.refuse_undecodable(unpickled)
        return reader.make(unpickled.obj, unpickled.storages, unpickled.tensors, self.limits)

    def _reader(self, framework=None, progress=None):
        options = self.reading_options() | {"progress": progress}
        framework = framework or self.framework
        map_location = self.map_location if framework == "torch" else None
        alive = self._alive if framework == "torch" else None
        return Reader(self.contents, framework, self.unknown, map_location, alive=alive, **options)

    def _make(self, leaves, framework=None):
        """Real tensors for leaves of the object, which stay as they are."""
        leaves = duplicate(leaves)
        storages, tensors, _ = specs_in(leaves)
        return self._reader(framework).make(leaves, storages, tensors, self.limits)

    def read_leaves(self, leaves, progress=None):
        """Real values for leaves of the object, in one plan; ``progress(bytes done, bytes in all)``."""
        with self.source.in_use():
            leaves = duplicate(leaves)
            storages, tensors, opaque = specs_in(leaves)
            reader = self._reader(progress=progress)
            reader.refuse([(node.qualname, "") for node in opaque])
            return reader.make(leaves, storages, tensors, self.limits)

    # -- for LazyTensor

    def path_of(self, leaf):
        """The path of a tensor: the first, where it has several."""
        return self._index().path_of(leaf)

    def read_leaf(self, leaf, framework=None):
        """One tensor of any layout."""
        with self.source.in_use():
            return self._make([leaf], framework)[0]

    def reading_options(self):
        """What place_storages is to be told."""
        return {
            "verify": self.verifies,
            "threads": self.threads,
            "map_file": self.map_file,
            "allocate": self.allocate,
        }

    def row_of(self, root):
        """The row of a storage's record, located; called while the source is in use."""
        row = self._rows.get(root.index)
        return self.rows_of([root])[0] if row is None else row

    def rows_of(self, roots):
        """The rows of many storages, located together."""
        if new := [root for root in roots if root.index not in self._rows]:
            with importing:
                from .contents import storage_rows

            # By two threads at once where it happens: they find the same. A lock would stay held in a forked child.
            found = storage_rows(self.contents, new).tolist()
            self._rows.update(zip([root.index for root in new], found, strict=True))
        return [self._rows[root.index] for root in roots]

    def maps(self, row, spec):
        """Whether a part of a tensor is taken from a mapping of the file: asked for, possible, and staying there."""
        if not self.map_file or not usable_in_place(
            self.contents, row, spec.itemsize, self.swapped
        ):
            return False
        if self.framework != "torch":
            return True
        with importing:
            from .placement import Placement

        # What leaves for another device does so without the rest of its storage.
        return Placement(self.map_location).keeps_cpu and spec.storage.location == "cpu"

    def whole_storage(self, storage):
        """All bytes of a storage, verified: a writable buffer of them."""
        places = place_storages(
            self.contents,
            [*roots_of([storage]), storage],
            self.contents.unpickled.tensors,
            **self.reading_options(),
        )
        owner, offset = places[storage.index]
        if offset == 0 and memoryview(owner).nbytes == storage.nbytes:
            return owner
        return np.frombuffer(owner, np.uint8, storage.nbytes, offset)

    def torch_view(self, owner, start, shape, stride, spec):
        """A torch tensor over memory of ours, where ``map_location`` wants it."""
        with importing:
            from .placement import Placement
            from .torch_tensors import view_tensor

        return view_tensor(owner, start, shape, stride, spec, Placement(self.map_location))

    def writable_bytes(self, out, spec):
        """The flat bytes of a buffer, array or CPU tensor that takes the values of ``spec``; ValueError where it does not."""
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(out, torch.Tensor):
            with importing:
                from .torch_tensors import bytes_of

            return bytes_of(out, spec)
        nbytes = spec.numel * spec.itemsize
        if isinstance(out, np.ndarray):
            row = DTYPES[spec.dtype]
            if out.dtype != numpy_dtype(spec.dtype) and not (row.raw and out.dtype == row.raw):
                raise ValueError(f"out: an array of {out.dtype}, the tensor is of {row.name}")
            if out.shape not in (spec.shape, (spec.numel,)):
                raise ValueError(f"out: an array of shape {out.shape}, the tensor has {spec.shape}")
            if out.flags.c_contiguous:
                out = out.reshape(-1).view(
                    np.uint8
                )  # as bytes: what is not NumPy's own type has no memoryview
        view = memoryview(out)
        if view.readonly or not view.c_contiguous:
            raise ValueError("out: a writable buffer without gaps is needed")
        if view.nbytes != nbytes:
            raise ValueError(f"out: a buffer of {view.nbytes} bytes, the tensor has {nbytes}")
        return np.frombuffer(out, np.uint8) if nbytes else np.empty(0, np.uint8)

    # -- life

    def close(self) -> None:
        """Close the file. Tensors that were read stay; reading more raises ValueError."""
        self.source.close()

    def __enter__(self) -> Checkpoint:
        self.source.check_open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self):
        self.source.check_open()
        if not isinstance(self.source, FileSource) or self.source.path is None:
            raise TypeError(
                f"{self.source.name}: only a checkpoint that was opened by its path can be pickled"
            )
        return _open_again, (self.source.path, self._options, self.source.fingerprint)


def _open_again(path, options, fingerprint):
    checkpoint = Checkpoint(path, **options)
    if checkpoint.source.fingerprint != fingerprint:
        checkpoint.close()
        raise FormatError(
            f"{path}: the file has changed since the checkpoint was opened; open it anew", path=path
        )
    return checkpoint


def alike(leaf, original):
    """Whether two leaves, of one pickle executed twice, are the same tensor."""
    core, other = core_of(leaf), core_of(original)
    if isinstance(core, TensorSpec) and isinstance(other, TensorSpec):
        return core.index == other.index
    return [spec.index for spec in specs_in([leaf])[1]] == [
        spec.index for spec in specs_in([original])[1]
    ]
