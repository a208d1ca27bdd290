"""Extents into memory: descriptor and bytes, serial and parallel, every boundary, and every status."""

import errno
import os
import zlib

import numpy as np
import pytest

from fastckpt import _crc32, _read

UNIT, CHUNK = 4096, 1024  # small ones, so that small data crosses them
BOUNDARIES = [n + d for n in (CHUNK, UNIT, 2 * UNIT) for d in (-1, 0, 1)]


def columns(*values):
    return [np.array(column, dtype=np.int64) for column in values]


def laid_out(sizes, gap=0):
    """Random bytes that hold extents of ``sizes``, ``gap`` bytes apart, and their offsets."""
    offsets = np.concatenate([[0], np.cumsum(np.array(sizes, dtype=np.int64) + gap)]).astype(
        np.int64
    )
    return np.random.default_rng(len(sizes)).bytes(int(offsets[-1])), offsets[:-1]


class Native:
    """_read.fill over a file or memory, with results as attributes."""

    def __init__(
        self, origin, offsets, sizes, *, keep=True, want_crc=True, stop=0, misaligned=0, **options
    ):
        offset, nbytes = columns(offsets, sizes)
        self.memory = np.zeros(
            misaligned + max(0, int(np.clip(nbytes, 0, 1 << 24).sum())) + 1, np.uint8
        )
        starts = (
            misaligned + np.concatenate([[0], np.cumsum(nbytes)[:-1]]).astype(np.int64)
            if len(nbytes)
            else nbytes
        )
        address = starts + self.memory.ctypes.data if keep else np.zeros_like(offset)
        self.crc = np.full(len(offset), -7, dtype=np.int64)
        self.status = np.full(len(offset), -7, dtype=np.int64)
        self.control = np.array([0, stop], dtype=np.int64)
        fd, view, there = (
            (-1, origin, len(origin)) if isinstance(origin, bytes) else (origin, None, 1 << 30)
        )
        crc = self.crc if want_crc else None
        options = {
            "unit_nbytes": UNIT,
            "chunk_nbytes": CHUNK,
            "kernel": _crc32.kernel_id(),
        } | options
        self.failed = _read.fill(
            fd, 0, view, there, offset, nbytes, address, crc, self.status, self.control, **options
        )
        self.pieces = [
            bytes(self.memory[s : s + n])
            for s, n in zip(starts.tolist(), nbytes.tolist(), strict=True)
        ]


@pytest.fixture(params=["descriptor", "memory"])
def origin(request, tmp_path):
    """Turns bytes into what _read.fill reads them from."""
    opened = []

    def make(data):
        if request.param == "memory":
            return data
        path = tmp_path / "data.bin"
        path.write_bytes(data)
        opened.append(os.open(path, os.O_RDONLY))
        return opened[-1]

    yield make
    for fd in opened:
        os.close(fd)


LISTS = {
    "none": [],
    "empty": [0],
    **{str(n): [n] for n in BOUNDARIES},
    "boundaries": [0, 1, *BOUNDARIES, 1, 0],
    "small ones": [100] * 500,
    "small and large": [1, 3 * UNIT, 2, 5 * UNIT + 1, 3, 0, 4] * 5,
    "neighbours' limit": [32768, 32769, 32767] * 3,
}


