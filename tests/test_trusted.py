"""weights_only=False: the pickle is run, over storages that are read as ever."""

import collections
import copy
import dataclasses
import enum
import functools
import io
import os
import pickle
import types
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import fastckpt
from objects import saved, torch_loads
from support import QUIET, same
from ziprewrite import tagged, with_damage

pytestmark = QUIET


class Model(nn.Module):
    """A module of our own, with state that is no parameter."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.BatchNorm1d(3)])
        self.shared = self.layers[0].weight
        self.register_buffer("steps", torch.arange(4))
        self.extra = {"names": ["a", "b"], "table": torch.eye(2)}

    def forward(self, x):
        return self.layers[1](self.layers[0](x))


@dataclasses.dataclass
class Settings:
    rate: float
    weights: torch.Tensor


class Color(enum.Enum):
    RED = 1


class Point(collections.namedtuple("Point", "x y")):
    __slots__ = ()


class Slotted:
    __slots__ = ("tensor", "text")


class Items(list):
    pass


class Table(dict):
    pass


class Stateful:
    def __init__(self, tensor):
        self.tensor = tensor

    def __getstate__(self):
        return (self.tensor, "state")

    def __setstate__(self, state):
        self.tensor, self.found = state


class Reduced:
    def __init__(self, tensor, scale=1):
        self.tensor, self.scale = tensor, scale

    def __reduce__(self):
        return functools.partial(Reduced, scale=3), (self.tensor,)

    @classmethod
    def make(cls, tensor):
        return cls(tensor, 7)


class Built:
    def __init__(self, tensor):
        self.tensor = tensor

    def __reduce__(self):
        return Reduced.make, (self.tensor,)  # a bound class method: getattr(Reduced, "make")


class Subclass(torch.Tensor):
    pass


def slotted():
    made = Slotted()
    made.tensor, made.text = torch.ones(3), "text"
    return made


def items():
    made = Items([torch.ones(2), 5])
    made.name = "name"
    return made


def nan_table():
    storage = torch.arange(5.0)
    return Table({"a": storage[1:], "b": storage, float("inf"): [storage]})


OBJECTS = {
    "module": Model,
    "dataclass": lambda: Settings(0.1, torch.ones(3)),
    "enum": lambda: [Color.RED, {Color.RED: torch.ones(1)}],
    "namedtuple": lambda: Point(torch.ones(2), 5),
    "slots": slotted,
    "list subclass": items,
    "dict subclass": nan_table,
    "setstate": lambda: Stateful(torch.ones(2)),
    "reduce to a partial": lambda: Reduced(torch.ones(2)),
    "reduce to a class method": lambda: Built(torch.ones(2)),
    "tensor subclass": lambda: torch.ones(3).as_subclass(Subclass),
    "namespace": lambda: types.SimpleNamespace(tensor=torch.ones(2)),
    "functions and classes": lambda: [
        len,
        os.path.join,
        Model,
        torch.nn.functional.relu,
        np.float32,
    ],
    "partial": lambda: functools.partial(torch.add, torch.ones(2)),
    "ordered": lambda: collections.OrderedDict(a=torch.ones(1), b=Settings(1, torch.ones(1))),
    "default dict": lambda: collections.defaultdict(items, a=torch.ones(2)),
    "array": lambda: np.arange(6.0).reshape(2, 3),
    "object array": lambda: np.array([None, "a", (1, 2)], dtype=object),
    "structured array": lambda: np.zeros(2, [("a", "f4"), ("b", "i8")]),
    "scalars": lambda: [np.float64(1.5), np.int32(3), np.bool_(True), np.datetime64("2020-01-01")],
    "generator": lambda: torch.Generator().get_state(),
    "exception": lambda: ValueError("text", torch.ones(1)),
    "bytes": lambda: [b"", b"\x00\xff", bytearray(b"x")],
    "storage twice": lambda: [torch.arange(3.0).storage()] * 2,
}


PLAIN_DATA = (
    "namespace",
    "array",
    "structured array",
    "scalars",
    "generator",
    "bytes",
    "storage twice",
)
AS_THEY_ARE = (
    torch.Tensor, torch.storage.TypedStorage, np.ndarray, np.generic, enum.Enum, type, types.FunctionType, types.BuiltinFunctionType,
)  # fmt: skip


def plain(obj, memo=None):
    """An object as plain containers, so that ``same`` can look into it."""
    memo = {} if memo is None else memo
    if id(obj) in memo:
        return memo[id(obj)][0]
    if isinstance(obj, AS_THEY_ARE):
        return obj
    result = []
    memo[id(obj)] = (result, obj)
    result.append(type(obj).__qualname__)
    if isinstance(obj, dict):
        result.append([[plain(key, memo), plain(value, memo)] for key, value in obj.items()])
    elif isinstance(obj, (list, tuple)):
        result.append([plain(member, memo) for member in obj])
    elif isinstance(obj, functools.partial):
        result.append([obj.func, plain(obj.args, memo), plain(obj.keywords, memo)])
    elif not hasattr(obj, "__dict__") and not hasattr(type(obj), "__slots__"):
        return obj
    if hasattr(obj, "__dict__"):
        result.append(plain(dict(vars(obj)), memo))
    for name in getattr(type(obj), "__slots__", ()):
        result.append(plain(getattr(obj, name), memo))
    return result


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", OBJECTS)
class TestAsTorch:
    @pytest.mark.parametrize("protocol", [2, 4, 5])
    def test_load(self, name, legacy, protocol, tmp_path):
        obj = OBJECTS[name]()
        data = saved(obj, legacy=legacy, protocol=protocol)
        expected = plain(torch_loads(data))
        path = tmp_path / "file.pt"
        path.write_bytes(data)
        for options in (
            {},
            {"threads": 1},
            {"mmap": True},
            {"verify": False},
            {"pickle_module": pickle},
        ):
            same(expected, plain(fastckpt.load(path, weights_only=False, **options)), str(options))

    def test_refused_otherwise_or_the_same(self, name, legacy):
        """What is not known to be plain data is refused by name, and everything else is what the pickle makes."""
        data = saved(OBJECTS[name](), legacy=legacy)
        if name in PLAIN_DATA:
            same(plain(torch_loads(data)), plain(fastckpt.load(data)))
            return
        with pytest.raises(fastckpt.UnsafePickleError, match="the pickle names"):
            fastckpt.load(data)
        fastckpt.load(data, unknown="opaque")


def test_module_works():
    model = Model().eval()
    loaded = fastckpt.load(saved(model), weights_only=False)
    assert loaded.shared is loaded.layers[0].weight
    x = torch.randn(4, 3)
    assert torch.equal(model(x), loaded(x))
    loaded(x).sum().backward()


def test_storages_are_one_object():
    storage = torch.arange(3.0).storage()
    one, two = fastckpt.load(saved([storage, storage]), weights_only=False)
    assert one is two


def test_map_location():
    data = saved(Model())
    assert fastckpt.load(data, "meta", weights_only=False).shared.is_meta
    with pytest.warns(UserWarning, match="'npu:1' come out on the CPU"):
        fastckpt.load(tagged(data, "npu:1"), weights_only=False)


def test_damage_is_found_before_the_pickle_runs():
    data = with_damage(saved([Fatal(), torch.ones(3)]), "data/0")
    with pytest.raises(fastckpt.ChecksumError):
        fastckpt.load(data, weights_only=False)


def fatal():
    raise AssertionError("the pickle was run")


class Fatal:
    def __reduce__(self):
        return fatal, ()


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize(
    "options", [{}, {"weights_only": True}, {"unknown": "opaque"}, {"framework": "numpy"}], ids=str
)
def test_nothing_runs_unless_asked_for(legacy, options):
    data = saved([Fatal(), torch.ones(3)], legacy=legacy)
    if "unknown" in options:
        assert fastckpt.load(data, **options)[0].qualname == f"{__name__}.fatal"
    else:
        with pytest.raises(fastckpt.UnsafePickleError, match=f"{__name__}.fatal"):
            fastckpt.load(data, **options)
    with pytest.raises(AssertionError, match="the pickle was run"):
        fastckpt.load(data, weights_only=False)


class TestPickleModule:
    def test_is_used(self):
        seen = []

        class Unpickler(pickle.Unpickler):
            def find_class(self, module, name):
                seen.append(name)
                return super().find_class(module, name)

        module = types.SimpleNamespace(Unpickler=Unpickler)
        same(
            [torch.ones(2)],
            fastckpt.load(saved([torch.ones(2)]), pickle_module=module, weights_only=False),
        )
        assert "_rebuild_tensor_v2" in seen

    def test_may_refuse(self):
        class Unpickler(pickle.Unpickler):
            def find_class(self, module, name):
                raise pickle.UnpicklingError(f"{name} is forbidden")

        module = types.SimpleNamespace(Unpickler=Unpickler)
        with pytest.raises(pickle.UnpicklingError, match="is forbidden"):
            fastckpt.load(saved([torch.ones(2)]), pickle_module=module, weights_only=False)

    def test_dill(self):
        dill = pytest.importorskip("dill")
        obj = {"function": lambda x: x + 1, "tensor": torch.ones(3)}
        file = io.BytesIO()
        torch.save(obj, file, pickle_module=dill)
        file.seek(0)
        loaded = fastckpt.load(file, pickle_module=dill, weights_only=False)
        assert loaded["function"](1) == 2
        same(obj["tensor"], loaded["tensor"])


def test_torchscript():
    file = io.BytesIO()
    with warnings.catch_warnings(action="ignore"):
        torch.jit.save(torch.jit.script(nn.Linear(2, 3)), file)
    file.seek(0)
    with pytest.raises(fastckpt.UnsupportedError, match=r"torch.jit.load makes a module"):
        fastckpt.load(file, weights_only=False)
    loaded = fastckpt.load(file, unknown="opaque")
    assert loaded.state["weight"].shape == (3, 2)


def test_keys_need_a_pickle_that_is_not_run():
    with pytest.raises(TypeError, match="keys= needs weights_only=True"):
        fastckpt.load(saved({"a": 1}), keys=["a"], weights_only=False)


def test_what_a_pickle_raises_comes_through():
    data = saved([Fatal()]).replace(b"fatal\n", b"gone_\n")
    with pytest.raises(AttributeError, match="gone_"):
        fastckpt.load(data, weights_only=False, verify=False)


def test_loading_twice_gives_two_objects():
    data = saved(Model())
    one, two = (fastckpt.load(data, weights_only=False) for _ in range(2))
    one.shared.data.zero_()
    assert two.shared.abs().sum() > 0
    copy.deepcopy(one)


@pytest.mark.parametrize(
    "value",
    [object(), slice("a", None), slice(1.0, None)],
    ids=["object", "slice of text", "slice of floats"],
)
def test_what_the_table_refuses_is_run(value):
    """The pickle is read for its storages, and then run: whatever else is in it is not our business."""
    data = saved({"x": value, "w": torch.ones(3)})
    with pytest.raises(fastckpt.CheckpointError):
        fastckpt.load(data)
    loaded = fastckpt.load(data, weights_only=False)
    assert type(loaded["x"]) is type(value)
    assert loaded["w"].sum() == 3


def test_no_warning_of_ours(recwarn):
    fastckpt.load(saved({"w": torch.ones(3)}), weights_only=False)
    assert not [w for w in recwarn if "TypedStorage" in str(w.message)]
