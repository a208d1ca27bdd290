"""Tensors of an open checkpoint: what is known of them, and reading parts of them."""

import io
import math
import pickle
import warnings
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastckpt
from fastckpt.errors import ChecksumError, UnsupportedError
from fastckpt.source import ObjectSource
from streamcraft import floats, legacy_stream, storage, tensor
from support import QUIET, same
from zipcraft import Entry, archive

pytestmark = QUIET


def saved(obj, **options):
    out = io.BytesIO()
    torch.save(obj, out, **options)
    return out.getvalue()


def opened(obj, **options):
    return fastckpt.open(saved(obj), **options)


class Wrapped(torch.Tensor):
    """A subclass that no reader knows."""


def with_attribute(tensor):
    tensor.note = "seen"
    return tensor


X = torch.arange(24.0).view(4, 6)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # some kinds are beta, or deprecated
    LAYOUTS = {
        "strided": X,
        "transposed": X.t(),
        "offset": X[1:, 2:],
        "expanded": X[:1].expand(5, 6),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "int": torch.arange(5, dtype=torch.int16),
        "bool": torch.tensor([True, False]),
        "bfloat16": X.bfloat16(),
        "uint16": torch.arange(4).to(torch.uint16),
        "float8": X.to(torch.float8_e4m3fn),
        "complex": torch.randn(3, dtype=torch.complex64),
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "neg": torch.randn(3, dtype=torch.complex64).conj().imag,
        "gradient": X.clone().requires_grad_(),
        "parameter": torch.nn.Parameter(X.clone()),
        "frozen parameter": torch.nn.Parameter(torch.arange(3), requires_grad=False),
        "parameter with attributes": with_attribute(torch.nn.Parameter(X.clone())),
        "attributes": with_attribute(X.clone()),
        "subclass": X.clone().as_subclass(Wrapped),
        "sparse_coo": X.to_sparse(),
        "sparse_csr": X.to_sparse_csr(),
        "sparse_csc": X.to_sparse_csc(),
        "sparse_bsr": X.to_sparse_bsr((2, 2)),
        "parameter, sparse": torch.nn.Parameter(X.to_sparse()),
        "quantized": torch.quantize_per_tensor(X, 0.1, 2, torch.qint8),
        "quantized by channel": torch.quantize_per_channel(
            X, torch.rand(4) + 0.1, torch.arange(4), 0, torch.quint8
        ),
        "parameter, quantized": torch.nn.Parameter(
            torch.quantize_per_tensor(X, 0.1, 2, torch.qint32), requires_grad=False
        ),
        "meta": torch.empty(2, 3, device="meta", dtype=torch.int16),
        "meta scalar": torch.empty((), device="meta", requires_grad=True),
        "nested": torch.nested.nested_tensor([X, X[:1]]),
    }
KINDS = {
    "parameter": "parameter", "frozen parameter": "parameter", "parameter with attributes": "parameter", "attributes": "from_type",
    "subclass": "from_type", "sparse_coo": "sparse_coo", "sparse_csr": "sparse_csr", "sparse_csc": "sparse_csc",
    "sparse_bsr": "sparse_bsr", "parameter, sparse": "parameter", "quantized": "quantized_per_tensor",
    "quantized by channel": "quantized_per_channel", "parameter, quantized": "parameter", "meta": "meta", "meta scalar": "meta",
    "nested": "nested",
}  # fmt: skip
PLAIN = [
    name
    for name, t in LAYOUTS.items()
    if not (t.is_nested or t.is_quantized or t.is_meta or t.layout is not torch.strided)
]
OTHERS = [name for name in LAYOUTS if name not in PLAIN]


