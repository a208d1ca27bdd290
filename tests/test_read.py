"""Records into memory: every source, serial and parallel, every boundary, and every way it can go wrong."""

import errno
import io
import os
import subprocess
import sys
import textwrap
import threading
import tracemalloc
import zlib

import numpy as np
import pytest

from fastckpt import _crc32, _read, materialize, memory
from fastckpt.errors import ChecksumError, FormatError, UnsupportedError
from fastckpt.records import DEFLATED, NO_CRC, STORED, Records
from fastckpt.source import open_source

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


# ---- with records


class PlainObject:
    """A file object that has no descriptor and no readinto."""

    name = "object.pt"

    def __init__(self, data):
        self.f = io.BytesIO(data)
        self.seek, self.tell, self.read = self.f.seek, self.f.tell, self.f.read


KINDS = ("file", "memory", "object")


def make_source(kind, data, path):
    if kind == "file":
        path.write_bytes(data)
        return open_source(path)
    return open_source(data if kind == "memory" else PlainObject(data))


@pytest.fixture(params=KINDS)
def sourced(request, tmp_path):
    made = []

    def make(data):
        made.append(make_source(request.param, data, tmp_path / "model.pt"))
        return made[-1]

    yield make
    for source in made:
        source.close()


@pytest.fixture(params=["serial", "parallel"])
def road(request, monkeypatch):
    monkeypatch.setenv(
        "FASTCKPT_SERIAL_BELOW", "0" if request.param == "parallel" else str(1 << 40)
    )
    return request.param


def deflate(data):
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush()


def records_of(contents, methods=None, gap=60, **columns):
    """A container of our own: the bytes of it, and its Records."""
    methods = methods or [STORED] * len(contents)
    stored = [deflate(c) if m == DEFLATED else c for c, m in zip(contents, methods, strict=True)]
    offsets = gap + np.concatenate([[0], np.cumsum([len(s) + gap for s in stored])[:-1]]).astype(
        np.int64
    )
    data = b"".join(bytes(gap) + s for s in stored) + bytes(gap)
    given = {
        "offset": offsets,
        "nbytes": [len(c) for c in contents],
        "stored_nbytes": [len(s) for s in stored],
        "crc32": [zlib.crc32(c) for c in contents],
        "method": methods,
    } | columns
    return data, Records([f"data/{i}" for i in range(len(contents))], **given)


def contents_of(sizes):
    random = np.random.default_rng(7)
    return [random.bytes(n) for n in sizes]


def everything(records):
    return np.arange(len(records))


@pytest.mark.parametrize("threads", [None, 1, 4])
def test_storages(sourced, road, threads):
    contents = contents_of([0, 1, 100, 64, 0, 70_000, 3 << 20, 100, 33 << 20, 5])
    data, records = records_of(contents, [STORED, DEFLATED, STORED] * 3 + [DEFLATED])
    rows = np.random.default_rng(1).permutation(len(contents))
    (owners, address), verified = materialize.read_storages(
        sourced(data), records, rows, threads=threads
    )
    assert [bytes(owner) for owner in owners] == [contents[row] for row in rows]
    assert verified == len(rows)
    assert len(address) == len(rows)


def test_rows_again_and_none(sourced, road):
    contents = contents_of([100, 5000])
    data, records = records_of(contents)
    source = sourced(data)
    (owners, _), verified = materialize.read_storages(source, records, [1, 0, 1])
    assert [bytes(owner) for owner in owners] == [contents[1], contents[0], contents[1]]
    assert verified == 3
    assert materialize.read_storages(source, records, [])[1] == 0


def test_checksums_keep_nothing(sourced, road):
    contents = contents_of([0, 100, 3 << 20, 5000])
    data, records = records_of(contents, [STORED, DEFLATED, STORED, STORED], crc32=[1, 2, 3, 4])
    found = materialize.checksums(sourced(data), records, [3, 2, 1, 0])
    assert found.tolist() == [zlib.crc32(contents[row]) for row in (3, 2, 1, 0)]


def test_fill_given_memory(sourced, road):
    contents = contents_of([10, 2 << 20, 30])
    data, records = records_of(contents)
    targets = [np.zeros(len(c) + 2, np.uint8) for c in contents]
    address = [t.ctypes.data + 1 for t in targets]
    assert materialize.fill(sourced(data), records, everything(records), address, threads=2) == 3
    assert [bytes(t) for t in targets] == [b"\0" + c + b"\0" for c in contents]


