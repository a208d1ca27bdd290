"""LitData folders that are damaged, or made to harm: an error that says where, never a crash, a hang or much memory."""

import json
import os
import struct
import traceback
import tracemalloc

import numpy as np
import pytest
import torch

import litdatacraft as craft
from fastckpt import CheckpointError, FormatError
from fastckpt.data import LitDataReader
from test_data_litdata import FORMATS, JSON, TREE, key_for, needs, row, text, u32

ENVELOPES = ["classic", "framed", "zstd-sample", "zstd-chunk", "fernet-sample"]


@pytest.fixture
def folder(tmp_path):
    rows = [["né" * i, torch.arange(i), i, [i, "x"]] for i in range(4)]
    formats = ["str", "no_header_tensor:18", "int", "json"]
    return craft.write(tmp_path / "set", formats, dict.fromkeys("abcd"), rows)


def attempt(folder, **options):
    """Read everything in every way; what it raised, if it raised. Any other error than ours is a bug."""
    try:
        reader = LitDataReader(folder, **options)
        list(reader)
        for i in range(min(3, len(reader))):
            reader[i]
        try:
            reader.read_batch(range(len(reader)))
        except (RuntimeError, TypeError, IndexError) as error:
            if not is_from_collating(error):
                raise
    except CheckpointError as error:
        if str(folder) not in str(error):
            raise
        return error
    return None


def is_from_collating(error):
    """Whether torch says that samples do not stack."""
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    return "default_collate" in names


@pytest.mark.parametrize("envelope", ENVELOPES)
def test_a_chunk_that_was_cut_short(tmp_path, envelope):
    needs(envelope)
    rows = [["né" * i, torch.arange(i)] for i in range(4)]
    path = craft.write(
        tmp_path / "set", ["str", "no_header_tensor:18"], [None, None], rows, envelope=envelope
    )
    (chunk,) = path.glob("chunk*")
    data = chunk.read_bytes()
    for nbytes in range(len(data)):
        chunk.write_bytes(data[:nbytes])
        assert isinstance(attempt(path, **key_for(envelope)), FormatError), nbytes


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
def test_bits_that_flipped_in_a_chunk(folder, mmap):
    chunk = folder / "chunk-0-0.bin"
    data = chunk.read_bytes()
    failed = 0
    for at in range(len(data)):
        for bit in (0, 7):
            chunk.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
            failed += attempt(folder, mmap=mmap) is not None
    assert failed > len(data) / 2  # the rest are other values


@pytest.mark.parametrize("envelope", ["framed", "zstd-sample", "zstd-chunk", "fernet-sample"])
def test_bits_that_flipped_in_a_sealed_chunk(tmp_path, envelope):
    needs(envelope)
    rows = [["né" * i, torch.arange(i)] for i in range(4)]
    path = craft.write(
        tmp_path / "set", ["str", "no_header_tensor:18"], [None, None], rows, envelope=envelope
    )
    (chunk,) = path.glob("chunk*")
    data = chunk.read_bytes()
    for at in range(len(data)):
        chunk.write_bytes(data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])
        attempt(path, **key_for(envelope))


def test_bits_that_flipped_in_an_arrow_chunk(tmp_path):
    pytest.importorskip("pyarrow")
    data = craft.arrow([{"a": "n" * i} for i in range(3)])
    chunk = tmp_path / "c.bin"
    craft.write_index(tmp_path, [{"filename": "c.bin", "chunk_size": 3}], ["str"], {"a": None})
    for at in range(len(data)):
        chunk.write_bytes(data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])
        attempt(tmp_path)


def test_bytes_that_changed_in_the_index(folder):
    index = folder / "index.json"
    data = index.read_bytes()
    for at in range(len(data)):
        index.write_bytes(data[:at] + bytes([data[at] ^ 5]) + data[at + 1 :])
        attempt(folder)
    for nbytes in range(0, len(data), 7):
        index.write_bytes(data[:nbytes])
        assert isinstance(attempt(folder), FormatError)


FIELDS = {
    "chunks": [None, 5, [None], [[]]],
    "filename": [None, "", "../chunk-0-0.bin", "/etc/passwd", "a/../../b", "a\0b", 5],
    "chunk_size": [None, -1, 2**32, 1.5, True, "4"],
    "chunk_bytes": [-1, "x", 10**30],
    "config": [None, [], "x"],
    "data_format": [None, "int", [5], ["no_header_tensor:21"], ["no_header_numpy:14"], ["no_header_tensor:x"]],
    "data_spec": [
        None, "", "[1]", "[2, {}]", "[1, 5]", "[" * 5000, json.dumps([1, craft.spec([None] * 5)]),
        json.dumps([1, {"type": None, "children_spec": [craft.spec(None)]}]),
        json.dumps([1, {"type": "builtins.dict", "context": '["a"]', "children_spec": []}]),
        json.dumps([1, {"type": "builtins.dict", "context": "[[]]", "children_spec": [craft.spec(None)]}]),
        json.dumps([1, {"type": "builtins.dict", "context": 7, "children_spec": []}]),
    ],
    "encryption": [5, {"level": 3}],
}  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
def test_fields_of_the_index_that_cannot_be(folder, field):
    path = folder / "index.json"
    text = path.read_text()
    for value in FIELDS[field]:
        index = json.loads(text)
        where = index if field in index else index["config"]
        where = index["chunks"][0] if field in index["chunks"][0] else where
        where[field] = value
        path.write_text(json.dumps(index))
        error = attempt(folder)
        assert isinstance(error, FormatError), value
        assert "damaged" in str(error)


