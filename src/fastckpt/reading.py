"""The storages of a checkpoint into memory: read, or mapped where that is asked for and possible."""

import os
import sys

import numpy as np

from ._memory import map_file
from ._plan import largest_items
from .contents import storage_rows
from .materialize import read_storages
from .memory import allocate
from .plan import roots_of, swap_units, with_bytes
from .records import STORED


class Places:
    """Where storages lie in memory, in columns by storage index: ``owners`` (None: nowhere) and ``address``.

    ``places[index]`` is (owner, byte offset in it). ``verified`` counts the records whose CRC-32 was compared, ``read`` those
    that were read, ``mapped`` those that are a mapping of the file.
    """

    def __init__(self, count=0):
        self.owners = [None] * count
        self.address = np.zeros(count, dtype=np.int64)
        self.offsets = {}  # of storages that do not begin where their owner does
        self.mapping, self.mapping_address = None, 0
        self.verified = self.read = self.mapped = 0

    def __getitem__(self, index):
        owner = self.owners[index]
        if owner is not None and owner is self.mapping:
            return owner, int(self.address[index]) - self.mapping_address
        return owner, self.offsets.get(index, 0)

    def map(self, mapping, address, indices, offsets):
        """Let storages lie in a mapping of the file, which begins at ``address``, at byte ``offsets`` of it."""
        self.mapping, self.mapping_address = mapping, address
        self.address[indices] = self.mapping_address + offsets
        for index in indices.tolist():
            self.owners[index] = mapping
        self.mapped = len(indices)

    def add_slices(self, storages):
        """Slices of storages lie in their roots."""
        for spec in storages:
            if spec.root is not None and self.owners[spec.root.index] is not None:
                owner, offset = self[spec.root.index]
                self.owners[spec.index] = owner
                self.offsets[spec.index] = offset + spec.offset
                self.address[spec.index] = self.address[spec.root.index] + spec.offset


def place_storages(
    contents,
    storages,
    tensors,
    *,
    verify=True,
    threads=None,
    map_file=False,
    allocate=allocate,
    progress=None,
):
    """Bring storages into memory; ``tensors`` (all that look at them) say how their bytes swap. Returns Places.

    ``map_file`` maps what can be used where it lies ("willneed": and has the system read it ahead), ``allocate`` gives
    the memory for the rest. Raises FormatError, ChecksumError, UnsupportedError and OSError.
    """
    places = Places(len(contents.unpickled.storages))
    wanted = with_bytes(roots_of(storages))
    rows = storage_rows(contents, wanted)
    swapped = contents.byteorder != sys.byteorder
    units = swap_units(wanted, tensors) if swapped else {}
    if map_file:
        wanted, rows = map_storages(
            contents, wanted, rows, tensors, swapped, places, map_file == "willneed"
        )
    allocation, places.verified = read_storages(
        contents.source,
        contents.records,
        rows,
        verify=verify,
        threads=threads,
        allocate=allocate,
        progress=progress,
    )
    places.read = len(rows)
    indices = [spec.index for spec in wanted]
    places.address[indices] = allocation.address
    for index, owner in zip(indices, allocation.owners, strict=True):
        places.owners[index] = owner
    if swapped:
        for spec, owner in zip(wanted, allocation.owners, strict=True):
            if units[spec.index] > 1:
                swap(owner, spec.nbytes, units[spec.index])
    if len(storages) != len(wanted) + places.mapped:
        places.add_slices(storages)
    return places


def swap(owner, nbytes, unit):
    """Turn the byte order of a storage round, in place."""
    np.frombuffer(owner, dtype=f"u{unit}", count=nbytes // unit).byteswap(inplace=True)


def map_storages(contents, wanted, rows, tensors, swapped, places, read_ahead=False):
    """Give storages their place in a private mapping of the file; returns those that must be read instead."""
    source, records = contents.source, contents.records
    if source.fd < 0 or not source.nbytes:
        return wanted, rows
    there = os.fstat(source.fd).st_size - source.base
    if there < source.nbytes:
        raise source.short(0, source.nbytes, max(0, there))
    mapping, address = map_file(source.fd, source.base + source.nbytes)
    itemsize = np.ones(len(places.owners), dtype=np.int64)
    largest_items(wanted, tensors, itemsize)
    indices = np.array([spec.index for spec in wanted], dtype=np.int64)
    fit = usable_in_place(contents, rows, itemsize[indices], swapped)
    offset = source.base + records.offset[rows[fit]]
    if read_ahead and len(offset):
        mapping.will_need(int(offset.min()), int((offset + records.nbytes[rows[fit]]).max()))
    places.map(mapping, address, indices[fit], offset)
    return [wanted[i] for i in np.flatnonzero(~fit)], rows[~fit]


def usable_in_place(contents, rows, itemsize, swapped):
    """Which records hold numbers as a tensor wants them: not deflated, aligned to the items, in this machine's order."""
    source, records = contents.source, contents.records
    offset = source.base + records.offset[rows]
    fit = (records.method[rows] == STORED) & (offset % itemsize == 0)
    return fit & (itemsize == 1) if swapped else fit
