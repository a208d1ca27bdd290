"""The pickle machine on good pickles: every opcode and protocol, compared with Python's own unpickler."""

import argparse
import collections
import datetime
import decimal
import fractions
import io
import math
import pathlib
import pickle
import pickletools
import struct
import types
import uuid

import pytest

from fastckpt._stack import argument_kinds, skim
from fastckpt._tree import substitute
from fastckpt._unpickler import unpickle
from fastckpt.errors import FormatError
from fastckpt.limits import Limits
from fastckpt.nodes import Opaque
from fastckpt.numpy_bridge import NumpyBridge
from picklecraft import Call, Name, craft
from support import same


def loads(data, **options):
    """The object of a pickle that names no tensors; unknown classes are Opaque."""
    unpickled = unpickle(data, **options)
    return substitute(unpickled.obj, NumpyBridge({}, unknown="opaque"), [])


class Unknown:
    """A class that the library knows nothing of."""

    def __init__(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs


NAN_WITH_BITS = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_DEAD_BEEF))[0]


def ordered_with_attributes():
    result = collections.OrderedDict(a=1)
    result._metadata = collections.OrderedDict(version=2)
    return result


def shared():
    one = [1]
    return [one, one, {"k": one}, (one,)]


def many(n):
    return [list(range(n)), {str(i): i for i in range(n)}, tuple(range(n)), set(range(n))]


VALUES = {
    "None": None,
    "bools": [True, False],
    "small ints": [0, 1, 255, 256, 65535, 65536, -1, -256],
    "ints at the edges": [s * 2**n + d for n in (31, 32, 63, 64) for s in (1, -1) for d in (-1, 0, 1)],
    "long ints": [2**2039, -(2**2040), 2**5000 - 1, 10**4000],
    "floats": [0.5, -1.25e300, math.inf, -math.inf, 5e-324],
    "negative zero": -0.0,
    "complex": [1 + 2j, complex(-0.0, math.inf)],
    "str": ["", "abc", "a" * 255, "a" * 256, "a" * 70000, "äöü€𝄞", "line\nbreak\\u0041\\", "\0\r\x1a"],
    "surrogates": ["\ud800", "a\udfffb"],
    "bytes": [b"", b"abc", bytes(range(256)), b"x" * 70000],
    "bytearray": [bytearray(), bytearray(b"abc"), bytearray(range(256))],
    "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((), ((),))],
    "lists": [[], [1], [[]], list(range(2500))],
    "dicts": [{}, {"a": 1}, {1: {2: {3: 4}}}, {(1, "a"): None, None: 1, 1.5: 2, b"k": 3}],
    "sets": [set(), {1, "a"}, frozenset(), frozenset({1, (2, 3)}), {frozenset({1})}],
    "OrderedDict": ordered_with_attributes(),
    "Counter": collections.Counter("abracadabra"),
    "defaultdict": [collections.defaultdict(list, a=[1]), collections.defaultdict(None, b=2), collections.defaultdict(dict)],
    "deque": [collections.deque([1, 2]), collections.deque([1, 2, 3], maxlen=3), collections.deque()],
    "range and slice": [range(3), range(1, 10, 2), slice(1, None, 2)],
    "dates": [
        datetime.datetime(2020, 2, 3, 4, 5, 6, 7, fold=1),
        datetime.date(1, 1, 1),
        datetime.time(23, 59),
        datetime.timedelta(-3, 4, 5),
        datetime.UTC,
        datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=2), "X")),
    ],
    "numbers": [decimal.Decimal("1.10"), decimal.Decimal("NaN"), fractions.Fraction(-1, 3)],
    "paths": [pathlib.PurePosixPath("a/b"), pathlib.PureWindowsPath("c:\\x"), pathlib.Path("x"), pathlib.PurePosixPath()],
    "uuid": [uuid.UUID(int=5), {uuid.UUID(int=7): 1}],
    "namespaces": [argparse.Namespace(a=1, b=[2]), types.SimpleNamespace(c=3)],
    "classes": [int, dict, collections.OrderedDict, datetime.datetime],
    "shared": shared(),
    "1000 members": many(1000),
    "1001 members": many(1001),
    "300 memo entries": [str(i) for i in range(300)] * 2,
}  # fmt: skip


