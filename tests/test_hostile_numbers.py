"""Numbers at the edges of 8, 16, 32 and 64 bits and far beyond, in every field of every container that holds one.

Each is an error of ours or changes nothing that is read, and takes no memory but what the file can back.
"""

import resource
import struct
import tracemalloc
import warnings
import zlib

import numpy as np
import pytest

import fastckpt
import streamcraft
from fastckpt.errors import FormatError
from picklecraft import craft, torch_file
from smallfiles import (
    FLOATS,
    LONGS,
    REFUSED,
    ZIPS,
    is_expected,
    legacy_file,
    outcome,
    tar_file,
    zip_file,
    zip_tensor,
)
from streamcraft import Pid, floats, legacy_stream, tar_checkpoint, tar_storage, tar_tensor
from support import SANITIZED
from zipcraft import Entry, archive, checkpoint

EDGES = sorted(
    {(1 << bits) + more for bits in (0, 7, 8, 15, 16, 31, 32, 62, 63, 64) for more in (-1, 0, 1)}
)
NUMBERS = sorted({sign * edge for edge in EDGES for sign in (1, -1)})
HUGE = (10**30, -(10**30), 10**5000, -(10**5000))  # the last two have no decimal form, for Python
ROOM = 256 << 20  # bytes of address space that a test may take; what most numbers ask for is more


@pytest.fixture(autouse=True)
def little_memory():
    """Whoever takes memory on the word of a number gets a MemoryError, which is none of our errors."""
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    if not SANITIZED:  # the sanitizer has terabytes of address space
        resource.setrlimit(resource.RLIMIT_AS, (now + ROOM, before[1]))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_the_fixture_bites():
    if not SANITIZED:
        with pytest.raises(MemoryError):
            bytearray(1 << 31)


def load(data):
    return fastckpt.load(data, map_location="cpu")


def refused_or_right(data, where=""):
    loaded = outcome(load, data)
    assert loaded is REFUSED or is_expected(loaded), f"{where}: {loaded}"


# -- fields of a ZIP: (where, how many bytes) behind the signature

STRUCTURES = {
    "local header": (b"PK\3\4", {
        "version": (4, 2), "flags": (6, 2), "method": (8, 2), "time": (10, 2), "date": (12, 2), "crc": (14, 4),
        "stored": (18, 4), "nbytes": (22, 4), "name length": (26, 2), "extra length": (28, 2),
    }),
    "directory entry": (b"PK\1\2", {
        "made by": (4, 2), "version": (6, 2), "flags": (8, 2), "method": (10, 2), "time": (12, 2), "date": (14, 2),
        "crc": (16, 4), "stored": (20, 4), "nbytes": (24, 4), "name length": (28, 2), "extra length": (30, 2),
        "comment length": (32, 2), "disk": (34, 2), "internal": (36, 2), "external": (38, 4), "offset": (42, 4),
    }),
    "zip64 extra": (b"\1\0\x18\0", {"length": (2, 2), "nbytes": (4, 8), "stored": (12, 8), "offset": (20, 8)}),
    "end record": (b"PK\5\6", {
        "disk": (4, 2), "directory disk": (6, 2), "here": (8, 2), "count": (10, 2), "nbytes": (12, 4),
        "offset": (16, 4), "comment length": (20, 2),
    }),
    "zip64 end record": (b"PK\6\6", {
        "size": (4, 8), "made by": (12, 2), "version": (14, 2), "disk": (16, 4), "directory disk": (20, 4),
        "here": (24, 8), "count": (32, 8), "nbytes": (40, 8), "offset": (48, 8),
    }),
    "zip64 locator": (b"PK\6\7", {"disk": (4, 4), "offset": (8, 8), "disks": (16, 4)}),
}  # fmt: skip
FIELDS = [
    pytest.param(signature, *field, id=f"{structure}: {name}")
    for structure, (signature, fields) in STRUCTURES.items()
    for name, field in fields.items()
]


