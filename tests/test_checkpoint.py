"""An open checkpoint: names, the tree, reading together, sharing, closing, and being used by many."""

import collections
import gc
import io
import multiprocessing
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Mapping

import numpy as np
import pytest
import torch

import fastckpt
from fastckpt.errors import FormatError, LimitError, UnsafePickleError
from fastckpt.limits import Limits
from streamcraft import Call, Name, floats, legacy_stream, storage, tensor
from support import QUIET, same
from zipcraft import archive, checkpoint

pytestmark = QUIET


def saved(obj, **options):
    out = io.BytesIO()
    torch.save(obj, out, **options)
    return out.getvalue()


def opened(obj, **options):
    return fastckpt.open(saved(obj), **options)


def model():
    shared = torch.arange(12.0)
    state = collections.OrderedDict(
        [
            ("embed.weight", shared.view(3, 4)),
            ("head.weight", shared.view(3, 4)),
            ("head.bias", shared[3:6]),
        ]
    )
    state._metadata = {"": {"version": 1}}
    tied = torch.nn.Parameter(torch.ones(2))
    return {
        "model": state,
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "m": torch.zeros(2)}},
            "groups": [{"lr": 0.1, "params": [0]}],
        },
        "parameters": [tied, tied],
        "size": torch.Size([3, 4]),
        "dtype": torch.float16,
        "device": torch.device("cpu"),
        "numbers": (1, 2.5, 1 + 2j, None, True, b"raw", "text", {1, 2}),
        "sparse": torch.eye(3).to_sparse(),
        "storage": torch.arange(4).storage(),
    }


NAMES = [
    "model.embed.weight",
    "model.head.weight",
    "model.head.bias",
    "optimizer.state.0.step",
    "optimizer.state.0.m",
    "parameters.0",
    "parameters.1",
    "sparse",
]


# -- a Mapping


# What is asked for, and what is said where it is no tensor.
NO_TENSOR = {
    "epoch": r"'epoch' is there, and no tensor; \.tree has it",
    "model": r"'model' is a container, of 'model\.weight' for example; \.tree has it",
    "weight": r"is no tensor of the checkpoint; near it: model\.weight",
    "model.wieght": r"near it: model\.weight",
    ("m", "0"): r"is no path of a tensor; 'm\.0' is the name of one",
    "nothing": r"there are: model\.weight, m\.0",
    5: r"'5' is no tensor",
}


