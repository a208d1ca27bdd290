"""The pickle machine on bad pickles: each is refused with an error of ours, in time, in memory, and whatever it is."""

import pickle
import pickletools
import random
import struct
import sys
import tracemalloc
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastckpt import _unpickler
from fastckpt._tree import substitute
from fastckpt._unpickler import Truncated, unpickle
from fastckpt.errors import (
    CheckpointError,
    FormatError,
    LimitError,
    UnsafePickleError,
    UnsupportedError,
)
from fastckpt.limits import Limits
from fastckpt.numpy_bridge import NumpyBridge
from picklecraft import Call, Name, Pid, craft, emit, storage

EXTENSIONS = {"EXT1": b"\x82\x01", "EXT2": b"\x83\x01\x02", "EXT4": b"\x84\x01\x02\x03\x04"}
BUFFERS = {"NEXT_BUFFER": b"\x97", "READONLY_BUFFER": b"N\x98"}


@pytest.mark.parametrize("data", EXTENSIONS.values(), ids=EXTENSIONS)
def test_extension_registry(data):
    with pytest.raises(UnsafePickleError, match="extension registry") as caught:
        unpickle(data + b".")
    assert caught.value.qualname.startswith("copyreg extension ")


@pytest.mark.parametrize("data", BUFFERS.values(), ids=BUFFERS)
def test_buffers_that_are_elsewhere(data):
    with pytest.raises(UnsupportedError, match="out-of-band buffers"):
        unpickle(data + b".")


def test_out_of_band_pickle():
    data = pickle.dumps(pickle.PickleBuffer(b"abc"), 5, buffer_callback=[].append)
    with pytest.raises(UnsupportedError, match="out-of-band buffers"):
        unpickle(data)


@pytest.mark.parametrize("protocol", [6, 255])
def test_protocols_of_the_future(protocol):
    with pytest.raises(UnsupportedError, match=f"pickle protocol {protocol}"):
        unpickle(bytes([0x80, protocol]) + b"N.")


# -- every opcode where it cannot work -----------------------------------------------------------------------------

KNOWN = {ord(op.code): op for op in pickletools.opcodes}
PUSHES = "( ) } ] N \x88 \x89 \x8f".split()  # opcodes that need nothing


@pytest.mark.parametrize("code", range(256))
def test_every_byte_with_nothing_before_it(code):
    """No argument, no stack: refused, or pushes something."""
    with pytest.raises(CheckpointError) as caught:
        unpickle(bytes([code]))
    assert type(caught.value) in (FormatError, Truncated, UnsupportedError, UnsafePickleError)
    if code not in KNOWN:
        assert f"byte {code:#04x} is not a pickle opcode" in str(caught.value)
    assert caught.value.offset in (0, 1)


@pytest.mark.parametrize("before", [b"", b"(", b"N", b"(N", b"N(", b"]N", b"}(", b")(N"], ids=repr)
@pytest.mark.parametrize("after", [b".", b"t.", b"0."], ids=repr)
def test_every_byte_on_short_stacks(before, after):
    argument = b"\x01\x00\x00\x00\x00\x00\x00\x00a\n"
    for code in range(256):
        for arguments in (b"", b"0\n", b"a\nb\n", b"'a'\n", argument):
            try:
                unpickle(before + bytes([code]) + arguments + after)
            except CheckpointError:
                pass


