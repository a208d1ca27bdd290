"""save writes what torch.save writes: equal to the bit, whoever saved and whoever loads."""

import collections
import io
import os
import pickle
import struct
import warnings
import zipfile
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fastckpt
from fastckpt import describing
from objects import one_of_each, saved, saved_objects, torch_loads
from support import QUIET, TORCH, same

pytestmark = QUIET

COMMON = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


def written(obj, **options):
    """The bytes that save writes, in their order."""
    file = io.BytesIO()
    fastckpt.save(obj, file, **options)
    return file.getvalue()


def check(obj, protocol, folder):
    """Save in every way, load in every way, and compare with torch.save and torch.load."""
    by_torch = saved(obj, protocol=protocol)
    expected = torch_loads(by_torch)
    path = folder / "archive.pt"  # what is inside a file without a name is called archive, too
    fastckpt.save(obj, path, pickle_protocol=protocol)
    data = path.read_bytes()
    assert data == written(obj, pickle_protocol=protocol)
    with mock.patch.dict(os.environ, FASTCKPT_SERIAL_BELOW="0"):
        fastckpt.save(obj, path, pickle_protocol=protocol, threads=3)
    assert data == path.read_bytes()
    assert zipfile.ZipFile(path).testzip() is None
    same(expected, torch.load(path, weights_only=False), "torch.load")
    same(expected, torch.load(path, weights_only=False, mmap=True), "torch.load(mmap=True)")
    same(expected, fastckpt.load(path), "load")
    same(expected, fastckpt.load(path, mmap=True), "load(mmap=True)")
    same(expected, fastckpt.load(path, weights_only=False), "load(weights_only=False)")
    try:
        only_weights = torch_loads(by_torch, weights_only=True)
    except pickle.UnpicklingError:
        return
    same(only_weights, torch.load(path, weights_only=True), "torch.load(weights_only=True)")


@settings(max_examples=30, derandomize=True, **COMMON)
@given(saved_objects(), st.sampled_from([2, 2, 3, 4, 5]))
def test_any_object(tmp_path_factory, obj, protocol):
    check(obj, protocol, tmp_path_factory.getbasetemp())


@pytest.mark.slow
@settings(max_examples=3000, **COMMON)
@given(saved_objects(), st.sampled_from([2, 2, 3, 4, 5]))
def test_many_objects(tmp_path_factory, obj, protocol):
    check(obj, protocol, tmp_path_factory.getbasetemp())


# -- objects that people save ------------------------------------------------------------------------------------------


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def training():
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}


def tied():
    weight = nn.Parameter(torch.ones(3, 3))
    return {"a": weight, "b": weight, "c": weight.data}


def shared():
    base = torch.arange(1000.0)
    return [base[10:20], base[15:], base.view(10, 100).t(), base[:1].expand(5, 3)]


def requiring_grad():
    return [torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True) * 2]


OBJECTS = {
    "nothing": lambda: None,
    "no tensors": lambda: {"a": [1, 2.5, "x", None, (True,)]},
    "a tensor": lambda: torch.arange(6).reshape(2, 3),
    "a scalar": lambda: torch.tensor(1.5),
    "one of each": one_of_each,
    "a state dict": lambda: model().state_dict(),
    "a training state": training,
    "tied parameters": tied,
    "shared storages": shared,
    "keys that are words of the pickle": lambda: {"storage": torch.ones(1), "cpu": torch.ones(2), "x": ["cpu", "storage"]},
    "gradients": requiring_grad,
    "around 64 KiB": lambda: [torch.ones(n, dtype=torch.uint8) for n in (0, 1, 65535, 65536, 65537)],
    "many small ones": lambda: [torch.full((i % 9,), float(i)) for i in range(700)],
    "some megabytes": lambda: [torch.arange(n) for n in (131072, 5, 400_000)],
    "NumPy's arrays": lambda: {"a": np.arange(9.0), "b": np.float32(3), "c": np.array(["x"])},
    "ordered": lambda: collections.OrderedDict(b=torch.ones(1), a=torch.ones(2)),
}  # fmt: skip


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS)
def test_objects(make, protocol, tmp_path):
    check(make(), protocol, tmp_path)


def test_a_storage_that_ends_within_an_element():
    """torch.save writes all of its bytes, and not every torch.load takes them."""
    storage = torch.arange(11, dtype=torch.uint8).untyped_storage()
    tensor = torch.empty(0, dtype=torch.int32).set_(storage, 0, (2,), (1,))
    expected, actual = (
        zipfile.ZipFile(io.BytesIO(data)).read("archive/data/0")
        for data in (saved(tensor), written(tensor))
    )
    assert actual == expected == bytes(range(11))
    assert torch.equal(fastckpt.load(written(tensor)), tensor)


