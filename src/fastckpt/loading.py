"""load and load_into: a whole checkpoint, or the parts of it that are wanted, as torch.load gives it."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ._tree import substitute
from .contents import open_contents
from .errors import FormatError
from .importing import importing
from .limits import Limits
from .memory import allocate
from .plan import root_of, roots_of
from .progress import check as check_progress
from .progress import reporting
from .reading import Places, place_storages
from .refusal import unsafe_name
from .selection import prune, specs_in
from .shard_index import is_index, weights_of
from .source import open_source

if TYPE_CHECKING:
    import torch

    from ._annotations import CheckpointFile, Framework, Keys, MapLocation, Mmap, Progress, Unknown

FRAMEWORKS = ("torch", "numpy")


def load(
    f: CheckpointFile,
    map_location: MapLocation = None,
    pickle_module: Any = None,
    *,
    weights_only: bool | None = None,
    mmap: Mmap = None,
    encoding: str = "utf-8",
    errors: str = "strict",
    fix_imports: bool = True,
    verify: bool = True,
    threads: int | None = None,
    keys: Keys | None = None,
    framework: Framework = "torch",
    pin_memory: bool = False,
    unknown: Unknown = "error",
    progress: Progress | None = None,
    limits: Limits | None = None,
    offset: int = 0,
    nbytes: int | None = None,
) -> Any:
    """Load what torch.save wrote, of any version, without running anything that the file says.

    f: path (str, bytes, PathLike), descriptor, bytes-like object, mmap, or seekable binary file object, which is read
        from its current position and left where the checkpoint ends. A folder with shards in transformers' layout, or their
        index, is one checkpoint: a dict of all tensors by name.
    map_location: None, device, dict of locations or callable(storage, location), as torch.load takes it. None puts a
        tensor whose device is not here on the CPU, with one warning.
    weights_only: None means True. False hands the pickle to Python's own unpickler: THE FILE CAN THEN RUN ANY CODE.
    pickle_module: with weights_only=False, whose Unpickler to use.
    mmap: map the file (copy on write) instead of reading it; "willneed" also has the system read it ahead. Nothing is
        verified then, and a file that somebody truncates while it is mapped ends the process.
    encoding, errors: of Python 2 strings; encoding="bytes" keeps them as bytes.
    fix_imports: with weights_only=False, whether names of Python 2 modules are taken for those of today.
    verify: compare the CRC-32 of every record that is read whole.
    threads: how many threads read; None takes what the process may use, 1 is serial.
    keys: a list of dotted names, a glob pattern or a callable on names: other leaves are absent and not read; the
        containers around them stay, and lists and tuples close up. KeyError for a listed name that is not there, or a pattern that
        nothing matches; a callable, or an empty list, may choose nothing. Of a folder of shards, names are those of its index.
    framework: "torch", or "numpy" for arrays without torch. bfloat16 and float8 come through ml_dtypes where that is installed,
        else as their bits in uint16 and uint8.
    pin_memory: read into page-locked memory of torch's, from which an accelerator copies fast and on its own.
    unknown: "error", or "opaque" for inert stand-ins of objects of unknown classes (see Opaque).
    progress: True for a bar (tqdm's), or a callable(bytes done, bytes in all, name of the file).
    limits: a Limits.
    offset, nbytes: the region of ``f`` that holds the checkpoint, in bytes.

    Returns the object: tensors share storages, and have strides and storage sizes, as in the file.
    Raises FormatError (with what the file looks like instead), ChecksumError, UnsupportedError, UnsafePickleError,
    LimitError, all ValueErrors; OSError; TypeError and ValueError for arguments that cannot be honoured, RuntimeError
    for pin_memory without an accelerator.
    Source: github.com/pytorch/pytorch, torch/serialization.py, for the meaning of torch's own arguments.
    """
    weights_only = only_weights(weights_only)
    check_options(framework, unknown, weights_only, pickle_module, map_location)
    check_types(progress, limits)
    f = weights_of(f)
    if is_index(f):
        with importing:
            from .sharded import load_sharded

        trusted = {"pickle_module": pickle_module, "errors": errors, "fix_imports": fix_imports}
        return load_sharded(
            f, keys, progress, None if weights_only else trusted, framework=framework, map_location=map_location, mmap=mmap,
            encoding=encoding, verify=verify, threads=threads, pin_memory=pin_memory, unknown=unknown, limits=limits,
            offset=offset, nbytes=nbytes,
        )  # fmt: skip
    allocate = allocator(pin_memory, framework, mmap)
    source = open_source(f, offset, nbytes)
    try:
        map_file = wants_mapping(mmap, source)
        contents = open_contents(
            source,
            encoding=encoding,
            errors=errors,
            limits=limits,
            verify=verify,
            tolerant=not weights_only,
        )
        with reporting(progress, source.name) as tell:
            options = {
                "verify": verify,
                "threads": threads,
                "map_file": map_file,
                "allocate": allocate,
                "progress": tell,
            }
            reader = Reader(contents, framework, unknown, map_location, **options)
            if weights_only:
                result = reader.load(keys, limits or Limits())
            else:
                with importing:
                    from .trusted import unpickle_trusted

                options = {"encoding": encoding, "errors": errors, "fix_imports": fix_imports}
                result = unpickle_trusted(reader, keys, pickle_module, map_location, **options)
        source.finish(contents.end)
        return result
    finally:
        source.close()


def load_into(
    target: torch.nn.Module | dict[str, torch.Tensor],
    f: CheckpointFile,
    *,
    strict: bool = True,
    prefix: str = "",
    rename: Mapping[str, str | None] | Callable[[str], str | None] | None = None,
    threads: int | None = None,
    verify: bool = True,
    progress: Progress | None = None,
    unknown: Unknown = "opaque",
    limits: Limits | None = None,
) -> Any:
    """Read a checkpoint into existing tensors: straight into their memory where dtype and strides agree.

    target: an nn.Module, whose own ``load_state_dict`` decides what goes where (its hooks run; tensors on the meta device are
        replaced by fresh ones), or a dict of tensors by name.
    f: as for ``load``; the names in it are dotted paths.
    strict: raise where names are missing or left over, with False they are returned; and where a dict ``rename`` has names that the
        file does not have.
    prefix: take the names that begin with it, without it ("model." for {"model": state_dict, ...}).
    rename: a dict or callable from names in the file (without the prefix) to names in the target; None leaves a name out.
    threads, verify, progress, limits: as for ``load``. A bad checksum raises after memory was overwritten; this and other
        errors then say which.

    Returns (missing_keys, unexpected_keys) as ``load_state_dict`` does. Peak memory beyond the target's: 16 MiB.
    Raises RuntimeError in torch's words where names or shapes do not fit, no name begins with the prefix, or a dict ``rename`` has
    names that are not there, before a byte is touched; TypeError for another target (of an optimizer,
    optimizer.load_state_dict(load(f)[...])) or ``rename``; what ``load`` raises.
    Source: github.com/pytorch/pytorch, torch/nn/modules/module.py (load_state_dict).
    """
    with importing:
        from .into import fill_target

    return fill_target(
        target,
        f,
        strict=strict,
        prefix=prefix,
        rename=rename,
        progress=progress,
        threads=threads,
        verify=verify,
        unknown=unknown,
        limits=limits,
    )


class Reader:
    """Turns specs of an open checkpoint into objects of a framework; ``options`` are those of place_storages.

    ``alive`` holds, by index, torch storages that were read before and are still there; new ones are added to it.
    """

    def __init__(
        self, contents, framework="torch", unknown="error", map_location=None, alive=None, **options
    ):
        self.contents, self.framework, self.unknown, self.options = (
            contents,
            framework,
            unknown,
            options,
        )
        self.alive = alive
        self.where = f"{contents.source.name}: "
        self.placement = None
        if framework == "torch":
            require_torch()
            with importing:
                from .placement import Placement

            self.placement = Placement(map_location)

    @functools.cached_property
    def allowed(self):
        """What the user allowed beside what is known, by qualified name; asked for where something is not known."""
        if self.framework != "torch":
            return {}
        with importing:
            from .torch_bridge import allowed_globals

        return allowed_globals()

    def load(self, keys, limits):
        """The whole object, or what ``keys`` leaves of it."""
        unpickled = self.contents.unpickled
        if keys is None:
            self.refuse(unpickled.unknown)
            self.refuse_undecodable(unpickled)
            return self.make(unpickled.obj, unpickled.storages, unpickled.tensors, limits)
        pruned = prune(unpickled.obj, keys)
        storages, tensors, opaque = specs_in(pruned)
        self.refuse([(node.qualname, "") for node in opaque])
        return self.make(pruned, storages, tensors, limits)

    def make(self, root, storages, tensors, limits):
        """The real object for an inert one, given the specs in it."""
        bridge = self.bridge(storages)
        made = bridge.tensors(tensors)
        if self.alive is not None:
            self.alive.update(
                {spec.index: bridge.untyped(spec) for spec in [*roots_of(storages), *storages]}
            )
        by_index = made
        if len(tensors) != len(self.contents.unpickled.tensors):
            by_index = [None] * len(self.contents.unpickled.tensors)
            for spec, tensor in zip(tensors, made, strict=True):
                by_index[spec.index] = tensor
        return substitute(root, bridge, by_index, limits)

    def bridge(self, storages):
        """A bridge over these storages: read, but for those that are there already."""
        made = {} if self.alive is None else self._still_there(storages)
        places = Places(len(self.contents.unpickled.storages))
        if self.placement is None or not self.placement.reads_nothing:
            missing = (
                storages
                if not made
                else [
                    spec for spec in storages if not made.keys() & {spec.index, root_of(spec).index}
                ]
            )
            places = place_storages(
                self.contents, missing, self.contents.unpickled.tensors, **self.options
            )
        bridge = self.empty_bridge(places)
        if made:
            bridge.made = made
        return bridge

    def _still_there(self, storages):
        """The torch storages among these, and among their roots, that somebody holds."""
        specs = {spec.index: spec for spec in [*storages, *roots_of(storages)]}
        found = {index: self.alive.get(index) for index in specs}
        return {index: storage for index, storage in found.items() if storage is not None}

    def empty_bridge(self, places=None):
        """A bridge over storages that are in memory already, or over none."""
        if self.framework == "numpy":
            with importing:
                from .numpy_bridge import NumpyBridge

            return NumpyBridge(places, unknown=self.unknown, where=self.where)
        with importing:
            from .torch_bridge import TorchBridge

        allowed = functools.partial(getattr, self, "allowed")
        return TorchBridge(
            places, self.placement, allowed=allowed, unknown=self.unknown, where=self.where
        )

    def refuse(self, unknown):
        """Raise for the first class that is neither known to be data nor allowed by the user."""
        if self.unknown == "opaque":
            return
        for qualname, note in unknown:
            if qualname not in self.allowed or note:
                record = "data.pkl" if self.contents.kind == "zip" else None
                raise unsafe_name(
                    self.where if record is None else f"{self.where}record {record!r}: ",
                    qualname,
                    note,
                    scripted=self.contents.kind == "zip" and self.contents.archive.is_torchscript,
                    path=self.contents.source.name,
                    record=record,
                )

    def refuse_undecodable(self, unpickled):
        if unpickled.undecodable is not None:
            raise FormatError(
                f"{self.where}the pickle holds a Python 2 string that is not in the encoding asked for: "
                f"{unpickled.undecodable[:40]!r}; encoding='latin1' decodes any, encoding='bytes' keeps them as bytes",
                path=self.contents.source.name,
            )


def require_torch():
    """Raise a helpful ModuleNotFoundError where torch is not installed."""
    with importing:
        from . import needs_torch  # noqa: F401


def only_weights(weights_only):
    """torch's rule: True where nothing is said, and its two environment variables have a say."""
    on = ("1", "y", "yes", "true")
    force = os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "").lower() in on
    force_not = os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "").lower() in on
    if force and force_not:
        raise ValueError(
            "TORCH_FORCE_WEIGHTS_ONLY_LOAD and TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD are both set; one can be"
        )
    if force:
        return True
    if weights_only is not None:
        return bool(weights_only)
    if force_not:
        warnings.warn(
            "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD is set: the pickle is run, and can run any code (weights_only=True forbids it)",
            stacklevel=3,
        )
    return not force_not