def occurrences(data, signature):
    at = data.find(signature)
    while at >= 0:
        yield at
        at = data.find(signature, at + 1)


def values(was, nbytes):
    """What a field of so many bytes can say, near what it says and at the edges."""
    most = (1 << 8 * nbytes) - 1
    near = {was + more for more in (-1, 1, -16, 16)}
    return sorted({number & most for number in [*NUMBERS, *near]} - {was})


@pytest.mark.parametrize(("signature", "offset", "nbytes"), FIELDS)
def test_zip(signature, offset, nbytes):
    tried = 0
    for name in ("zip", "zip64", "deflated", "big-endian"):
        data = ZIPS[name]
        for at in occurrences(data, signature):
            start, end = at + offset, at + offset + nbytes
            for value in values(int.from_bytes(data[start:end], "little"), nbytes):
                broken = data[:start] + value.to_bytes(nbytes, "little") + data[end:]
                refused_or_right(broken, f"{name}, byte {start}: {value}")
                tried += 1
    assert tried > 20


@pytest.mark.parametrize(
    "signature", [b"PK\1\2", b"PK\3\4"], ids=["directory entry", "local header"]
)
def test_zip_two_fields(signature):
    """Both sizes, or size and offset, as a writer that deceives sets them."""
    fields = STRUCTURES["directory entry" if signature == b"PK\1\2" else "local header"][1]
    pairs = [
        ("stored", "nbytes"),
        ("method", "nbytes"),
        ("name length", "extra length"),
        ("crc", "stored"),
    ]
    data = ZIPS["zip"]
    for at in occurrences(data, signature):
        for first, second in pairs:
            for value in (0, 1, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF):
                broken = bytearray(data)
                for offset, nbytes in (fields[first], fields[second]):
                    number = value & ((1 << 8 * nbytes) - 1)
                    broken[at + offset : at + offset + nbytes] = number.to_bytes(nbytes, "little")
                refused_or_right(bytes(broken), f"byte {at}: {first} and {second} {value}")


# -- inflating

BOMB = bytes(50_000_000)
BOMBS = {
    "a pickle of more bytes than it says": {"data.pkl": (BOMB, len(BOMB) - 1)},
    "a pickle of far more bytes than it says": {"data.pkl": (BOMB, 100)},
    "a pickle of less bytes than it says": {"data.pkl": (b"N.", 2000)},
    "a pickle of more bytes than any stream has": {"data.pkl": (b"N.", 1 << 40)},
    "a version of 50 MB": {"version": (BOMB, 2)},
    "a byte order of 50 MB": {"byteorder": (BOMB, 6)},
    "a storage of more bytes than it says": {"data/0": (BOMB, 8)},
    "a storage of less bytes than it says": {"data/0": (bytes(4), 8)},
}  # fmt: skip


