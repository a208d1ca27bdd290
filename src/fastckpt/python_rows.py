"""Python's own classes and functions, as pickles name them: what a call of each gives, as plain data."""

import argparse
import collections
import datetime
import decimal
import fractions
import pathlib
import re
import types
import uuid

from .known import REBUILD_ORDERED_DICT, Known, expect
from .nodes import Node, Opaque, short


def ordered_dict(machine, args):
    """() from Python 3, a list of pairs from Python 2."""
    result = collections.OrderedDict()
    machine.update(result, pairs_of(args))
    return result


def counter(machine, args):
    """Counter({item: count}) as it is pickled, or of items to count."""
    result = collections.Counter()
    if args and isinstance(args[0], dict):
        machine.update(result, pairs_of(args))
    elif args:
        items = args[0] if isinstance(args[0], str) else items_of(args)
        machine.check_keys(items)
        result.update(items)
    return result


def pairs_of(args):
    expect(len(args) < 2, "one list of pairs", args)
    pairs = args[0] if args else ()
    if isinstance(pairs, dict):
        return list(pairs.items())
    expect(isinstance(pairs, (list, tuple)), "a list of pairs", args)
    expect(
        all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs),
        "a list of pairs",
        args,
    )
    return pairs


FACTORIES = {
    f"{module}.{name}": factory
    for module in ("builtins", "__builtin__")
    for name, factory in {
        "list": list, "dict": dict, "set": set, "int": int, "float": float, "str": str,
        "tuple": tuple, "bool": bool, "bytes": bytes, "complex": complex, "frozenset": frozenset,
    }.items()
} | {"collections.OrderedDict": collections.OrderedDict, "collections.Counter": collections.Counter,
     "collections.deque": collections.deque, "__builtin__.unicode": str, "__builtin__.long": int}  # fmt: skip


def default_dict(machine, args):
    """defaultdict(factory), where the factory is a plain type; any other is a reason to keep the whole opaque."""
    factory = args[0] if args else None
    if factory is not None:
        name = getattr(factory, "qualname", None)
        if name not in FACTORIES:
            if isinstance(factory, Opaque) or getattr(factory, "known", None) is None:
                return Opaque("collections.defaultdict", args)
            machine.note_unknown(
                "collections.defaultdict", f"with the factory {name or short(factory)}"
            )
            return Opaque("collections.defaultdict", args)
        factory = FACTORIES[name]
    return collections.defaultdict(factory)


def deque(machine, args):
    expect(len(args) < 3, "deque(items, maxlen)", args)
    items = args[0] if args else ()
    maxlen = args[1] if len(args) > 1 else None
    expect(isinstance(items, (list, tuple)), "a list", items)
    expect(maxlen is None or (type(maxlen) is int and maxlen >= 0), "a length", maxlen)
    machine.spend(len(items))
    return collections.deque(items, maxlen)


def items_of(args):
    """The one container argument of set(), list() and their kind."""
    expect(len(args) < 2, "one list", args)
    items = args[0] if args else ()
    expect(isinstance(items, (list, tuple, set, frozenset)), "a list", args)
    return items


def make_list(machine, args):
    machine.spend(len(items_of(args)))
    return list(items_of(args))


def make_tuple(machine, args):
    machine.spend(len(items_of(args)))
    return tuple(items_of(args))


def make_set(machine, args):
    items = items_of(args)
    machine.check_keys(items)
    return set(items)


def make_frozenset(machine, args):
    items = items_of(args)
    machine.check_keys(items)
    return frozenset(items)


def make_dict(machine, args):
    result = {}
    machine.update(result, pairs_of(args))
    return result


def make_complex(machine, args):
    expect(len(args) == 2 and all(type(x) is float for x in args), "two floats", args)
    return complex(*args)


def make_bytearray(machine, args):
    """bytearray(b'...'), or bytearray('...', 'latin-1') as Python 2 protocols write it; never bytearray(length)."""
    if not args:
        return bytearray()
    if isinstance(args[0], str):
        expect(len(args) == 2 and args[1] in ("latin-1", "latin1"), "text in latin-1", args)
        machine.spend(len(args[0]))
        return bytearray(args[0].encode("latin-1"))
    expect(len(args) == 1 and isinstance(args[0], (bytes, bytearray)), "bytes", args)
    machine.spend(len(args[0]))
    return bytearray(args[0])


def make_bytes(machine, args):
    if not args:
        return b""
    expect(len(args) == 1 and isinstance(args[0], (bytes, bytearray)), "bytes", args)
    machine.spend(len(args[0]))
    return bytes(args[0])


def encode(machine, args):
    """_codecs.encode(text, 'latin1'): how protocol 2 spells bytes. No other codec is ever written, or run."""
    expect(
        len(args) == 2 and isinstance(args[0], str) and args[1] in ("latin1", "latin-1"),
        "text in latin1",
        args,
    )
    machine.spend(len(args[0]))
    return args[0].encode("latin-1")


def ints_or_none(args):
    expect(all(a is None or type(a) is int for a in args), "ints", args)
    return args


def make_slice(machine, args):
    expect(1 <= len(args) <= 3, "a slice's three members", args)
    return slice(*ints_or_none(args))


def make_range(machine, args):
    expect(1 <= len(args) <= 3 and all(type(a) is int for a in args), "a range's ints", args)
    return range(*args)


def plain(cls, types_):
    """A row for a class of the standard library whose constructor takes plain values of the given types."""

    def make(machine, args):
        expect(all(isinstance(a, types_) for a in args), f"arguments for {cls.__name__}", args)
        machine.spend(sum(len(a) for a in args if isinstance(a, str)))
        return cls(*args)

    return Known(make, cls)


