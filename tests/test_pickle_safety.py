"""Nothing that a file names is imported, called or looked up; and no row of the table of known names can be abused."""

import builtins
import contextlib
import importlib
import sys
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fastckpt
from fastckpt._tree import substitute
from fastckpt._unpickler import unpickle
from fastckpt.errors import CheckpointError, UnsafePickleError
from fastckpt.nodes import Opaque
from fastckpt.numpy_bridge import NumpyBridge
from fastckpt.rebuild import TABLE
from picklecraft import Call, Name, craft, storage, torch_file
from support import QUIET

pytestmark = QUIET

STORAGE = b"\0\0\x80?" * 16

# -- names that would be the end -----------------------------------------------------------------------------------

DANGEROUS = {
    "os.system": ("os system", ("touch {marker}",)),
    "posix.system": ("posix system", ("touch {marker}",)),
    "nt.system": ("nt system", ("touch {marker}",)),
    "os.makedirs": ("os makedirs", ("{marker}",)),
    "os.mkdir, dotted": ("os path.os.mkdir", ("{marker}",)),
    "pathlib.Path.touch": ("pathlib Path.touch", (Call(Name("pathlib Path"), ("{marker}",)),)),
    "pathlib.Path.mkdir": ("pathlib PosixPath.mkdir", (Call(Name("pathlib PosixPath"), ("{marker}",)),)),
    "builtins.eval": ("builtins eval", ("open({marker!r}, 'w')",)),
    "builtins.exec": ("builtins exec", ("open({marker!r}, 'w')",)),
    "__builtin__.eval": ("__builtin__ eval", ("open({marker!r}, 'w')",)),
    "builtins.open": ("builtins open", ("{marker}", "w")),
    "io.open": ("io open", ("{marker}", "w")),
    "_io.FileIO": ("_io FileIO", ("{marker}", "w")),
    "builtins.getattr": ("builtins getattr", (Name("os system"), "__call__")),
    "builtins.__import__": ("builtins __import__", ("antigravity",)),
    "importlib.import_module": ("importlib import_module", ("antigravity",)),
    "runpy.run_path": ("runpy run_path", ("{marker}",)),
    "subprocess.Popen": ("subprocess Popen", (["touch", "{marker}"],)),
    "shutil.copy": ("shutil copy", (__file__, "{marker}")),
    "logging.FileHandler": ("logging FileHandler", ("{marker}",)),
    "torch.load": ("torch load", ("{marker}",)),
    "torch.save": ("torch save", (1, "{marker}")),
    "torch.hub.load": ("torch.hub load", ("a/b", "c")),
    "torch.serialization.load": ("torch.serialization load", ("{marker}",)),
    "torch.storage._load_from_bytes": ("torch.storage _load_from_bytes", (b"x",)),
    "torch.jit.load": ("torch.jit load", ("{marker}",)),
    "torch.from_file": ("torch from_file", ("{marker}", True, 4)),
    "torch.UntypedStorage.from_file": ("torch UntypedStorage.from_file", ("{marker}", True, 4)),
    "torch._utils.os": ("torch._utils os.system", ("touch {marker}",)),
    "torch.nn.Module": ("torch.nn Module", ()),
    "numpy.load": ("numpy load", ("{marker}",)),
    "numpy.save": ("numpy save", ("{marker}", 1)),
    "numpy.memmap": ("numpy memmap", ("{marker}", "u1", "w+", 0, (1,))),
    "numpy.fromfile": ("numpy fromfile", ("{marker}",)),
    "numpy.ndarray.tofile": ("numpy ndarray.tofile", (1, "{marker}")),
    "operator.attrgetter": ("operator attrgetter", ("system",)),
    "operator.methodcaller": ("operator methodcaller", ("touch",)),
    "functools.partial": ("functools partial", (Name("os system"), "touch {marker}")),
    "types.FunctionType": ("types FunctionType", ()),
    "types.CodeType": ("types CodeType", ()),
    "copyreg.add_extension": ("copyreg add_extension", ("os", "system", 1)),
    "copyreg.__newobj_ex__": ("copyreg __newobj_ex__", (Name("io FileIO"), ("{marker}", "w"), {})),
    "pickle.loads": ("pickle loads", (b"cos\nmkdir\n.",)),
    "code.interact": ("code interact", ()),
    "ctypes.CDLL": ("ctypes CDLL", ("libc.so.6",)),
    "collections.OrderedDict.fromkeys": ("collections OrderedDict.fromkeys", ("ab",)),
    "torch.Tensor.tofile": ("torch Tensor.numpy", ()),
    "fastckpt.load": ("fastckpt load", ("{marker}",)),
    "an empty name": (" ", ()),
    "__main__": ("__main__ X", ()),
}  # fmt: skip
HOWS = (
    "REDUCE",
    "NEWOBJ",
    "NEWOBJ_EX",
    "INST",
    "OBJ",
    "STACK_GLOBAL",
    "_reconstructor",
    "__newobj__",
    "from_type",
    "wrapper",
)