MISFITS = {
    "TUPLE without a MARK": (b"Nt.", "needs a MARK"),
    "LIST without a MARK": (b"Nl.", "needs a MARK"),
    "POP_MARK without a MARK": (b"N1.", "needs a MARK"),
    "POP of nothing": (b"0.", "needs a MARK"),
    "TUPLE2 of one": (b"N\x86.", "stack is empty"),
    "TUPLE2 over a MARK": (b"N(N\x86.", "stack is empty"),
    "STOP of nothing": (b".", "stack is empty"),
    "STOP over a MARK": (b"N(.", "stack is empty"),
    "DUP of nothing": (b"2.", "stack is empty"),
    "DUP over a MARK": (b"N(2.", "stack is empty"),
    "PUT of nothing": (b"q\x00.", "stack is empty"),
    "MEMOIZE of nothing": (b"\x94.", "stack is empty"),
    "MEMOIZE over a MARK": (b"N(\x94.", "stack is empty"),
    "GET of nothing": (b"h\x00.", "memo entry 0 is fetched and was never stored"),
    "GET far": (b"j\xff\xff\xff\xff.", "memo entry 4294967295"),
    "GET negative": (b"g-1\n.", "memo index -1 is out of range"),
    "PUT negative": (b"Np-1\n.", "memo index -1 is out of range"),
    "PUT beyond 64 bits": (b"Np99999999999999999999\n.", "out of range"),
    "PUT of no number": (b"Npx\n.", "not a decimal int"),
    "SETITEMS odd": (b"}(Nu.", "key that has no value"),
    "DICT odd": (b"(Nd.", "key that has no value"),
    "SETITEM onto a list": (b"]NNs.", "an item is set in <list of nothing>"),
    "SETITEM onto None": (b"NNNs.", "an item is set in None"),
    "SETITEMS under a MARK": (b"}((NNu.", "stack is empty"),
    "SETITEM over a MARK": (b"}N(Ns.", "stack is empty"),
    "APPEND onto a tuple": (b")Na.", "an item is appended to <tuple of nothing>"),
    "APPENDS onto a tuple": (b")(Ne.", "an item is appended to"),
    "APPEND onto a set": (b"\x8fNa.", "an item is appended to"),
    "APPENDS onto a str": (b"X\0\0\0\0(Ne.", "an item is appended to ''"),
    "ADDITEMS onto a list": (b"](N\x90.", "a member is added to"),
    "ADDITEMS onto a frozenset": (b"(\x91(N\x90.", "a member is added to"),
    "BUILD on a list": (b"]}b.", "a state is given to"),
    "BUILD on a dict": (b"}}b.", "a state is given to"),
    "BUILD on None": (b"N}b.", "a state is given to None"),
    "BUILD on a name": (b"cos\nsystem\n}b.", "a state is given to <name os.system>"),
    "BUILD on a slice": (craft(Call(Name("builtins slice"), (1,), {})), "a state is given to"),
    "BUILD with no dict": (b"ccollections\nOrderedDict\n)RNb.", "the state of a OrderedDict is None"),
    "BUILD with odd names": (b"ccollections\nOrderedDict\n)R}NNsb.", "a name is None"),
    "REDUCE of None": (b"N)R.", "None is called"),
    "REDUCE of a str": (b"X\x02\0\0\0os)R.", "'os' is called"),
    "REDUCE without a tuple": (b"cos\nsystem\n]R.", "the arguments of a call are"),
    "NEWOBJ of None": (b"N)\x81.", "None is called"),
    "NEWOBJ without a tuple": (b"cos\nsystem\nN\x81.", "the arguments of a new object"),
    "NEWOBJ_EX without a dict": (b"cos\nsystem\n)N\x92.", "the arguments of a new object"),
    "NEWOBJ_EX of a known class": (b"cbuiltins\nset\n)}X\x01\0\0\0aNs\x92.", "with keyword arguments"),
    "OBJ of nothing": (b"(o.", "without a class"),
    "OBJ of None": (b"(No.", "None is called"),
    "STACK_GLOBAL of bytes": (b"C\x01aC\x01b\x93.", "two strings are expected"),
    "STACK_GLOBAL of one": (b"X\x01\0\0\0a\x93.", "stack is empty"),
    "GLOBAL that is no text": (b"c\xff\nx\n.", "is not UTF-8"),
    "INT that is none": (b"Ix\n.", "not a decimal int"),
    "LONG of nothing": (b"L\n.", "not a decimal int"),
    "FLOAT that is none": (b"Fx\n.", "is not a float"),
    "STRING without quotes": (b"Sabc\n.", "is not quoted"),
    "STRING of one quote": (b"S'\n.", "is not quoted"),
    "STRING with two kinds of quotes": (b"S'a\"\n.", "is not quoted"),
    "STRING that ends in a backslash": (b"S'\\'\n.", "ValueError"),
    "UNICODE with half an escape": (b"V\\u12\n.", "UnicodeDecodeError"),
    "BINUNICODE that is none": (b"X\x01\0\0\0\xff.", "UnicodeDecodeError"),
    "LONG4 of negative length": (b"\x8b\xff\xff\xff\xff.", "an int of negative length"),
    "an unhashable key": (b"}]Ns.", "unhashable"),
    "an unhashable member": (b"\x8f(]\x90.", "unhashable"),
    "a persistent id": (craft(storage("FloatStorage", "0", 1)), "a persistent id where none can be"),
    "a persistent id in text": (b"P0\n.", "a persistent id where none can be"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS.values(), ids=MISFITS)
def test_misfit(case):
    data, message = case
    with pytest.raises(FormatError, match=r"^pickle at byte [0-9]+: ") as caught:
        unpickle(data)
    assert message in str(caught.value)
    assert not isinstance(caught.value, Truncated)


LENGTHS = {
    "BINUNICODE": b"X\xff\xff\xff\xff",
    "BINUNICODE8": b"\x8d" + b"\xff" * 8,
    "BINUNICODE8 of 2**63": b"\x8d" + struct.pack("<Q", 2**63),
    "BINBYTES": b"B\xff\xff\xff\xff",
    "BINBYTES8": b"\x8e" + b"\xff" * 8,
    "BYTEARRAY8": b"\x96" + struct.pack("<Q", 2**40),
    "BINSTRING": b"T\xff\xff\xff\xff",
    "SHORT_BINSTRING": b"U\xff",
    "LONG1": b"\x8a\xff",
    "LONG4": b"\x8b\xff\xff\xff\x7f",
    "FRAME": b"\x95" + b"\xff" * 8,
    "FRAME longer than the rest by one": b"\x95\x03\0\0\0\0\0\0\0",
    "INT without a newline": b"I12",
    "GLOBAL without a second line": b"cos\nsystem",
    "nothing": b"",
}


@pytest.mark.parametrize("data", LENGTHS.values(), ids=LENGTHS)
def test_lengths_beyond_the_bytes(data):
    tracemalloc.start()
    try:
        with pytest.raises(Truncated, match="cut short"):
            unpickle(data + b"N." * (data != b"" and data[:1] not in b"Ic"))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


class Thing:
    def __init__(self):
        self.state = {"a": (1, 2.5, "x", b"y", {3}, frozenset({4}))}


PREFIXED = {
    f"protocol {p}": pickle.dumps(
        [Thing(), 2**70, -1, 300, 70000, "ä", 1j, bytearray(b"z"), {None: True}], p
    )
    for p in range(6)
}


@pytest.mark.parametrize("data", PREFIXED.values(), ids=PREFIXED)
def test_every_prefix_is_cut_short(data):
    for n in range(len(data)):
        with pytest.raises(Truncated):
            unpickle(data[:n])


@pytest.mark.parametrize("data", PREFIXED.values(), ids=PREFIXED)
def test_every_byte_changed(data):
    """Nothing but errors of ours, or some other object."""
    rng = random.Random(7)
    for at in range(len(data)):
        for byte in (data[at] ^ 1 << rng.randrange(8), rng.randrange(256), 0, 255):
            damaged = data[:at] + bytes([byte]) + data[at + 1 :]
            try:
                inert = unpickle(damaged).obj
                substitute(inert, NumpyBridge({}, unknown="opaque"), [])
            except CheckpointError:
                pass


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([
    b"(", b"t", b"0", b"1", b"2", b"N", b"]", b"}", b")", b"e", b"a", b"u", b"s", b"b", b"R", b"\x81", b"\x92", b"o", b"l", b"d",
    b"q\x00", b"h\x00", b"q\x01", b"h\x01", b"\x94", b"p900\n", b"g900\n", b"\x8f", b"\x90", b"\x91", b"\x85", b"\x86", b"\x87",
    b"K\x05", b"X\x01\0\0\0a", b"cx\nY\n", b"ccollections\nOrderedDict\n", b"cbuiltins\nset\n", b"cuuid\nUUID\n", b"Q",
    b"ccopyreg\n_reconstructor\n", b"cnumpy\ndtype\n", b"\x93", b"ix\ny\n",
]), max_size=60))  # fmt: skip
def test_opcodes_in_any_order(opcodes):
    for pids in (_unpickler.PIDS_NONE, _unpickler.PIDS_ZIP, _unpickler.PIDS_LEGACY):
        try:
            inert = unpickle(b"".join(opcodes) + b".", pids=pids).obj
            substitute(inert, NumpyBridge({}, unknown="opaque"), [])
        except CheckpointError:
            pass