class TestMapping:
    def test_protocol(self):
        with opened(model()) as ckpt:
            assert isinstance(ckpt, Mapping)
            assert list(ckpt) == list(ckpt.keys()) == NAMES
            assert len(ckpt) == 8
            assert [name for name, _ in ckpt.items()] == NAMES
            assert all(isinstance(lazy, fastckpt.LazyTensor) for lazy in ckpt.values())
            assert "sparse" in ckpt
            assert "model" not in ckpt
            assert 5 not in ckpt
            assert None not in ckpt
            assert ("model", "embed.weight") in ckpt
            assert ckpt.get("nothing") is None
            assert ckpt.get("sparse") == ckpt["sparse"]
            assert ckpt == ckpt
            assert bool(ckpt)
            with pytest.raises(KeyError, match="nothing"):
                ckpt["nothing"]
            with pytest.raises(TypeError):
                ckpt["sparse"] = torch.ones(1)

    @pytest.mark.parametrize("name", NO_TENSOR, ids=str)
    def test_what_is_no_tensor(self, name):
        obj = {"epoch": 3, "model": {"weight": torch.ones(1)}, "m": [torch.ones(1)]}
        with opened(obj) as ckpt:
            assert name not in ckpt
            assert ckpt.get(name, 7) == 7
            with pytest.raises(KeyError, match=NO_TENSOR[name]):
                ckpt[name]

    def test_names_are_paths(self):
        with opened(model()) as ckpt:
            lazy = ckpt["model.embed.weight"]
            assert lazy.path == ("model", "embed.weight")
            assert ckpt["model", "embed.weight"] == lazy
            assert ckpt[("model", "embed.weight")] == lazy
            assert ckpt["optimizer", "state", 0, "m"] == ckpt["optimizer.state.0.m"]
            assert ckpt["parameters", 1] == ckpt["parameters.1"]
            for wrong in (
                ("optimizer", "state", "0", "m"),
                ("model", "embed", "weight"),
                ("parameters", True),
                (),
            ):
                with pytest.raises(KeyError):
                    ckpt[wrong]

    def test_ambiguous_names(self):
        """Names that read alike are listed as tuples, the others as text."""
        obj = {
            "a": {"b": torch.zeros(1)},
            "a.b": torch.ones(1),
            0: torch.full((1,), 2.0),
            "0": torch.full((1,), 3.0),
            "c": torch.full((1,), 4.0),
        }
        with opened(obj) as ckpt:
            assert list(ckpt) == [("a", "b"), ("a.b",), (0,), ("0",), "c"]
            assert [ckpt[name].read().item() for name in ckpt] == [0, 1, 2, 3, 4]
            assert ckpt["a", "b"].read().item() == 0
            assert ckpt["c"] == ckpt[("c",)]
            for name in ("a.b", "0"):
                assert name not in ckpt
                with pytest.raises(KeyError, match=r"ambiguous; use one of \("):
                    ckpt[name]
            read = ckpt.read(list(ckpt))
            assert [read[name].item() for name in ckpt] == [0, 1, 2, 3, 4]

    def test_keys_of_types(self):
        """0, "0", False, 0.0 and None are five keys."""
        keys = ["0", None, 2, 1.5, b"x", (1, 2), True]
        obj = [{key: torch.full((1,), float(i))} for i, key in enumerate(keys)]
        with opened(obj) as ckpt:
            assert [ckpt[i, key].read().item() for i, key in enumerate(keys)] == list(range(7))
            assert list(ckpt) == ["0.0", "1.None", "2.2", "3.1.5", "4.b'x'", "5.(1, 2)", "6.True"]
            assert (6, 1) not in ckpt
            assert (0, 0) not in ckpt

    @pytest.mark.parametrize(
        "wrap",
        [lambda t: t, torch.nn.Parameter, lambda t: t.to_sparse()],
        ids=["tensor", "parameter", "sparse"],
    )
    def test_a_root_tensor(self, wrap):
        with opened(wrap(torch.ones(2))) as ckpt:
            assert list(ckpt) == [""]
            assert ckpt[()] == ckpt[""]
            assert ckpt[""].name == ""
            assert ckpt.tree == ckpt[""]
            same(wrap(torch.ones(2)), ckpt.read())

    @pytest.mark.parametrize("obj", [{}, [], 5, None, "text", {"a": [1, {}]}], ids=repr)
    def test_without_tensors(self, obj):
        with opened(obj) as ckpt:
            assert list(ckpt) == []
            assert len(ckpt) == 0
            assert ckpt.tree == obj
            assert ckpt.read() == obj
            assert ckpt.read([]) == {}

    def test_tensors_in_every_container(self):
        t = [torch.full((1,), float(i)) for i in range(8)]
        deque = collections.deque([t[2]])
        obj = {
            "l": [t[0]],
            "t": (t[1],),
            "q": deque,
            "d": collections.defaultdict(list, x=[t[3]]),
            "o": collections.OrderedDict(y=t[4]),
        }
        obj["o"].extra = t[5]
        with opened(obj) as ckpt:
            assert list(ckpt) == ["l.0", "t.0", "q.0", "d.x.0", "o.y", "o.extra"]
            assert [lazy.read().item() for lazy in ckpt.values()] == [0, 1, 2, 3, 4, 5]

    def test_shared_containers_and_cycles(self):
        """A container that occurs twice is named under both paths."""
        inner = {"w": torch.ones(1)}
        obj = {"a": inner, "b": inner}
        obj["self"] = obj
        with opened(obj) as ckpt:
            assert list(ckpt) == ["a.w", "b.w"]
            assert ckpt["a.w"] == ckpt["b.w"]
            tree = ckpt.tree
            assert tree["a"] is tree["b"]
            assert tree["self"] is tree

    def test_repr(self, tmp_path):
        path = tmp_path / "model.pt"
        torch.save(model(), path)
        with fastckpt.open(path) as ckpt:
            assert repr(ckpt) == f"<Checkpoint {str(path)!r}, zip, 8 tensors>"
        assert repr(ckpt) == f"<Checkpoint {str(path)!r}, zip, closed>"


