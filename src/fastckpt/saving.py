"""save: a checkpoint as torch.save writes it, from many threads, in place of the old one only when it is whole."""

from __future__ import annotations

import functools
import json
import operator
import os
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _crc32, _read, _write, workers
from ._descriptor import Owned
from .containers._zip_names import BYTEORDER_RECORD, METADATA_MOST_NBYTES, METADATA_RECORD, PICKLE
from .containers.zip_writer import (
    SERIALIZATION_ID,
    SERIALIZATION_ID_NBYTES,
    ZipLayout,
    archive_name,
    serialization_id,
)
from .destination import open_destination, write_at
from .importing import importing
from .progress import check as check_progress
from .progress import reporting

if TYPE_CHECKING:
    from ._annotations import CheckpointDestination, Progress

VERSION = b"3\n"  # of the format, as torch has it
FORMAT_VERSION = b"1"
# Storages from here on are written where they lie; smaller ones are gathered with the headers between them.
LARGE_NBYTES = 64 << 10
GATHERED_NBYTES = 2 << 20
STREAM_NBYTES = 4 << 20
DONE, STOP = 0, 1  # the places in a control column


def save(
    obj: Any,
    f: CheckpointDestination,
    *,
    threads: int | None = None,
    crc32: bool = True,
    alignment: int = 64,
    fsync: bool = False,
    pickle_protocol: int = 2,
    views: str = "whole",
    dtype: Any = None,
    metadata: Any = None,
    progress: Progress | None = None,
) -> None:
    """Save an object so that torch.load and ``load`` read it: the ZIP format of torch.save.

    obj: what torch.save takes; tensors that share a storage share it in the file. Objects of other classes are pickled by
        Python's own protocol, and load only where running code is allowed (weights_only=False). Opaque, the stand-in for an
        object that was not made, and LazyTensor are refused.
    f: path, descriptor, or binary file object. A path is replaced when all is written: whatever happens before, the old file
        is whole. A link is followed, permissions and owner stay. What cannot seek (a pipe, gzip.open) is written in order.
    threads: how many sum and write; None takes what the process may use.
    crc32: False writes no checksums, as torch.serialization.set_crc32_options(False) does.
    alignment: of the data of each record in the file, in bytes.
    fsync: wait until the file, and the folder of a path, are on the disk.
    pickle_protocol: 2 (which torch.load(weights_only=True) asks for) to 5.
    views: "whole" saves storages as they are, as torch.save does; "compact" only the parts that tensors look at.
    dtype: a floating torch.dtype to which floating tensors are cast on their way; None leaves them as they are.
    metadata: anything that JSON can say in 16 MiB, for a record of its own that torch ignores; ``open(f).info`` has it.
    progress: True for a bar (tqdm's), or a callable(bytes done, bytes in all, name of the file).

    Peak memory: 16 MiB beyond the object, its pickle and 1 KiB a storage. Raises PicklingError and what objects raise
    that can't be pickled, RuntimeError where two tensors look at one storage as different types, OSError where the system
    fails; then what is at a path has not changed.
    Source: github.com/pytorch/pytorch, torch/serialization.py (_save), caffe2/serialize/inline_container.cc.
    """
    check_options(threads, views, progress)
    alignment = int(operator.index(alignment))
    metadata = encoded(metadata)
    with importing:
        from .describing import describe

    described = describe(obj, pickle_protocol, compact=views == "compact", dtype=dtype)
    destination = open_destination(f, fsync)
    try:
        with reporting(progress, destination.name) as tell:
            nbytes = write(described, destination, alignment, metadata, crc32, threads, tell)
        destination.commit(nbytes)
    except BaseException:
        destination.abort()
        raise


def check_options(threads, views, progress):
    check_progress(progress)
    workers.check_threads(threads)
    if views not in ("whole", "compact"):
        raise ValueError(f"views={views!r} is invalid (expected one of: whole, compact)")


def encoded(metadata):
    """The bytes of a metadata record, None for none."""
    if metadata is None:
        return None
    try:
        data = json.dumps(metadata, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"metadata: {error}; it may hold what JSON can say: text, finite numbers, booleans, None, lists, dicts with names"
        ) from None
    if len(data) > METADATA_MOST_NBYTES:
        raise ValueError(f"metadata: {len(data)} bytes of JSON, {METADATA_MOST_NBYTES} fit")
    return data


