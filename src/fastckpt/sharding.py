"""save_sharded: a dict of tensors into several files in transformers' layout, which count when all of them are whole."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import operator
import os
import secrets
from typing import TYPE_CHECKING, Any

from .arguments import at_least, kind_of
from .destination import Replacement, durable_names, naming, write_at
from .importing import importing
from .progress import reporting
from .saving import check_options, encoded, write
from .shard_index import INDEX, SAVE_ID, SHARD, SHARD_NAME, SINGLE

if TYPE_CHECKING:
    import torch

    from ._annotations import Progress

MOST_SHARDS = 99_999  # their numbers have five digits
EXTRA_STATE = "_extra_state"  # how modules end the names of what may be no tensor


def save_sharded(
    obj: torch.nn.Module | dict[str, Any],
    folder: str | bytes | os.PathLike[str],
    *,
    max_shard_bytes: int = 5 * 10**9,
    threads: int | None = None,
    crc32: bool = True,
    alignment: int = 64,
    fsync: bool = False,
    pickle_protocol: int = 2,
    views: str = "whole",
    dtype: Any = None,
    metadata: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> None:
    """Save tensors to a folder in files of limited size, as transformers does: shards, and an index of what is in which.

    obj: a dict of tensors by name, or a module, whose state_dict() is taken. Tensors that share memory stay in one shard.
    folder: is made if it is not there. What an earlier save left in it under the names of shards goes when all is written.
    max_shard_bytes: of the tensors in a shard; a tensor that is larger, or what shares its memory, has a shard of its own. What fits
        into one is written to pytorch_model.bin, without an index.
    metadata: a dict of what JSON can say, for the index (or the one file), beside its total_size.
    The other arguments are those of ``save``.

    All files are written before the first of them has a name: whatever happens before, the folder is as it was. They get their
    names one after the other, the index last; ``load`` refuses a folder in which that was interrupted and two saves are mixed.
    Links are followed, as by ``save``, also those of a store that others read from: remove such a folder first.
    One save at a time: of two into one folder, each may remove shards of the other as old ones, and what is left can't be loaded.
    Raises what ``save`` raises, NotADirectoryError where a file is in the way, TypeError for what is no dict of tensors, ValueError for more than 99,999 shards.
    Source: github.com/huggingface/transformers, save_pretrained, for the names and the index.
    """
    check_options(threads, views, progress)
    alignment = int(operator.index(alignment))
    max_shard_bytes = at_least(1, "max_shard_bytes", max_shard_bytes)
    if not isinstance(metadata, (dict, type(None))):
        raise TypeError(f"metadata is {kind_of(metadata)}: a dict is expected")
    folder = os.fsdecode(folder)
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise NotADirectoryError(errno.ENOTDIR, "a file is there, and a folder is expected", folder)
    with importing:
        from .describing import describe

    how = {"protocol": pickle_protocol, "compact": views == "compact", "dtype": dtype}
    shards = Shards(named_values(obj), max_shard_bytes, **how)
    files = ShardFiles(folder, shards, metadata, fsync)
    options = {"want_crc": crc32, "threads": threads, "alignment": alignment}
    try:
        with reporting(progress, folder) as tell:
            files.write(functools.partial(describe, **how), tell, **options)
        files.commit()
    except BaseException:
        files.abort()
        raise
    files.remove_old()


def named_values(obj):
    """{name: value} of a module or a dict; TypeError for what can't be sharded."""
    with importing:
        from .needs_torch import torch

    values = obj.state_dict() if isinstance(obj, torch.nn.Module) else obj
    if not isinstance(values, dict):
        raise TypeError(f"obj is {kind_of(obj)}: a module or a dict of tensors is expected")
    for name, value in values.items():
        if not isinstance(name, str):
            raise TypeError(f"{name!r:.100} is a name in obj: a str is expected")
        if not isinstance(value, torch.Tensor) and not name.endswith(EXTRA_STATE):
            raise TypeError(
                f"{name!r:.100} is {kind_of(value)}: a tensor is expected; save takes any object"
            )
    return values