# -- the tree


class TestTree:
    def test_all_but_the_tensors_is_as_load_gives_it(self):
        data = saved(model())
        with fastckpt.open(data) as ckpt:
            tree, loaded = ckpt.tree, fastckpt.load(data)
            compare(loaded, tree)
            assert vars(tree["model"]).keys() == {"_metadata"}
            assert type(tree["size"]) is torch.Size
            assert tree["dtype"] is torch.float16

    def test_identity(self):
        with opened(model()) as ckpt:
            tree = ckpt.tree
            assert tree["parameters"][0] is tree["parameters"][1]
            assert tree["model"]["embed.weight"] == ckpt["model.embed.weight"]
            assert tree["parameters"][0] == ckpt["parameters.1"]
            assert tree["sparse"] == ckpt["sparse"]
            again = ckpt.tree
            assert again is not tree
            assert again["model"]["head.bias"] == tree["model"]["head.bias"]
            assert again["sparse"] == tree["sparse"]

    def test_names(self):
        """Every LazyTensor has its name, whichever way it was found first; of several, the first."""
        with opened(model()) as ckpt:
            tree = ckpt.tree
            assert tree["model"]["head.bias"].name == "model.head.bias"
            assert tree["parameters"][1].name == "parameters.0"
            assert tree["sparse"].name == "sparse"
        with opened(model()) as ckpt:
            assert ckpt["parameters.1"].name == "parameters.0"

    def test_it_belongs_to_the_caller(self):
        with opened(model()) as ckpt:
            tree = ckpt.tree
            tree["model"].clear()
            tree["optimizer"]["groups"].append(5)
            del tree["numbers"]
            compare(fastckpt.load(saved(model())), ckpt.tree)
            assert list(ckpt) == NAMES

    def test_tensors_in_sets(self):
        """Members have no order; each is the right one all the same."""
        data = legacy_stream(
            {"s": Call(Name("builtins", "set"), ([parameter(i) for i in range(20)],))},
            {str(i): (1, floats(i)) for i in range(20)},
        )
        with fastckpt.open(data) as ckpt:
            for _ in range(3):
                assert sorted(lazy.read().item() for lazy in ckpt.tree["s"]) == list(range(20))

    def test_opaque(self):
        with fastckpt.open(UNKNOWN) as ckpt:
            tree = ckpt.tree
            assert isinstance(tree["net"], fastckpt.Opaque)
            assert tree["net"].qualname == "some.Net"
            assert tree["net"].state["w"] == ckpt["net.w"]
            assert ckpt["net.w"][1].item() == 2

    def test_no_byte_is_read(self):
        with opened(model()) as ckpt:
            ckpt.source.readinto = ckpt.source.read = None
            assert ckpt.tree["model"]["embed.weight"].shape == (3, 4)


def parameter(i):
    return Call(
        Name("torch._utils", "_rebuild_parameter"),
        (tensor(storage(str(i), 1), (1,)), False, Call(Name("collections", "OrderedDict"))),
    )


def compare(loaded, tree, path="tree"):
    if isinstance(tree, fastckpt.LazyTensor):
        same(loaded, tree.read(), path)
    elif hasattr(tree, "read"):
        assert loaded.tolist() == tree.read().tolist(), path
    else:
        assert type(loaded) is type(tree), path
        if isinstance(loaded, dict):
            assert list(loaded) == list(tree), path
            for key in loaded:
                compare(loaded[key], tree[key], f"{path}[{key!r}]")
        elif isinstance(loaded, (list, tuple)) and not isinstance(loaded, torch.Size):
            for i, (a, b) in enumerate(zip(loaded, tree, strict=True)):
                compare(a, b, f"{path}[{i}]")
        else:
            assert loaded == tree, path


