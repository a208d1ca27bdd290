"""The native pickler, compared with Python's: whatever pickle.loads makes of one pickle it makes of the other."""

import _compat_pickle
import collections
import copyreg
import datetime
import decimal
import enum
import fractions
import functools
import importlib
import math
import pathlib
import pickle
import sys
import threading
import types
import uuid
import weakref

import numpy as np
import pytest
from hypothesis import given, settings

from fastckpt._pickler import dump
from objects import HASHABLE, PLAIN
from support import same

PROTOCOLS = range(2, 6)


# -- what is pickled


class Plain:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def __eq__(self, other):
        return type(self) is type(other) and self.__dict__ == other.__dict__

    class Nested:
        class Deeper:
            pass

        @staticmethod
        def function():
            pass


class Slots:
    __slots__ = ("a", "b")

    def __init__(self, *values):
        for name, value in zip(self.__slots__, values, strict=False):
            setattr(self, name, value)

    def __eq__(self, other):
        return [getattr(self, n, None) for n in "ab"] == [getattr(other, n, None) for n in "ab"]


class SlotsAndDict(Slots):
    pass


class State(Plain):
    def __getstate__(self):
        return ["state", self.__dict__]

    def __setstate__(self, state):
        self.__dict__.update(state[1])


class FalseState(Plain):
    """A state that is not true: pickle leaves out None only."""

    def __getstate__(self):
        return 0

    def __setstate__(self, state):
        self.state = state


class NewArgs(Plain):
    def __new__(cls, x, y):
        made = super().__new__(cls)
        made.made_of = (x, y)
        return made

    def __init__(self, *args):
        pass

    def __getnewargs__(self):
        return self.made_of


class NewArgsEx(Plain):
    def __new__(cls, x, *, y):
        made = super().__new__(cls)
        made.made_of = (x, y)
        return made

    def __init__(self, *args, **keywords):
        pass

    def __getnewargs_ex__(self):
        return (self.made_of[0],), {"y": self.made_of[1]}


class Reduced(Plain):
    """``__reduce__`` gives what it is told to."""

    def __init__(self, *how):
        self.how = how

    def __reduce__(self):
        return self.how[0] if len(self.how) == 1 else self.how


class Bag:
    """Takes members as a list does, pairs as a dict does, and any state."""

    def __init__(self, *args):
        self.args, self.members, self.pairs, self.state = args, [], {}, None

    def append(self, member):
        self.members.append(member)

    def extend(self, members):
        self.members.extend(members)

    def __setitem__(self, key, value):
        self.pairs[key] = value

    def __setstate__(self, state):
        self.state = state

    def __eq__(self, other):
        return type(other) is Bag and vars(self) == vars(other)


def set_state(bag, state):
    bag.state = ("set", state)


class Text(str):
    pass


class Number(int):
    pass


class Many(list):
    pass


class Pairs(dict):
    pass


class Three(tuple):
    __slots__ = ()


class Colour(enum.Enum):
    RED = 1
    GREEN = ("g", 2)


class Flags(enum.IntFlag):
    A = 1
    B = 2


class Meta(type):
    """Its classes are equal to themselves and can't be hashed."""

    def __eq__(cls, other):
        return cls is other


class Unhashable(metaclass=Meta):
    pass


class Registered:
    def __eq__(self, other):
        return type(other) is Registered


class ByName:
    """A singleton that says by which name it is found."""

    def __reduce__(self):
        return "THE_ONE"


THE_ONE = ByName()
Point = collections.namedtuple("Point", "x y")
generic = functools.partial(Plain, 5)
copyreg.pickle(Registered, lambda obj: (Registered, ()))


def recursive_list():
    made = [1]
    made.append(made)
    return made


def recursive_tuple(n):
    inner = []
    made = (inner,) * n
    inner.append(made)
    return made


def recursive_dict():
    made = {}
    made["self"], made[1] = made, [made]
    return made


def recursive_object():
    made = Plain()
    made.own, made.all = made, (made, [made])
    return made


def recursive_reduce():
    """An object that is among the arguments of its own making."""
    made = Plain()
    made.members = {made.__class__: (made,)}
    return (made, made.members)


def held_by_its_member():
    member = Plain()
    member.holder = frozenset([id(member), Identity(member)])
    return member.holder


class Identity:
    def __init__(self, other):
        self.other = other


