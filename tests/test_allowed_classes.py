"""Classes that are not known to be plain data: refused by name, allowed by the user, or kept as inert stand-ins."""

import collections
import dataclasses
import enum
import pickle

import pytest
import torch
from torch import nn
from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals

import fastckpt
from objects import saved, torch_loads
from picklecraft import Call, Name, craft, torch_file
from support import QUIET, same
from ziprewrite import records_of, rewritten

pytestmark = QUIET


class Color(enum.Enum):
    RED = 1
    GREEN = "green"


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Settings:
    rate: float
    weights: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    rate: float
    weights: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    rate: float
    weights: torch.Tensor


Point = collections.namedtuple("Point", "x y")


class Slotted:
    __slots__ = ("tensor", "text")

    def __init__(self, tensor=None, text=""):
        self.tensor, self.text = tensor, text

    def __eq__(self, other):
        return self.text == other.text and torch.equal(self.tensor, other.tensor)


class Stateful:
    def __init__(self, tensor):
        self.tensor = tensor

    def __getstate__(self):
        return [self.tensor]

    def __setstate__(self, state):
        (self.tensor,) = state


class Guarded:
    """Its attribute is read-only from outside, as pickle does not mind."""

    def __init__(self, tensor):
        self.__dict__["tensor"] = tensor

    def __setattr__(self, name, value):
        raise AttributeError(name)


class Items(list):
    pass


class Unique(set):
    pass


class Subclass(torch.Tensor):
    pass


class Named(torch.Tensor):
    name = None


class Noted(torch.Tensor):
    """A subclass with a state of its own."""

    def __reduce_ex__(self, protocol):
        return torch._tensor._rebuild_from_type_v2, (
            torch._utils._rebuild_tensor_v2,
            Noted,
            (
                self.untyped_typed(),
                0,
                tuple(self.shape),
                self.stride(),
                False,
                collections.OrderedDict(),
            ),
            {"note": "set by hand"},
        )

    def untyped_typed(self):
        return torch.storage.TypedStorage(
            wrap_storage=self.untyped_storage(), dtype=self.dtype, _internal=True
        )

    def __setstate__(self, state):
        self.note = state["note"].upper()


def zeros():
    return 0


def zero_tensor():
    return torch.zeros(1)


def items():
    made = Items([torch.ones(2), 5])
    made.name = "name"
    return made


def noted():
    return torch.ones(3).as_subclass(Noted)


# name: (what makes the object, what has to be allowed)
ALLOWED = {
    "enum": (lambda: [Color.RED, Color.GREEN, Color.RED], [Color]),
    "int enum": (lambda: {"level": Level.LOW}, [Level]),
    "enum as key": (lambda: {Color.RED: torch.ones(1)}, [Color]),
    "dataclass": (lambda: Settings(0.5, torch.ones(3)), [Settings]),
    "frozen dataclass": (lambda: Frozen(0.5, torch.ones(3)), [Frozen]),
    "frozen dataclass with slots": (lambda: FrozenSlots(0.5, torch.ones(3)), [FrozenSlots]),
    "namedtuple": (lambda: [Point(torch.ones(2), 1), Point([], {})], [Point]),
    "slots": (lambda: Slotted(torch.ones(2), "text"), [Slotted]),
    "setstate": (lambda: Stateful(torch.ones(2)), [Stateful]),
    "guarded attributes": (lambda: Guarded(torch.ones(2)), [Guarded]),
    "list subclass": (items, [Items]),
    "set subclass": (lambda: Unique([1, 2]), [Unique]),
    "default dict of a function": (
        lambda: collections.defaultdict(zeros, a=torch.ones(2)),
        [collections.defaultdict, zeros],
    ),
    "function": (lambda: [zeros, zero_tensor], [zeros, zero_tensor]),
    "class": (lambda: {"class": Settings}, [Settings]),
    "tensor subclass": (lambda: torch.ones(3).as_subclass(Subclass), [Subclass]),
    "tensor subclass with setstate": (noted, [Noted]),
    "module": (lambda: nn.Linear(2, 3), [nn.Linear]),
    "nested": (
        lambda: Settings(Color.RED, [Point(torch.ones(1), Settings(1, None))]),
        [Settings, Color, Point],
    ),
    "uninitialized parameter": (lambda: [nn.UninitializedParameter()], [nn.UninitializedParameter]),
}


