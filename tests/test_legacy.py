"""Legacy streams: five pickles and raw storages, written by hand and by torch."""

import io
import struct
import warnings

import numpy as np
import pytest
import torch

import fastckpt
from fastckpt.errors import CheckpointError, FormatError, UnsafePickleError, UnsupportedError
from streamcraft import Call, Name, Pid, contiguous, floats, legacy_stream, storage, tensor
from support import QUIET, same

pytestmark = QUIET

OBJECT = {
    "a": tensor(storage("10", 6), (2, 3)),
    "tied": tensor(storage("10", 6), (3,), offset=3),
    "n": tensor(storage("9", 2, "LongStorage"), (2,)),
    "step": 17,
    "name": "ünï",
    "nested": [(1.5, None), {"deep": tensor(storage("9", 2, "LongStorage"), (), (), 1)}],
}
STORAGES = {"10": (6, floats(0, 1, 2, 3, 4, 5)), "9": (2, struct.pack("<2q", 7, -8))}
GOOD = legacy_stream(OBJECT, STORAGES)


def expected():
    a, n = torch.arange(6.0), torch.tensor([7, -8])
    nested = [(1.5, None), {"deep": n[1]}]
    return {"a": a.view(2, 3), "tied": a[3:], "n": n, "step": 17, "name": "ünï", "nested": nested}


class Slow:
    """A file object without readinto, whose reads are short."""

    def __init__(self, data):
        self.inner = io.BytesIO(data)
        self.seek, self.tell = self.inner.seek, self.inner.tell

    def read(self, n=-1):
        return self.inner.read(min(n, 50) if n > 0 else n)


def on_disk(tmp_path):
    def write(data):
        path = tmp_path / "stream.pt"
        path.write_bytes(data)
        return path

    return write


SOURCES = {"path": on_disk, "bytes": lambda tmp_path: bytes, "object": lambda tmp_path: Slow}


@pytest.fixture(params=SOURCES.values(), ids=SOURCES)
def source(request, tmp_path):
    """Makes what load is given out of bytes."""
    return request.param(tmp_path)


@pytest.mark.parametrize("protocol", range(6))
def test_protocols(source, protocol):
    data = legacy_stream(OBJECT, STORAGES, protocol=protocol)
    same(expected(), fastckpt.load(source(data)))
    with fastckpt.open(source(data)) as ckpt:
        assert ckpt.contents.kind == "legacy"
        assert list(ckpt) == ["a", "tied", "n", "nested.1.deep"]
        same(expected(), ckpt.read())
        assert ckpt["a"][1].tolist() == [3, 4, 5]
        assert ckpt["nested.1.deep"][...].item() == -8
    if protocol == 2:
        same(torch.load(io.BytesIO(data)), fastckpt.load(data))


def test_as_torch_writes_it(source):
    """A stream of torch's own, with everything that its writer can put there."""
    base = torch.randn(4, 6)
    obj = {
        "parameter": torch.nn.Parameter(base.clone()),
        "transposed": base.t(),
        "row": base[2],
        "expanded": torch.ones(1, 3).expand(5, 3),
        "half": torch.randn(5).half(),
        "bfloat16": torch.randn(3).bfloat16(),
        "bool": torch.tensor([True, False]),
        "complex": torch.randn(2, dtype=torch.complex128).conj(),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3, dtype=torch.uint8),
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.randn(4), 0.1, 3, torch.quint8),
        "storage": torch.arange(4).storage(),
        "state": torch.nn.Linear(2, 2).state_dict(),
    }
    out = io.BytesIO()
    torch.save(obj, out, _use_new_zipfile_serialization=False)
    same(torch.load(io.BytesIO(out.getvalue())), fastckpt.load(source(out.getvalue())))


@pytest.mark.parametrize("threads", [1, 3])
def test_many_storages(source, threads, monkeypatch):
    """Sizes around the distance from which counts are read one by one."""
    monkeypatch.setenv("FASTCKPT_SERIAL_BELOW", "0")
    sizes = [
        0,
        1,
        3,
        16370,
        16376,
        16377,
        16383,
        16384,
        16385,
        65527,
        65528,
        65529,
        65536,
        100_000,
        5,
        0,
    ]
    obj = {str(i): torch.arange(n).to(torch.uint8) for i, n in enumerate(sizes)}
    out = io.BytesIO()
    torch.save(obj, out, _use_new_zipfile_serialization=False)
    same(obj, fastckpt.load(source(out.getvalue()), threads=threads))


