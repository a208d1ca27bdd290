"""What is dear to write out, to hash or to walk, in every place of every container: refused in few words, or loaded."""

import struct
import warnings

import pytest

import fastckpt
import streamcraft
from fastckpt.errors import LimitError
from picklecraft import Call, Name, Raw, craft, emit, storage, torch_file
from smallfiles import FLOATS, REFUSED, outcome, zip_tensor
from streamcraft import pickled, tar_checkpoint


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a device may be missing
        yield


def load(data):
    return fastckpt.load(data, map_location="cpu")


DOUBLED = Raw(b"K\x01" + b"2\x86" * 200)  # a tuple of twice the tuple below it, 200 levels deep
DEEP = Raw(b"]" * 10_000 + b"a" * 9_999)
CLASS = b"c__main__\nX\n)\x81"
OWN_STATE = Raw(CLASS + b"q\xf0h\xf0b")
CHAIN = Raw(CLASS + (b"q\xf0" + CLASS + b"h\xf0b") * 600)
DEAR = {
    "an object whose state is itself": OWN_STATE,
    "600 objects, each the state of the next": CHAIN,
    "2**200 members": DOUBLED,
    "10,000 levels": DEEP,
    "10**5000": 10**5000,
    "-10**5000": -(10**5000),
}


def pickle_of(value):
    return b"\x80\x02" + emit(value) + b"."


def in_stream(index, value):
    """A legacy stream one of whose pickles is another one."""
    parts = [pickled(part) for part in (streamcraft.MAGIC, 1001, streamcraft.SYS_INFO, {}, [])]
    parts[index] = pickle_of(value)
    return b"".join(parts)


def in_tar(value, **members):
    """A tar with members that are made by functions of the pickle of a value."""
    content = {name: make(pickle_of(value)) for name, make in members.items()}
    return tar_checkpoint([], [], [], members=content)


PLACES = {
    "the magic number": lambda value: in_stream(0, value),
    "the version": lambda value: in_stream(1, value),
    "the system's info": lambda value: in_stream(2, value),
    "the keys": lambda value: in_stream(4, value),
    "a key": lambda value: in_stream(4, [value]),
    "the number of tensors": lambda value: in_tar(value, tensors=lambda data: data),
    "the number of storages": lambda value: in_tar(value, storages=lambda data: data),
    "a tensor of a tar": lambda value: in_tar(value, tensors=lambda data: pickled(1) + data),
    "a storage of a tar": lambda value: in_tar(value, storages=lambda data: pickled(1) + data),
    "the views of a tar": lambda value: in_tar(value, storages=lambda data: pickled(0) + data),
    "a view of a tar": lambda value: in_tar([value], storages=lambda data: pickled(0) + data),
    "a key of a view": lambda value: in_tar([(value, 1, 1, 1)], storages=lambda data: pickled(0) + data),
    "a key of a tensor": lambda value: in_tar((value, value, None), tensors=lambda data: pickled(1) + data + bytes(99)),
    "a location of a tar": lambda value: in_tar(
        (1, value, Name("torch FloatStorage")), storages=lambda data: pickled(1) + data + struct.pack("<q", 0) + pickled([])
    ),
    "a key of a tar": lambda value: in_tar(
        (value, "cpu", Name("torch FloatStorage")), storages=lambda data: pickled(1) + data + bytes(8) + pickled([])
    ),
    "an id of a tar": lambda value: in_tar(value, pickle=lambda data: data[:-1] + b"Q."),
    **{
        f"member {i} of an id": lambda value, i=i: torch_file(craft([Raw(
            emit(tuple(value if i == j else part for j, part in enumerate(
                ("storage", Name("torch FloatStorage"), "0", "cpu", 2)))) + b"Q")]), FLOATS)
        for i in range(5)
    },
    **{
        f"argument {i} of a tensor": lambda value, i=i: torch_file(craft([Call(
            Name("torch._utils _rebuild_tensor_v2"), tuple(value if i == j else part for j, part in enumerate(
                (storage("FloatStorage", "0", 2), 0, (2,), (1,), False, {}))))]), FLOATS)
        for i in range(6)
    },
    "a size": lambda value: torch_file(craft([zip_tensor("FloatStorage", 2, size=(value,))]), FLOATS),
    "a size too many": lambda value: torch_file(craft([zip_tensor("FloatStorage", 2, size=(2, value))]), FLOATS),
    "a stride": lambda value: torch_file(craft([zip_tensor("FloatStorage", 2, stride=(value,))]), FLOATS),
    "a device": lambda value: torch_file(craft([Call(Name("torch device"), (value,))])),
    "a device's number": lambda value: torch_file(craft([Call(Name("torch device"), ("cpu", value))])),
    "a Size": lambda value: torch_file(craft([Call(Name("torch Size"), ([value],))])),
    "the name of a class": lambda value: torch_file(craft([Raw(emit(value) + emit("a") + b"\x93")])),
    "what is called": lambda value: torch_file(craft([Raw(emit(value) + b")R")])),
    "arguments": lambda value: torch_file(craft([Raw(emit(Name("torch Size")) + emit(value) + b"R")])),
    "a state": lambda value: torch_file(craft([Call(Name("collections OrderedDict"), (), value)])),
    "an attribute's name": lambda value: torch_file(craft([Call(Name("collections OrderedDict"), (), Raw(b"}" + emit(value) + b"Ns"))])),
    "a key of a dict": lambda value: torch_file(craft([Raw(b"}" + emit(value) + b"Ns")])),
    "a NumPy dtype": lambda value: torch_file(craft([Call(Name("numpy dtype"), (value, False, True))])),
    "a NumPy dtype's state": lambda value: torch_file(craft([Call(Name("numpy dtype"), ("f4", False, True), value)])),
    "a NumPy array's state": lambda value: torch_file(craft([Call(
        Name("numpy.core.multiarray _reconstruct"), (Name("numpy ndarray"), (0,), b"b"), (1, value, value, value, value))])),
}  # fmt: skip
HARMLESS = ("a location of a tar", "the system's info", "argument 5 of a tensor", "a key of a dict")