def alike(expected, actual):
    """Compare, NaN equal to itself."""
    if isinstance(expected, decimal.Decimal):
        assert repr(expected) == repr(actual)
    elif isinstance(expected, list):
        assert type(actual) is list
        assert len(expected) == len(actual)
        for a, b in zip(expected, actual, strict=True):
            alike(a, b)
    else:
        same(expected, actual)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_what_python_pickles(value, protocol):
    data = pickle.dumps(value, protocol)
    alike(value, loads(data))
    alike(value, loads(pickletools.optimize(data)))
    unpickled = unpickle(data + b"more")
    assert unpickled.end == len(data)
    assert unpickled.unknown == []


@pytest.mark.parametrize("protocol", range(6))
def test_the_pure_python_pickler_writes_the_same(protocol):
    file = io.BytesIO()
    pickle._Pickler(file, protocol).dump(VALUES["shared"] + [b"x" * 70000, "y" * 70000, {1, 2}])
    same(pickle.loads(file.getvalue()), loads(file.getvalue()))


def test_every_opcode_is_met():
    """The tables of this file and of test_unpickler_damage.py name every opcode there is."""
    met = set()
    for value in VALUES.values():
        for protocol in range(6):
            met |= {op.name for op, _, _ in pickletools.genops(pickle.dumps(value, protocol))}
    for data in OPCODES.values():
        met |= {op.name for op, _, _ in pickletools.genops(data[0])}
    refused = {
        "EXT1",
        "EXT2",
        "EXT4",
        "NEXT_BUFFER",
        "READONLY_BUFFER",
        "PERSID",
        "BINPERSID",
        "INST",
        "OBJ",
        "NEWOBJ_EX",
    }
    assert {op.name for op in pickletools.opcodes} - met - refused == set()


@pytest.mark.parametrize(
    "value",
    [NAN_WITH_BITS, -NAN_WITH_BITS, math.nan, -0.0],
    ids=["NaN with bits", "negative NaN", "NaN", "-0.0"],
)
def test_float_bits(value):
    (found,) = unpickle(b"G" + struct.pack(">d", value) + b"\x85.").obj
    assert struct.pack("<d", found) == struct.pack("<d", value)