def test_a_whole_module(tmp_path):
    net = model()
    fastckpt.save(net, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    same(net.state_dict(), again.state_dict())
    assert repr(again) == repr(net)


def test_a_class_of_ones_own(tmp_path):
    path = tmp_path / "own.pt"
    fastckpt.save({"weight": torch.ones(2), "own": Own(5)}, path)
    with pytest.raises(fastckpt.UnsafePickleError, match=r"test_save\.Own"):
        fastckpt.load(path)
    assert fastckpt.load(path, weights_only=False)["own"].value == 5


class Holder:
    """An object of a class of ones own, which names nothing for a path."""

    def __init__(self, value):
        self.value = value


# What is saved that holds a stand-in, given one, and what the refusal says of the place.
STAND_INS = {
    "alone": (lambda value: value, "^an? "),
    "in a dict": (lambda value: {"model": {"own": value}}, r"^'model\.own': an? "),
    "in a list": (lambda value: [1, (2, value)], r"^'1\.1': an? "),
    "in an object": (lambda value: {"own": Holder(value)}, "^an? "),
}


@pytest.mark.parametrize("where", STAND_INS)
@pytest.mark.parametrize("kind", ["Opaque", "LazyTensor", "Checkpoint"])
def test_stand_ins_are_refused(tmp_path, kind, where):
    """Saved, they would be something else when they are loaded."""
    source, path = tmp_path / "own.pt", tmp_path / "out.pt"
    torch.save({"weight": torch.ones(2), "own": Own(5)}, source)
    with fastckpt.open(source) as checkpoint:
        value, words = {
            "Opaque": (checkpoint.tree["own"], r"an object of test_save\.Own"),
            "LazyTensor": (checkpoint["weight"], r"read\(\) gives one"),
            "Checkpoint": (checkpoint, r"is an open file.*read\(\) gives the object"),
        }[kind]
        wrap, place = STAND_INS[where]
        writers = [lambda obj: fastckpt.save(obj, path)]
        writers += [
            lambda obj, format=format: fastckpt.stream.dump(obj, io.BytesIO(), format=format)
            for format in ("native", "torch")
        ]
        for write in writers:
            with pytest.raises(pickle.PicklingError, match=f"{place}.*{words}"):
                write(wrap(value))
    assert not path.exists()


class Own:
    def __init__(self, value):
        self.value = value


def test_nothing_is_kept_of_a_dtype_or_a_name():
    """One process saves many objects; ids of dead ones come again."""
    for i in range(50):
        dtype = [torch.float32, torch.int16, torch.bfloat16][i % 3]
        obj = {f"name {i}": torch.full((3,), i, dtype=dtype), "cpu": f"text {i}"}
        same(obj, torch_loads(written(obj)))


# -- what is in the file -----------------------------------------------------------------------------------------------

FIELDS = (
    "filename date_time compress_type comment extra create_system create_version extract_version reserved flag_bits volume "
    "internal_attr external_attr"
).split()


@pytest.mark.skipif(TORCH < (2, 8), reason="torch before 2.8 writes fewer records")
@pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS)
def test_records(make):
    """Names, order, flags and contents are torch's, but for the pickle, which may say the same in other words."""
    obj = make()
    expected, actual = (zipfile.ZipFile(io.BytesIO(data)) for data in (saved(obj), written(obj)))
    for theirs, ours in zip(expected.infolist(), actual.infolist(), strict=True):
        for field in FIELDS:
            assert getattr(ours, field) == getattr(theirs, field), (ours.filename, field)
        if not ours.filename.endswith(("data.pkl", ".data/serialization_id")):
            assert actual.read(ours) == expected.read(theirs), ours.filename
            assert ours.CRC == theirs.CRC, ours.filename


def data_offset(file, info):
    """Where the data of a record begins: behind a local header."""
    head = file.getbuffer()[info.header_offset : info.header_offset + 30]
    return info.header_offset + 30 + sum(struct.unpack("<HH", head[26:30]))


@pytest.mark.parametrize("alignment", [True, 2, 64, 1000, 4096, 65000])
def test_alignment(alignment):
    obj = {"a": torch.ones(5), "b": torch.ones(30_000), "c": torch.ones(0)}
    file = io.BytesIO(written(obj, alignment=alignment))
    archive = zipfile.ZipFile(file)
    assert archive.testzip() is None
    assert {data_offset(file, info) % alignment for info in archive.infolist()} == {0}
    assert archive.read("archive/.storage_alignment") == b"%d" % alignment
    same(obj, torch_loads(file.getvalue()))
    same(obj, fastckpt.load(file.getvalue()))