UNKNOWN = legacy_stream(
    {
        "net": Call(Name("some", "Net"), (), {"w": tensor(storage("0", 2), (2,))}),
        "v": tensor(storage("0", 2), (2,)),
    },
    {"0": (2, floats(1, 2))},
)


class TestUnknown:
    def test_opaque_is_the_default_of_open(self):
        with fastckpt.open(UNKNOWN) as ckpt:
            assert list(ckpt) == ["net.w", "v"]
            assert ckpt.read(["v"])["v"].tolist() == [1, 2]
            whole = ckpt.read()
            assert whole["net"].qualname == "some.Net"
            assert whole["net"].state["w"].tolist() == [1, 2]

    def test_error(self):
        with fastckpt.open(UNKNOWN, unknown="error") as ckpt:
            assert list(ckpt) == ["net.w", "v"]
            assert ckpt["v"].read().tolist() == [1, 2]
            for read in (ckpt.read, lambda: ckpt.tree):
                with pytest.raises(UnsafePickleError, match=r"some\.Net"):
                    read()

    def test_info(self):
        with fastckpt.open(UNKNOWN) as ckpt:
            assert ckpt.info["unknown"] == ["some.Net"]

    def test_allowed_classes(self):
        with opened({"n": argument_of_ours(), "w": torch.ones(1)}) as ckpt:
            assert isinstance(ckpt.read()["n"], fastckpt.Opaque)
            with torch.serialization.safe_globals([Ours]):
                assert type(ckpt.read()["n"]) is Ours

    @pytest.mark.parametrize("unknown", ["opaque", "error"])
    def test_a_tree_calls_no_allowed_class(self, unknown):
        data = saved({"n": argument_of_ours()})
        with torch.serialization.safe_globals([Ours]), fastckpt.open(data, unknown=unknown) as ckpt:
            assert isinstance(ckpt.tree["n"], fastckpt.Opaque)
            assert type(ckpt.read()["n"]) is Ours
            assert not fastckpt.verify(data).torch_accepts

    @pytest.mark.parametrize(
        "options",
        [
            {"unknown": "ignore"},
            {"framework": "jax"},
            {"framework": "numpy", "map_location": "meta"},
        ],
        ids=repr,
    )
    def test_wrong_arguments(self, options):
        with pytest.raises((ValueError, TypeError), match=next(iter(options))):
            fastckpt.open(UNKNOWN, **options)


class Ours:
    """A class that somebody allows."""


def argument_of_ours():
    made = Ours()
    made.x = 5
    return made


# -- reading