# name -> (pickle, object)
OPCODES = {
    "INT": (b"I-17\n.", -17),
    "INT that is a long": (b"I123456789012345678901\n.", 123456789012345678901),
    "INT that is a bool": (b"(I00\nI01\nt.", (False, True)),
    "LONG": (b"L-5L\n.", -5),
    "LONG without L": (b"L5\n.", 5),
    "LONG1 of no bytes": (b"\x8a\x00.", 0),
    "LONG4": (b"\x8b\x02\x00\x00\x00\x00\xff.", -256),
    "BININT negative": (b"J\xff\xff\xff\xff.", -1),
    "FLOAT": (b"F-1.5e3\n.", -1500.0),
    "FLOAT inf": (b"Finf\n.", math.inf),
    "UNICODE": (b"V\\u20ac\\U0001d11ea\xe4\n.", "€𝄞aä"),
    "STRING": (b"S'a\\n\\x41\"'\n.", 'a\nA"'),
    "STRING in double quotes": (b'S"it\'s"\n.', "it's"),
    "BINSTRING": (b"T\x03\x00\x00\x00abc.", "abc"),
    "SHORT_BINSTRING": (b"U\x03abc.", "abc"),
    "BINUNICODE8": (b"\x8d\x03\0\0\0\0\0\0\0abc.", "abc"),
    "BINBYTES8": (b"\x8e\x03\0\0\0\0\0\0\0abc.", b"abc"),
    "BYTEARRAY8": (b"\x96\x03\0\0\0\0\0\0\0abc.", bytearray(b"abc")),
    "LIST": (b"(K\x01K\x02l.", [1, 2]),
    "DICT": (b"(K\x01K\x02d.", {1: 2}),
    "POP": (b"K\x01K\x020.", 1),
    "POP of a MARK": (b"K\x01(0.", 1),
    "POP_MARK": (b"K\x01(K\x02K\x031.", 1),
    "POP_MARK of nothing": (b"K\x01(1.", 1),
    "DUP": (b"K\x052\x86.", (5, 5)),
    "PUT and GET": (b"K\x07p10\ng10\n\x86.", (7, 7)),
    "PUT at 2**31-1": (b"K\x07p2147483647\n0g2147483647\n.", 7),
    "LONG_BINPUT at 2**32-1": (b"K\x07r\xff\xff\xff\xff0j\xff\xff\xff\xff.", 7),
    "PUT beyond any memory": (b"K\x07p4000000000000000000\n0g4000000000000000000\n.", 7),
    "PUT twice": (b"K\x07q\x00K\x08q\x00h\x00\x87.", (7, 8, 8)),
    "PUT far, then near": (b"K\x07p300\nK\x08p100\nK\x09p200\ng300\ng100\ng200\n\x87.", (7, 8, 9)),
    "MEMOIZE": (b"K\x07\x940h\x00.", 7),
    "MEMOIZE after PUT": (b"K\x07q\x00\x940h\x01.", 7),
    "MEMOIZE counts entries": (b"K\x07q\x05q\x05K\x08\x940h\x01.", 8),
    "MEMOIZE counts far entries": (b"K\x07p2147483647\np2147483647\nK\x08\x940h\x01.", 8),
    "MEMOIZE over an entry": (b"K\x07q\x01K\x08\x940h\x01.", 8),
    "FRAME": (b"\x80\x04\x95\x03\0\0\0\0\0\0\0K\x07..", 7),
    "frame in a frame": (b"\x80\x04\x95\x0c\0\0\0\0\0\0\0\x95\x03\0\0\0\0\0\0\0K\x07.", 7),
    "frame that ends in an opcode": (b"\x80\x04\x95\x01\0\0\0\0\0\0\0K\x07.", 7),
    "frame of nothing": (b"\x95\0\0\0\0\0\0\0\0K\x07.", 7),
    "PROTO in the middle": (b"K\x07\x80\x02\x80\x05.", 7),
    "objects below the result": (b"K\x06K\x07.", 7),
    "SETITEM": (b"}K\x01K\x02s.", {1: 2}),
    "SETITEMS of nothing": (b"}(u.", {}),
    "APPENDS of nothing": (b"](e.", []),
    "ADDITEMS": (b"\x8f(K\x01K\x02\x90.", {1, 2}),
    "FROZENSET": (b"(K\x01\x91.", frozenset({1})),
    "a later key wins": (b"}(K\x01K\x02K\x01K\x03u.", {1: 3}),
    "APPEND": (b"]K\x01a.", [1]),
}  # fmt: skip


@pytest.mark.parametrize("case", OPCODES.values(), ids=OPCODES)
def test_opcode(case):
    data, expected = case
    same(expected, unpickle(data).obj)
    if b"\x95" not in data:  # frames are a hint to us, a must to the other
        same(
            expected, pickle._loads(data)
        )  # the one in C makes a table as long as the largest index


def test_a_bool_is_itself():
    assert unpickle(b"I01\n.").obj is True


def test_binary_prefix_of_a_larger_buffer():
    data = memoryview(bytearray(b"xx" + pickle.dumps([1, 2]) + b"yy"))[2:]
    assert unpickle(data).obj == [1, 2]


# -- Python 2 ------------------------------------------------------------------------------------------------------

TEXT = "äß".encode("latin-1")


@pytest.mark.parametrize("encoding", ["utf-8", "latin1", "ascii", "bytes", "cp1252"])
@pytest.mark.parametrize(
    "raw", [b"abc", "äß".encode(), TEXT, b""], ids=["ascii", "utf-8", "latin-1", "empty"]
)
@pytest.mark.parametrize("opcode", ["SHORT_BINSTRING", "BINSTRING", "STRING"])
def test_python_2_strings(encoding, raw, opcode):
    data = {
        "SHORT_BINSTRING": b"U" + bytes([len(raw)]) + raw,
        "BINSTRING": b"T" + struct.pack("<I", len(raw)) + raw,
        "STRING": b"S" + repr(raw)[1:].encode() + b"\n",
    }[opcode] + b"."
    unpickled = unpickle(data, encoding=encoding)
    try:
        expected = pickle.loads(data, encoding=encoding)
    except UnicodeDecodeError:
        assert unpickled.undecodable == raw
        assert unpickled.obj == raw
    else:
        assert unpickled.undecodable is None
        same(expected, unpickled.obj)