def test_warnings_that_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(FormatError, match="invalid escape"):
            unpickle(b"S'\\q'\n.")


# -- work out of proportion ----------------------------------------------------------------------------------------

DOUBLED = b"K\x01" + b"2\x86" * 200  # a tuple of twice the tuple below it, 200 levels deep
SET = emit(Name("builtins set"))
MODULUS = sys.hash_info.modulus  # its multiples have the hash 0
BOMBS = {
    "SETITEM": b"}" + DOUBLED + b"Ns",
    "SETITEMS": b"}(" + DOUBLED + b"Nu",
    "DICT": b"(" + DOUBLED + b"Nd",
    "ADDITEMS": b"\x8f(" + DOUBLED + b"\x90",
    "FROZENSET": b"(" + DOUBLED + b"\x91",
    "FROZENSET of frozensets": b"(K\x01\x91" + b"\x85)\x86" * 3 + b"(" + DOUBLED + b"\x91",
    "set()": SET + b"]" + DOUBLED + b"a\x85R",
    "frozenset()": emit(Name("builtins frozenset")) + b"]" + DOUBLED + b"a\x85R",
    "dict()": emit(Name("builtins dict")) + b"](" + DOUBLED + b"Nta\x85R",
    "OrderedDict()": emit(Name("collections OrderedDict")) + b"](" + DOUBLED + b"Nta\x85R",
    "OrderedDict SETITEM": emit(Name("collections OrderedDict")) + b")R" + DOUBLED + b"Ns",
    "Counter of a dict": emit(Name("collections Counter")) + b"(" + DOUBLED + b"K\x01d\x85R",
    "Counter of items": emit(Name("collections Counter")) + b"]" + DOUBLED + b"a\x85R",
    "Counter SETITEM": emit(Name("collections Counter")) + b")R" + DOUBLED + b"Ns",
    "defaultdict SETITEM": emit(Name("collections defaultdict")) + b")R" + DOUBLED + b"Ns",
    "opaque SETITEM": b"cx\nY\n)R" + DOUBLED + b"Ns",
    "a wide key, hashed again and again": b"(" + b"N" * 3000 + b"tq\x00" + b"0}" + b"h\x00Ns" * 1000,
    "ints of one hash": b"}(" + b"".join(emit(i * MODULUS) + b"N" for i in range(1, 1000)) + b"u",
    "members of one hash": b"\x8f(" + b"".join(emit(i * MODULUS) for i in range(1, 1000)) + b"\x90",
    "tuples of one hash": b"}(" + b"".join(emit((i * MODULUS, "a")) + b"N" for i in range(1, 1000)) + b"u",
    "frozensets of one hash": b"}(" + b"".join(emit(frozenset([i * MODULUS])) + b"N" for i in range(1, 1000)) + b"u",
    "complex numbers of one hash": b"}("
    + b"".join(emit(Call(Name("builtins complex"), (-1000003.0 * i, float(i)))) + b"N" for i in range(1, 1000)) + b"u",
    "one dict each": b"(" + b"".join(b"}" + emit(i * MODULUS) + b"Ns" for i in range(1, 1000)) + b"t",
    "an int of 1 MB, hashed again and again": b"}" + emit(1 << 8_000_000) + b"q\x000" + b"h\x00Ns" * 100_000,
    "two equal texts of 1 MB": emit("a" * 1_000_000) + b"q\x000" + emit("a" * 1_000_000) + b"q\x010" + b"}h\x00Ns"
    + b"h\x01Ns" * 100_000,
    "deep keys": b"}" + b")" + b"\x85" * 100_000 + b"Ns",
    "deep frozensets": b"(\x91" * 1 + b"".join([b"q\x000(h\x00\x91"] * 2000),
}  # fmt: skip