@pytest.mark.parametrize("name", LAYOUTS)
def test_attributes(name):
    """What torch says of the tensor, without reading it."""
    real = LAYOUTS[name]
    with opened({name: real}) as ckpt:
        ckpt.source.readinto = None  # no byte is read any more
        lazy = ckpt[name]
        assert lazy.name == name
        assert lazy.path == (name,)
        assert lazy.kind == KINDS.get(name, "strided")
        assert f"torch.{lazy.dtype}" == str(real.dtype)
        assert lazy.requires_grad == real.requires_grad
        assert lazy.numel == real.numel()
        assert lazy.nbytes == real.numel() * real.element_size()
        assert lazy.shape == (None if real.is_nested else tuple(real.shape))
        assert lazy.ndim == (None if real.is_nested else real.dim())
        assert repr(lazy).startswith(f"LazyTensor({name!r}, {lazy.dtype}, shape=")
        if name in PLAIN:
            assert lazy.stride == real.stride()
            assert lazy.storage_offset == real.storage_offset()
            assert lazy.storage.nbytes == real.untyped_storage().nbytes()
        if real.is_nested or not real.dim():
            with pytest.raises(TypeError, match="without dimensions"):
                len(lazy)
        else:
            assert len(lazy) == len(real)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_reads(name):
    real = LAYOUTS[name]
    with opened({name: real}, unknown="opaque") as ckpt:
        lazy = ckpt[name]
        if name != "subclass":
            same(torch.load(io.BytesIO(saved({name: real})))[name], lazy.read())
        part = lazy[...]
        assert type(part) is torch.Tensor
        assert (part.dtype, part.requires_grad, part.shape) == (
            real.dtype,
            real.requires_grad,
            real.shape,
        )
        assert part.is_conj() == real.is_conj()
        assert part.is_neg() == real.is_neg()
        assert equal(part.detach(), real.detach().as_subclass(torch.Tensor))
        array = lazy.numpy()
        assert type(array) is np.ndarray
        assert array.shape == real.shape
        assert np.array_equal(bits(array), bits(as_array(real)))
        assert np.array_equal(bits(np.asarray(lazy)), bits(array))


def equal(a, b):
    return bits(as_array(a)).tobytes() == bits(as_array(b)).tobytes()


def as_array(real):
    """The elements of a tensor of any dtype, as an array of its own or of bits."""
    real = real.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    view = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}.get(real.dtype)
    return (real.contiguous().view(view) if view and real.dim() else real).numpy()


def bits(array):
    return np.ascontiguousarray(array).view(f"V{array.dtype.itemsize}")


@pytest.mark.parametrize("name", OTHERS)
def test_other_layouts(name):
    """Whole as load gives them; what they have no such thing of is said, by name and kind."""
    real = LAYOUTS[name]
    data = saved({name: real})
    with fastckpt.open(data) as ckpt:
        lazy = ckpt[name]
        same(torch.load(io.BytesIO(data))[name], lazy.read())
        same(torch.load(io.BytesIO(data))[name], lazy.torch())
        with pytest.raises(
            UnsupportedError,
            match=rf"{name}: a {lazy.kind} tensor has no part; read\(\) gives it whole",
        ):
            lazy[0]
        for what in ("stride", "storage_offset", "storage"):
            with pytest.raises(UnsupportedError, match=what):
                getattr(lazy, what)
        for convert in (
            lazy.numpy,
            lambda: np.asarray(lazy),
            lambda: lazy.read(out=bytearray(lazy.nbytes)),
        ):
            with pytest.raises(UnsupportedError, match="read"):
                convert()


# -- slices


BASE = torch.arange(2000, dtype=torch.int32)
SHAPES = {
    "vector": BASE,
    "scalar": BASE[7],
    "matrix": BASE.view(40, 50),
    "transposed": BASE.view(40, 50).t(),
    "strided": BASE.view(40, 50)[3:30:3, 5:45:4],
    "expanded": BASE[100:110].expand(6, 10),
    "expanded inside": BASE[100:110].view(2, 1, 5).expand(2, 3, 5),
    "overlapping": BASE.unfold(0, 20, 3),
    "unfolded twice": BASE.view(40, 50).unfold(0, 5, 2).unfold(1, 7, 3),
    "permuted": BASE.view(5, 8, 50).permute(2, 0, 1),
    "channels last": BASE[: 2 * 3 * 4 * 5]
    .view(2, 3, 4, 5)
    .contiguous(memory_format=torch.channels_last),
    "empty": torch.empty(0, 5, dtype=torch.int32),
    "empty inside": BASE[:0].view(3, 0, 4),
    "bytes": BASE.to(torch.uint8).view(40, 50)[1:],
    "doubles": BASE.double().view(10, 200)[:, 3:],
}


