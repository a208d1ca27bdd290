"""ZIP containers: what is found, what is refused, and in which words."""

import gzip
import io
import os
import random
import struct

import pytest

from fastckpt.containers._zip_names import RecordNames
from fastckpt.containers.zip import inflate, open_zip, parse_version
from fastckpt.errors import ChecksumError, FormatError
from fastckpt.records import NO_CRC
from fastckpt.source import open_source
from zipcraft import MAX32, PICKLE, Entry, archive, central_part, checkpoint, local_part
from ziptools import DATA_0, GOOD, STORAGES, changed, contents, opened

FORMS = {
    "no zip64 records": archive(checkpoint(STORAGES)),
    "zip64 extras": archive([Entry(e.name, e.data, wide=True) for e in checkpoint(STORAGES)]),
    "zip64, plain numbers hidden": archive(
        checkpoint(STORAGES),
        wide=True,
        end={"here": 0xFFFF, "count": 0xFFFF, "nbytes": MAX32, "offset": MAX32},
    ),
    "broken zip64 signature": GOOD.replace(b"PK\6\6", b"PK\6\0"),
    "broken locator signature": GOOD.replace(b"PK\6\7", b"PK\6\0"),
    "descriptors": archive([Entry(e.name, e.data, descriptor=True) for e in checkpoint(STORAGES)]),
    "no padding": archive([Entry(e.name, e.data, align=0) for e in checkpoint(STORAGES)]),
    "deflated": archive([Entry(e.name, e.data, method=8) for e in checkpoint(STORAGES)]),
    "directory in another order": archive(checkpoint(STORAGES), directory_order=[5, 3, 0, 1, 2, 4]),
    "folder entries": archive([Entry("archive/"), *checkpoint(STORAGES), Entry("archive/data/")]),
    "other folders beside": archive(
        [Entry("README", b"hi"), *checkpoint(STORAGES), Entry("more/x", b"1")]
    ),
    "junk in front": archive(checkpoint(STORAGES), before=b"#!/bin/sh\n", counted=False),
    "junk in front, zip64": archive(
        checkpoint(STORAGES), before=b"#!/bin/sh\n", counted=False, wide=True
    ),
    "junk in front, counted": archive(checkpoint(STORAGES), before=b"#!/bin/sh\n"),
    "split marker": archive(checkpoint(STORAGES), before=b"PK\7\x08"),
    "comment": archive(checkpoint(STORAGES), comment=b"c" * 65535),
    "comment of a wrong length": archive(checkpoint(STORAGES), comment=b"c", comment_nbytes=500),
    "bytes behind": archive(checkpoint(STORAGES), behind=b"\0" * 60000),
    "many bytes behind": archive(checkpoint(STORAGES), behind=b"\0" * 200_000),
    "gap before the end record": archive(checkpoint(STORAGES), gap=b"signature"),
    "disk numbers of one": archive(
        [Entry(e.name, e.data, disk=1) for e in checkpoint(STORAGES)],
        end={"disk": 1, "directory_disk": 1},
    ),
    "backslashes": archive(
        [Entry(e.name.replace(b"/", b"\\"), e.data) for e in checkpoint(STORAGES)]
    ),
}