@pytest.mark.parametrize("claims", BOMBS.values(), ids=BOMBS)
def test_bombs(claims):
    records = {"data.pkl": craft([zip_tensor("FloatStorage", 2)]), "byteorder": b"little"}
    entries = [Entry(entry.name, entry.data) for entry in checkpoint([FLOATS], **records)]
    for entry in entries:
        content, nbytes = claims.get(entry.name.decode().partition("/")[2], (None, None))
        if content is not None:
            stream = zlib.compressobj(9, zlib.DEFLATED, -15)
            entry.content = stream.compress(content) + stream.flush()
            entry.method, entry.stored, entry.nbytes = 8, len(entry.content), nbytes
            entry.crc = zlib.crc32(content)
    data = archive(entries)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            load(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # A pickle may have as many bytes as it says, which a stream of that length could hold.
    ((_, said),) = claims.values()
    assert peak < (4 << 20) + (2 * said if said <= len(BOMB) else 0)


def test_empty_blocks_of_deflate():
    """A stream may go on for long and hold nothing."""
    empty = b"\0\0\0\xff\xff"
    data = zip_file(method=8)
    entries = checkpoint([FLOATS, LONGS], root="a/")
    entries[2].content = empty * 20_000 + zlib.compress(FLOATS, 0, -15)
    entries[2].method, entries[2].stored = 8, len(entries[2].content)
    entries[0] = Entry("a/data.pkl", craft({"w": zip_tensor("FloatStorage", 2)}))
    assert load(archive(entries))["w"].tolist() == [1, 2]
    entries[2].content = entries[2].content[: -len(FLOATS) - 5]
    entries[2].stored = len(entries[2].content)
    with pytest.raises(FormatError, match="deflated data ends after 0 of 8 bytes"):
        load(archive(entries))
    assert is_expected(load(data))


# -- tensors

VALUES = [*NUMBERS, *HUGE, True, 1.0, "1", None]
COUNT = 6  # elements of the storage
GOOD = {"numel": COUNT, "offset": 1, "rows": 2, "columns": 2, "row stride": 3, "column stride": 1}


def is_count(value):
    return type(value) is int and 0 <= value < 2**63


def allowed(numel, offset, rows, columns, row_stride, column_stride):
    """The values that a tensor of this geometry has in a storage of 0, 1, 2 ...; REFUSED where it has none."""
    if numel != COUNT or type(numel) is not int:
        return REFUSED
    if not all(map(is_count, (offset, rows, columns, row_stride, column_stride))):
        return REFUSED
    if 0 in (rows, columns):
        return []
    last = offset + (rows - 1) * row_stride + (columns - 1) * column_stride
    if last >= COUNT or rows * columns >= 2**63:
        return REFUSED
    if rows * columns > 100:
        return None  # right, and too large to write down
    return [
        [offset + i * row_stride + j * column_stride for j in range(columns)] for i in range(rows)
    ]


def as_zip(numel, offset, size, stride):
    tensor = zip_tensor("FloatStorage", numel, offset, size, stride)
    return torch_file(craft([tensor]), floats(*range(COUNT)))


def as_legacy(numel, offset, size, stride):
    tensor = streamcraft.tensor(streamcraft.storage("0", numel), size, stride, offset)
    return legacy_stream([tensor], {"0": (COUNT, floats(*range(COUNT)))})


@pytest.mark.parametrize("make", [as_zip, as_legacy], ids=["zip", "legacy"])
@pytest.mark.parametrize("field", GOOD)
def test_geometry(make, field):
    for value in VALUES:
        numbers = {**GOOD, field: value}
        numel, offset, *sizes = numbers.values()
        right = allowed(*numbers.values())
        data = make(numel, offset, tuple(sizes[:2]), tuple(sizes[2:]))
        # A tensor of 2**40 elements in one byte is legal; nothing here makes them.
        loaded = outcome(load, data)
        if right is REFUSED:
            assert loaded is REFUSED, f"{field} {value!r:.40}"
        elif right is not None:
            assert loaded[0].tolist() == (right or loaded[0].tolist()), f"{field} {value!r:.40}"
            assert loaded[0].shape == tuple(sizes[:2])
        listed = outcome(lambda data: [t.shape for t in fastckpt.open(data).values()], data)
        assert listed is REFUSED or right is not REFUSED or numel != COUNT


@pytest.mark.parametrize("field", GOOD)
def test_geometry_of_a_tar(field):
    for value in [number for number in NUMBERS if -(2**63) <= number < 2**63]:
        numbers = {**GOOD, field: value}
        numel, offset, *sizes = numbers.values()
        right = allowed(*numbers.values())
        stored = tar_storage(5, "FloatStorage", floats(*range(COUNT)), numel)
        described = tar_tensor(7, 5, tuple(sizes[:2]), tuple(sizes[2:]), offset)
        loaded = outcome(load, tar_checkpoint([Pid("7")], [described], [stored]))
        if right is REFUSED:
            assert loaded is REFUSED, f"{field} {value}"
        elif right is not None:
            assert loaded[0].tolist() == (right or loaded[0].tolist()), f"{field} {value}"


@pytest.mark.parametrize("member", ["offset", "count"])
@pytest.mark.parametrize("kind", ["legacy", "tar"])
def test_views_of_storages(kind, member):
    """(key, offset, count) of a slice that is a storage of its own."""
    for value in VALUES:
        view = {"offset": 2, "count": 3, member: value}
        offset, count = view.values()
        if kind == "legacy":
            pid = streamcraft.storage("0", COUNT, view=("v", offset, count))
            data = legacy_stream(
                [streamcraft.tensor(pid, (1,))], {"0": (COUNT, floats(*range(COUNT)))}
            )
        else:
            stored = [(5, "FloatStorage", floats(*range(COUNT)), COUNT)]
            data = tar_checkpoint(
                [Pid("7")], [(7, 6, (1,), (1,), 0)], stored, [(6, 5, offset, count)]
            )
        good = is_count(offset) and is_count(count) and offset + count <= COUNT
        loaded = outcome(load, data)
        if not good or not count:
            assert loaded is REFUSED, f"{member} {value!r:.40}"
        else:
            assert loaded[0].tolist() == [offset]


# -- counts of the other containers


@pytest.mark.parametrize("what", ["tensors", "storages"])
def test_counts_of_a_tar(what):
    for value in VALUES:
        data = tar_file(counts={what: value})
        if value == 2 and type(value) is int:
            assert is_expected(load(data))
        else:
            assert outcome(load, data) is REFUSED, f"{value!r:.40}"


def test_dimensions_of_a_tar():
    for value in [number for number in NUMBERS if -(2**31) <= number < 2**31]:
        described = tar_tensor(7, 5, (2,), (1,), 0, ndim=value)
        stored = [(5, "FloatStorage", floats(1, 2), 2)]
        loaded = outcome(load, tar_checkpoint([Pid("7")], [described], stored))
        assert loaded is REFUSED or value == 1


def test_counts_of_a_legacy_stream():
    good = legacy_file()
    at = good.index(struct.pack("<q", 2) + FLOATS)
    for value in values(2, 8):
        assert outcome(load, good[:at] + struct.pack("<Q", value) + good[at + 8 :]) is REFUSED


TAR_NUMBERS = {"mode": 100, "uid": 108, "gid": 116, "size": 124, "mtime": 136, "device": 329}


def sealed(block):
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)