def temporal(cls):
    """datetime's classes are pickled as packed bytes, which Python 2 wrote as str."""

    def make(machine, args):
        if any(isinstance(a, Opaque) for a in args):  # a time zone of a class that is not known
            return Opaque(f"datetime.{cls.__name__}", args)
        expect(
            args and all(isinstance(a, (bytes, str, int, datetime.tzinfo)) for a in args),
            "a date or time",
            args,
        )
        packed = args[0].encode("latin-1") if isinstance(args[0], str) else args[0]
        return cls(packed, *args[1:])

    return Known(make, cls)


def path(cls):
    """A path; one of a foreign system comes out as its pure twin."""

    def make(machine, args):
        expect(all(isinstance(a, str) for a in args), "path parts", args)
        machine.spend(len(args) + sum(map(len, args)))
        try:
            return cls(*args)
        except NotImplementedError:  # PosixPath on Windows and the other way round
            return (
                pathlib.PureWindowsPath
                if issubclass(cls, pathlib.PureWindowsPath)
                else pathlib.PurePosixPath
            )(*args)

    return Known(make, cls)


def fraction(machine, args):
    """Fraction(1, 3), or Fraction('1/3') up to Python 3.10; text like '1e999999999' would take gigabytes."""
    text = args[0] if args and isinstance(args[0], str) else "0"
    expect(1 <= len(args) <= 2 and FRACTION.fullmatch(text), "a fraction like '1/3'", args)
    expect(all(type(a) is int or a is text for a in args), "a fraction's ints", args)
    return fractions.Fraction(*args)


FRACTION = re.compile(r"-?[0-9]+(/[0-9]+)?")


class UuidNode(Node):
    """A uuid.UUID, which comes as an empty object and a state {'int': number}."""

    __slots__ = ("value",)

    def __init__(self):
        super().__init__()
        self.value = None

    def set_state(self, machine, state):
        expect(
            isinstance(state, dict) and type(state.get("int")) is int,
            "a UUID's state {'int': ...}",
            state,
        )
        self.value = uuid.UUID(int=state["int"])

    def build(self, bridge):
        expect(self.value is not None, "a UUID's state", self.value)
        return self.value

    def __repr__(self):
        return f"<uuid {self.value}>"


def make_uuid(machine, args):
    expect(not args, "no arguments for a UUID", args)
    return UuidNode()


def namespace(cls):
    def make(machine, args):
        expect(not args, f"no arguments for {cls.__name__}", args)
        return cls()

    return Known(make, cls)


def reconstructor(machine, args):
    """copyreg._reconstructor(cls, base, state): how protocols 0 and 1 make an object of a class."""
    cls, _base, state = args
    if getattr(cls, "known", None) is None:
        return Opaque(
            getattr(cls, "qualname", short(cls)), () if state is None else (state,), new=True
        )
    return machine.call(cls, () if state is None else (state,))


def newobj(machine, args):
    """copyreg.__newobj__(cls, *args): the same under protocol 2 and up, spelled as a call."""
    return machine.call(args[0], tuple(args[1:]))


def python_rows():
    for module in ("builtins", "__builtin__"):
        yield f"{module} set", Known(make_set, set)
        yield f"{module} frozenset", Known(make_frozenset, frozenset)
        yield f"{module} complex", Known(make_complex, complex)
        yield f"{module} bytearray", Known(make_bytearray, bytearray)
        yield f"{module} bytes", Known(make_bytes, bytes)
        yield f"{module} slice", Known(make_slice, slice)
        yield f"{module} list", Known(make_list, list)
        yield f"{module} tuple", Known(make_tuple, tuple)
        yield f"{module} dict", Known(make_dict, dict)
        for cls in (int, float, bool, str, object):
            yield f"{module} {cls.__name__}", Known(None, cls)
    yield "builtins range", Known(make_range, range)
    yield "__builtin__ xrange", Known(make_range, range)
    yield "__builtin__ unicode", Known(None, str)
    yield "__builtin__ long", Known(None, int)
    yield (
        "collections OrderedDict",
        Known(ordered_dict, collections.OrderedDict, rebuild=REBUILD_ORDERED_DICT),
    )
    yield "collections Counter", Known(counter, collections.Counter)
    yield "collections defaultdict", Known(default_dict, collections.defaultdict)
    yield "collections deque", Known(deque, collections.deque)
    yield "_codecs encode", Known(encode)
    for module in ("copyreg", "copy_reg"):
        yield f"{module} _reconstructor", Known(reconstructor)
        yield f"{module} __newobj__", Known(newobj)
    for cls in (datetime.datetime, datetime.date, datetime.time):
        yield f"datetime {cls.__name__}", temporal(cls)
    yield "datetime timedelta", plain(datetime.timedelta, int)
    yield "datetime timezone", plain(datetime.timezone, (datetime.timedelta, str))
    for module in ("pathlib", "pathlib._local"):
        for cls in (
            pathlib.PosixPath,
            pathlib.WindowsPath,
            pathlib.PurePosixPath,
            pathlib.PureWindowsPath,
            pathlib.Path,
        ):
            yield f"{module} {cls.__name__}", path(cls)
    yield "decimal Decimal", plain(decimal.Decimal, str)
    yield "fractions Fraction", Known(fraction, fractions.Fraction)
    yield "uuid UUID", Known(make_uuid, uuid.UUID)
    yield "argparse Namespace", namespace(argparse.Namespace)
    yield "types SimpleNamespace", namespace(types.SimpleNamespace)
