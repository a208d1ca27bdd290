"""NumPy's arrays, scalars and dtypes out of pickles: what NumPy's own unpickling gives, to the stride."""

import pickle
import pickletools
import warnings

import numpy as np
import pytest

import fastckpt
from fastckpt._tree import substitute
from fastckpt._unpickler import unpickle
from fastckpt.errors import FormatError, LimitError, UnsafePickleError
from fastckpt.nodes import Opaque
from fastckpt.numpy_bridge import NumpyBridge
from picklecraft import Call, Name, craft, torch_file


def loads(data, **options):
    unpickled = unpickle(data, **options)
    return substitute(unpickled.obj, NumpyBridge({}, unknown="opaque"), [])


def filled(shape, dtype, order="C"):
    """An array whose bytes, those between fields too, are all different from zero."""
    dtype = np.dtype(dtype)
    array = np.zeros(shape, dtype, order=order)
    data = (np.arange(array.nbytes) % 100 + 1).astype(np.uint8)
    if dtype.kind == "b":
        data &= 1
    if dtype.kind == "U":  # letters
        data = np.tile(np.array([97, 0, 0, 0], np.uint8), array.nbytes // 4)
        data = data.view("u4").astype(dtype.byteorder.replace("|", "=") + "u4").view(np.uint8)
    if array.nbytes:
        array.reshape(-1, order=order).view(np.uint8)[:] = data
    return array


def alike(expected, actual):
    assert type(expected) is type(actual)
    if isinstance(expected, np.dtype):
        assert_same_dtype(expected, actual)
        return
    assert_same_dtype(expected.dtype, actual.dtype)
    assert expected.shape == actual.shape
    assert expected.strides == actual.strides
    if isinstance(expected, np.void):
        assert repr(expected.item()) == repr(actual.item())
    elif expected.size and expected.itemsize:
        assert memory(expected) == memory(actual)
    if isinstance(expected, np.ndarray):
        assert actual.flags.writeable
        assert actual.flags.f_contiguous == expected.flags.f_contiguous


def memory(array):
    """All bytes of it; tobytes leaves out, and makes up, those between fields."""
    order = "F" if array.flags.f_contiguous else "C"
    flat = np.asarray(array).reshape(-1, order=order).view(np.uint8)
    if array.dtype.type in (np.longdouble, np.clongdouble) and np.finfo(np.longdouble).nmant == 63:
        # Ten bytes of sixteen are the number; NumPy's own unpickling leaves anything in the others.
        flat = flat.reshape(-1, np.dtype(np.longdouble).itemsize)[:, :10]
    return flat.tobytes()


def assert_same_dtype(expected, actual):
    assert expected == actual
    assert expected.str == actual.str
    assert expected.isalignedstruct == actual.isalignedstruct
    assert expected.itemsize == actual.itemsize
    assert expected.alignment == actual.alignment
    assert expected.names == actual.names
    assert dict(expected.fields or {}) == dict(actual.fields or {})
    assert (expected.subdtype is None) == (actual.subdtype is None)


POINT = [("x", "<f4"), ("y", ">i2")]
DTYPES = {
    **{kind: kind for kind in "? i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8 c8 c16".split()},
    "long double": np.longdouble,
    "complex long double": np.clongdouble,
    **{f"big-endian {kind}": f">{kind}" for kind in "i2 u4 f8 c16".split()},
    "S5": "S5", "S0": "S0", "U3": "U3", "U0": "U0", "big-endian U3": ">U3", "V7": "V7", "V0": "V0",
    **{f"datetime64 {unit}": f"M8[{unit}]" for unit in "Y M W D h m s ms us ns ps fs as 25s 3D".split()},
    "timedelta64 ns": "m8[ns]", "datetime64 without unit": "M8", "timedelta64 without unit": "m8", "big-endian datetime64": ">M8[ms]",
    "structured": POINT,
    "structured and aligned": np.dtype([("a", "i1"), ("b", "f8"), ("c", "u2")], align=True),
    "structured with gaps": np.dtype({"names": ["a", "b"], "formats": ["u1", "i8"], "offsets": [3, 16], "itemsize": 40}),
    "structured with overlap": np.dtype({"names": ["a", "b"], "formats": ["u4", "u1"], "offsets": [0, 1]}),
    "structured backwards": np.dtype({"names": ["a", "b"], "formats": ["u4", "u1"], "offsets": [4, 0]}),
    "structured with titles": np.dtype([(("The x", "x"), "f4"), (("The y", "y"), "i4")]),
    "structured with some titles": np.dtype({"names": ["x", "y"], "formats": ["f4", "i4"], "titles": ["The x", None]}),
    "structured of nothing": [],
    "nested": [("p", POINT), ("q", POINT, (2,)), ("d", "M8[us]")],
    "nested and aligned": np.dtype([("p", np.dtype([("a", "i1"), ("b", "i8")], align=True)), ("c", "i1")], align=True),
    "sub-arrays": [("m", ">f4", (2, 3)), ("s", "S2", 2)],
    "names that are not ASCII": [("größe", "f4"), ("\u4e2d", "i4")],
}  # fmt: skip
SHAPES = {
    "vector": (3,),
    "matrix": (2, 3),
    "without axes": (),
    "of no rows": (0, 3),
    "of no columns": (2, 0),
    "cube": (2, 1, 3),
}
PROTOCOLS = range(6)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_arrays(dtype, protocol):
    for shape in SHAPES.values():
        for order in "CF":
            array = filled(shape, dtype, order)
            data = pickle.dumps(array, protocol)
            expected, actual = pickle.loads(data), loads(data)
            alike(expected, actual)
            assert unpickle(data).unknown == []


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_parts_of_arrays(protocol):
    base = np.arange(60).reshape(3, 4, 5)
    for array in (
        base[::2, 1:],
        base.T,
        base[:, ::-1],
        base.transpose(1, 0, 2),
        np.broadcast_to(base[0], (2, 4, 5)),
    ):
        data = pickle.dumps(array, protocol)
        alike(pickle.loads(data), loads(data))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_dtypes(dtype, protocol):
    data = pickle.dumps(np.dtype(dtype), protocol)
    alike(pickle.loads(data), loads(data))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_scalars(dtype, protocol):
    scalar = filled((), dtype)[()]
    data = pickle.dumps(scalar, protocol)
    alike(pickle.loads(data), loads(data))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "modules",
    [(b"numpy._core", b"numpy.core"), (b"numpy.core", b"numpy._core")],
    ids=["NumPy 1", "NumPy 2"],
)
def test_module_names_of_both_numpys(modules, protocol):
    ours, theirs = modules
    obj = [filled((2, 3), "f4"), filled((2, 3), ">i8", "F"), np.float32(1.5), np.dtype("i4")]
    data = pickle.dumps(obj, protocol)
    # From protocol 4 on text has its length before it.
    data = renamed(data, ours, theirs) if protocol >= 4 else data.replace(ours, theirs)
    for expected, actual in zip(obj, loads(data), strict=True):
        if not isinstance(expected, np.ndarray) or expected.dtype.isnative or protocol == 5:
            alike(expected, actual)
        assert np.array_equal(expected, actual)