class TestGood:
    def test_what_is_found(self):
        container = opened(GOOD)
        assert container.root == "archive"
        assert container.version == 3
        assert container.byteorder == "little"
        assert not container.is_torchscript
        assert container.end == len(GOOD)
        assert list(container.storages) == ["0", "1", "2"]
        assert contents(container) == {
            "data.pkl": PICKLE,
            "byteorder": b"little",
            "data/0": STORAGES[0],
            "data/1": b"",
            "data/2": STORAGES[2],
            "version": b"3\n",
        }
        for key, row in container.storages.items():
            assert container.records.names[row] == f"data/{key}"
            offset, nbytes = container.records.offset[row], container.records.nbytes[row]
            assert GOOD[offset : offset + nbytes] == STORAGES[int(key)]

    @pytest.mark.parametrize("data", FORMS.values(), ids=FORMS)
    def test_forms(self, data):
        found = contents(opened(data))
        assert {name: found[name] for name in contents(opened(GOOD))} == contents(opened(GOOD))

    @pytest.mark.parametrize(
        ("root", "expected"),
        [
            ("archive/", "archive"),
            ("/", ""),
            ("", ""),
            ("x/archive/", "x/archive"),
            ("модель☃/", "модель☃"),
            (b"\xff\xfe/", "\udcff\udcfe"),
            ("with space/", "with space"),
        ],
        ids=["plain", "empty", "no folder", "nested", "unicode", "no utf-8", "space"],
    )
    def test_root(self, root, expected):
        entries = checkpoint(STORAGES)
        root = root if isinstance(root, bytes) else root.encode()
        moved = [Entry(e.name.replace(b"archive/", root), e.data) for e in entries]
        container = opened(archive(moved))
        assert container.root == expected
        assert contents(container) == contents(opened(GOOD))

    def test_storages_of_torch_1_4(self):
        entries = [
            Entry("a/data.pkl", PICKLE),
            Entry("a/tensors/7", b"1234"),
            Entry("a/version", b"1\n"),
        ]
        container = opened(archive(entries))
        assert container.read_row(container.storages["7"]) == b"1234"
        assert container.index["tensors/7"] == container.storages["7"]

    def test_torchscript_is_told(self):
        entries = [
            *checkpoint(),
            Entry("archive/constants.pkl", PICKLE),
            Entry("archive/code/data.pkl", b""),
        ]
        assert opened(archive(entries)).is_torchscript

    def test_a_name_with_nul_is_another_name(self):
        entries = [Entry(b"archive/data.pkl\0.txt", b"bad"), *checkpoint()]
        assert opened(archive(entries)).read_record("data.pkl") == PICKLE

    def test_names_differ_by_case(self):
        entries = [Entry(b"archive/DATA.PKL", b"bad"), *checkpoint()]
        assert opened(archive(entries)).read_record("data.pkl") == PICKLE

    def test_a_crc_of_zero_means_none(self):
        container = opened(archive(changed(DATA_0, crc=0)))
        row = container.storages["0"]
        assert container.records.crc32[row] == NO_CRC
        assert container.read_row(row) == STORAGES[0]

    def test_an_archive_in_a_tensor_is_data(self):
        inner = archive(checkpoint())
        assert opened(archive(checkpoint([inner]), wide=True)).read_record("data/0") == inner

    def test_an_end_record_by_chance_is_data(self):
        data = archive(checkpoint([b"PK\5\6" + b"\xee" * 40] * 3))
        assert len(opened(data).storages) == 3
        assert opened(archive(checkpoint(), behind=b"PK\5\6" + b"\xee" * 40)).version == 3

    def test_end_is_where_the_comment_ends(self):
        data = archive(checkpoint(), comment=b"12345")
        assert opened(data + b"more").end == len(data)


class TestSources:
    """The same records, however the bytes are reached."""

    def from_path(self, path):
        return open_source(path)

    def from_memory(self, path):
        return open_source(path.read_bytes())

    def from_object(self, path):
        packed = path.with_suffix(".gz")
        packed.write_bytes(gzip.compress(path.read_bytes(), 1))
        return open_source(gzip.open(packed))

    def from_region(self, path):
        path.write_bytes(b"x" * 777 + path.read_bytes())
        return open_source(path, offset=777)

    @pytest.mark.parametrize("where", ["path", "memory", "object", "region"])
    @pytest.mark.parametrize("nbytes", [0, 1, 300, 17_000, 300_000])
    def test_records(self, tmp_path, where, nbytes):
        path = tmp_path / "model.pt"
        storages = [bytes([i]) * nbytes for i in range(20)]
        path.write_bytes(archive(checkpoint(storages), wide=True))
        container = open_zip(getattr(self, f"from_{where}")(path))
        rows = list(container.storages.values())
        random.Random(1).shuffle(rows)
        container.locate(rows)
        for key, row in container.storages.items():
            assert container.read_row(row) == storages[int(key)]
        container.source.close()

    def test_a_shrunken_file(self, tmp_path):
        path = tmp_path / "model.pt"
        path.write_bytes(archive(checkpoint([b"1" * 100_000] * 3)))
        container = open_zip(open_source(path))
        os.truncate(path, 150_000)
        container.locate([container.storages["0"]])
        with pytest.raises(FormatError, match="only 0 are there; the file is shorter than the"):
            container.locate([container.storages["2"]])

    def test_a_closed_source(self, tmp_path):
        path = tmp_path / "model.pt"
        path.write_bytes(GOOD)
        container = open_zip(open_source(path))
        container.source.close()
        with pytest.raises(ValueError, match="closed"):
            container.locate([container.storages["0"]])


def test_what_is_not_used_may_be_strange():
    strange = [
        Entry("archive/notes", b"1234", method=12, crc=5),
        Entry("elsewhere/x", b"12", flags=1),
    ]
    container = open_zip(open_source(archive([*checkpoint(), *strange])))
    container.locate(list(container.storages.values()))
    assert "notes" in container.index