def write(described, destination, alignment, metadata, want_crc, threads, tell):
    """Write the archive of a Description to a Destination; how many bytes it has."""
    described.make_small()
    archive = Archive(archive_name(destination.path), described, alignment, metadata)
    Writer(archive, destination, want_crc, threads, tell).write()
    return archive.layout.total


class Archive:
    """The records of a checkpoint and where they will lie. ``first`` is the row of storage number 0."""

    def __init__(self, name, described, alignment, metadata):
        self.described = described
        before = {
            PICKLE: described.pickle,
            ".format_version": FORMAT_VERSION,
            ".storage_alignment": str(alignment).encode(),
            BYTEORDER_RECORD: sys.byteorder.encode(),
        }
        if metadata is not None:
            before[METADATA_RECORD] = metadata
        self.first, count = len(before), len(described.nbytes)
        self.texts = dict(enumerate(before.values())) | {self.first + count: VERSION}
        self.names = [*before, *[f"data/{i}" for i in range(count)], "version", SERIALIZATION_ID]
        nbytes = np.full(len(self.names), SERIALIZATION_ID_NBYTES, dtype=np.int64)
        nbytes[self.first : self.first + count] = described.nbytes
        nbytes[list(self.texts)] = list(map(len, self.texts.values()))
        self.layout = ZipLayout([f"{name}/{record}" for record in self.names], nbytes, alignment)

    def extents(self):
        """Memory that is to be written as it is: columns of (row, address, nbytes, offset in the archive)."""
        number, address, nbytes = self.described.extents()
        row = number + self.first
        before = np.cumsum(nbytes) - nbytes
        first = np.searchsorted(row, row)  # extent of each record
        offset = self.layout.offset[row] + before - before[first] if len(row) else row
        return np.array([row, address, nbytes, offset])