def nested(depth):
    node = craft.spec(None)
    for _ in range(depth):
        node = {"type": "builtins.list", "context": "null", "children_spec": [node]}
    return json.dumps([1, node])


def test_containers_nest_up_to_a_limit(tmp_path):
    data = craft.classic([craft.item(["int"], [1])])
    (tmp_path / "c.bin").write_bytes(data)
    chunks = [{"filename": "c.bin", "chunk_size": 1}]
    craft.write_index(tmp_path, chunks, ["int"], None, data_spec=nested(200))
    assert LitDataReader(tmp_path)[0]
    craft.write_index(tmp_path, chunks, ["int"], None, data_spec=nested(400))
    with pytest.raises(FormatError, match="nest"):
        LitDataReader(tmp_path)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], "only: nothing; a folder that litdata.optimize wrote is expected"),
        (["chunk-0-0.bin"], r"only: chunk-0-0\.bin; .* copy the index too"),
        (
            ["raw/x.bin", "train/index.json", "val/index.json"],
            "only: raw/, train/, val/; .* have one: train/, val/",
        ),
    ],
    ids=["empty", "chunks alone", "one level up"],
)
def test_a_folder_without_an_index(tmp_path, names, words):
    path = tmp_path / "set"
    path.mkdir()
    for name in names:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).touch()
    with pytest.raises(FileNotFoundError, match=words) as error:
        LitDataReader(path)
    assert error.value.filename == str(path / "index.json")
    with pytest.raises(FileNotFoundError, match="No such file") as error:
        LitDataReader(tmp_path / "nowhere")
    assert error.value.filename == str(tmp_path / "nowhere" / "index.json")


def test_a_missing_chunk_hides_no_other(tmp_path):
    path = craft.write(tmp_path / "set", ["int"], [None], [[i] for i in range(6)], chunk=2)
    (path / "chunk-0-1.bin").unlink()
    reader = LitDataReader(path)
    assert reader[1] == [1]
    assert reader[4] == [4]
    with pytest.raises(FormatError, match=r"chunk-0-1\.bin: the file is missing.*2 items"):
        reader[2]


def test_a_bad_item_hides_no_other_and_is_named(tmp_path):
    path = craft.write(tmp_path / "set", ["str"], [None], [["a"], ["b"], ["c"]])
    chunk = path / "chunk-0-0.bin"
    chunk.write_bytes(chunk.read_bytes().replace(b"b", b"\xff"))
    reader = LitDataReader(path)
    assert reader.read_many([0, 2]) == [["a"], ["c"]]
    for read in (
        lambda: reader[1],
        lambda: reader.read_many([0, 1]),
        lambda: reader.read_batch([0, 1]),
    ):
        with pytest.raises(
            FormatError, match=r"chunk-0-0\.bin: item 1: leaf 0 \('str'\) is not UTF-8"
        ) as caught:
            read()
        assert caught.value.record == "1"
        assert caught.value.path == str(chunk)


def test_an_item_of_a_frame_is_named_by_its_number_in_the_chunk(tmp_path):
    needs("framed")
    payloads = [craft.item(["bytes"], [b"ab"])] * 5
    payloads[4] = payloads[4][:-1]
    (tmp_path / "c.bin").write_bytes(craft.framed(payloads, 3))
    craft.write_index(tmp_path, [{"filename": "c.bin", "chunk_size": 5}], ["bytes"], [None])
    reader = LitDataReader(tmp_path)
    for read in (
        lambda: reader[4],
        lambda: reader.read_many([0, 4]),
        lambda: reader.read_batch([4]),
    ):
        with pytest.raises(FormatError, match=r"item 4: it has 5 bytes.* sizes of its 1 leaves"):
            read()


