"""torch's rebuild functions: with the arguments that torch writes what torch.load gives, with others an error of ours."""

import collections
import contextlib
import io
import warnings

import pytest
import torch

import fastckpt
from fastckpt._unpickler import PIDS_LEGACY, PIDS_ZIP, unpickle
from fastckpt.errors import CheckpointError, FormatError, UnsafePickleError, UnsupportedError
from picklecraft import Call, Name, Pid, Raw, craft, emit, storage, torch_file
from support import QUIET, same

pytestmark = QUIET

FLOATS = torch.arange(16, dtype=torch.float32).numpy().tobytes()
LONGS = torch.tensor([0, 1, 0, 1, 1, 0, 2, 3]).numpy().tobytes()
BYTES = bytes(range(64))
BOOLS = bytes([0, 1] * 8)
DOUBLES = torch.linspace(0.5, 2, 8, dtype=torch.float64).numpy().tobytes()
STORAGES = (FLOATS, LONGS, BYTES, BOOLS, DOUBLES, b"")

FLOAT = storage("FloatStorage", "0", 16)
LONG = storage("LongStorage", "1", 8)
QINT8 = storage("QInt8Storage", "2", 64)
UNTYPED = storage("torch.storage UntypedStorage", "2", 64)
BOOL = storage("BoolStorage", "3", 16)
COMPLEX = storage("ComplexFloatStorage", "0", 8)
DOUBLE = storage("DoubleStorage", "4", 8)
NOTHING = storage("FloatStorage", "5", 0)
HOOKS = Call(Name("collections OrderedDict"), ())


def utils(name):
    return Name(f"torch._utils {name}")


def v2(*args):
    return Call(utils("_rebuild_tensor_v2"), args)


def v3(*args):
    return Call(utils("_rebuild_tensor_v3"), args)


def layout(name):
    return Call(Name("torch.serialization _get_layout"), (f"torch.{name}",))


def qtensor(scheme, *params, shape=(2, 3), stride=(3, 1), offset=0, requires_grad=False, pid=QINT8):
    return Call(
        utils("_rebuild_qtensor"),
        (pid, offset, shape, stride, (Name(f"torch {scheme}"), *params), requires_grad, HOOKS),
    )


TENSOR = v2(FLOAT, 1, (2, 3), (3, 1), False, HOOKS)
IDS = v2(LONG, 0, (2, 2), (2, 1), False, HOOKS)
PAIR = v2(FLOAT, 1, (2,), (1,), False, HOOKS)
SCALES = v2(DOUBLE, 0, (3,), (1,), False, HOOKS)
ZEROS = v2(LONG, 0, (3,), (1,), False, HOOKS)


def ids(offset, *shape):
    return v2(LONG, offset, shape, (1,) * len(shape), False, HOOKS)