def test_addresses_must_fit(sourced):
    data, records = records_of(contents_of([10, 20]))
    with pytest.raises(ValueError, match="1 addresses for 2 records"):
        materialize.fill(sourced(data), records, [0, 1], [0])


class TestVerification:
    SIZES = (100, 3 << 20, 50, 70)

    def test_message(self, sourced, road):
        data, records = records_of(
            contents_of(self.SIZES), crc32=[zlib.crc32(c) for c in contents_of(self.SIZES)]
        )
        where = int(records.offset[1])
        damaged = bytearray(data)
        damaged[where + 12345] ^= 16
        source = sourced(bytes(damaged))
        actual = zlib.crc32(damaged[where : where + self.SIZES[1]])
        with pytest.raises(ChecksumError) as caught:
            materialize.read_storages(source, records, everything(records))
        error, expected = caught.value, int(records.crc32[1])
        assert str(error) == (
            f"{source.name}: record 'data/1' at byte {where}: CRC-32 is {actual:08x}, the directory says "
            f"{expected:08x}; the file is damaged (verify=False reads it anyway)"
        )
        assert (error.path, error.record, error.offset) == (source.name, "data/1", where)
        assert (error.expected, error.actual) == (expected, actual)
        (owners, _), verified = materialize.read_storages(
            source, records, everything(records), verify=False
        )
        assert verified == 0
        assert bytes(owners[1]) == damaged[where : where + self.SIZES[1]]

    def test_the_first_in_the_file_is_named_and_the_others_counted(self, sourced, road):
        data, records = records_of(contents_of(self.SIZES), crc32=[1, 2, 3, 4])
        with pytest.raises(ChecksumError, match=r"'data/1' .*; 2 more records are wrong, too"):
            materialize.read_storages(sourced(data), records, [3, 1, 2])

    def test_a_deflated_record_is_verified(self, sourced):
        data, records = records_of([b"x" * 1000], [DEFLATED], crc32=[5])
        with pytest.raises(ChecksumError, match="the directory says 00000005"):
            materialize.read_storages(sourced(data), records, [0])

    def test_what_has_no_crc_is_not_counted(self, sourced, road):
        contents = contents_of([100, 100, 0, 100])
        data, records = records_of(contents, crc32=[NO_CRC, 0, 0, zlib.crc32(contents[3])])
        assert materialize.read_storages(sourced(data), records, everything(records))[1] == 2

    @pytest.mark.parametrize("kernel", _crc32.kernels())
    def test_kernels(self, sourced, kernel, monkeypatch):
        monkeypatch.setenv("FASTCKPT_CRC", kernel)
        data, records = records_of(contents_of(self.SIZES))
        assert materialize.read_storages(sourced(data), records, everything(records))[1] == 4

    def test_a_kernel_that_is_not_there_is_refused(self, sourced, monkeypatch):
        monkeypatch.setenv("FASTCKPT_CRC", "none")
        data, records = records_of([b"abc"])
        with pytest.raises(ValueError, match="'none' is unknown"):
            materialize.read_storages(sourced(data), records, [0])