@pytest.mark.parametrize("data", BOMBS.values(), ids=BOMBS)
def test_hashing_is_bounded(data):
    with pytest.raises(LimitError, match=r"Limits\.key_(items|depth|collisions)"):
        unpickle(data + b".")


def test_honest_keys_are_far_from_the_bound():
    keys = {(i, ("layer", i)): (i, i) for i in range(50_000)}
    assert unpickle(pickle.dumps(keys, 4)).obj == keys
    with pytest.raises(LimitError):
        unpickle(pickle.dumps(keys, 4), limits=Limits(key_items=1000))


def test_honest_keys_of_one_hash():
    """hash(-1) is hash(-2), in tuples too; and the same keys may stand in any number of dicts."""
    around = range(-3, 3)
    keys = {(x, y, z, w): None for x in around for y in around for z in around for w in around}
    data = pickle.dumps([[dict(keys) for _ in range(20)], {i * MODULUS: i for i in range(200)}], 4)
    assert unpickle(data).obj == pickle.loads(data)
    with pytest.raises(LimitError, match="more than 10 different keys"):
        unpickle(data, limits=Limits(key_collisions=10))


def test_keys_that_are_made_later_are_bounded():
    """In the file these are objects, each with a hash of its own."""
    sizes = [
        Call(Name("torch Size"), ([n & 3 for n in (i, i >> 2, i >> 4, i >> 6, i >> 8)],))
        for i in range(1024)
    ]
    for size in sizes:
        size.args = ([MODULUS * n for n in size.args[0]],)
    members = b"".join(emit(size) + b"N" for size in sizes)
    for data in (b"}(" + members + b"u", b"\x8f(" + members + b"\x90", b"(" + members + b"\x91"):
        inert = unpickle(data + b".").obj
        with pytest.raises(LimitError, match=r"Limits\.key_collisions"):
            substitute(inert, NumpyBridge({}, unknown="opaque"), [])


