"""Every byte of a small file of each container, changed: an error of ours or, where there are checksums, the right object.

A legacy stream and a tar have none: another object may come out, and nothing worse.
"""

import warnings

import pytest

import fastckpt
from fastckpt.errors import ChecksumError
from smallfiles import (
    FILES,
    FLOATS,
    LONGS,
    REFUSED,
    STREAMS,
    TARS,
    ZIPS,
    is_expected,
    outcome,
)

# In turn, so that the bytes of a field meet all of them.
FEW = (0x01, 0x80, 0x20, 0x02, 0x40, 0x04, 0x10, 0x08)


def read_lazily(data):
    with fastckpt.open(data, unknown="error") as ckpt:
        assert str(ckpt.info)
        return {name: ckpt[name].read() for name in ckpt} | {"step": ckpt.tree["step"]}


def listed(data):
    with fastckpt.open(data) as ckpt:
        return [(name, tensor.shape, tensor.dtype, tensor.nbytes) for name, tensor in ckpt.items()]


def in_order(loaded):
    """A lazy reading has the tensors first, in the order of the object."""
    names = ("w", "n", "step")
    return {name: loaded[name] for name in names} if set(loaded) == set(names) else loaded


def load(data):
    return fastckpt.load(data, map_location="cpu")


def each(data, masks=None, step=1):
    """(position, the file with that byte changed), for ``masks`` or for one mask in turn and for all bits."""
    broken = bytearray(data)
    for at in range(0, len(data), step):
        for mask in masks or (FEW[at % 8], 0xFF):
            broken[at] = data[at] ^ mask
            yield at, bytes(broken)
        broken[at] = data[at]


@pytest.fixture(autouse=True)
def quiet():
    """A device of that name may be missing; an escape in a text may be invalid."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def check_zip(data, flips, read=load):
    for at, broken in flips:
        loaded = outcome(read, broken)
        right = loaded is REFUSED or is_expected(in_order(loaded))
        assert right, f"byte {at} of {len(data)}: {loaded}"


def check_any(flips, read=load):
    """No error but ours."""
    for _, broken in flips:
        outcome(read, broken)


@pytest.mark.parametrize("name", ZIPS)
def test_zip(name):
    check_zip(ZIPS[name], each(ZIPS[name]))


@pytest.mark.parametrize("name", ZIPS)
def test_zip_lazily(name):
    check_zip(ZIPS[name], each(ZIPS[name], step=5), read_lazily)


@pytest.mark.parametrize("name", [*STREAMS, *TARS])
def test_without_checksums(name):
    check_any(each(FILES[name].rstrip(b"\0")))


@pytest.mark.parametrize("name", FILES)
def test_listed(name):
    """Nothing is read but what describes the tensors."""
    check_any(each(FILES[name], step=5), listed)


@pytest.mark.parametrize("name", FILES)
def test_mapped(name, tmp_path):
    """Numbers are not verified then; where they lie is."""
    path = tmp_path / "model.pt"

    def load_mapped(data):
        path.write_bytes(data)
        return str(fastckpt.load(path, mmap=True, map_location="cpu"))

    check_any(each(FILES[name], step=5), load_mapped)


@pytest.mark.parametrize("name", [name for name in ZIPS if name != "deflated"])
def test_numbers_of_a_zip(name):
    """A changed number is always seen, and the record is named."""
    data = ZIPS[name]
    for record, numbers in (("data/0", FLOATS), ("data/1", LONGS)):
        if name == "big-endian":
            numbers = b"".join(numbers[i : i + 1] for i in order(record, len(numbers)))
        start = data.index(numbers)
        for at, broken in each(data[start : start + len(numbers)]):
            with pytest.raises(ChecksumError, match=rf"record '{record}' .*CRC-32") as caught:
                load(data[:start] + broken + data[start + len(numbers) :])
            assert caught.value.record == record, at


def order(record, nbytes):
    """Where the bytes of a little-endian record come from in a big-endian one."""
    unit = {"data/0": 4, "data/1": 8}[record]
    return [i // unit * unit + unit - 1 - i % unit for i in range(nbytes)]


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_every_value_of_every_byte(name):
    data = FILES[name].rstrip(b"\0") if name in TARS else FILES[name]
    flips = each(data, range(1, 256), step=1 if len(data) < 900 else 7)
    check_zip(data, flips) if name in ZIPS else check_any(flips)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_two_bytes(name):
    """All pairs that are near each other, one bit each."""
    data = FILES[name].rstrip(b"\0")
    for distance in (1, 2, 3, 4, 8, 16):
        flips = (
            (at, flip(flip(data, at, 1), at + distance, 1)) for at in range(len(data) - distance)
        )
        check_zip(data, flips) if name in ZIPS else check_any(flips)


def flip(data, at, mask):
    return data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]