class Writer:
    """Writes an archive to a destination. ``control`` is what threads share: bytes done, and the wish to stop."""

    def __init__(self, archive, destination, want_crc, threads, tell):
        self.archive, self.layout, self.destination = archive, archive.layout, destination
        self.want_crc, self.threads, self.tell = want_crc, threads, tell
        self.kernel = _crc32.kernel_id(_crc32.default_kernel())
        self.control = np.zeros(2, dtype=np.int64)
        self.crc = np.zeros(len(archive.names), dtype=np.int64)
        self.blocks = {
            number + archive.first: block for number, block in archive.described.blocks.items()
        }
        self.total = int(archive.described.nbytes.sum())
        self.extents = archive.extents()
        rows = self.extents[0]
        self.large = (self.layout.nbytes[rows] >= LARGE_NBYTES) | np.isin(rows, list(self.blocks))

    def write(self):
        by_position = self.destination.fd >= 0
        self._write_blocks(to_file=by_position)
        texts = self._texts()
        if not by_position:
            self.control[DONE] = 0  # so far bytes were summed alone
        for frame in self._frames(texts, by_position):
            frame()
        if self.tell:
            self.tell(self.total, self.total)

    # -- storages

    def _write_blocks(self, to_file):
        """Sum all storages; with ``to_file`` write the large ones, too."""
        fd = self.destination.fd if to_file else -1
        self._write_extents(self.large & to_file, fd)
        self._write_extents(~self.large | (not to_file), -1)
        for row, block in self.blocks.items():
            if block.extents is None:
                self._write_staged(row, block, fd)

    def _write_extents(self, chosen, fd):
        """Extents that are memory as it is, by several threads; fd -1 only sums them."""
        if not chosen.any() or (fd < 0 and not self.want_crc):
            return
        row, address, nbytes, offset = self.extents[:, chosen].copy()
        crc = np.zeros(len(row), dtype=np.int64)
        self._native(fd, address, nbytes, offset, crc)
        self.crc[row] = crc
        for i in np.flatnonzero(row[1:] == row[:-1]).tolist():  # a record of several extents
            crc[i + 1] = _crc32.combine(int(crc[i]), int(crc[i + 1]), int(nbytes[i + 1]))
            self.crc[row[i + 1]] = crc[i + 1]

    def _native(self, fd, address, nbytes, offset, crc, owner=None):
        """Write or sum memory that lives as long as ``self`` and ``owner``: the thread that works on it holds both."""

        def write(num_threads, owner=owner):
            # A descriptor of its own, lest an interrupted save closes the one that is written to, and it becomes another.
            own = None if fd < 0 else Owned(os.dup, fd)
            return _write.write(
                own.fd if own else -1,
                address,
                nbytes,
                offset + self.destination.base,
                crc if self.want_crc else None,
                self.control,
                kernel=self.kernel,
                num_threads=num_threads,
            )

        def cancel():
            self.control[STOP] = 1

        tell = self._report if self.tell and fd >= 0 else None
        error = workers.run(write, int(nbytes.sum()), self.threads, cancel, tell)
        if error:
            raise OSError(error, os.strerror(error), self.destination.name)

    def _write_staged(self, row, block, fd):
        """A record that is made piece by piece."""
        at = int(self.layout.offset[row])
        for piece in block.staged():
            crc = np.zeros(1, dtype=np.int64)
            columns = [np.array([n], dtype=np.int64) for n in (piece.ctypes.data, piece.nbytes, at)]
            self._native(fd, *columns, crc, piece)
            self.crc[row] = _crc32.combine(int(self.crc[row]), int(crc[0]), piece.nbytes)
            at += piece.nbytes

    # -- what stands around them

    def _texts(self):
        """{row: content} of the records that are no storages; the last tells this archive from others by all the rest."""
        archive, last = self.archive, len(self.archive.names) - 1
        texts = dict(archive.texts)
        self._sum(texts)
        texts[last] = serialization_id(archive.names[:last], self.crc[:last])
        self._sum({last: texts[last]})
        return texts

    def _sum(self, texts):
        for row, text in texts.items():
            self.crc[row] = _crc32.crc32(text) if self.want_crc else 0

    def _frames(self, texts, by_position):
        """Yields calls that write, in order: headers with texts and small storages among them; large ones where that was not done."""
        layout = self.layout
        columns = layout.columns(self.crc, self._addresses(texts))
        begin = 0
        for row in sorted({*np.flatnonzero(layout.nbytes >= LARGE_NBYTES).tolist(), *self.blocks}):
            at = int(layout.offset[row])
            yield from self._runs(columns, begin, at)
            if row in texts:
                yield functools.partial(self._put, texts[row], at)
            elif not by_position:
                yield functools.partial(self._stream, row)
            begin = at + int(layout.nbytes[row])
        yield from self._runs(columns, begin, layout.total)

    def _addresses(self, texts):
        """Where the content of each small record lies in memory, 0 for the others."""
        address = np.zeros(len(self.layout.nbytes), dtype=np.int64)
        small = ~self.large
        address[self.extents[0, small]] = self.extents[1, small]
        for row, text in texts.items():
            if 0 < len(text) < LARGE_NBYTES:
                address[row] = np.frombuffer(text, dtype=np.uint8).ctypes.data
        return address

    def _runs(self, columns, begin, end):
        """Yields calls that write the archive's bytes from ``begin`` to ``end``, some whole records at a time."""
        header = self.layout.header
        while end - begin > GATHERED_NBYTES:
            cut = int(header[np.searchsorted(header, begin + GATHERED_NBYTES, side="right") - 1])
            if cut <= begin:  # what is left is the directory
                break
            yield functools.partial(self._put_run, columns, begin, cut)
            begin = cut
        yield functools.partial(self._put_run, columns, begin, end)

    def _put_run(self, columns, begin, end):
        self._put(self.layout.render(columns, begin, end), begin)

    def _put(self, data, start):
        if self.destination.fd < 0:
            self.destination.write(data)
            return
        write_at(self.destination.fd, self.destination.base + start, data, self.destination.name)

    def _stream(self, row):
        """Write one storage behind what was written so far."""
        block = self.blocks.get(row)
        if block is not None and block.extents is None:
            for piece in block.staged():
                self._stream_piece(piece)
            return
        _, addresses, sizes, _ = self.extents[:, self.extents[0] == row].tolist()
        for address, nbytes in zip(addresses, sizes, strict=True):
            for at in range(0, nbytes, STREAM_NBYTES):
                n = min(STREAM_NBYTES, nbytes - at)
                self._stream_piece(_read.view_of(address + at, n))

    def _stream_piece(self, piece):
        self.destination.write(piece)
        self.control[DONE] += memoryview(piece).nbytes
        self._report()

    def _report(self):
        if self.tell:
            self.tell(min(int(self.control[DONE]), self.total), self.total)