OBJECTS = {
    "None, True, False": (None, True, False, None),
    "integers": [n + d for n in (0, 2**7, 2**8, 2**15, 2**16, 2**31, 2**32, 2**63, 2**64) for d in (-1, 0, 1)],
    "negative integers": [-(2**n) + d for n in (0, 7, 8, 15, 16, 31, 32, 63, 64, 2039, 2040) for d in (-1, 0, 1)],
    "integers of 255 and 256 bytes": [2**2039, 2**2040 - 1, 2**2047, 2**2048],
    "floats": [0.0, -0.0, 1.5, math.inf, -math.inf, sys.float_info.max, 5e-324],
    "complex": [1 + 2j, complex(-0.0, math.inf)],
    "text": ["", "a", "grüße", "\0\n", "x" * 255, "y" * 256, "\U0001f600", "\ud800", "a\udcff"],
    "bytes": [b"", b"a", bytes(range(256)), b"x" * 255, b"y" * 256, b"z" * 70_000],
    "bytearrays": [bytearray(), bytearray(b"abc"), bytearray(range(256))],
    "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), tuple(range(2000)), ((((),),),)],
    "lists around a batch": [list(range(n)) for n in (0, 1, 2, 999, 1000, 1001, 2001)],
    "dicts around a batch": [{i: str(i) for i in range(n)} for n in (0, 1, 2, 999, 1000, 1001, 2001)],
    "sets": [set(), {1, 2}, frozenset(), frozenset([(1, "a")])],
    "the same text twice": [("storage", "cpu", "x"), {"storage": "cpu", "x": "storage"}],
    "the same objects twice": (lambda a, b: [a, b, a, b, (a, b), {"k": a}])([1], {"k": ()}),
    "500 memo entries": [[i] for i in range(500)] * 2,
    "a recursive list": recursive_list(),
    **{f"a recursive tuple of {n}": recursive_tuple(n) for n in (1, 2, 3, 4, 5)},
    "a recursive dict": recursive_dict(),
    "a recursive object": recursive_object(),
    "in its own arguments": recursive_reduce(),
    "a frozenset that its member holds": held_by_its_member(),
    "plain objects": [Plain(), Plain(a=1, b=[Plain()])],
    "slots": [Slots(1, 2), Slots(1), Slots(), SlotsAndDict(1, 2)],
    "__getstate__": [State(a=1), FalseState()],
    "__getnewargs__": NewArgs(1, [2]),
    "__getnewargs_ex__": NewArgsEx(1, y={2: 3}),
    "__reduce__ gives a name": [THE_ONE, THE_ONE],
    "copyreg": Registered(),
    "subclasses": [Text("t"), Number(5), Many([1, 2]), Pairs(a=1), Three((1, 2)), Number(2**70)],
    "enums": [Colour.RED, Colour.GREEN, Flags.A | Flags.B, Colour],
    "classes": [int, Plain, collections.OrderedDict, type, object, Unhashable, Point, list[int]],
    "nested names": [Plain.Nested, Plain.Nested.Deeper, Plain.Nested.function, Plain.Nested()],
    "singletons and their classes": [..., NotImplemented, type(None), type(...), type(NotImplemented)],
    "functions": [len, math.sin, set_state, pickle.loads, functools.reduce, isinstance],
    "methods": [[1].append, "a".join, datetime.datetime.now, dict.fromkeys, Plain(a=1).__eq__],
    "partials": [functools.partial(int, base=2), functools.partial(sorted, [1])],
    "containers": [collections.deque([1, 2], 5), collections.Counter("aab"),
                   collections.defaultdict(list, {1: [2]}), collections.OrderedDict(b=1, a=2),
                   collections.ChainMap({1: 2}), Point(1, 2), types.SimpleNamespace(a=1)],
    "of the standard library": [datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC), decimal.Decimal("1.5"), uuid.UUID(int=5),
                                fractions.Fraction(1, 3), pathlib.PurePosixPath("/a/b"), range(1, 9, 2), slice(1, None, 3)],
    "exceptions": [ValueError("a", 1), OSError(2, "no", "file"), KeyError()],
    "arrays": [np.arange(5), np.asfortranarray(np.eye(3)), np.array([1, "a"], object), np.float32(2), np.zeros((2, 0))],
    "read-only and sliced arrays": [np.frombuffer(b"abcd", np.uint8), np.arange(9)[::2], np.arange(6.0).reshape(2, 3).T],
}  # fmt: skip


CALLABLES = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)


