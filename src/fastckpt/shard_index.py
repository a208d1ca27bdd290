"""The index of a checkpoint in several files, as transformers writes it: which tensor is in which shard.

{"metadata": {"total_size": bytes}, "weight_map": {name: file}}; the files lie beside the index.
"""

import errno
import os
import re
import stat

from . import strict_json
from .containers.sniff import DCP_REMEDY
from .errors import FormatError
from .near_names import not_found
from .selection import chooser
from .source import is_path

SINGLE = "pytorch_model.bin"
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar", ".pkl")
INDEX = "pytorch_model.bin.index.json"
# diffusers and variants have other words in it.
INDEX_NAME = re.compile(r".*\.index(\.[^.]+)?\.json")
# What save_sharded calls its shards, and one set of them, in the index as well as in each shard.
SHARD = "pytorch_model-{:05d}-of-{:05d}.bin"
SHARD_NAME = re.compile(r"pytorch_model-\d{5}-of-\d{5}\.bin")
# Which of how many, in the names that others give to theirs.
OF_MANY = re.compile(r"-\d{5}-of-\d{5}\.")
SAVE_ID = "save_id"


def weights_of(f):
    """What to read where a caller gives ``f``: for a folder its one file or its index, else ``f`` itself.

    A folder that has both is one in which a save has just replaced the other; readers take the file first, as transformers does.
    Raises IsADirectoryError for a folder that has neither.
    """
    if not isinstance(f, (str, os.PathLike)) and not (type(f) is bytes and is_path(f)):
        return f
    try:
        if not stat.S_ISDIR(os.stat(f).st_mode):
            return f
    except (OSError, ValueError):  # who opens it will say
        return f
    # Twice for the file: a save that turns an index into one file lets go of the index only when the file is there.
    for name in (SINGLE, INDEX, SINGLE):
        path = os.path.join(os.fsdecode(f), name)
        if os.path.isfile(path):
            return path
    raise IsADirectoryError(errno.EISDIR, no_checkpoint(f), os.fsdecode(f))


def no_checkpoint(folder):
    """What to say of a folder without a checkpoint."""
    names = sorted(os.listdir(os.fsdecode(folder)))
    if not names:
        return "an empty folder, a checkpoint is expected"
    if ".metadata" in names:
        return f"a folder of torch.distributed.checkpoint, which is not read; {DCP_REMEDY}"
    others = [name for name in names if ".safetensors" not in name]
    files = [name for name in others if name.endswith(SUFFIXES) or is_index(name)]
    indexes = [name for name in files if is_index(name)]
    shards = [name for name in files if OF_MANY.search(name)]
    if shards and not indexes:
        return (
            f"a folder of shards, such as {shards[0]!r}, without {INDEX}, their index, which says what is in which; fetch it again, "
            f"or load shard by shard"
        )
    if files:
        return f"a folder without {SINGLE} or {INDEX}; give the path of a file in it, such as {(indexes or files)[0]!r}"
    if len(others) < len(names):
        return "a folder of safetensors, which safetensors.torch.load_file reads, file by file"
    return (
        f"a folder without {SINGLE} or {INDEX}, and nothing else in it is called as checkpoints are"
    )


