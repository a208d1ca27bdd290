"""salvage: which files are read and written, what it tells, and files that are made to deceive."""

import gzip
import io
import json
import os
import struct

import numpy as np
import pytest
import torch

import fastckpt
import picklecraft
from fastckpt import FormatError, LimitError, salvage
from fastckpt.containers import zip_walk
from objects import saved
from salvagetools import GOOD, PLACES, flipped, salvaged
from support import QUIET
from zipcraft import Entry, archive, checkpoint

pytestmark = QUIET

REBUILD = picklecraft.Name("torch._utils _rebuild_tensor")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.pt"


# -- files: what is read, what is written


def test_sources_of_every_kind(out, tmp_path):
    path, packed = tmp_path / "model.pt", tmp_path / "model.pt.gz"
    path.write_bytes(GOOD)
    packed.write_bytes(gzip.compress(GOOD))
    with open(path, "rb") as file, gzip.open(packed) as unpacked:
        for source in (path, str(path), os.fsencode(path), GOOD, io.BytesIO(GOOD), file, unpacked):
            salvage(source, out, overwrite=True)
            assert out.read_bytes() == GOOD
        with pytest.raises(ValueError, match="the file that is read"):
            salvage(unpacked, packed, overwrite=True)


def test_the_damaged_file_is_never_overwritten(tmp_path):
    path = tmp_path / "model.pt"
    path.write_bytes(GOOD)
    os.link(path, tmp_path / "hard.pt")
    os.symlink(path, tmp_path / "soft.pt")
    for same_file in ("model.pt", "hard.pt", "soft.pt", "../" + tmp_path.name + "/model.pt"):
        with pytest.raises(ValueError, match="the file that is read"):
            salvage(path, tmp_path / same_file, overwrite=True)
    assert path.read_bytes() == GOOD
    assert len(list(tmp_path.iterdir())) == 3


def test_existing_files(tmp_path):
    path = tmp_path / "out.pt"
    path.write_bytes(b"precious")
    os.symlink(path, tmp_path / "link.pt")
    for name in ("out.pt", "link.pt"):
        with pytest.raises(FileExistsError, match="overwrite=True"):
            salvage(GOOD, tmp_path / name)
    assert path.read_bytes() == b"precious"
    salvage(GOOD, tmp_path / "link.pt", overwrite=True)
    assert path.read_bytes() == GOOD
    assert (tmp_path / "link.pt").is_symlink()


@pytest.mark.parametrize(
    "named", [False, True], ids=["no name until then", "a name from the start"]
)
def test_a_file_that_comes_up_meanwhile_is_left_alone(named, tmp_path, monkeypatch):
    if named:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    path = tmp_path / "out.pt"

    def disturb(done, total, name):
        path.write_bytes(b"precious")

    with pytest.raises(FileExistsError):
        salvage(GOOD, path, progress=disturb)
    assert path.read_bytes() == b"precious"
    assert list(tmp_path.iterdir()) == [path]
    assert salvage(GOOD, path, overwrite=True).ok
    assert path.read_bytes() == GOOD
    assert list(tmp_path.iterdir()) == [path]


def test_places_where_no_file_can_be(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match="no regular file"):
        salvage(GOOD, tmp_path / "fifo", overwrite=True)
    with pytest.raises(IsADirectoryError):
        salvage(GOOD, tmp_path, overwrite=True)
    with pytest.raises(FileNotFoundError):
        salvage(GOOD, tmp_path / "missing" / "out.pt")


@pytest.mark.parametrize(
    "data", [b"", GOOD[:100], b"GIF89a", saved(5)[:80]], ids=["empty", "cut", "other", "pickle"]
)
def test_nothing_is_left_behind(data, tmp_path):
    with pytest.raises(FormatError):
        salvage(data, tmp_path / "out.pt")
    assert not list(tmp_path.iterdir())


