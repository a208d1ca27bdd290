"""The tar checkpoints of torch 0.1.2 to 0.1.9, written by hand: no released torch writes them any more."""

import io
import struct
import tarfile

import numpy as np
import pytest
import torch

import fastckpt
from fastckpt.errors import CheckpointError, FormatError, UnsafePickleError
from streamcraft import Call, Name, Pid, floats, pickled, tar_checkpoint, tar_storage, tar_tensor
from support import same

# Keys are addresses.
A, B, V, W, T, U, X = 94_000_000_064, 94_000_000_128, 5, 6, 7, 8, -3

STORAGES = [
    (A, "FloatStorage", floats(*range(6)), 6),
    (B, "LongStorage", struct.pack("<2q", 7, -8), 2),
]
TENSORS = [(T, A, (2, 3), (3, 1), 0), (U, A, (3, 2), (1, 3), 0), (X, B, (2,), (1,), 0)]
OBJECT = {
    "a": Pid(str(T)),
    "t": Pid(str(U)),
    "n": Pid(str(X)),
    "again": Pid(str(T)),
    "step": 17,
    "l": [Pid(str(X)), None],
}
GOOD = tar_checkpoint(OBJECT, TENSORS, STORAGES)


def expected():
    a, n = torch.arange(6.0).view(2, 3), torch.tensor([7, -8])
    return {"a": a, "t": a.t(), "n": n, "again": a, "step": 17, "l": [n, None]}


def as_torch(tmp_path, data):
    """What torch makes of it, which it does for paths, and not for weights only."""
    path = tmp_path / "by_torch.tar"
    path.write_bytes(data)
    return torch.load(path, weights_only=False)


class Slow:
    """A file object whose reads are short."""

    def __init__(self, data):
        self.inner = io.BytesIO(data)
        self.seek, self.tell = self.inner.seek, self.inner.tell

    def read(self, n=-1):
        return self.inner.read(min(n, 100) if n > 0 else n)


def on_disk(tmp_path):
    def write(data):
        path = tmp_path / "model.pt"
        path.write_bytes(data)
        return path

    return write


SOURCES = {"path": on_disk, "bytes": lambda tmp_path: bytes, "object": lambda tmp_path: Slow}


@pytest.fixture(params=SOURCES.values(), ids=SOURCES)
def source(request, tmp_path):
    return request.param(tmp_path)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "form",
    [tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT],
    ids=["PAX", "ustar", "GNU"],
)
def test_forms(source, protocol, form, tmp_path):
    data = tar_checkpoint(OBJECT, TENSORS, STORAGES, protocol=protocol, form=form)
    same(expected(), fastckpt.load(source(data)))
    with fastckpt.open(source(data)) as ckpt:
        assert ckpt.contents.kind == "tar"
        assert list(ckpt) == ["a", "t", "n", "again", "l.0"]
        assert ckpt["t"][1].tolist() == [1, 4]
        assert ckpt["n"].dtype == "int64"
        same(expected(), ckpt.read())
    if protocol == 2:
        same(as_torch(tmp_path, data), fastckpt.load(data))


@pytest.mark.parametrize("threads", [1, 3])
def test_in_parallel(source, threads, monkeypatch):
    monkeypatch.setenv("FASTCKPT_SERIAL_BELOW", "0")
    same(expected(), fastckpt.load(source(GOOD), threads=threads))


def test_mapped(tmp_path):
    path = on_disk(tmp_path)(GOOD)
    loaded = fastckpt.load(path, mmap=True)
    same(expected(), loaded)
    loaded["a"].fill_(3)
    assert path.read_bytes() == GOOD