@pytest.mark.parametrize("name", ["n" * 70_000, "a.b"])
def test_names_have_a_length(name):
    call = b"X" + struct.pack("<I", len(name)) + name.encode() + b"X\1\0\0\0C\x93."
    pid = craft(Pid(("storage", Name("torch FloatStorage"), name, "cpu", 1)))
    if len(name) < 100:
        assert unpickle(call).obj.module == name
        assert len(unpickle(pid, pids=_unpickler.PIDS_ZIP).storages) == 1
        return
    with pytest.raises(FormatError, match="more than 65535 characters"):
        unpickle(call)
    with pytest.raises(FormatError, match="more than 65535 characters"):
        unpickle(pid, pids=_unpickler.PIDS_ZIP)


WIDE = 20_000


def again(callee, args, times=WIDE):
    """The same call of the same arguments, over and over: a few bytes each."""
    return emit(Name(callee)) + b"q\x000" + emit(args) + b"q\x010(" + b"h\x00h\x01R" * times + b"t."


COPIES = {
    "list": again("builtins list", ([None] * WIDE,)),
    "tuple": again("builtins tuple", ([None] * WIDE,)),
    "set": again("builtins set", (list(range(WIDE)),)),
    "frozenset": again("builtins frozenset", (list(range(WIDE)),)),
    "dict": again("builtins dict", ([(i, i) for i in range(WIDE)],)),
    "OrderedDict": again("collections OrderedDict", ([(i, i) for i in range(WIDE)],)),
    "Counter": again("collections Counter", ({i: i for i in range(WIDE)},)),
    "Counter of text": again("collections Counter", ("a" * WIDE,)),
    "deque": again("collections deque", ([None] * WIDE,)),
    "bytes": again("builtins bytes", (b"a" * WIDE,)),
    "bytearray": again("builtins bytearray", (b"a" * WIDE,)),
    "bytearray of text": again("builtins bytearray", ("a" * WIDE, "latin-1")),
    "encode": again("_codecs encode", ("a" * WIDE, "latin1")),
    "Size": again("torch Size", ([1] * WIDE,)),
    "Decimal": again("decimal Decimal", ("1" * WIDE,)),
    "path": again("pathlib PurePosixPath", ("a/" * WIDE,)),
    "path of many parts": again("pathlib PurePosixPath", ("",) * WIDE),
    "meta tensor": again("torch._utils _rebuild_meta_tensor_no_storage", (Name("torch int8"), (0,) * WIDE, (0,) * WIDE, False)),
    "dense tensor": again("torch._utils _rebuild_tensor", (storage("ByteStorage", "0", 1), 0, [1] * WIDE, [1] * WIDE)),
    "quantized tensor": again(
        "torch._utils _rebuild_qtensor",
        (storage("QInt8Storage", "0", 1), 0, (WIDE,), (0,), (Name("torch per_channel_affine"), [1.0] * WIDE, [0] * WIDE, 0), False, None),
    ),
    "numpy scalar": again(
        "numpy.core.multiarray scalar", (Call(Name("numpy dtype"), (f"V{WIDE}", False, True)), b"a" * WIDE)
    ),
    "numpy array": again(
        "numpy.core.numeric _frombuffer", (b"a" * WIDE, Call(Name("numpy dtype"), ("u1", False, True)), (WIDE,), "C")
    ),
    "numpy state": emit(Name("numpy.core.multiarray _reconstruct")) + b"q\x000" + emit((Name("numpy ndarray"), (0,), b"b"))
    + b"q\x010" + emit((1, (WIDE,), Call(Name("numpy dtype"), ("u1", False, True)), False, b"a" * WIDE))
    + b"q\x020(" + b"h\x00h\x01Rh\x02b" * WIDE + b"t.",
    "attributes": emit(Name("types SimpleNamespace")) + b"q\x000" + emit({str(i): i for i in range(WIDE)})
    + b"q\x010(" + b"h\x00)Rh\x01b" * WIDE + b"t.",
}  # fmt: skip