def check_options(framework, unknown, weights_only, pickle_module, map_location):
    if framework not in FRAMEWORKS:
        raise ValueError(
            f"framework={framework!r} is invalid (expected one of: {', '.join(FRAMEWORKS)})"
        )
    if unknown not in ("error", "opaque"):
        raise ValueError(f"unknown={unknown!r} is invalid (expected one of: error, opaque)")
    if weights_only and pickle_module is not None:
        raise TypeError(
            "pickle_module is used with weights_only=False only; nothing else runs a pickle"
        )
    if not weights_only and unknown != "error":
        raise TypeError(
            f"unknown={unknown!r} needs weights_only=True: the pickle is run as it is otherwise"
        )
    if framework == "numpy" and (map_location not in (None, "cpu") or not weights_only):
        raise TypeError("framework='numpy' knows no map_location and no weights_only=False")


def check_types(progress, limits):
    check_progress(progress)
    if not isinstance(limits, (Limits, type(None))):
        raise TypeError(f"limits={limits!r}: a Limits is expected")


def allocator(pin_memory, framework, mmap):
    """What gives memory for storages."""
    if not pin_memory:
        return allocate
    if framework != "torch" or mmap:
        raise TypeError("pin_memory=True is for torch tensors that are read: no mmap, no NumPy")
    require_torch()
    with importing:
        from .pinned import allocate_pinned

    return allocate_pinned


def wants_mapping(mmap, source):
    """Whether to map the file: what the caller says (True, False, "willneed"), else what torch is set to."""
    if isinstance(mmap, str) and mmap != "willneed":
        raise ValueError(f'mmap={mmap!r} is invalid (expected one of: True, False, "willneed")')
    if mmap is None:
        config = sys.modules.get("torch.utils.serialization.config")
        mmap = bool(getattr(getattr(config, "load", None), "mmap", False)) and source.fd >= 0
    if mmap and source.fd < 0:
        raise ValueError(
            f"{source.name}: mmap={mmap!r} needs a file that has a descriptor; pass its path"
        )
    return mmap if mmap == "willneed" else bool(mmap)