@pytest.mark.parametrize("value", DEAR.values(), ids=DEAR)
@pytest.mark.parametrize("place", PLACES)
def test_dear_values(place, value):
    """Refused in few words, whatever it would take to write them out."""
    data = PLACES[place](value)
    loaded = outcome(load, data)
    assert loaded is REFUSED or place in HARMLESS
    outcome(lambda data: str(fastckpt.open(data).info), data)


SHARED = b"]" + emit(zip_tensor("FloatStorage", 2)) + b"a" + b"q\x010]h\x01ah\x01a" * 200
WALKS = {
    "load": load,
    "load some": lambda data: fastckpt.load(data, keys="x*"),
    "load all by name": lambda data: fastckpt.load(data, keys="*"),
    "names": lambda data: list(fastckpt.open(data)),
    "tensors": lambda data: fastckpt.open(data).read(),
    "the tree": lambda data: fastckpt.open(data).tree,
    "the info": lambda data: str(fastckpt.open(data).info),
}


@pytest.mark.parametrize("walk", WALKS.values(), ids=WALKS)
def test_lists_that_share(walk):
    """2**200 paths lead to one tensor: it is loaded, and names are refused or few."""
    loaded = outcome(walk, torch_file(SHARED + b".", FLOATS))
    if walk is load:
        while isinstance(loaded, list):
            loaded = loaded[-1]
        assert loaded.tolist() == [1, 2]
    else:
        assert loaded is REFUSED or len(loaded) < 100_000


NESTED = {
    "lists": b"]" * 10_000 + emit(zip_tensor("FloatStorage", 2)) + b"a" * 10_000,
    "tuples": emit(zip_tensor("FloatStorage", 2)) + b"\x85" * 10_000,
    "dicts": b"}X\1\0\0\0a" * 10_000 + emit(zip_tensor("FloatStorage", 2)) + b"s" * 10_000,
    "marks": b"(" * 10_000 + emit(zip_tensor("FloatStorage", 2)) + b"t" * 10_000,
    "OrderedDicts": (b"ccollections\nOrderedDict\n)RX\1\0\0\0a") * 10_000
    + emit(zip_tensor("FloatStorage", 2)) + b"s" * 10_000,
}  # fmt: skip


@pytest.mark.parametrize("data", NESTED.values(), ids=NESTED)
def test_ten_thousand_levels(data):
    loaded = load(torch_file(data + b".", FLOATS))
    for _ in range(10_000):
        loaded = loaded["a"] if isinstance(loaded, dict) else loaded[0]
    assert loaded.tolist() == [1, 2]
    with fastckpt.open(torch_file(data + b".", FLOATS)) as ckpt:
        (name,) = ckpt
        assert name.count(".") == 9_999
        assert ckpt[name].read().tolist() == [1, 2]
    with pytest.raises(LimitError, match="too deep for keys="):
        fastckpt.load(torch_file(data + b".", FLOATS), keys="*")