def parts(obj):
    """An object as plain containers, for ``same``."""
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return [type(obj), *(parts(getattr(obj, field.name)) for field in dataclasses.fields(obj))]
    if isinstance(obj, nn.Module):
        return [type(obj), dict(obj.state_dict())]
    if isinstance(obj, nn.UninitializedParameter):
        return [type(obj), obj.requires_grad]
    if isinstance(obj, Slotted):
        return [type(obj), obj.tensor, obj.text]
    if isinstance(obj, (list, tuple)):
        return [type(obj), *map(parts, obj), getattr(obj, "name", None)]
    if (
        hasattr(obj, "__dict__")
        and not isinstance(obj, (type, torch.Tensor, enum.Enum))
        and not callable(obj)
    ):
        return [type(obj), dict(vars(obj))]
    return obj


@pytest.fixture(autouse=True)
def no_safe_globals():
    before = get_safe_globals()
    clear_safe_globals()
    yield
    clear_safe_globals()
    add_safe_globals(before)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", ALLOWED)
class TestAllowed:
    def test_refused_unless_allowed(self, name, legacy):
        make, allowed = ALLOWED[name]
        data = saved(make(), legacy=legacy)
        for some in (allowed[:n] for n in range(len(allowed))):
            clear_safe_globals()
            add_safe_globals(some)
            with pytest.raises(fastckpt.UnsafePickleError) as caught:
                fastckpt.load(data)
            assert caught.value.qualname not in [
                f"{cls.__module__}.{cls.__qualname__}" for cls in some
            ]

    def test_allowed(self, name, legacy):
        make, allowed = ALLOWED[name]
        obj = make()
        data = saved(obj, legacy=legacy)
        add_safe_globals(allowed)
        same(parts(torch_loads(data)), parts(fastckpt.load(data)))

    def test_all_or_nothing(self, name, legacy):
        """Of what is not known, unknown="opaque" keeps stand-ins, whether or not other things are allowed."""
        make, _ = ALLOWED[name]
        fastckpt.load(saved([make(), torch.ones(2)], legacy=legacy), unknown="opaque")


# A name, and what its refusal says, in this order.
REFUSALS = {
    "os system": "dangerous: it starts programs.*nothing was run.*scan says.*never load it with weights_only=False",
    "torch.serialization load": "dangerous: it reads a pickle without checks",
    "builtins getattr": "dangerous: it reaches into the interpreter",
    "some.own Net": "not known to be plain data; nothing was run.*add_safe_globals.*weights_only=False runs the pickle, and scan",
}


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_a_refusal_says_what_is_known_of_a_name(name, framework):
    data = torch_file(craft([Call(Name(name), ("id",))]))
    with pytest.raises(fastckpt.UnsafePickleError, match=REFUSALS[name]) as caught:
        fastckpt.load(data, framework=framework)
    assert ("add_safe_globals" in str(caught.value)) == (name == "some.own Net")


def test_safe_globals_context():
    safe_globals = getattr(torch.serialization, "safe_globals", None)
    if safe_globals is None:
        pytest.skip("torch 2.5 has it")
    data = saved([Color.RED])
    with safe_globals([Color]):
        assert fastckpt.load(data) == [Color.RED]
    with pytest.raises(fastckpt.UnsafePickleError):
        fastckpt.load(data)


def test_allowed_under_another_name():
    data = saved([Color.RED]).replace(b"Color", b"Paint")
    allow_by_name(Color, f"{__name__}.Paint")
    assert fastckpt.load(data, verify=False) == [Color.RED]


def allow_by_name(obj, name):
    try:
        add_safe_globals([(obj, name)])
        torch_loads(saved([1]), weights_only=True)
    except Exception:
        pytest.skip("this torch takes no names")


def test_attributes_that_are_torchs_own():
    """A subclass may define them anew, and its file set them; those of torch.Tensor are not the file's to set."""
    add_safe_globals([Subclass, Named])
    tensor = torch.ones(3).as_subclass(Named)
    tensor.name = "mine"
    assert fastckpt.load(saved([tensor]))[0].name == "mine"
    for make, attribute in (
        (Subclass, "name"),
        (Named, "grad"),
        (torch.Tensor, "data"),
        (Named, "__class__"),
    ):
        tensor = torch.ones(3).as_subclass(make)
        tensor.a_name = 5
        old = records_of(saved([tensor]))["data.pkl"]
        new = old.replace(
            b"X\x06\0\0\0a_name", b"X" + len(attribute).to_bytes(4, "little") + attribute.encode()
        )
        data = rewritten(
            saved([tensor]),
            change=lambda name, content, old=old, new=new: new if content == old else content,
        )
        with pytest.raises(
            fastckpt.UnsafePickleError, match=f"the attribute {attribute!r} of a tensor"
        ):
            fastckpt.load(data)