@pytest.mark.parametrize(
    "dtype", ["uint16", "uint32", "uint64", "float8_e5m2", "float8_e8m0fnu", "complex32", "bits16"]
)
def test_dtypes_that_torch_cannot_read_back(dtype):
    """torch writes them through untyped storages, and fails to read those from a stream."""
    bits = torch.arange(24, dtype=torch.uint8)
    obj = [bits.view(getattr(torch, dtype)), bits.untyped_storage()]
    stream, archive = io.BytesIO(), io.BytesIO()
    torch.save(obj, stream, _use_new_zipfile_serialization=False)
    torch.save(obj, archive)
    actual, wanted = fastckpt.load(stream.getvalue()), torch.load(io.BytesIO(archive.getvalue()))
    assert actual[0].dtype == wanted[0].dtype
    same(wanted[0].view(torch.uint8), actual[0].view(torch.uint8))
    same(wanted[1], actual[1])


def test_nested_tensors():
    """Their sizes are values, which torch looks at before it has read them."""
    parts = [torch.arange(6.0).view(2, 3), torch.arange(4.0).view(2, 2)]
    out = io.BytesIO()
    torch.save(torch.nested.nested_tensor(parts), out, _use_new_zipfile_serialization=False)
    actual = fastckpt.load(out.getvalue())
    for a, b in zip(actual.unbind(), parts, strict=True):
        assert torch.equal(a, b)


# -- storages that are views of others: torch 0.1.10 to 0.4.1


VIEWS = {
    "root": tensor(storage("r", 10), (10,)),
    "slice": tensor(storage("r", 10, view=("v", 2, 5)), (2, 2)),
    "same slice": tensor(storage("r", 10, view=("v", 2, 5)), (3,), offset=2),
    "other": tensor(storage("r", 10, view=("w", 7, 3)), (3,)),
    "no elements": tensor(storage("r", 10, view=("x", 10, 0)), (0,)),
    "bare": storage("r", 10, view=("v", 2, 5)),
}
VIEWED = {"r": (10, floats(*range(10)))}


