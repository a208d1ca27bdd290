"""salvage of ZIP files: what is whole comes out equal to the bit, everything else is listed, and nothing is made up."""

import collections
import io
import struct
import zipfile
import zlib

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

import fastckpt
import picklecraft
from fastckpt import FormatError, UnsupportedError, salvage
from objects import one_of_each, saved, saved_objects
from salvagetools import DIRECTORY, GOOD, IN_RECORD, PLACES, flipped, model, places, salvaged
from streamcraft import Call as StreamCall
from streamcraft import Name as StreamName
from streamcraft import legacy_stream
from support import QUIET, same
from zipcraft import Entry, archive, checkpoint

pytestmark = QUIET

REBUILD = picklecraft.Name("torch._utils _rebuild_tensor")
DEPTH = 5000


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.pt"


# -- a whole file


@pytest.mark.parametrize(
    "data",
    [GOOD, saved({}), saved([torch.ones(i % 3) for i in range(300)])],
    ids=["model", "nothing", "many"],
)
def test_a_whole_file_comes_out_as_it_is(data, out):
    report = salvage(data, out)
    assert report.ok
    assert not report.findings
    assert out.read_bytes() == data


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_every_kind_of_tensor(legacy, out):
    expected = one_of_each()
    if legacy:
        del expected["nested"]  # torch cannot read those of its own legacy files
    report = salvage(saved(expected, legacy=legacy), out)
    assert report.ok
    same(expected, torch.load(out, weights_only=True))


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
@given(obj=saved_objects())
def test_whole_files_of_any_object(obj, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "out.pt"
    for legacy in (False, True):
        data = saved(obj, legacy=legacy)
        try:
            expected = fastckpt.load(data, unknown="opaque")
        except fastckpt.CheckpointError:
            continue
        assert salvage(data, out, overwrite=True).ok
        if not legacy:
            assert out.read_bytes() == data
        same(expected, fastckpt.load(out, unknown="opaque"))


# What runs a program where Python unpickles it, beside a tensor.
OBJECT = {
    "w": picklecraft.Call(REBUILD, (picklecraft.storage("FloatStorage", "0", 4), 0, (4,), (1,))),
    "x": picklecraft.Call(picklecraft.Name("os system"), ("id",)),
}
STREAMED = {"flags": 0x0808, "descriptor": True}
DANGEROUS = checkpoint(data__pkl=picklecraft.craft(OBJECT))
BESIDE = Entry("archive/extra.pkl", picklecraft.craft(OBJECT["x"]), **STREAMED)


def cut(data):
    return data[: data.index(b"PK\1\2")]


@pytest.mark.parametrize(
    "data",
    [
        archive(DANGEROUS),
        cut(archive(DANGEROUS)),
        archive([*DANGEROUS, Entry("archive/data/9", crc=1, data=b"9")]),
        cut(archive([*checkpoint(data__pkl=picklecraft.craft({"w": OBJECT["w"]})), BESIDE])),
        legacy_stream({"w": 1, "x": StreamCall(StreamName("os", "system"), ("id",))}, {}),
    ],
    ids=["zip", "no directory", "damaged", "in a record beside", "legacy"],
)
def test_dangers_that_are_carried_over_are_named(data, out):
    report = salvage(data, out)
    assert not report.ok
    found = [each for each in report.findings if each.kind == "dangerous_name"]
    assert len(found) == 1
    assert str(out) in found[0].message
    assert "os.system, which starts programs" in str(report)
    assert fastckpt.scan(out).rating == "dangerous"


def test_records_of_others_are_carried_over(out):
    entries = [
        *checkpoint(),
        Entry("archive/.data/note", b"by hand"),
        Entry("archive/data/99", b"extra"),
    ]
    assert salvage(archive(entries), out).ok
    with zipfile.ZipFile(out) as packed:
        assert packed.read("archive/.data/note") == b"by hand"
        assert packed.read("archive/data/99") == b"extra"


def test_byteorder_and_version(out):
    pickle = picklecraft.craft(
        {
            "a": picklecraft.Call(
                REBUILD,
                (picklecraft.storage("ShortStorage", "0", 2), 0, (2,), (1,)),
            )
        }
    )
    entries = checkpoint(
        [struct.pack(">hh", 1, 2)], root="big/", byteorder=b"big", version=b"5\n", data__pkl=pickle
    )
    for broken in (archive(entries), archive([*entries, Entry("big/data/1", b"x", crc=1)])):
        salvage(broken, out, overwrite=True)
        assert torch.load(out)["a"].tolist() == [1, 2]
        with zipfile.ZipFile(out) as packed:
            assert packed.read("big/byteorder") == b"big"
            assert packed.read("big/version") == b"5\n"
    damaged = archive(
        [
            Entry(e.name, b"bxg", crc=zlib.crc32(b"big")) if e.name.endswith(b"byteorder") else e
            for e in entries
        ]
    )
    report = salvage(damaged, out, overwrite=True)
    assert torch.load(out)["a"].tolist() == [1, 2]
    assert "big is taken for it" in str(report)


@pytest.mark.parametrize(
    ("version", "taken"), [(b"abc", b"3\n"), (b"0", b"3\n"), (None, b"3\n"), (b"7", b"7")]
)
def test_versions(version, taken, out):
    salvage(archive(checkpoint(version=version)), out)
    with zipfile.ZipFile(out) as packed:
        assert packed.read("archive/version") == taken


def test_a_newer_version_is_refused(out):
    with pytest.raises(UnsupportedError, match="above 10"):
        salvage(archive(checkpoint(version=b"11\n")), out)


def test_deflated_and_repacked_files(out):
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(GOOD)) as old,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    data = packed.getvalue()
    for broken in (data, data[: zipfile.ZipFile(packed).start_dir]):  # sizes stand in local headers
        report, result = salvaged(broken, out)
        assert report.ok
        same(model(), result)


