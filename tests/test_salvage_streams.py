"""salvage of legacy streams and tar files, which have no checksums: what was written to its end comes out."""

import struct

import pytest
import torch

import fastckpt
from fastckpt import FormatError, salvage
from objects import saved
from salvagetools import flipped, salvaged
from streamcraft import Call, Name, Pid, floats, legacy_stream, storage, tar_checkpoint, tensor
from support import QUIET

pytestmark = QUIET


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.pt"


# -- legacy streams


LEGACY = legacy_stream(
    {
        "a": tensor(storage("1", 3), (3,)),
        "b": [tensor(storage("2", 2), (2,)), 7],
        "c": tensor(storage("3", 4, "IntStorage"), (2, 2)),
    },
    {"1": (3, floats(1, 2, 3)), "2": (2, floats(0, 0)), "3": (4, struct.pack("<4i", 1, 2, 3, 4))},
)
LEGACY_OBJECT = {
    "a": torch.tensor([1.0, 2, 3]),
    "b": [torch.zeros(2), 7],
    "c": torch.tensor([[1, 2], [3, 4]], dtype=torch.int32),
}
LEGACY_NAMES = ["a", "b.0", "c"]
# where each storage's count begins
COUNTS = [len(LEGACY) - 24 - 16 - 20, len(LEGACY) - 24 - 16, len(LEGACY) - 24]


def legacy_cuts():
    for row, count in enumerate(COUNTS):
        for where in (count, count + 1, count + 8, count + 11):
            yield f"{LEGACY_NAMES[row]} + {where - count}", where, LEGACY_NAMES[row:]
    keys = LEGACY.rindex(b"\x80\x02]", 0, COUNTS[0])
    for where in (keys, keys + 5):
        yield f"keys + {where - keys}", where, LEGACY_NAMES


@pytest.mark.parametrize(
    ("where", "lost"), [each[1:] for each in legacy_cuts()], ids=[each[0] for each in legacy_cuts()]
)
def test_legacy_cut_off(where, lost, out):
    report, _ = salvaged(LEGACY[:where], out, LEGACY_OBJECT, LEGACY_NAMES)
    assert list(report.lost) == lost
    assert report.container == "legacy"
    assert "no checksums" in str(report)


@pytest.mark.parametrize(
    ("where", "lost"),
    [
        (COUNTS[2], ["b.0", "c"]),
        (COUNTS[2] + 9, []),
        (COUNTS[1], ["b.0", "c"]),
        (COUNTS[0] + 8, LEGACY_NAMES),
    ],
    ids=["a storage of zeros in front", "the last one", "at a count", "behind a count"],
)
def test_legacy_filled_up_with_zeros(where, lost, out):
    data = LEGACY[:where] + bytes(len(LEGACY) - where)
    if not lost:
        report = salvage(data, out)  # nothing behind the last storage tells
        assert report.ok
        return
    report, _ = salvaged(data, out, LEGACY_OBJECT, LEGACY_NAMES)
    assert list(report.lost) == lost


def test_legacy_last_storage_of_many_zeros_is_suspicious(out):
    data = saved(torch.zeros(4096), legacy=True)
    report = salvage(data, out)
    assert report.ok
    assert "zeros_at_end" in [finding.kind for finding in report.findings]


def test_legacy_wrong_count(out):
    report, _ = salvaged(flipped(LEGACY, COUNTS[1]), out, LEGACY_OBJECT, LEGACY_NAMES)
    assert list(report.lost) == ["b.0"]
    assert "counts" in report.lost["b.0"]


def test_legacy_slices_get_records_of_their_own(out):
    obj = [
        tensor(storage("7", 6, view=("v1", 1, 3)), (3,)),
        tensor(storage("7", 6, view=("v2", 3, 3)), (3,)),
        tensor(storage("7", 6), (6,)),
    ]
    data = legacy_stream(obj, {"7": (6, floats(*range(6)))})
    assert salvage(data, out).ok
    result = torch.load(out)
    assert [each.tolist() for each in result] == [[1, 2, 3], [3, 4, 5], [0, 1, 2, 3, 4, 5]]
    with pytest.raises(FormatError):
        fastckpt.load(data[:-1])
    assert set(salvage(data[:-1], out, overwrite=True).lost) == {"0", "1", "2"}