class TestViews:
    def test_as_torch_reads_them(self, source):
        data = legacy_stream(VIEWS, VIEWED)
        wanted, actual = torch.load(io.BytesIO(data)), fastckpt.load(source(data))
        same(wanted, actual)
        root = actual["root"].data_ptr()
        assert actual["slice"].data_ptr() == root + 8
        assert actual["other"].data_ptr() == root + 28

    def test_they_share_memory(self):
        loaded = fastckpt.load(legacy_stream(VIEWS, VIEWED))
        loaded["slice"].fill_(-1)
        assert loaded["root"].tolist() == [0, 1, -1, -1, -1, -1, 6, 7, 8, 9]
        assert loaded["same slice"].tolist() == [-1, -1, 6]
        assert loaded["bare"][0] == -1
        del loaded["root"]  # a slice keeps the memory of its root
        assert loaded["other"].tolist() == [7, 8, 9]

    def test_without_the_root(self, source):
        data = legacy_stream({"v": VIEWS["slice"]}, VIEWED)
        same(torch.load(io.BytesIO(data)), fastckpt.load(source(data)))

    def test_lazily(self, source):
        with fastckpt.open(source(legacy_stream(VIEWS, VIEWED))) as ckpt:
            assert ckpt["slice"][1].tolist() == [4, 5]
            assert ckpt["other"][-1].item() == 9
            assert ckpt["no elements"][:].shape == (0,)
            assert ckpt["same slice"].numpy().tolist() == [4, 5, 6]
            out = np.empty(3, np.float32)
            assert ckpt["other"].read(out=out).tolist() == [7, 8, 9]
            part, root = ckpt["slice"].read(), ckpt["root"].read()
            assert part.data_ptr() == root.data_ptr() + 8
            assert ckpt["slice"].read().untyped_storage()._cdata == part.untyped_storage()._cdata
            assert ckpt.tree["bare"].nbytes == 20

    def test_a_slice_of_everything(self, source):
        obj = {"v": tensor(storage("r", 10, view=("v", 0, 10)), (10,))}
        with fastckpt.open(source(legacy_stream(obj, VIEWED))) as ckpt:
            assert ckpt["v"][...].tolist() == ckpt["v"].read().tolist() == list(range(10))

    def test_in_numpy(self):
        loaded = fastckpt.load(legacy_stream(VIEWS, VIEWED), framework="numpy")
        assert loaded["slice"].tolist() == [[2, 3], [4, 5]]
        assert loaded["bare"].tolist() == [2, 3, 4, 5, 6]
        assert np.shares_memory(loaded["slice"], loaded["root"])

    def test_doubles_that_lie_anywhere(self, source):
        """A slice begins at any item: aligned to its items, not to more."""
        view = {"d": tensor(storage("r", 5, "DoubleStorage", view=("v", 1, 3)), (3,))}
        data = legacy_stream(view, {"r": (5, struct.pack("<5d", *range(5)))})
        assert fastckpt.load(source(data))["d"].tolist() == [1, 2, 3]

    @pytest.mark.parametrize(
        "view",
        [("v", 8, 3), ("v", -1, 3), ("v", 0, -1), ("v", 11, 0), ("v", 2**62, 2**62), ("v", 0, 2**63), ("v", 0.0, 1),
         ("v", 0), ("v", 0, 1, 2), ("v", None, 1), "vvv", 5, ("v", True, 1)],
        ids=repr,
    )  # fmt: skip
    def test_impossible(self, source, view):
        data = legacy_stream([tensor(storage("r", 10, view=view), (1,))], VIEWED)
        with pytest.raises(FormatError, match=r"view|slice|storage"):
            fastckpt.load(source(data))

    def test_a_tensor_beyond_its_slice(self):
        """The root would have room; the slice has not."""
        data = legacy_stream([tensor(storage("r", 10, view=("v", 2, 5)), (6,))], VIEWED)
        with pytest.raises(FormatError, match="reaches beyond"):
            fastckpt.load(data)

    def test_one_key_with_two_places(self):
        two = [tensor(storage("r", 10, view=("v", at, 3)), (3,)) for at in (0, 4)]
        with pytest.raises(FormatError, match="'v'"):
            fastckpt.load(legacy_stream(two, VIEWED))


# -- names that a stream may not have


MODULE = Pid(("module", Name("models.net", "Net"), "net.py", "class Net: pass"))


class TestWholeModules:
    """torch.save(model): an object of a class, and the class with its source code as a persistent id."""

    MODEL = Call(MODULE, (), {"weight": OBJECT["a"], "training": True})
    DATA = legacy_stream({"model": MODEL, "n": OBJECT["n"]}, STORAGES)

    def test_refused(self, source):
        with pytest.raises(UnsafePickleError, match=r"models\.net\.Net.*nothing was run") as caught:
            fastckpt.load(source(self.DATA))
        assert caught.value.qualname == "models.net.Net"

    def test_opaque(self, source):
        loaded = fastckpt.load(source(self.DATA), unknown="opaque")
        assert loaded["model"].qualname == "models.net.Net"
        same({"weight": torch.arange(6.0).view(2, 3), "training": True}, loaded["model"].state)
        same(torch.tensor([7, -8]), loaded["n"])

    def test_lazily(self, source):
        with fastckpt.open(source(self.DATA)) as ckpt:
            assert list(ckpt) == ["model.weight", "n"]
            assert ckpt["model.weight"][1, 2].item() == 5
            assert "models.net.Net" in ckpt.info["unknown"]
            with pytest.raises(UnsafePickleError, match=r"models\.net\.Net"):
                fastckpt.load(self.DATA, framework="numpy")

    def test_the_class_itself(self):
        with pytest.raises(UnsafePickleError, match=r"models\.net\.Net"):
            fastckpt.load(legacy_stream([MODULE], {}))
        assert (
            fastckpt.load(legacy_stream([MODULE], {}), unknown="opaque")[0].qualname
            == "models.net.Net"
        )

    @pytest.mark.parametrize(
        "pid",
        [("module",), ("module", 5, "a", "b"), ("module", "x", "a", "b"), ("module", None, None)],
    )
    def test_malformed(self, pid):
        data = legacy_stream(Call(Pid(pid)), {})
        with pytest.raises(CheckpointError):
            fastckpt.load(data)