def looks(obj, seen=None):
    """What there is to see of an object, as plain values: names of types, members, attributes, and what occurs twice."""
    seen = {} if seen is None else seen
    if obj is None or type(obj) in (bool, int, str, bytes):
        return obj
    if type(obj) is float:
        return obj.hex()
    if isinstance(obj, CALLABLES):
        owner = getattr(obj, "__self__", None)
        owner = None if isinstance(owner, (type, types.ModuleType)) else looks(owner, seen)
        return ("called", getattr(obj, "__module__", None), obj.__qualname__, owner)
    if id(obj) in seen:
        return ("again", seen[id(obj)][0])
    seen[id(obj)] = len(seen), obj
    made = [type(obj).__qualname__]
    if isinstance(obj, np.ndarray):
        made += [str(obj.dtype), obj.shape, obj.flags.writeable, looks(obj.tolist(), seen)]
    elif isinstance(obj, (set, frozenset)):
        made.append(sorted([repr(looks(each, seen)) for each in obj]))
    elif isinstance(obj, (list, tuple, collections.deque)):
        made.append([looks(each, seen) for each in obj])
    elif isinstance(obj, dict):
        made.append([(looks(key, seen), looks(value, seen)) for key, value in obj.items()])
    elif not hasattr(obj, "__dict__") and not isinstance(obj, Slots):
        made.append(repr(obj))
    made += [looks(getattr(obj, name, None), seen) for name in getattr(obj, "__slots__", ())]
    return (*made, looks(vars(obj), seen) if hasattr(obj, "__dict__") else None)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("obj", OBJECTS.values(), ids=OBJECTS)
def test_as_pickle_does(obj, protocol):
    expected = pickle.loads(pickle.dumps(obj, protocol))
    actual = pickle.loads(dump(obj, protocol))
    assert looks(actual) == looks(expected)