def renamed(data, old, new):
    """A pickle of protocol 4 or 5 with another module, without frames."""
    opcodes = [(op, arg, at) for op, arg, at in pickletools.genops(data)]
    out = b""
    for (op, arg, at), after in zip(
        opcodes, [*[at for _, _, at in opcodes[1:]], len(data)], strict=True
    ):
        if op.name == "SHORT_BINUNICODE" and arg.encode().startswith(old):
            text = arg.encode().replace(old, new)
            out += b"\x8c" + bytes([len(text)]) + text
        elif op.name != "FRAME":
            out += data[at:after]
    return out


def test_what_python_2_wrote():
    """Bytes as str, which latin-1 turns back."""
    data = (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01K\x02\x85cnumpy\ndtype\nU\x02f4K\x00K\x01\x87R(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89U\x08\x00\x00\x80\xbf\x00\x00\x80?tb."
    )
    for encoding in ("latin1", "bytes"):
        alike(np.array([-1, 1], "f4"), loads(data, encoding=encoding))


def test_sharing():
    array = np.arange(3)
    one, two = loads(pickle.dumps([array, array], 2))
    assert one is two


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_gaps_between_fields_are_what_the_file_says(protocol):
    """Never what was in the memory before."""
    dtype = np.dtype({"names": ["a"], "formats": ["u1"], "offsets": [3], "itemsize": 4096})
    for _ in range(5):
        np.full(1 << 16, 0xA5, np.uint8)
        data = pickle.dumps(np.zeros(16, dtype), protocol)
        array = loads(data)
        assert memory(array) == memory(pickle.loads(data))


# -- what stays opaque ---------------------------------------------------------------------------------------------


class Subclass(np.ndarray):
    pass


OPAQUE = {
    "objects": np.array([1, "a", None], object),
    "objects in a field": np.array([(1, "a")], [("a", "i4"), ("b", "O")]),
    "objects in a sub-array": np.zeros(2, [("a", "O", (2,))]),
    "a subclass": np.arange(2).view(Subclass),
    "records": np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "masked": np.ma.array([1, 2], mask=[True, False]),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("array", OPAQUE.values(), ids=OPAQUE)
def test_opaque_arrays(array, protocol):
    unpickled = unpickle(pickle.dumps([array, 5], protocol))
    assert unpickled.unknown
    opaque, five = substitute(unpickled.obj, NumpyBridge({}, unknown="opaque"), [])
    assert type(opaque) is Opaque
    assert five == 5
    file = torch_file(pickle.dumps([array], 2))
    with pytest.raises(UnsafePickleError, match="nothing was run"):
        fastckpt.load(file)
    assert type(fastckpt.load(file, unknown="opaque")[0]) is Opaque
    assert type(fastckpt.load(file, unknown="opaque", framework="numpy")[0]) is Opaque


@pytest.mark.parametrize("name", ["objects", "objects in a field", "objects in a sub-array"])
def test_what_is_harmless_and_not_made(name):
    """scan has nothing against it, and so load does not say that it may do harm."""
    file = torch_file(pickle.dumps([OPAQUE[name]], 2))
    assert fastckpt.scan(file).ok
    with pytest.raises(UnsafePickleError, match="which is not made here") as caught:
        fastckpt.load(file)
    assert "not known" not in str(caught.value)
    assert "add_safe_globals" not in str(caught.value)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_string_arrays_of_numpy_2(protocol):
    if not hasattr(np.dtypes, "StringDType"):
        pytest.skip("this NumPy has none")
    unpickled = unpickle(pickle.dumps([np.array(["a"], np.dtypes.StringDType()), 5], protocol))
    opaque, five = substitute(unpickled.obj, NumpyBridge({}, unknown="opaque"), [])
    assert (type(opaque), five) == (Opaque, 5)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_arrays_of_ml_dtypes(protocol):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for obj in (
        np.zeros(2, ml_dtypes.bfloat16),
        np.dtype(ml_dtypes.float8_e4m3fn),
        ml_dtypes.bfloat16(1),
    ):
        unpickled = unpickle(pickle.dumps([obj, 5], protocol))
        opaque, five = substitute(unpickled.obj, NumpyBridge({}, unknown="opaque"), [])
        assert (type(opaque), five) == (Opaque, 5)


# -- what is refused -----------------------------------------------------------------------------------------------


def dtype(kind, *state):
    return Call(Name("numpy dtype"), (kind, False, True), state or None)


F4 = dtype("f4", 3, "<", None, None, None, -1, -1, 0)
RECONSTRUCT = Name("numpy.core.multiarray _reconstruct")
EMPTY = (Name("numpy ndarray"), (0,), b"b")


def array(*state):
    return Call(RECONSTRUCT, EMPTY, state)


def scalar(*args):
    return Call(Name("numpy.core.multiarray scalar"), args)


def frombuffer(*args):
    return Call(Name("numpy.core.numeric _frombuffer"), args)


MISFITS = {
    "too few bytes": array(1, (2,), F4, False, b"1234567"),
    "too many bytes": array(1, (2,), F4, False, b"123456789"),
    "no bytes at all": array(1, (2,), F4, False, None),
    "text that is not latin-1": array(1, (1,), F4, False, "\u20ac123"),
    "negative sizes": array(1, (-1,), F4, False, b""),
    "negative sizes whose product fits": array(1, (-1, -2), F4, False, b"12345678"),
    "sizes that are no ints": array(1, (1.0,), F4, False, b"1234"),
    "sizes that are bools": array(1, (True,), F4, False, b"1234"),
    "a list of sizes": array(1, [1], F4, False, b"1234"),
    "sizes of 2**63": array(1, (2**63, 0), F4, False, b""),
    "sizes whose product wraps": array(1, (2**62, 4), dtype("V0"), False, b""),
    "65 axes": array(1, (1,) * 65, F4, False, b"1234"),
    "no dtype": array(1, (1,), None, False, b"1234"),
    "a state of three": array((1,), F4, False),
    "a state of six": array(1, 1, (1,), F4, False, b"1234"),
    "a state that is a list": Call(RECONSTRUCT, EMPTY, [1]),
    "a dtype of no name": dtype(""),
    "a dtype of another name": dtype("float32"),
    "a dtype of a list": dtype([("a", "f4")]),
    "a dtype of an int": dtype(5),
    "a dtype of two": dtype("f4,f4"),
    "a dtype of a shape": dtype("(2,)f4"),
    "a dtype of an odd size": dtype("f5"),
    "a dtype that was renamed": dtype("a5"),
    "a dtype of Unicode that wraps": dtype("U1073741824"),
    "a dtype without arguments": Call(Name("numpy dtype"), ()),
    "a byte order of no kind": dtype("f4", 3, "!", None, None, None, -1, -1, 0),
    "a byte order that is a number": dtype("f4", 3, 5, None, None, None, -1, -1, 0),
    "a short state of a dtype": dtype("f4", 3, "<"),
    "fields without dtypes": dtype("V8", 3, "|", None, ("a",), {"a": (None, 0)}, 8, 1, 0),
    "fields that are missing": dtype("V8", 3, "|", None, ("a",), {}, 8, 1, 0),
    "fields that are none": dtype("V8", 3, "|", None, ("a",), None, 8, 1, 0),
    "fields at negative offsets": dtype("V8", 3, "|", None, ("a",), {"a": (F4, -4)}, 8, 1, 0),
    "fields beyond the item": dtype("V8", 3, "|", None, ("a",), {"a": (F4, 6)}, 8, 1, 0),
    "fields at huge offsets": dtype("V8", 3, "|", None, ("a",), {"a": (F4, 2**62)}, 8, 1, 0),
    "fields of one name": dtype("V8", 3, "|", None, ("a", "a"), {"a": (F4, 0)}, 8, 1, 0),
    "a sub-array of no shape": dtype("V8", 3, "|", (F4, None), None, None, 8, 1, 0),
    "a sub-array of negative shape": dtype("V8", 3, "|", (F4, (-2,)), None, None, 8, 1, 0),
    "a sub-array of one member": dtype("V8", 3, "|", (F4,), None, None, 8, 1, 0),
    "a unit of no kind": dtype("M8", 4, "<", None, None, None, -1, -1, 0, ({}, (b"parsec", 1, 1, 1))),
    "a unit of none": dtype("M8", 4, "<", None, None, None, -1, -1, 0, ({}, (b"ns", 0, 1, 1))),
    "a unit of a huge count": dtype("M8", 4, "<", None, None, None, -1, -1, 0, ({}, (b"ns", 2**40, 1, 1))),
    "a unit that is none": dtype("M8", 4, "<", None, None, None, -1, -1, 0, 5),
    "a scalar of too few bytes": scalar(F4, b"123"),
    "a scalar without bytes": scalar(F4),
    "a scalar without a dtype": scalar(None, b"1234"),
    "a scalar that is no character": scalar(dtype("U1"), b"\xff" * 4),
    "a buffer in no order": frombuffer(b"1234", F4, (1,), "X"),
    "a buffer of objects": frombuffer(b"12345678", dtype("O"), (1,), "C"),
    "a buffer without a shape": frombuffer(b"1234", F4, None, "C"),
    "a buffer of ints": frombuffer(5, F4, (1,), "C"),
    "a buffer alone": frombuffer(b"1234"),
    "a buffer in order K": frombuffer(b"1234", F4, (1,), "K"),
    "axes that are missing": frombuffer(b"1234", F4, (1, 1), "K", (0,)),
    "axes that occur twice": frombuffer(b"1234", F4, (1, 1), "K", (0, 0)),
    "axes that are none": frombuffer(b"1234", F4, (1, 1), "K", (0, "a")),
}  # fmt: skip


@pytest.mark.parametrize("call", MISFITS.values(), ids=MISFITS)
def test_misfit(call):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(FormatError, match=r"^pickle at byte "):
            unpickle(craft(call))


def test_too_many_fields():
    names = tuple(f"f{i}" for i in range(400))
    inner = dtype("V4", 3, "|", None, names, dict.fromkeys(names, (F4, 0)), 4, 1, 0)
    outer = dtype("V4", 3, "|", None, names, dict.fromkeys(names, (inner, 0)), 4, 1, 0)
    assert unpickle(craft(inner)).obj.fields == 401
    with pytest.raises(LimitError, match="more than 100000 fields"):
        unpickle(craft(outer))


def test_an_array_that_is_never_filled():
    """_reconstruct alone: one of no elements, whatever sizes it was called with."""
    for sizes in ((0,), (2**40,), (3,)):
        array = loads(craft(Call(RECONSTRUCT, (Name("numpy ndarray"), sizes, b"b"))))
        assert (array.shape, array.nbytes) == ((0,), 0)
