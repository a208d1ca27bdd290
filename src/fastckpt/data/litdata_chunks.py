"""The chunks of a LitData data set: which envelope each is in, opened when it is needed, and let go of when others are.

Files are opened to be read, and nothing else is ever done to them.
"""

import itertools
import os

import numpy as np

from ..errors import FormatError, UnsupportedError
from ..importing import importing
from ..source import MemorySource, open_path
from . import _litdata as native
from .litdata_arrow import ArrowRows, as_items, find_footer, read_arrow
from .litdata_envelopes import FRAME, Framed, Plain, Sealed
from .litdata_errors import BadItem

FRAMED_MAGIC = b"LDFZ01\0\0"
FRAMED_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u2"),
        ("flags", "<u2"),
        ("items", "<u4"),
        ("rows", "<u4"),
        ("frames", "<u4"),
    ]
)
FRAMED_VERSION = 1

# Descriptors that are open at once: a process has 1024, and several readers.
MOST_OPEN = 64


# Of Cache.latest: first position, one past the last, chunk.
NONE_YET = (0, 0, None)


class Cache:
    """Chunks and frames in use, as many as fit into ``budget`` bytes; those that were not used for longest go first.

    ``latest`` is the chunk that the last single sample came from, as its next one is likely to; it is forgotten when anything is dropped.

    No lock: each step on its dict is atomic, and at worst two threads open the same chunk. What is dropped is closed when the last
    read from it is done.
    """

    def __init__(self, budget):
        self.budget = budget
        self._entries, self._clock = {}, itertools.count()
        self.latest = NONE_YET

    def get(self, key):
        entry = self._entries.get(key)
        if entry is not None:
            entry.used = next(self._clock)
        return entry

    def put(self, key, entry):
        entry.used = next(self._clock)
        self._entries[key] = entry
        for old in self._surplus(key):
            self._entries.pop(old, None)
            self.latest = NONE_YET

    def _surplus(self, newest):
        entries = sorted(self._entries.copy().items(), key=lambda pair: pair[1].used, reverse=True)
        held = opened = 0
        for key, entry in entries:
            held, opened = held + entry.nbytes, opened + entry.opened
            if key != newest and (held > self.budget or opened > MOST_OPEN):
                yield key

    def clear(self):
        self._entries = {}
        self.latest = NONE_YET


