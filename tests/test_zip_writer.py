"""The layout of ZIP archives, compared with what torch itself writes, byte by byte."""

import io
import os
import zipfile

import numpy as np
import pytest
import torch

from fastckpt.containers.zip_writer import (
    SERIALIZATION_ID_NBYTES,
    ZipLayout,
    archive_name,
    serialization_id,
)
from objects import one_of_each, saved
from support import QUIET, TORCH

MAX32 = 0xFFFFFFFF
LAID_OUT = pytest.mark.skipif(TORCH < (2, 8), reason="torch before 2.8 knows no alignment")


def laid_out(infos, alignment=64):
    return ZipLayout([i.filename for i in infos], [i.file_size for i in infos], alignment)


def written(layout, contents, crc32):
    """The archive as bytes: data first, then what stands around it."""
    out = bytearray(b"\xee" * layout.total)
    for offset, data in zip(layout.offset.tolist(), contents, strict=True):
        out[offset : offset + len(data)] = data
    for at, frame in layout.frames(crc32):
        out[at : at + len(frame)] = frame
    return bytes(out)


OBJECTS = {
    "nothing": {},
    "a number": 5,
    "a tensor": torch.arange(5.0),
    "empty storages": [torch.empty(0), torch.ones(1), torch.empty(0, 3)],
    "sizes around the alignment": [torch.zeros(n, dtype=torch.uint8) for n in range(130)],
    "many records": [torch.ones(i % 7) for i in range(1200)],
    "a shared storage": [torch.arange(9)[1:]] * 3,
}


@pytest.mark.parametrize("obj", OBJECTS.values(), ids=OBJECTS)
def test_torch_writes_the_same_bytes(obj):
    expected = saved(obj)
    archive = zipfile.ZipFile(io.BytesIO(expected))
    infos = archive.infolist()
    contents = [archive.read(info) for info in infos]
    assert written(laid_out(infos), contents, [info.CRC for info in infos]) == expected


@pytest.mark.filterwarnings(*[mark.args[0] for mark in QUIET])
def test_torch_writes_the_same_bytes_for_every_kind_of_tensor():
    test_torch_writes_the_same_bytes(one_of_each())


@LAID_OUT
@pytest.mark.parametrize("alignment", [1, 2, 64, 100, 4096, 65504])
def test_alignment(alignment, tmp_path):
    layout = compared_with_holes(tmp_path / "model.pt", [100, 3, 0, 5, 64], alignment)
    assert not (layout.offset % alignment).any()


@LAID_OUT
@pytest.mark.parametrize(
    "sizes",
    [
        [5, MAX32, 0, 3],
        [MAX32 - 1, 7, 8],
        [MAX32 - 200, *[16] * 6],
        [MAX32 - 400, 1, 1, 0, 5, 6],
        [2 * MAX32, MAX32, 0],
    ],
    ids=["a large record", "just not large", "headers on both sides", "nothing there", "several"],
)
def test_beyond_four_gigabytes(sizes, tmp_path):
    compared_with_holes(tmp_path / "model.pt", sizes)


def compared_with_holes(path, sizes, alignment=64):
    """Compare all but the data with torch's writer, which leaves holes in a sparse file."""
    writer = torch._C.PyTorchFileWriter(str(path), True, alignment)
    for number, nbytes in enumerate(sizes):
        writer.write_record_metadata(f"data/{number}", nbytes)
    writer.write_end_of_file()
    infos = zipfile.ZipFile(path).infolist()
    layout = laid_out(infos, alignment)
    assert layout.total == os.path.getsize(path)
    with open(path, "rb") as file:
        for at, frame in layout.frames([info.CRC for info in infos]):
            file.seek(at)
            assert file.read(len(frame)) == frame, f"byte {at}"
    return layout


def test_positions_follow_each_other():
    layout = ZipLayout(["a/data.pkl", "a/data/0", "a/data/1"], [5, 0, 64])
    assert layout.header.tolist() == [0, *layout.end.tolist()[:-1]]
    assert layout.directory == layout.end[-1]
    assert (layout.offset + layout.nbytes <= layout.end).all()


