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
    its row. No storage byte is read.
    """

    kind = "legacy"
    byteorder = "little"

    def __init__(self, source, **options):
        self.source = source
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
        keys = stream.pickle("list of storage keys").obj
        self.unpickled.unknown = list(stream.unknown)
        self._lay_out(keys)

    def _lay_out(self, keys):
        """Compute where each storage lies from the sizes that the object gives, and compare the counts."""
        stream = self.stream
        if not isinstance(keys, list) or not all(type(key) in (str, int, bytes) for key in keys):
            raise stream.error(
                f"the list of storage keys is {short(keys)}; a list of strings is expected"
            )
        keys = [key_text(key) for key in keys]
        specs = {spec.key: spec for spec in self.unpickled.storages if spec.root is None}
        if len(set(keys)) != len(keys):
            twice = collections.Counter(keys).most_common(1)[0][0]
            raise stream.error(
                f"the list of storage keys names {twice!r} twice, with two contents; the file is damaged"
            )
        for key in keys:
            if key not in specs:
                raise stream.error(
                    f"the list of storage keys names {key!r}, which the object never mentions: how many bytes to skip is unknown"
                )
        listed = set(keys)
        for key in specs:
            if key not in listed:
                raise stream.error(
                    f"storage {key!r} is not in the list of storage keys: its data is not in the file, which is damaged"
                )
        nbytes = np.array([specs[key].nbytes for key in keys], dtype=np.int64)
        itemsize = np.array([DTYPES[specs[key].dtype].itemsize for key in keys], dtype=np.int64)
        offset = np.empty(len(keys), dtype=np.int64)
        at = stream.offset
        for row, size in enumerate(nbytes.tolist()):  # Python's ints: no sum of sizes wraps
            if COUNT_NBYTES + size > source_left(stream, at):
                stream.offset = at
                raise stream.cut_short(f"storage {keys[row]!r}", COUNT_NBYTES + size)
            offset[row] = at + COUNT_NBYTES
            at += COUNT_NBYTES + size
        self.records = Records(keys, offset, nbytes)
        self.rows = {key: row for row, key in enumerate(keys)}
        self.end = at
        self._compare_counts(offset - COUNT_NBYTES, nbytes // itemsize)

    def _compare_counts(self, offset, expected):
        if self.source.fd >= 0 or self.source.view is not None:
            status, row, found = _legacy.compare_counts(self.source, offset, expected)
        else:
            status, row, found = 0, 0, 0
            for row, (at, count) in enumerate(zip(offset.tolist(), expected.tolist(), strict=True)):  # noqa: B007
                found = int.from_bytes(self.source.read(at, COUNT_NBYTES), "little", signed=True)
                if found != count:
                    status = _legacy.WRONG_COUNT
                    break
        if status == _legacy.WRONG_COUNT:
            name, at = self.records.names[row], int(offset[row])
            raise FormatError(
                f"{self.source.name}: storage {name!r} at byte {at}: the stream counts {found} elements, the pickle says "
                f"{expected[row]}; the file is damaged",
                path=self.source.name,
                record=name,
                offset=at,
            )
        if status > 0:
            raise OSError(status, os.strerror(status), self.source.name)
        if status:
            raise self.source.short(int(offset[row]), COUNT_NBYTES, 0)

    def locate(self, rows):
        """Every offset is known."""

    def unpickle_again(self):
        """The object once more, with containers of its own."""
        self.stream.offset = self.object_offset
        return self.stream.pickle("object", self.object_nbytes, pids=PIDS_LEGACY)

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
