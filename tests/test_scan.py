"""scan says what a pickle would do, in every place where one can hide, and nothing of it happens."""

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import struct
import subprocess
import sys
import tarfile

import numpy as np
import pytest
import torch

import fastckpt
from fastckpt import FormatError, Limits
from fastckpt.ratings import rate
from fastckpt.rebuild import TABLE
from make_expected import FOLDER
from picklecraft import Call, Name, Pid, Raw, craft, emit, storage, torch_file
from streamcraft import Call as StreamCall
from streamcraft import Name as StreamName
from streamcraft import Pid as StreamPid
from streamcraft import legacy_stream, pickled, tar_checkpoint, tensor
from streamcraft import storage as stream_storage
from zipcraft import PICKLE, Entry, archive, checkpoint, local_part

MARKER = "scan_marker"  # payloads make a folder of this name in the current one
TEXT = emit(MARKER)
MKDIR = Call(Name("os mkdir"), (MARKER,))
PAYLOAD = craft(MKDIR)
PARTIAL = Call(Name("functools partial"), (Name("os mkdir"), MARKER))
TAG, INTS = Name("torch.jit._pickle restore_type_tag"), Name("torch.jit._pickle build_intlist")
SCALAR = Name("numpy.core.multiarray scalar")
FROM_TYPE = Name("torch._tensor _rebuild_from_type_v2")
IMPORTED = Call(Name("builtins __import__"), ("os",))


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert not os.path.exists(MARKER)


# -- the ways to a call -------------------------------------------------------------------------------------------