def test_small_records():
    archive = zipfile.ZipFile(io.BytesIO(written({})))
    assert archive.namelist() == [
        f"archive/{name}"
        for name in "data.pkl .format_version .storage_alignment byteorder version .data/serialization_id".split()
    ]
    assert archive.read("archive/version") == b"3\n"
    assert archive.read("archive/byteorder") == b"little"
    assert archive.read("archive/.format_version") == b"1"


def test_the_same_object_gives_the_same_bytes():
    assert written(one_of_each_but_storages()) == written(one_of_each_but_storages())
    assert written({"a": torch.ones(2)}) != written({"a": torch.zeros(2)})


def one_of_each_but_storages():
    torch.manual_seed(0)
    return one_of_each()


def test_the_folder_is_called_like_the_file(tmp_path):
    link = tmp_path / "link.ckpt"
    link.symlink_to(tmp_path / "elsewhere.bin")
    for path, name in [
        (tmp_path / "my.model.pt", "my.model"),
        (link, "link"),
        (tmp_path / "größe.pt", "archive"),
    ]:
        fastckpt.save({}, path)
        assert {n.split("/")[0] for n in zipfile.ZipFile(path).namelist()} == {name}


# -- what torch refuses ------------------------------------------------------------------------------------------------


def test_one_memory_as_two_dtypes():
    tensor = torch.ones(4)
    both = [tensor, tensor.view(torch.int32)]
    with pytest.raises(RuntimeError, match="view the same data as different types"):
        saved(both)
    with pytest.raises(RuntimeError, match=r"as torch\.float32 and as torch\.int32"):
        written(both)


def test_bytes_may_be_looked_at_as_a_young_dtype():
    """Storages of those are bytes for torch as well."""
    tensor = torch.arange(8, dtype=torch.uint8)
    both = [tensor, tensor.view(torch.uint16), tensor.view(torch.float8_e5m2)]
    same(torch_loads(saved(both)), torch_loads(written(both)))


def test_an_object_that_cannot_be_pickled():
    for save in (saved, written):
        with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
            save({"a": torch.ones(2), "f": lambda: 1})


def test_backward_hooks_warn_as_torch_does():
    tensor = torch.ones(2, requires_grad=True)
    tensor.register_hook(print)
    with pytest.warns(UserWarning, match="hooks"):
        written(tensor)


# -- tensors that are not in memory of ours ----------------------------------------------------------------------------


class Elsewhere(describing.Storages):
    """Takes storages for those of a device: their bytes have to be copied."""

    def key(self, storage, dtype, taken_for, on_cpu):
        return super().key(storage, dtype, taken_for, False)


@pytest.mark.parametrize("views", ["whole", "compact"])
def test_storages_of_a_device(views, monkeypatch, tmp_path):
    obj = {"large": torch.arange(3_000_000), "view": torch.arange(9.0)[2:5]}
    expected = torch_loads(written(obj, views=views))
    monkeypatch.setattr(describing, "Storages", Elsewhere)
    fastckpt.save(obj, tmp_path / "archive.pt", views=views)
    assert zipfile.ZipFile(tmp_path / "archive.pt").testzip() is None
    same(expected, torch.load(tmp_path / "archive.pt", weights_only=True))
    assert (tmp_path / "archive.pt").read_bytes() == written(obj, views=views)


def test_meta_tensors():
    tensor = torch.empty(2, 3, device="meta")
    again = torch_loads(written([tensor, tensor]))
    assert again[0].is_meta
    assert again[0].shape == (2, 3)
    assert again[0] is again[1]


def test_fake_tensors_have_no_bytes():
    with FakeTensorMode(), warnings.catch_warnings(action="ignore"):
        obj = {"a": torch.ones(3)}
        for save in (saved, written):
            with pytest.raises((pickle.PicklingError, AttributeError, RuntimeError)):
                save(obj)


PARTIAL = {
    "uint16 of 13 bytes": lambda: torch.arange(13, dtype=torch.uint8)[:12].view(torch.uint16),
    "uint64 of 12 bytes": lambda: torch.arange(12, dtype=torch.uint8)[:8].view(torch.uint64),
    "two types": lambda: [
        (raw := torch.arange(12, dtype=torch.uint8)).view(torch.uint16),
        raw[:8].view(torch.uint64),
    ],
}


@pytest.mark.parametrize("case", PARTIAL)
def test_storages_that_are_no_whole_number_of_elements(case):
    """Of dtypes without a storage class; their storages are counted in bytes."""
    obj = PARTIAL[case]()
    expected = torch.load(io.BytesIO(saved(obj)), weights_only=True)
    data = written(obj)
    same(expected, torch.load(io.BytesIO(data), weights_only=True))
    same(expected, fastckpt.load(io.BytesIO(data)))