@pytest.mark.parametrize("nbytes", [0, 100, -1], ids=["to nothing", "to a part", "by one byte"])
@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
def test_a_chunk_that_shrinks_while_it_is_open(tmp_path, mmap, nbytes):
    rows = [[torch.arange(2000)] for _ in range(4)]
    path = craft.write(tmp_path / "set", ["no_header_tensor:18"], [None], rows)
    reader = LitDataReader(path, mmap)
    reader.read_many(range(4))
    chunk = path / "chunk-0-0.bin"
    os.truncate(chunk, nbytes % chunk.stat().st_size)
    for read in (
        lambda: reader[3],
        lambda: reader.read_many([3]),
        lambda: reader.read_batch([2, 3]),
    ):
        with pytest.raises(
            FormatError, match=r"chunk-0-0\.bin: .*shorter than the \d+ bytes it had"
        ):
            read()


# ---- made to harm


@pytest.fixture
def peak():
    """Says how many bytes Python objects took at most since the test began."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


def chunk_of(folder, data, count, formats=("bytes",), **config):
    folder.mkdir(exist_ok=True)
    (folder / "c.bin").write_bytes(data)
    tree = [None] * len(formats)
    craft.write_index(folder, [{"filename": "c.bin", "chunk_size": count}], formats, tree, **config)
    return folder


MOST = 2**32 - 1
ITEM = craft.item(["bytes"], [b"abcd"])
FRAME_HEAD = b"LDFZ01\0\0" + struct.pack("<HHI", 1, 0, 1)


@pytest.mark.parametrize(
    ("data", "count", "words"),
    [
        (u32(MOST) + bytes(20), MOST, "too few for the offsets"),
        (u32(2) + bytes(20), 3, "says that it has 2 items, and the index says 3"),
        (u32(1, 12, MOST) + ITEM, 1, "items end at byte 4294967295"),
        (u32(2, 16, MOST, 24) + ITEM, 2, "offset 2 .* less than"),
        (u32(1, 8, 20) + ITEM, 1, "first item begins at byte 8"),
        (u32(1, 12, 12), 1, "items are empty"),
        (u32(1, 12, 20) + u32(MOST) + b"abcd", 1, "item 0: it has 8 bytes"),
        (u32(1, 12, 14) + b"ab", 1, "item 0: it has 2 bytes"),
        (b"", 1, "0 bytes, too few"),
        (FRAME_HEAD, 1, "too few for a framed"),
        (FRAME_HEAD + u32(256, MOST), 1, "4294967295 frames"),
        (FRAME_HEAD + u32(256, 1, 0, 8) + u32(0, 2, 60, 0, 9, 8), 1, "frames do not follow"),
        (FRAME_HEAD + u32(256, 1, 0, 8) + u32(1, 1, 60, 0, 9, 8), 1, "frames do not follow"),
        (FRAME_HEAD + u32(256, 1, 0, 8) + u32(0, 1, 60, MOST, 9, 8), 1, "frame 0 has 9 bytes at byte"),
        (FRAME_HEAD + u32(256, 1, 0, 8) + u32(0, 1, 56, 0, MOST, 8), 1, "frame 0 has 4294967295 bytes"),
        (FRAME_HEAD + u32(256, 1, 0, 8) + u32(0, 1, 56, 0, 9, 9) + bytes(9), 1, "frame 0 has 9 bytes inflated"),
        (FRAME_HEAD + u32(256, 1, 0, MOST) + u32(0, 1, 56, 0, 9, MOST) + bytes(9), 1, "hold 294912 at most"),
        (FRAME_HEAD + u32(256, 1, 0, 8) + u32(0, 1, 56, 0, 9, 8) + bytes(9), 1, "cannot be inflated"),
    ],
)  # fmt: skip
def test_envelopes_that_lie(tmp_path, peak, data, count, words):
    needs("framed")
    reader = LitDataReader(chunk_of(tmp_path, data, count))
    for read in (lambda: reader[0], lambda: reader.read_many([0]), lambda: reader.read_batch([0])):
        with pytest.raises(FormatError, match=rf"c\.bin: .*{words}"):
            read()
    assert peak() < 1 << 20


def test_frames_that_inflate_to_more_than_they_say(tmp_path, peak):
    needs("framed")
    bomb = craft.zstd(bytes(1 << 26))
    tracemalloc.clear_traces()
    data = FRAME_HEAD + u32(256, 1, 0, 8) + u32(0, 1, 56, 0, len(bomb), 8) + bomb
    with pytest.raises(FormatError, match="frame 0: its zstd data cannot be inflated"):
        LitDataReader(chunk_of(tmp_path, data, 1))[0]
    assert peak() < 1 << 20


BIG, HUGE = struct.pack(">II", 17, 3), struct.pack("<II", 3, 3)


@pytest.mark.parametrize(
    ("kind", "payload", "words"),
    [
        ("int", b"1234567", "has 7 bytes instead of 8"),
        ("float", b"", "has 0 bytes instead of 8"),
        ("bool", b"11", "has 2 bytes instead of 1"),
        ("str", b"a\x80", "not UTF-8 .* at byte 1"),
        ("no_header_tensor:18", b"123456789", "9 bytes of elements"),
        ("no_header_numpy:12", b"1", "1 bytes of elements"),
        ("tensor", b"1234567", "7 bytes, too few"),
        ("tensor", struct.pack(">II", 21, 0), "element type 21"),
        ("tensor", struct.pack(">II", MOST, 0), "element type"),
        ("tensor", struct.pack(">II", 17, MOST), "axes"),
        ("tensor", struct.pack(">II", 17, 65) + bytes(260), "65 axes"),
        ("tensor", struct.pack(">II", 17, 2) + bytes(4), "12 bytes, too few"),
        ("tensor", BIG + struct.pack(">III", MOST, MOST, MOST), "do not make the shape"),
        ("tensor", BIG + struct.pack(">III", 2**31, 2**31, 4) + bytes(8), "do not make the shape"),
        ("tensor", BIG + struct.pack(">III", MOST, 0, 5), None),
        ("tensor", BIG + struct.pack(">III", 0, 0, 0) + b"x", "do not make the shape"),
        ("tensor", struct.pack(">II", 17, 0), "do not make the shape"),
        ("tensor", struct.pack(">II", 17, 5) + struct.pack(">IIIII", MOST, MOST, 0, MOST, 9), "do not make"),
        ("numpy", struct.pack("<II", 14, 0) + bytes(8), "element type 14"),
        ("numpy", HUGE + struct.pack("<III", MOST, MOST, MOST), "do not make the shape"),
        ("numpy", struct.pack("<II", 3, 1) + u32(2) + bytes(8), "do not make the shape"),
        ("json", b"", "not JSON"),
        ("json", b"{", "not JSON"),
        ("json", b"[" * 100_000, "not JSON"),
        ("json", b'{"a":' * 100_000, "not JSON"),
        ("json", b"\0" + text("[1,"), "not JSON"),
        ("json", b"1" * 5000, "not JSON"),
        ("json", b"\1" + u32(MOST), "4294967295 members"),
        ("json", b"\2" + u32(1) + bytes(7), "1 members"),
        ("json", b"\3" + u32(MOST) + bytes(64), "4294967295 members"),
        ("json", b"\4" + u32(5) + b"1", "5 members"),
        ("json", b"\5" + u32(MOST) + bytes(50), "4294967295 members"),
        ("json", b"\5" + u32(1) + text("k") + b"\x0c", "part of type 0xc"),
        ("json", (b"\5" + u32(1) + text("")) * 5000 + b"\x0b", "nested too deep"),
        ("json", b"\6" + u32(MOST, 0), "4294967295 records of 0 fields"),
        ("json", b"\6" + u32(MOST, 1) + text("k") + b"\x10", "4294967295 records"),
        ("json", b"\6" + u32(1, 1) + text("k") + b"\x15", "field of type 0x15"),
        ("json", b"\7" + u32(9) + b"a", "8 bytes too early"),
        ("json", b"\7" + u32(1) + b"\xff", "not UTF-8"),
        ("json", b"\x0b\x0b", "1 bytes behind"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_leaves_that_lie(tmp_path, peak, kind, payload, words, framework):
    data = craft.classic([u32(len(payload)) + payload])
    reader = LitDataReader(chunk_of(tmp_path, data, 1, [kind]), framework=framework)
    for read in (lambda: reader[0], lambda: reader.read_many([0]), lambda: reader.read_batch([0])):
        if words is None:
            read()
            continue
        with pytest.raises(FormatError, match=rf"item 0: leaf 0 \('{kind}'\) .*{words}"):
            read()
    assert peak() < 4 << 20


@pytest.mark.parametrize("name", JSON)
def test_json_leaves_that_were_cut_short(tmp_path, name):
    payload = JSON[name][0]
    for nbytes in range(len(payload)):
        item = u32(nbytes) + payload[:nbytes]
        reader = LitDataReader(chunk_of(tmp_path, craft.classic([item]), 1, ["json"]))
        with pytest.raises(FormatError, match="item 0: leaf 0"):
            reader[0]


def test_many_leaves_and_sizes_that_would_overflow(tmp_path):
    count = 2000
    item = u32(*[MOST] * count)
    reader = LitDataReader(chunk_of(tmp_path, craft.classic([item]), 1, ["bytes"] * count))
    with pytest.raises(FormatError, match="sizes of its 2000 leaves"):
        reader[0]


def test_batches_of_many_rows_of_one_sample(tmp_path):
    path = craft.write(tmp_path / "set", FORMATS, TREE, [row(3)])
    batch = LitDataReader(path).read_batch(np.zeros(5000, dtype=np.int64))
    assert batch["g"].shape == (5000, 2, 3)
    assert (batch["g"] == batch["g"][0]).all()
