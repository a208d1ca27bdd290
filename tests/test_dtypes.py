"""Every dtype that torch has, in every byte order, as tensors and as arrays."""

import sys

import numpy as np
import pytest
import torch

import fastckpt
from fastckpt.dtypes import CODE_BY_NAME, DTYPES, numpy_dtype
from objects import DENSE, random_storage, saved, torch_loads, view
from support import QUIET, same
from ziprewrite import big_endian, rewritten

pytestmark = QUIET

# Names of dtypes that no dense tensor has.
NOT_SAVED = {f"{sign}{bits}" for sign in ("int", "uint") for bits in range(1, 8)}
TORCH_DTYPES = {
    name: dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and str(dtype) == f"torch.{name}" and name not in NOT_SAVED
}


def tensor_of(name, numel=24):
    """Random bits of a dtype, as a transposed view behind an offset."""
    dtype = getattr(torch, name)
    return view(random_storage(dtype, numel, 3), dtype, 2, (3, 5), (1, 4))


def bits(tensor):
    """The elements of a tensor as bytes, in their order."""
    raw = tensor.untyped_storage().tolist()
    size = tensor.element_size()
    whole = np.array(raw, np.uint8).reshape(-1, size)
    index = np.lib.stride_tricks.as_strided(
        np.arange(tensor.storage_offset(), len(whole)),
        tensor.shape,
        [8 * n for n in tensor.stride()],
    )
    return whole[index].tobytes()


def test_table_is_complete():
    assert set(TORCH_DTYPES) <= {row.name for row in DTYPES}


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_table_agrees_with_torch(name):
    row = DTYPES[CODE_BY_NAME[name]]
    assert row.itemsize == TORCH_DTYPES[name].itemsize
    if row.storage:
        assert getattr(torch, row.storage).dtype == TORCH_DTYPES[name]


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", DENSE)
class TestDense:
    def test_torch(self, name, legacy):
        tensor = tensor_of(name)
        same(tensor, fastckpt.load(saved(tensor, legacy=legacy)))

    def test_numpy(self, name, legacy):
        tensor = tensor_of(name)
        array = fastckpt.load(saved(tensor, legacy=legacy), framework="numpy")
        assert array.shape == tensor.shape
        assert array.strides == tuple(n * tensor.element_size() for n in tensor.stride())
        assert array.dtype == numpy_dtype(CODE_BY_NAME[name])
        assert array.tobytes() == bits(tensor)

    def test_numpy_without_ml_dtypes(self, name, legacy, monkeypatch):
        monkeypatch.setitem(sys.modules, "ml_dtypes", None)
        row, tensor = DTYPES[CODE_BY_NAME[name]], tensor_of(name)
        array = fastckpt.load(saved(tensor, legacy=legacy), framework="numpy")
        assert array.dtype == np.dtype(row.numpy or row.raw)
        assert array.tobytes() == bits(tensor)


@pytest.mark.parametrize("name", [row.name for row in DTYPES if row.numpy and row.name in DENSE])
def test_numpy_has_the_same_values(name):
    tensor = tensor_of(name)
    array = fastckpt.load(saved(tensor), framework="numpy")
    np.testing.assert_array_equal(array, tensor.numpy())


ML_DTYPES = [
    "bfloat16",
    "float8_e5m2",
    "float8_e4m3fn",
    "float8_e5m2fnuz",
    "float8_e4m3fnuz",
    "float8_e8m0fnu",
]


@pytest.mark.parametrize("name", [name for name in ML_DTYPES if name in DENSE])
def test_ml_dtypes_has_the_same_values(name):
    pytest.importorskip("ml_dtypes")
    tensor = tensor_of(name)
    array = fastckpt.load(saved(tensor), framework="numpy")
    assert array.dtype.name == name
    np.testing.assert_array_equal(array.astype(np.float32), tensor.to(torch.float32).numpy())


@pytest.mark.parametrize("name", DENSE)
class TestBigEndian:
    def test_torch(self, name):
        tensor = tensor_of(name)
        data = big_endian(
            saved({"a": tensor, "b": tensor[1:]}), {"0": DTYPES[CODE_BY_NAME[name]].unit}
        )
        for options in ({}, {"threads": 1}):
            same({"a": tensor, "b": tensor[1:]}, fastckpt.load(data, **options))

    def test_mapped(self, name, tmp_path):
        tensor, path = tensor_of(name), tmp_path / "big.pt"
        path.write_bytes(big_endian(saved(tensor), {"0": DTYPES[CODE_BY_NAME[name]].unit}))
        same(tensor, fastckpt.load(path, mmap=True))

    def test_numpy(self, name):
        tensor = tensor_of(name)
        data = big_endian(saved(tensor), {"0": DTYPES[CODE_BY_NAME[name]].unit})
        assert fastckpt.load(data, framework="numpy").tobytes() == bits(tensor)


# torch does not swap the storages of dtypes that have no storage class.
@pytest.mark.parametrize("name", [name for name in DENSE if DTYPES[CODE_BY_NAME[name]].storage])
def test_big_endian_as_torch_reads_it(name):
    data = big_endian(saved(tensor_of(name)), {"0": DTYPES[CODE_BY_NAME[name]].unit})
    same(torch_loads(data), fastckpt.load(data))