# Both loaders read these, and give the same.
GOOD = {
    "v1": Call(utils("_rebuild_tensor"), (FLOAT, 0, (2, 2), (2, 1))),
    "v2": TENSOR,
    "v2 without hooks": v2(FLOAT, 0, (4,), (1,), False, None),
    "v2 with a gradient": v2(FLOAT, 0, (4,), (1,), True, HOOKS),
    "v2 with empty metadata": v2(FLOAT, 0, (4,), (1,), False, HOOKS, {}),
    "v2 negative": v2(FLOAT, 0, (4,), (1,), False, HOOKS, {"neg": True}),
    "v2 conjugate": v2(COMPLEX, 0, (4,), (1,), False, HOOKS, {"conj": True}),
    "v2 conjugate, negative, with a gradient": v2(COMPLEX, 0, (4,), (1,), True, HOOKS, {"conj": True, "neg": True}),
    "v2 with metadata of another kind": v2(FLOAT, 0, (4,), (1,), False, HOOKS, {"later": True}),
    "v2 of no axes": v2(FLOAT, 15, (), (), False, HOOKS),
    "v2 expanded": v2(FLOAT, 3, (1000, 1000), (0, 0), False, HOOKS),
    "v2 overlapping": v2(FLOAT, 0, (4, 4), (1, 1), False, HOOKS),
    "v2 transposed": v2(FLOAT, 0, (4, 4), (1, 4), False, HOOKS),
    "v2 with sizes as torch.Size": v2(FLOAT, 0, Call(Name("torch Size"), ((2, 2),)), (2, 1), False, HOOKS),
    "v2 with sizes as lists": v2(FLOAT, 0, [2, 2], [2, 1], False, HOOKS),
    "v2 of no elements": v2(NOTHING, 0, (0,), (1,), False, HOOKS),
    "v2 of no elements, anywhere": v2(FLOAT, 10**15, (0, 3), (3, 1), False, HOOKS),
    "v2 of no elements, huge strides": v2(FLOAT, 0, (0, 5), (10**18, 10**18), False, HOOKS),
    "v2 of no elements, huge sizes": v2(FLOAT, 0, (0, 2**62, 4), (1, 1, 1), False, HOOKS),
    "v2 with a huge stride of one element": v2(FLOAT, 15, (1, 1), (10**18, 1), False, HOOKS),
    "v2 of the last element": v2(FLOAT, 15, (1,), (1,), False, HOOKS),
    "v2 of bools": v2(BOOL, 0, (16,), (1,), False, HOOKS),
    "v3": v3(UNTYPED, 1, (3,), (2,), False, HOOKS, Name("torch uint16")),
    "v3 of float8": v3(UNTYPED, 0, (4, 4), (4, 1), False, HOOKS, Name("torch float8_e4m3fn")),
    "v3 with metadata": v3(UNTYPED, 0, (4,), (1,), False, HOOKS, Name("torch float32"), {"neg": True}),
    "parameter": Call(utils("_rebuild_parameter"), (TENSOR, True, HOOKS)),
    "parameter without a gradient": Call(utils("_rebuild_parameter"), (IDS, False, HOOKS)),
    "parameter with a state": Call(utils("_rebuild_parameter_with_state"), (TENSOR, True, HOOKS, {"a": [1]})),
    "parameter with slots": Call(utils("_rebuild_parameter_with_state"), (TENSOR, True, HOOKS, ({"a": 1}, {"b": 2}))),
    "parameter of a conjugate": Call(utils("_rebuild_parameter"), (v2(COMPLEX, 0, (4,), (1,), False, HOOKS, {"conj": True}), True, HOOKS)),
    "from type": Call(Name("torch._tensor _rebuild_from_type_v2"), (TENSOR.callee, Name("torch Tensor"), TENSOR.args, {"a": 1})),
    "from type with slots": Call(Name("torch._tensor _rebuild_from_type_v2"), (TENSOR.callee, Name("torch Tensor"), TENSOR.args, ({"a": 1}, {"b": 2}))),
    "from type of a Parameter": Call(
        Name("torch._tensor _rebuild_from_type_v2"),
        (utils("_rebuild_parameter"), Name("torch.nn.parameter Parameter"), (TENSOR, True, HOOKS), {"a": 1}),
    ),
    "sparse": Call(utils("_rebuild_sparse_tensor"), (layout("sparse_coo"), (IDS, PAIR, (2, 2), False))),
    "sparse, coalesced": Call(utils("_rebuild_sparse_tensor"), (layout("sparse_coo"), (IDS, PAIR, (2, 2), True))),
    "sparse of three": Call(utils("_rebuild_sparse_tensor"), (layout("sparse_coo"), (IDS, PAIR, (2, 2)))),
    "sparse with a Size": Call(utils("_rebuild_sparse_tensor"), (layout("sparse_coo"), (IDS, PAIR, Call(Name("torch Size"), ((2, 2),)), False))),
    "sparse of huge sizes": Call(utils("_rebuild_sparse_tensor"), (layout("sparse_coo"), (IDS, PAIR, (2**40, 2**20), False))),
    "csr": Call(utils("_rebuild_sparse_tensor"), (layout("sparse_csr"), (v2(LONG, 5, (3,), (1,), False, HOOKS), v2(LONG, 0, (3,), (1,), False, HOOKS), v2(FLOAT, 0, (3,), (1,), False, HOOKS), (2, 4)))),
    "quantized": qtensor("per_tensor_affine", 0.5, 1),
    "quantized with a stride": qtensor("per_tensor_affine", 0.5, -1, stride=(1, 2), offset=7),
    "quantized by channel": qtensor("per_channel_affine", [0.5, 1.0], [0, 1], 0),
    "quantized by channel of tensors": qtensor("per_channel_affine", SCALES, ZEROS, 1),
    "meta": Call(utils("_rebuild_meta_tensor_no_storage"), (Name("torch float32"), (2, 3), (3, 1), False)),
    "meta with a gradient": Call(utils("_rebuild_meta_tensor_no_storage"), (Name("torch float32"), (2**40, 3), (3, 1), True)),
    "device tensor": Call(utils("_rebuild_device_tensor_from_cpu_tensor"), (TENSOR, Name("torch float64"), "cpu", True)),
    "torch.FloatTensor": Call(Name("torch FloatTensor"), (), (FLOAT, 1, (2, 3), (3, 1))),
    "torch.FloatTensor, empty": Call(Name("torch FloatTensor"), ()),
    "torch.LongTensor": Call(Name("torch LongTensor"), (), (LONG, 0, (8,), (1,))),
    "Parameter of 0.1": Call(Name("torch.nn.parameter Parameter"), (TENSOR,), (True, False, HOOKS)),
    "Parameter of 0.1 without a gradient": Call(Name("torch.nn.parameter Parameter"), (TENSOR,), (False, False, HOOKS)),
    "Parameter of 0.1, NEWOBJ": Call(Name("torch.nn.parameter Parameter"), (TENSOR,), (True, False, HOOKS), how="NEWOBJ"),
    "Size": Call(Name("torch Size"), ([2, 3],)),
    "Size of nothing": Call(Name("torch Size"), ([],)),
    "device": Call(Name("torch device"), ("cpu",)),
    "device with an index": Call(Name("torch device"), ("cuda", 3)),
    "device in one string": Call(Name("torch device"), ("cuda:3",)),
    "dtype": Name("torch bfloat16"),
    "layout": layout("sparse_csr"),
    "qscheme": Name("torch per_channel_affine"),
    "storage": FLOAT,
    "storage twice": [FLOAT, FLOAT, TENSOR],
    "storages of a key share": [TENSOR, v2(FLOAT, 0, (16,), (1,), False, HOOKS)],
    "untyped storage": UNTYPED,
    "storage of nothing": NOTHING,
}  # fmt: skip