def filled(value, marker):
    """The arguments, with the path of the marker in them."""
    if type(value) is str:
        return value.replace("{marker!r}", repr(marker)).replace("{marker}", marker)
    if isinstance(value, Call):
        return Call(value.callee, filled(value.args, marker))
    return (
        type(value)(filled(v, marker) for v in value) if isinstance(value, (tuple, list)) else value
    )


def calling(name, args, how):
    """A pickle that calls a name."""
    if how == "STACK_GLOBAL":
        module, attribute = name.split(" ")
        text = b"".join(
            b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, attribute)
        )
        return b"\x80\x04" + text + b"\x93" + craft(args)[2:-1] + b"R."
    if how == "_reconstructor":
        return craft(
            Call(
                Name("copyreg _reconstructor"),
                (Name(name), Name("builtins object"), None),
                {"a": 1},
            )
        )
    if how == "__newobj__":
        return craft(Call(Name("copyreg __newobj__"), (Name(name), *args)))
    if how == "from_type":
        return craft(
            Call(
                Name("torch._tensor _rebuild_from_type_v2"),
                (Name(name), Name("torch Tensor"), args, {}),
            )
        )
    if how == "wrapper":
        args = (
            Name(name),
            Name("torch float32"),
            (1,),
            (1,),
            0,
            Call(Name("torch.serialization _get_layout"), ("torch.strided",)),
        )
        device = Call(Name("torch device"), ("cpu",))
        return craft(Call(Name("torch._utils _rebuild_wrapper_subclass"), (*args, device, False)))
    return craft(Call(Name(name), args, how=how))


@contextlib.contextmanager
def nothing_runs(marker):
    """Asserts that nothing is imported on behalf of the library but what it itself needs, and that no file is made."""
    file = torch_file(
        craft([TENSOR, Call(Name("x Y"), ()), Call(Name("torch Size"), ((),))]), STORAGE
    )
    fastckpt.load(file, unknown="opaque")  # the modules of the library itself are there from now on
    with fastckpt.open(file, unknown="opaque") as checkpoint:
        repr(checkpoint.tree)
    before, imported = set(sys.modules), []
    real = builtins.__import__

    def watch(name, globals_=None, locals_=None, fromlist=(), level=0):
        caller = (globals_ or {}).get("__name__", "")
        if level == 0 and caller.partition(".")[0] == "fastckpt":
            imported.append(name)
        return real(name, globals_, locals_, fromlist, level)

    with (
        mock.patch.object(builtins, "__import__", watch),
        mock.patch.object(builtins, "eval", side_effect=AssertionError),
        mock.patch.object(builtins, "exec", side_effect=AssertionError),
        mock.patch.object(importlib, "import_module", side_effect=AssertionError),
    ):
        yield
    assert not marker.exists()
    assert set(imported) <= {"torch", "numpy", "ml_dtypes"}
    assert set(sys.modules) == before


