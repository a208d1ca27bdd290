"""keys=: what is wanted comes out as ever, what is not wanted is absent and not read."""

import collections
import types

import pytest
import torch
from torch import nn

import fastckpt
from objects import saved
from support import QUIET, same
from ziprewrite import records_of, rewritten, with_damage

pytestmark = QUIET


def example():
    shared = torch.arange(10.0)
    state = collections.OrderedDict(
        (f"layers.{i}.{name}", torch.full((3,), i)) for i in range(3) for name in ("weight", "bias")
    )
    state._metadata = collections.OrderedDict({"": {"version": 2}})
    return {
        "model": state,
        "optimizer": {
            "state": {0: {"step": torch.tensor(5.0), "exp_avg": torch.ones(2)}, 1: {}},
            "groups": [{"lr": 0.1}],
        },
        "list": [torch.zeros(1), torch.ones(1), torch.ones(2)],
        "tuple": (torch.zeros(1), 5, torch.ones(1)),
        "views": [shared[2:], shared],
        "epoch": 7,
        "name": "run",
        "parameter": nn.Parameter(torch.ones(2)),
        "sparse": torch.eye(3).to_sparse(),
    }


def metadata(state):
    state._metadata = collections.OrderedDict({"": {"version": 2}})
    return state


EMPTY = {
    "model": collections.OrderedDict(), "optimizer": {"state": {0: {}, 1: {}}, "groups": [{}]}, "list": [], "tuple": (), "views": [],
}  # fmt: skip

FULL = example()
CHOICES = {
    "nothing": ([], EMPTY),
    "one": (["epoch"], EMPTY | {"epoch": 7}),
    "tensor": (["list.1"], EMPTY | {"list": [FULL["list"][1]]}),
    "several": (
        ["name", "list.0", "list.2"],
        EMPTY | {"name": "run", "list": [FULL["list"][0], FULL["list"][2]]},
    ),
    "tuple": (["tuple.1", "tuple.2"], EMPTY | {"tuple": (5, FULL["tuple"][2])}),
    "key with dots": (
        ["model.layers.1.bias"],
        EMPTY
        | {"model": collections.OrderedDict({"layers.1.bias": FULL["model"]["layers.1.bias"]})},
    ),
    "int key": (
        ["optimizer.state.0.step"],
        EMPTY | {"optimizer": {"state": {0: {"step": torch.tensor(5.0)}, 1: {}}, "groups": [{}]}},
    ),
    "glob": ("*.lr", EMPTY | {"optimizer": {"state": {0: {}, 1: {}}, "groups": [{"lr": 0.1}]}}),
    "glob of a level": (
        "model.layers.[12].weight",
        EMPTY
        | {
            "model": collections.OrderedDict(
                (n, FULL["model"][n]) for n in ("layers.1.weight", "layers.2.weight")
            )
        },
    ),
    "callable that wants nothing": (lambda name: False, EMPTY),
    "callable": (lambda name: name.startswith("n"), EMPTY | {"name": "run"}),
    "view": (["views.0"], EMPTY | {"views": [FULL["views"][0]]}),
    "views": ("views.*", EMPTY | {"views": FULL["views"]}),
    "parameter": (["parameter"], EMPTY | {"parameter": FULL["parameter"]}),
    "sparse": (["sparse"], EMPTY | {"sparse": FULL["sparse"]}),
    "tuple of names": (("epoch", "name"), EMPTY | {"epoch": 7, "name": "run"}),
    "set of names": ({"epoch"}, EMPTY | {"epoch": 7}),
    "generator": (None, EMPTY | {"epoch": 7}),
}


def without_metadata(obj):
    vars(obj["model"]).clear()
    return obj


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", CHOICES)
def test_keys(name, legacy):
    keys, expected = CHOICES[name]
    keys = (key for key in ["epoch"]) if name == "generator" else keys
    loaded = fastckpt.load(saved(example(), legacy=legacy), keys=keys)
    same(without_metadata(expected), without_metadata(loaded))


def test_everything():
    same(without_metadata(example()), without_metadata(fastckpt.load(saved(example()), keys="*")))
    same(
        without_metadata(example()),
        without_metadata(fastckpt.load(saved(example()), keys=lambda name: True)),
    )