# Pickles that make the folder, and words that the report has.
ROUTES = {
    "REDUCE": (PAYLOAD, "starts programs, and calls it (REDUCE) with ('scan_marker',)"),
    "OBJ": (craft(Call(Name("os mkdir"), (MARKER,), how="OBJ")), "calls it (OBJ)"),
    "INST": (craft(Call(Name("os mkdir"), (MARKER,), how="INST")), "calls it (INST)"),
    "INST in a text pickle": (b"(S'scan_marker'\nios\nmkdir\n.", "calls it (INST)"),
    "result dropped by POP": (craft(Raw(emit(MKDIR) + b"0" + emit({"w": 1}))), "os.mkdir"),
    "result dropped by POP_MARK": (craft(Raw(b"(" + emit(MKDIR) + b"1N")), "os.mkdir"),
    "in a key": (craft(Raw(b"}" + emit(MKDIR) + b"Ns")), "os.mkdir"),
    "name of Python 2": (
        b"c__builtin__\neval\n(S'__import__(\"os\").mkdir(\"scan_marker\")'\ntR.",
        "__builtin__.eval, which runs code",
    ),
    "STACK_GLOBAL": (b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93" + TEXT + b"\x85R.", "os.mkdir"),
    "STACK_GLOBAL of memoized strings": (
        b"\x80\x04\x8c\x05mkdir\x940\x8c\x02os\x940h\x01h\x00\x93" + TEXT + b"\x85R.",
        "os.mkdir",
    ),
    "STACK_GLOBAL of numbered strings": (
        b"\x80\x04\x8c\x02osq\x070\x8c\x05mkdirr\0\1\0\x000h\x07j\0\1\0\0\x93" + TEXT + b"\x85R.",
        "os.mkdir",
    ),
    "a walk over attributes": (
        b"\x80\x04\x8c\x06random\x8c\x09_os.mkdir\x93" + TEXT + b"\x85R.",
        "random._os.mkdir",
    ),
    "a walk over attributes out of torch": (
        b"\x80\x04\x8c\x13torch.serialization\x8c\x08os.mkdir\x93" + TEXT + b"\x85R.",
        "torch.serialization.os.mkdir",
    ),
    "a computed name": (
        craft(Raw(emit(Call(Name("builtins str"), ("os",))) + emit("mkdir") + b"\x93" + TEXT + b"\x85R")),
        "a name is made by calls",
    ),
    "computed arguments": (
        craft(Raw(emit(Name("os mkdir")) + emit(Call(Name("builtins tuple"), ([MARKER],))) + b"R")),
        "calls it (REDUCE) with builtins.tuple(...)",
    ),
    "getattr": (
        craft(Call(Call(Name("builtins getattr"), (IMPORTED, "mkdir")), (MARKER,))),
        "what builtins.getattr gives is called",
    ),
    "a result that is called": (craft(Call(PARTIAL)), "what functools.partial gives is called"),
    "behind an int in hexadecimal": (b"I0x10\n0" + PAYLOAD, "os.mkdir"),
    "behind READONLY_BUFFER": (b"\x80\x05C\x01x\x980" + PAYLOAD, "os.mkdir"),
    "by another unpickler": (
        craft(Call(Name("pickle loads"), (PAYLOAD,))),
        "a call is given bytes that are a pickle",
    ),
}  # fmt: skip


@pytest.mark.parametrize("route", ROUTES)
def test_routes(route):
    data, words = ROUTES[route]
    report = fastckpt.scan(data)
    assert (report.ok, report.rating, report.kind) == (False, "dangerous", "pickle")
    assert words in str(report)
    json.dumps(report.as_dict())
    assert fastckpt.scan(torch_file(data)).pickles[0].names == report.pickles[0].names


@pytest.mark.parametrize("route", ROUTES)
def test_routes_are_real(route):
    pickle.loads(ROUTES[route][0])
    os.rmdir(MARKER)


# What no folder is made by: pickles, the rating, and words.
USES = {
    "NEWOBJ": (craft(Call(Name("lab Net"), (1,), how="NEWOBJ")), "unknown", "lab.Net, which is not known"),
    "NEWOBJ_EX": (
        craft(Call(Name("subprocess Popen"), (), how="NEWOBJ_EX", kwargs={"args": "id"})),
        "dangerous",
        "calls it (NEWOBJ_EX) with () {'args': 'id'}",
    ),
    "BUILD": (craft(Call(Name("lab Net"), (), {"w": 1})), "unknown", "lab.Net"),
    "BUILD on a class": (
        craft(Raw(emit(Name("torch Tensor")) + emit((None, {"__reduce__": 1})) + b"b")),
        "dangerous",
        "BUILD changes torch.Tensor itself: (None, {'__reduce__': 1})",
    ),
    "SETITEM on a name": (
        craft(Raw(emit(Name("sys modules")) + emit("os") + b"Ns")),
        "dangerous",
        "SETITEM changes sys.modules itself",
    ),
    "BUILD on what a function gives back": (
        craft(Raw(emit(Call(TAG, (Name("torch Tensor"), "x"))) + emit({"__len__": 1}) + b"b")),
        "dangerous",
        "BUILD changes torch.Tensor itself: {'__len__': 1}",
    ),
    "BUILD on what functions give back to each other": (
        craft(Raw(emit(Call(TAG, (Call(INTS, (Call(SCALAR, (None, Name("torch Tensor"))),)), "x"))) + emit({"__len__": 1}) + b"b")),
        "dangerous",
        "BUILD changes torch.Tensor itself",
    ),
    "BUILD on what is called by another": (
        craft(Raw(emit(Call(FROM_TYPE, (TAG, Name("torch Tensor"), (Name("torch Size"), "x"), None))) + emit({"__len__": 1}) + b"b")),
        "dangerous",
        "BUILD changes torch.Size itself",
    ),
    "a state for what is called by another": (
        craft(Call(FROM_TYPE, (TAG, Name("torch Tensor"), (Name("torch Size"), "x"), {"__len__": 1}))),
        "dangerous",
        "REDUCE changes torch.Size itself",
    ),
    "BUILD on what computed arguments give back": (
        craft(Raw(emit(TAG) + emit(Call(Name("builtins tuple"), ([Name("torch Tensor"), "x"],))) + b"R" + emit({"__len__": 1}) + b"b")),
        "unknown",
        "BUILD changes what cannot be told",
    ),
    "BUILD on what is given back over and over": (
        craft(Raw(emit(Name("torch Tensor")) + (b"q\x00" + b"0" + emit(TAG) + b"h\x00N\x86R") * 40 + emit({"__len__": 1}) + b"b")),
        "unknown",
        "BUILD changes what cannot be told",
    ),
    "APPENDS on what is given back": (
        craft(Raw(emit(Call(TAG, (Name("torch Tensor"), "x"))) + b"(K\1K\2e")),
        "dangerous",
        "APPENDS changes torch.Tensor itself",
    ),
    "SETITEM on a tensor": (
        craft(Raw(emit(Call(Name("torch._utils _rebuild_tensor_v2"), (storage("FloatStorage", "0", 1), 0, (1,), (1,), False, {}))) + b"K\0K\1s")),
        "unknown",
        "SETITEM fills what torch._utils._rebuild_tensor_v2 made, which is no container",
    ),
    "EXT1": (b"\x80\x02\x82\x07)R.", "unknown", "copyreg extension 7 is named"),
    "EXT4": (b"\x80\x02\x84\1\0\1\0.", "unknown", "copyreg extension 65537 is named"),
    "persistent id": (craft(Pid("anything")), "unknown", "a persistent id is 'anything'"),
    "persistent id of a class": (
        craft(Pid(("storage", Name("os system"), "0", "cpu", 1))),
        "dangerous",
        "a persistent id is ('storage', os.system, '0', 'cpu', ...)",
    ),
    "attributes of no name": (
        b"\x80\x04\x8c\x05torch\x8c\x1fTensor.__init__.__globals__.get\x93.",
        "dangerous",
        "reaches into the interpreter",
    ),
    "unprintable name": (b"\x80\x04\x8c\x03a\x1b[\x8c\x02\xc2\x9b\x93.", "unknown", r"a\x1b[.\x9b"),
}  # fmt: skip


@pytest.mark.parametrize("use", USES)
def test_uses(use):
    data, rating, words = USES[use]
    report = fastckpt.scan(data)
    assert not report.ok
    assert report.rating == rating
    assert words in str(report)
    assert str(report).replace("\n", "").isprintable()


def test_order_and_offsets():
    data = craft([Name("torch float32"), Call(Name("lab f"), (1, "x")), MKDIR])
    (report,) = fastckpt.scan(torch_file(data)).pickles
    assert [(n.qualname, n.rating) for n in report.names] == [
        ("torch.float32", "known"), ("lab.f", "unknown"), ("os.mkdir", "dangerous"),
    ]  # fmt: skip
    for name in report.names:
        assert data[name.offset :].startswith(b"c" + name.module.encode())
    assert [
        (c.callee, c.opcode, c.arguments, data[c.offset : c.offset + 1]) for c in report.calls
    ] == [
        ("lab.f", "REDUCE", "(1, 'x')", b"R"),
        ("os.mkdir", "REDUCE", "('scan_marker',)", b"R"),
    ]
    assert report.nbytes == len(data)


# -- the places ---------------------------------------------------------------------------------------------------

FLOATS = {"0": (4, bytes(16))}
GOOD = {"w": tensor(stream_storage("0", 4), (4,))}
PARTS = ("magic number", "protocol version", "system info", "object", "list of storage keys")


def legacy_with(part, payload, drop=True):
    """A legacy stream with a payload in one of its pickles, whose result is dropped so that all else is as it was."""
    options = {"magic": 0x1950A86A20F9469CFC6C, "version": 1001, "sys_info": {}, "keys": ["0"]}
    whole = legacy_stream(GOOD, FLOATS, **options)
    begins = [0]
    for _ in PARTS:
        stream = io.BytesIO(whole[begins[-1] :])
        Loose(stream).load()
        begins.append(begins[-1] + stream.tell())
    at = begins[PARTS.index(part) + 1] - 1  # its STOP
    return whole[:at] + payload[2:-1] + (b"0" if drop else b"") + whole[at:]


class Loose(pickle.Unpickler):
    persistent_load = staticmethod(lambda pid: pid)
    find_class = staticmethod(lambda module, name: lambda *args: None)


@pytest.mark.parametrize("drop", [True, False])
@pytest.mark.parametrize("part", PARTS)
def test_pickles_of_a_legacy_stream(part, drop):
    data = legacy_with(part, PAYLOAD, drop)
    report = fastckpt.scan(data)
    assert report.kind == "legacy"
    assert report.rating == "dangerous"
    place = next(p for p in report.pickles if any(n.module == "os" for n in p.names))
    assert place.what == part
    if drop:
        assert [p.what for p in report.pickles] == list(PARTS)
        assert not report.notes
        assert data[report.findings[0].offset :].startswith(b"cos")


@pytest.mark.parametrize("member", ["sys_info", "storages", "tensors", "pickle"])
def test_members_of_a_tar(member):
    parts = (StreamPid(1), [(1, 0, (4,), (1,), 0)], [(0, "FloatStorage", bytes(16), 4)])
    good = tar_checkpoint(*parts)
    assert fastckpt.scan(good).ok
    payload = pickled(StreamCall(StreamName("os", "mkdir"), (MARKER,)))
    bad = tar_checkpoint(*parts, members={member: payload})
    report = fastckpt.scan(bad)
    assert report.rating == "dangerous"
    assert [f.record for f in report.findings if f.kind == "dangerous_name"] == [member]
    assert bad[report.findings[0].offset :].startswith(b"cos")


def inside_of_zip(name, data, method=0):
    return archive([*checkpoint(), Entry(name, data, method=method)])


def in_tar(name, *contents):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as packed:
        for data in contents:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            packed.addfile(info, io.BytesIO(data))
    return out.getvalue()


def like_a_tar(payload):
    """A pickle in which a tar's mark stands where a tar has it."""
    text = b"X" + struct.pack("<I", 600)
    return b"\x80\x02" + text + (b"x" * 250 + b"ustar").ljust(600, b"x") + b"0" + payload


def objects_npy(version=None):
    out = io.BytesIO()
    np.lib.format.write_array(out, np.array([{}], dtype=object), version, allow_pickle=True)
    return out.getvalue()[:128] + PAYLOAD


# A file, the record that the payload is found in, and whether its offset can be one of the file.
PLACES = {
    "data.pkl": (torch_file(PAYLOAD), "archive/data.pkl", True),
    "constants.pkl": (inside_of_zip("archive/constants.pkl", PAYLOAD), "archive/constants.pkl", True),
    "an extra .pkl": (inside_of_zip("archive/extra/x.pkl", PAYLOAD), "archive/extra/x.pkl", True),
    "a .pkl outside of the folder": (inside_of_zip("other.pkl", PAYLOAD), "other.pkl", True),
    "a .pkl among the storages": (inside_of_zip("archive/data/9.pkl", PAYLOAD), "archive/data/9.pkl", True),
    "debug_pkl": (inside_of_zip("archive/code/m.py.debug_pkl", PAYLOAD), "archive/code/m.py.debug_pkl", True),
    "in capitals": (inside_of_zip("archive/DATA.PKL", PAYLOAD), "archive/DATA.PKL", True),
    "a record of another name": (inside_of_zip("archive/weights", PAYLOAD), "archive/weights", True),
    "deflated": (inside_of_zip("archive/x.pkl", PAYLOAD, method=8), "archive/x.pkl", False),
    "a second data.pkl": (inside_of_zip("archive/data.pkl", PAYLOAD), "archive/data.pkl", True),
    "a second folder": (inside_of_zip("b/data.pkl", PAYLOAD), "b/data.pkl", True),
    "a wrong checksum": (
        archive([Entry("archive/data.pkl", PAYLOAD, crc=1), *checkpoint(data__pkl=None)]), "archive/data.pkl", True,
    ),
    "an archive in the archive": (
        inside_of_zip("archive/m.pt", torch_file(PAYLOAD), method=8), "archive/m.pt: archive/data.pkl", False,
    ),
    "a legacy file in the archive": (inside_of_zip("m.pt", legacy_with("object", PAYLOAD)), "m.pt", False),
    "a tar of a checkpoint": (in_tar("m.pth", torch_file(PAYLOAD)), "m.pth: archive/data.pkl", False),
    "a pickle in a tar": (in_tar("m.pkl", PAYLOAD), "m.pkl", True),
    "an archive in the archive, stored": (
        inside_of_zip("archive/m.pt", torch_file(PAYLOAD)), "archive/m.pt: archive/data.pkl", False,
    ),
    "a second member of a name": (in_tar("m.pkl", craft({}), PAYLOAD), "m.pkl at byte 1536", True),
    "a pickle that looks like a tar": (like_a_tar(PAYLOAD), None, True),
    "data.pkl that looks like a tar": (
        torch_file(like_a_tar(PAYLOAD)), "archive/data.pkl", False,
    ),
    "an archive behind a pickle": (craft({}) + torch_file(PAYLOAD), "archive/data.pkl", True),
    "an array of objects": (inside_of_zip("a.npy", objects_npy()), "a.npy", True),
    "an array of objects alone": (objects_npy(), None, True),
    "an array of objects of version 2": (objects_npy((2, 0)), None, True),
    "an array of objects by another name": (
        objects_npy().replace(b"'|O'", b"'\\x4f'").replace(b", }  ", b", }"), None, True,
    ),
    "bare": (PAYLOAD, None, True),
    "behind the STOP": (craft({"w": 1}) + PAYLOAD, None, True),
    "behind the STOP of data.pkl": (torch_file(craft({}) + PAYLOAD), "archive/data.pkl", True),
    "before an archive": (PAYLOAD + torch_file(craft({})), None, True),
    "behind an archive": (torch_file(craft({})) + PAYLOAD, None, True),
    "behind a legacy stream": (legacy_stream(GOOD, FLOATS) + PAYLOAD, None, True),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_places(place):
    data, record, in_file = PLACES[place]
    report = fastckpt.scan(data)
    found = [f for f in report.findings if f.kind == "dangerous_name"]
    assert [f.record for f in found] == [record]
    if in_file:
        assert data[found[0].offset :].startswith(b"cos\nmkdir")
    else:
        assert found[0].offset is None


@pytest.mark.parametrize("source", ["path", "file object", "memoryview"])
def test_sources(source, tmp_path):
    path = tmp_path / "model.pt"
    path.write_bytes(torch_file(PAYLOAD))
    f = {
        "path": str(path),
        "file object": path.open("rb"),
        "memoryview": memoryview(path.read_bytes()),
    }
    report = fastckpt.scan(f[source])
    f["file object"].close()
    assert report.rating == "dangerous"
    assert report.name == (f"{path}" if source != "memoryview" else "<memoryview>")


# -- what is broken -----------------------------------------------------------------------------------------------

BROKEN = {
    "cut off": (PAYLOAD[:-1], "the pickle is cut short"),
    "an unknown opcode": (PAYLOAD[:-1] + b"\xff.", "byte 0xff is not a pickle opcode"),
    "an empty stack": (PAYLOAD[:-1] + b"0N0R.", "the stack is empty"),
    "a call of a number": (PAYLOAD[:-1] + b"K\1)R.", "1 is called"),
    "a newer protocol": (PAYLOAD[:-1] + b"\x80\x09.", "pickle protocol 9"),
    "a memo entry that is not there": (PAYLOAD[:-1] + b"h\x07.", "memo entry 7"),
    "bytes of terabytes": (PAYLOAD[:-1] + b"\x8e" + b"\xff" * 8, "the pickle is cut short"),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_broken_half_way(damage):
    data, words = BROKEN[damage]
    for file in (data, torch_file(data)):
        report = fastckpt.scan(file)
        assert [f.kind for f in report.findings] == ["dangerous_name", "broken"]
        assert words in report.findings[1].message
        assert report.pickles[0].nbytes is None


@pytest.mark.parametrize("name", ["cut off", "a packed member", "another class"])
def test_the_headline_of_what_is_not_known(name):
    """What was not read is no name that is not known."""
    harmless = craft({"w": 1})
    data, words = {
        "cut off": (torch_file(harmless)[:-30], "not all of it could be read"),
        "a packed member": (in_tar("x", gzip.compress(harmless)), "not all of it could be read"),
        "another class": (craft([Call(Name("some.own Net"), ())]), "something that is not known"),
    }[name]
    report = fastckpt.scan(data)
    assert (report.ok, report.rating) == (False, "unknown")
    assert str(report).startswith(f"<bytes>: {words};")


def test_the_rest_of_a_broken_stream():
    """A protocol version that is not known ends a load, and not a scan."""
    data = legacy_stream(GOOD, FLOATS, version=StreamCall(StreamName("os", "mkdir"), (MARKER,)))
    report = fastckpt.scan(data)
    assert len(report.pickles) == 5
    assert {f.kind for f in report.findings} == {"dangerous_name", "broken"}


@pytest.mark.parametrize("record", ["archive/data.pkl", "archive/notes"])
def test_records_that_cannot_be_read(record):
    data = archive([*checkpoint(), Entry(record, b"x" * 20, flags=1), Entry("b.pkl", PAYLOAD)])
    report = fastckpt.scan(data)
    assert [f.kind for f in report.findings] == ["dangerous_name", "broken"]
    assert "is encrypted" in report.findings[1].message


def behind_each_other(hidden, seen=()):
    """An archive at byte 0, and one behind it that alone has a directory."""
    start = archive(hidden)
    return archive([*checkpoint(), *seen], before=start[: start.index(b"PK\1\2")])


def without_directory(entries, **options):
    """An archive whose directory was never written, as that of a save that was killed."""
    data = archive(entries, **options)
    return data[: data.index(b"PK\1\2")]


STREAMED = {"flags": 0x0808, "descriptor": True}  # as torch writes records
HIDDEN = Entry("archive/data.pkl", PAYLOAD, **STREAMED)
BAD_PICKLE = Entry("archive/data.pkl", PICKLE, crc=1)
INNER = without_directory([HIDDEN], before=bytes(16))

# Archives with a record that no directory lists: salvage, and other readers, take it.
UNLISTED = {
    "no directory": without_directory([HIDDEN, *checkpoint()[1:]]),
    "no directory, without descriptors": without_directory([Entry("archive/data.pkl", PAYLOAD)]),
    "no directory, in a record that is not the object": without_directory(
        [*checkpoint(), Entry("archive/extra.pkl", PAYLOAD, **STREAMED)]
    ),
    "no directory, deflated": without_directory([Entry("a/data.pkl", PAYLOAD, method=8)]),
    "no directory, cut off in the pickle": without_directory(
        [Entry("a/data.pkl", PAYLOAD[:-1] + emit({"w": "x" * 99}), **STREAMED)]
    )[:-60],
    "no directory, an archive in it": without_directory(
        [*checkpoint(), Entry("archive/extra/x", archive([Entry("x.pkl", PAYLOAD)]))]
    ),
    "in a storage, where the object is damaged": archive(
        [BAD_PICKLE, Entry("archive/data/0", INNER), *checkpoint()[3:]]
    ),
    "an archive in front": behind_each_other([Entry("archive/data.pkl", PAYLOAD)]),
    "an archive in front, far off": behind_each_other(
        [Entry("archive/data.pkl", PAYLOAD)], [Entry("archive/data/9", bytes(1 << 17))]
    ),
    "an archive behind": archive(checkpoint(), behind=archive([Entry("x.pkl", PAYLOAD)])[:-30]),
    "a record between directory and end": archive(
        checkpoint(), gap=archive([Entry("x.pkl", PAYLOAD)])[:90]
    ),
}


@pytest.mark.parametrize("place", UNLISTED)
def test_records_that_no_directory_lists(place):
    report = fastckpt.scan(UNLISTED[place])
    assert report.rating == "dangerous"
    assert "os.mkdir" in report.findings[0].message
    assert "is in no directory" in str(report)


def test_an_object_that_is_only_damaged():
    """Where the directory's own records are all that there is, nothing is said of others."""
    for entries in ([BAD_PICKLE, *checkpoint()[1:]], checkpoint()):
        assert fastckpt.scan(archive(entries)).ok


@pytest.mark.parametrize("method", [0, 8], ids=["stored", "deflated"])
def test_work_of_many_headers(method):
    """Headers of records that are not whole, each in front of all others."""
    header = local_part(Entry("archive/data.pkl", PAYLOAD, method=method, **STREAMED), 0)[:60]
    report = fastckpt.scan(header * 3000)
    assert not report.ok


HIDING = Entry("archive/data/9", bytes(16) + PAYLOAD, nbytes=16, stored=16)


@pytest.mark.parametrize(
    "data",
    [archive([HIDING, *checkpoint()]), archive(checkpoint(), gap=PAYLOAD)],
    ids=["between records", "behind the directory"],
)
def test_pickles_that_belong_to_no_record(data):
    assert fastckpt.scan(data).rating == "dangerous"


def test_descriptors_are_no_gaps():
    torch.save({"w": torch.ones(3)}, out := io.BytesIO())
    streamed = [Entry(e.name, e.data, flags=0x808, descriptor=True) for e in checkpoint()]
    for data in (out.getvalue(), archive(streamed)):
        report = fastckpt.scan(data)
        assert report.ok
        assert not report.notes


def test_bytes_behind_are_noted():
    for data in (
        torch_file(craft({}) + b"\0" * 9),
        torch_file(craft({})) + b"\0" * 9,
        craft({}) + b"\0" * 9,
    ):
        report = fastckpt.scan(data)
        assert report.ok
        assert [f.kind for f in report.notes] == ["trailing_bytes"]
        assert "9 bytes" in str(report)


PACKED = {
    "gzip": (gzip.compress(PAYLOAD), "gzip-compressed"),
    "bzip2": (bz2.compress(PAYLOAD), "bzip2-compressed"),
    "xz": (lzma.compress(PAYLOAD), "xz-compressed"),
    "zstd": (b"\x28\xb5\x2f\xfd" + PAYLOAD, "zstd-compressed"),
    "7z": (b"7z\xbc\xaf\x27\x1c" + PAYLOAD, "a 7-Zip archive"),
}


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize(
    "inside",
    [inside_of_zip, lambda name, data: inside_of_zip(name, data, 8), in_tar],
    ids=["zip", "deflated", "tar"],
)
def test_what_is_packed_is_not_looked_at(inside, name):
    """It is no pickle, and may hold one."""
    data, words = PACKED[name]
    report = fastckpt.scan(inside("notes/x.bin", data))
    assert [f.kind for f in report.findings] == ["broken"]
    assert f"{words}: it was not looked at" in report.findings[0].message
    assert report.findings[0].record == "notes/x.bin"


@pytest.mark.parametrize("name", ["html.pt", "empty", "text", "array"])
def test_what_is_no_pickle(name):
    data = {
        "html.pt": (FOLDER / "refused/html.pt").read_bytes(),
        "empty": b"",
        "text": b"some text\n",
        "array": b"\x93NUMPY\1\0\x3b\0"
        + b"{'descr': '<f8', 'fortran_order': False, 'shape': (1,), }"
        + b"  \n"
        + b"\0" * 8,
    }
    with pytest.raises(FormatError):
        fastckpt.scan(data[name])


def test_an_archive_without_a_pickle():
    data = io.BytesIO()
    np.savez(data, a=np.ones(3))
    report = fastckpt.scan(data.getvalue())
    assert report.ok
    assert "no pickle was found" in str(report)


# -- work ---------------------------------------------------------------------------------------------------------

BOMBS = {
    "calls of results": b"\x80\x02cos\nmkdir\n" + b")R" * 100_000 + b".",
    "calls in arguments": b"\x80\x02cos\nmkdir\nq\x000" + b"h\0" * 50_000 + b"N" + b"\x85R" * 50_000 + b".",
    "deep arguments": b"\x80\x02cos\nmkdir\nN" + b"\x85" * 200_000 + b"R.",
    "wide arguments": b"\x80\x02cos\nmkdir\n](" + b"N" * 500_000 + b"e\x85R.",
    "arguments that are shared": b"\x80\x02cos\nmkdir\n]" + b"2\x86" * 200 + b"\x85R.",
    "a long name": b"\x80\x02cos." + b"a." * 200_000 + b"\nb\nq\0" + b"h\0)R" * 5_000 + b".",
    "a long int": b"\x80\x02cos\nmkdir\n\x8b" + struct.pack("<I", 300_000) + b"\x7f" * 300_000 + b"\x85R.",
}  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
def test_reports_are_short(bomb):
    report = fastckpt.scan(BOMBS[bomb])
    assert report.rating == "dangerous"
    assert len(str(report)) < 2_000
    assert all(len(n.module) <= 500 for n in report.pickles[0].names)
    assert all(len(c.arguments) < 1_000 for c in report.pickles[0].calls)


def test_limit_of_events():
    names = craft(Raw(b"".join(b"cm%d\nn\n0" % i for i in range(200)) + b"N"))
    report = fastckpt.scan(names, limits=Limits(scan_events=100))
    assert [f.kind for f in report.findings][-1] == "limit"
    assert len(report.pickles[0].names) == 100
    harmless = craft([Call(Name("builtins set"), ([i],)) for i in range(200)])
    report = fastckpt.scan(
        harmless.replace(b"cbuiltins\nset\n", b"cbuiltins\nset\nq\0", 1),
        limits=Limits(scan_events=150),
    )
    assert not report.ok  # each call names its class again
    memoized = craft(Raw(b"cbuiltins\nset\nq\0" + b"h\0)R0" * 200))
    report = fastckpt.scan(memoized, limits=Limits(scan_events=150))
    assert report.ok
    assert (len(report.pickles[0].calls), report.pickles[0].calls_not_listed) == (150, 50)


def test_records_that_share_bytes():
    """A directory whose entries all mean the same bytes costs no more than the file has."""
    one = Entry("a.pkl", craft(Raw(b"X" + struct.pack("<I", 1 << 20) + bytes(1 << 20))))
    twins = [Entry(f"{i}.pkl", one.data, offset=0, local=False, align=0) for i in range(200)]
    report = fastckpt.scan(archive([one, *twins]))
    assert not report.ok
    assert "come to more than it has bytes for" in str(report)


def test_archives_in_archives():
    data = torch_file(PAYLOAD)
    for _ in range(6):
        data = archive([Entry("x.pt", data, method=8)])
    report = fastckpt.scan(data)
    assert [f.kind for f in report.findings] == ["broken"]
    assert "it was not looked at" in str(report)


# -- honest files -------------------------------------------------------------------------------------------------

ACCEPTED = sorted(
    p.relative_to(FOLDER).as_posix()
    for kind in ("zip", "legacy", "tar")
    for p in FOLDER.glob(f"{kind}/*.pt")
)
HOSTILE = {"eval.pt", "getattr.pt", "legacy_key_list.pt", "legacy_system_info.pt", "two_pickles.pt"}


@pytest.mark.parametrize("name", ACCEPTED)
def test_fixtures(name):
    report = fastckpt.scan(FOLDER / name)
    assert report.ok, str(report)
    assert report.kind == name.partition("/")[0]
    assert all(p.nbytes for p in report.pickles)


@pytest.mark.parametrize("name", sorted(p.name for p in FOLDER.glob("refused/*.pt")))
def test_refused_fixtures(name):
    try:
        report = fastckpt.scan(FOLDER / "refused" / name)
    except FormatError:
        assert name in ("html.pt",)
    else:
        assert (report.rating == "dangerous") == (name in HOSTILE)


def test_what_torch_writes():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    for options in ({}, {"_use_new_zipfile_serialization": False}):
        out = io.BytesIO()
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, out, **options
        )
        assert fastckpt.scan(out.getvalue()).ok
        out = io.BytesIO()
        torch.save(model, out, **options)
        report = fastckpt.scan(out.getvalue())
        assert report.rating == "unknown"
        assert "torch.nn.modules.linear.Linear" in str(report)


def test_every_known_name():
    for module, name in TABLE:
        assert rate(module, name) == ("known", "")
    allowed = pytest.importorskip("torch._weights_only_unpickler")._get_allowed_globals()
    unknown = [q for q in allowed if rate(*q.rpartition(".")[::2])[0] != "known"]
    assert not unknown


RATINGS = {
    ("os", "system"): "dangerous",
    ("os.path", "join"): "dangerous",
    ("posix", "system"): "dangerous",
    ("subprocess", "Popen"): "dangerous",
    ("builtins", "eval"): "dangerous",
    ("builtins", "getattr"): "dangerous",
    ("__builtin__", "apply"): "dangerous",
    ("commands", "getoutput"): "dangerous",
    ("importlib", "import_module"): "dangerous",
    ("operator", "attrgetter"): "dangerous",
    ("functools", "partial"): "dangerous",
    ("types", "CodeType"): "dangerous",
    ("torch", "load"): "dangerous",
    ("torch.storage", "_load_from_bytes"): "dangerous",
    ("torch.hub", "load"): "dangerous",
    ("numpy.testing._private.utils", "runstring"): "dangerous",
    ("torch", "serialization.os.system"): "dangerous",
    ("collections", "_sys.modules.get"): "dangerous",
    ("lab", "functools.partial"): "dangerous",
    ("lab", "Net.__class__"): "dangerous",
    ("code", "interact"): "dangerous",
    ("code.nets", "Net"): "unknown",
    ("osmium", "Reader"): "unknown",
    ("lab.os_tools", "system"): "unknown",
    ("torch.nn.modules.linear", "Linear"): "unknown",
    ("torch.distributed.tensor", "DTensor"): "known",
    ("collections", "OrderedDict"): "known",
}


@pytest.mark.parametrize("name", RATINGS)
def test_ratings(name):
    assert rate(*name)[0] == RATINGS[name]


def test_nothing_is_imported():
    """Not even numpy's testing helpers, and torch least of all."""
    code = (
        "import sys, fastckpt\n"
        "report = fastckpt.scan(sys.stdin.buffer.read())\n"
        "assert report.rating == 'dangerous', report\n"
        "assert not {'torch', 'antigravity', 'this', 'webbrowser'} & set(sys.modules)\n"
    )
    data = craft(
        [Name("antigravity x"), Call(Name("this d"), ()), Call(Name("torch load"), ()), MKDIR]
    )
    subprocess.run([sys.executable, "-c", code], input=data, check=True)


def test_order_of_findings():
    names = [Name("lab a"), MKDIR, Name("lab b"), Name("sys exit")]
    kinds = [f.kind for f in fastckpt.scan(torch_file(craft(names))).findings]
    assert kinds == ["dangerous_name", "dangerous_name", "unknown_name", "unknown_name"]