def torch_load(file):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.load(io.BytesIO(file))


@pytest.mark.parametrize("obj", GOOD.values(), ids=GOOD)
def test_what_torch_gives(obj):
    file = torch_file(craft([obj]), *STORAGES)
    same(torch_load(file), fastckpt.load(file))


@pytest.mark.parametrize("obj", GOOD.values(), ids=GOOD)
def test_without_torch_tensors(obj):
    """NumPy output says what it cannot give."""
    file = torch_file(craft([obj]), *STORAGES)
    with contextlib.suppress(CheckpointError):
        fastckpt.load(file, framework="numpy")
    with contextlib.suppress(UnsupportedError):  # NumPy has no shape of such sizes
        assert len(fastckpt.load(file, framework="numpy", unknown="opaque")) == 1
    with fastckpt.open(file) as checkpoint:
        for lazy in checkpoint.values():
            same(torch_load(file)[0], lazy.read()) if not isinstance(obj, list) else lazy.read()


# Both refuse these.
P = "torch.nn.parameter Parameter"
BAD = {
    "v1 of five": Call(utils("_rebuild_tensor"), (FLOAT, 0, (2, 2), (2, 1), False)),
    "v2 of five": v2(FLOAT, 0, (2,), (1,), False),
    "v2 of eight": v2(FLOAT, 0, (2,), (1,), False, HOOKS, {}, 1),
    "v3 of six": v3(UNTYPED, 0, (2,), (1,), False, HOOKS),
    "v2 without a storage": v2(None, 0, (2,), (1,), False, HOOKS),
    "v2 of a tensor": v2(TENSOR, 0, (2,), (1,), False, HOOKS),
    "v2 whose gradient is an int": v2(FLOAT, 0, (2,), (1,), 1, HOOKS),
    "v2 of ints with a gradient": v2(LONG, 0, (2,), (1,), True, HOOKS),
    "v2 of bools with a gradient": v2(BOOL, 0, (2,), (1,), True, HOOKS),
    "v2 with fewer strides": v2(FLOAT, 0, (2, 2), (1,), False, HOOKS),
    "v2 with fewer sizes": v2(FLOAT, 0, (2,), (2, 1), False, HOOKS),
    "v2 with negative sizes": v2(FLOAT, 0, (-2,), (1,), False, HOOKS),
    "v2 with negative strides": v2(FLOAT, 4, (2,), (-1,), False, HOOKS),
    "v2 with a negative offset": v2(FLOAT, -1, (2,), (1,), False, HOOKS),
    "v2 beyond by one": v2(FLOAT, 13, (4,), (1,), False, HOOKS),
    "v2 beyond by a stride": v2(FLOAT, 0, (2, 2), (15, 1), False, HOOKS),
    "v2 beyond by an offset": v2(FLOAT, 16, (1,), (1,), False, HOOKS),
    "v2 in a storage of nothing": v2(NOTHING, 0, (1,), (1,), False, HOOKS),
    "v2 with an offset of 2**63 - 1": v2(FLOAT, 2**63 - 1, (1,), (1,), False, HOOKS),
    "v2 with an offset of 2**64": v2(FLOAT, 2**64, (1,), (1,), False, HOOKS),
    "v2 whose size wraps": v2(FLOAT, 0, (2**32, 2**32), (2**32, 1), False, HOOKS),
    "v2 whose size wraps to something": v2(FLOAT, 0, (2**33 + 2, 2**31), (0, 0), False, HOOKS),
    "v2 whose stride wraps": v2(FLOAT, 0, (2**32 + 1, 2), (2**32, 1), False, HOOKS),
    "v2 whose bytes wrap": v2(FLOAT, 0, (2,), (2**62,), False, HOOKS),
    "v2 whose strides add up and wrap": v2(FLOAT, 0, (2, 2, 2), (2**62, 2**62, 2**62), False, HOOKS),
    "v2 with sizes of floats": v2(FLOAT, 0, (2.0,), (1,), False, HOOKS),
    "v2 with sizes of None": v2(FLOAT, 0, None, (1,), False, HOOKS),
    "v2 with sizes in a dict": v2(FLOAT, 0, {2: 2}, (1,), False, HOOKS),
    "v2 of a real conjugate": v2(FLOAT, 0, (2,), (1,), False, HOOKS, {"conj": True}),
    "v3 of a class": v3(UNTYPED, 0, (2,), (1,), False, HOOKS, Name("torch FloatStorage")),
    "v3 of a name": v3(UNTYPED, 0, (2,), (1,), False, HOOKS, "float32"),
    "v3 beyond by one": v3(UNTYPED, 0, (9,), (1,), False, HOOKS, Name("torch float64")),
    "parameter of ints with a gradient": Call(utils("_rebuild_parameter"), (IDS, True, HOOKS)),
    "parameter of a list": Call(utils("_rebuild_parameter"), ([1], True, HOOKS)),
    "parameter of two": Call(utils("_rebuild_parameter"), (TENSOR, True)),
    "Parameter of a str": Call(Name(P), ("abc",)),
    "Parameter whose state is a dict": Call(Name(P), (TENSOR,), {"requires_grad": True}),
    "Parameter whose state makes ints want a gradient": Call(Name(P), (IDS, False), (True, False, HOOKS)),
    "from type of no function": Call(Name("torch._tensor _rebuild_from_type_v2"), ("x", Name("torch Tensor"), TENSOR.args, {})),
    "from type of no tensor": Call(Name("torch._tensor _rebuild_from_type_v2"), (TENSOR.callee, Name("torch Size"), TENSOR.args, {})),
    "from type with a list of attributes": Call(Name("torch._tensor _rebuild_from_type_v2"), (TENSOR.callee, Name("torch Tensor"), TENSOR.args, [1])),
    "sparse of a layout of no kind": Call(utils("_rebuild_sparse_tensor"), ("torch.sparse_coo", (IDS, PAIR, (2, 2)))),
    "sparse of a dense layout": Call(utils("_rebuild_sparse_tensor"), (layout("strided"), (IDS, PAIR, (2, 2)))),
    "sparse with float indices": Call(utils("_rebuild_sparse_tensor"), (layout("sparse_coo"), (TENSOR, PAIR, (2, 2), False))),
    "sparse with other counts": Call(utils("_rebuild_sparse_tensor"), (layout("sparse_coo"), (IDS, TENSOR, (2, 2, 5), False))),
    "sparse of one": Call(utils("_rebuild_sparse_tensor"), (layout("sparse_coo"), (IDS,))),
    "quantized with floats": qtensor("per_tensor_affine", 0.5, 1, pid=FLOAT, shape=(2,), stride=(1,)),
    "quantized without parameters": qtensor("per_tensor_affine"),
    "quantized of another scheme": qtensor("per_tensor_symmetric", 0.5, 1),
    "quantized beyond": qtensor("per_tensor_affine", 0.5, 1, offset=60),
    "quantized along no axis": qtensor("per_channel_affine", [0.5, 1.0], [0, 1], 2),
    "quantized along a negative axis": qtensor("per_channel_affine", [0.5, 1.0], [0, 1], -1),
    "quantized with too few scales": qtensor("per_channel_affine", [0.5], [0, 1], 0),
    "quantized with too many zero points": qtensor("per_channel_affine", [0.5, 1.0], [0, 1, 2], 0),
    "quantized with a scale of text": qtensor("per_channel_affine", [0.5, "x"], [0, 1], 0),
    "meta with fewer strides": Call(utils("_rebuild_meta_tensor_no_storage"), (Name("torch float32"), (2, 3), (1,), False)),
    "meta whose size wraps": Call(utils("_rebuild_meta_tensor_no_storage"), (Name("torch float32"), (2**40, 2**40), (1, 1), False)),
    "meta of ints with a gradient": Call(utils("_rebuild_meta_tensor_no_storage"), (Name("torch int8"), (2,), (1,), True)),
    "torch.FloatTensor of doubles": Call(Name("torch FloatTensor"), (), (DOUBLE, 0, (2,), (1,))),
    "torch.FloatTensor beyond": Call(Name("torch FloatTensor"), (), (FLOAT, 0, (17,), (1,))),
    "Size of text": Call(Name("torch Size"), (["a"],)),
    "device of no kind": Call(Name("torch device"), ("toaster",)),
    "device of a negative index": Call(Name("torch device"), ("cuda", -1)),
    "device of a huge index": Call(Name("torch device"), ("cuda", 2**70)),
    "layout of no kind": Call(Name("torch.serialization _get_layout"), ("torch.load",)),
    "layout of two": Call(Name("torch.serialization _get_layout"), ("torch.strided", 1)),
}  # fmt: skip


