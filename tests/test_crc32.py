"""CRC-32: every kernel against zlib, joins against wholes, and kernels demanded by name."""

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastckpt import _crc32

DATA = np.random.default_rng(32).bytes(5000)
KERNELS = _crc32.kernels()
MISSING = [name for name in _crc32.all_kernels() if name not in KERNELS]
# where a kernel changes its stride: 8, 16, 64, 512, three streams of 4096
BOUNDARIES = sorted(
    {max(0, n + d) for n in (0, 8, 16, 64, 512, 1024, 12288, 16384, 1 << 20) for d in (-1, 0, 1)}
)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("start", [0, 1, 7, 8, 63])
def test_every_length(kernel, start):
    view = memoryview(DATA)
    for nbytes in range(4097):
        part = view[start : start + nbytes]
        assert _crc32.crc32(part, 0, kernel) == zlib.crc32(part), nbytes


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("nbytes", BOUNDARIES)
def test_boundaries_continued_from_a_value(kernel, nbytes):
    data = np.random.default_rng(nbytes).bytes(nbytes)
    assert _crc32.crc32(data, 0xDEADBEEF, kernel) == zlib.crc32(data, 0xDEADBEEF)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("data", "crc"),
    [(b"", 0), (b"123456789", 0xCBF43926), (bytes(32), 0x190A55AD), (b"\xff" * 32, 0xFF6CAB0B)],
    ids=["empty", "check value", "zeros", "ones"],
)
def test_published_values(kernel, data, crc):
    assert _crc32.crc32(data, kernel=kernel) == crc


@pytest.mark.parametrize("split", BOUNDARIES[:-3])
def test_combine_splits(split):
    data = np.random.default_rng(split).bytes(split + 777)
    first, second = data[:split], data[split:]
    assert _crc32.combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(data)


@given(st.lists(st.binary(max_size=2000), max_size=6), st.sampled_from(KERNELS))
def test_pieces_join_to_the_whole(pieces, kernel):
    joined = continued = 0
    for piece in pieces:
        joined = _crc32.combine(joined, _crc32.crc32(piece, kernel=kernel), len(piece))
        continued = _crc32.crc32(piece, continued, kernel)
    assert joined == continued == zlib.crc32(b"".join(pieces))


def test_combine_lengths_beyond_memory():
    whole = _crc32.combine(1, 0, 2**40)
    half = _crc32.combine(_crc32.combine(1, 0, 2**39), 0, 2**39)
    assert whole == half != 1
    with pytest.raises(ValueError, match="cannot be negative"):
        _crc32.combine(1, 2, -1)


@pytest.mark.parametrize(
    "make", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, np.uint8)]
)
def test_buffers(make):
    assert _crc32.crc32(make(DATA)) == zlib.crc32(DATA)


def test_what_is_no_buffer():
    with pytest.raises(TypeError, match="bytes-like"):
        _crc32.crc32("text")


class TestDemands:
    def test_portable_is_always_there(self):
        assert KERNELS[0] == _crc32.all_kernels()[0] == "portable"

    @pytest.mark.parametrize("kernel", KERNELS)
    def test_a_usable_kernel_is_taken(self, kernel, monkeypatch):
        monkeypatch.setenv("FASTCKPT_CRC", kernel)
        assert _crc32.default_kernel() == kernel
        assert _crc32.crc32(DATA) == zlib.crc32(DATA)

    def test_an_empty_demand_is_none(self, monkeypatch):
        monkeypatch.setenv("FASTCKPT_CRC", "")
        assert _crc32.default_kernel() in KERNELS

    def test_an_unknown_kernel_is_refused(self, monkeypatch):
        monkeypatch.setenv("FASTCKPT_CRC", "fastest")
        with pytest.raises(
            ValueError,
            match=r"FASTCKPT_CRC: CRC-32 kernel 'fastest' is unknown \(expected one of: po",
        ):
            _crc32.default_kernel()
        with pytest.raises(ValueError, match="'fastest' is unknown"):
            _crc32.crc32(b"", kernel="fastest")

    @pytest.mark.parametrize("kernel", MISSING)
    def test_a_kernel_that_cannot_run_is_refused(self, kernel, monkeypatch):
        monkeypatch.setenv("FASTCKPT_CRC", kernel)
        with pytest.raises(
            RuntimeError, match=f"FASTCKPT_CRC: CRC-32 kernel '{kernel}' (is not built|needs a CPU)"
        ):
            _crc32.default_kernel()
