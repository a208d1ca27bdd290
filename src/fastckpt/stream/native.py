"""Our own format: a header, the sizes of all storages, the pickle, then the storages with their sums. See docs/format.md."""

import sys

import numpy as np

from .._crc32 import crc32
from .._unpickler import PIDS_ZIP, unpickle
from ..errors import ChecksumError, UnsupportedError
from ..importing import importing
from .contents import Contents, bounded, error
from .layout import ALIGNMENT, Layout
from .sending import Outgoing

MAGIC = b"\x93FCKPTS\n"
VERSION = 1
WITH_SUMS, BIG_ENDIAN = 1, 2  # flags

HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u2"),
        ("flags", "<u2"),
        ("pickle_crc32", "<u4"),
        ("pickle_nbytes", "<u8"),
        ("records", "<u8"),
        ("data_nbytes", "<u8"),
        ("table_crc32", "<u4"),
        ("reserved", "V16"),
        ("header_crc32", "<u4"),
    ]
)
SUMMED_NBYTES = HEADER.itemsize - 4  # all but the sum of it
SIZE = np.dtype("<i8")  # of one storage, in the table


def write(obj, *, crc32=True, pickle_protocol=2):
    """What is Outgoing for an object."""
    with importing:
        from ..describing import describe

    described = describe(obj, pickle_protocol)
    head = head_of(described.pickle, described.nbytes, crc32)
    layout = Layout(described.nbytes, ALIGNMENT, crc32)
    return Outgoing(head, described.address, layout, described.blocks, described)


def head_of(pickled, nbytes, with_sums):
    table = np.array(nbytes, dtype=SIZE).tobytes()
    header = np.zeros((), dtype=HEADER)
    header["magic"], header["version"] = MAGIC, VERSION
    header["flags"] = WITH_SUMS * with_sums | BIG_ENDIAN * (sys.byteorder == "big")
    header["pickle_nbytes"], header["pickle_crc32"] = len(pickled), crc32(pickled)
    header["records"], header["table_crc32"] = len(nbytes), crc32(table)
    header["data_nbytes"] = sum(map(int, nbytes))
    header["header_crc32"] = crc32(header.tobytes()[:SUMMED_NBYTES])
    return b"".join([header.tobytes(), filled_up(table), filled_up(pickled)])


def filled_up(data):
    return data + bytes(-len(data) % ALIGNMENT)


def read(inlet, begin, limits, tolerant):
    """Contents of a stream that begins with the bytes ``begin``, which were read from ``inlet``."""
    header = read_header(inlet, begin)
    count, with_sums = int(header["records"]), bool(header["flags"] & WITH_SUMS)
    table = read_part(
        inlet, count * SIZE.itemsize, header["table_crc32"], "the table of sizes", limits
    )
    nbytes = np.frombuffer(table, dtype=SIZE).astype(np.int64)
    total = int(header["data_nbytes"])
    if len(nbytes) and (nbytes.min() < 0 or sum_of(nbytes) != total):
        raise error(inlet, f"the sizes of its {count} storages do not add up to {total} bytes")
    offset = inlet.position
    pickled = read_part(
        inlet, int(header["pickle_nbytes"]), header["pickle_crc32"], "the pickle", limits
    )
    where = f"{inlet.name}: the pickle"
    unpickled = unpickle(
        pickled, pids=PIDS_ZIP, where=where, offset=offset, limits=limits, tolerant=tolerant
    )
    # Names, and all else that there is for each, take a hundred times the bytes of a row of the table.
    if count > len(unpickled.storages):
        raise error(
            inlet,
            f"{count} storages are to come, and the pickle names {len(unpickled.storages)}; each should have a name in it",
        )
    names = [str(i) for i in range(count)]  # which are the keys, too
    rows = {key: row for row, key in enumerate(names)}
    layout = Layout(nbytes, ALIGNMENT, with_sums)
    byteorder = "big" if header["flags"] & BIG_ENDIAN else "little"
    return Contents(inlet, unpickled, pickled, names, rows, layout, byteorder)


def sum_of(nbytes):
    """The sum of sizes that are not negative, which may not fit into 64 bits."""
    return (int((nbytes >> 32).sum()) << 32) + int((nbytes & 0xFFFFFFFF).sum())


def read_header(inlet, begin):
    """The header, known to be one of ours."""
    data = bytes(begin) + bytes(inlet.read(HEADER.itemsize - len(begin), "the header"))
    header = np.frombuffer(data, dtype=HEADER)[0]
    if (version := int(header["version"])) != VERSION:
        raise error(
            inlet,
            f"it is a stream of version {version}, and {VERSION} is known; a newer release may read it",
            UnsupportedError,
        )
    compare(inlet, data[:SUMMED_NBYTES], header["header_crc32"], "the header")
    if header["flags"] & ~np.uint16(WITH_SUMS | BIG_ENDIAN) or any(header["reserved"].tobytes()):
        raise error(
            inlet,
            "its header asks for what is not known; a newer release may read it",
            UnsupportedError,
        )
    if max(int(header["records"]) * SIZE.itemsize, int(header["data_nbytes"])) > 1 << 62:
        raise error(inlet, "its header has sizes that cannot be")
    return header


def read_part(inlet, nbytes, crc, what, limits):
    """One part of the head, with the zeros behind it."""
    bounded(inlet, nbytes, what, limits)
    data = inlet.read(nbytes, what)
    compare(inlet, data, crc, what)
    inlet.read(-nbytes % ALIGNMENT, what)
    return data


def compare(inlet, data, expected, what):
    actual, expected = crc32(data), int(expected)
    if actual != expected:
        raise error(
            inlet,
            f"CRC-32 of {what} is {actual:08x}, the sender says {expected:08x}; it was damaged on the way",
            ChecksumError,
            actual=actual,
            expected=expected,
        )
