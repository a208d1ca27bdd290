"""index.json of a LitData data set: which chunks there are, and what is in them. Every field is checked once, here."""

import json
import os
from typing import NamedTuple

from ..errors import FormatError, UnsafePickleError, UnsupportedError, short
from ..source import open_source
from .litdata_errors import BadItem
from .litdata_leaves import describe_leaf
from .litdata_tree import UnknownType, count_leaves, read_tree

NAME = "index.json"
LOADER = "PyTreeLoader"
LEVELS = ("chunk", "batch", "sample")
MOST = 2**32 - 1  # what the format's 32-bit numbers hold


class ChunkEntry(NamedTuple):
    filename: str
    count: int  # type: ignore[assignment]  # of items; nobody counts what is in an entry
    nbytes: int | None  # of the file; inflated, where the file as a whole is compressed


class Index(NamedTuple):
    """``leaves`` and ``tree`` as a native Layout takes them; ``level`` of compression and ``encryption`` None where there is none."""

    path: str
    chunks: list[ChunkEntry]
    leaves: list[tuple]
    tree: tuple | None
    compression: str | None
    level: str | None
    encryption: str | None


def read_index(folder, *, decoders, types, allow_pickle):
    """Read and check index.json.

    Raises FormatError, UnsupportedError for what is not read here, UnsafePickleError where there are pickles among the leaves and
    ``allow_pickle`` is False, OSError; FileNotFoundError says what is in a folder that has no index.
    """
    path = os.path.join(folder, NAME)
    try:
        return _IndexReader(path).read(decoders, types, allow_pickle)
    except FileNotFoundError as error:
        if not os.path.isdir(folder):
            raise
        raise FileNotFoundError(error.errno, without_index(folder), path) from None


def without_index(folder):
    """What a folder holds instead of an index, and what is expected."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name + "/" * entry.is_dir() for entry in entries)
    inner = [name for name in names if os.path.isfile(os.path.join(folder, name, NAME))]
    if inner:
        remedy = f"give one of the folders in it that have one: {', '.join(inner):.200}"
    else:
        remedy = "copy the index too, or give the output_dir of optimize"
    there = ", ".join(names) or "nothing"
    return (
        f"the folder has no {NAME}, only: {there:.200}; "
        f"a folder that litdata.optimize wrote is expected, {NAME} and chunks (*.bin); {remedy}"
    )


class _IndexReader:
    def __init__(self, path):
        self.path = path

    def error(self, found, kind=FormatError, **more):
        return kind(f"{self.path}: {found}", path=self.path, **more)

    def damaged(self, found):
        return self.error(f"{found}; the index is damaged, copy it again from where it came from")

    def read(self, decoders, types, allow_pickle):
        content = self.parse()
        config = content.get("config")
        if not isinstance(config, dict):
            raise self.damaged(f"config is {short(config)} instead of a dict")
        self.check_loader(config)
        chunks = content.get("chunks")
        if not isinstance(chunks, list):
            raise self.damaged(f"chunks is {short(chunks)} instead of a list")
        leaves = self.leaves(config.get("data_format"), decoders, allow_pickle)
        tree = self.tree(config.get("data_spec"), types, len(leaves))
        compression, level = self.compression(config)
        entries = [self.chunk(number, chunk) for number, chunk in enumerate(chunks)]
        return Index(self.path, entries, leaves, tree, compression, level, self.encryption(config))

    def parse(self):
        source = open_source(self.path)
        try:
            content = json.loads(bytes(source.read(0, source.nbytes)))
        except (ValueError, RecursionError) as error:
            if isinstance(error, FormatError):
                raise
            raise self.damaged(f"it is not JSON that can be read ({error})") from None
        finally:
            source.close()
        if not isinstance(content, dict):
            raise self.damaged(f"it holds {short(content)} instead of a dict")
        return content

    def check_loader(self, config):
        if config.get("format") == "mds":
            raise self.error(
                "it is of a Mosaic data set (MDS), not of LitData's own", UnsupportedError
            )
        loader = config.get("item_loader")
        if loader not in (None, LOADER):
            raise self.error(
                f"its items are for {short(loader)}; those for {LOADER} are read here",
                UnsupportedError,
            )

    def leaves(self, names, decoders, allow_pickle):
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self.damaged(f"data_format is {short(names)} instead of a list of names")
        leaves = []
        for name in names:
            try:
                leaf = describe_leaf(name, decoders, allow_pickle)
            except ValueError:
                raise self.damaged(
                    f"leaf {len(leaves)} is {short(name)}, of no element type that is read"
                ) from None
            if leaf is None:
                raise self.refusal(len(leaves), name)
            leaves.append(leaf)
        return leaves

    def refusal(self, number, name):
        key = name.partition(":")[0]
        if key == "pickle":
            return self.error(
                f"leaf {number} of each sample is a pickle, which can run code; nothing was run. "
                "allow_pickle=True runs the pickles of a data set that you trust, decoders={'pickle': bytes} hands them out unread",
                UnsafePickleError,
            )
        return self.error(
            f"leaf {number} is {short(name)}, a serializer that is not known; "
            f"decoders={{{short(key)}: function}} says what to make of its bytes",
            UnsupportedError,
        )

    def tree(self, spec, types, count):
        try:
            tree = read_tree(spec, types)
        except BadItem as error:
            raise self.damaged(str(error)) from None
        except UnknownType as error:
            raise self.error(
                f"samples have a container that is not known, {error}; "
                "types={name: class} gives the class of a namedtuple by the name it was registered with",
                UnsupportedError,
            ) from None
        if count_leaves(tree) != count:
            raise self.damaged(f"data_spec has {count_leaves(tree)} leaves, data_format {count}")
        return tree

    def compression(self, config):
        name, level = config.get("compression"), config.get("compression_level")
        if not name:
            return None, None
        if not isinstance(name, str) or name.partition(":")[0] != "zstd":
            raise self.error(
                f"it is compressed with {short(name)}; zstd is read here", UnsupportedError
            )
        level = level or LEVELS[0]
        if level not in LEVELS:
            raise self.error(
                f"compression_level is {short(level)}, none of {', '.join(LEVELS)}",
                UnsupportedError,
            )
        return name, level

    def encryption(self, config):
        found = config.get("encryption")
        if not found:
            return None
        if not isinstance(found, dict) or found.get("level") not in ("sample", "chunk"):
            raise self.damaged(f"encryption is {short(found)}, which names no level")
        if found.get("algorithm") != "fernet":
            raise self.error(
                f"it is encrypted with {short(found.get('algorithm'))}; fernet is read here",
                UnsupportedError,
            )
        return found["level"]

    def chunk(self, number, entry):
        if not isinstance(entry, dict):
            raise self.damaged(f"chunk {number} is {short(entry)} instead of a dict")
        name, count, nbytes = (entry.get(key) for key in ("filename", "chunk_size", "chunk_bytes"))
        if not isinstance(name, str) or not is_inside(name):
            raise self.damaged(
                f"chunk {number} is in {short(name)}, which is no file of this folder"
            )
        if type(count) is not int or not 0 <= count <= MOST:
            raise self.damaged(f"chunk {number} has {short(count)} items")
        if nbytes is not None and (type(nbytes) is not int or nbytes < 0):
            raise self.damaged(f"chunk {number} has {short(nbytes)} bytes")
        return ChunkEntry(name, count, nbytes)


def is_inside(name):
    """Whether a name leads to a file below the folder, so that an index from elsewhere opens nothing else."""
    parts = name.split("/")
    return "\0" not in name and not any(part in ("", ".", "..") for part in parts)