@pytest.mark.parametrize("form", ["octal", "base 256"])
@pytest.mark.parametrize("field", TAR_NUMBERS)
def test_headers_of_a_tar(field, form):
    good = tar_file()
    start, nbytes = TAR_NUMBERS[field], 12 if field in ("size", "mtime") else 8
    for name in (b"pickle", b"tensors", b"storages"):
        at = good.index(name + b"\0")
        for value in [number for number in NUMBERS if number >= 0]:
            text = b"%0*o\0" % (nbytes - 1, value)
            if form == "base 256":
                text = b"\x80" + (value & ((1 << 8 * (nbytes - 1)) - 1)).to_bytes(nbytes - 1, "big")
            broken, block = bytearray(good), bytearray(good[at : at + 512])
            block[start : start + nbytes] = text[:nbytes]
            sealed(block)
            broken[at : at + 512] = block
            loaded = outcome(load, bytes(broken))
            # A shorter member may still hold all that is read of it; nothing else is taken for it.
            assert loaded is REFUSED or is_expected(loaded), f"{name} {field} {value}"


def test_types_of_tar_members():
    good = tar_file()
    for kind in range(256):
        broken, block = bytearray(good), bytearray(good[:512])
        block[156] = kind
        sealed(block)
        broken[:512] = block
        refused_or_right(bytes(broken), f"type {kind}")


def test_numpy_alike():
    """What torch gives for the geometry above, NumPy gives as well."""
    data = as_zip(COUNT, 1, (2, 2), (3, 1))
    assert np.array_equal(fastckpt.load(data, framework="numpy")[0], load(data)[0].numpy())