class TestDeflated:
    PLAIN = np.random.default_rng(3).integers(0, 4, 3_000_000, dtype=np.uint8).tobytes()

    def read(self, source, records):
        return bytes(materialize.read_storages(source, records, [0])[0].owners[0])

    @pytest.mark.parametrize("nbytes", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3_000_000])
    def test_sizes(self, sourced, nbytes):
        data, records = records_of([self.PLAIN[:nbytes]], [DEFLATED])
        assert self.read(sourced(data), records) == self.PLAIN[:nbytes]

    def test_highly_compressed(self, sourced):
        data, records = records_of([bytes(5_000_000)], [DEFLATED])
        assert self.read(sourced(data), records) == bytes(5_000_000)

    @pytest.mark.parametrize(
        ("claimed", "words"),
        [
            (0, "more than the 0"),
            (1, "more than the 1 "),
            (999, "more than the 999"),
            (1001, "inflates to 1000 bytes"),
        ],
    )
    def test_wrong_size(self, sourced, claimed, words):
        data, records = records_of([self.PLAIN[:1000]], [DEFLATED], nbytes=[claimed])
        with pytest.raises(
            FormatError, match=f"record 'data/0' at byte 60: it .*{words}.*; the file is damaged"
        ):
            self.read(sourced(data), records)

    @pytest.mark.parametrize("cut", [1, 100, 20_000])
    def test_cut(self, sourced, cut):
        packed = deflate(self.PLAIN[:100_000])
        data, records = records_of(
            [self.PLAIN[:100_000]], [DEFLATED], stored_nbytes=[len(packed) - cut]
        )
        with pytest.raises(FormatError, match=r"deflated data ends after \d+ of 100000 bytes"):
            self.read(sourced(data), records)

    def test_garbage(self, sourced):
        data, records = records_of([b"\xff" * 1000], nbytes=[2000], method=[DEFLATED])
        with pytest.raises(FormatError, match="deflated data is damaged"):
            self.read(sourced(data), records)

    def test_a_bomb_takes_no_memory(self, sourced):
        data, records = records_of([bytes(50_000_000)], [DEFLATED], nbytes=[10])
        source = sourced(data)
        tracemalloc.start()
        try:
            with pytest.raises(FormatError, match="more than the 10 bytes"):
                self.read(source, records)
            assert tracemalloc.get_traced_memory()[1] < 4 << 20
        finally:
            tracemalloc.stop()

    def test_a_claim_that_no_stream_can_meet_takes_no_memory(self, sourced, monkeypatch):
        monkeypatch.setattr(materialize, "allocate", lambda sizes: pytest.fail("memory was taken"))
        data, records = records_of([b"abc"], [DEFLATED], nbytes=[1 << 40])
        with pytest.raises(FormatError, match="it claims 1099511627776 bytes"):
            self.read(sourced(data), records)

    def test_another_method(self, sourced):
        data, records = records_of([b"abc"], method=[12])
        with pytest.raises(UnsupportedError, match="ZIP method 12"):
            materialize.read_storages(sourced(data), records, [0])


class TestTheFileChanges:
    SIZES = (100, 3 << 20, 1 << 20)

    def opened(self, tmp_path):
        contents = contents_of(self.SIZES)
        data, records = records_of(contents)
        path = tmp_path / "model.pt"
        path.write_bytes(data)
        return path, open_source(path), records, contents

    def test_cut(self, tmp_path, road):
        path, source, records, _ = self.opened(tmp_path)
        os.truncate(path, 2 << 20)
        with pytest.raises(
            FormatError,
            match=r"3145728 bytes at byte 220 are wanted and only 2096932 are there; the",
        ):
            materialize.read_storages(source, records, everything(records))

    def test_unlinked_and_replaced(self, tmp_path, road):
        path, source, records, contents = self.opened(tmp_path)
        path.rename(tmp_path / "other.pt")
        path.write_bytes(b"something else")
        (tmp_path / "other.pt").unlink()
        (owners, _), _ = materialize.read_storages(source, records, everything(records))
        assert [bytes(owner) for owner in owners] == contents

    def test_overwritten(self, tmp_path, road):
        path, source, records, _ = self.opened(tmp_path)
        with open(path, "r+b") as f:
            f.seek(2 << 20)
            f.write(bytes(100))
        with pytest.raises(ChecksumError, match="'data/1'"):
            materialize.read_storages(source, records, everything(records))

    def test_outside(self, sourced):
        data, records = records_of([b"abc", b"def"], offset=[60, 1 << 40])
        with pytest.raises(FormatError, match="'data/1' at byte 1099511627776: it claims 3 bytes"):
            materialize.read_storages(sourced(data), records, [0, 1])
        with pytest.raises(
            FormatError, match="3 bytes at byte 1099511627776 are wanted and only 0 are there"
        ):
            materialize.checksums(sourced(data), records, [0, 1])

    def test_the_system_fails(self, tmp_path, road):
        _, source, records, _ = self.opened(tmp_path)
        fd, source.fd = source.fd, os.open(tmp_path, os.O_RDONLY)
        try:
            with pytest.raises(IsADirectoryError) as caught:
                materialize.read_storages(source, records, everything(records))
            assert caught.value.filename == source.name
        finally:
            os.close(source.fd)
            source.fd = fd

    def test_closed(self, sourced):
        data, records = records_of([b"abc"])
        source = sourced(data)
        source.close()
        with pytest.raises(ValueError, match="the checkpoint is closed"):
            materialize.read_storages(source, records, [0])

    def test_a_failed_load_leaves_no_memory(self, sourced, road, monkeypatch):
        weak = []

        def allocate(sizes):
            allocation = memory.allocate(sizes)
            weak.append(sys.getrefcount(allocation.owners[0]))
            weak.append(allocation.owners[0])
            return allocation

        monkeypatch.setattr(materialize, "allocate", allocate)
        data, records = records_of(contents_of([1000]), crc32=[1])
        with pytest.raises(ChecksumError):
            materialize.read_storages(sourced(data), records, [0])
        before, owner = weak
        weak.clear()
        assert sys.getrefcount(owner) <= before