@pytest.mark.parametrize("obj", BAD.values(), ids=BAD)
def test_what_torch_refuses(obj):
    file = torch_file(craft([obj]), *STORAGES)
    with pytest.raises(CheckpointError) as caught:
        fastckpt.load(file)
    assert len(str(caught.value)) < 700
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever torch says
        torch_load(file)


# torch takes these for something; they are nothing that it writes.
STRICTER = {
    "v2 of a quantized storage": (v2(QINT8, 0, (2,), (1,), False, HOOKS), "no quantizer"),
    "v3 of a quantized dtype": (v3(UNTYPED, 0, (2,), (1,), False, HOOKS, Name("torch qint8")), "no quantizer|a dtype"),
    "torch.FloatTensor of a short state": (Call(Name("torch FloatTensor"), (), (FLOAT, 0, (2,))), "a tensor's state"),
    "Size of 2**63": (Call(Name("torch Size"), ([2**63],)), "ints as sizes"),
    "FloatTensor(n): memory as it was": (Call(Name("torch FloatTensor"), (5,)), "uninitialised"),
    "sparse with expanded indices": (Call(utils("_rebuild_sparse_tensor"), (layout("sparse_coo"), (v2(LONG, 0, (1, 2**40), (0, 0), False, HOOKS), v2(FLOAT, 0, (2**40,), (0,), False, HOOKS), (9,), False))), "elements over 1 in the file"),
    "csr with expanded indices": (Call(utils("_rebuild_sparse_tensor"), (layout("sparse_csr"), (v2(LONG, 0, (2**40,), (0,), False, HOOKS), ids(0, 3), v2(FLOAT, 0, (3,), (1,), False, HOOKS), (2, 1)))), "elements over 1 in the file"),
    "nested with expanded sizes": (Call(utils("_rebuild_nested_tensor"), (PAIR, v2(LONG, 0, (2**40, 2), (0, 0), False, HOOKS), v2(LONG, 0, (2**40, 2), (0, 0), False, HOOKS), v2(LONG, 0, (2**40,), (0,), False, HOOKS))), "elements over 1 in the file"),
    "device tensor of expanded values": (Call(utils("_rebuild_device_tensor_from_cpu_tensor"), (v2(FLOAT, 0, (2**40,), (0,), False, HOOKS), Name("torch float32"), "cpu", False)), "elements over 1 in the file"),
    "sparse with indices out of range": (
        Call(utils("_rebuild_sparse_tensor"), (layout("sparse_coo"), (IDS, PAIR, (1, 1), False))), "sparse tensor contradicts itself"),
    "csr with indices out of range": (
        Call(utils("_rebuild_sparse_tensor"), (layout("sparse_csr"), (ids(5, 3), ids(0, 3), v2(FLOAT, 0, (3,), (1,), False, HOOKS), (2, 1)))),
        "sparse tensor contradicts itself"),
    "nested tensor out of its buffer": (
        Call(utils("_rebuild_nested_tensor"), (PAIR, v2(LONG, 6, (1, 2), (2, 1), False, HOOKS), IDS, ids(0, 1))), "nested tensor"),
    "attribute of torch's own": (
        Call(Name("torch._tensor _rebuild_from_type_v2"), (TENSOR.callee, Name("torch Tensor"), TENSOR.args, {"requires_grad": True})),
        "'requires_grad' of a tensor, which is torch's own"),
    "attribute that is a method": (
        Call(utils("_rebuild_parameter_with_state"), (TENSOR, True, HOOKS, {"backward": 1})), "'backward' of a tensor, which is torch's own"),
}  # fmt: skip