@st.composite
def index_of(draw, shape):
    """An index of ints, slices and an ellipsis; ints may lie outside."""
    index = []
    for size in shape[: draw(st.integers(0, len(shape)))]:
        edge = st.integers(-size - 3, size + 3)
        index.append(
            draw(
                edge
                | st.slices(size)
                | st.builds(
                    slice, edge | st.none(), edge | st.none(), st.integers(1, 9) | st.none()
                )
            )
        )
    index = [
        slice(i.start, i.stop, abs(i.step)) if isinstance(i, slice) and i.step else i for i in index
    ]
    if draw(st.booleans()):
        index.insert(draw(st.integers(0, len(index))), ...)
    return index[0] if len(index) == 1 and draw(st.booleans()) else tuple(index)


@pytest.fixture(scope="module")
def shapes():
    """The shapes in one checkpoint, read through a file object that counts."""
    data = saved(SHAPES)
    with fastckpt.open(Counting(data)) as ckpt:
        assert isinstance(ckpt.source, ObjectSource)
        yield ckpt


class Counting:
    """A file object that counts the bytes it gives."""

    def __init__(self, data):
        self.inner, self.nbytes, self.calls = io.BytesIO(data), 0, 0
        self.seek, self.tell = self.inner.seek, self.inner.tell

    def read(self, n=-1):
        data = self.inner.read(n)
        self.nbytes += len(data)
        self.calls += 1
        return data


@pytest.mark.parametrize("name", SHAPES)
def test_slices(shapes, name):
    """Whatever is selected equals what NumPy selects, and little else is read."""
    lazy, real = shapes[name], SHAPES[name].numpy()
    counter, itemsize = shapes.source.f, real.itemsize
    lazy[...]  # the first look finds the record

    @settings(max_examples=120, deadline=None)
    @given(index_of(real.shape))
    def check(index):
        try:
            expected = real[index]
        except IndexError:
            with pytest.raises(IndexError):
                lazy[index]
            return
        counter.nbytes = counter.calls = 0
        actual = lazy[index]
        assert actual.shape == expected.shape
        assert np.array_equal(actual.numpy(), expected)
        useful = len(np.unique(expected)) * itemsize if itemsize > 1 else expected.size
        assert counter.nbytes <= max(
            2.2 * useful, 4096 * counter.calls, real.size * itemsize if counter.calls == 1 else 0
        )

    check()


def test_slices_are_their_own(shapes):
    """A part is no view of what was read before, and writing to it changes nothing else."""
    first, second = shapes["matrix"][3], shapes["matrix"][3]
    first.fill_(0)
    assert torch.equal(second, SHAPES["matrix"][3])
    assert first.untyped_storage().nbytes() == 200


def test_only_rows_that_are_needed():
    big = torch.arange(1_000_000, dtype=torch.int32).view(1000, 1000)
    counter = Counting(saved({"big": big}))
    with fastckpt.open(counter) as ckpt:
        opening = counter.nbytes
        assert opening < 100_000
        row_of_record = ckpt["big"][0, 0]
        counter.nbytes = 0
        assert torch.equal(ckpt["big"][500:502], big[500:502])
        assert counter.nbytes == 8000
        counter.nbytes = 0
        assert torch.equal(ckpt["big"][:, 7], big[:, 7])
        assert counter.nbytes == 4000
        counter.nbytes = 0
        assert torch.equal(ckpt["big"][10:20, ::2], big[10:20, ::2])
        assert counter.nbytes <= 2 * 5000 * 4
        assert row_of_record.item() == 0