class TestRead:
    def test_one_name_is_no_list(self, path):
        with fastckpt.open(path) as checkpoint, pytest.raises(TypeError, match="a list of names"):
            checkpoint.read("a")

    @pytest.mark.parametrize("options", [{}, {"threads": 3}, {"verify": False}], ids=repr)
    def test_whole(self, options, monkeypatch):
        monkeypatch.setenv("FASTCKPT_SERIAL_BELOW", "0")
        data = saved(model())
        with fastckpt.open(data, **options) as ckpt:
            same(torch.load(io.BytesIO(data)), ckpt.read())
            same(torch.load(io.BytesIO(data)), ckpt.read())  # again

    def test_names(self):
        with opened(model()) as ckpt:
            found = ckpt.read(
                ["model.head.bias", "sparse", ("parameters", 1), "model.embed.weight"]
            )
            assert list(found) == [
                "model.head.bias",
                "sparse",
                ("parameters", 1),
                "model.embed.weight",
            ]
            same(model()["model"]["head.bias"], found["model.head.bias"])
            assert type(found["parameters", 1]) is torch.nn.Parameter
            assert storage_of(found["model.head.bias"]) == storage_of(found["model.embed.weight"])

    def test_an_iterator_of_names(self):
        with opened(model()) as ckpt:
            assert list(ckpt.read(iter(ckpt))) == NAMES
            assert list(ckpt.read(name for name in ckpt if name.startswith("opt"))) == NAMES[3:5]

    def test_tied(self):
        """Two names of one tensor are one tensor."""
        with opened(model()) as ckpt:
            found = ckpt.read(["parameters.0", "parameters.1"])
            assert found["parameters.0"] is found["parameters.1"]

    def test_missing_name(self):
        with opened(model()) as ckpt, pytest.raises(KeyError, match="nothing"):
            ckpt.read(["sparse", "nothing"])

    def test_in_numpy(self):
        with opened({"a": torch.ones(2), "b": [torch.arange(3)]}, framework="numpy") as ckpt:
            same({"a": np.ones(2, np.float32), "b": [np.arange(3)]}, ckpt.read())
            same({"b.0": np.arange(3)}, ckpt.read(["b.0"]))

    def test_map_location(self):
        with opened({"a": torch.ones(2)}, map_location="meta") as ckpt:
            assert ckpt.read()["a"].is_meta
        calls = []
        with opened(
            {"a": torch.ones(2)}, map_location=lambda s, where: calls.append((s.nbytes(), where))
        ) as ckpt:
            assert ckpt["a"].read().tolist() == [1, 1]
        assert calls == [(8, "cpu")]

    def test_mapped(self, tmp_path):
        path = tmp_path / "model.pt"
        torch.save(model(), path)
        before = path.read_bytes()
        with fastckpt.open(path, mmap=True) as ckpt:
            same(torch.load(path), ckpt.read())
            part = ckpt["model.embed.weight"].read()
            part.fill_(7)
            assert ckpt["model.head.bias"].read().tolist() == [
                7,
                7,
                7,
            ]  # the same storage, copied on write
        assert part.tolist() == [[7] * 4] * 3
        assert path.read_bytes() == before
        with pytest.raises(ValueError, match="pass its path"):
            fastckpt.open(before, mmap=True)

    def test_encoding(self):
        data = legacy_stream(
            {"ü": tensor(storage("0", 1), (1,)), "s": "ü"}, {"0": (1, floats(3))}, python2=True
        )
        with fastckpt.open(data, encoding="latin1") as ckpt:
            assert list(ckpt) == ["ü"]
            assert ckpt.tree["s"] == ckpt.read()["s"] == "ü"
        with fastckpt.open(data, encoding="bytes") as ckpt:
            assert ckpt[(b"\xfc",)].read().item() == 3
            assert ckpt.read()[b"s"] == b"\xfc"
        with fastckpt.open(data) as ckpt, pytest.raises(FormatError, match="encoding='latin1'"):
            ckpt.read()

    def test_limits(self):
        deep = torch.ones(1)
        for _ in range(40):
            deep = Call(Name("some", "Box"), (deep if isinstance(deep, Call) else 1,))
        data = legacy_stream(deep, {})
        with fastckpt.open(data, limits=Limits(object_depth=10)) as ckpt:
            try:
                ckpt.read()
            except LimitError:
                pass
        with pytest.raises(LimitError):
            fastckpt.open(legacy_stream({nested(50): 1}, {}), limits=Limits(key_depth=10))


def nested(depth):
    return (nested(depth - 1),) if depth else ()


def storage_of(tensor):
    return tensor.untyped_storage()._cdata


# -- who shares what