@pytest.mark.parametrize("case", STRICTER.values(), ids=STRICTER)
def test_stricter_than_torch(case):
    obj, message = case
    with pytest.raises(CheckpointError, match=message):
        fastckpt.load(torch_file(craft([obj]), *STORAGES))


def test_hooks_of_the_file_are_not_taken():
    for hooks in ({1: 2}, 5, Call(Name("collections OrderedDict"), ([[0, Name("os system")]],))):
        file = torch_file(craft(v2(FLOAT, 0, (2,), (1,), True, hooks)), *STORAGES)
        tensor = fastckpt.load(file, unknown="opaque")
        assert tensor._backward_hooks is None
        tensor.sum().backward()


# -- what torch.load with weights_only=True does not read -----------------------------------------------------------------

NUMPY = Call(Name("numpy.core.multiarray _reconstruct"), (Name("numpy ndarray"), (0,), b"b"),
             (1, (2,), Call(Name("numpy dtype"), ("f4", False, True), (3, "<", None, None, None, -1, -1, 0)), False, FLOATS[:8]))  # fmt: skip
V = Name("torch.autograd.variable Variable")
BEYOND = {
    "v3 with a gradient": (v3(UNTYPED, 0, (4,), (1,), True, HOOKS, Name("torch float64"), {}), torch.frombuffer(bytearray(BYTES[:32]), dtype=torch.float64).requires_grad_()),
    "Variable": (Call(V, (TENSOR,), (False, False, HOOKS)), torch.arange(1, 7.0).reshape(2, 3)),
    "Variable with a gradient": (Call(V, (TENSOR,), (True, False, HOOKS)), torch.arange(1, 7.0).reshape(2, 3).requires_grad_()),
    "Parameter of 2016": (
        Call(Name(P), (TENSOR,), (TENSOR, None, {}, False, False)), torch.nn.Parameter(torch.arange(1, 7.0).reshape(2, 3), False)),
    "from type of 1.7": (Call(Name("torch.tensor _rebuild_from_type"), (TENSOR.callee, Name("torch Tensor"), TENSOR.args, {})), torch.arange(1, 7.0).reshape(2, 3)),
    "xla tensor from numpy": (Call(utils("_rebuild_xla_tensor"), (NUMPY, Name("torch float64"), "cpu", False)), torch.tensor([0.0, 1.0], dtype=torch.float64)),
    "csr of 1.12": (
        Call(utils("_rebuild_sparse_csr_tensor"), (layout("sparse_csr"), (ids(5, 3), ids(0, 3), v2(FLOAT, 0, (3,), (1,), False, HOOKS), (2, 4)))), None),
    "TorchScript list": (Call(Name("torch.jit._pickle build_intlist"), ([1, 2],)), [1, 2]),
    "TorchScript tag": (Call(Name("torch.jit._pickle restore_type_tag"), ({"a": 1}, "Dict[str, int]")), {"a": 1}),
    "UninitializedParameter": (Call(Name("torch.nn.parameter UninitializedParameter"), (True,)), UnsafePickleError),
    "storage in a plain pickle": (Call(Name("torch.storage _load_from_bytes"), (b"abc",)), UnsafePickleError),
}  # fmt: skip


