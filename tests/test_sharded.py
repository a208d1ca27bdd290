"""load, open and load_into on a folder of shards in transformers' layout, written by hand with torch.save."""

import json
import os
import pickle
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

import fastckpt
from picklecraft import Call, Name, craft, torch_file
from support import same

FIRST, SECOND = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"
INDEX = "pytorch_model.bin.index.json"
SHARDS = {
    FIRST: {"embed.weight": torch.arange(12.0).view(4, 3), "layers.0.weight": torch.ones(3, 3)},
    SECOND: {"layers.1.weight": torch.zeros(3, 3).bfloat16(), "norm.bias": torch.full((3,), 7.0)},
}
WEIGHT_MAP = {name: file for file, tensors in SHARDS.items() for name in tensors}
ALL = {name: SHARDS[file][name] for name, file in WEIGHT_MAP.items()}


def write_index(folder, weight_map=None, **others):
    """As transformers writes it: sorted, indented."""
    index = {
        "metadata": {"total_size": 126},
        "weight_map": WEIGHT_MAP if weight_map is None else weight_map,
        **others,
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for file, tensors in SHARDS.items():
        torch.save(tensors, folder / file)
    write_index(folder)
    return folder


# -- whole -------------------------------------------------------------------------------------------------------------

WHERE = {
    "folder": lambda folder: folder,
    "folder as str": str,
    "folder as bytes": os.fsencode,
    "folder with a slash": lambda folder: f"{folder}/",
    "index": lambda folder: folder / INDEX,
    "index as str": lambda folder: str(folder / INDEX),
    "index as bytes": lambda folder: os.fsencode(folder / INDEX),
}


@pytest.mark.parametrize("where", WHERE.values(), ids=WHERE)
def test_load(where, folder):
    same(ALL, fastckpt.load(where(folder)))


def test_from_here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    same(ALL, fastckpt.load("."))
    same(ALL, fastckpt.load(INDEX))


OPTIONS = {
    "threads": {"threads": 3},
    "mapped": {"mmap": True},
    "not verified": {"verify": False},
    "by Python's unpickler": {"weights_only": False},
    "to a device": {"map_location": "cpu"},
    "opaque": {"unknown": "opaque"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options, folder):
    same(ALL, fastckpt.load(folder, **options))


def test_numpy(folder):
    found = fastckpt.load(folder, framework="numpy")
    assert list(found) == list(ALL)
    assert found["norm.bias"].tolist() == [7, 7, 7]


def test_one_file_in_a_folder(tmp_path):
    torch.save(ALL, tmp_path / "pytorch_model.bin")
    same(ALL, fastckpt.load(tmp_path))
    with fastckpt.open(tmp_path) as checkpoint:
        assert isinstance(checkpoint, fastckpt.Checkpoint)


def test_a_folder_of_something_else(tmp_path):
    for call in (fastckpt.load, fastckpt.open):
        with pytest.raises(IsADirectoryError):
            call(tmp_path)


@pytest.mark.parametrize(
    "name", ["diffusion_pytorch_model.bin.index.json", "pytorch_model.bin.index.fp16.json"]
)
def test_other_names_of_an_index(name, folder):
    (folder / INDEX).rename(folder / name)
    same(ALL, fastckpt.load(folder / name))


def test_links_into_a_store(folder, tmp_path):
    """As the Hugging Face cache lays a model out: every file, the index as well, is a link to a blob."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, name in enumerate(os.listdir(folder)):
        shutil.move(folder / name, blobs / f"{number:064}")
        (snapshot / name).symlink_to(os.path.join("..", "..", "blobs", f"{number:064}"))
    same(ALL, fastckpt.load(snapshot))


@pytest.mark.parametrize("weights_only", [True, False])
def test_progress(weights_only, folder):
    told = []
    fastckpt.load(folder, weights_only=weights_only, progress=lambda *args: told.append(args))
    total = sum(tensor.nbytes for tensor in ALL.values())
    assert told[-1] == (total, total, str(folder / INDEX))
    assert {each[1] for each in told} == {total}
    assert [each[0] for each in told] == sorted(each[0] for each in told)


# -- parts -------------------------------------------------------------------------------------------------------------

KEYS = {
    "a list": (["norm.bias", "embed.weight"], ["embed.weight", "norm.bias"]),
    "a pattern": ("layers.*", ["layers.0.weight", "layers.1.weight"]),
    "a callable": (lambda name: "embed" in name, ["embed.weight"]),
    "nothing": ([], []),
    "a callable that wants nothing": (lambda name: False, []),
}


@pytest.mark.parametrize(("keys", "names"), KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("weights_only", [True, False])
def test_keys(keys, names, weights_only, folder):
    same(
        {name: ALL[name] for name in sorted(names)},
        fastckpt.load(folder, keys=keys, weights_only=weights_only),
    )


def test_keys_open_only_what_they_need(folder):
    (folder / SECOND).write_bytes(b"not a checkpoint")
    assert list(fastckpt.load(folder, keys=["embed.weight"])) == ["embed.weight"]
    with pytest.raises(fastckpt.FormatError, match=SECOND):
        fastckpt.load(folder, keys=["norm.bias"])


def test_keys_that_are_not_there(folder):
    with pytest.raises(KeyError, match=r"not in the checkpoint: x\.y"):
        fastckpt.load(folder, keys=["embed.weight", "x.y"])


def test_keys_that_match_nothing(folder):
    with pytest.raises(KeyError, match=r"matches keys='encoder\.\*'; there are: embed\.weight"):
        fastckpt.load(folder, keys="encoder.*")
    with pytest.raises(KeyError, match=r"near it: layers\.0\.weight, layers\.1\.weight"):
        fastckpt.load(folder, keys="layer.0.weight")


def test_open(folder):
    with fastckpt.open(folder) as checkpoint:
        assert isinstance(checkpoint, fastckpt.ShardedCheckpoint)
        assert list(checkpoint) == sorted(ALL)
        assert len(checkpoint) == 4
        assert "norm.bias" in checkpoint
        assert "x" not in checkpoint
        assert checkpoint["embed.weight"].shape == (4, 3)
        assert checkpoint["embed.weight"].name == "embed.weight"
        assert checkpoint[("layers.1.weight",)].dtype == "bfloat16"
        assert torch.equal(checkpoint["embed.weight"][1:3], ALL["embed.weight"][1:3])
        same({"norm.bias": ALL["norm.bias"], "embed.weight": ALL["embed.weight"]},
             checkpoint.read(["norm.bias", "embed.weight"]))  # fmt: skip
        same(ALL, checkpoint.read())
        assert checkpoint.tree["norm.bias"] == checkpoint["norm.bias"]
        handle = checkpoint["norm.bias"]
        for name in ("x", ("norm", "bias"), 5):
            with pytest.raises(KeyError):
                checkpoint[name]
        with pytest.raises(KeyError, match=r"near it: norm\.bias"):
            checkpoint["bias"]
        assert checkpoint.get("x", 5) == 5
    asked = {
        "a tensor": lambda: checkpoint["norm.bias"], "names": lambda: list(checkpoint), "values": handle.read,
        "length": lambda: len(checkpoint), "in": lambda: "x" in checkpoint, "pickle": lambda: pickle.dumps(checkpoint),
    }  # fmt: skip
    for call in asked.values():
        with pytest.raises(ValueError, match="closed"):
            call()
    assert "closed" in repr(checkpoint)


def test_info(folder):
    with fastckpt.open(folder) as checkpoint:
        info = checkpoint.info
        assert (info["container"], info["tensors"], info["storages"]) == ("sharded", 4, 4)
        assert info["metadata"] == {"total_size": 126}
        assert list(info["shards"]) == [FIRST, SECOND]
        assert info["shards"][FIRST]["tensors"] == 2
        assert info["nbytes"] == sum((folder / file).stat().st_size for file in SHARDS)
        assert info["strays"] == {}
        json.dumps(info)


def test_pickled(folder):
    with fastckpt.open(folder) as checkpoint:
        with pickle.loads(pickle.dumps(checkpoint)) as again:
            same(ALL, again.read())
        assert torch.equal(
            pickle.loads(pickle.dumps(checkpoint["norm.bias"])).read(), ALL["norm.bias"]
        )
        data = pickle.dumps(checkpoint)
        torch.save(SHARDS[SECOND], folder / SECOND)
        with pytest.raises(fastckpt.FormatError, match="has changed"):
            pickle.loads(data)


def test_without_torch(folder):
    code = (
        "import sys, fastckpt; sys.modules['torch'] = None\n"
        "with fastckpt.open(sys.argv[1], framework='numpy') as c: print(c['norm.bias'].shape, c['norm.bias'].read())"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
    )
    assert found.stdout == "(3,) [7. 7. 7.]\n"


# -- load_into ---------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.layers = nn.ModuleList([nn.Linear(3, 3, bias=False) for _ in range(2)])
        self.norm = nn.LayerNorm(3)
        self.norm.weight = None


def test_into_a_module(folder):
    model, told = Model(), []
    result = fastckpt.load_into(model, folder, progress=lambda *args: told.append(args))
    assert result == ([], [])
    expected = Model()
    expected.load_state_dict(ALL)
    same(expected.state_dict(), model.state_dict())
    done = [each[0] for each in told]
    assert done == sorted(done)
    assert told[-1][0] == told[-1][1]


def test_into_a_dict(folder):
    target = {name: torch.empty_like(tensor) for name, tensor in ALL.items()}
    fastckpt.load_into(target, folder / INDEX)
    same(ALL, target)


def test_into_a_part(folder):
    target = {"0.weight": torch.empty(3, 3), "1.weight": torch.empty(3, 3)}
    fastckpt.load_into(target, folder, prefix="layers.")
    assert torch.equal(target["0.weight"], ALL["layers.0.weight"])
    assert torch.equal(target["1.weight"], ALL["layers.1.weight"].float())


def test_into_what_lacks_names(folder):
    target = {name: torch.empty_like(tensor) for name, tensor in ALL.items()}
    target["more"] = target.pop("norm.bias")
    with pytest.raises(
        RuntimeError, match=r'(?s)Missing key.*"more".*Unexpected key.*"norm\.bias"'
    ):
        fastckpt.load_into(target, folder)
    assert fastckpt.load_into(target, folder, strict=False) == (["more"], ["norm.bias"])


class WithExtra(nn.Module):
    def __init__(self, extra):
        super().__init__()
        self.weight, self.extra = nn.Parameter(torch.ones(2)), extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, extra):
        self.extra = extra


def test_extra_state(tmp_path):
    saved = {
        "a": {"a.weight": torch.zeros(2), "a._extra_state": {"n": 5}},
        "b": {"b.weight": torch.ones(2), "b._extra_state": 7},
    }
    for file, values in saved.items():
        torch.save(values, tmp_path / file)
    write_index(tmp_path, {name: file for file, values in saved.items() for name in values})
    found = fastckpt.load(tmp_path)
    same(saved["a"] | saved["b"], {name: found[name] for name in [*saved["a"], *saved["b"]]})
    with fastckpt.open(tmp_path) as checkpoint:
        assert list(checkpoint) == ["a.weight", "b.weight"]
        assert checkpoint.tree["a._extra_state"] == {"n": 5}
    model = nn.ModuleDict({"a": WithExtra(None), "b": WithExtra(None)})
    fastckpt.load_into(model, tmp_path)
    assert (model["a"].extra, model["b"].extra) == ({"n": 5}, 7)


def test_tensors_inside_of_what_the_index_names(tmp_path):
    """They have names as in a checkpoint of one file, where that has them."""
    scale, shared = torch.arange(3.0), torch.ones(2)
    saved = {
        "a": {"a.weight": torch.zeros(2), "a._extra_state": {"scale": scale, 0: [shared, shared]}},
        "b": {"b._extra_state": (torch.tensor(4), "plain"), "b": {"c": torch.tensor(5)}, "b.c": torch.tensor(6)},
    }  # fmt: skip
    for file, values in saved.items():
        torch.save(values, tmp_path / file)
    write_index(tmp_path, {name: file for file, values in saved.items() for name in values})
    whole = saved["a"] | saved["b"]
    torch.save({name: whole[name] for name in sorted(whole)}, tmp_path / "whole")
    with fastckpt.open(tmp_path) as checkpoint, fastckpt.open(tmp_path / "whole") as one:
        assert set(checkpoint) == set(one) == {
            "a.weight", "a._extra_state.scale", "a._extra_state.0.0", "a._extra_state.0.1",
            "b._extra_state.0", ("b", "c"), ("b.c",),
        }  # fmt: skip
        assert len(checkpoint) == checkpoint.info["tensors"] == len(one)
        for name in one:
            assert name in checkpoint
            assert checkpoint.shard_of(name) is checkpoint[name].checkpoint
            assert checkpoint[name].path == one[name].path
            same(one[name].read(), checkpoint[name].read())
        same(one.read(list(one)), checkpoint.read(list(one)))
        same(scale, checkpoint["a._extra_state", "scale"].read())
        found = checkpoint.read(["a._extra_state.0.1", "a._extra_state.0.0"])
        assert len({tensor.data_ptr() for tensor in found.values()}) == 1
        for name, message in WRONG_INSIDE.items():
            assert name not in checkpoint
            with pytest.raises(KeyError, match=message):
                checkpoint[name]


WRONG_INSIDE = {
    "a._extra_state": "a container, of 'a._extra_state.scale' for example",
    "b._extra_state.1": "there, and no tensor",
    "b.c": "ambiguous",
    "a._extra_state.scales": "no tensor of the checkpoint",
}


# -- what is wrong -----------------------------------------------------------------------------------------------------

OUTSIDE = {
    "upwards": "../outside.bin",
    "absolute": "/etc/passwd",
    "in a folder": "sub/x.bin",
    "backwards slash": "..\\outside.bin",
    "dots": "..",
    "a dot": ".",
    "empty": "",
    "with a zero": "x\0.bin",
}


@pytest.mark.parametrize("name", OUTSIDE.values(), ids=OUTSIDE)
@pytest.mark.parametrize("call", [fastckpt.load, fastckpt.open])
def test_names_that_leave_the_folder(name, call, folder, tmp_path):
    torch.save(ALL, tmp_path / "outside.bin")
    write_index(folder, {**WEIGHT_MAP, "norm.bias": name})
    with pytest.raises(
        fastckpt.FormatError, match=r"'norm\.bias' is in .* the same folder is expected"
    ):
        call(folder)


@pytest.mark.parametrize("target", ["../outside.bin", "sub/outside.bin", "/dev/zero"])
def test_links_that_leave_the_folder(target, folder, tmp_path):
    (folder / "sub").mkdir()
    for place in (tmp_path, folder / "sub"):
        torch.save(ALL, place / "outside.bin")
    (folder / SECOND).unlink()
    (folder / SECOND).symlink_to(target)
    with pytest.raises(fastckpt.FormatError, match=r"leads out of the folder|no regular file"):
        fastckpt.load(folder)


def test_a_pipe_is_not_waited_for(folder):
    (folder / SECOND).unlink()
    os.mkfifo(folder / SECOND)
    with pytest.raises(fastckpt.FormatError, match="no regular file"):
        fastckpt.load(folder)


BAD_INDICES = {
    "nothing": (b"", "an index in JSON is expected"),
    "cut off": (b'{"weight_map": {"a":', "an index in JSON is expected"),
    "not text": (b"\xff\xfe", "an index in JSON is expected"),
    "too deep": (b"[" * 200_000, "an index in JSON is expected"),
    "too long a number": (b"[" + b"9" * 100_000 + b"]", "an index in JSON is expected"),
    "a list": (b"[]", "no 'weight_map'"),
    "no map": (b'{"metadata": {}}', "no 'weight_map'"),
    "a map that is a list": (b'{"weight_map": []}', "no 'weight_map'"),
    "a file that is a number": (
        b'{"weight_map": {"a": 5}}',
        "'a' is in 5, a file name is expected",
    ),
    "a file that is a list": (b'{"weight_map": {"a": ["x"]}}', "a file name is expected"),
    "a name twice": (b'{"weight_map": {"a": "x", "b": "y", "a": "z"}}', "'a' is in it twice"),
}


@pytest.mark.parametrize(("data", "words"), BAD_INDICES.values(), ids=BAD_INDICES)
@pytest.mark.parametrize("call", [fastckpt.load, fastckpt.open])
def test_bad_indices(data, words, call, folder):
    (folder / INDEX).write_bytes(data)
    with pytest.raises(fastckpt.FormatError, match=words) as raised:
        call(folder)
    assert raised.value.path == str(folder / INDEX)
    assert len(str(raised.value)) < 1000


def test_an_index_is_no_shard(folder):
    """Nor is it followed, which could go on for ever."""
    other = "other.index.json"
    (folder / other).write_text(json.dumps({"weight_map": {"a": INDEX, "b": other}}))
    write_index(folder, {"a": INDEX, "b": other})
    for call in (fastckpt.load, fastckpt.open):
        with pytest.raises(fastckpt.FormatError, match="this is the index of a checkpoint"):
            call(folder)
    report = fastckpt.verify(folder)
    assert not report.ok
    assert list(report.shards) == [INDEX, other]
    assert "this is the index of a checkpoint" in str(fastckpt.scan(folder))


def test_no_tensors(folder):
    write_index(folder, {})
    assert fastckpt.load(folder) == {}


def test_an_index_that_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        fastckpt.load(tmp_path / INDEX)


@pytest.mark.parametrize("call", [fastckpt.load, fastckpt.open])
def test_a_shard_that_is_missing(call, folder):
    (folder / SECOND).unlink()
    with pytest.raises(
        fastckpt.FormatError, match=rf"shard '{SECOND}' is missing, which has 'layers\.1\.weight'"
    ):
        call(folder)
    with pytest.raises(fastckpt.FormatError, match="is missing"):
        fastckpt.load(folder, keys=["layers.1.weight"])


def test_a_shard_that_is_missing_and_not_wanted(folder):
    whole = fastckpt.load(folder)
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    names = [name for name, file in index.items() if file != SECOND]
    (folder / SECOND).unlink()
    assert names
    same({name: whole[name] for name in names}, fastckpt.load(folder, keys=names))


def test_names_to_read_are_a_list(folder):
    with fastckpt.open(folder) as checkpoint, pytest.raises(TypeError, match="a list of names"):
        checkpoint.read("layers.1.weight")


@pytest.mark.parametrize(
    "names", [["norm.bias"], ["layers.1.weight", "norm.bias"]], ids=["one", "two"]
)
@pytest.mark.parametrize("call", [fastckpt.load, fastckpt.open])
def test_a_name_that_is_not_in_its_shard(names, call, folder):
    write_index(folder, {**WEIGHT_MAP, **dict.fromkeys(names, FIRST)})
    words = rf"'{names[0]}'{' and 1 more' * (len(names) - 1)} should be in shard '{FIRST}'"
    with pytest.raises(fastckpt.FormatError, match=words):
        call(folder)


@pytest.mark.parametrize(
    "obj", [[torch.ones(2)], torch.ones(2), 5], ids=["a list", "a tensor", "a number"]
)
def test_a_shard_of_something_else(obj, folder):
    torch.save(obj, folder / SECOND)
    with pytest.raises(
        fastckpt.FormatError,
        match=f"shard '{SECOND}' holds an? .*, a dict of tensors by name is expected",
    ):
        fastckpt.load(folder)


def test_a_damaged_shard(folder):
    data = bytearray((folder / SECOND).read_bytes())
    at = data.index(torch.full((3,), 7.0).numpy().tobytes())
    data[at] ^= 1
    (folder / SECOND).write_bytes(data)
    with pytest.raises(fastckpt.ChecksumError, match=SECOND):
        fastckpt.load(folder)
    assert fastckpt.load(folder, verify=False)["norm.bias"][0] != 7


def test_an_unknown_class_in_a_shard(folder):
    torch.save({**SHARDS[SECOND], "layers.1.weight": Unknown()}, folder / SECOND)
    with pytest.raises(fastckpt.UnsafePickleError, match=r"test_sharded\.Unknown"):
        fastckpt.load(folder)
    assert isinstance(fastckpt.load(folder, unknown="opaque")["layers.1.weight"], fastckpt.Opaque)
    assert isinstance(fastckpt.load(folder, weights_only=False)["layers.1.weight"], Unknown)
    with fastckpt.open(folder) as checkpoint:
        assert checkpoint.info["unknown"] == ["test_sharded.Unknown"]
        assert torch.equal(checkpoint["norm.bias"].read(), ALL["norm.bias"])


class Unknown:
    pass


def test_duplicates_and_strays(folder):
    torch.save(
        {**SHARDS[SECOND], "embed.weight": torch.zeros(4, 3), "old": torch.ones(1)}, folder / SECOND
    )
    with pytest.warns(
        UserWarning,
        match=rf"not loaded: embed\.weight, old in {SECOND}, which the index does not say",
    ):
        found = fastckpt.load(folder)
    same(ALL, found)
    with fastckpt.open(folder) as checkpoint:
        assert checkpoint.info["strays"] == {SECOND: ["embed.weight", "old"]}
    same({"embed.weight": ALL["embed.weight"]}, fastckpt.load(folder, keys=["embed.weight"]))


# -- reports


def shard_states(report):
    return {file: each.ok for file, each in report.shards.items()}


def test_reports(folder):
    for report in (fastckpt.verify(folder), fastckpt.scan(folder), fastckpt.verify(folder / INDEX)):
        assert (report.ok, report.findings) == (True, ())
        assert shard_states(report) == {FIRST: True, SECOND: True}
        assert json.loads(json.dumps(report.as_dict()))["shards"].keys() == {FIRST, SECOND}
    assert fastckpt.scan(folder).rating == "known"
    with fastckpt.open(folder) as checkpoint:
        assert checkpoint.verify().ok


def save_second(folder, **more):
    torch.save({**SHARDS[SECOND], **more}, folder / SECOND)


# What is done to a folder, the kinds of findings of the index, and which shards are said to be good.
DAMAGED = {
    "no shard": (lambda f: (f / SECOND).unlink(), ["bad_index"], {FIRST: True}),
    "cut shard": (
        lambda f: (f / FIRST).write_bytes((f / FIRST).read_bytes()[:-9]),
        [],
        {FIRST: False, SECOND: True},
    ),
    "a name that is not there": (
        lambda f: write_index(f, {**WEIGHT_MAP, "x": SECOND}),
        ["contradiction"],
        {FIRST: True, SECOND: True},
    ),
    "a way out": (lambda f: write_index(f, {**WEIGHT_MAP, "x": "../x"}), ["bad_index"], {FIRST: True, SECOND: True}),
    "no name of a file": (lambda f: write_index(f, {**WEIGHT_MAP, "x": 5}), ["bad_index"], {FIRST: True, SECOND: True}),
    "no index": (lambda f: (f / INDEX).write_text("{"), ["bad_index"], {}),
    "a list for a shard": (lambda f: torch.save([1], f / SECOND), ["contradiction"], {FIRST: True, SECOND: True}),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED)
def test_verify_of_what_is_damaged(folder, damage):
    change, kinds, states = DAMAGED[damage]
    change(folder)
    report = fastckpt.verify(folder)
    assert not report.ok
    assert [each.kind for each in report.index_findings] == kinds
    assert shard_states(report) == states
    assert len(report.findings) == len(kinds) + list(states.values()).count(False)
    assert all(each.message in str(report) for each in report.findings)


def test_verify_notes_strays(folder):
    save_second(folder, old=torch.ones(1))
    report = fastckpt.verify(folder)
    assert report.ok
    assert "old in" in str(report.index_notes[0])
    with fastckpt.open(folder) as checkpoint:
        assert checkpoint.verify().index_notes == report.index_notes


def test_scan_of_a_dangerous_shard(folder):
    (folder / SECOND).write_bytes(torch_file(craft(Call(Name("os system"), ("id",)))))
    (folder / FIRST).unlink()
    report = fastckpt.scan(folder)
    assert (report.ok, report.rating) == (False, "dangerous")
    assert [each.kind for each in report.findings] == ["bad_index", "dangerous_name"]


def test_salvage_takes_one_file(folder, tmp_path):
    for path in (folder, folder / INDEX):
        with pytest.raises(fastckpt.UnsupportedError, match="load the files one by one"):
            fastckpt.salvage(path, tmp_path / "out.pt")
    shutil.copy(folder / SECOND, folder / "pytorch_model.bin")
    assert len(fastckpt.salvage(folder, tmp_path / "out.pt").kept) == 2


# What a folder has, and what is said of it.
FOLDERS = {
    "nothing": ([], "an empty folder"),
    "one file": (["step.ckpt"], "such as 'step.ckpt'"),
    "another index": (
        ["unet-00001-of-00002.bin", "unet.bin.index.json"],
        "such as 'unet.bin.index.json'",
    ),
    "no index": ([SECOND, FIRST], f"shards, such as '{FIRST}', without {INDEX}, their index"),
    "no index, other names": (["a-00002-of-00002.pt"], "such as 'a-00002-of-00002.pt', without"),
    "safetensors": (
        ["model-1-of-1.safetensors", "model.safetensors.index.json"],
        "safetensors.torch.load_file",
    ),
    "distributed": ([".metadata", "__0_0.distcp"], "dcp_to_torch_save"),
    "something else": (["README.md"], "nothing else in it is called as checkpoints are"),
}


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize("way", ["load", "open", "verify", "scan"])
def test_folders_without_a_checkpoint(tmp_path, kind, way):
    names, words = FOLDERS[kind]
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(IsADirectoryError, match=words) as caught:
        getattr(fastckpt, way)(tmp_path)
    assert caught.value.filename == str(tmp_path)


def test_a_folder_that_turns_into_one_file_while_it_is_looked_at(folder):
    class Turning:
        """The folder's path; between the look for the one file and that for the index, a save ends."""

        looks = 0

        def __fspath__(self):
            self.looks += 1
            if self.looks == 2:
                fastckpt.save_sharded({"new": torch.ones(3)}, folder)
            return str(folder)

    assert fastckpt.load(Turning())["new"].sum() == 3


@pytest.mark.parametrize("options", [{"offset": 5}, {"nbytes": 100}], ids=str)
def test_a_region_of_an_index(options, folder):
    with pytest.raises(TypeError, match="offset and nbytes are of one file"):
        fastckpt.load(folder, **options)
    with pytest.raises(TypeError, match="offset and nbytes are of one file"):
        fastckpt.verify(folder, **options)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc/self")
def test_no_descriptor_is_left_open(folder):
    before = len(os.listdir("/proc/self/fd"))
    fastckpt.load(folder)
    write_index(folder, {**WEIGHT_MAP, "x": SECOND})
    with pytest.raises(fastckpt.FormatError):
        fastckpt.open(folder)
    assert len(os.listdir("/proc/self/fd")) == before