def test_iteration(shapes):
    rows = list(shapes["matrix"])
    assert len(rows) == 40
    assert torch.equal(torch.stack(rows), SHAPES["matrix"])


def test_slices_of_slices_keep_meaning(shapes):
    assert shapes["unfolded twice"][2][3].tolist() == SHAPES["unfolded twice"][2][3].tolist()


def test_many_runs_in_parallel(monkeypatch):
    monkeypatch.setenv("FASTCKPT_SERIAL_BELOW", "0")
    big = torch.randn(3000, 2000)
    with fastckpt.open(saved([big]), threads=3) as ckpt:
        assert torch.equal(ckpt["0"][:, 1990:], big[:, 1990:])
        assert torch.equal(ckpt["0"][:, 3], big[:, 3])


# -- reading into memory of the caller


class TestOut:
    TARGETS = {  # noqa: RUF012
        "array": lambda: np.full((4, 6), -1, np.float32),
        "flat array": lambda: np.full(24, -1, np.float32),
        "bytearray": lambda: bytearray(96),
        "memoryview": lambda: memoryview(bytearray(96)),
        "memoryview of floats": lambda: memoryview(bytearray(96)).cast("f"),
        "part of a bytearray": lambda: memoryview(bytearray(100))[3:99],
        "tensor": lambda: torch.full((4, 6), -1.0),
        "part of a tensor": lambda: torch.full((6, 6), -1.0)[1:5],
        "parameter": lambda: torch.nn.Parameter(torch.full((4, 6), -1.0)),
    }

    @pytest.mark.parametrize("make", TARGETS.values(), ids=TARGETS)
    @pytest.mark.parametrize(
        "values", [X, X.view(6, 4).t(), X[:1].expand(4, 6)], ids=["plain", "transposed", "expanded"]
    )
    def test_targets(self, make, values):
        out = make()
        with opened([values]) as ckpt:
            assert ckpt["0"].read(out=out) is out
        flat = (
            out.detach().numpy()
            if isinstance(out, torch.Tensor)
            else np.frombuffer(out, np.float32)
        )
        assert flat.reshape(4, 6).tolist() == values.tolist()

    @pytest.mark.parametrize("name", PLAIN)
    def test_every_dtype(self, name):
        """Values, in the order of rows: what is conjugated when it is looked at is conjugated."""
        real = LAYOUTS[name]
        with opened({name: real}) as ckpt:
            out = torch.zeros(real.shape, dtype=real.dtype)
            ckpt[name].read(out=out)
            assert equal(out, real)
            array = np.zeros(real.shape, ckpt[name].numpy().dtype)
            assert ckpt[name].read(out=array) is array
            assert np.array_equal(bits(array), bits(as_array(real)))

    @pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "complex32"])
    def test_bare_bits(self, dtype):
        real = torch.arange(8, dtype=torch.uint8).view(getattr(torch, dtype))
        with opened([real]) as ckpt:
            out = np.zeros(real.numel(), f"u{real.element_size()}")
            ckpt["0"].read(out=out)
            assert out.tobytes() == bytes(range(8))

    WRONG = {  # noqa: RUF012
        "array too small": lambda: np.zeros((4, 5), np.float32),
        "array too large": lambda: np.zeros((4, 7), np.float32),
        "array of another shape": lambda: np.zeros((6, 4), np.float32),
        "array of another type": lambda: np.zeros((4, 6), np.int32),
        "array of another size": lambda: np.zeros((4, 6), np.float64),
        "array of bytes": lambda: np.zeros(96, np.uint8),
        "array in another byte order": lambda: np.zeros((4, 6), ">f4"),
        "array with gaps": lambda: np.zeros((4, 12), np.float32)[:, ::2],
        "array by columns": lambda: np.zeros((4, 6), np.float32, order="F"),
        "read-only array": lambda: np.broadcast_to(np.float32(0), (4, 6)),
        "frozen array": lambda: frozen(np.zeros((4, 6), np.float32)),
        "bytes": lambda: bytes(96),
        "bytearray too small": lambda: bytearray(95),
        "bytearray too large": lambda: bytearray(97),
        "empty": lambda: bytearray(),
        "memoryview with gaps": lambda: memoryview(bytearray(192))[::2],
        "read-only memoryview": lambda: memoryview(bytearray(96)).toreadonly(),
        "tensor of another type": lambda: torch.zeros(4, 6, dtype=torch.int32),
        "tensor of another shape": lambda: torch.zeros(24),
        "tensor with gaps": lambda: torch.zeros(4, 12)[:, ::2],
        "tensor by columns": lambda: torch.zeros(6, 4).t(),
        "expanded tensor": lambda: torch.zeros(1, 6).expand(4, 6),
        "meta tensor": lambda: torch.zeros(4, 6, device="meta"),
    }

    @pytest.mark.parametrize("make", WRONG.values(), ids=WRONG)
    def test_refused(self, make):
        out = make()
        with opened([X]) as ckpt, pytest.raises(ValueError, match=r"^out: "):
            ckpt["0"].read(out=out)

    def test_a_conjugated_target(self):
        """Its memory holds other values than it shows."""
        out = torch.zeros(3, dtype=torch.complex64).conj()
        with (
            opened([torch.ones(3, dtype=torch.complex64)]) as ckpt,
            pytest.raises(ValueError, match=r"^out: "),
        ):
            ckpt["0"].read(out=out)

    @pytest.mark.parametrize("out", [5, "text", [1.0] * 24, None.__class__], ids=repr)
    def test_no_buffer(self, out):
        with opened([X]) as ckpt, pytest.raises(TypeError):
            ckpt["0"].read(out=out)

    def test_nothing_to_read(self):
        with opened([torch.empty(0, 3)]) as ckpt:
            for out in (bytearray(), np.empty((0, 3), np.float32), torch.empty(0, 3)):
                assert ckpt["0"].read(out=out) is out