@pytest.mark.parametrize("sizes", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("gap", [0, 64, 5000])
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_extents(origin, sizes, gap, num_threads):
    data, offsets = laid_out(sizes, gap)
    source = origin(data)
    wanted = [data[o : o + n] for o, n in zip(offsets, sizes, strict=True)]
    for options in ({}, {"misaligned": 13}, {"chunk_nbytes": 1 << 18, "unit_nbytes": 1 << 23}):
        done = Native(source, offsets, sizes, num_threads=num_threads, **options)
        assert done.failed == 0
        assert not done.status.any()
        assert done.pieces == wanted
        assert done.crc.tolist() == [zlib.crc32(piece) for piece in wanted]
        assert done.control.tolist() == [sum(sizes), 0]
    summed = Native(source, offsets, sizes, num_threads=num_threads, keep=False)
    assert summed.crc.tolist() == done.crc.tolist()
    assert not summed.memory.any()
    unsummed = Native(source, offsets, sizes, num_threads=num_threads, want_crc=False)
    assert unsummed.pieces == wanted
    assert set(unsummed.crc) <= {-7}


@pytest.mark.parametrize(
    ("offsets", "sizes"),
    [
        ([0, 0, 0], [500, 500, 20]),
        ([0, 100, 50, 400], [300, 300, 10, 1]),
        ([5000, 4000, 3000, 0], [1000, 1000, 1000, 9000]),
    ],
    ids=["the same", "overlapping", "backwards"],
)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_extents_in_no_order(origin, offsets, sizes, num_threads):
    data, _ = laid_out([10_000])
    done = Native(origin(data), offsets, sizes, num_threads=num_threads)
    assert done.pieces == [data[o : o + n] for o, n in zip(offsets, sizes, strict=True)]


@pytest.mark.parametrize("kernel", _crc32.kernels())
def test_kernels_agree(origin, kernel):
    sizes = [1, 100, 5000, 3 * UNIT + 7]
    data, offsets = laid_out(sizes, 30)
    done = Native(origin(data), offsets, sizes, kernel=_crc32.kernel_id(kernel))
    assert done.crc.tolist() == [
        zlib.crc32(data[o : o + n]) for o, n in zip(offsets, sizes, strict=True)
    ]


class TestStatus:
    @pytest.mark.parametrize(
        ("offset", "nbytes"),
        [(0, 101), (100, 1), (101, 0), (-1, 1), (0, -1), (2**62, 2**62), (1, 2**63 - 1)],
        ids=[
            "a byte more",
            "past",
            "empty, past",
            "negative",
            "negative size",
            "overflow",
            "overflow at 1",
        ],
    )
    def test_outside_of_memory(self, offset, nbytes):
        address = np.zeros(1, np.int64)
        status = np.zeros(1, np.int64)
        control = np.zeros(2, np.int64)
        data = bytes(100)
        assert (
            _read.fill(
                -1, 0, data, 100, *columns([offset], [nbytes]), address, None, status, control
            )
            == 1
        )
        assert status[0] == _read.STATUS_SHORT
        assert control[0] == 0

    @pytest.mark.parametrize("num_threads", [1, 3])
    def test_the_file_ends(self, tmp_path, num_threads):
        (tmp_path / "f").write_bytes(bytes(10_000))
        with open(tmp_path / "f", "rb") as f:
            done = Native(f.fileno(), [0, 2000, 9990], [1000, 1000, 20], num_threads=num_threads)
        assert done.failed >= 1
        assert done.status[2] == _read.STATUS_SHORT
        assert set(done.status[:2]) <= {_read.STATUS_OK, _read.STATUS_STOPPED}

    def test_the_one_of_neighbours_that_fails_is_named(self, tmp_path):
        (tmp_path / "f").write_bytes(bytes(250))
        with open(tmp_path / "f", "rb") as f:
            done = Native(f.fileno(), [0, 100, 200, 300], [100] * 4)
        assert done.status.tolist() == [0, 0, _read.STATUS_SHORT, _read.STATUS_STOPPED]

    def test_errno(self, tmp_path):
        fd = os.open(tmp_path, os.O_RDONLY)
        try:
            assert Native(fd, [0], [10]).status[0] == errno.EISDIR
        finally:
            os.close(fd)
        assert Native(-1, [0], [10]).status[0] == errno.EBADF

    @pytest.mark.parametrize("num_threads", [1, 3])
    def test_stop(self, origin, num_threads):
        done = Native(
            origin(bytes(50_000)), [0, 30_000], [20_000, 10], stop=1, num_threads=num_threads
        )
        assert done.failed == 2
        assert set(done.status) == {_read.STATUS_STOPPED}
        assert done.control[0] == 0

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"num_threads": 0}, "num_threads=0"),
            ({"unit_nbytes": 3000}, "a power of two"),
            ({"chunk_nbytes": 0}, "chunk_nbytes=0"),
            ({"kernel": 99}, "kernel=99"),
        ],
    )
    def test_wrong_numbers(self, options, words):
        with pytest.raises(ValueError, match=words):
            Native(b"abc", [0], [3], **options)

    def test_wrong_columns(self):
        offset, nbytes, control = columns([0, 1], [1], [0, 0])
        with pytest.raises(ValueError, match="column 1 has 8 bytes"):
            _read.fill(-1, 0, b"abc", 3, offset, nbytes, offset, None, offset.copy(), control)


def test_view_of():
    array = np.arange(10, dtype=np.uint8)
    view = _read.view_of(array.ctypes.data + 2, 3)
    view[:] = b"abc"
    assert bytes(array[1:6]) == b"\x01abc\x05"
    assert len(_read.view_of(0, 0)) == 0
    with pytest.raises(ValueError, match="no such memory"):
        _read.view_of(0, 1)
    with pytest.raises(ValueError, match="no such memory"):
        _read.view_of(array.ctypes.data, -1)