def test_python_2_files_stay_what_they_are(out):
    pairs = Call(
        Name("collections", "OrderedDict"),
        (
            [
                ["gr\xf6\xdfe", tensor(storage("1", 1), (1,))],
                ["gone", tensor(storage("2", 1), (1,))],
            ],
        ),
    )
    data = legacy_stream(pairs, {"1": (1, floats(5)), "2": (1, floats(6))}, python2=True)
    report = salvage(data[:-2], out)
    assert list(report.lost) == ["gone"]
    assert list(fastckpt.load(out, encoding="latin1")) == ["gr\xf6\xdfe"]
    assert list(fastckpt.load(out, encoding="bytes")) == ["gr\xf6\xdfe".encode("latin-1")]


def test_legacy_pickle_is_damaged(out):
    for data in (LEGACY[:300], LEGACY.replace(b"_rebuild", b"_re\xffuild", 1)):
        with pytest.raises(FormatError, match="nothing can be salvaged"):
            salvage(data, out)
    assert not out.exists()


# -- tar files


TAR_STORAGES = {1: floats(1, 2, 3), 2: floats(7, 8), 3: floats(0, 9, 9, 9)}
TAR_OBJECT = {
    "w": torch.tensor([1.0, 2, 3]),
    "l": [torch.tensor([7.0, 8]), torch.tensor([0.0, 9, 9, 9])[1:]],
    "v": torch.tensor([9.0, 9]),
}
TAR_NAMES = ["w", "l.0", "l.1", "v"]
TAR = tar_checkpoint(
    {"w": Pid("11"), "l": [Pid("12"), Pid("13")], "v": Pid("14")},
    [
        (11, 1, (3,), (1,), 0),
        (12, 2, (2,), (1,), 0),
        (13, 3, (3,), (1,), 1),
        (14, 4, (2,), (1,), 0),
    ],
    [(key, "FloatStorage", data, len(data) // 4) for key, data in TAR_STORAGES.items()],
    [(4, 3, 2, 2)],
)
TAR_ENDS = [TAR.index(data) + len(data) for data in TAR_STORAGES.values()]


@pytest.mark.parametrize("zeros", [False, True], ids=["cut off", "filled up with zeros"])
@pytest.mark.parametrize(
    ("where", "lost"),
    [
        (len(TAR), []),
        (TAR_ENDS[2] + 4, ["v"]),
        (TAR_ENDS[2] - 5, ["l.1", "v"]),
        (TAR_ENDS[1] + 3, ["l.1", "v"]),
        (TAR_ENDS[0] + 1, ["l.0", "l.1", "v"]),
        (TAR_ENDS[0] - 9, TAR_NAMES),
        (TAR_ENDS[0] - 20, TAR_NAMES),
    ],
    ids=["whole", "views", "third", "behind second", "behind first", "first", "count"],
)
def test_tar_cut_off(where, lost, zeros, out):
    data = TAR[:where] + bytes(len(TAR) - where) * zeros
    report, _ = salvaged(data, out, TAR_OBJECT, TAR_NAMES)
    assert list(report.lost) == lost
    assert report.container == "tar"


def test_tar_without_its_storages(out):
    where = TAR.index(b"storages\0") - 512
    report, _ = salvaged(TAR[: max(where, 0) + 600], out, TAR_OBJECT, TAR_NAMES)
    assert list(report.lost) == TAR_NAMES


def test_tar_pickle_is_damaged(out):
    with pytest.raises(FormatError, match="nothing can be salvaged"):
        salvage(TAR[:1700], out)
