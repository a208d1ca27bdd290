"""A checkpoint in several files as one: what ``load`` and ``open`` do with a folder of shards, or with its index."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .arguments import kind_of
from .checkpoint import Checkpoint
from .errors import FormatError
from .importing import importing
from .lazy import LazyTensor
from .loading import load
from .plan import root_of
from .progress import reporting
from .selection import name_list, specs_in
from .shard_index import SAVE_ID, ShardIndex, check_region
from .tensor_index import TensorIndex

if TYPE_CHECKING:
    from ._annotations import Progress
    from .sharded_reports import ShardedReport


def load_sharded(path, keys, progress, trusted, **options):
    """What ``load`` does with an index: {name: value}, shard after shard, each by many threads.

    ``trusted``: the options of ``load`` with which Python is to unpickle each shard; None for what runs nothing.
    """
    with ShardedCheckpoint(path, keys=keys, **options) as checkpoint:
        if keys is None and (strays := checkpoint.strays()):
            warnings.warn(f"{checkpoint.name}: not loaded: {in_words(strays)}", stacklevel=3)
        with reporting(progress, checkpoint.name) as tell:
            return checkpoint.load(tell, trusted)


def in_words(strays):
    """What strays there are, or some of them, in one line."""
    parts = [
        f"{', '.join([f'{name:.100}' for name in names[:4]])}{' ...' if len(names) > 4 else ''} in {file}"
        for file, names in strays.items()
    ]
    return f"{'; '.join(parts[:4])}{' ...' if len(parts) > 4 else ''}, which the index does not say"


DEFAULTS = {
    "framework": "torch", "map_location": None, "mmap": None, "encoding": "utf-8", "verify": True, "threads": None,
    "pin_memory": False, "unknown": "opaque", "limits": None, "offset": 0, "nbytes": None,
}  # fmt: skip


class ShardedCheckpoint(Mapping[Any, LazyTensor]):
    """Name -> LazyTensor of a checkpoint in several files; it is used as a Checkpoint is, and each of the files is one.

    Tensors inside of what the index names are listed, too, by their paths, as a Checkpoint lists them.

    ``shards`` are the Checkpoints by the names of their files. Raises FormatError where index and shards contradict each other;
    what is in a shard and the index does not say is listed in ``info``.
    """

    def __init__(self, path, *, keys=None, index=None, **options):
        options = DEFAULTS | options
        check_region(path, options["offset"], options["nbytes"])
        self._options = options
        self.index = index or ShardIndex(path)
        self.name = self.index.path
        self.shards: dict[str, Checkpoint] = {}
        found: dict[str, Any] = {}
        try:
            for file, names in self.index.select(keys).items():
                found |= self._open_shard(file, names)
            check_saves(self.index, self.save_ids)
        except BaseException:
            self.close()
            raise
        self.root = {name: found[name] for name in self.index.weight_map if name in found}
        self._tensors = TensorIndex(self.root)

    def _open_shard(self, file, names):
        """{name: inert value} of the ``names`` that a shard should have."""
        try:
            shard = self.shards[file] = Checkpoint(self.index.path_of(file), **self._options)
        except OSError as error:
            if error.errno == errno.EMFILE:
                error.add_note(
                    f"each of the {len(self.index.shards)} shards takes a descriptor; raise the limit (ulimit -n), or open some with keys="
                )
            raise
        root = shard.root
        if not isinstance(root, dict):
            raise self.index.error(
                f"shard {file!r} holds {kind_of(root)}, a dict of tensors by name is expected"
            )
        if missing := [name for name in names if name not in root]:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise self.index.error(
                f"{missing[0]!r:.100}{more} should be in shard {file!r}, and not there; fetch index and shards again, "
                f"from one source"
            )
        return {name: root[name] for name in names}

    @property
    def save_ids(self):
        """{file: what it says of the save that it is part of}."""
        return {file: save_id_of(shard.metadata) for file, shard in self.shards.items()}

    def shard_of(self, name: str | tuple) -> Checkpoint:
        """The file that has what the index calls so, or a tensor of that name."""
        if name not in self.root:
            name = self[name].path[0]
        return self.shards[self.index.weight_map[name]]

    # -- the mapping

    def __getitem__(self, name: str | tuple) -> LazyTensor:
        leaf = self._tensors.get(name)
        if leaf is None:
            raise self._tensors.missing(name)
        shard = self.shard_of(self._tensors.path_of(leaf)[0])
        shard.source.check_open()
        return LazyTensor(shard, leaf)

    def __contains__(self, name: object) -> bool:
        self._check_open()
        return self._tensors.get(name) is not None

    def get(self, name: Any, default: Any = None) -> Any:
        """The LazyTensor of a name, ``default`` where there is none."""
        if name not in self:  # an error would look for names that are near
            return default
        return self[name]

    def __iter__(self) -> Iterator[str]:
        self._check_open()
        return iter(self._tensors.leaves)

    def __len__(self) -> int:
        self._check_open()
        return len(self._tensors.leaves)

    def __repr__(self):
        closed = any(part.source.closed for part in self.parts)
        state = "closed" if closed else f"{len(self)} tensors"
        return f"<{type(self).__name__} {self.name!r}, {len(self.shards)} shards, {state}>"

    # -- the object

    @property
    def parts(self):
        """The files that it consists of, as Checkpoints."""
        return tuple(self.shards.values())

    @property
    def metadata(self) -> Any:
        """What the index says beside where tensors are."""
        return self.index.metadata

    @property
    def tree(self) -> dict[str, Any]:
        """{name: LazyTensor, or what else a shard has by that name}."""
        trees = {file: shard.tree for file, shard in self.shards.items()}
        return {name: trees[self.index.weight_map[name]][name] for name in self.root}

    @property
    def info(self) -> dict[str, Any]:
        """What is known of the files: a dict of plain values; ``shards`` has that of each by its name.

        ``strays``: {file: [names]} that shards have and the index gives to another shard, or to none.
        """
        shards = {file: shard.info for file, shard in self.shards.items()}
        sums = ("nbytes", "storages", "records", "records_with_crc32")
        return {
            "name": self.name,
            "container": "sharded",
            "tensors": len(self),
            **{key: sum([info[key] for info in shards.values()]) for key in sums},
            "unknown": sorted({name for info in shards.values() for name in info["unknown"]}),
            "metadata": self.metadata,
            "strays": self.strays(),
            "shards": shards,
        }

    def strays(self) -> dict[str, list[str]]:
        """{file: [names]} of what is in a shard, and is not what the index says is there."""
        files = self.index.weight_map
        found = {
            file: [str(name) for name in shard.root if files.get(name) != file]
            for file, shard in self.shards.items()
        }
        return {file: names for file, names in found.items() if names}

    def read(self, names: Iterable[str | tuple] | None = None) -> dict[Any, Any]:
        """Read many tensors, in one plan for each shard: {name: tensor}; None reads all that there is."""
        if names is None:
            return self.load()
        lazy = {name: self[name] for name in name_list(names)}
        made: dict[Any, Any] = {}
        for shard in self.parts:
            chosen = {name: each.leaf for name, each in lazy.items() if each.checkpoint is shard}
            made |= zip(chosen, shard.read_leaves(list(chosen.values())), strict=True)
        return {name: made[name] for name in lazy}

    def load(self, tell=None, trusted=None):
        """All that was chosen, in the order of the index: {name: value}; ``tell(bytes done, bytes in all)``."""
        parts = self._by_shard(self.root)
        sizes = [storages_nbytes(values) for _, values in parts]
        made, before, total = {}, 0, sum(sizes)
        for (shard, values), nbytes in zip(parts, sizes, strict=True):

            def told(done, *_, before=before):
                tell(min(before + done, total), total)

            progress = told if tell else None
            if trusted is None:
                found = shard.read_leaves(list(values.values()), progress)
                made |= zip(values, found, strict=True)
            else:
                found = load(shard.name, progress=progress, **self._trusting(trusted))
                made |= {name: found[name] for name in values}
            before += nbytes
        if tell:
            tell(total, total)
        return {name: made[name] for name in self.root}

    def _trusting(self, trusted):
        return {**self._options, **trusted, "weights_only": False}

    def _by_shard(self, values):
        """[(shard, {name: value})]."""
        parts: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            parts.setdefault(self.index.weight_map[name], {})[name] = value
        return [(self.shards[file], chosen) for file, chosen in parts.items()]

    def verify(self, *, progress: Progress | None = None) -> ShardedReport:
        """Read all of the open files and report everything that is wrong with them, as the function ``verify`` does."""
        with importing:
            from .sharded_reports import ShardedReport, stray_notes

        shards = {file: shard.verify(progress=progress) for file, shard in self.shards.items()}
        return ShardedReport(self.name, shards, (), tuple(stray_notes(self)))

    # -- life

    def close(self) -> None:
        """Close the files. Tensors that were read stay; reading more raises ValueError."""
        for shard in self.shards.values():
            shard.close()

    def __enter__(self) -> ShardedCheckpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self):
        for part in self.parts:
            part.source.check_open()

    def __reduce__(self):
        self._check_open()
        fingerprints = {file: shard.source.fingerprint for file, shard in self.shards.items()}
        return _open_again, (self.name, self._options, fingerprints)


def save_id_of(metadata):
    return metadata.get(SAVE_ID) if isinstance(metadata, dict) else None


def check_saves(index, found):
    """A save that was interrupted while it gave its files their names leaves some of two sets: FormatError.

    Shards that say nothing were written by others. Beside an index of ours they may be later versions of its shards; beside that
    of others, one of ours is the beginning of a save that did not come to its end.
    """
    expected = save_id_of(index.metadata)
    advice = "save, or fetch, all of them again"
    for file, actual in found.items():
        if expected is not None and actual not in (None, expected):
            raise index.error(f"shard {file!r} belongs to another save than the index; {advice}")
        first = next(iter(found))
        if expected is None and actual != found[first]:
            raise index.error(f"shards {first!r} and {file!r} belong to different saves; {advice}")


def _open_again(path, options, fingerprints):
    checkpoint = ShardedCheckpoint(path, **options)
    if fingerprints != {f: shard.source.fingerprint for f, shard in checkpoint.shards.items()}:
        checkpoint.close()
        raise FormatError(
            f"{path}: a shard has changed since the checkpoint was opened; open it anew", path=path
        )
    return checkpoint


def storages_nbytes(values):
    """How many bytes the storages have that inert values need, each counted once."""
    storages, _, _ = specs_in(list(values.values()))
    return sum({root_of(spec).index: root_of(spec).nbytes for spec in storages}.values())