class Chunks:
    """The chunks of ``index`` in ``folder``; ``chunks[number]`` is an opened one. Raises FormatError, UnsupportedError, OSError."""

    def __init__(self, folder, index, *, mapped, inflate, decrypt, cache_nbytes):
        self.folder, self.index, self.mapped = folder, index, mapped
        self.inflate, self.decrypt = inflate, decrypt
        self.cache = Cache(cache_nbytes)

    def __getitem__(self, number):
        chunk = self.cache.get(number)
        if chunk is None:
            chunk = self.open(number)
            self.cache.put(number, chunk)
        return chunk

    def place(self, number):
        return os.path.join(self.folder, self.index.chunks[number].filename)

    def open(self, number):
        try:
            return self._open(number)
        except BadItem as error:
            raise self.damaged(number, str(error)) from None

    def damaged(self, number, found, **where):
        name = self.place(number)
        return FormatError(
            f"{name}: {found}; the chunk is damaged, copy it again from where it came from",
            path=name,
            **where,
        )

    def bad_item(self, number, error):
        """The FormatError for an item, or a chunk, that is not what the index says."""
        if error.item is None:
            return self.damaged(number, str(error))
        return self.damaged(number, f"item {error.item}: {error}", record=str(error.item))

    # -- envelopes

    def _open(self, number):
        entry, index = self.index.chunks[number], self.index
        source, whole = self._open_file(number)
        if whole:
            source = self._in_memory(
                self.inflate(source.read(0, source.nbytes), whole_sizes(entry)), source
            )
        if index.encryption == "chunk":
            source = self._in_memory(self.decrypt(source.read(0, source.nbytes)), source)
        head = bytes(source.read(0, min(source.nbytes, FRAMED_HEADER.itemsize)))
        if head.startswith(FRAMED_MAGIC):
            return self._open_framed(number, source, head)
        table = self._read_table(source, head, entry.count)
        if is_empty(table) and index.leaves and entry.count:
            footer = find_footer(source)
            if footer is None:
                raise BadItem("its items are empty, and no Arrow table follows them")
            return self._open_rows(source, read_arrow(source, *footer, entry.count))
        if index.level == "batch":
            raise BadItem(
                f"it begins with {head[:8]!r} instead of {FRAMED_MAGIC!r}, and the index says that it is framed"
            )
        sealed = index.level == "sample" or index.encryption == "sample"
        mapping = None if sealed else self._map(number, source)
        block = native.Block(source, table, 0, entry.count, 0, mapping)
        if sealed:
            return Sealed(
                block, len(table), self.inflate if index.level == "sample" else self.decrypt
            )
        return Plain(block, len(table))

    def _open_file(self, number):
        """A chunk's file, and whether all of it is compressed."""
        entry, index = self.index.chunks[number], self.index
        whole = index.level == "chunk" and entry.filename.endswith(f".{index.compression}.bin")
        names = [entry.filename]
        if whole:  # what LitData leaves behind where it has read the data set in place
            names.append(entry.filename.removesuffix(f".{index.compression}.bin") + ".bin")
        for name in names:
            try:
                source = open_path(os.path.join(self.folder, name), 0, None)
            except FileNotFoundError:
                whole = False
                continue
            if not whole and entry.nbytes is not None and source.nbytes < entry.nbytes:
                raise BadItem(f"it has {source.nbytes} bytes, and the index says {entry.nbytes}")
            return source, whole
        raise BadItem(f"the file is missing, and the index has it with {entry.count} items")

    def _in_memory(self, data, source):
        return MemorySource(data, source.name)

    def _map(self, number, source):
        """A mapping of the file where the caller asked for one and it can be had: no item of it may be in memory."""
        if source.fd < 0 or not source.nbytes or number not in self.mapped:
            return None
        with importing:
            from .._memory import map_file

        return map_file(source.fd, source.nbytes)[0]

    def _read_table(self, source, head, count):
        if len(head) < 4:
            raise BadItem(f"it has {source.nbytes} bytes, too few for a chunk")
        found = int.from_bytes(head[:4], "little")
        if found != count:
            raise BadItem(f"it says that it has {found} items, and the index says {count}")
        nbytes = 4 * (count + 1)
        if nbytes > source.nbytes - 4:
            raise BadItem(f"it has {source.nbytes} bytes, too few for the offsets of {count} items")
        table = bytes(source.read(4, nbytes))
        first = int.from_bytes(table[:4], "little")
        if first != 4 + nbytes:
            raise BadItem(
                f"its first item begins at byte {first}, and its offsets end at {4 + nbytes}"
            )
        return table

    def _open_rows(self, source, rows):
        items = as_items(rows, self.index)
        if items is None:
            return ArrowRows(rows)
        return Plain(
            native.Block(self._in_memory(items[1], source), items[0], 0, rows.num_rows, 0),
            len(items[0]),
        )

    def _open_framed(self, number, source, head):
        entry = self.index.chunks[number]
        if len(head) < FRAMED_HEADER.itemsize:
            raise BadItem(f"it has {len(head)} bytes, too few for a framed chunk")
        header = np.frombuffer(head, FRAMED_HEADER)[0]
        if header["version"] != FRAMED_VERSION or header["flags"]:
            raise UnsupportedError(
                f"{source.name}: it is framed in version {header['version']} with flags {header['flags']}; "
                f"version {FRAMED_VERSION} without any is read",
                path=source.name,
            )
        if header["items"] != entry.count:
            raise BadItem(
                f"it says that it has {header['items']} items, and the index says {entry.count}"
            )
        start = FRAMED_HEADER.itemsize
        table_nbytes, frames_nbytes = 4 * (entry.count + 1), FRAME.itemsize * int(header["frames"])
        if table_nbytes + frames_nbytes > source.nbytes - start:
            raise BadItem(
                f"it has {source.nbytes} bytes, too few for the tables of {header['frames']} frames"
            )
        table = bytes(source.read(start, table_nbytes))
        frames = np.frombuffer(source.read(start + table_nbytes, frames_nbytes), FRAME)
        if self.inflate is None:
            with importing:
                from .litdata_codecs import Zstd

            self.inflate = Zstd()
        return Framed(source, table, frames, entry.count, self.inflate, self.cache, number)


def whole_sizes(entry):
    """How many bytes a chunk may have inflated: until 2025 the index told the bytes of its items alone."""
    return () if entry.nbytes is None else (entry.nbytes, entry.nbytes + 4 + 4 * (entry.count + 1))


def is_empty(table):
    return table[:4] == table[-4:]
