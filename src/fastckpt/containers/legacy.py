"""The legacy stream of torch 0.1.10 to 1.5: five pickles, then each storage as a count of elements and its bytes.

Everything is little-endian, whatever machine wrote it. Whatever stands behind the last storage is ignored.
"""

import collections
import os

import numpy as np

from .. import _legacy
from .._unpickler import PIDS_LEGACY
from ..dtypes import DTYPES
from ..errors import FormatError, UnsupportedError, short
from ..records import Records
from .stream import PickleStream

MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001
COUNT_NBYTES = 8
OBJECT_WINDOW = 1 << 18  # bytes; the object's pickle has some hundred for each tensor


class LegacyContainer:
    """A legacy stream, opened: what the object pickle holds, and where its storages lie.

    ``records`` has one row for each storage that the key list names, in its order; ``rows`` maps a storage key to
    its row. No storage byte is read. With ``problems``, a list, errors about single storages are put into it, and the others
    are laid out as far as that is possible.
    """

    kind = "legacy"
    byteorder = "little"

    def __init__(self, source, problems=None, **options):
        self.source, self.problems = source, problems
        stream = self.stream = PickleStream(source, 0, source.nbytes, **options)
        if (magic := stream.pickle("magic number").obj) != MAGIC:
            raise stream.error(f"the magic number is {short(magic)}, {MAGIC:#x} is expected")
        if (version := stream.pickle("protocol version").obj) != PROTOCOL:
            raise stream.error(
                f"the protocol version is {short(version)}, {PROTOCOL} is known; a newer release may read it",
                UnsupportedError,
            )
        stream.pickle("system info")
        self.object_offset = stream.offset
        self.unpickled = stream.pickle("object", OBJECT_WINDOW, pids=PIDS_LEGACY)
        self.object_nbytes = self.unpickled.end
        keys = self._read_keys()
        self.unpickled.unknown = list(stream.unknown)
        self._lay_out(keys)

    def _report(self, error):
        if self.problems is None:
            raise error
        self.problems.append(error)

    def _read_keys(self):
        """The keys of the storages that follow, in their order."""
        stream = self.stream
        keys = stream.pickle("list of storage keys").obj
        if not isinstance(keys, list) or not all(type(key) in (str, int, bytes) for key in keys):
            raise stream.error(
                f"the list of storage keys is {short(keys)}; a list of strings is expected"
            )
        keys = [key_text(key) for key in keys]
        if len(set(keys)) != len(keys):
            twice = collections.Counter(keys).most_common(1)[0][0]
            raise stream.error(
                f"the list of storage keys names {twice!r} twice, with two contents; the file is damaged"
            )
        return keys

    def _lay_out(self, keys):
        """Compute where each storage lies from the sizes that the object gives, and compare the counts."""
        stream = self.stream
        specs = {spec.key: spec for spec in self.unpickled.storages if spec.root is None}
        listed = set(keys)
        for row, key in enumerate(keys):
            if key not in specs:
                self._report(
                    stream.error(
                        f"the list of storage keys names {key!r}, which the object never mentions: how many bytes to skip is unknown"
                    )
                )
                keys = keys[:row]
                break
        for key in specs:
            if key not in listed:
                self._report(
                    stream.error(
                        f"storage {key!r} is not in the list of storage keys: its data is not in the file, which is damaged",
                        record=key,
                    )
                )
        nbytes = np.array([specs[key].nbytes for key in keys], dtype=np.int64)
        itemsize = np.array([DTYPES[specs[key].dtype].itemsize for key in keys], dtype=np.int64)
        offset = np.empty(len(keys), dtype=np.int64)
        at, there = stream.offset, len(keys)
        for row, size in enumerate(nbytes.tolist()):  # Python's ints: no sum of sizes wraps
            if COUNT_NBYTES + size > source_left(stream, at):
                stream.offset = at
                self._report(
                    stream.cut_short(f"storage {keys[row]!r}", COUNT_NBYTES + size, keys[row])
                )
                there = row
                break
            offset[row] = at + COUNT_NBYTES
            at += COUNT_NBYTES + size
        keys, offset, nbytes, itemsize = (
            keys[:there],
            offset[:there],
            nbytes[:there],
            itemsize[:there],
        )
        self.records = Records(keys, offset, nbytes)
        self.rows = {key: row for row, key in enumerate(keys)}
        self.end = at
        self._compare_counts(offset - COUNT_NBYTES, nbytes // itemsize)

    def _compare_counts(self, offset, expected):
        """Compare the counts of elements in the stream with those that the pickle gives."""
        row, found = self._wrong_count(offset, expected)
        while row is not None:
            name, at = self.records.names[row], int(offset[row])
            self._report(
                FormatError(
                    f"{self.source.name}: storage {name!r} at byte {at}: the stream counts {found} elements, the pickle says "
                    f"{expected[row]}; the file is damaged",
                    path=self.source.name,
                    record=name,
                    offset=at,
                )
            )
            row, found = self._wrong_count(offset, expected, row + 1)

    def _wrong_count(self, offset, expected, first=0):
        """The first row from ``first`` on whose count is not what is expected, and that count; (None, 0) where all are."""
        offset, expected = offset[first:], expected[first:]
        if self.source.fd < 0 and self.source.view is None:
            for row, (at, count) in enumerate(zip(offset.tolist(), expected.tolist(), strict=True)):
                found = int.from_bytes(self.source.read(at, COUNT_NBYTES), "little", signed=True)
                if found != count:
                    return first + row, found
            return None, 0
        status, row, found = _legacy.compare_counts(self.source, offset, expected)
        if status == _legacy.WRONG_COUNT:
            return first + row, found
        if status > 0:
            raise OSError(status, os.strerror(status), self.source.name)
        if status:
            raise self.source.short(int(offset[row]), COUNT_NBYTES)
        return None, 0

    def locate(self, rows):
        """Every offset is known."""

    def unpickle_again(self, **options):
        """The object once more, with containers of its own; ``options`` are more of those of unpickle."""
        self.stream.offset = self.object_offset
        return self.stream.pickle("object", self.object_nbytes, pids=PIDS_LEGACY, **options)

    def other_pickles(self):
        """(bytes, names, string that cannot be decoded) of the pickles before and behind that of the object."""
        for what, offset, nbytes, *found in self.stream.places:
            if what != "object":
                yield self.source.read(offset, nbytes), *found

    def pickle_bytes(self):
        """The bytes of the object's pickle."""
        return self.source.read(self.object_offset, self.object_nbytes)


def source_left(stream, offset):
    return stream.source.nbytes - offset


def key_text(key):
    """A storage key as text; old files have ints and bytes."""
    if isinstance(key, int):
        return short(key, 400)  # of any size
    return key.decode("latin-1") if isinstance(key, bytes) else key