@pytest.mark.skipif("uint16" not in DENSE, reason="this torch saves no uint16")
def test_big_endian_seen_in_two_sizes():
    storage = random_storage(torch.uint16, 8, 0)
    pair = [view(storage, torch.uint16, 0, (8,), (1,)), view(storage, torch.uint32, 0, (4,), (1,))]
    same(pair, fastckpt.load(saved(pair)))
    with pytest.raises(fastckpt.UnsupportedError, match="no byte order is right for both"):
        fastckpt.load(big_endian(saved(pair), {"0": 2}))


@pytest.mark.parametrize("order", [b"middle", b"", b"Little", b"\xff"])
def test_unknown_byte_order(order):
    data = rewritten(
        saved([torch.ones(3)]), change=lambda name, old: order if name == "byteorder" else old
    )
    with pytest.raises(fastckpt.FormatError, match="byteorder"):
        fastckpt.load(data)


QUANTIZED_MAKERS = {
    "qint8": lambda t: torch.quantize_per_tensor(t, 0.5, 3, torch.qint8),
    "quint8": lambda t: torch.quantize_per_tensor(t, 0.5, 3, torch.quint8),
    "qint32": lambda t: torch.quantize_per_tensor(t, 0.5, 3, torch.qint32),
    "per channel": lambda t: torch.quantize_per_channel(
        t, torch.ones(4), torch.arange(4), 0, torch.qint8
    ),
    "float zero points": lambda t: torch.quantize_per_channel(
        t, torch.ones(4), torch.rand(4), 0, torch.quint8
    ),
    "quint4x2": lambda t: torch.quantize_per_channel(
        t, torch.ones(4), torch.rand(4), 0, torch.quint4x2
    ),
    "quint2x4": lambda t: torch.quantize_per_channel(
        t, torch.ones(4), torch.rand(4), 0, torch.quint2x4
    ),
}


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("maker", QUANTIZED_MAKERS)
class TestQuantized:
    def test_torch(self, maker, legacy):
        tensor = QUANTIZED_MAKERS[maker](torch.linspace(-3, 3, 32).reshape(4, 8))
        loaded = fastckpt.load(saved(tensor, legacy=legacy))
        same(tensor, loaded)
        assert torch.equal(loaded.dequantize(), tensor.dequantize())
        assert loaded.untyped_storage().tolist() == tensor.untyped_storage().tolist()

    def test_numpy_has_none(self, maker, legacy):
        data = saved(
            [QUANTIZED_MAKERS[maker](torch.linspace(-3, 3, 32).reshape(4, 8)), 5], legacy=legacy
        )
        with pytest.raises(fastckpt.UnsupportedError, match="NumPy has nothing for"):
            fastckpt.load(data, framework="numpy")
        opaque, five = fastckpt.load(data, framework="numpy", unknown="opaque")
        assert five == 5
        assert opaque.qualname.startswith("torch.q")
        assert opaque.args[0].dtype.itemsize == (4 if maker == "qint32" else 1)


@pytest.mark.parametrize("name", sorted(NOT_SAVED & set(vars(torch))))
def test_dtypes_as_objects(name):
    dtype = getattr(torch, name)
    assert fastckpt.load(saved([dtype])) == [dtype]
    assert fastckpt.load(saved([dtype]), framework="numpy") == [f"torch.{name}"]


LACKING = [row.name for row in DTYPES if not hasattr(torch, row.name)]


@pytest.mark.parametrize(
    "name", LACKING or [pytest.param("", marks=pytest.mark.skip("this torch has them all"))]
)
def test_a_dtype_that_this_torch_lacks(name):
    def change(record, content):
        return (
            content.replace(b"float8_e5m2\n", f"{name}\n".encode())
            if record == "data.pkl"
            else content
        )

    data = rewritten(saved([tensor_of("float8_e5m2")]), change=change)
    with pytest.raises(fastckpt.UnsupportedError, match=f"has no {name}; a newer torch does"):
        fastckpt.load(data)
    assert fastckpt.load(data, framework="numpy")[0].shape == (3, 5)


# -- lazily conjugated and negated views, of which an array has the values ---------------------------------------------

VIEWS = {
    "conj": torch.conj,
    "neg": torch._neg_view,
    "both": lambda tensor: torch._neg_view(torch.conj(tensor)),
}


@pytest.mark.parametrize("how", VIEWS)
@pytest.mark.parametrize("name", ["complex64", "complex128"])
def test_numpy_of_a_view(name, how):
    tensor = VIEWS[how](torch.randn(3, 2, dtype=getattr(torch, name)))
    np.testing.assert_array_equal(
        fastckpt.load(saved(tensor), framework="numpy"), tensor.resolve_conj().resolve_neg()
    )


@pytest.mark.parametrize("installed", [True, False], ids=["with ml_dtypes", "without"])
@pytest.mark.parametrize("name", ["bfloat16", "complex32"])
def test_numpy_of_a_view_of_bits(name, installed, monkeypatch):
    tensor = torch._neg_view(torch.ones(3, dtype=getattr(torch, name)))
    if not installed:
        monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    if installed and name == "bfloat16":
        pytest.importorskip("ml_dtypes")
        assert fastckpt.load(saved(tensor), framework="numpy").astype(float).tolist() == [
            -1,
            -1,
            -1,
        ]
        return
    with pytest.raises(
        fastckpt.UnsupportedError, match=f"view of {name}, of which NumPy has the bits only"
    ):
        fastckpt.load(saved(tensor), framework="numpy")