def test_an_archive_of_nothing():
    layout = ZipLayout([], [])
    data = written(layout, [], [])
    assert zipfile.ZipFile(io.BytesIO(data)).namelist() == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((["a"], [1, 2]), "1 names for 2 records"),
        ((["a"], [-1]), "negative"),
        ((["a"] * 3, [2**61, 2**61, 2**61]), "62 bits"),
        ((["a" * 70000], [1]), "name has 70000 bytes"),
        ((["a"], [1], 0), "alignment=0"),
        ((["a", "b"], [1, 1], 1 << 17), "1 to 65536"),
        ((["a", "b"], [65486, 1], 1 << 16), "padding"),
    ],
)
def test_what_no_archive_can_have(arguments, words):
    with pytest.raises(ValueError, match=words):
        ZipLayout(*arguments)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("model.pt", "model"),
        ("a/b/model.x.pt", "model.x"),
        ("a\\b.pt", "b"),
        ("model", "model"),
        (b"model.bin", "model"),
        ("größe.pt", "archive"),
        (".hidden", "archive"),
        (None, "archive"),
    ],
)
def test_archive_name(path, name, tmp_path):
    assert archive_name(path) == name


def test_serialization_id_tells_archives_apart():
    ids = {
        serialization_id(*what)
        for what in ((["a"], [1]), (["b"], [1]), (["a"], [2]), ([], []), (["a", "b"], [1, 2]))
    }
    assert len(ids) == 5
    assert all(len(each) == SERIALIZATION_ID_NBYTES and each.isdigit() for each in ids)


def test_a_sum_for_each_record_is_wanted():
    layout = ZipLayout(["a", "b"], [1, 2])
    with pytest.raises(ValueError, match="broadcast"):
        layout.frames(np.zeros(3))


def three_records():
    """A layout, its contents, and columns that know where the second content lies in memory."""
    contents = [np.full(n, n, dtype=np.uint8) for n in (5, 70, 0)]
    layout = ZipLayout(["a/0", "a/1", "a/2"], list(map(len, contents)))
    columns = layout.columns([1, 2, 3], [0, contents[1].ctypes.data, 0])
    return layout, contents, columns


def test_data_is_rendered_where_it_has_an_address():
    layout, contents, columns = three_records()
    begin = int(layout.offset[0]) + 5
    expected = written(layout, [bytes(c) for c in contents], [1, 2, 3])
    assert layout.render(columns, begin, layout.total) == expected[begin:]
    assert (
        layout.render(columns, begin, int(layout.header[1]))
        == expected[begin : int(layout.header[1])]
    )


@pytest.mark.parametrize(
    ("begin", "end", "words"),
    [
        (0, "end 0", "lies elsewhere"),
        (3, "offset 0", "end in a header"),
        ("header 1", "offset 1 + 1", "end in a header"),
        ("header 1", "end 1 - 1", "end in a header"),
        ("header 1", 0, "no place"),
    ],
)
def test_ranges_that_cut_through_something(begin, end, words):
    layout, _contents, columns = three_records()
    at = {
        f"{name} {row}": int(getattr(layout, name)[row])
        for name in ("header", "offset", "end")
        for row in (0, 1)
    }
    at |= {"offset 1 + 1": at["offset 1"] + 1, "end 1 - 1": at["end 1"] - 1}
    with pytest.raises(ValueError, match=words):
        layout.render(columns, at.get(begin, begin), at.get(end, end))


@pytest.mark.parametrize(
    ("cell", "value", "words"),
    [
        ((0, 1), -1, "no layout has"),
        ((1, 1), 3, "no layout has"),
        ((3, 1), 8, "not among the names"),
        ((4, 1), -1, "not among"),
    ],
    ids=["header", "offset", "name", "length of the name"],
)
def test_columns_that_contradict_themselves(cell, value, words):
    layout, _contents, columns = three_records()
    columns[cell] = value
    with pytest.raises(ValueError, match=words):
        layout.render(columns, 0, layout.total)