def frozen(array):
    array.flags.writeable = False
    return array


# -- as an array


class TestArray:
    def test_dtype_and_copy(self):
        with opened({"x": X}) as ckpt:
            lazy = ckpt["x"]
            assert np.asarray(lazy).dtype == np.float32
            assert np.asarray(lazy, dtype=np.float64).tolist() == X.tolist()
            assert np.array(lazy, copy=True).tolist() == X.tolist()
            assert lazy.__array__(np.dtype("i4")).dtype == np.int32
            with pytest.raises(ValueError, match="x is in a file: an array of it is always a copy"):
                lazy.__array__(copy=False)
            array = lazy.numpy()
            array[...] = 0  # its own memory
            assert lazy.numpy().tolist() == X.tolist()
            assert float(np.mean(lazy)) == X.mean().item()

    @pytest.mark.parametrize("name", ["conj", "neg"])
    def test_of_no_dimensions(self, name):
        z = torch.tensor(1 + 2j)
        real = {"conj": z.conj(), "neg": z.conj().imag}[name]
        with opened([real]) as ckpt:
            array = ckpt["0"].numpy()
            assert type(array) is np.ndarray
            assert array.shape == ()
            assert array.item() == real.item()
            assert np.asarray(ckpt["0"]).item() == real.item()

    def test_conjugate_slices(self):
        real = torch.randn(20, 3, dtype=torch.complex128).conj()
        imag = torch.randn(20, 3, dtype=torch.complex128).conj().imag
        with opened([real, imag]) as ckpt:
            assert torch.equal(ckpt["0"][3:5], real[3:5])
            assert ckpt["0"][3:5].is_conj()
            assert np.array_equal(ckpt["0"].numpy(), real.resolve_conj().numpy())
            assert torch.equal(ckpt["1"][7], imag[7])
        with opened([real, imag], framework="numpy") as ckpt:
            assert np.array_equal(ckpt["0"][3:5], real[3:5].resolve_conj().numpy())
            assert np.array_equal(ckpt["1"][3:5], imag[3:5].resolve_neg().numpy())

    def test_framework_numpy(self):
        with opened({"x": X, "i": torch.arange(3)}, framework="numpy") as ckpt:
            assert type(ckpt["x"].read()) is np.ndarray
            assert type(ckpt["x"][1:]) is np.ndarray
            assert type(ckpt["x"][0, 0]) is np.ndarray
            assert ckpt["x"][1:, 2].tolist() == X[1:, 2].tolist()
            same(X, ckpt["x"].torch())
            assert ckpt["x"].read(out=np.empty((4, 6), np.float32)).tolist() == X.tolist()