class TestSharing:
    def test_between_separate_reads(self):
        with opened(model()) as ckpt:
            embed = ckpt["model.embed.weight"].read()
            bias = ckpt["model.head.bias"].read()
            assert storage_of(embed) == storage_of(bias)
            embed.fill_(5)
            assert bias.tolist() == [5, 5, 5]
            again = ckpt["model.embed.weight"].read()
            assert again.tolist() == embed.tolist()
            assert storage_of(ckpt.read()["model"]["head.bias"]) == storage_of(bias)

    def test_memory_is_freed(self):
        """Nothing that was read is kept; what is read later is fresh."""
        with opened(model()) as ckpt:
            embed = ckpt["model.embed.weight"].read()
            embed.fill_(5)
            gone = weakref.ref(embed)
            del embed
            assert gone() is None
            assert (
                ckpt["model.embed.weight"].read().tolist()
                == model()["model"]["embed.weight"].tolist()
            )

    def test_a_view_keeps_the_storage(self):
        with opened(model()) as ckpt:
            bias = ckpt["model.head.bias"].read()
            view = ckpt["model.embed.weight"].read()[0]
            view.fill_(9)
            del view
            gc.collect()
            assert bias.tolist() == [9, 4, 5]

    def test_two_checkpoints_share_nothing(self):
        data = saved(model())
        with fastckpt.open(data) as a, fastckpt.open(data) as b:
            a["model.embed.weight"].read().fill_(5)
            assert (
                b["model.embed.weight"].read().tolist() == model()["model"]["embed.weight"].tolist()
            )

    def test_numpy_reads_share_within_one(self):
        with opened(model(), framework="numpy") as ckpt:
            found = ckpt.read(["model.embed.weight", "model.head.bias"])
            assert np.shares_memory(*found.values())
            other = ckpt["model.head.bias"].read()
            assert not np.shares_memory(other, found["model.head.bias"])

    def test_what_was_read_outlives_the_checkpoint(self):
        ckpt = opened(model())
        found = ckpt["model.head.bias"].read()
        ckpt.close()
        del ckpt
        gc.collect()
        assert found.tolist() == [3, 4, 5]

    def test_storages_have_the_size_of_the_file(self):
        """A view comes with its whole storage, a part with what it needs."""
        with opened({"row": torch.zeros(100, 10)[5]}) as ckpt:
            assert ckpt["row"].read().untyped_storage().nbytes() == 4000
            assert ckpt["row"][:].untyped_storage().nbytes() == 40


# -- the end


class TestClose:
    def test_everything_raises(self):
        ckpt = opened(model())
        lazy, tree = ckpt["sparse"], ckpt.tree
        keys, items = ckpt.keys(), ckpt.items()
        ckpt.close()
        ckpt.close()  # again is no error
        calls = {
            "getitem": lambda: ckpt["sparse"], "iter": lambda: list(ckpt), "len": lambda: len(ckpt), "in": lambda: "sparse" in ckpt,
            "get": lambda: ckpt.get("sparse"), "keys": lambda: list(keys), "items": lambda: list(items), "values": lambda: list(ckpt.values()),
            "tree": lambda: ckpt.tree, "info": lambda: ckpt.info, "read": ckpt.read, "read names": lambda: ckpt.read(["sparse"]),
            "lazy": lazy.read, "storage": tree["storage"].read, "slice": lambda: tree["model"]["head.bias"][0],
            "enter": ckpt.__enter__, "pickle": lambda: pickle.dumps(ckpt),
        }  # fmt: skip
        for name, call in calls.items():
            with pytest.raises(ValueError, match="closed"):
                call()
            assert name

    def test_context(self):
        with pytest.raises(RuntimeError, match="ours"), opened(model()) as ckpt:
            raise RuntimeError("ours")
        with pytest.raises(ValueError, match="closed"):
            len(ckpt)

    def test_the_file_of_the_user_stays_open(self, tmp_path):
        path = tmp_path / "model.pt"
        torch.save(model(), path)
        with open(path, "rb") as f:
            fastckpt.open(f).close()
            assert not f.closed
            assert f.read(2) == b"PK"
        stream = io.BytesIO(path.read_bytes())
        fastckpt.open(stream).close()
        assert stream.read(2) == b"PK"

    def test_while_others_read(self, tmp_path):
        """Closing in the middle of a read is an error there, never a crash."""
        big = {"x": torch.zeros(500, 1000), "y": torch.zeros(1000)}
        data, errors = saved(big), []
        path = tmp_path / "model.pt"
        path.write_bytes(data)
        for source in [data, path] * 4:
            ckpt = fastckpt.open(source)
            stop = threading.Event()

            def read(ckpt=ckpt, stop=stop):
                while not stop.is_set():
                    try:
                        assert not ckpt["x"].read().any()
                        assert not ckpt["x"][:, :3].any()
                    except ValueError as error:
                        errors.append(str(error))
                        return

            threads = [threading.Thread(target=read) for _ in range(3)]
            for thread in threads:
                thread.start()
            ckpt.close()
            stop.set()
            for thread in threads:
                thread.join()
            assert ckpt.source.fd == -1
            assert ckpt.source.view is None
        assert all("closed" in error for error in errors)


