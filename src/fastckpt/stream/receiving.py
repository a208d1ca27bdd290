"""The storages of a stream into memory, group by group as they arrive, and the object that they belong to."""

import sys

import numpy as np

from .. import _crc32
from .._flow import Flow
from .._read import view_of
from .._spec import TensorSpec
from .._tree import substitute
from ..contents import storage_rows
from ..errors import ChecksumError
from ..loading import Reader
from ..memory import allocate
from ..nodes import duplicate
from ..plan import root_of, roots_of, swap_units, with_bytes
from ..reading import Places, swap
from ..selection import index_of, specs_in
from .contents import bounded


class Arrival:
    """Storages of a stream on their way to memory.

    ``wanted`` are the StorageSpecs that get memory of their own, in ``places``; ``parts`` says of others, by the row of their
    record, which bytes of it go where: [(start, nbytes, address)], sorted, without overlap. What nobody wants is dropped.
    """

    def __init__(self, contents, wanted, parts=None, limits=None, tell=None):
        self.contents, self.inlet, self.layout = contents, contents.inlet, contents.layout
        self.tell, self._flow = tell, None
        self.places = Places(len(contents.unpickled.storages))
        address = self._take_memory(wanted, limits)
        columns = self._columns(address, parts or {})
        self._huge = None if parts else self._huge  # what they go to is in use
        self.segments = self.layout.segments(*columns)
        self.swapped = contents.byteorder != sys.byteorder
        self._swaps = self._units() if self.swapped else {}

    def _take_memory(self, wanted, limits):
        """The address of each record, 0 where it is not wanted as a whole."""
        contents, address = self.contents, np.zeros(len(self.contents.records), dtype=np.int64)
        self.rows = rows = storage_rows(contents, wanted)
        nbytes = self.layout.nbytes[rows]
        # Memory that is taken here is not touched before its bytes arrive; but a sender may not claim any amount.
        bounded(self.inlet, sum(nbytes.tolist()), "the storages", limits)
        order = np.argsort(rows, kind="stable")
        allocation = allocate(nbytes[order])
        self._huge = allocation.huge
        address[rows[order]] = allocation.address
        for i, owner in zip(order.tolist(), allocation.owners, strict=True):
            self.places.owners[wanted[i].index] = owner
            self.places.address[wanted[i].index] = address[rows[i]]
        return address

    def _columns(self, address, parts):
        """(record, address, nbytes) of each segment of memory."""
        records = np.arange(len(address))
        if not parts:
            return records, address, self.layout.nbytes
        table = []
        for row, nbytes in enumerate(self.layout.nbytes.tolist()):
            at = 0
            for start, n, target in parts.get(row, ()):
                table += [(row, 0, start - at)] * (start > at) + [(row, target, n)]
                at = start + n
            if at < nbytes or not nbytes:
                table.append((row, int(address[row]), nbytes - at))
        return np.array(table, dtype=np.int64).reshape(-1, 3).T.copy()

    def _units(self):
        """{row: bytes that swap together}."""
        unpickled = self.contents.unpickled
        storages = with_bytes(roots_of(unpickled.storages))
        units = swap_units(storages, unpickled.tensors)
        return {self.contents.rows[s.key]: units[s.index] for s in storages if units[s.index] > 1}

    def groups(self):
        """Receive group after group; yields, after each, the range of records that are whole now, and right.

        Raises FormatError where the stream ends, ChecksumError, and what the system raises.
        """
        layout, segments = self.layout, self.segments
        kernel = _crc32.kernel_id(None)
        flow = self._flow = Flow(segments.address, segments.nbytes, segments.gap,
                                 segments.crc if layout.sums else None, kernel, self._huge)  # fmt: skip
        begin, first = 0, 0
        for end, last in zip(layout.ends.tolist(), segments.ends.tolist(), strict=True):
            self.inlet.receive(flow, last, self.name_of, self.tell)
            if layout.sums:
                self._compare(begin, end, first, last - 1)
            if self._swaps:
                self._swap(first, last)
            yield range(begin, end)
            begin, first = end, last

    def begun(self):
        """How many records have come to memory, the last of them in part, checked or not."""
        if self._flow is None:
            return 0
        segments, row = self.segments, self._flow.row
        before = int(segments.nbytes[:row].sum() + segments.gap[:row].sum())
        row += self._flow.done > before
        return int(segments.records[:row].max(initial=-1)) + 1

    def name_of(self, segment):
        """What a message calls a segment."""
        row = int(self.segments.records[segment]) if segment < len(self.segments.records) else -1
        return f"record {self.contents.records.names[row]!r}" if row >= 0 else "the sums of a group"

    def _compare(self, begin, end, first, last):
        """Compare the sums of records with what the sender says; first and last are their segments."""
        segments = self.segments
        crc = segments.crc[first:last]
        if last - first != end - begin:
            crc = self._joined(begin, end, first, last)
        said = segments.said[begin:end]
        if self.swapped:
            said = said.byteswap()
        bad = np.flatnonzero(crc != said)
        if len(bad):
            row = begin + int(bad[0])
            actual, expected = int(crc[bad[0]]), int(said[bad[0]])
            raise ChecksumError(
                f"{self.inlet.name}: record {self.contents.records.names[row]!r} at byte {self._offset(row)}: CRC-32 is {actual:08x}, "
                f"the sender says {expected:08x}; it was damaged on the way",
                path=self.inlet.name,
                record=self.contents.records.names[row],
                offset=self._offset(row),
                actual=actual,
                expected=expected,
            )

    def _joined(self, begin, end, first, last):
        """The sums of records that went to several places."""
        segments, crc = self.segments, [0] * (end - begin)
        for i in range(first, last):
            row = int(segments.records[i]) - begin
            crc[row] = _crc32.combine(crc[row], int(segments.crc[i]), int(segments.nbytes[i]))
        return np.array(crc, dtype=np.uint32)

    def _offset(self, row):
        """Where a record begins in the stream."""
        segments = self.segments
        before = int(np.flatnonzero(segments.records == row)[0])
        return self.contents.start + int(
            segments.nbytes[:before].sum() + segments.gap[:before].sum()
        )

    def _swap(self, first, last):
        segments = self.segments
        for i in range(first, last):
            unit = self._swaps.get(int(segments.records[i]))
            if unit and segments.address[i]:
                nbytes = int(segments.nbytes[i])
                swap(view_of(int(segments.address[i]), nbytes), nbytes, unit)

    def total(self):
        """All bytes behind the head."""
        return int(self.segments.nbytes.sum() + self.segments.gap.sum())