def test_the_first_undecodable_string_is_named():
    unpickled = unpickle(b"(U\x01\xffU\x01\xfeU\x01at.")
    assert unpickled.undecodable == b"\xff"
    assert unpickled.obj == (b"\xff", b"\xfe", "a")


def test_an_encoding_that_does_not_exist_is_the_callers_mistake():
    with pytest.raises(LookupError, match="nonsense") as caught:
        unpickle(b"N.", encoding="nonsense")
    assert not isinstance(caught.value, FormatError)


PYTHON_2 = {
    "OrderedDict of pairs": (b"ccollections\nOrderedDict\n((lp0\n(lp1\nS'a'\naI1\naatR.", collections.OrderedDict(a=1)),
    "set": (b"c__builtin__\nset\n((lK\x01atR.", {1}),
    "xrange": (b"c__builtin__\nxrange\n(I0\nI3\nI1\ntR.", range(3)),
    "datetime": (b"cdatetime\ndate\n(U\x04\x07\xe4\x02\x03tR.", datetime.date(2020, 2, 3)),
    "Namespace": (b"ccopy_reg\n_reconstructor\n(cargparse\nNamespace\nc__builtin__\nobject\nNtR(dS'a'\nI1\nsb.",
                  argparse.Namespace(a=1)),
    "defaultdict": (b"ccollections\ndefaultdict\n(c__builtin__\nunicode\ntR.", collections.defaultdict(str)),
}  # fmt: skip


@pytest.mark.parametrize("case", PYTHON_2.values(), ids=PYTHON_2)
def test_python_2_objects(case):
    data, expected = case
    same(expected, loads(data, encoding="latin1"))


# -- objects of unknown classes ------------------------------------------------------------------------------------

UNKNOWN = Name(f"{__name__} Unknown")
QUALNAME = f"{__name__}.Unknown"
MAKERS = {
    "REDUCE": Call(UNKNOWN, (1, [2])),
    "NEWOBJ": Call(UNKNOWN, (1, [2]), how="NEWOBJ"),
    "NEWOBJ_EX": Call(UNKNOWN, (1, [2]), how="NEWOBJ_EX", kwargs={"k": 3}),
    "INST": Call(UNKNOWN, (1, [2]), how="INST"),
    "OBJ": Call(UNKNOWN, (1, [2]), how="OBJ"),
}


@pytest.mark.parametrize("call", MAKERS.values(), ids=MAKERS)
def test_unknown_class(call):
    unpickled = unpickle(craft(call))
    node = unpickled.obj
    assert type(node) is Opaque
    assert node.qualname == QUALNAME
    assert node.args == (1, [2])
    assert node.kwargs == ({"k": 3} if call.how == "NEWOBJ_EX" else {})
    assert unpickled.unknown == [(QUALNAME, "")]
    assert node.new == call.how.startswith("NEWOBJ")


@pytest.mark.parametrize("protocol", range(6))
def test_unknown_class_with_a_state(protocol):
    obj = Unknown(1)
    obj.again = obj
    node = unpickle(pickle.dumps([obj], protocol)).obj[0]
    assert node.qualname == QUALNAME
    assert node.state["args"] == (1,)
    assert node.state["again"] is node
    assert (
        repr(node)
        == f"Opaque({QUALNAME!r}, args=<tuple of nothing>, state=<dict of tuple, dict, Opaque>)"
    )


class UnknownList(list):
    pass


class UnknownDict(dict):
    pass


@pytest.mark.parametrize("protocol", range(2, 6))
def test_unknown_containers(protocol):
    items, pairs = unpickle(pickle.dumps([UnknownList([1, 2]), UnknownDict(a=1)], protocol)).obj
    assert (items.items, pairs.pairs) == ([1, 2], {"a": 1})