# -- whole tensors are verified, parts are not


def damaged(data, *, what=b"\0\0\x80\x3f"):
    at = data.index(X.numpy().tobytes())
    return data[:at] + what + data[at + len(what) :]


class TestVerified:
    def test_read_is(self):
        with fastckpt.open(damaged(saved([X]))) as ckpt:
            with pytest.raises(ChecksumError, match="CRC-32"):
                ckpt["0"].read()
            assert ckpt["0"][1].tolist() == X[1].tolist()
            assert ckpt["0"][0, 0].item() == 1

    def test_a_view_of_a_storage_is(self):
        with fastckpt.open(damaged(saved([X[2]]))) as ckpt:
            with pytest.raises(ChecksumError, match="CRC-32"):
                ckpt["0"].read()
            assert ckpt["0"][:].tolist() == X[2].tolist()

    def test_nobody_asked(self):
        with fastckpt.open(damaged(saved([X])), verify=False) as ckpt:
            assert ckpt["0"].read()[0, 0].item() == 1


# -- data that cannot be read in place


class TestTransformed:
    """Deflated and big-endian storages are read whole, and sliced right."""

    def packed(self, *, method=0, byteorder=b"little", swap=False):
        content = {"data.pkl": None, "byteorder": byteorder, "data/0": None, "version": b"3\n"}
        for name, data in records_of(saved({"x": X, "t": X.t(), "row": X[2, 1:]})).items():
            if name in content and content[name] is None:
                content[name] = (
                    X.numpy().astype(">f4").tobytes() if swap and name == "data/0" else data
                )
        return archive(
            [Entry(f"archive/{name}", data, method=method) for name, data in content.items()]
        )

    @pytest.mark.parametrize(
        "how",
        [
            {"method": 8},
            {"byteorder": b"big", "swap": True},
            {"method": 8, "byteorder": b"big", "swap": True},
        ],
        ids=["deflated", "big-endian", "both"],
    )
    @pytest.mark.parametrize("wrap", [bytes, Counting], ids=["bytes", "object"])
    def test_slices(self, how, wrap):
        with fastckpt.open(wrap(self.packed(**how))) as ckpt:
            assert torch.equal(ckpt["x"][1:3, ::2], X[1:3, ::2])
            assert torch.equal(ckpt["t"][4], X.t()[4])
            assert torch.equal(ckpt["row"][-1], X[2, -1])
            assert ckpt["x"].numpy().tolist() == X.tolist()
            assert torch.equal(ckpt["row"].read(out=torch.zeros(5)), X[2, 1:])
            same(X, ckpt["x"].read())

    def test_unaligned_slices(self):
        """An old slice of a storage, in bytes that begin anywhere."""
        obj = {"x": "y", "v": tensor(storage("0", 5, "DoubleStorage", view=("v", 1, 3)), (3,))}
        data = legacy_stream(obj, {"0": (5, np.arange(5.0).tobytes())})
        with fastckpt.open(data) as ckpt:
            assert ckpt["v"][1:].tolist() == [2, 3]
            assert ckpt["v"][0].item() == 1


def records_of(data):
    """{name without its folder: content} of an archive."""
    with zipfile.ZipFile(io.BytesIO(data)) as packed:
        return {name.partition("/")[2]: packed.read(name) for name in packed.namelist()}


