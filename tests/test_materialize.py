"""Records into memory: every source, serial and parallel, verified, inflated, and every way it can go wrong."""

import io
import os
import sys
import threading
import tracemalloc
import zlib

import numpy as np
import pytest

from fastckpt import _crc32, materialize, memory
from fastckpt.errors import ChecksumError, FormatError, UnsupportedError
from fastckpt.records import DEFLATED, NO_CRC, STORED, Records
from fastckpt.source import open_source


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
    (owners, address, _), verified = materialize.read_storages(
        sourced(data), records, rows, threads=threads
    )
    assert [bytes(owner) for owner in owners] == [contents[row] for row in rows]
    assert verified == len(rows)
    assert len(address) == len(rows)


def test_rows_again_and_none(sourced, road):
    contents = contents_of([100, 5000])
    data, records = records_of(contents)
    source = sourced(data)
    (owners, *_), verified = materialize.read_storages(source, records, [1, 0, 1])
    assert [bytes(owner) for owner in owners] == [contents[1], contents[0], contents[1]]
    assert verified == 3
    assert materialize.read_storages(source, records, [])[1] == 0


def test_checksums_keep_nothing(sourced, road):
    contents = contents_of([0, 100, 3 << 20, 5000])
    data, records = records_of(contents, [STORED, DEFLATED, STORED, STORED], crc32=[1, 2, 3, 4])
    found, failures = materialize.checksums(sourced(data), records, [3, 2, 1, 0])
    assert not failures
    assert found.tolist() == [zlib.crc32(contents[row]) for row in (3, 2, 1, 0)]


def test_fill_given_memory(sourced, road):
    contents = contents_of([10, 2 << 20, 30])
    data, records = records_of(contents)
    targets = [np.zeros(len(c) + 2, np.uint8) for c in contents]
    address = [t.ctypes.data + 1 for t in targets]
    rows = everything(records)
    assert materialize.fill(sourced(data), records, rows, address, targets, threads=2) == 3
    assert [bytes(t) for t in targets] == [b"\0" + c + b"\0" for c in contents]


def test_addresses_must_fit(sourced):
    data, records = records_of(contents_of([10, 20]))
    with pytest.raises(ValueError, match="1 addresses for 2 records"):
        materialize.fill(sourced(data), records, [0, 1], [0], None)


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
        (owners, *_), verified = materialize.read_storages(
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

    def test_a_claim_that_no_stream_can_meet_takes_no_memory(self, sourced):
        data, records = records_of([b"abc"], [DEFLATED], nbytes=[1 << 40])
        with pytest.raises(FormatError, match="it claims 1099511627776 bytes"):
            materialize.read_storages(
                sourced(data),
                records,
                [0],
                allocate=lambda sizes: pytest.fail("memory was taken"),
            )

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
        (owners, *_), _ = materialize.read_storages(source, records, everything(records))
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

    def test_checksums_of_the_others(self, sourced, road):
        contents = contents_of([3, 3 << 20, 100, 3 << 20, 5000])
        methods = [STORED, STORED, STORED, DEFLATED, DEFLATED]
        data, records = records_of(contents, methods)
        records.offset[0], records.nbytes[2] = 1 << 40, 1 << 62
        data = bytearray(data)
        data[records.offset[3]] = 0xFF  # no kind of block
        crc, failures = materialize.checksums(
            sourced(bytes(data)), records, [4, 3, 2, 1, 0], threads=2
        )
        assert {i: type(error) for i, error in failures.items()} == dict.fromkeys(
            [1, 2, 4], FormatError
        )
        assert "3 bytes at byte 1099511627776 are wanted and only 0 are there" in str(failures[4])
        assert "'data/3'" in str(failures[1])
        assert [crc[0], crc[3]] == [zlib.crc32(contents[4]), zlib.crc32(contents[1])]

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

    def test_a_failed_load_leaves_no_memory(self, sourced, road):
        weak = []

        def allocate(sizes):
            allocation = memory.allocate(sizes)
            weak.append(sys.getrefcount(allocation.owners[0]))
            weak.append(allocation.owners[0])
            return allocation

        data, records = records_of(contents_of([1000]), crc32=[1])
        with pytest.raises(ChecksumError):
            materialize.read_storages(sourced(data), records, [0], allocate=allocate)
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
            (owners, *_), verified = materialize.read_storages(
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
