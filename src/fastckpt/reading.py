"""The storages of a checkpoint into memory: read, or mapped where that is asked for and possible."""

import mmap
import sys

import numpy as np

from .contents import storage_rows
from .dtypes import DTYPES
from .materialize import read_storages
from .plan import roots_of, swap_units
from .records import STORED


class Places:
    """Where storages lie in memory: ``places[spec.index]`` is (owner, byte offset).

    ``verified`` counts the records whose CRC-32 was compared, ``mapped`` those that are a mapping of the file.
    """

    def __init__(self):
        self.of, self.verified, self.read, self.mapped = {}, 0, 0, 0

    def __getitem__(self, index):
        return self.of[index]

    def add_slices(self, storages):
        """Slices of storages lie in their roots."""
        for spec in storages:
            if spec.root is not None and spec.root.index in self.of:
                owner, offset = self.of[spec.root.index]
                self.of[spec.index] = (owner, offset + spec.offset)


def place_storages(contents, storages, tensors, *, verify=True, threads=None, map_file=False, progress=None):
    """Bring storages into memory; ``tensors`` (all that look at them) say how their bytes swap. Returns Places.

    Raises FormatError, ChecksumError, UnsupportedError and OSError.
    """
    places = Places()
    # What is on the meta device has no bytes, and so has an empty storage.
    wanted = [spec for spec in roots_of(storages) if spec.nbytes and spec.location != "meta"]
    rows = storage_rows(contents, wanted)
    swapped = contents.byteorder != sys.byteorder
    units = swap_units(wanted, tensors) if swapped else {}
    if map_file:
        wanted, rows = map_storages(contents, wanted, rows, tensors, units, places)
    allocation, places.verified = read_storages(
        contents.source, contents.records, rows, verify=verify, threads=threads, progress=progress
    )
    places.read = len(rows)
    for spec, owner in zip(wanted, allocation.owners, strict=True):
        places.of[spec.index] = (owner, 0)
        if swapped and units[spec.index] > 1:
            swap(owner, spec.nbytes, units[spec.index])
    places.add_slices(storages)
    return places


def swap(owner, nbytes, unit):
    """Turn the byte order of a storage round, in place."""
    np.frombuffer(owner, dtype=f"u{unit}", count=nbytes // unit).byteswap(inplace=True)


def map_storages(contents, wanted, rows, tensors, units, places):
    """Give storages their place in a private mapping of the file; returns those that must be read instead.

    What is deflated, swapped or not aligned to the items of a tensor in it cannot be used where it lies.
    """
    source, records = contents.source, contents.records
    if source.fd < 0 or not source.nbytes:
        return wanted, rows
    itemsize = {spec.index: DTYPES[spec.dtype].itemsize for spec in wanted}
    for tensor in tensors:
        root = tensor.storage if tensor.storage.root is None else tensor.storage.root
        itemsize[root.index] = max(itemsize.get(root.index, 1), DTYPES[tensor.dtype].itemsize)
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
    mapping = mmap.mmap(source.fd, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    if len(mapping) < source.base + source.nbytes:
        raise source.short(0, source.nbytes, max(0, len(mapping) - source.base))
    left = []
    for i, spec in enumerate(wanted):
        offset = source.base + int(records.offset[rows[i]])
        unfit = records.method[rows[i]] != STORED or units.get(spec.index, 1) > 1 or offset % itemsize[spec.index]
        if unfit:
            left.append(i)
        else:
            places.of[spec.index] = (mapping, offset)
            places.mapped += 1
    return [wanted[i] for i in left], rows[left]