def test_what_an_opaque_callable_returns_is_opaque():
    node = unpickle(craft(Call(Call(UNKNOWN, ()), (1,)))).obj
    assert (node.qualname, node.args[1:]) == (f"{QUALNAME}()", (1,))


def test_a_factory_that_is_not_known_makes_the_dict_opaque():
    data = craft(Call(Name("collections defaultdict"), (UNKNOWN,), {}))
    node = unpickle(data).obj
    assert (type(node), node.qualname) == (Opaque, "collections.defaultdict")


def test_a_time_zone_that_is_not_known_makes_the_time_opaque():
    zone = Call(Name("zoneinfo ZoneInfo"), ("UTC",))
    node = unpickle(
        craft([Call(Name("datetime datetime"), (bytes([7, 228, 1, 1, 0, 0, 0, 0, 0, 0]), zone))])
    ).obj[0]
    assert (type(node), node.qualname) == (Opaque, "datetime.datetime")


# -- depth ---------------------------------------------------------------------------------------------------------

DEPTH = 100_000
DEEP = {
    "lists": b"]" * DEPTH + b"a" * (DEPTH - 1) + b".",
    "tuples": b")" + b"\x85" * DEPTH + b".",
    "dicts": b"}" + b"K\x01}" * DEPTH + b"s" * DEPTH + b".",
    "opaque arguments": b"cx\nY\n" * DEPTH + b")R" + b"\x85R" * (DEPTH - 1) + b".",
    "opaque states": b"cx\nY\n)R" * DEPTH + b"b" * (DEPTH - 1) + b".",
    "opaque items": b"cx\nY\n)R" * DEPTH + b"a" * (DEPTH - 1) + b".",
    "attributes": b"ctypes\nSimpleNamespace\n)R}X\x01\0\0\0a" * DEPTH + b"N" + b"sb" * DEPTH + b".",
    "marks": b"(" * DEPTH + b"t" * DEPTH + b".",
}


@pytest.mark.parametrize("data", DEEP.values(), ids=DEEP)
def test_deep_nesting(data):
    """No recursion anywhere: not to make it, not to turn it into real objects, not to free it."""
    obj = loads(data, limits=Limits())
    assert obj is not None
    del obj


def test_errors_say_where_and_what():
    with pytest.raises(
        FormatError,
        match=r"^model.pt: object at byte 103: memo entry 7 is fetched and was never stored$",
    ) as caught:
        unpickle(b"K\x07\x85h\x07.", where="model.pt: object", offset=100)
    assert caught.value.offset == 103


def test_looking_ahead_skips_every_opcode_as_pickletools_does():
    """A wrong length would make the machine drop memo entries that are fetched later."""
    counted = {"1": 9, "4": 10, "8": 11}
    lines = {"stringnl_noescape_pair": 13}
    expected = [14] * 256
    for opcode in pickletools.opcodes:
        argument = opcode.arg
        if argument is None:
            kind = 0
        elif argument.n >= 0:
            kind = argument.n
        elif argument.n == pickletools.UP_TO_NEWLINE:
            kind = lines.get(argument.name, 12)
        else:
            kind = counted["1" if argument.n == -2 else "8" if argument.n == -5 else "4"]
        expected[ord(opcode.code)] = kind
    assert argument_kinds() == expected


PICKLES = {
    **{f"protocol_{n}": pickle.dumps({"a": [1, 2.5, "x" * 300, b"y" * 300], "b": (None, 1 << 90)}, n) for n in range(6)},
    "global": b"ccollections\nOrderedDict\n(tR.",
}  # fmt: skip


@pytest.mark.parametrize("name", PICKLES)
def test_skim_never_asks_for_more_than_there_is(name):
    data, at = PICKLES[name], 0
    for n in range(len(data) + 1):
        assert skim(data[:n] + b"more" * (n == len(data)), 0)[1] >= 0
        at, needed = skim(data[:n], at)
        assert at <= n < at + needed <= len(data) or (at, needed) == (len(data), 0)
    assert needed == 0
    assert skim(b"\x80\x02\xff", 0) == (2, -1)
