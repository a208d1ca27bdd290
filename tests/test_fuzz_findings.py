"""What the fuzzers found, and its siblings: each was a hang, another error than ours, or memory out of proportion."""

import io
import json
import tracemalloc

import numpy as np
import pytest

import fastckpt
from fastckpt.errors import FormatError, LimitError, short
from make_expected import FOLDER
from picklecraft import Call, Name, Raw, craft, emit, storage, torch_file

ONE = storage("FloatStorage", "0", 1)
TENSOR = Call(Name("torch._utils _rebuild_tensor_v2"), (ONE, 0, (1,), (1,), False, {}))
TENSOR_ARGS = TENSOR.args
REBUILD = Name("torch._utils _rebuild_tensor_v2")
FROM_TYPE = Name("torch._tensor _rebuild_from_type_v2")
# A tuple of twice a tuple, two hundred levels deep: whoever prints it prints for ever.
ENDLESS = Raw(b"K\1" + b"2\x86" * 200)
HUGE = 10**6000  # Python has no decimal text for it


def zipped(obj):
    return torch_file(craft(obj), b"\0\0\x80?")


# Files that fuzzers found, one for each message that showed a value which has no end, or no text.
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
FOUND = [name for name in EXPECTED if name.startswith("refused/found_")]


@pytest.mark.parametrize("unknown", ["error", "opaque"])
@pytest.mark.parametrize("name", FOUND)
def test_errors_show_what_has_no_end(name, unknown):
    kind = getattr(fastckpt, EXPECTED[name]["refused"])
    with pytest.raises(kind) as caught:
        fastckpt.load((FOLDER / name).read_bytes(), framework="numpy", unknown=unknown)
    assert "Exceeds the limit" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("name", ["a", ENDLESS], ids=["of torch's own", "endless"])
def test_attributes_of_tensors_are_named_in_short(name):
    pytest.importorskip("torch")
    names = Raw(b"}" + emit("data" if name == "a" else Raw(b"K\1" + b"2\x86" * 12)) + b"Ns")
    with pytest.raises(fastckpt.UnsafePickleError, match="which is torch's own") as caught:
        fastckpt.load(zipped(Call(FROM_TYPE, (REBUILD, Name("torch Tensor"), TENSOR_ARGS, names))))
    assert len(caught.value.qualname) < 100


VALUES = {
    "short text": ("abc", "'abc'"),
    "long text": ("a" * 10**6, "'" + "a" * 56 + "..."),
    "bytes": (b"a" * 10**6, "b'" + "a" * 55 + "..."),
    "an int": (2**64, str(2**64)),
    "a huge int": (HUGE, "<int of 19932 bits>"),
    "a slice of huge ints": (slice(HUGE), "<slice>"),
    "a list of many": ([1] * 9, "<list of 9>"),
    "a dict": ({1: "a"}, "<dict of str>"),
    "nothing": (None, "None"),
}


@pytest.mark.parametrize("case", VALUES.values(), ids=VALUES)
def test_short(case):
    value, expected = case
    assert short(value) == expected


# -- names


@pytest.mark.parametrize("key", [HUGE, (HUGE, 1)], ids=["int", "tuple"])
def test_keys_that_have_no_text(key, tmp_path):
    data = zipped({key: TENSOR, "b": [{key: TENSOR}]})
    with fastckpt.open(data, framework="numpy") as checkpoint:
        assert len(checkpoint) == 2
        assert [checkpoint[name].numpy().tolist() for name in checkpoint] == [[1.0], [1.0]]
        assert "<" in repr(list(checkpoint.values()))
    assert fastckpt.verify(data).ok
    assert len(fastckpt.salvage(data, tmp_path / "out.pt").kept) == 2
    kept = fastckpt.load(data, framework="numpy", keys="b.*")
    assert list(kept) == ["b"]
    assert kept["b"][0][key] == np.ones(1, np.float32)


@pytest.mark.parametrize("value", [True, False, None])
@pytest.mark.parametrize("name", ["conj", "neg"])
def test_the_bits_of_a_view_are_there_or_not(name, value):
    torch = pytest.importorskip("torch")
    pair = storage("ComplexFloatStorage", "0", 1)
    data = torch_file(
        craft(Call(REBUILD, (pair, 0, (1,), (1,), False, {}, {name: value}))), b"\0\0\x80?" * 2
    )
    expected = torch.load(io.BytesIO(data), weights_only=True)
    loaded = fastckpt.load(data)
    assert (loaded.is_conj(), loaded.is_neg()) == (expected.is_conj(), expected.is_neg())
    assert loaded.tolist() == expected.tolist()


