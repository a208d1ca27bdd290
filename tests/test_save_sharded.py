"""save_sharded: transformers' layout of files, what goes into which, and what is left when a save fails on its way."""

import collections
import errno
import json
import os
import resource
import stat
import zipfile

import pytest
import torch
from torch import nn

import fastckpt
from fastckpt.destination import Replacement
from support import same

SINGLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def tensors(count=6, numel=100, value=0.0):
    """{name: tensor of 4 bytes times ``numel``}."""
    return {f"layers.{i}.weight": torch.full((numel,), value + i) for i in range(count)}


def shard_names(count):
    return [f"pytorch_model-{i + 1:05}-of-{count:05}.bin" for i in range(count)]


def as_transformers_reads(folder):
    """All tensors, by torch.load alone."""
    index = json.loads((folder / INDEX).read_text())
    found = {}
    for file in sorted(set(index["weight_map"].values())):
        found |= torch.load(folder / file, weights_only=True)
    assert found.keys() == index["weight_map"].keys()
    return {name: found[name] for name in index["weight_map"]}


def contents(folder):
    return {name: (folder / name).read_bytes() for name in sorted(os.listdir(folder))}


# -- files -------------------------------------------------------------------------------------------------------------

# Bytes of each of six tensors of 400 bytes: how many are in each shard.
SIZES = {
    "a shard for each": (400, [1] * 6),
    "smaller than a tensor": (1, [1] * 6),
    "two in each": (800, [2, 2, 2]),
    "not quite three": (1199, [2, 2, 2]),
    "four and two": (1600, [4, 2]),
    "all but one": (2399, [5, 1]),
}


@pytest.mark.parametrize(("most", "counts"), SIZES.values(), ids=SIZES)
def test_shards(most, counts, tmp_path):
    obj = tensors()
    fastckpt.save_sharded(obj, tmp_path, max_shard_bytes=most)
    names = shard_names(len(counts))
    assert sorted(os.listdir(tmp_path)) == sorted([*names, INDEX])
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 2400
    assert list(index["weight_map"]) == list(obj)
    assert [list(index["weight_map"].values()).count(name) for name in names] == counts
    assert all(zipfile.ZipFile(tmp_path / name).testzip() is None for name in names)
    same(obj, as_transformers_reads(tmp_path))
    same(obj, fastckpt.load(tmp_path))
    same(obj, fastckpt.load(tmp_path / INDEX, weights_only=False))


@pytest.mark.parametrize("most", [2400, 5 * 10**9])
def test_what_fits_into_one(most, tmp_path):
    fastckpt.save_sharded(tensors(), tmp_path, max_shard_bytes=most)
    assert os.listdir(tmp_path) == [SINGLE]
    same(tensors(), torch.load(tmp_path / SINGLE, weights_only=True))
    same(tensors(), fastckpt.load(tmp_path))


@pytest.mark.parametrize(
    "obj", [{}, {"empty": torch.ones(0), "more": torch.ones(0, 3)}], ids=["nothing", "no bytes"]
)
def test_nothing(obj, tmp_path):
    fastckpt.save_sharded(obj, tmp_path, max_shard_bytes=1)
    assert os.listdir(tmp_path) == [SINGLE]
    same(obj, fastckpt.load(tmp_path))


