"""CheckpointReader: samples out of checkpoints, a row of stacked tensors each, or a file each."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from typing import Any

from ..checkpoint import Checkpoint
from ..checkpoint import open as open_checkpoint
from ..errors import UnsupportedError
from ..limits import Limits
from ..loading import load
from ..near_names import not_found
from ..rows import Rows
from ..selection import chooser, dotted
from ..sharded import ShardedCheckpoint
from .reader import Reader, counted


class CheckpointReader(Reader):
    """Samples that ``torch.save`` has written.

    One checkpoint (a path, or an open Checkpoint, which closing the reader closes): sample ``i`` is row ``i`` of its tensors,
    ``{name: row}``, or the row itself where the file holds a bare tensor. All tensors are equally long; objects that are no
    tensors are left out. Rows that follow each other are one read, all reads of a request are one parallel fill, and samples
    that are read together lie side by side in one piece of memory. Rows are not verified, since a checksum covers a whole
    record: ``reader.checkpoint.verify()`` reads them all.

    Many (a list of paths, or a glob pattern such as ``"samples/*.pt"``, whose names are sorted as text): sample ``i`` is
    what ``load`` gives for file ``i``, verified.

    keys: which tensors, as ``load`` takes it. framework: "torch" or "numpy". threads: how many read at a time, None for as
    many as fit; ``limits`` as for ``load``. Raises FileNotFoundError for a pattern that fits nothing, what ``open`` raises,
    ValueError where tensors are not equally long.
    """

    def __init__(
        self,
        path: Any,
        *,
        keys: Any = None,
        framework: str | None = None,
        threads: int | None = None,
        limits: Limits | None = None,
    ):
        if isinstance(path, (Checkpoint, ShardedCheckpoint)) and (framework, threads, limits) != (
            None,
            None,
            None,
        ):
            raise ValueError("CheckpointReader: what is open has its framework, threads and limits")
        self.keys, self.paths, self.checkpoint = keys, None, None
        self.framework = framework or "torch"
        self._options: dict[str, Any] = {
            "framework": self.framework,
            "threads": threads,
            "limits": limits,
            "map_location": "cpu" if self.framework == "torch" else None,
        }
        if isinstance(path, (Checkpoint, ShardedCheckpoint)):
            self._open_rows(path)
        elif (paths := file_paths(path)) is None:
            self._open_rows(open_checkpoint(path, **self._options))
        else:
            self.paths = paths

    def _open_rows(self, checkpoint):
        if not isinstance(checkpoint, Checkpoint):
            found = repr(checkpoint)
            checkpoint.close()
            raise UnsupportedError(
                f"{found}: samples are rows of one file, and this is a folder of shards; save it as one"
            )
        self.checkpoint, self.framework = checkpoint, checkpoint.framework
        wanted, listed = chooser("*" if self.keys is None else self.keys)
        names = {dotted(name) if isinstance(name, tuple) else name: name for name in checkpoint}
        missing = [name for name in listed if name not in names]
        try:
            if missing:
                raise not_found(missing, names)
            chosen = [name for name in checkpoint if wanted(dotted_name(name))]
            if not chosen and names and isinstance(self.keys, str):
                raise not_found(self.keys, names, pattern=True)
            if not chosen:
                raise ValueError(
                    f"{checkpoint.source.name}: there are no tensors{' that keys= chooses' if names else ''}"
                )
            self._rows = Rows(checkpoint, chosen)
        except BaseException:
            checkpoint.close()
            raise
        self._bare = chosen == [""]

    def __len__(self) -> int:
        return self._rows.count if self.paths is None else len(self.paths)

    @property
    def supports_batch(self) -> bool:
        return self.paths is None

    def _read(self, positions):
        if self.paths is not None:
            return [self._load(self.paths[position]) for position in positions.tolist()]
        columns = [rows_of(stacked) for stacked in self._rows.read(positions).values()]
        if self._bare:
            return columns[0]
        names = self._rows.names
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    @counted
    def _read_batch(self, positions):
        if self.paths is not None:
            return super()._read_batch(positions)
        batch = self._rows.read(positions)
        return batch[""] if self._bare else batch

    def _load(self, path):
        return load(path, keys=self.keys, **self._options)

    def _close(self):
        if self.checkpoint is not None:
            self.checkpoint.close()

    def __reduce__(self):
        self.check_open()
        if self.checkpoint is not None:  # which refuses a file that has changed since
            return _of_checkpoint, (type(self), self.checkpoint, self.keys)
        # the files that a pattern fitted here, whatever it fits there
        return _of_paths, (type(self), self.paths, self.keys, self._options)


def _of_checkpoint(cls, checkpoint, keys):
    return cls(checkpoint, keys=keys)


def _of_paths(cls, paths, keys, options):
    return cls(
        paths, keys=keys, **{name: options[name] for name in ("framework", "threads", "limits")}
    )


def dotted_name(name):
    return dotted(name) if isinstance(name, tuple) else name


def file_paths(path):
    """The files, one for each sample, that a list or a pattern stands for; None for the path of one checkpoint."""
    if isinstance(path, (str, os.PathLike)):
        text = os.fspath(path)
        if not isinstance(text, str) or not glob.has_magic(text) or os.path.exists(text):
            return None
        found = sorted(glob.glob(text))
        if not found:
            raise FileNotFoundError(f"{text}: no file fits this pattern")
        return found
    if isinstance(path, Iterable) and not isinstance(path, (bytes, bytearray, memoryview)):
        paths = list(path)
        if all(isinstance(item, (str, os.PathLike)) for item in paths):
            return paths
    return None


def rows_of(stacked):
    """The rows of a tensor or an array, each one of its own kind."""
    if hasattr(stacked, "unbind"):
        return list(stacked.unbind(0))
    return [stacked[i, ...] for i in range(len(stacked))]
