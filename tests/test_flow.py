"""Segments of memory on their way in and out, against plain bytes."""

import os
import zlib

import numpy as np
import pytest

from fastckpt._flow import ENDED, Flow

# (bytes, gap) of each segment; reads and writes come in chunks of 256 KiB and 1,024 parts.
SEGMENTS = {
    "none": [],
    "empty": [(0, 0), (0, 0)],
    "one": [(1, 0)],
    "gaps": [(3, 61), (64, 0), (0, 64), (1, 63)],
    "empty_between": [(0, 0), (5, 0), (0, 0), (0, 3), (7, 0), (0, 0)],
    "small_and_large": [(40, 24), (300_000, 32), (31, 33), (262_144, 0), (1, 0)],
    "many": [(n % 7, n % 3) for n in range(3000)],
}


def memory(sizes, seed=0):
    """An array for each size, of bytes that differ."""
    generator = np.random.default_rng(seed)
    return [generator.integers(1, 256, size, dtype=np.uint8) for size in sizes]


def flow_of(arrays, gaps, dropped=()):
    address = np.array(
        [0 if i in dropped else a.ctypes.data for i, a in enumerate(arrays)], dtype=np.int64
    )
    nbytes = np.array([len(a) for a in arrays], dtype=np.int64)
    crc = np.zeros(len(arrays), dtype=np.uint32)
    return Flow(address, nbytes, np.array(gaps, dtype=np.int64), crc), crc


def plain(arrays, gaps):
    return b"".join([a.tobytes() + bytes(gap) for a, gap in zip(arrays, gaps, strict=True)])


def sums(arrays):
    return [zlib.crc32(a.tobytes()) for a in arrays]


@pytest.fixture(params=SEGMENTS)
def segments(request):
    sizes, gaps = (
        zip(*SEGMENTS[request.param], strict=True) if SEGMENTS[request.param] else ((), ())
    )
    return memory(sizes), list(gaps)


def through_file(tmp_path, data=b""):
    path = tmp_path / "stream"
    path.write_bytes(data)
    return os.open(path, os.O_RDWR)


def test_send(segments, tmp_path):
    arrays, gaps = segments
    flow, crc = flow_of(arrays, gaps)
    fd = through_file(tmp_path)
    assert flow.send(fd, flow.rows) == 0
    assert flow.sent(flow.rows)
    assert (tmp_path / "stream").read_bytes() == plain(arrays, gaps)
    assert crc.tolist() == sums(arrays)
    assert flow.done == len(plain(arrays, gaps))
    os.close(fd)


@pytest.mark.parametrize("step", [1, 4])
def test_pieces(segments, step):
    arrays, gaps = segments
    flow, crc = flow_of(arrays, gaps)
    pieces = []
    for end in [*range(0, flow.rows, step), flow.rows]:
        while (piece := flow.piece(end)) is not None:
            pieces.append(bytes(piece))
        assert flow.row == end
    assert b"".join(pieces) == plain(arrays, gaps)
    assert crc.tolist() == sums(arrays)


@pytest.mark.parametrize("drop", [False, True], ids=["kept", "dropped"])
def test_receive(segments, tmp_path, drop):
    arrays, gaps = segments
    found = [np.zeros_like(a) for a in arrays]
    flow, crc = flow_of(found, gaps, range(0, len(arrays), 2) if drop else ())
    fd = through_file(tmp_path, plain(arrays, gaps) + b"tail")
    assert flow.receive(fd, flow.rows) == 0
    assert flow.row == flow.rows
    assert os.read(fd, 10) == b"tail"
    assert crc.tolist() == sums(arrays)
    for i, (a, b) in enumerate(zip(arrays, found, strict=True)):
        assert not b.any() if drop and i % 2 == 0 else (a == b).all()
    os.close(fd)


@pytest.mark.parametrize("most", [1000, 1 << 20])
def test_places(segments, most):
    arrays, gaps = segments
    data = plain(arrays, gaps)
    found = [np.zeros_like(a) for a in arrays]
    flow, crc = flow_of(found, gaps)
    while (place := flow.place(flow.rows)) is not None:
        n = min(most, len(place))
        place[:n], data = data[:n], data[n:]
        flow.filled(n)
    assert not data
    assert crc.tolist() == sums(arrays)
    assert all((a == b).all() for a, b in zip(arrays, found, strict=True))


def test_sums_go_out_behind_what_they_sum():
    arrays = memory([100, 300_000])
    crc = np.zeros(3, dtype=np.uint32)
    address = np.array([*[a.ctypes.data for a in arrays], crc.ctypes.data], dtype=np.int64)
    nbytes, gap = np.array([100, 300_000, 8]), np.zeros(3, dtype=np.int64)
    flow, sent = Flow(address, nbytes, gap, crc), b""
    while (piece := flow.piece(3)) is not None:
        sent += bytes(piece)
    assert np.frombuffer(sent[-8:], np.uint32).tolist() == sums(arrays)


def test_the_end_and_errors():
    flow, _ = flow_of(memory([10]), [0])
    reading, writing = os.pipe()
    os.write(writing, b"12345")
    os.close(writing)
    assert flow.receive(reading, 1) == ENDED
    assert (flow.row, flow.done) == (0, 5)
    os.close(reading)
    assert os.strerror(flow.receive(reading, 1)) == "Bad file descriptor"
    with pytest.raises(ValueError, match="segment 2 is none of 0 to 1"):
        flow.receive(0, 2)
    with pytest.raises(ValueError, match="more than there was room for"):
        flow.filled(11)


@pytest.mark.parametrize(
    ("nbytes", "gap"), [([-1], [0]), ([1], [-1]), ([1], [65])], ids=["size", "gap", "large_gap"]
)
def test_what_cannot_be(nbytes, gap):
    with pytest.raises(ValueError, match="segment 0 has"):
        Flow(np.zeros(1, dtype=np.int64), np.array(nbytes), np.array(gap))
    with pytest.raises(ValueError, match="a buffer of 8 bytes is needed"):
        Flow(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int32), np.array(gap))
    with pytest.raises(ValueError, match="kernel=99"):
        Flow(*[np.zeros(1, dtype=np.int64)] * 3, np.zeros(1, dtype=np.uint32), 99)