# What __reduce__ gives, made anew each time: an iterator can be gone through once.
REDUCTIONS = {
    "arguments": lambda: (Bag, (1, [2])),
    "a state": lambda: (Bag, (), {"a": 1}),
    "a state that is false": lambda: (Bag, (), ()),
    "members": lambda: (Bag, (), None, iter([1, (2,)])),
    "one member": lambda: (Bag, (), None, iter([1])),
    "no member": lambda: (Bag, (), None, iter([])),
    "2,500 members": lambda: (Bag, (), None, iter(range(2500))),
    "pairs": lambda: (Bag, (), None, None, iter([(1, 2), (3, 4)])),
    "one pair": lambda: (Bag, (), None, None, iter([(1, 2)])),
    "2,500 pairs": lambda: (Bag, (), None, None, iter([(i, i) for i in range(2500)])),
    "all of them": lambda: (Bag, (0,), "state", iter([1]), iter([(1, 2)])),
    "a setter of the state": lambda: (Bag, (), {"a": 1}, None, None, set_state),
    "a setter and no state": lambda: (Bag, (), None, None, None, set_state),
    "all six": lambda: (Bag, (0,), "state", iter([1]), iter([(1, 2)]), set_state),
    "six, most of them None": lambda: (Bag, (), None, None, None, None),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("how", REDUCTIONS.values(), ids=REDUCTIONS)
def test_reductions(how, protocol):
    expected, actual = (
        pickle.loads(dumps([obj, obj], protocol))
        for dumps in (pickle.dumps, dump)
        for obj in [Reduced(*how())]
    )
    assert actual[0] is actual[1]
    assert actual == expected


@settings(max_examples=60, deadline=None)
@given(obj=PLAIN, key=HASHABLE)
def test_any_plain_value(obj, key):
    for protocol in PROTOCOLS:
        whole = [obj, {key: (obj, key)}, obj]
        expected = pickle.loads(pickle.dumps(whole, protocol))
        same(expected, pickle.loads(dump(whole, protocol)))


def test_names_of_python_2():
    """Protocol 2 gives modules and functions the names that Python 2 has for them, and they lead back."""
    tried = 0
    names = list(_compat_pickle.REVERSE_NAME_MAPPING) + [
        (module, name)
        for module, name in [
            ("builtins", "len"),
            ("copyreg", "pickle"),
            ("queue", "Queue"),
            ("io", "BytesIO"),
        ]
    ]
    for module, name in names:
        try:
            obj = getattr(importlib.import_module(module), name)
            expected = pickle.dumps(obj, 2)
        except (ImportError, AttributeError, pickle.PicklingError, TypeError):
            continue
        tried += 1
        assert pickle.loads(dump(obj, 2)) is pickle.loads(expected), (module, name)
        assert dump(obj, 2)[:12] == expected[:12], (module, name)
    assert tried > 20


# -- what can't be pickled


def local_function():
    def inner():
        pass

    return inner


def local_class():
    class Inner:
        pass

    return Inner


def misnamed():
    def other():
        pass

    other.__qualname__ = "set_state"
    return other


class Refuses:
    def __init__(self, error):
        self.error = error

    def __reduce_ex__(self, protocol):
        raise self.error


REFUSED = {
    "a lambda": (lambda: lambda: 1, "PicklingError", "<lambda>"),
    "a local function": (local_function, "PicklingError", "local_function.<locals>.inner"),
    "a local class": (local_class, "PicklingError", "local_class.<locals>.Inner"),
    "an instance of a local class": (lambda: local_class()(), "PicklingError", "Inner"),
    "a function by another's name": (misnamed, "PicklingError", "set_state"),
    "a generator": (lambda: (i for i in ()), "TypeError", "generator"),
    "a lock": (threading.Lock, "TypeError", "lock"),
    "a module": (lambda: pickle, "TypeError", "module"),
    "a weak reference": (lambda: weakref.ref(Plain), "TypeError", "weakref"),
    "a name that leads nowhere": (lambda: Reduced("nowhere"), "PicklingError", "nowhere"),
    "a number for a reduction": (lambda: Reduced(5), "PicklingError", "int"),
    "one item": (lambda: Reduced((Bag,)), "PicklingError", "two to six"),
    "seven items": (
        lambda: Reduced(Bag, (), None, None, None, None, None),
        "PicklingError",
        "two to six",
    ),
    "no callable": (lambda: Reduced(5, ()), "PicklingError", "callable"),
    "no arguments": (lambda: Reduced(Bag, [1]), "PicklingError", "tuple"),
    "members that are none": (lambda: Reduced(Bag, (), None, 5), "TypeError", "int"),
    "an error of its own": (lambda: Refuses(ZeroDivisionError("own")), "ZeroDivisionError", "own"),
    "deep in it": (lambda: {"a": [Refuses(LookupError("own"))]}, "LookupError", "own"),
    "KeyboardInterrupt": (lambda: Refuses(KeyboardInterrupt("own")), "KeyboardInterrupt", "own"),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("make", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(make, error, words, protocol):
    obj = make()
    with pytest.raises(BaseException, match=words) as raised:
        dump(obj, protocol)
    assert type(raised.value).__name__ == error


@pytest.mark.parametrize(
    "obj",
    [pickle.PickleBuffer(b"abc"), pickle.PickleBuffer(bytearray(b"abc"))],
    ids=["bytes", "bytearray"],
)
def test_buffers_need_protocol_5(obj):
    with pytest.raises(pickle.PicklingError, match="pickle_protocol=5"):
        dump(obj, 4)
    expected = pickle.loads(pickle.dumps(obj, 5))
    actual = pickle.loads(dump([obj, b"x"], 5))
    assert actual == [expected, b"x"]
    assert type(actual[0]) is type(expected)


def test_a_buffer_with_gaps():
    with pytest.raises(pickle.PicklingError, match="contiguous"):
        dump(pickle.PickleBuffer(memoryview(bytes(9))[::2]), 5)


@pytest.mark.parametrize(
    "change",
    [dict.clear, lambda d: d.update(x=1), lambda d: d.pop("b")],
    ids=["cleared", "grown", "shrunk"],
)
def test_a_dict_that_changes_meanwhile(change):
    members = {}

    class Changer:
        def __reduce__(self):
            change(members)
            return int, ()

    members.update(a=Changer(), b=2, c=3)
    with pytest.raises(RuntimeError, match="changed size"):
        dump(members)


def test_a_list_that_changes_meanwhile():
    members = []

    class Changer:
        def __reduce__(self):
            members.clear()
            return int, ()

    members.extend([Changer(), 2, 3])
    assert isinstance(pickle.loads(dump(members)), list)


# What puts one object into another of its kind, and takes it out again.
NESTING = {
    "lists": (lambda inner: [inner], lambda outer: outer[0]),
    "tuples": (lambda inner: (inner,), lambda outer: outer[0]),
    "long tuples": (lambda inner: (1, 2, 3, inner), lambda outer: outer[3]),
    "dicts": (lambda inner: {"a": inner}, lambda outer: outer["a"]),
    "objects": (lambda inner: Plain(a=inner), lambda outer: outer.a),
    "deques": (lambda inner: collections.deque([inner]), lambda outer: outer[0]),
}


@pytest.mark.parametrize(("put", "take"), NESTING.values(), ids=NESTING)
def test_depth(put, take):
    obj = 0
    for _ in range(100):
        obj = put(obj)
    obj = pickle.loads(dump(obj))
    for _ in range(100):
        obj = take(obj)
    assert obj == 0
    for _ in range(100_000):
        obj = put(obj)
    with pytest.raises(RecursionError):
        dump(obj)
    while obj:  # from outside: not every Python frees such a thing in one go
        obj = take(obj)


@pytest.mark.parametrize("protocol", [0, 1, 6, -1, 2**70, 2.0, None, "2"])
def test_protocols_that_are_none(protocol):
    with pytest.raises(ValueError if type(protocol) is int else TypeError):
        dump({}, protocol)