# -- what is said of it


INFO = {
    "zip": (
        saved(model()),
        {
            "container": "zip",
            "version": 3,
            "byteorder": "little",
            "torchscript": False,
            "tensors": 8,
        },
    ),
    "legacy": (
        saved(model(), _use_new_zipfile_serialization=False),
        {"container": "legacy", "version": None, "records_with_crc32": 0},
    ),
    "big-endian": (archive(checkpoint(byteorder=b"big")), {"byteorder": "big", "tensors": 0}),
    "old version": (archive(checkpoint(version=b"2\n")), {"version": 2}),
}


@pytest.mark.parametrize(("data", "expected"), INFO.values(), ids=INFO)
def test_info(data, expected):
    with fastckpt.open(data) as ckpt:
        info = ckpt.info
        assert info.items() >= expected.items()
        assert (info["name"], info["nbytes"]) == ("<bytes>", len(data))
        assert info["unknown"] == []
        pickle.dumps(info)  # plain values


def test_info_counts_checksums():
    """0 for a record that is not empty says that its writer computed none."""
    with opened([torch.ones(1)]) as ckpt:
        assert ckpt.info["records_with_crc32"] == ckpt.info["records"] > 3
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        data = saved([torch.ones(1), torch.empty(0)])
    finally:
        torch.serialization.set_crc32_options(before)
    with fastckpt.open(data) as ckpt:
        assert ckpt.info["records_with_crc32"] == 1  # of the empty storage it is right


# -- pickled, threads, processes


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.pt"
    torch.save(model(), path)
    return path


class TestPickled:
    def test_options_come_along(self, path):
        with (
            fastckpt.open(
                path,
                framework="numpy",
                unknown="opaque",
                threads=2,
                verify=False,
                encoding="latin1",
            ) as ckpt,
            pickle.loads(pickle.dumps(ckpt)) as copy,
        ):
            assert copy is not ckpt
            assert (copy.framework, copy.threads, copy.verifies) == ("numpy", 2, False)
            assert list(copy) == NAMES
            assert type(copy["model.head.bias"].read()) is np.ndarray
            assert copy.source.fd != ckpt.source.fd

    def test_regions_come_along(self, tmp_path):
        path = tmp_path / "region"
        data = saved(model())
        path.write_bytes(b"front" + data + b"behind")
        with (
            fastckpt.open(path, offset=5, nbytes=len(data)) as ckpt,
            pickle.loads(pickle.dumps(ckpt)) as copy,
        ):
            assert copy["model.head.bias"][0].item() == 3

    @pytest.mark.parametrize("change", ["other content", "touched", "replaced", "gone"])
    def test_changed_files(self, path, change):
        with fastckpt.open(path) as ckpt:
            data = pickle.dumps(ckpt)
        if change == "other content":
            torch.save([], path)
        elif change == "touched":
            os.utime(path, ns=(1, 1))
        elif change == "replaced":
            copy = path.with_name("copy")
            copy.write_bytes(path.read_bytes())
            copy.replace(path)
        else:
            path.unlink()
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(
            (FormatError, FileNotFoundError), match=r"has changed since|No such file"
        ) as caught:
            pickle.loads(data)
        caught.value.__traceback__ = None
        assert len(os.listdir("/proc/self/fd")) == before

    def test_only_paths(self, path):
        with open(path, "rb") as f:
            sources = {
                "bytes": path.read_bytes(),
                "file": f,
                "descriptor": f.fileno(),
                "BytesIO": io.BytesIO(path.read_bytes()),
            }
            for name, source in sources.items():
                with (
                    fastckpt.open(source) as ckpt,
                    pytest.raises(TypeError, match="opened by its path"),
                ):
                    pickle.dumps(ckpt)
                assert name