@pytest.mark.parametrize("case", BEYOND.values(), ids=BEYOND)
def test_beyond_torch(case):
    obj, expected = case
    file = torch_file(craft([obj]), *STORAGES)
    if isinstance(expected, type):
        with pytest.raises(expected):
            fastckpt.load(file)
        return
    (found,) = fastckpt.load(file)
    if expected is None:
        assert found.layout is torch.sparse_csr
    elif isinstance(expected, torch.Tensor):
        assert type(found) is type(expected)
        assert found.requires_grad == expected.requires_grad
        assert torch.equal(found, expected)
    else:
        assert found == expected


def test_ordered_dicts_of_python_2_and_3():
    for obj in (
        Call(
            Name("collections OrderedDict"),
            ([["b", TENSOR], ["a", 1]],),
            {"_metadata": {"version": 1}},
        ),
        Raw(
            b"ccollections\nOrderedDict\n)R("
            + emit("b")
            + emit(TENSOR)
            + emit("a")
            + b"K\x01u"
            + emit({"_metadata": {"version": 1}})
            + b"b"
        ),
    ):
        found = fastckpt.load(torch_file(craft(obj), *STORAGES))
        assert type(found) is collections.OrderedDict
        assert list(found) == ["b", "a"]
        assert found._metadata == {"version": 1}