class Shards:
    """What goes into which shard: ``shard_of`` says for each name, ``parts`` are dicts of values by name, ``nbytes`` the bytes
    of all storages. What shares a storage goes where the first of it goes.
    """

    def __init__(self, values, most_nbytes, **how):
        with importing:
            from .describing import storages_by_name

        numbers, nbytes = storages_by_name(values, **how)
        self.values, self.nbytes = values, int(nbytes.sum())
        self.shard_of, count, filled = {}, 1, 0
        for names in groups_of(numbers):
            size = int(nbytes[list(set().union(*[numbers[name] for name in names]))].sum())
            if filled and filled + size > most_nbytes:
                count, filled = count + 1, 0
            self.shard_of |= dict.fromkeys(names, count - 1)
            filled += size
        if count > MOST_SHARDS:
            raise ValueError(f"{count} shards, {MOST_SHARDS} can be named; raise max_shard_bytes")
        self.parts = [{} for _ in range(count)]
        for name, value in values.items():
            self.parts[self.shard_of[name]][name] = value


def groups_of(numbers):
    """Lists of names that share storages, given {name: numbers of its storages}; in the order of their first names."""
    parents, first = {name: name for name in numbers}, {}

    def head(name):
        while parents[name] != name:
            parents[name] = name = parents[parents[name]]
        return name

    for name, found in numbers.items():
        for number in found:
            parents[head(name)] = head(first.setdefault(number, name))
    groups = {}
    for name in numbers:
        groups.setdefault(head(name), []).append(name)
    return list(groups.values())


class ShardFiles:
    """The files of a save: written one after the other, without names, and named together."""

    def __init__(self, folder, shards, metadata, fsync):
        self.folder, self.shards, self.fsync = folder, shards, fsync
        self.files, count = [], len(shards.parts)
        self.names = [SINGLE] if count == 1 else [SHARD.format(i + 1, count) for i in range(count)]
        self.metadata = [encoded(metadata)]
        if count > 1:
            save_id = secrets.token_hex(8)
            self.metadata = [encoded({SAVE_ID: save_id})] * count
            self.index = index_of(shards, self.names, metadata or {}, save_id)
            self.names.append(INDEX)
        self.made_folder = not os.path.isdir(folder)
        os.makedirs(folder, exist_ok=True)

    def write(self, describe, tell, **options):
        """Write all; ``describe`` makes a Description of a part."""
        before = 0
        for part, metadata in zip(self.shards.parts, self.metadata, strict=True):
            described = describe(part)

            def told(done, _, before=before):
                tell(before + done, self.shards.nbytes)

            progress = told if tell else None
            write(described, self._next_file(), metadata=metadata, tell=progress, **options)
            before += int(described.nbytes.sum())
        if len(self.names) > 1:
            file = self._next_file()
            write_at(file.fd, 0, self.index, file.name)

    def _next_file(self):
        path = os.path.join(self.folder, self.names[len(self.files)])
        if os.path.exists(path) and not os.path.isfile(path):
            raise FileExistsError(errno.EEXIST, "is there, and no regular file", path)
        target = os.path.realpath(path)
        if any(file.target == target for file in self.files):
            raise FileExistsError(
                errno.EEXIST, "is a link to the same file as another shard; remove it", path
            )
        try:
            self.files.append(Replacement(path, target, fsync=False))
        except OSError as error:
            if error.errno == errno.EMFILE:
                error.add_note(
                    f"each of the {len(self.names)} files takes a descriptor; raise the limit (ulimit -n), or max_shard_bytes"
                )
            raise
        return self.files[-1]

    def commit(self):
        """Give all files their names: the index, or the only file, last."""
        self._commit(self.files[:-1])
        self._commit(self.files[-1:])

    def _commit(self, files):
        if self.fsync:
            for file in files:
                with naming(file.name):
                    os.fsync(file.fd)
        with durable_names({file.folder for file in files} if self.fsync else ()):
            for file in files:
                file.commit(0)

    def abort(self):
        for file in self.files:
            file.abort()
        if self.made_folder:
            with contextlib.suppress(OSError):  # somebody has put something into it
                os.rmdir(self.folder)

    def remove_old(self):
        """Remove what another save of this kind has left: first what leads to its shards."""
        old = [name for name in os.listdir(self.folder) if SHARD_NAME.fullmatch(name)]
        for name in (INDEX, SINGLE, *old):
            path = os.path.join(self.folder, name)
            if name not in self.names and os.path.lexists(path) and not os.path.isdir(path):
                os.unlink(path)


def index_of(shards, names, metadata, save_id):
    """The bytes of an index."""
    index = {
        "metadata": {**metadata, "total_size": shards.nbytes, SAVE_ID: save_id},
        "weight_map": {name: names[shards.shard_of[name]] for name in shards.values},
    }
    return (json.dumps(index, indent=2, allow_nan=False) + "\n").encode()