def test_a_module(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    fastckpt.save_sharded(model, tmp_path, max_shard_bytes=300)
    same(dict(model.state_dict()), as_transformers_reads(tmp_path))
    again = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    fastckpt.load_into(again, tmp_path)
    same(model.state_dict(), again.state_dict())


def test_an_ordered_dict(tmp_path):
    obj = collections.OrderedDict(reversed(tensors().items()))
    fastckpt.save_sharded(obj, tmp_path, max_shard_bytes=800)
    assert list(fastckpt.load(tmp_path)) == list(obj)


def test_extra_state(tmp_path):
    obj = {**tensors(2), "a._extra_state": {"scale": 3}}
    fastckpt.save_sharded(obj, tmp_path, max_shard_bytes=400)
    same(obj, fastckpt.load(tmp_path))


def test_a_folder_is_made(tmp_path):
    fastckpt.save_sharded(tensors(), os.fsencode(tmp_path / "a" / "b"), max_shard_bytes=800)
    same(tensors(), fastckpt.load(tmp_path / "a" / "b"))


# -- what shares memory ------------------------------------------------------------------------------------------------


def sharing():
    memory = torch.arange(100.0)
    return {
        "a": memory[:10],
        "x": torch.ones(100),
        "b": memory[50:],
        "tied": memory,
        "y": torch.zeros(100),
    }


def test_what_shares_memory_stays_together(tmp_path):
    obj = sharing()
    fastckpt.save_sharded(obj, tmp_path, max_shard_bytes=400)
    files = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    assert files["a"] == files["b"] == files["tied"]
    assert len({files["a"], files["x"], files["y"]}) == 3
    assert json.loads((tmp_path / INDEX).read_text())["metadata"]["total_size"] == 1200
    for found in (fastckpt.load(tmp_path), as_transformers_reads(tmp_path)):
        same(obj, found)
        assert found["a"].untyped_storage()._cdata == found["tied"].untyped_storage()._cdata


def test_groups():
    from fastckpt.sharding import groups_of

    cases = [
        ({"a": {0}, "b": {1}}, [["a"], ["b"]]),
        ({"a": {0}, "b": {1}, "c": {0}}, [["a", "c"], ["b"]]),
        ({"a": {0}, "b": {1}, "c": {2}, "d": {1, 0}}, [["a", "b", "d"], ["c"]]),
        ({"a": {0}, "b": {1}, "c": {2}, "d": {1, 2}, "e": {0, 2}}, [["a", "b", "c", "d", "e"]]),
        ({"a": set(), "b": set()}, [["a"], ["b"]]),
        ({}, []),
        ({str(i): {i, i + 1} for i in range(5000)}, [[str(i) for i in range(5000)]]),
    ]
    for numbers, groups in cases:
        assert groups_of(numbers) == groups


def test_compact_views(tmp_path):
    memory = torch.randn(10_000)
    obj = {f"row {i}": memory[i * 1000 : i * 1000 + 100] for i in range(10)}
    fastckpt.save_sharded(obj, tmp_path, max_shard_bytes=4000, views="compact")
    assert os.listdir(tmp_path) == [SINGLE]
    found = fastckpt.load(tmp_path)
    assert all(torch.equal(obj[name], found[name]) for name in obj)


def test_casts_count_as_they_are_written(tmp_path):
    fastckpt.save_sharded(tensors(), tmp_path, max_shard_bytes=400, dtype=torch.float16)
    assert len(os.listdir(tmp_path)) == 4
    assert json.loads((tmp_path / INDEX).read_text())["metadata"]["total_size"] == 1200
    same({name: tensor.half() for name, tensor in tensors().items()}, fastckpt.load(tmp_path))


def test_one_memory_as_two_types(tmp_path):
    tensor = torch.ones(4)
    with pytest.raises(RuntimeError, match="the same memory"):
        fastckpt.save_sharded({"a": tensor, "b": tensor.view(torch.int32)}, tmp_path)
    assert os.listdir(tmp_path) == []


# -- options -----------------------------------------------------------------------------------------------------------


def test_metadata(tmp_path):
    for most in (10_000, 800):
        fastckpt.save_sharded(tensors(), tmp_path, max_shard_bytes=most, metadata={"step": 5})
        with fastckpt.open(tmp_path) as checkpoint:
            assert checkpoint.info["metadata"]["step"] == 5


def test_options(tmp_path):
    options = {"crc32": False, "alignment": 4096, "pickle_protocol": 4, "threads": 2}
    fastckpt.save_sharded(tensors(), tmp_path, max_shard_bytes=800, **options)
    for name in shard_names(3):
        archive = zipfile.ZipFile(tmp_path / name)
        assert {info.CRC for info in archive.infolist()} == {0}
        assert archive.namelist()[0] == name.removesuffix(".bin") + "/data.pkl"
        assert (tmp_path / name).read_bytes()[4096:4098] == b"\x80\x04"  # aligned, protocol 4
    same(tensors(), fastckpt.load(tmp_path))


def test_progress(tmp_path):
    told = []
    fastckpt.save_sharded(
        tensors(), tmp_path, max_shard_bytes=800, progress=lambda *args: told.append(args)
    )
    assert told[-1] == (2400, 2400, str(tmp_path))
    assert [each[0] for each in told] == sorted(each[0] for each in told)


@pytest.mark.parametrize("fsync", [True, False])
def test_fsync(fsync, tmp_path, monkeypatch):
    """All shards are on the disk before one has a name, and all names before the index has its."""
    steps = []

    def note(fd):
        steps.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")

    def commit(file, nbytes):
        steps.append("name")
        real(file, nbytes)

    real = Replacement.commit
    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(Replacement, "commit", commit)
    fastckpt.save_sharded(tensors(), tmp_path, max_shard_bytes=1200, fsync=fsync)
    expected = ["file", "file", "name", "name", "folder", "file", "name", "folder"]
    assert steps == (expected if fsync else ["name"] * 3)


WRONG = {
    "a list": ([torch.ones(2)], {}, TypeError, "a module or a dict of tensors is expected"),
    "a tensor": (torch.ones(2), {}, TypeError, "a module or a dict"),
    "a number in it": (
        {"a": 5},
        {},
        TypeError,
        "'a' is an int: a tensor is expected; save takes any object",
    ),
    "nested": ({"a": {"b": torch.ones(2)}}, {}, TypeError, "'a' is a dict"),
    "a name that is a number": ({5: torch.ones(2)}, {}, TypeError, "5 is a name in obj"),
    "no bytes": ({}, {"max_shard_bytes": 0}, ValueError, "max_shard_bytes=0"),
    "bytes as text": ({}, {"max_shard_bytes": "5GB"}, TypeError, "max_shard_bytes='5GB': a"),
    "bytes as a bool": ({}, {"max_shard_bytes": True}, TypeError, "max_shard_bytes=True: a"),
    "metadata": ({}, {"metadata": [1]}, TypeError, "a dict is expected"),
    "metadata that is no JSON": ({}, {"metadata": {"a": {1}}}, TypeError, "set"),
    "views": ({}, {"views": "part"}, ValueError, "whole, compact"),
    "threads": ({}, {"threads": 0}, ValueError, "at least 1"),
    "dtype": ({}, {"dtype": torch.int8}, TypeError, "a floating"),
    "protocol": ({}, {"pickle_protocol": 1}, ValueError, "pickle_protocol=1"),
}


@pytest.mark.parametrize(("obj", "options", "error", "words"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(obj, options, error, words, tmp_path):
    with pytest.raises(error, match=words):
        fastckpt.save_sharded(obj, tmp_path / "new", **options)
    assert os.listdir(tmp_path) == []


def test_too_many_shards(monkeypatch, tmp_path):
    from fastckpt import sharding

    monkeypatch.setattr(sharding, "MOST_SHARDS", 5)
    with pytest.raises(ValueError, match="6 shards, 5 can be named"):
        fastckpt.save_sharded(tensors(), tmp_path, max_shard_bytes=400)


# -- over an older save ------------------------------------------------------------------------------------------------

OTHERS = [
    "config.json",
    "pytorch_model-00001-of-00002.bin.bak",
    "my_pytorch_model-00001-of-00002.bin",
    "model.safetensors",
]
SAVES = {"one file": 10_000, "two shards": 1200, "three shards": 800, "six shards": 400}


@pytest.mark.parametrize("after", SAVES.values(), ids=SAVES)
@pytest.mark.parametrize("before", SAVES.values(), ids=SAVES)
def test_an_older_save_is_replaced(before, after, tmp_path):
    for name in OTHERS:
        (tmp_path / name).write_text(name)
    fastckpt.save_sharded(tensors(), tmp_path, max_shard_bytes=before)
    fastckpt.save_sharded(tensors(value=7.0), tmp_path, max_shard_bytes=after)
    same(tensors(value=7.0), fastckpt.load(tmp_path))
    count = -(-2400 // after)
    names = [SINGLE] if count == 1 else [*shard_names(count), INDEX]
    assert sorted(os.listdir(tmp_path)) == sorted([*OTHERS, *names])
    assert all((tmp_path / name).read_text() == name for name in OTHERS)


class Fails:
    def __reduce__(self):
        raise LookupError("own")


@pytest.mark.parametrize("after", SAVES.values(), ids=SAVES)
@pytest.mark.parametrize("before", SAVES.values(), ids=SAVES)
@pytest.mark.parametrize("nameless", [True, False], ids=["nameless", "named"])
def test_a_save_that_fails_leaves_all_as_it_was(before, after, nameless, tmp_path, monkeypatch):
    if not nameless:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    fastckpt.save_sharded(tensors(), tmp_path, max_shard_bytes=before)
    old = contents(tmp_path)

    def fail(done, total, name):
        if done == total:
            raise LookupError("own")

    with pytest.raises(LookupError, match="own"):
        fastckpt.save_sharded(tensors(value=7.0), tmp_path, max_shard_bytes=after, progress=fail)
    with pytest.raises(LookupError, match="own"):
        fastckpt.save_sharded(
            {**tensors(), "x._extra_state": Fails()}, tmp_path, max_shard_bytes=after
        )
    assert contents(tmp_path) == old


def test_a_save_that_fails_makes_no_folder(tmp_path):
    def fail(*args):
        raise LookupError("own")

    with pytest.raises(LookupError, match="own"):
        fastckpt.save_sharded(tensors(), tmp_path / "new", progress=fail)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("named", [1, 2, 3])
@pytest.mark.parametrize("before", SAVES.values(), ids=SAVES)
def test_stopped_while_files_get_their_names(before, named, tmp_path, monkeypatch):
    """Then the old save or the new one is there, or it is said that two are mixed."""
    fastckpt.save_sharded(tensors(), tmp_path, max_shard_bytes=before)
    real, count = Replacement.commit, []

    def commit(file, nbytes):
        count.append(file)
        if len(count) > named:
            raise OSError(errno.EIO, "Input/output error", file.name)
        real(file, nbytes)

    monkeypatch.setattr(Replacement, "commit", commit)
    with pytest.raises(OSError, match="Input/output error"):
        fastckpt.save_sharded(tensors(value=7.0), tmp_path, max_shard_bytes=800)
    monkeypatch.undo()
    if before == 800:  # the same names
        with pytest.raises(fastckpt.FormatError, match="belongs to another save than the index"):
            fastckpt.load(tmp_path)
    else:
        same(tensors(), fastckpt.load(tmp_path))
    fastckpt.save_sharded(tensors(value=9.0), tmp_path, max_shard_bytes=800)
    same(tensors(value=9.0), fastckpt.load(tmp_path))
    assert len(os.listdir(tmp_path)) == 4


@pytest.mark.parametrize("named", [1, 2, 3])
def test_stopped_over_what_another_program_saved(named, tmp_path, monkeypatch):
    """Its index says of no save that it is part of it: then its shards and ours are told apart."""
    fastckpt.save_sharded(tensors(), tmp_path, max_shard_bytes=800)
    index = tmp_path / "pytorch_model.bin.index.json"
    content = json.loads(index.read_text())
    del content["metadata"]["save_id"]
    index.write_text(json.dumps(content))
    for name in shard_names(3):
        torch.save(torch.load(tmp_path / name), tmp_path / name)
    real, count = Replacement.commit, []

    def commit(file, nbytes):
        count.append(file)
        if len(count) > named:
            raise OSError(errno.EIO, "Input/output error", file.name)
        real(file, nbytes)

    monkeypatch.setattr(Replacement, "commit", commit)
    with pytest.raises(OSError, match="Input/output error"):
        fastckpt.save_sharded(tensors(value=7.0), tmp_path, max_shard_bytes=800)
    report = fastckpt.verify(tmp_path)
    if named == 3:  # all are there: only the index is the old one, and it says the same
        same(tensors(value=7.0), fastckpt.load(tmp_path))
        assert report.ok
    else:
        with pytest.raises(fastckpt.FormatError, match="belong to different saves"):
            fastckpt.load(tmp_path)
        assert "belong to different saves" in str(report.findings)


def test_too_many_shards_for_the_descriptors(tmp_path):
    many = {f"w{i}": torch.zeros(1) for i in range(200)}
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    fastckpt.save_sharded(many, tmp_path / "a", max_shard_bytes=1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (150, limits[1]))
    try:
        for call, advice in (
            (
                lambda: fastckpt.save_sharded(many, tmp_path / "b", max_shard_bytes=1),
                "max_shard_bytes",
            ),
            (lambda: fastckpt.load(tmp_path / "a"), "keys="),
        ):
            with pytest.raises(OSError, match="Too many open files") as raised:
                call()
            assert advice in raised.value.__notes__[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert os.listdir(tmp_path) == ["a"]
    same(many, fastckpt.load(tmp_path / "a"))


def test_shards_that_another_program_has_written_since(tmp_path):
    """They say of no save that they are part of it."""
    fastckpt.save_sharded(tensors(), tmp_path, max_shard_bytes=1200)
    first = tmp_path / shard_names(2)[0]
    torch.save(torch.load(first, weights_only=True), first)
    same(tensors(), fastckpt.load(tmp_path))


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["a folder", "a pipe"])
def test_something_else_by_the_name_of_a_shard(make, tmp_path):
    make(tmp_path / shard_names(3)[1])
    with pytest.raises(FileExistsError, match=shard_names(3)[1]):
        fastckpt.save_sharded(tensors(), tmp_path, max_shard_bytes=800)
    assert os.listdir(tmp_path) == [shard_names(3)[1]]


def test_saving_over_what_is_loaded_lazily(tmp_path):
    fastckpt.save_sharded(tensors(), tmp_path, max_shard_bytes=800)
    mapped = fastckpt.load(tmp_path, mmap=True)
    with fastckpt.open(tmp_path) as checkpoint:
        fastckpt.save_sharded(
            {name: tensor * 2 for name, tensor in mapped.items()}, tmp_path, max_shard_bytes=800
        )
        same(tensors(), checkpoint.read())
    same(tensors(), mapped)
    same({name: tensor * 2 for name, tensor in mapped.items()}, fastckpt.load(tmp_path))


def test_links_to_one_file(tmp_path):
    """One shard would take the place of the other."""
    (tmp_path / "x").write_bytes(b"old")
    for number in (1, 2):
        (tmp_path / f"pytorch_model-0000{number}-of-00002.bin").symlink_to("x")
    with pytest.raises(FileExistsError, match="the same file as another shard"):
        fastckpt.save_sharded(
            {"a": torch.ones(100), "b": torch.ones(100)}, tmp_path, max_shard_bytes=500
        )
    assert (tmp_path / "x").read_bytes() == b"old"
    assert len(os.listdir(tmp_path)) == 3


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_a_file_in_place_of_the_folder(tmp_path, kind):
    path = tmp_path / "model.pt"
    if kind == "file":
        path.write_bytes(b"old")
    else:
        path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(NotADirectoryError, match="a folder is expected") as caught:
        fastckpt.save_sharded({"a": torch.ones(1)}, path)
    assert caught.value.filename == str(path)
    assert os.listdir(tmp_path) == ["model.pt"]