def test_callable_sees_every_name():
    seen = []
    fastckpt.load(saved(example()), keys=seen.append)
    for name in (
        "model.layers.0.weight",
        "optimizer.state.0.step",
        "optimizer.groups.0.lr",
        "tuple.1",
        "epoch",
        "sparse",
    ):
        assert seen.count(name) == 1


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_names_that_are_not_there(framework):
    with pytest.raises(KeyError, match=r"not in the checkpoint: nowhere, model\.nothing"):
        fastckpt.load(
            saved(example()), keys=["epoch", "nowhere", "model.nothing"], framework=framework
        )
    with pytest.raises(KeyError, match=r"not in the checkpoint: 0, 1, .*9 \.\.\."):
        fastckpt.load(saved(example()), keys=[str(n) for n in range(50)])


# A pattern or names that nothing has, and what is said of it. The object is NESTED.
NESTED = {"model": {"encoder.weight": torch.ones(2), "decoder.bias": torch.ones(1)}, "epoch": 3}
NOWHERE = {
    "pattern without its prefix": ("encoder.*", "no name .* matches keys='encoder.*'; near it: model.encoder.weight"),
    "pattern of another model": ("transformer.*", "there are: model.encoder.weight, model.decoder.bias, epoch"),
    "a typing error": (["model.encodr.weight"], "not in the checkpoint: model.encodr.weight; near it: model.encoder.weight"),
    "in other case": ("model.Encoder.weight", "near it: model.encoder.weight"),
    "a container": (["model"], r"'model' is a container, of 'model\.encoder\.weight' .*use 'model\.\*'"),
    "a container as a pattern": ("model", r"'model' is a container, of 'model\.encoder\.weight' .*use 'model\.\*'"),
    "a typing error in a pattern": ("modle.*", "matches keys='modle.*'; near it: model.encoder.weight"),
    "at the end of a pattern": ("*.bais", r"; near it: model\.decoder\.bias"),
    "within a pattern": ("model.encodr.*", r"; near it: model\.encoder\.weight"),
    "a name without its prefix": (["decoder.bias"], "near it: model.decoder.bias"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOWHERE)
@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_near_names(case, framework):
    keys, words = NOWHERE[case]
    with pytest.raises(KeyError, match=words):
        fastckpt.load(saved(NESTED), keys=keys, framework=framework)


def test_a_pattern_of_an_empty_object():
    assert fastckpt.load(saved({}), keys="*") == {}


def test_suggestions_are_short():
    """Whatever the names are, and however many."""
    names = {"x" * 10_000 + str(i): i for i in range(2000)}
    with pytest.raises(KeyError) as caught:
        fastckpt.load(saved(names), keys=["y" * 10_000])
    assert len(str(caught.value)) < 2000


def test_a_container_is_no_leaf():
    """It has a name of its own only through what is in it."""
    with pytest.raises(KeyError, match="model"):
        fastckpt.load(saved(example()), keys=["model"])


def test_a_leaf_alone():
    data = saved(torch.ones(3))
    same(torch.ones(3), fastckpt.load(data, keys="*"))
    assert fastckpt.load(data, keys=lambda name: False) is None
    with pytest.raises(KeyError, match="no name in the checkpoint matches keys='no\\*'"):
        fastckpt.load(data, keys="no*")


def test_what_is_not_wanted_is_not_read():
    obj = {f"t{i}": torch.full((50,), i) for i in range(4)}
    data = saved(obj)
    for i in range(4):
        others = [f"data/{n}" for n in range(4) if n != i]
        damaged = with_damage(data, *others)
        same({f"t{i}": obj[f"t{i}"]}, fastckpt.load(damaged, keys=[f"t{i}"]))
        with pytest.raises(fastckpt.ChecksumError, match="data/"):
            fastckpt.load(with_damage(data, f"data/{i}"), keys=[f"t{i}"])


def test_what_is_not_wanted_is_not_counted():
    told = []
    data = saved({"small": torch.ones(4), "large": torch.ones(1000)})
    fastckpt.load(
        data, keys=["small"], progress=lambda done, total, name: told.append((done, total))
    )
    assert told[-1] == (16, 16)


def test_names_of_a_module(tmp_path):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    path = tmp_path / "model.pt"
    torch.save(model.state_dict(), path)
    names = [name for name in model.state_dict() if name.startswith("1.")]
    loaded = fastckpt.load(path, keys=names)
    assert list(loaded) == names
    model.load_state_dict(loaded, strict=False)


@pytest.mark.parametrize("mmap", [False, True])
def test_mapped(mmap, tmp_path):
    path = tmp_path / "file.pt"
    torch.save(example(), path)
    same({"a": FULL["views"]}, {"a": fastckpt.load(path, keys="views.*", mmap=mmap)["views"]})


def test_arrays():
    loaded = fastckpt.load(saved(example()), keys=["views.0"], framework="numpy")
    assert loaded["views"][0].tolist() == FULL["views"][0].tolist()


class Custom:
    def __init__(self, **attributes):
        vars(self).update(attributes)


class TestOtherContainers:
    def test_shared_container(self):
        """One under both paths, and two where other parts are wanted of it there."""
        inner = {"a": torch.ones(1), "b": torch.zeros(1)}
        loaded = fastckpt.load(saved([inner, inner]), keys=["0.a", "1.a"])
        assert loaded[0] is loaded[1]
        same([{"a": torch.ones(1)}], loaded[:1])
        same([{"a": torch.ones(1)}, {}], fastckpt.load(saved([inner, inner]), keys=["0.a"]))
        same([{}, {"b": torch.zeros(1)}], fastckpt.load(saved([inner, inner]), keys="1.b"))

    def test_shared_tuple(self):
        """As Adam's groups share their betas."""
        betas = (0.9, 0.999)
        obj = {"groups": [{"lr": 1, "betas": betas}, {"lr": 2, "betas": betas}]}
        loaded = fastckpt.load(saved(obj), keys="groups.1.*")
        assert loaded == {"groups": [{"betas": ()}, {"lr": 2, "betas": betas}]}

    def test_a_container_is_named(self):
        with pytest.raises(KeyError, match=r"'model' is a container.*use 'model\.\*'"):
            fastckpt.load(saved({"model": {"a": torch.ones(1)}}), keys=["model"])

    def test_paths_without_end(self):
        value = [torch.ones(1)]
        for _ in range(60):
            value = [value, value]
        with pytest.raises(fastckpt.LimitError, match="too many paths"):
            fastckpt.load(saved(value), keys="*")
        with fastckpt.open(saved(value)) as checkpoint:
            assert len(checkpoint) > 1

    def test_cycle(self):
        obj = {"a": torch.ones(1), "b": 5}
        obj["self"] = obj
        loaded = fastckpt.load(saved(obj), keys=["a"])
        assert loaded["self"] is loaded
        assert list(loaded) == ["a", "self"]

    def test_deque(self):
        loaded = fastckpt.load(
            saved(collections.deque([1, torch.ones(1), 3], maxlen=3)), keys=["1"]
        )
        same(collections.deque([torch.ones(1)], maxlen=3), loaded)
        assert loaded.maxlen == 3

    def test_namespace(self):
        loaded = fastckpt.load(saved(types.SimpleNamespace(a=torch.ones(1), b=5)), keys=["a"])
        same({"a": torch.ones(1)}, vars(loaded))

    def test_default_dict(self):
        loaded = fastckpt.load(saved(collections.defaultdict(list, a=1, b=2)), keys=["b"])
        assert loaded == {"b": 2}
        assert loaded["new"] == []

    def test_set_is_a_leaf(self):
        assert fastckpt.load(saved({"a": {1, 2}, "b": {3}}), keys=["a"]) == {"a": {1, 2}}

    def test_tuples_as_keys(self):
        loaded = fastckpt.load(
            saved({("a", 1): torch.ones(1), ("b", 2): 5}), keys=lambda name: "b" in name
        )
        assert loaded == {("b", 2): 5}

    def test_unknown_class(self):
        data = saved({"a": torch.ones(1), "custom": Custom(x=torch.ones(2), y=3)})
        same({"a": torch.ones(1)}, fastckpt.load(data, keys=["a"]))
        loaded = fastckpt.load(data, keys=["custom.x"], unknown="opaque")
        assert list(loaded) == ["custom"]
        assert list(loaded["custom"].state) == ["x", "y"]  # it stays whole
        with pytest.raises(fastckpt.UnsafePickleError, match="Custom"):
            fastckpt.load(data, keys=["custom.x"])

    def test_deep_nesting(self):
        obj = torch.ones(1)
        for _ in range(200):
            obj = [obj]
        loaded = fastckpt.load(saved(obj), keys="*")
        same(obj, loaded)

    def test_too_deep_nesting(self):
        content = b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."
        data = rewritten(saved([]), change=lambda name, old: content if name == "data.pkl" else old)
        with pytest.raises(fastckpt.LimitError, match="too deep for keys="):
            fastckpt.load(data, keys="*")
        fastckpt.load(data)


def test_record_of_a_view_that_nobody_wants_is_left_alone():
    data = saved({"a": torch.ones(3), "b": torch.ones(3)})
    assert sorted(name for name in records_of(data) if name.startswith("data/")) == [
        "data/0",
        "data/1",
    ]
    same({"a": torch.ones(3)}, fastckpt.load(with_damage(data, "data/1"), keys=["a"]))