# -- files that were cut off


def cuts():
    """(id, where, records that are whole): every part of the file cut at its beginning, inside and at its end."""
    whole = set()
    for name, (header, start, stop, end) in PLACES.items():
        for part, first, last in (
            ("header", header, start),
            ("data", start, stop),
            ("descriptor", stop, end),
        ):
            for where in sorted({first, (first + last) // 2, last - 9} & {*range(first, last)}):
                yield f"{name} {part} {where - first}", where, set(whole)
        whole.add(name)
    end = len(GOOD)
    for where in (
        DIRECTORY,
        DIRECTORY + 1,
        (DIRECTORY + end) // 2,
        end - 99,
        end - 60,
        end - 30,
        end - 1,
    ):
        yield f"directory {where - end}", where, set(whole)


@pytest.mark.parametrize(
    ("where", "whole"), [each[1:] for each in cuts()], ids=[each[0] for each in cuts()]
)
def test_cut_off(where, whole, out):
    for data in (GOOD[:where], GOOD[:where] + bytes(len(GOOD) - where)):
        if len(data) > where and not any(GOOD[where : where + 8]):
            continue  # what is zero anyway is not lost
        if "data.pkl" not in whole:
            with pytest.raises(FormatError):
                salvage(data, out)
            assert not out.exists()
            continue
        report, _ = salvaged(data, out)
        lost = {
            name for key, names in IN_RECORD.items() for name in names if f"data/{key}" not in whole
        }
        assert set(report.lost) == lost - {"e"}
        assert report.findings


def test_what_a_lost_tensor_leaves(out):
    report, result = salvaged(GOOD[: PLACES["data/2"][1] + 5], out)
    assert result == {
        "w": result["w"],
        "e": result["e"],
        "l": [None, None, None],
        "n": 3,
        "opt": {"state": {0: {}}},
    }
    assert "cut short" in report.lost["l.0"]
    assert "is not in the file" in report.lost["opt.state.0.m"]


# -- files that were damaged


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("part", ["signature", "name", "extra", "data", "descriptor"])
def test_flips_with_a_directory(name, part, out):
    header, start, stop, end = PLACES[name]
    where = {
        "signature": header,
        "name": header + 33,
        "extra": header + 28,
        "data": (start + stop) // 2,
        "descriptor": (stop + end) // 2,
    }[part]
    if part in ("data", "descriptor") and start == stop:
        return
    if name == "data.pkl" and part == "data":
        with pytest.raises(FormatError, match=r"CRC-32 is .* 10 other records are whole"):
            salvage(flipped(GOOD, where), out)
        return
    report, _ = salvaged(flipped(GOOD, where), out)
    lost = IN_RECORD.get(name.removeprefix("data/"), set()) if part == "data" else set()
    assert set(report.lost) == lost
    assert all("CRC-32" in why for why in report.lost.values())


@pytest.mark.parametrize("where", range(DIRECTORY, len(GOOD), 17))
def test_flips_in_the_directory(where, out):
    report, _ = salvaged(flipped(GOOD, where), out)
    assert not report.lost


@pytest.mark.parametrize("name", [name for name in PLACES if name != "data.pkl"])
def test_flips_without_a_directory(name, out):
    """Where a header or a descriptor is damaged as well, its own record is lost, and no other."""
    header, start, stop, _ = PLACES[name]
    for where in (header, header + 26, header + 28, header + 40, (start + stop) // 2, stop + 5):
        report, _ = salvaged(flipped(GOOD[:DIRECTORY], where), out)
        assert set(report.lost) <= IN_RECORD.get(name.removeprefix("data/"), set()) | (
            IN_RECORD["2"] if name == "data/1" else set()
        )


def test_bytes_missing_in_the_middle(out):
    where = PLACES["data/0"][1] + 7
    report, _ = salvaged(GOOD[:where] + GOOD[where + 40 :], out)
    assert "w" in report.lost
    assert "opt.state.0.m" in report.kept


def test_a_missing_record(out):
    with zipfile.ZipFile(io.BytesIO(GOOD)) as packed:
        entries = [
            Entry(i.filename, packed.read(i))
            for i in packed.infolist()
            if not i.filename.endswith("data/3")
        ]
    report, _ = salvaged(archive(entries), out)
    assert set(report.lost) == {"l.1"}


def test_a_record_that_is_there_twice(out):
    entries = [
        Entry(f"archive/{name}", GOOD[start:stop], descriptor=True)
        for name, (_, start, stop, _) in PLACES.items()
    ]
    twin = Entry("archive/data/0", b"x" * 240, descriptor=True)
    report, _ = salvaged(archive([*entries, twin]), out)
    assert set(report.lost) == {"w"}
    assert "two contents" in report.lost["w"]


def test_an_archive_inside_a_tensor(out):
    """The records of a checkpoint that lies in a tensor are none of the outer one, be that damaged or not."""
    inner = saved({"w": torch.full((20, 3), 5.0), "x": torch.zeros(12)})
    raw = torch.frombuffer(bytearray(inner), dtype=torch.uint8).clone()
    expected = {"raw": raw, "w": model()["w"], "x": torch.ones(12)}
    data = saved(expected)
    parts, directory = places(data)
    start = parts["data/0"][1]
    for broken, lost in (
        (data[:directory], set()),
        (flipped(data, start + 9)[:directory], {"raw"}),
        (flipped(data, parts["data/0"][2] + 5)[:directory], {"raw"}),
        (data[: start + len(inner) - 30], {"raw", "w", "x"}),
    ):
        report, _ = salvaged(broken, out, expected, expected)
        assert set(report.lost) == lost


def test_no_checksums_were_computed(out, tmp_path):
    path = tmp_path / "model.pt"
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(model(), path)
    finally:
        torch.serialization.set_crc32_options(before)
    data = path.read_bytes()
    report, _ = salvaged(data, out)
    assert report.ok
    assert "no CRC-32" in str(report)
    parts, _ = places(data)
    header, _, stop, _ = parts["data/0"]
    for broken in (data[: stop + 10], flipped(data, stop + 9), flipped(data, header)):
        report, _ = salvaged(broken, out)
        assert "w" in report.lost


# -- what is lost with a storage


def lossy(obj, key, out, **options):
    """Salvage a file of an object in which storage ``key`` is damaged."""
    data = saved(obj)
    where = places(data)[0][f"data/{key}"][1]
    report = salvage(flipped(data, where), out, overwrite=True)
    return report, torch.load(out, **{"weights_only": True, **options})


class Holder:
    def __init__(self):
        self.kept, self.gone = torch.ones(2), torch.ones(3)


class Slotted:
    __slots__ = ("gone", "kept")


def test_modules_and_metadata(out):
    state = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).state_dict()
    report, result = lossy(state, 0, out)
    assert type(result) is collections.OrderedDict
    assert list(report.lost) == ["0.weight"]
    assert list(result) == list(state)[1:]
    same(state._metadata, result._metadata)


def test_objects_keep_their_other_attributes(out):
    holder, slotted = Holder(), Slotted()
    slotted.kept, slotted.gone = 5, torch.ones(4)
    report, result = lossy(
        {"h": holder, "s": slotted, "m": nn.Linear(2, 2)}, 1, out, weights_only=False
    )
    assert list(report.lost) == ["h.gone"]
    assert list(vars(result["h"])) == ["kept"]
    assert torch.equal(result["h"].kept, torch.ones(2))
    report, result = lossy(
        {"h": holder, "s": slotted, "m": nn.Linear(2, 2)}, 2, out, weights_only=False
    )
    assert not hasattr(result["s"], "gone")
    assert result["s"].kept == 5
    report, result = lossy({"m": nn.Linear(2, 2)}, 0, out, weights_only=False)
    assert list(result["m"]._parameters) == ["bias"]


def test_calls_need_all_their_arguments(out):
    ones, sparse = torch.ones(2), torch.eye(3).to_sparse()
    for key in range(1, 3):
        report, result = lossy(
            {"a": ones, "s": sparse, "t": (ones, sparse, 5), "p": nn.Parameter(ones)}, key, out
        )
        assert set(report.lost) == {"s", "t.1"}
        same({"a": ones, "t": (ones, None, 5), "p": nn.Parameter(ones)}, result)


def test_attributes_of_parameters(out):
    parameter = nn.Parameter(torch.ones(3))
    parameter.note, parameter.mask = "n", torch.zeros(5)
    report, result = lossy([parameter], 1, out)
    assert list(report.lost) == ["0 (an attribute of it)"]
    assert not report.ok
    assert vars(result[0]) == {"note": "n"}


def test_sharing_and_cycles_stay(out):
    inner = [torch.ones(2)]
    obj = {"a": inner, "b": inner, "t": (inner, "x"), "gone": torch.ones(3)}
    inner.append(obj)
    report, result = lossy(obj, 1, out)
    assert set(report.lost) == {"gone"}
    assert result["a"] is result["b"] is result["t"][0]
    assert result["a"][1] is result


def test_deep_nesting_takes_no_recursion(out):
    broken = picklecraft.storage("FloatStorage", "0", 1)
    lost = picklecraft.Call(REBUILD, (broken, 0, (1,), (1,)))
    pickle = b"\x80\x02](" + b"]" * DEPTH + b"a" * (DEPTH - 1) + picklecraft.emit(lost) + b"e."
    report = salvage(archive(checkpoint([], data__pkl=pickle)), out)
    assert list(report.lost) == ["1"]
    result = torch.load(out, weights_only=True)
    depth = 0
    while result:
        result, depth = result[0], depth + 1
    assert depth == DEPTH


def test_the_whole_object_is_lost(out):
    with pytest.raises(FormatError, match="nothing is left to be written"):
        lossy(torch.ones(3), 0, out)
    assert not out.exists()


def test_offsets_that_torch_computes(out, monkeypatch):
    """torch's debug switch compares where it thinks storages are with where they are."""
    load = getattr(pytest.importorskip("torch.utils.serialization.config"), "load", None)
    if not hasattr(load, "calculate_storage_offsets"):
        pytest.skip("this torch computes no offsets")
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")
    expected = {str(i): torch.full((i,), float(i)) for i in range(9)}
    load.calculate_storage_offsets = True
    try:
        report, result = lossy(expected, 3, out)
        mapped = torch.load(out, mmap=True)
    finally:
        load.calculate_storage_offsets = False
    assert list(report.lost) == ["3"]
    del expected["3"]
    same(expected, result)
    same(expected, mapped)


# -- two saves in one file


def two_saves(cut):
    """A new save that was written over an old one of the same layout, up to byte ``cut`` of it."""
    old, new = (
        saved({f"w{i}": torch.full((500,), value) for i in range(6)}) for value in (1.0, 2.0)
    )
    return new[:cut] + old[cut:]


def test_a_save_that_died_over_an_older_one(out):
    cut = len(two_saves(0)) // 2
    report = salvage(two_saves(cut), out)
    values = [value[0].item() for value in torch.load(out).values()]
    assert set(values) == {1.0, 2.0}
    assert not report.ok
    contradicted = {each.record for each in report.findings if each.kind == "contradiction"}
    assert contradicted == {f"data/{i}" for i in range(values.count(2.0))}
    assert "may come from different saves" in str(report)


@pytest.mark.parametrize("part", [0, 1], ids=["old", "new"])
def test_one_save_is_not_contradicted(part, out):
    report = salvage(two_saves(part * len(two_saves(0))), out)
    assert report.ok
    assert not report.findings