def test_many_threads(path, monkeypatch):
    """One handle, one descriptor; every read is right, and so is what is shared."""
    monkeypatch.setenv("FASTCKPT_SERIAL_BELOW", "0")
    big = {f"k{i}": torch.full((50, 40), float(i)) for i in range(40)}
    torch.save(big, path)
    barrier, failed = threading.Barrier(8), []
    with fastckpt.open(path, threads=2) as ckpt:

        def read(seed):
            try:
                barrier.wait()
                for i in np.random.default_rng(seed).permutation(40):
                    name = f"k{i}"
                    assert ckpt[name] == ckpt[name]
                    assert (ckpt[name].read() == i).all()
                    assert (ckpt[name][3:5, 7] == i).all()
                    if i % 10 == 0:
                        same(big, ckpt.read())
                        assert list(ckpt.tree) == list(big)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed


def read_in_child(ckpt, queue):
    try:
        queue.put(
            (
                ckpt["model.head.bias"].read().tolist(),
                ckpt["model.embed.weight"][1].tolist(),
                len(ckpt.read()),
            )
        )
    except BaseException as error:
        queue.put(repr(error))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes(path, method, monkeypatch):
    """A fork reads through the descriptor that it inherits, a spawned process opens the path again."""
    monkeypatch.setenv("FASTCKPT_SERIAL_BELOW", "0")
    context = multiprocessing.get_context(method)
    assert (
        torch.ones(300_000) + 1
    ).sum() == 600_000  # in parallel: a fork has none of torch's threads
    with fastckpt.open(path, threads=2) as ckpt:
        ckpt["model.embed.weight"].read()
        queue = context.Queue()
        children = [context.Process(target=read_in_child, args=(ckpt, queue)) for _ in range(2)]
        for child in children:
            child.start()
        results = [queue.get(timeout=300) for _ in children]
        for child in children:
            child.join(60)
            assert child.exitcode == 0
        assert results == [([3, 4, 5], [4, 5, 6, 7], 9)] * 2
        same(torch.load(path), ckpt.read())  # what children did moved nothing here


# -- without torch


WITHOUT_TORCH = """
    import sys
    sys.modules["torch"] = None  # importing it is an error
    import numpy as np
    import fastckpt
    path = sys.argv[1]
    loaded = fastckpt.load(path, framework="numpy")
    assert loaded["model"]["head.bias"].tolist() == [3, 4, 5], loaded
    assert loaded["dtype"] == "torch.float16" and loaded["device"] == "cpu" and tuple(loaded["size"]) == (3, 4)
    with fastckpt.open(path, framework="numpy") as ckpt:
        assert ckpt["model.embed.weight"][1, 1:].tolist() == [5, 6, 7]
        assert ckpt.read(["parameters.0"])["parameters.0"].tolist() == [1, 1]
        assert ckpt.read()["optimizer"]["state"][0]["step"] == 3
        assert ckpt.tree["numbers"][0] == 1
        out = np.empty(3, np.float32)
        assert ckpt["model.head.bias"].read(out=out).tolist() == [3, 4, 5]
        assert len(ckpt.info) > 5
    with fastckpt.open(path) as ckpt:  # looking needs no torch, whatever is to come
        assert ckpt["model.head.bias"].shape == (3,)
        assert ckpt["model.head.bias"].numpy().tolist() == [3, 4, 5]
        assert ckpt["optimizer.state.0.step"].dtype == "float32"
        assert "optimizer.state.0.m" in ckpt and ckpt.info["container"] == "zip"
    assert sys.modules["torch"] is None
    print("fine")
"""


def test_torch_is_not_needed(path):
    obj = model()
    del obj["sparse"]
    torch.save(obj, path)
    script = textwrap.dedent(WITHOUT_TORCH)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("fine\n", "")