@pytest.mark.parametrize("module", ["os", "posix", "sys", "nt"])
def test_blocked_even_where_allowed(module):
    allow_by_name(zeros, f"{module}.system")
    content = b"\x80\x02]c" + module.encode() + b"\nsystem\n)Ra."
    data = rewritten(saved([1]), change=lambda name, old: content if name == "data.pkl" else old)
    with pytest.raises(fastckpt.UnsafePickleError, match=f"{module}.system"):
        fastckpt.load(data)


# -- what an error says ------------------------------------------------------------------------------------------------


def test_refusal_says_what_where_and_what_to_do(tmp_path):
    path = tmp_path / "model.pt"
    torch.save({"a": Settings(1, torch.ones(1))}, path)
    with pytest.raises(fastckpt.UnsafePickleError) as caught:
        fastckpt.load(path)
    error = caught.value
    assert isinstance(error, pickle.UnpicklingError)
    assert (error.qualname, error.path, error.record) == (
        f"{__name__}.Settings",
        str(path),
        "data.pkl",
    )
    for words in (str(path), f"{__name__}.Settings", "data.pkl", "nothing was run", "unknown='opaque'",
                  "torch.serialization.add_safe_globals", "weights_only=False"):  # fmt: skip
        assert words in str(error)


@pytest.mark.parametrize("factory", [zeros, torch.Size, Settings], ids=lambda f: f.__name__)
def test_default_dict_of_a_factory_that_is_not_plain(factory):
    data = saved(collections.defaultdict(factory, a=torch.ones(2)))
    with pytest.raises(fastckpt.UnsafePickleError, match=r"defaultdict|zeros|Settings"):
        fastckpt.load(data)


# -- stand-ins ---------------------------------------------------------------------------------------------------------


class TestOpaque:
    def test_keeps_tensors(self):
        storage = torch.arange(6.0)
        obj = {
            "settings": Settings(0.5, storage[2:]),
            "tensor": storage,
            "point": Point(storage, 3),
        }
        loaded = fastckpt.load(saved(obj), unknown="opaque")
        same(storage, loaded["tensor"])
        settings = loaded["settings"]
        assert settings.qualname == f"{__name__}.Settings"
        same({"rate": 0.5, "weights": storage[2:]}, settings.state)
        assert (
            settings.state["weights"].untyped_storage().data_ptr()
            == loaded["tensor"].untyped_storage().data_ptr()
        )
        same((storage, 3), loaded["point"].args)

    def test_twice_is_one(self):
        settings = Settings(1, torch.ones(1))
        one, two = fastckpt.load(saved([settings, settings]), unknown="opaque")
        assert one is two

    def test_items_and_pairs(self):
        found = fastckpt.load(
            saved([items(), collections.defaultdict(zeros, a=torch.ones(2))]), unknown="opaque"
        )
        same([torch.ones(2), 5], found[0].items)
        assert found[0].state == {"name": "name"}
        assert found[1].qualname == "collections.defaultdict"
        same({"a": torch.ones(2)}, found[1].pairs)

    def test_tensor_subclass(self):
        (found,) = fastckpt.load(saved([torch.ones(3).as_subclass(Subclass)]), unknown="opaque")
        assert found.qualname == f"{__name__}.Subclass"
        same((torch.ones(3),), found.args)

    def test_module(self):
        found = fastckpt.load(saved(nn.Linear(2, 3)), unknown="opaque")
        assert found.qualname == "torch.nn.modules.linear.Linear"
        assert found.state["_parameters"]["weight"].shape == (3, 2)

    def test_allowed_classes_are_real(self):
        add_safe_globals([Settings])
        loaded = fastckpt.load(saved([Settings(1, torch.ones(1)), Color.RED]), unknown="opaque")
        assert type(loaded[0]) is Settings
        assert loaded[1].qualname == f"{__name__}.Color"

    def test_of_keys_that_are_wanted(self):
        data = saved({"a": torch.ones(2), "b": Settings(1, torch.ones(1))})
        same({"a": torch.ones(2)}, fastckpt.load(data, keys=["a"]))

    def test_an_allowed_class_that_holds_one_that_is_not(self):
        add_safe_globals([Settings])
        loaded = fastckpt.load(saved(Settings(1, Color.RED)), unknown="opaque")
        assert loaded.weights.qualname == f"{__name__}.Color"