def test_in_numpy():
    loaded = fastckpt.load(GOOD, framework="numpy")
    assert loaded["t"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert loaded["a"] is loaded["again"]


@pytest.mark.parametrize(
    "order", [("storages", "tensors", "pickle", "sys_info"), ("tensors", "pickle", "storages")]
)
def test_members_in_any_order(source, order, tmp_path):
    """sys_info is never looked at, and may be missing."""
    data = tar_checkpoint(OBJECT, TENSORS, STORAGES, order=order)
    same(as_torch(tmp_path, data), fastckpt.load(source(data)))


def test_more_members(source):
    data = tar_checkpoint(
        OBJECT,
        TENSORS,
        STORAGES,
        order=("readme", "pickle", "tensors", "storages"),
        members={"readme": b"hello"},
    )
    same(expected(), fastckpt.load(source(data)))


def test_position_after_a_load(tmp_path):
    with open(on_disk(tmp_path)(GOOD), "rb") as f:
        same(expected(), fastckpt.load(f))
        assert f.read() == b""


def test_in_the_middle_of_a_file():
    same(expected(), fastckpt.load(b"junk" + GOOD, offset=4))


CLASSES = {
    "DoubleStorage": "<d",
    "FloatStorage": "<f",
    "HalfStorage": "<e",
    "LongStorage": "<q",
    "IntStorage": "<i",
    "ShortStorage": "<h",
    "CharStorage": "<b",
    "ByteStorage": "<B",
}


@pytest.mark.parametrize("module", ["torch", "torch.cuda"])
@pytest.mark.parametrize(("cls", "code"), CLASSES.items(), ids=CLASSES)
def test_types(tmp_path, module, cls, code):
    """The storage says the type; the tensor class beside it does not count."""
    raw = b"".join(struct.pack(code, i) for i in range(4))
    described = pickled((A, "cpu", Name(module, cls))) + struct.pack("<q", 4) + raw
    data = tar_checkpoint([Pid(str(T))], [(T, A, (4,), (1,), 0)], [described])
    (loaded,) = fastckpt.load(data)
    assert loaded.tolist() == [0, 1, 2, 3]
    same(as_torch(tmp_path, data), [loaded])


GEOMETRY = {
    "scalar": ((), (), 3),
    "no elements": ((0,), (1,), 0),
    "no elements, at the end": ((0, 5), (5, 1), 6),
    "offset": ((2,), (1,), 4),
    "overlapping": ((4, 3), (1, 1), 0),
    "expanded": ((5, 6), (0, 1), 0),
    "one, with any stride": ((1, 6), (99, 1), 0),
    "eight dimensions": ((1, 1, 2, 1, 3, 1, 1, 1), (6, 6, 3, 3, 1, 1, 1, 1), 0),
}


@pytest.mark.parametrize("geometry", GEOMETRY.values(), ids=GEOMETRY)
def test_geometry(source, geometry, tmp_path):
    data = tar_checkpoint([Pid(str(T))], [(T, A, *geometry)], STORAGES)
    (loaded,) = fastckpt.load(source(data))
    assert (tuple(loaded.shape), loaded.stride(), loaded.storage_offset()) == geometry
    same(as_torch(tmp_path, data), [loaded])


def test_storages_as_leaves(source, tmp_path):
    data = tar_checkpoint({"s": Pid(str(A)), "t": Pid(str(T))}, TENSORS, STORAGES)
    loaded = fastckpt.load(source(data))
    assert loaded["s"].tolist() == [0, 1, 2, 3, 4, 5]
    assert loaded["s"].data_ptr() == loaded["t"].data_ptr()
    same(as_torch(tmp_path, data), loaded)


def test_empty_storage(source, tmp_path):
    data = tar_checkpoint(
        [Pid(str(T)), Pid(str(A))], [(T, A, (0,), (1,), 0)], [(A, "FloatStorage", b"", 0)]
    )
    same(as_torch(tmp_path, data), fastckpt.load(source(data)))


def test_nothing_at_all(source):
    assert fastckpt.load(source(tar_checkpoint({"a": 1}, [], []))) == {"a": 1}
    with fastckpt.open(source(tar_checkpoint({"a": 1}, [], []))) as ckpt:
        assert list(ckpt) == []
        assert ckpt.tree == {"a": 1}


class TestViews:
    """Storages that are slices of others, and slices of slices."""

    VIEWS = ((V, A, 1, 4), (W, V, 2, 2))
    TENSORS = ((T, A, (6,), (1,), 0), (U, V, (2, 2), (2, 1), 0), (X, W, (2,), (1,), 0))
    OBJECT = {  # noqa: RUF012
        "root": Pid(str(T)),
        "view": Pid(str(U)),
        "of a view": Pid(str(X)),
        "bare": Pid(str(V)),
    }
    DATA = tar_checkpoint(OBJECT, TENSORS, STORAGES, VIEWS)

    def test_values(self, source):
        loaded = fastckpt.load(source(self.DATA))
        assert loaded["view"].tolist() == [[1, 2], [3, 4]]
        assert loaded["of a view"].tolist() == [3, 4]
        assert loaded["bare"].tolist() == [1, 2, 3, 4]
        assert loaded["bare"].nbytes() == 16
        root = loaded["root"].data_ptr()
        assert [loaded[k].data_ptr() - root for k in ("view", "of a view", "bare")] == [4, 12, 4]

    def test_as_torch(self, tmp_path):
        data = tar_checkpoint(
            {k: self.OBJECT[k] for k in ("root", "view")},
            self.TENSORS[:2],
            STORAGES,
            self.VIEWS[:1],
        )
        same(as_torch(tmp_path, data), fastckpt.load(data))

    def test_they_share_memory(self):
        loaded = fastckpt.load(self.DATA)
        loaded["root"].fill_(9)
        assert loaded["of a view"].tolist() == [9, 9]

    def test_lazily(self, source):
        with fastckpt.open(source(self.DATA)) as ckpt:
            assert ckpt["of a view"][1].item() == 4
            assert ckpt["view"][:, 0].tolist() == [1, 3]
            assert ckpt["view"].read(out=np.empty((2, 2), np.float32)).tolist() == [[1, 2], [3, 4]]
            view, root = ckpt["of a view"].read(), ckpt["root"].read()
            assert view.data_ptr() == root.data_ptr() + 12

    @pytest.mark.parametrize(
        "view",
        [(V, A, 3, 4), (V, A, -1, 2), (V, A, 0, -1), (V, A, 2**62, 2**62), (V, A, 7, 0), (V, 99, 0, 1), (A, B, 0, 1),
         (T, A, 0, 1), (V, A, 0), (V, A, 0, 1, 2), (V, A, 0.0, 1), ("5", A, 0, 1), (V, None, 0, 1), None, 5, "view"],
        ids=repr,
    )  # fmt: skip
    def test_impossible(self, source, view):
        with pytest.raises(FormatError):
            fastckpt.load(source(tar_checkpoint(OBJECT, TENSORS, STORAGES, [view])))

    def test_a_tensor_beyond_its_slice(self):
        with pytest.raises(FormatError, match="beyond its storage"):
            fastckpt.load(
                tar_checkpoint([Pid(str(U))], [(U, V, (5,), (1,), 0)], STORAGES, self.VIEWS)
            )


class TestPython2:
    STORAGES = [tar_storage(*s, python2=True) for s in STORAGES]  # noqa: RUF012

    def test_values(self, source, tmp_path):
        data = tar_checkpoint(OBJECT, TENSORS, self.STORAGES, python2=True)
        same(expected(), fastckpt.load(source(data)))
        same(as_torch(tmp_path, data), fastckpt.load(data))

    def test_encodings(self, source):
        obj = {"größe": Pid(str(T))}
        data = tar_checkpoint(obj, TENSORS, self.STORAGES, python2=True)
        a = expected()["a"]
        same({"größe": a}, fastckpt.load(source(data), encoding="latin1"))
        same({"größe".encode("latin-1"): a}, fastckpt.load(source(data), encoding="bytes"))
        with pytest.raises(FormatError, match="encoding='latin1'"):
            fastckpt.load(source(data))


def test_parameters_and_variables(source):
    """What 2016 and 2017 made of them; a Variable is today's tensor."""
    hooks = Call(Name("collections", "OrderedDict"))
    obj = {
        "parameter": Call(
            Name("torch.nn.parameter", "Parameter"), (Pid(str(T)),), (True, False, hooks)
        ),
        "2016": Call(
            Name("torch.nn.parameter", "Parameter"), (), (Pid(str(T)), None, hooks, False, False)
        ),
        "variable": Call(
            Name("torch.autograd.variable", "Variable"), (Pid(str(T)),), (True, False, hooks)
        ),
        "dict": Call(Name("collections", "OrderedDict"), ([["w", Pid(str(T))]],)),
    }
    loaded = fastckpt.load(source(tar_checkpoint(obj, TENSORS, STORAGES)))
    assert type(loaded["parameter"]) is torch.nn.Parameter
    assert loaded["parameter"].requires_grad
    assert type(loaded["2016"]) is torch.nn.Parameter
    assert not loaded["2016"].requires_grad
    assert type(loaded["variable"]) is torch.Tensor
    assert loaded["variable"].requires_grad
    for value in (loaded["parameter"], loaded["2016"], loaded["variable"], loaded["dict"]["w"]):
        assert value.tolist() == [[0, 1, 2], [3, 4, 5]]


class TestWholeModules:
    MODULE = Pid((Name("models.net", "Net"), "net.py", "class Net: pass"))
    DATA = tar_checkpoint({"model": Call(MODULE, (), {"weight": Pid(str(T))})}, TENSORS, STORAGES)

    def test_refused(self, source):
        with pytest.raises(UnsafePickleError, match=r"models\.net\.Net"):
            fastckpt.load(source(self.DATA))

    def test_opaque(self, source):
        model = fastckpt.load(source(self.DATA), unknown="opaque")["model"]
        assert model.qualname == "models.net.Net"
        same({"weight": expected()["a"]}, model.state)
        with fastckpt.open(source(self.DATA)) as ckpt:
            assert ckpt["model.weight"][0].tolist() == [0, 1, 2]


# -- what is refused


EVIL = Call(Name("os", "system"), ("touch /tmp/never",))
EVIL_PLACES = {
    "object": tar_checkpoint({"a": EVIL}, TENSORS, STORAGES),
    "number of tensors": tar_checkpoint(OBJECT, TENSORS, STORAGES, counts={"tensors": EVIL}),
    "number of storages": tar_checkpoint(OBJECT, TENSORS, STORAGES, counts={"storages": EVIL}),
    "views": tar_checkpoint(OBJECT, TENSORS, STORAGES, Call(Name("builtins", "eval"), ("[]",))),
    "a view": tar_checkpoint(OBJECT, TENSORS, STORAGES, [EVIL]),
    "a storage": tar_checkpoint(
        OBJECT, TENSORS, [pickled((A, EVIL, Name("torch", "FloatStorage"))) + bytes(8)]
    ),
    "a storage's class": tar_checkpoint(
        OBJECT, TENSORS, [pickled((A, "cpu", Name("os", "system"))) + bytes(8)]
    ),
    "a tensor": tar_checkpoint([], [pickled((T, A, EVIL)) + bytes(16)], STORAGES),
    "a tensor's class": tar_checkpoint(
        [], [pickled((T, A, Name("os", "system"))) + bytes(16)], STORAGES
    ),
}


@pytest.mark.parametrize("data", EVIL_PLACES.values(), ids=EVIL_PLACES)
def test_unknown_names_in_any_pickle(source, data):
    with pytest.raises(CheckpointError):
        fastckpt.load(source(data))
    with pytest.raises(CheckpointError), fastckpt.open(source(data), unknown="error") as ckpt:
        ckpt.read()


def storages_of(*described):
    return {"tensors": [], "storages": list(described)}


FLOAT = Name("torch", "FloatStorage")
COUNTS = (-1, 2**31, 2**62, 2**63, 2**70, 1.0, "3", None, True)
WRONG = {
    **{f"{n!r} tensors": {"counts": {"tensors": n}} for n in (*COUNTS, 4)},
    **{f"{n!r} storages": {"counts": {"storages": n}} for n in (*COUNTS, 3)},
    "a storage less than counted": {"counts": {"storages": 1}},
    **{f"{n} elements": storages_of((A, "FloatStorage", floats(1, 2), n)) for n in (-1, 3, 2**31, 2**61, 2**62, 2**63 - 1, -(2**63))},
    "a storage twice": storages_of(*STORAGES, STORAGES[0]),
    "alpha storages": storages_of(pickled((A, FLOAT)) + struct.pack("<q", 0)),
    "a storage of text": storages_of(pickled("storage") + bytes(8)),
    "a storage with a key of text": storages_of(pickled(("a", "cpu", FLOAT)) + bytes(8)),
    "a storage with a key of lists": storages_of(pickled(([], "cpu", FLOAT)) + bytes(8)),
    "a storage of a tensor class": storages_of(pickled((A, "cpu", Name("torch", "FloatTensor"))) + bytes(8)),
    "a storage without class": storages_of(pickled((A, "cpu", "torch.FloatStorage")) + bytes(8)),
    **{f"{n} dimensions": {"tensors": [tar_tensor(T, A, (1,), (1,), 0, ndim=n)]} for n in (-1, 2, 65, 2**31 - 1, -(2**31))},
    "a size below zero": {"tensors": [(T, A, (-1,), (1,), 0)]},
    "a stride below zero": {"tensors": [(T, A, (2,), (-1,), 1)]},
    "an offset below zero": {"tensors": [(T, A, (1,), (1,), -1)]},
    "beyond the storage": {"tensors": [(T, A, (7,), (1,), 0)]},
    "beyond the storage by its offset": {"tensors": [(T, A, (3,), (1,), 4)]},
    "beyond the storage by its stride": {"tensors": [(T, A, (2,), (6,), 0)]},
    "sizes that wrap": {"tensors": [(T, A, (2**32, 2**32), (0, 0), 0)]},
    "strides that wrap": {"tensors": [(T, A, (3,), (2**62,), 0)]},
    "no such storage": {"tensors": [(T, 99, (1,), (1,), 0)]},
    "a tensor twice": {"tensors": [TENSORS[0], TENSORS[0]]},
    "a tensor with a storage's key": {"tensors": [(A, A, (1,), (1,), 0)]},
    "a tensor in a tensor": {"tensors": [TENSORS[0], (U, T, (1,), (1,), 0)]},
    "a storage key of lists": {"tensors": [tar_tensor(T, [], (1,), (1,), 0)]},
    "a storage key of text": {"tensors": [tar_tensor(T, "a", (1,), (1,), 0)]},
    "a tensor key of lists": {"tensors": [tar_tensor([], A, (1,), (1,), 0)]},
    "a tensor of two": {"tensors": [pickled((T, A)) + bytes(16)]},
    "a tensor of text": {"tensors": [pickled("tensor") + bytes(16)]},
    "views that are none": {"views": Call(Name("collections", "OrderedDict"))},
    **{f"{name} missing": {"order": [m for m in ("pickle", "tensors", "storages") if m != name]} for name in ("pickle", "tensors", "storages")},
    **{f"{name} empty": {"members": {name: b""}} for name in ("pickle", "tensors", "storages")},
    **{f"{name} of zeros": {"members": {name: bytes(1000)}} for name in ("pickle", "tensors", "storages")},
    **{f"persistent id {pid!r}": {"obj": [Pid(pid)]} for pid in
       ("99", "x", "", b"x", None, (), (1, 2), [1], {}, float("inf"), float("nan"), "9" * 5000)},
}  # fmt: skip


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_wrong(source, change):
    """Each is an error of ours, at once, and takes no memory."""
    parts = {"obj": OBJECT, "tensors": TENSORS, "storages": STORAGES, **change}
    if parts["storages"] is not STORAGES and parts["tensors"] is TENSORS:
        parts["obj"], parts["tensors"] = [], []
    data = tar_checkpoint(**parts)
    with pytest.raises(CheckpointError):
        fastckpt.load(source(data))


def test_keys_are_any_int_of_64_bits(source):
    keys = (0, -1, 2**63 - 1, -(2**63), 2**64 - 1)
    storages = [(2 * i + 1, "FloatStorage", floats(i), 1) for i in range(5)]
    tensors = [(key, 2 * i + 1, (1,), (1,), 0) for i, key in enumerate(keys) if key != -1]
    obj = [Pid(str(key)) for key in keys if key != -1]
    loaded = fastckpt.load(source(tar_checkpoint(obj, tensors, storages)))
    assert [t.item() for t in loaded] == [0, 2, 3, 4]


SMALL = tar_checkpoint(
    [Pid("7")],
    [(7, 5, (2,), (1,), 0)],
    [(5, "FloatStorage", floats(1, 2), 2)],
    form=tarfile.USTAR_FORMAT,
)


@pytest.mark.parametrize("kind", SOURCES)
def test_every_truncation(kind, tmp_path):
    """A FormatError wherever the file ends, but for the padding behind the last member."""
    source = SOURCES[kind](tmp_path)
    needed = SMALL.rindex(pickled([])) + len(pickled([]))
    for nbytes in range(0, needed, 1 if kind == "bytes" else 13):
        with pytest.raises(FormatError):
            fastckpt.load(source(SMALL[:nbytes]))
    for nbytes in range(needed, len(SMALL), 500):
        assert fastckpt.load(source(SMALL[:nbytes]))[0].tolist() == [1, 2]


@pytest.mark.parametrize("member", ["pickle", "tensors", "storages"])
def test_every_truncation_of_a_member(member):
    """The archive is whole, a member in it is not: what follows it in the file is never taken for it."""
    whole = {
        "pickle": pickled([Pid("7")]),
        "tensors": pickled(1) + tar_tensor(7, 5, (2,), (1,), 0),
        "storages": pickled(1) + tar_storage(5, "FloatStorage", floats(1, 2), 2) + pickled([]),
    }
    for nbytes in range(len(whole[member])):
        data = tar_checkpoint([], [], [], members={**whole, member: whole[member][:nbytes]})
        with pytest.raises(FormatError) as caught:
            fastckpt.load(data)
        assert "end" in str(caught.value) or "left" in str(caught.value)
    assert fastckpt.load(tar_checkpoint([], [], [], members=whole))[0].tolist() == [1, 2]


def test_random_damage_never_crashes():
    randomness = np.random.default_rng(7)
    parts = {
        "pickle": pickled(OBJECT),
        "tensors": pickled(3) + b"".join(tar_tensor(*t) for t in TENSORS),
        "storages": pickled(2)
        + b"".join(tar_storage(*s) for s in STORAGES)
        + pickled([(V, A, 0, 2)]),
    }
    for _ in range(1000):
        member = ("pickle", "tensors", "storages")[randomness.integers(3)]
        data = bytearray(parts[member])
        for at in randomness.integers(0, len(data), randomness.integers(1, 4)):
            data[at] = randomness.integers(256)
        try:
            broken = tar_checkpoint([], [], [], members={**parts, member: bytes(data)})
            fastckpt.load(broken, unknown="opaque", map_location="cpu")
        except CheckpointError:
            pass