@pytest.mark.parametrize("case", DANGEROUS.values(), ids=DANGEROUS)
def test_nothing_runs(case, tmp_path):
    name, args = case
    args = filled(args, str(tmp_path / "marker"))
    with nothing_runs(tmp_path / "marker"):
        check_inert(name, args)


def check_inert(name, args):
    for how in HOWS:
        if how in ("INST", "OBJ") and name == " ":
            continue
        data = calling(name, args, how)
        unpickled = unpickle(data)
        assert (name.replace(" ", "."), "") in unpickled.unknown
        inert = substitute(unpickled.obj, NumpyBridge({}, unknown="opaque"), [])
        assert type(inert) is Opaque
        file = torch_file(data, STORAGE)
        with pytest.raises(UnsafePickleError, match="nothing was run") as caught:
            fastckpt.load(file)
        assert caught.value.qualname in [qualname for qualname, _ in unpickled.unknown]
        try:
            assert type(fastckpt.load(file, unknown="opaque")) is Opaque
        except CheckpointError:
            pass  # where the call is an argument of a function that wants a tensor
        with fastckpt.open(file, unknown="opaque") as checkpoint:
            assert len(checkpoint) in (0, 1)


def test_a_method_of_a_known_object_is_not_reached():
    """getattr(Path('x'), 'touch')(): each step stays a description."""
    touch = Call(Name("builtins getattr"), (Call(Name("pathlib Path"), ("x",)), "touch"))
    node = unpickle(craft(Call(touch, ()))).obj
    assert node.qualname == "builtins.getattr()"


def test_a_name_is_not_taken_apart():
    node = unpickle(craft(Call(Name("collections.OrderedDict fromkeys"), ("ab",)))).obj
    assert type(node) is Opaque


# -- every row of the table with every kind of arguments --------------------------------------------------------------