@pytest.mark.parametrize("key", ["\ud800", "\udc80"], ids=["high", "low"])  # noqa: PT014 - ruff takes them for one
@pytest.mark.parametrize("numel", [0, 1], ids=["empty", "missing"])
def test_storage_keys_that_are_no_text(key, numel, tmp_path):
    """No record is called so; a storage without bytes needs none."""
    out = tmp_path / "out.pt"
    args = (storage("FloatStorage", key, numel), 0, (numel,), (1,), False, {})
    data = zipped({"a": Call(REBUILD, args), "b": TENSOR})
    report = fastckpt.verify(data)
    assert report.ok == (numel == 0)
    assert report.torch_accepts is False
    kept = fastckpt.salvage(data, out).kept
    assert kept == (("a", "b") if numel == 0 else ("b",))
    assert list(fastckpt.load(out, framework="numpy")) == list(kept)
    assert fastckpt.verify(out).ok


def long_names(levels, key="k" * 100_000):
    """Dicts inside each other, all under one long key, with a tensor in each: names of megabytes, out of two bytes each."""
    inner = b"h\2"
    for _ in range(levels):
        inner = b"}(h\1" + inner + b"K\0h\2u"
    return torch_file(
        b"\x80\2" + emit(key) + b"q\x010" + emit(TENSOR) + b"q\x020" + inner + b".", b"\0\0\x80?"
    )


NAMING = (
    lambda data, folder: fastckpt.load(data, framework="numpy", keys="*0"),
    lambda data, folder: fastckpt.salvage(data, folder / "out.pt"),
    lambda data, folder: fastckpt.verify(data),
)


def test_names_are_bounded(tmp_path):
    data = long_names(200)
    tracemalloc.start()
    try:
        with fastckpt.open(data, framework="numpy") as checkpoint:
            with pytest.raises(LimitError, match="load it whole"):
                list(checkpoint)
            assert checkpoint.read()[0].tolist() == [1.0]
        for read in NAMING:
            with pytest.raises(LimitError, match="load it whole"):
                read(data, tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 400 << 20
    finally:
        tracemalloc.stop()
    with fastckpt.open(long_names(100, "layer"), framework="numpy") as checkpoint:
        assert len(list(checkpoint)) == 101


def test_calls_of_calls_have_one_name():
    tracemalloc.start()
    try:
        data = torch_file(b"\x80\2cx\nY\n" + b")R" * 20_000 + b".")
        loaded = fastckpt.load(data, framework="numpy", unknown="opaque")
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()
    assert loaded.qualname == "x.Y()"


# -- lazy tensors and parts


def test_tensors_that_an_unknown_function_makes():
    data = zipped({"a": Call(FROM_TYPE, (Name("x make"), Name("torch Tensor"), (1,), None))})
    with fastckpt.open(data, framework="numpy") as checkpoint:
        lazy = checkpoint["a"]
        said = (lazy.shape, lazy.dtype, lazy.nbytes, lazy.requires_grad, lazy.kind)
        assert said == (None, None, 0, False, "from_type")
        assert repr(lazy) == "LazyTensor('a', None, shape=None, from_type)"


@pytest.mark.parametrize("key", [ONE, (1, ONE)], ids=["storage", "in a tuple"])
def test_storages_in_keys_are_read_with_the_part_they_stand_in(key):
    pytest.importorskip("torch")
    data = zipped({"a": {key: 1}, "b": 2})
    loaded = fastckpt.load(data, keys="a.*")
    assert list(loaded["a"].values()) == [1]
    with pytest.raises(FormatError, match="unhashable"):  # an array, which NumPy's storages are
        fastckpt.load(data, framework="numpy", keys="a.*")


def test_sizes_and_devices_are_no_tensors():
    for args in (
        (Call(Name("torch Size"), ((2,),)), True, {}),
        (Call(Name("torch device"), ("cpu",)), True, {}),
    ):
        with pytest.raises(FormatError, match="a tensor is expected"):
            fastckpt.load(
                zipped(Call(Name("torch._utils _rebuild_parameter"), args)), framework="numpy"
            )