def is_name(text):
    """Whether a text can be the name of a file at all."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def check_region(path, offset, nbytes):
    """Raise TypeError where a part of an index is asked for."""
    if offset or nbytes is not None:
        raise TypeError(
            f"{path}: offset and nbytes are of one file, and this is an index of several"
        )


def is_index(f):
    """Whether ``f`` is the path of an index."""
    if isinstance(f, bytes) and not is_path(f):
        return False
    return isinstance(f, (str, bytes, os.PathLike)) and bool(
        INDEX_NAME.fullmatch(os.path.basename(os.fsdecode(f)))
    )


class MissingShardError(FormatError):
    """A file that an index names is not there."""


class ShardIndex:
    """An index that was read: ``shards`` is {file name: [names of tensors]}, in the order of the index.

    Raises FormatError for what is no index, and for files that are not there or lie elsewhere; OSError. With a list of
    ``problems`` errors about single files are added to it, and such files are left out.
    """

    def __init__(self, path, problems=None):
        self.path = os.fsdecode(path)
        self.folder = os.path.dirname(self.path)
        found = self._read()
        self.weight_map = found.get("weight_map") if isinstance(found, dict) else None
        if not isinstance(self.weight_map, dict):
            raise self.error("no 'weight_map' is in it, a dict of names to files is expected")
        self.metadata = found.get("metadata")
        # A folder may be one of links into a store, as the Hugging Face cache has it: then the index is one, too.
        self._roots = {os.path.realpath(self.folder), os.path.dirname(os.path.realpath(self.path))}
        self.shards = {}
        self._missing = {}  # errors about files that are wanted only if one of their names is
        bad = set()
        for name, file in self.weight_map.items():
            if not isinstance(file, str) or file not in self.shards and file not in bad:
                try:
                    self._check_file(file, name)
                except MissingShardError as error:
                    if problems is not None:
                        problems.append(error)
                        bad.add(file)
                        continue
                    self._missing[file] = error
                except FormatError as error:
                    if problems is None:
                        raise
                    problems.append(error)
                    bad.add(str(file))
                    continue
                self.shards[file] = []
            if file not in bad:
                self.shards[file].append(name)

    def _read(self):
        with open(self.path, "rb") as file:
            data = file.read()
        try:
            return strict_json.parse(data, object_pairs_hook=self._unique)
        except FormatError:
            raise
        except (ValueError, RecursionError) as error:
            raise self.error(f"an index in JSON is expected ({error})") from None

    def _unique(self, pairs):
        found = dict(pairs)
        if len(found) != len(pairs):
            seen = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))
            raise self.error(
                f"{twice!r:.100} is in it twice, and readers differ in which one they take"
            )
        return found

    def _check_file(self, file, name):
        """See that a shard, which has ``name``, is there and is nothing outside of the folder."""
        if not isinstance(file, str):
            raise self.error(f"{name!r:.100} is in {file!r:.100}, a file name is expected")
        if file in ("", ".", "..") or set(file) & {"/", "\\", "\0"} or not is_name(file):
            raise self.error(
                f"{name!r:.100} is in {file!r:.100}, the name of a file in the same folder is expected"
            )
        path = self.path_of(file)
        try:
            regular = stat.S_ISREG(os.stat(path).st_mode)
        except FileNotFoundError:
            problem = (
                f"shard {file!r} is missing, which has {name!r:.100} and others; fetch it again"
            )
            raise self.error(problem, MissingShardError) from None
        if not regular:
            raise self.error(f"shard {file!r} is no regular file")
        if os.path.dirname(os.path.realpath(path)) not in self._roots:
            raise self.error(f"shard {file!r} is a link that leads out of the folder")

    def path_of(self, file):
        return os.path.join(self.folder, file)

    def select(self, keys):
        """{file name: [names]} of what ``keys`` wants (see load), None for all. KeyError for a listed name that is not
        there, and for a pattern that nothing matches; FormatError where a file of these is missing.
        """
        chosen = self._chosen(keys)
        for file, error in self._missing.items():
            if file in chosen:
                raise error
        return chosen

    def _chosen(self, keys):
        if keys is None:
            return self.shards
        wanted, listed = chooser(keys)
        if missing := [name for name in listed if name not in self.weight_map]:
            raise not_found(missing, self.weight_map)
        chosen = {
            file: [name for name in names if wanted(name)] for file, names in self.shards.items()
        }
        chosen = {file: names for file, names in chosen.items() if names}
        if isinstance(keys, str) and not chosen and self.weight_map:
            raise not_found(keys, self.weight_map, pattern=True)
        return chosen

    def error(self, problem, kind=FormatError):
        return kind(f"{self.path}: {problem}", path=self.path)