TENSOR = Call(
    Name("torch._utils _rebuild_tensor_v2"),
    (storage("FloatStorage", "0", 16), 0, (2, 2), (2, 1), False, {}),
)
INDICES = Call(
    Name("torch._utils _rebuild_tensor_v2"),
    (storage("LongStorage", "1", 8), 0, (2,), (1,), False, {}),
)
QUANTIZED = Call(
    Name("torch._utils _rebuild_qtensor"),
    (
        storage("QInt8Storage", "2", 64),
        0,
        (4,),
        (1,),
        (Name("torch per_tensor_affine"), 0.5, 1),
        False,
        {},
    ),
)
F4 = Call(Name("numpy dtype"), ("f4", False, True), (3, "<", None, None, None, -1, -1, 0))
PARTS = [
    TENSOR, INDICES, QUANTIZED, F4, storage("FloatStorage", "0", 16), storage("QInt8Storage", "2", 64),
    Name("torch float32"), Name("torch qint8"), Name("torch Tensor"), Name("torch.nn.parameter Parameter"),
    Name("torch per_tensor_affine"), Name("torch per_channel_affine"), Name("numpy ndarray"), Name("builtins object"), Name("builtins list"),
    Name("x Y"), Call(Name("x Y"), (1,)), Call(Name("torch Size"), ((2, 3),)), Call(Name("torch device"), ("cpu",)),
    Call(Name("torch.serialization _get_layout"), ("torch.sparse_coo",)),
    Call(Name("torch.serialization _get_layout"), ("torch.sparse_csr",)), Call(Name("uuid UUID"), (), {"int": 5}),
    Call(Name("numpy._core.multiarray _reconstruct"), (Name("numpy ndarray"), (0,), b"b")),
    Call(Name("numpy._core.multiarray scalar"), (F4, b"abcd")), Call(Name("numpy._core.numeric _frombuffer"), (b"a" * 8, F4, (2,), "C")),
    Call(Name("torch.nn.parameter Parameter"), (TENSOR, True)), Call(Name("torch.nn.parameter Parameter"), (INDICES, False)),
    Call(Name("torch FloatTensor"), ()), Call(Name("torch._C Generator"), ()),
    Name("torch._utils _rebuild_tensor_v2"), Name("torch._tensor _rebuild_from_type_v2"), Name("copyreg _reconstructor"),
]  # fmt: skip
PLAIN = [
    None, True, False, 0, 1, 2, -1, -(2**63), 2**31 - 1, 2**31, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, 10**4000, 0.0, 0.5, float("nan"), float("inf"),
    "", "a", "f4", "V2147483647", "O", "M8", "T", "U536870912", "cuda", "cuda:999", "cpu", "meta", "C", "F", "<", "latin-1", "torch.strided",
    "1e999999999", "-1/0", "\ud800", "a" * 300, b"", b"b", b"abcd", b"\xff" * 16, bytearray(b"x"),
    (), [], {}, (2, 2), (1,), (0,), (4,), (2**62, 4), (-1,), [1, 2], [[1, 2]], {"a": 1}, {"conj": True}, {"int": 5}, (1, 2.5, "x"), (2**62, 2**62, 0), (None,) * 70,
]  # fmt: skip
ARGUMENTS = st.recursive(
    st.sampled_from(PARTS)
    | st.sampled_from(PLAIN)
    | st.integers()
    | st.floats()
    | st.binary(max_size=20)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=5,
)
# Arguments near good ones: one is exchanged, dropped or added.
SPARSE = Call(Name("torch.serialization _get_layout"), ("torch.sparse_coo",))
GOOD = {
    "_rebuild_tensor": [(storage("FloatStorage", "0", 16), 0, (2, 2), (2, 1))],
    "_rebuild_tensor_v2": [(storage("FloatStorage", "0", 16), 0, (2, 2), (2, 1), False, {}, {"neg": True})],
    "_rebuild_tensor_v3": [(storage("torch.storage UntypedStorage", "0", 64), 0, (2, 2), (2, 1), False, {}, Name("torch uint16"), {})],
    "_rebuild_parameter": [(TENSOR, True, {})],
    "_rebuild_parameter_with_state": [(TENSOR, True, {}, {"a": 1})],
    "_rebuild_from_type": [(Name("torch._utils _rebuild_tensor_v2"), Name("torch Tensor"), TENSOR.args, {"a": 1})],
    "_rebuild_from_type_v2": [(Name("torch._utils _rebuild_tensor_v2"), Name("torch Tensor"), TENSOR.args, {"a": 1})],
    "_rebuild_sparse_tensor": [(SPARSE, (INDICES, TENSOR, (2, 2), True))],
    "_rebuild_qtensor": [
        (storage("QInt8Storage", "2", 64), 0, (2, 2), (2, 1), (Name("torch per_tensor_affine"), 0.5, 1), False, {}),
        (storage("QInt8Storage", "2", 64), 0, (2, 2), (2, 1), (Name("torch per_channel_affine"), [0.5, 1.0], [0, 1], 0), False, {}),
    ],
    "_rebuild_nested_tensor": [(TENSOR, INDICES, INDICES, INDICES)],
    "_rebuild_meta_tensor_no_storage": [(Name("torch float32"), (2, 2), (2, 1), False)],
    "_rebuild_wrapper_subclass": [(Name("torch Tensor"), Name("torch float32"), (2,), (1,), 0, SPARSE, "cpu", False)],
    "_rebuild_device_tensor_from_numpy": [(PARTS[24], Name("torch float32"), "cpu", False)],
    "_rebuild_device_tensor_from_cpu_tensor": [(TENSOR, Name("torch float64"), "cpu", True)],
    "_reconstruct": [(Name("numpy ndarray"), (0,), b"b")],
    "scalar": [(F4, b"abcd")],
    "_frombuffer": [(b"a" * 8, F4, (2,), "C")],
    "dtype": [("V8", False, True), ("M8", False, True)],
    "_reconstructor": [(Name("builtins list"), Name("builtins object"), [1])],
    "__newobj__": [(Name("torch Tensor"),)],
    "datetime": [(bytes([7, 228, 1, 1, 0, 0, 0, 0, 0, 0]),)],
}  # fmt: skip
STATES = st.none() | ARGUMENTS | st.sampled_from([
    (3, "<", None, None, None, -1, -1, 0), (3, "|", (F4, (2**31,)), None, None, 8, 1, 0), (3, "|", None, ("a",), {"a": (F4, 0)}, 8, 1, 16),
    (3, "|", None, ("a",), {"a": (F4, 2**31 - 5)}, 2**31 - 1, 1, 16), (4, "<", None, None, None, -1, -1, 0, ({}, (b"ns", 1, 1, 1))),
    (1, (2,), F4, False, b"a" * 8), (1, (2**40,), F4, False, b""), (storage("FloatStorage", "0", 16), 0, (2, 2), (2, 1)),
    (True, False, {}), (INDICES, None, {}, True, False), ({"grad_fn": 1}, None), {"__class__": 1}, {"data": 5}, (5, 0, INDICES),
])  # fmt: skip