def test_meta_storages():
    """They have a place in the file's object, and no values to slice."""
    data = legacy_stream(
        {"m": tensor(storage("0", 6, location="meta"), (2, 3))}, {"0": (6, floats(*range(6)))}
    )
    with fastckpt.open(data) as ckpt:
        assert ckpt["m"].shape == (2, 3)
        assert ckpt["m"].read().is_meta
        with pytest.raises(UnsupportedError, match="m: a tensor on the meta device has no values"):
            ckpt["m"][0]


def test_map_location_of_slices():
    with opened([X], map_location="meta") as ckpt:
        assert ckpt["0"][1:].is_meta
        assert ckpt["0"][1:].shape == (3, 6)
        assert ckpt["0"].read().is_meta
        assert ckpt["0"].numpy().tolist() == X.tolist()
    data = saved([X]).replace(b"X\x03\x00\x00\x00cpu", b"X\x03\x00\x00\x00xyz")
    with fastckpt.open(data, map_location={"xyz": "cpu"}, verify=False) as ckpt:
        assert torch.equal(ckpt["0"][1], X[1])


def test_closed(shapes):
    ckpt = opened(SHAPES)
    lazies = dict(ckpt)
    ckpt.close()
    for name, lazy in lazies.items():
        assert lazy.shape == tuple(SHAPES[name].shape)
        reads = (
            lazy.read, lazy.torch, lazy.numpy, lambda lazy=lazy: lazy[...], lambda lazy=lazy: np.asarray(lazy),
            lambda lazy=lazy: lazy.read(out=bytearray(lazy.nbytes)),
        )  # fmt: skip
        for read in reads:
            with pytest.raises(ValueError, match="closed"):
                read()


def test_pickled(tmp_path):
    """A LazyTensor is found again by its path, in a checkpoint that is opened once for all of one pickle."""
    path = tmp_path / "model.pt"
    torch.save({"a": {"x": X, 0: X[0]}, "a.x": X[1], "p": torch.nn.Parameter(X)}, path)
    with fastckpt.open(path) as ckpt:
        lazies = list(ckpt.values())
        copies = pickle.loads(pickle.dumps(lazies))
        for lazy, copy in zip(lazies, copies, strict=True):
            assert (copy.path, copy.kind, copy.shape) == (lazy.path, lazy.kind, lazy.shape)
            same(lazy.read(), copy.read())
        assert len({id(copy._checkpoint) for copy in copies}) == 1
        copies[0]._checkpoint.close()
    with opened([X]) as ckpt, pytest.raises(TypeError, match="opened by its path"):
        pickle.dumps(ckpt["0"])


def test_bare_storages():
    values = torch.arange(6, dtype=torch.int16)
    untyped = torch.arange(4, dtype=torch.uint8).untyped_storage()
    with opened({"s": values.storage(), "u": untyped, "t": values[2:]}) as ckpt:
        assert list(ckpt) == ["t"]
        tree = ckpt.tree
        typed, untyped = tree["s"], tree["u"]
        assert (typed.dtype, typed.nbytes, untyped.dtype, untyped.nbytes) == (
            "int16",
            12,
            "uint8",
            4,
        )
        assert (typed.key, untyped.key) == ("0", "1")
        assert repr(typed) == "LazyStorage('0', int16, 12 bytes)"
        assert typed.read().tolist() == [0, 1, 2, 3, 4, 5]
        assert untyped.read().tolist() == [0, 1, 2, 3]
        assert type(typed.read()) is torch.storage.TypedStorage
        part = tree["t"].read()
        assert part.untyped_storage().data_ptr() == typed.read().data_ptr()
        ckpt.close()
        with pytest.raises(ValueError, match="closed"):
            typed.read()
    with opened([values.storage()], framework="numpy") as ckpt:
        assert ckpt.tree[0].read().tolist() == [0, 1, 2, 3, 4, 5]


def test_numel_of_shapes():
    for name, real in SHAPES.items():
        assert math.prod(real.shape) == real.numel(), name