def test_interrupted(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTCKPT_SERIAL_BELOW", "0")

    def interrupt(done, total, name):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        salvage(GOOD, tmp_path / "out.pt", progress=interrupt)
    assert not list(tmp_path.iterdir())


def test_a_file_that_changes_meanwhile(tmp_path):
    path = tmp_path / "model.pt"
    path.write_bytes(GOOD)

    def change(done, total, name):
        path.write_bytes(flipped(GOOD, PLACES["data/0"][1]))

    with pytest.raises(FormatError, match="has changed while it was read"):
        salvage(path, tmp_path / "out.pt", progress=change)
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_and_progress(threads, out, monkeypatch):
    monkeypatch.setenv("FASTCKPT_SERIAL_BELOW", "0")
    monkeypatch.setattr("fastckpt.copying.PIECE", 100)
    told = []
    assert salvage(GOOD, out, threads=threads, progress=lambda *what: told.append(what)).ok
    assert out.read_bytes() == GOOD
    done = [each[0] for each in told]
    assert done == sorted(done)
    assert told[-1][0] == told[-1][1]
    assert told[-1][2] == "<bytes>"


def test_arguments():
    with pytest.raises(TypeError, match="progress"):
        salvage(GOOD, "/nowhere", progress=5)
    with pytest.raises(ValueError, match="threads"):
        salvage(GOOD, "/nowhere", threads=0)
    with pytest.raises(TypeError, match="limits"):
        salvage(GOOD, "/nowhere", limits=5)


def test_the_report(out):
    report, _ = salvaged(flipped(GOOD, PLACES["data/0"][1]), out)
    assert json.loads(json.dumps(report.as_dict()))["lost"] == {"w": report.lost["w"]}
    assert "5 tensors kept, 1 lost" in str(report)
    assert "lost w: <bytes>: record 'data/0' at byte" in str(report)
    assert len(str(report).splitlines()) == 2
    with pytest.raises(AttributeError):
        report.kept = ()


@pytest.mark.parametrize("kind", ["salvage", "verify", "scan"])
def test_names_write_no_lines_of_their_own(kind, tmp_path):
    """Not those that a file gives its tensors, and not its own."""
    name = "x\nfile.pt (zip): 99 tensors kept, 0 lost\x1b[2K"
    data = saved({name: torch.ones(300), "w": torch.zeros(3)})
    where = data.index(torch.ones(300).numpy().tobytes())
    path = tmp_path / "file\n\x1b.pt"
    path.write_bytes(flipped(data, where + 5))
    report = (
        salvage(path, tmp_path / "out\n.pt") if kind == "salvage" else getattr(fastckpt, kind)(path)
    )
    text = str(report)
    assert all(line.isprintable() for line in text.splitlines())
    assert text.startswith(str(tmp_path / "file"))
    assert not any(line.startswith("file") for line in text.splitlines())
    assert all(str(finding).isprintable() for finding in report.findings)
    if kind == "salvage":
        assert list(report.lost) == [name]
        assert len(text.splitlines()) == 2


# -- more than one checkpoint in a file, and none


def legacy(obj):
    return saved(obj, legacy=True)


OTHER = saved({"other": torch.ones(5)})
DISTRIBUTED = saved(1) + saved(torch.ones(2, 3))  # as a .distcp file has its objects
WRAPPED = archive([Entry("x.pt", GOOD), Entry("y.pt", OTHER)])
# A file, the tensors of it that are kept, and where what is not kept begins.
SEVERAL = {
    "two": (GOOD + OTHER, 6, len(GOOD)),
    "the second is cut": (GOOD + OTHER[:-30], 6, len(GOOD)),
    "without a tensor in the first": (DISTRIBUTED, 0, len(saved(1))),
    "a legacy stream behind": (GOOD + legacy({"a": 1}), 6, len(GOOD)),
    "two legacy streams": (legacy({"a": torch.ones(2)}) + legacy({}), 1, len(legacy({"a": torch.ones(2)}))),
    "in an archive that was cut": (WRAPPED[:-30], 6, WRAPPED.index(OTHER)),
}  # fmt: skip


@pytest.mark.parametrize("name", SEVERAL)
def test_a_checkpoint_of_several(name, out):
    data, kept, where = SEVERAL[name]
    report = salvage(data, out)
    assert len(report.kept) == kept
    assert not report.ok
    found = [each for each in report.findings if each.kind == "second_archive"]
    assert [each.offset for each in found] == [where]
    assert "dcp_to_torch_save" in found[0].message


@pytest.mark.parametrize("behind", [b"", b"\0" * 600, b"x" * 600], ids=["nothing", "zeros", "text"])
@pytest.mark.parametrize("data", [GOOD, legacy({"a": 1})], ids=["zip", "legacy"])
def test_what_is_no_second_checkpoint(data, behind, out):
    assert salvage(data + behind, out).ok


ARCHIVES = {
    "torch.export": ([Entry("m/archive_format", b"pt2"), Entry("m/data/sample_inputs/model.pt", GOOD)], "torch.export.load"),
    "checkpoints": ([Entry("x.pt", GOOD), Entry("y.pt", OTHER)], "unpack it first"),
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_of_something_else(name, out):
    """The records of a checkpoint inside of it are not its own; load says what reads it, and so does salvage."""
    entries, words = ARCHIVES[name]
    for refuse in (fastckpt.load, lambda data: salvage(data, out)):
        with pytest.raises(FormatError, match=words):
            refuse(archive(entries))
    assert not out.exists()


# -- files that are made to deceive


HEADER = b"PK\3\4" + struct.pack("<HHHHHIIIHH", 0, 0x808, 0, 0, 0, 0, 0, 0, 9, 0) + b"archive/x"


def test_headers_without_end(out, monkeypatch):
    monkeypatch.setattr(zip_walk, "MOST_STEPS", 1000)
    with pytest.raises(LimitError, match=r"no torch.save writes so many"):
        salvage(GOOD[: PLACES["data/3"][0]] + HEADER * 2000, out)


def test_a_directory_that_speaks_of_the_same_bytes_again_and_again(out):
    """It would take a thousand times the file to read what it claims."""
    entries = checkpoint([b"a" * 100_000])
    offset = archive(entries).index(b"archive/data/0") - 30
    again = [
        Entry(
            f"archive/data/{i}", nbytes=100_000, stored=100_000, crc=i, local=False, offset=offset
        )
        for i in range(1, 1000)
    ]
    told = []
    salvage(archive([*entries, *again]), out, progress=lambda *what: told.append(what))
    assert told[-1][1] < 1_000_000


def test_sizes_beyond_all_numbers(out):
    wide = struct.pack("<HHQQ", 1, 16, 2**64 - 1, 2**64 - 1)
    for method in (0, 8):
        name = b"archive/data/0"
        header = (
            b"PK\3\4"
            + struct.pack(
                "<HHHHHIIIHH", 0, 0, method, 0, 0, 1, 2**32 - 1, 2**32 - 1, len(name), len(wide)
            )
            + name
            + wide
        )
        salvage(GOOD[: PLACES["data/0"][0]] + header + bytes(100), out, overwrite=True)


def test_nothing_is_run(out):
    class Evil:
        def __reduce__(self):
            return os.mkdir, ("/tmp/salvage-was-fooled",)

    report, _ = (
        salvage(saved({"e": Evil(), "t": torch.ones(2), "u": torch.ones(3)})[:-400], out),
        None,
    )
    assert not os.path.exists("/tmp/salvage-was-fooled")
    assert fastckpt.load(out, unknown="opaque")["e"].qualname in ("posix.mkdir", "os.mkdir")
    assert set(report.kept) | set(report.lost) == {"t", "u"}


def test_what_no_pickle_of_its_own_can_say(out):
    pickle = (
        b"\x80\x02}(X\x01\x00\x00\x00a\x82\x05X\x01\x00\x00\x00b"
        + picklecraft.emit(
            picklecraft.Call(
                REBUILD,
                (picklecraft.storage("FloatStorage", "0", 1), 0, (1,), (1,)),
            )
        )
        + b"u."
    )
    with pytest.raises(fastckpt.CheckpointError, match="extension"):
        salvage(archive(checkpoint([], data__pkl=pickle)), out)


def test_what_numpy_reads(out):
    assert salvage(GOOD, out).ok
    loaded = fastckpt.load(out, framework="numpy")
    np.testing.assert_array_equal(loaded["l"][1], np.arange(4))