@st.composite
def calls(draw, names):
    """A call of a known name with arguments of any kind, or of nearly the right ones."""
    name = draw(names)
    good = GOOD.get(name.split(" ")[1])
    if good and draw(st.booleans()):
        args = list(draw(st.sampled_from(good)))
        at = draw(st.integers(0, len(args) - 1))
        how = draw(st.sampled_from(["exchange", "exchange", "drop", "add", "keep"]))
        if how == "exchange":
            args[at] = draw(ARGUMENTS)
        elif how == "drop":
            del args[at]
        elif how == "add":
            args.append(draw(ARGUMENTS))
        args = tuple(args)
    else:
        args = tuple(draw(st.lists(ARGUMENTS, max_size=8)))
    return Call(
        Name(name), args, draw(STATES), draw(st.sampled_from(["REDUCE", "REDUCE", "NEWOBJ", "OBJ"]))
    )


STORAGES = (STORAGE, (b"\1" + bytes(7)) * 8, bytes(range(64)))


def try_all(call):
    """Load a crafted call in every way: errors are ours, whatever the arguments."""
    for obj in (call, {"k": call, "l": [call]}):
        file = torch_file(craft(obj), *STORAGES)
        for options in (
            {},
            {"unknown": "opaque"},
            {"unknown": "opaque", "framework": "numpy"},
            {"map_location": "meta"},
        ):
            try:
                fastckpt.load(file, threads=1, **options)
            except CheckpointError:
                pass
        try:
            with fastckpt.open(file, unknown="opaque") as checkpoint:
                checkpoint.info  # noqa: B018 - whatever happens when it is asked for
                for lazy in checkpoint.values():
                    repr(lazy)
                    lazy.read()
        except CheckpointError:
            pass


NAMES = sorted(f"{module} {name}" for module, name in TABLE)
# One of each row that does not differ in the function it leads to.
DISTINCT = list(
    {
        (row.call, row.rebuild, row.storage_dtype >= 0, type(row.value)): f"{m} {n}"
        for (m, n), row in TABLE.items()
    }.values()
)
SETTINGS = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


@pytest.mark.parametrize("name", DISTINCT)
def test_rows_with_hostile_arguments(name):
    @settings(max_examples=12, derandomize=True, **SETTINGS)
    @given(calls(st.just(name)))
    def check(call):
        try_all(call)

    check()


@pytest.mark.slow
@settings(max_examples=20_000, **SETTINGS)
@given(calls(st.sampled_from(DISTINCT)))
def test_rows_with_hostile_arguments_much(call):
    try_all(call)


@pytest.mark.parametrize("name", NAMES)
def test_rows_by_themselves(name):
    """A bare name, and a call of it with nothing."""
    for obj in ([Name(name)], [Call(Name(name), ())], [Call(Name(name), (), how="NEWOBJ")]):
        file = torch_file(craft(obj), *STORAGES)
        for framework in ("torch", "numpy"):
            try:
                fastckpt.load(file, framework=framework)
            except CheckpointError:
                pass