class TestChecksums:
    def test_a_wrong_one_is_reported(self):
        container = opened(archive(changed(DATA_0, crc=0x1234ABCD)))
        with pytest.raises(
            ChecksumError, match=r"'data/0' at byte \d+: CRC-32 is .*says 1234abcd"
        ) as caught:
            container.read_record("data/0")
        assert caught.value.expected == 0x1234ABCD
        assert caught.value.record == "data/0"
        assert caught.value.offset == container.records.offset[container.index["data/0"]]

    def test_it_covers_what_is_inflated(self):
        container = opened(archive(changed(DATA_0, method=8, crc=0x1234ABCD)))
        with pytest.raises(ChecksumError):
            container.read_record("data/0")

    def test_it_can_be_left_unread(self):
        data = archive([Entry(e.name, e.data, crc=7) for e in checkpoint(STORAGES)])
        with pytest.raises(ChecksumError, match="version"):
            opened(data)
        assert opened(data, verify=False).read_record("data/0") == STORAGES[0]


def test_seventy_thousand_records():
    storages = [bytes([i & 255, i >> 8 & 255]) for i in range(70_000)]
    container = opened(archive([*checkpoint(storages, version=b"3\n")], wide=True))
    assert len(container.storages) == 70_000
    for key in ("0", "65535", "69999"):
        assert container.read_row(container.storages[key]) == storages[int(key)]


def test_larger_than_32_bits(tmp_path):
    """A sparse file: a record of 5 GiB, and another behind it."""
    path = tmp_path / "large.pt"
    hole = 5 << 30
    head = archive(checkpoint([]))
    first = head[: head.index(b"PK\1\2")]
    big = Entry("archive/data/0", b"", stored=hole, nbytes=hole, crc=0, align=0)
    small = Entry("archive/data/1", b"1234", align=0)
    with open(path, "wb") as f:
        f.write(first + local_part(big, len(first)))
        f.seek(hole, os.SEEK_CUR)
        small_at = f.tell()
        f.write(local_part(small, small_at))
        directory_at = f.tell()
        entries = head[head.index(b"PK\1\2") : head.index(b"PK\5\6")]
        entries += central_part(big, len(first)) + central_part(small, small_at)
        f.write(entries)
        wide_at = f.tell()
        f.write(
            b"PK\6\6"
            + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, 5, 5, len(entries), directory_at)
        )
        f.write(b"PK\6\7" + struct.pack("<IQI", 0, wide_at, 1))
        f.write(b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 5, 5, len(entries), MAX32, 0))
    container = open_zip(open_source(path))
    container.locate([container.storages["0"], container.storages["1"]])
    assert container.records.nbytes[container.storages["0"]] == hole
    assert container.read_record("data/1") == b"1234"
    container.source.close()


def test_index_is_a_mapping():
    index = opened(GOOD).index
    assert set(index) == {"data.pkl", "byteorder", "version", "data/0", "data/1", "data/2"}
    assert len(index) == 6
    assert "data/3" not in index
    assert "data/" not in index
    assert index.get("nothing") is None


def test_record_names_are_a_sequence():
    names = opened(GOOD).records.names
    assert isinstance(names, RecordNames)
    assert list(names) == ["data.pkl", "byteorder", "data/0", "data/1", "data/2", "version"]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (b"3\n", 3),
        (b" \t3xyz", 3),
        (b"+4", 4),
        (b"10", 10),
        (b"0003", 3),
        (b"-1", None),
        (b"", None),
        (b"abc", None),
        (b"+ 3", None),
        (b"0x3", 0),
        (b"9" * 500, 11),
    ],
)
def test_parse_version(text, version):
    assert parse_version(text) == version


@pytest.mark.parametrize(
    ("data", "nbytes", "content"),
    [
        (b"", 0, b""),
        (b"\3\0", 0, b""),
        (b"\3\0", 1, None),
        (b"", 1, None),
        (b"\x4b\4\0", 1, b"a"),
        (b"\x4b\4", 1, None),
        (b"\x4b\4\0", 0, None),
        (b"\xff\xff", 5, None),
    ],
)
def test_inflate(data, nbytes, content):
    assert inflate(data, nbytes) == content


def test_torch_files(tmp_path):
    torch = pytest.importorskip("torch")
    weights = {"a": torch.arange(5.0), "b": torch.ones(3, 3, dtype=torch.int16)}
    torch.save(weights, tmp_path / "model.v1.pt")
    container = open_zip(open_source(tmp_path / "model.v1.pt"))
    assert container.root == "model.v1"
    assert (container.version, container.byteorder) == (3, "little")
    assert bytes(container.read_record("data/0")) == weights["a"].numpy().tobytes()
    assert bytes(container.read_record("data/1")) == weights["b"].numpy().tobytes()
    container.source.close()
    memory = io.BytesIO()
    torch.save(weights, memory)
    memory.seek(0)
    assert contents(open_zip(open_source(memory)))["data/0"] == weights["a"].numpy().tobytes()