# -- legacy views --------------------------------------------------------------------------------------------------


def test_views_of_a_storage_are_storages():
    root = ("storage", Name("torch FloatStorage"), "0", "cpu", 16)
    unpickled = unpickle(
        craft(
            [
                Pid((*root, None)),
                Pid((*root, ("v", 4, 8))),
                Pid((*root, ("v", 4, 8))),
                Pid((*root, ("w", 0, 16))),
            ]
        ),
        pids=PIDS_LEGACY,
    )
    whole, view, again, other = (ref.storage for ref in unpickled.obj)
    assert view is again
    assert (view.root, view.offset, view.nbytes) == (whole, 16, 32)
    assert (other.root, other.offset, other.nbytes) == (whole, 0, 64)
    assert len(unpickled.storages) == 3


def test_a_view_bounds_its_tensors():
    root = ("storage", Name("torch FloatStorage"), "0", "cpu", 16, ("v", 4, 8))
    unpickle(craft(v2(Pid(root), 0, (8,), (1,), False, HOOKS)), pids=PIDS_LEGACY)
    with pytest.raises(FormatError, match="reaches beyond its storage"):
        unpickle(craft(v2(Pid(root), 0, (9,), (1,), False, HOOKS)), pids=PIDS_LEGACY)


def test_errors_name_what_is_there():
    with pytest.raises(FormatError) as caught:
        unpickle(craft(v2(FLOAT, 13, (4,), (1,), False, HOOKS)), pids=PIDS_ZIP)
    message = str(caught.value)
    assert "shape (4,), stride (1,), offset 13" in message
    assert "'0', which has room for 16 elements of float32" in message
