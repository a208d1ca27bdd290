"""Calls of known functions whose arguments ask for memory or time that the bytes of the file do not justify."""

import tracemalloc

import pytest
import torch

import fastckpt
from fastckpt._unpickler import unpickle
from fastckpt.errors import CheckpointError
from picklecraft import Call, Name, Raw, craft, emit, storage, torch_file
from streamcraft import MAGIC, legacy_stream, pickled

STORAGE = b"\0\0\x80?" * 16
TENSOR = Call(
    Name("torch._utils _rebuild_tensor_v2"),
    (storage("FloatStorage", "0", 16), 0, (2, 2), (2, 1), False, {}),
)
F4 = Call(Name("numpy dtype"), ("f4", False, True), (3, "<", None, None, None, -1, -1, 0))


def doubled_dtype(levels):
    """A structured dtype whose two fields are one dtype, and so on down, all at the same place."""
    dtype = emit(F4) + b"q\x50"
    for level in range(levels):
        fields = b"}(" + emit("a") + b"h" + bytes([0x50 + level]) + emit(0) + b"\x86" + emit("b")
        fields += b"h" + bytes([0x50 + level]) + emit(0) + b"\x86u"
        state = (
            b"("
            + emit(3)
            + emit("|")
            + b"N"
            + emit(("a", "b"))
            + fields
            + emit(8)
            + emit(1)
            + emit(16)
            + b"t"
        )
        dtype += (
            b"0"
            + emit(Call(Name("numpy dtype"), ("V8", False, True)))
            + state
            + b"bq"
            + bytes([0x51 + level])
        )
    return Raw(dtype)


def dtype_of(kind):
    return Call(Name("numpy dtype"), (kind, False, True))


ARRAY = Call(Name("numpy.core.multiarray _reconstruct"), (Name("numpy ndarray"), (0,), b"b"))
GREEDY = {
    "bytearray(n)": Call(Name("builtins bytearray"), (2**31,)),
    "bytes(n)": Call(Name("builtins bytes"), (2**31,)),
    "FloatTensor(n)": Call(Name("torch FloatTensor"), (2**31,)),
    "Tensor(n)": Call(Name("torch Tensor"), (2**31,)),
    "FloatStorage(n)": Call(Name("torch FloatStorage"), (2**31,)),
    "UntypedStorage(n)": Call(Name("torch.storage UntypedStorage"), (2**31,)),
    "list of a range": Call(Name("builtins list"), (Call(Name("builtins range"), (2**31,)),)),
    "set of a range": Call(Name("builtins set"), (Call(Name("builtins range"), (2**31,)),)),
    "Counter of a range": Call(Name("collections Counter"), (Call(Name("builtins range"), (2**31,)),)),
    "Fraction of an exponent": Call(Name("fractions Fraction"), ("1e999999999",)),
    "Fraction of a dot": Call(Name("fractions Fraction"), ("1.5e-999999999",)),
    "another codec": Call(Name("_codecs encode"), ("x", "zlib")),
    "another codec of bytes": Call(Name("_codecs encode"), (b"x", "latin1")),
    "bytearray of another codec": Call(Name("builtins bytearray"), ("x", "utf-32")),
    "numpy scalar of 2 GB": Call(Name("numpy.core.multiarray scalar"), (dtype_of("V2147483647"), b"")),
    "numpy array of 2**60": Call(ARRAY.callee, ARRAY.args, (1, (2**60,), F4, False, b"")),
    "numpy array of 2**64": Call(ARRAY.callee, ARRAY.args, (1, (2**32, 2**32), F4, False, b"")),
    "numpy array of too many axes": Call(ARRAY.callee, ARRAY.args, (1, (1,) * 1000, F4, False, b"abcd")),
    "numpy array of no bytes and 2**62 rows": Call(ARRAY.callee, ARRAY.args, (1, (2**62, 2**62), dtype_of("V0"), False, b"")),
    "numpy dtype of commas": dtype_of("f4," * 1000),
    "numpy dtype of StringDType": dtype_of("T"),
    "numpy dtype of 2**40 fields": doubled_dtype(40),
    "numpy sub-array dtype of 2**40": Call(Name("numpy dtype"), ("V8", False, True), (3, "|", (F4, (2**40,)), None, None, 8, 1, 0)),
    "OrderedDict of a str": Call(Name("collections OrderedDict"), ("ab",)),
    "deque of a huge length": Call(Name("collections deque"), ([], 10**30)),
}  # fmt: skip


@pytest.mark.parametrize("call", GREEDY.values(), ids=GREEDY)
def test_greedy_arguments(call):
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            unpickle(craft(call))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_an_array_without_elements_takes_nothing():
    state = (1, (0,), dtype_of("V2147483647"), False, b"")
    tracemalloc.start()
    try:
        array = unpickle(craft(Call(ARRAY.callee, ARRAY.args, state))).obj.array
        assert (array.shape, array.dtype.itemsize) == ((0,), 2**31 - 1)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_attributes_do_not_take_the_place_of_methods_here():
    """An OrderedDict may have attributes of any name; nobody must call them."""
    names = ("items", "values", "keys", "clear", "get", "update", "copy", "pop")
    hostile = Call(Name("collections OrderedDict"), (), dict.fromkeys(names, 5))
    obj = {
        "a": hostile,
        "b": Call(
            Name("collections OrderedDict"), ([[Name("torch float32"), TENSOR]],), {"items": 1}
        ),
    }
    file = torch_file(craft(obj), STORAGE)
    loaded = fastckpt.load(file)
    assert vars(loaded["a"]) == dict.fromkeys(names, 5)
    assert list(loaded["b"]) == [torch.float32]
    with fastckpt.open(file) as checkpoint:
        assert len(checkpoint) == 1
        assert set(vars(checkpoint.tree["a"])) == set(names)
    assert "a" in fastckpt.load(file, keys="*")


# A pair that holds one pair twice, and so on down: a hundred bytes, and written out 2**60 pairs.
SHARED = Raw(b"]" + b"2\x86" * 60)
LIST = emit(SHARED) + b"\x85."


def tensor_with(**parts):
    told = {"ref": TENSOR.args[0], "offset": 0, "size": (2,), "stride": (1,)} | parts
    return torch_file(craft(Call(TENSOR.callee, (*told.values(), False, {}))), STORAGE)


MESSAGES = {
    "a tensor's size": tensor_with(size=(SHARED,)),
    "a tensor's rank": tensor_with(size=(SHARED,), stride=()),
    "a tensor's offset": tensor_with(offset=SHARED),
    "a numpy dtype": torch_file(craft(dtype_of(SHARED))),
    "a numpy dtype's state": torch_file(
        craft(Call(Name("numpy dtype"), ("f4", False, True), SHARED))
    ),
    "a numpy array's state": torch_file(craft(Call(ARRAY.callee, ARRAY.args, SHARED))),
    "a namespace": torch_file(
        craft(Call(Name("builtins set"), (Call(Name("types SimpleNamespace"), (), {"a": SHARED}),)))
    ),
    "a deque": torch_file(
        craft(Call(Name("builtins complex"), (Call(Name("collections deque"), ([SHARED],)),)))
    ),
    "the magic number": pickled(MAGIC)[:-1] + b"0" + LIST,
    "the list of storage keys": legacy_stream({}, {}, keys=None)[:-4] + b"\x80\x02" + LIST,
    "a storage key of many digits": legacy_stream({}, {}, keys=[1 << 40_000]),
}


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_are_short(message):
    with pytest.raises(CheckpointError) as raised:
        fastckpt.load(MESSAGES[message])
    assert len(str(raised.value)) < 500