class TestProgress:
    def test_counts_up_to_the_whole(self, sourced, road):
        contents = contents_of([1000, 5 << 20, 3 << 20])
        data, records = records_of(contents, [STORED, STORED, DEFLATED])
        told = []
        materialize.read_storages(
            sourced(data),
            records,
            everything(records),
            progress=lambda done, total: told.append((done, total)),
        )
        total = sum(map(len, contents))
        assert told[-1] == (total, total)
        assert told == sorted(told)

    def test_may_give_up(self, sourced, road):
        data, records = records_of(contents_of([5 << 20]))

        def progress(done, total):
            raise KeyError("enough")

        before = threading.active_count()
        with pytest.raises(KeyError, match="enough"):
            materialize.read_storages(sourced(data), records, [0], progress=progress)
        assert threading.active_count() == before


@pytest.mark.parametrize("kind", KINDS)
def test_many_threads_at_once(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTCKPT_SERIAL_BELOW", "0")
    contents = contents_of([1000, 3 << 20, 50, 2 << 20] * 2)
    data, records = records_of(contents)
    source = make_source(kind, data, tmp_path / "model.pt")
    barrier, wrong = threading.Barrier(8), []

    def load():
        barrier.wait()
        for _ in range(3):
            (owners, _), verified = materialize.read_storages(
                source, records, everything(records), threads=2
            )
            if verified != 8 or [bytes(owner) for owner in owners] != contents:
                wrong.append(True)

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- in processes of their own

PRELUDE = """
import os, signal, sys, threading, time, zlib
import numpy as np
from fastckpt import materialize
from fastckpt.records import Records
from fastckpt.source import open_source

data = np.random.default_rng(0).bytes(8 << 20)
records = Records(["a", "b"], [0, 4 << 20], [4 << 20] * 2, crc32=[zlib.crc32(data[:4 << 20]), zlib.crc32(data[4 << 20:])])
source = open_source(data)

def load():
    (owners, _), verified = materialize.read_storages(source, records, [0, 1], threads=4)
    assert verified == 2 and bytes(owners[1]) == data[4 << 20:]
"""

FORK = """
def in_child(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    for _ in range(600):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert status == 0, status
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    sys.exit("the child hangs")

load()
in_child(load)
load()
in_child(lambda: in_child(load))
"""

FORK_WHILE_LOADING = """
stop = []
def forever():
    while not stop:
        load()
thread = threading.Thread(target=forever)
thread.start()
for _ in range(5):
    in_child(load)
stop.append(True)
thread.join()
"""

TORCH_TOO = """
in_child(lambda: torch.ones(1 << 20).sum())
torch.set_num_threads(4)
torch.ones(1 << 22).sum()
in_child(load)
"""

INTERRUPT = """
told = []
rows = np.zeros(1_000_000, dtype=np.int64)  # 4 TB: it would take minutes
threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
try:
    materialize.checksums(source, records, rows, threads=THREADS)
except KeyboardInterrupt:
    pass
else:
    sys.exit("no KeyboardInterrupt")
assert not [thread for thread in threading.enumerate() if thread.name == "checkpoint reader"]
load()
"""


def run_python(*parts, **environment):
    environment = os.environ | {"FASTCKPT_SERIAL_BELOW": "0"} | environment
    code = "\n".join(map(textwrap.dedent, parts))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
class TestFork:
    def test_without_torch(self):
        run_python(PRELUDE, FORK)

    def test_while_another_thread_loads(self):
        run_python(PRELUDE, FORK, FORK_WHILE_LOADING)

    @pytest.mark.parametrize("order", ["torch first", "torch last"])
    def test_with_torch(self, order):
        pytest.importorskip("torch")
        parts = ["import torch", PRELUDE] if order == "torch first" else [PRELUDE, "import torch"]
        run_python(*parts, FORK, TORCH_TOO)


@pytest.mark.parametrize("threads", ["1", "2", "4"])
def test_interrupt(threads):
    run_python(PRELUDE, INTERRUPT.replace("THREADS", threads))


def test_loading_needs_no_torch():
    run_python(PRELUDE, "load(); assert 'torch' not in sys.modules")