@pytest.mark.parametrize("data", COPIES.values(), ids=COPIES)
def test_copies_are_bounded(data):
    """A file of n bytes does not make n**2 of memory."""
    tracemalloc.start()
    try:
        with pytest.raises(LimitError, match="over and over"):
            unpickle(data, pids=_unpickler.PIDS_ZIP)
        assert tracemalloc.get_traced_memory()[1] < 800 * len(data)
    finally:
        tracemalloc.stop()


def test_numbers_of_thousands_of_digits():
    digits = b"1" * 5000
    for data in (
        b"I" + digits + b"\n.",
        b"L" + digits + b"L\n.",
        b"p" + digits + b"\n.",
        b"g" + digits + b"\n.",
    ):
        with pytest.raises(LimitError, match="5000 digits"):
            unpickle(data)
    assert unpickle(b"L" + b"1" * 4300 + b"L\n.").obj == int("1" * 4300)
    assert unpickle(pickle.dumps(10**5000, 2)).obj == 10**5000
    assert unpickle(b"F1e" + digits + b"\n.").obj == float("inf")


@pytest.mark.parametrize("pid", [
    (), ("storage",), ("module", 1, 2, 3), ("other", 1, 2, 3, 4), 5, "5", None, ["storage", 1, 2, 3, 4],
    ("storage", Name("torch FloatStorage"), "0", "cpu"), ("storage", Name("torch FloatStorage"), "0", "cpu", 1, None),
    ("storage", Name("torch FloatStorage"), "0", "cpu", -1), ("storage", Name("torch FloatStorage"), "0", "cpu", 2**62),
    ("storage", Name("torch FloatStorage"), "0", "cpu", 10**4000), ("storage", Name("torch FloatStorage"), "0", "cpu", True),
    ("storage", Name("torch FloatStorage"), "0", "cpu", 1.0), ("storage", Name("torch FloatStorage"), None, "cpu", 1),
    ("storage", Name("torch FloatStorage"), "0", None, 1), ("storage", Name("torch FloatTensor"), "0", "cpu", 1),
    ("storage", Name("torch.storage TypedStorage"), "0", "cpu", 1), ("storage", Name("os system"), "0", "cpu", 1),
    ("storage", "FloatStorage", "0", "cpu", 1), ("storage", Name("torch UntypedStorage"), "0", "cpu", 1),
], ids=lambda pid: str(pid)[:60])  # fmt: skip
def test_bad_persistent_ids(pid):
    with pytest.raises(FormatError):
        unpickle(craft(Pid(pid)), pids=_unpickler.PIDS_ZIP)


def test_ids_of_one_storage_must_agree():
    with pytest.raises(FormatError, match="4 bytes in one place of the pickle and 8 in another"):
        unpickle(
            craft([storage("FloatStorage", "0", 1), storage("FloatStorage", "0", 2)]),
            pids=_unpickler.PIDS_ZIP,
        )
    unpickled = unpickle(
        craft([storage("FloatStorage", "0", 1), storage("IntStorage", "0", 1)]),
        pids=_unpickler.PIDS_ZIP,
    )
    assert len(unpickled.storages) == 1
    assert [ref.dtype for ref in unpickled.obj] == [1, 5]


VIEWS = [
    ("v", 0, 5), ("v", 3, 2), ("v", -1, 1), ("v", 0, -1), ("v", 2**62, 2**62), ("v", 0, 2**70), ("v", True, 1),
    ("v", 0), "v", ("v", 0.0, 1), (None, 0, 1),
]  # fmt: skip


@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_bad_views_of_storages(view):
    pid = ("storage", Name("torch FloatStorage"), "0", "cpu", 4, view)
    with pytest.raises(FormatError):
        unpickle(craft(Pid(pid)), pids=_unpickler.PIDS_LEGACY)


def test_views_of_one_name_must_agree():
    pid = ("storage", Name("torch FloatStorage"), "0", "cpu", 4)
    with pytest.raises(FormatError, match="described twice"):
        unpickle(
            craft([Pid((*pid, ("v", 0, 1))), Pid((*pid, ("v", 1, 1)))]), pids=_unpickler.PIDS_LEGACY
        )