EVIL = Call(Name("os", "system"), ("touch /tmp/never",))
PLACES = {
    "magic number": {"magic": EVIL},
    "version": {"version": EVIL},
    "system info": {"sys_info": {"little_endian": EVIL}},
    "system info, bare name": {"sys_info": [Name("os", "system")]},
    "object": {"obj": {"a": EVIL}},
    "keys": {"keys": Call(Name("builtins", "eval"), ("[]",))},
    "a key": {"keys": [EVIL]},
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_unknown_names_in_any_pickle(source, place):
    """No pickle of the five is too small to be looked at."""
    data = legacy_stream(**{"obj": {}, "storages": {}, **place})
    with pytest.raises(CheckpointError):
        fastckpt.load(source(data))
    with pytest.raises(CheckpointError), fastckpt.open(source(data), unknown="error") as ckpt:
        ckpt.read()


def test_odd_system_info_is_not_looked_at(source):
    for sys_info in (
        None,
        {},
        {"little_endian": False},
        "anything",
        [1, 2],
        {"protocol_version": 7},
    ):
        same(expected(), fastckpt.load(source(legacy_stream(OBJECT, STORAGES, sys_info=sys_info))))


# -- Python 2


def test_python2_text(source):
    """str was bytes; whoever wrote it knows in which encoding."""
    data = legacy_stream(
        {"größe": tensor(storage("9", 2, "LongStorage"), (2,)), "s": "ü"},
        {"9": STORAGES["9"]},
        python2=True,
    )
    n = torch.tensor([7, -8])
    same({"größe": n, "s": "ü"}, fastckpt.load(source(data), encoding="latin1"))
    same(
        {"größe".encode("latin-1"): n, b"s": b"\xfc"}, fastckpt.load(source(data), encoding="bytes")
    )
    with pytest.raises(FormatError, match="encoding='latin1' decodes any"):
        fastckpt.load(source(data))
    with fastckpt.open(source(data), encoding="latin1") as ckpt:
        assert ckpt["größe"][1].item() == -8
    for options in ({"encoding": "latin1"}, {"encoding": "bytes"}):
        same(
            torch.load(io.BytesIO(data), weights_only=False, **options),
            fastckpt.load(data, **options),
        )


def test_python2_ascii(source):
    obj = {"a": OBJECT["a"], "long": "x" * 300}
    data = legacy_stream(obj, {"10": STORAGES["10"]}, python2=True)
    same({"a": torch.arange(6.0).view(2, 3), "long": "x" * 300}, fastckpt.load(source(data)))


# -- the list of keys, and the counts


@pytest.mark.parametrize("keys", [["9", "10"], ["10", "9"]])
def test_keys_in_any_order(source, keys):
    same(expected(), fastckpt.load(source(legacy_stream(OBJECT, STORAGES, keys=keys))))


def test_keys_that_are_ints(source):
    obj = {"a": tensor(storage(10, 6), (6,)), "n": tensor(storage(9, 2, "LongStorage"), (2,))}
    data = legacy_stream(obj, {10: STORAGES["10"], 9: STORAGES["9"]})
    same(torch.load(io.BytesIO(data)), fastckpt.load(source(data)))


KEYS = {
    "one missing": (["10"], "'9' is not in the list of storage keys"),
    "all missing": ([], "not in the list of storage keys"),
    "one too many": (["10", "9", "8"], "'8', which the object never mentions"),
    "twice": (["10", "9", "9"], "names '9' twice"),
    "as an int and as text": (["10", "9", 9], "names '9' twice"),
    "a dict": ({"10": 1, "9": 2}, "a list of strings is expected"),
    "a tuple": (("10", "9"), "a list of strings is expected"),
    "a number": (17, "a list of strings is expected"),
    "None": (None, "a list of strings is expected"),
    "a list in it": (["10", ["9"]], "a list of strings is expected"),
    "a bool": (["10", "9", True], "a list of strings is expected"),
    "a float": (["10", "9", 9.0], "a list of strings is expected"),
    "a name": ([Name("os", "system")], "a list of strings is expected"),
}


@pytest.mark.parametrize(("keys", "words"), KEYS.values(), ids=KEYS)
def test_wrong_keys(source, keys, words):
    data = legacy_stream(OBJECT, STORAGES, keys=keys, behind=bytes(500))
    with pytest.raises(FormatError, match=words):
        fastckpt.load(source(data))
    with pytest.raises(FormatError, match=words):
        fastckpt.open(source(data))


@pytest.mark.parametrize("key", ["10", "9"])
@pytest.mark.parametrize("count", [-1, 0, 1, 5, 7, 2**31, 2**62, 2**63 - 1, -(2**63)])
def test_wrong_counts(source, key, count):
    data = legacy_stream(OBJECT, STORAGES, counts={key: count})
    with pytest.raises(
        FormatError, match=rf"counts {count} elements, the pickle says [26];"
    ) as caught:
        fastckpt.load(source(data))
    assert caught.value.record == key
    assert data[caught.value.offset :].startswith(struct.pack("<q", count))


def test_wrong_count_far_behind(source):
    """The first of many that is wrong is named."""
    obj = {str(i): tensor(storage(f"{i:04}", 3), (3,)) for i in range(3000)}
    storages = {f"{i:04}": (3, floats(i, i, i)) for i in range(3000)}
    same(
        {str(i): torch.full((3,), float(i)) for i in range(3000)},
        fastckpt.load(source(legacy_stream(obj, storages))),
    )
    with pytest.raises(FormatError, match=r"storage '2345' .* counts 4 elements"):
        fastckpt.load(source(legacy_stream(obj, storages, counts={"2345": 4, "2999": 5})))


HUGE = {"a lot": 2**40, "bytes wrap": 2**61 + 1, "the most": 2**63 - 1}


@pytest.mark.parametrize("count", HUGE.values(), ids=HUGE)
def test_storages_larger_than_the_file(source, count):
    """What the pickle claims is compared with what is there before memory is taken."""
    data = legacy_stream([tensor(storage("0", count), (2,))], {"0": (count, floats(1, 2))})
    with pytest.raises(CheckpointError):
        fastckpt.load(source(data))


@pytest.mark.parametrize("count", [-1, 2**63, 2**70, 1.0, "6", None, True], ids=repr)
def test_counts_in_the_pickle(source, count):
    data = legacy_stream([tensor(storage("0", count), (0,))], {"0": (0, b"")})
    with pytest.raises(FormatError):
        fastckpt.load(source(data))


PIDS = {
    "five members, as in an archive": ("storage", Name("torch", "FloatStorage"), "0", "cpu", 0),
    "seven members": ("storage", Name("torch", "FloatStorage"), "0", "cpu", 0, None, None),
    "text": "0",
    "a number": 5,
    "empty": (),
    "another kind": ("tensor", Name("torch", "FloatStorage"), "0", "cpu", 0, None),
    "a class that is none": ("storage", "torch.FloatStorage", "0", "cpu", 0, None),
    "a class of another kind": ("storage", Name("torch", "FloatTensor"), "0", "cpu", 0, None),
    "an unknown class": ("storage", Name("os", "system"), "0", "cpu", 0, None),
    "a key of bytes and a list": ("storage", Name("torch", "FloatStorage"), [], "cpu", 0, None),
}


@pytest.mark.parametrize("pid", PIDS.values(), ids=PIDS)
def test_wrong_persistent_ids(pid):
    with pytest.raises(CheckpointError):
        fastckpt.load(legacy_stream([tensor(Pid(pid), (0,))], {"0": (0, b"")}))


def test_one_key_with_two_sizes():
    obj = [tensor(storage("0", 2), (2,)), tensor(storage("0", 3), (3,))]
    with pytest.raises(FormatError, match="'0'"):
        fastckpt.load(legacy_stream(obj, {"0": (2, floats(1, 2))}))


def test_one_key_with_two_dtypes():
    """Each tensor has the dtype of its own id, over the same bytes."""
    obj = [tensor(storage("0", 2), (2,)), tensor(storage("0", 8, "ByteStorage"), (8,))]
    a, b = fastckpt.load(legacy_stream(obj, {"0": (2, floats(1, 2))}))
    assert (a.tolist(), b.tolist()) == ([1, 2], list(floats(1, 2)))
    assert a.data_ptr() == b.data_ptr()


# -- damage


@pytest.mark.parametrize("wrong", [1000, 1002, 0, -1, 2**40, "1001", None, True, [1001]], ids=repr)
def test_other_versions(source, wrong):
    with pytest.raises(
        (UnsupportedError, FormatError), match=r"the protocol version is .*1001 is known"
    ):
        fastckpt.load(source(legacy_stream({}, {}, version=wrong)))


def test_other_magic():
    """Where the first number is another one, it is no checkpoint; where it is no number, neither."""
    for magic in (17, 0, None, "x", b"PK"):
        with pytest.raises(FormatError, match=r"pickle|magic number"):
            fastckpt.load(legacy_stream({}, {}, magic=magic))


SMALL = legacy_stream({"a": tensor(storage("0", 2), (2,)), "b": tensor(storage("1", 1, "ByteStorage"), (1,))},
                      {"0": (2, floats(1, 2)), "1": (1, b"\5")})  # fmt: skip


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("kind", SOURCES)
def test_every_truncation(kind, tmp_path, protocol):
    """A FormatError that speaks of what is there, at whatever byte the file ends."""
    source = SOURCES[kind](tmp_path)
    data = legacy_stream(
        {"a": tensor(storage("0", 2), (2,)), "b": tensor(storage("1", 1, "ByteStorage"), (1,))},
        {"0": (2, floats(1, 2)), "1": (1, b"\5")},
        protocol=protocol,
    )
    assert fastckpt.load(source(data))["b"].item() == 5
    for nbytes in range(len(data)):
        with pytest.raises(FormatError) as caught:
            fastckpt.load(source(data[:nbytes]))
        words = str(caught.value)
        if nbytes > 40:  # before, it is not known for a stream
            assert "end" in words or "left" in words, words
            assert str(nbytes) in words or "are left" in words or "more bytes" in words, words


def test_truncation_names_the_storage():
    with pytest.raises(
        FormatError,
        match=r"storage '1' at byte \d+ takes 9 bytes, 8 are left; the file is cut short",
    ):
        fastckpt.load(SMALL[:-1])
    with pytest.raises(FormatError, match=r"storage '0' at byte \d+ takes 16 bytes, 12 are left"):
        fastckpt.load(SMALL[: -9 - 4])


@pytest.mark.parametrize(
    "behind",
    [b"x", bytes(5), b"PK\3\4", GOOD, b"\x80\2."],
    ids=["x", "zeros", "zip", "stream", "pickle"],
)
def test_bytes_behind(source, behind):
    same(expected(), fastckpt.load(source(GOOD + behind)))


def test_random_damage_never_crashes():
    randomness = np.random.default_rng(5)
    good = legacy_stream(OBJECT, STORAGES)
    for _ in range(1500):
        data = bytearray(good)
        for at in randomness.integers(0, len(data), randomness.integers(1, 4)):
            data[at] = randomness.integers(256)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a device of that name may be missing
                fastckpt.load(bytes(data), unknown="opaque")
        except CheckpointError:
            pass


# -- alignment


@pytest.mark.parametrize("padding", range(8))
@pytest.mark.parametrize(
    "options", [{}, {"mmap": True}, {"threads": 2}], ids=["read", "mapped", "threads"]
)
def test_data_lies_anywhere(tmp_path, padding, options):
    """Nothing in a stream is aligned; what is loaded always is."""
    obj = {
        "padding": "x" * padding,
        "d": tensor(storage("0", 100, "DoubleStorage"), (100,)),
        "c": tensor(storage("1", 3, "ComplexDoubleStorage"), (3,)),
        "b": tensor(storage("2", 3, "ByteStorage"), (3,)),
    }
    doubles = np.arange(100.0)
    complexes = np.arange(3) + 1j
    storages = {"0": (100, doubles.tobytes()), "1": (3, complexes.tobytes()), "2": (3, b"abc")}
    path = tmp_path / "stream.pt"
    path.write_bytes(legacy_stream(obj, storages))
    loaded = fastckpt.load(path, **options)
    assert loaded["d"].tolist() == doubles.tolist()
    assert loaded["c"].tolist() == complexes.tolist()
    assert bytes(loaded["b"].tolist()) == b"abc"
    for tensor_ in (loaded["d"], loaded["c"]):
        assert tensor_.data_ptr() % tensor_.element_size() == 0
    with fastckpt.open(path) as ckpt:
        assert ckpt["d"][50:52].tolist() == [50, 51]
        assert ckpt["c"].numpy().tolist() == complexes.tolist()
        assert ckpt["d"].read(out=np.empty(100)).tolist() == doubles.tolist()


def test_big_endian_writers_wrote_little_endian(source):
    info = {
        "protocol_version": 1001,
        "little_endian": False,
        "type_sizes": {"short": 2, "int": 4, "long": 8},
    }
    data = legacy_stream(OBJECT, STORAGES, sys_info=info)
    same(torch.load(io.BytesIO(data)), fastckpt.load(source(data)))


# -- object forms of old releases


def old(function, *args, state=None):
    module, name = function.rsplit(".", 1)
    return Call(Name(module, name), args, state)


S = storage("10", 6)
FORMS = {
    "0.1.10 tensors": old("torch.FloatTensor", state=(S, 0, (2, 3), (3, 1))),
    "0.1.11 tensors": old("torch._utils._rebuild_tensor", S, 0, (2, 3), (3, 1)),
    "0.4 hooks None": Call(
        Name("torch._utils", "_rebuild_tensor_v2"), (S, 0, (2, 3), (3, 1), False, None)
    ),
    "parameters of 0.1 to 0.3": old(
        "torch.nn.parameter.Parameter",
        old("torch._utils._rebuild_tensor", S, 0, (2, 3), (3, 1)),
        state=(True, False, None),
    ),
    "parameters of 2016": old(
        "torch.nn.parameter.Parameter",
        state=(old("torch._utils._rebuild_tensor", S, 0, (2, 3), (3, 1)), None, None, False, False),
    ),
    "parameters of 1.0": old(
        "torch._utils._rebuild_parameter", tensor(S, (2, 3)), True, old("collections.OrderedDict")
    ),
    "ordered dicts of Python 2": old("collections.OrderedDict", [["w", tensor(S, (2, 3))]]),
}


@pytest.mark.parametrize("obj", FORMS.values(), ids=FORMS)
def test_old_forms(source, obj):
    data = legacy_stream([obj, 1], {"10": STORAGES["10"]})
    same(torch.load(io.BytesIO(data)), fastckpt.load(source(data)))


def test_variables():
    """autograd.Variable is today's tensor."""
    inner = old("torch._utils._rebuild_tensor", S, 0, (2, 3), (3, 1))
    obj = [
        old(
            "torch.autograd.variable.Variable",
            inner,
            state=(True, False, old("collections.OrderedDict")),
        )
    ]
    (loaded,) = fastckpt.load(legacy_stream(obj, {"10": STORAGES["10"]}))
    assert type(loaded) is torch.Tensor
    assert loaded.requires_grad
    assert loaded.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_devices():
    """A tag of a device that is not here is a hint."""
    obj = {"w": tensor(storage("10", 6, location="cuda:7"), (6,))}
    data = legacy_stream(obj, {"10": STORAGES["10"]})
    same({"w": torch.arange(6.0)}, fastckpt.load(data, map_location="cpu"))
    same({"w": torch.arange(6.0)}, fastckpt.load(data, map_location={"cuda:7": "cpu"}))
    same({"w": np.arange(6, dtype=np.float32)}, fastckpt.load(data, framework="numpy"))
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning, match="'cuda:7' come out on the CPU"):
            same({"w": torch.arange(6.0)}, fastckpt.load(data))


def test_meta_locations():
    """A storage on the meta device has a place in the stream, and no values."""
    obj = {"w": torch.empty(3, 4, device="meta"), "v": torch.arange(3)}
    out = io.BytesIO()
    torch.save(obj, out, _use_new_zipfile_serialization=False)
    same(torch.load(io.BytesIO(out.getvalue())), fastckpt.load(out.getvalue()))


def test_geometry_helper():
    assert contiguous((2, 3, 4)) == (12, 4, 1)
    assert contiguous(()) == ()