class StreamReader(Reader):
    """A Reader whose storages come out of a stream, all of them in one go. ``tell(done, total)`` is told how far that is."""

    def __init__(self, contents, framework, unknown, map_location, limits=None, tell=None):
        super().__init__(contents, framework, unknown, map_location)
        self.limits, self.tell = limits, tell

    def arrival(self, wanted=None, parts=None):
        """The Arrival of these storages, or of all that have bytes."""
        if wanted is None:
            wanted = with_bytes(roots_of(self.contents.unpickled.storages))
        if self.placement is not None and self.placement.reads_nothing:
            wanted = []
        arrival = Arrival(self.contents, wanted, parts, self.limits)
        if self.tell:
            total = arrival.total()
            arrival.tell = lambda done: self.tell(done, total)
        return arrival

    def bridge(self, storages):
        arrival = self.arrival()
        for _ in arrival.groups():
            pass
        return self.empty_bridge(arrival.places)

    def iterate(self):
        """Yields (name, tensor) as soon as the storages of a tensor are whole; what nobody holds then is let go of."""
        unpickled = self.contents.unpickled
        self.refuse(unpickled.unknown)
        waiting = Waiting(self.contents, index_of(unpickled.obj))
        arrival = self.arrival(
            [spec for spec in unpickled.storages if spec.index in waiting.wanted]
        )
        bridge = self.empty_bridge(arrival.places)
        maker = Maker(bridge, unpickled, self.limits)
        yield from maker.make(waiting.take(-1))
        for records in arrival.groups():
            for row in records:
                if row in waiting.last:
                    yield from maker.make(waiting.take(row))
            for index in waiting.done_with(records):
                arrival.places.owners[index] = None
                bridge.forget(index)


class Waiting:
    """The tensors of a stream, by the record that each waits for last: {row: [(name, leaf)]}, -1 for none."""

    def __init__(self, contents, names):
        self.last, self._drop = {}, {}
        rows, last_use = contents.rows, {}
        for name, leaf in names.items():
            storages = [leaf.storage] if type(leaf) is TensorSpec else specs_in([leaf])[0]
            indices = {root_of(s).index: rows[root_of(s).key] for s in with_bytes(storages)}
            row = max(indices.values(), default=-1)
            self.last.setdefault(row, []).append((name, leaf))
            for index in indices:
                last_use[index] = max(row, last_use.get(index, -1))
        self.wanted = last_use.keys()
        for index, row in last_use.items():
            self._drop.setdefault(row, []).append(index)

    def take(self, row):
        return self.last.pop(row, ())

    def done_with(self, records):
        """The indices of storages that no tensor waits for any more when these records are there."""
        return [index for row in records for index in self._drop.pop(row, ())]


class Maker:
    """Makes tensors one after the other, of which each leaf of the object describes one."""

    def __init__(self, bridge, unpickled, limits):
        self.bridge, self.made = bridge, [None] * len(unpickled.tensors)
        self.limits = limits

    def make(self, named):
        """Yields (name, tensor) for (name, leaf)."""
        for name, leaf in named:
            if type(leaf) is TensorSpec:
                yield name, self.bridge.tensors([leaf])[0]
                continue
            leaves = duplicate([leaf])
            tensors = specs_in(leaves)[1]
            for spec, tensor in zip(tensors, self.bridge.tensors(tensors), strict=True):
                self.made[spec.index] = tensor
            yield name, substitute(leaves, self.bridge, self.made, self.limits)[0]
            for spec in tensors:
                self.made[spec.index] = None
