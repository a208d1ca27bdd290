"""Where tensors go: map_location as torch.load takes it, and devices that are not here."""

import warnings

import pytest
import torch
from torch import nn

import fastckpt
from fastckpt.placement import Placement
from objects import saved, torch_loads
from support import QUIET, same
from ziprewrite import records_of, tagged, with_damage

pytestmark = QUIET

WITHOUT_CUDA = pytest.mark.skipif(
    "torch.cuda.is_available()", reason="a machine without CUDA is needed"
)


def example():
    """Tensors of several kinds; no sparse ones where this torch has none without memory."""
    shared = torch.arange(12.0)
    kinds = {
        "plain": torch.randn(3, 4),
        "views": [shared[2:], shared.view(3, 4).t()],
        "empty": torch.empty(0, 3),
        "parameter": nn.Parameter(torch.ones(2)),
        "sparse": torch.eye(3).to_sparse(),
        "storage": torch.arange(3).storage(),
    }
    if not SPARSE_META:
        del kinds["sparse"]
    return kinds


def has_sparse_meta():
    try:
        torch_loads(saved(torch.eye(3).to_sparse()), "meta")
    except NotImplementedError:
        return False
    return True


SPARSE_META = has_sparse_meta()
MAPS = {
    "None": None,
    "cpu": "cpu",
    "torch.device cpu": torch.device("cpu"),
    "bytes": b"cpu",
    "empty dict": {},
    "dict": {"cpu": "cpu"},
    "dict of devices": {"cpu": torch.device("cpu")},
    "callable giving the storage": lambda storage, location: storage,
    "callable giving None": lambda storage, location: None,
    "callable giving a copy": lambda storage, location: storage.clone(),
    "meta": "meta",
    "torch.device meta": torch.device("meta"),
    "dict to meta": {"cpu": "meta"},
    "callable to meta": lambda storage, location: torch.UntypedStorage(
        storage.nbytes(), device="meta"
    ),
}
# torch itself takes no device in a dict, and bytes are no location of its own.
NOT_TORCH = ("dict of devices", "bytes")


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("how", MAPS)
def test_as_torch_does(how, legacy):
    data, location = saved(example(), legacy=legacy), MAPS[how]
    expected = torch_loads(data, "cpu" if how in NOT_TORCH else location)
    for threads in (1, 2):
        same(expected, fastckpt.load(data, location, threads=threads))


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_callable_sees_storages_and_tags(legacy):
    seen, theirs = [], []

    def note(into):
        return lambda storage, location: into.append((type(storage), location, storage.nbytes()))

    data = saved({"a": torch.ones(3), "b": torch.ones(3)[1:], "c": torch.zeros(5)}, legacy=legacy)
    fastckpt.load(data, note(seen))
    torch_loads(data, note(theirs))
    assert sorted(seen, key=str) == sorted(theirs, key=str)


def test_callable_is_called_once_for_a_storage():
    seen, storage = [], torch.arange(6)
    fastckpt.load(
        saved([storage[2:], storage[:3], storage]), lambda s, location: seen.append(s) or s
    )
    assert len(seen) == 1


@pytest.mark.parametrize("kind", ["plain", "quantized", "sparse", "storage"])
def test_errors_of_a_callable_are_its_own(kind):
    obj = {
        "plain": torch.ones(2),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.5, 1, torch.qint8),
        "sparse": torch.eye(2).to_sparse(),
        "storage": torch.ones(2).storage(),
    }[kind]

    def fail(storage, location):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fastckpt.load(saved([obj]), fail)


GIVEN = {
    "a number": (lambda storage, location: 5, TypeError, "gave a int; a storage is expected"),
    "a tensor": (lambda storage, location: torch.ones(4), TypeError, "gave a Tensor"),
    "too short": (lambda storage, location: storage[:4], ValueError, "of 4 bytes for one of 8"),
    "too short, typed": (lambda s, _: torch.ones(1).storage(), ValueError, "of 4 bytes for one of 8"),
}  # fmt: skip


@pytest.mark.parametrize(("location", "error", "words"), GIVEN.values(), ids=GIVEN)
def test_what_a_callable_may_not_give(location, error, words):
    """Torch makes a storage longer that is too short for a tensor, by what happens to be in memory."""
    with pytest.raises(error, match=words):
        fastckpt.load(saved([torch.ones(2)]), location)


@pytest.mark.parametrize(
    "location", [5, 1.5, ["cpu"], object()], ids=["int", "float", "list", "object"]
)
def test_nonsense(location):
    with pytest.raises(
        TypeError, match=r"map_location is an? .*; None, a device, a dict or a callable is expected"
    ):
        fastckpt.load(saved([torch.ones(2)]), location)


# -- meta: nothing is read ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("location", ["meta", torch.device("meta"), b"meta"], ids=repr)
def test_meta_reads_no_storage(location, tmp_path):
    data = saved(example())
    damaged = with_damage(data, *[name for name in records_of(data) if name.startswith("data/")])
    with pytest.raises(fastckpt.ChecksumError):
        fastckpt.load(damaged)
    expected = torch_loads(data, map_location="meta")
    path = tmp_path / "damaged.pt"
    path.write_bytes(damaged)
    for source in (damaged, path):
        same(expected, fastckpt.load(source, location))
        same(expected, fastckpt.load(source, location, mmap=source is path))


def test_meta_reads_nothing_of_a_large_storage(tmp_path):
    told, path = [], tmp_path / "file.pt"
    torch.save([torch.zeros(1 << 20)], path)
    fastckpt.load(path, "meta", progress=lambda done, total, name: told.append(done))
    assert max(told, default=0) == 0


def test_meta_of_every_layout():
    obj = [
        torch.eye(4).to_sparse_csr(),
        torch.eye(4).to_sparse_bsr((2, 2)),
        torch.view_as_complex(torch.ones(2, 2)).conj(),
    ]
    for tensor in obj:
        loaded = fastckpt.load(saved([tensor]), "meta")[0]
        assert loaded.device.type == "meta"
        assert (loaded.shape, loaded.dtype, loaded.layout) == (
            tensor.shape,
            tensor.dtype,
            tensor.layout,
        )


def test_quantized_tensors_have_no_meta():
    data = saved([torch.quantize_per_tensor(torch.ones(3), 0.5, 1, torch.qint8)])
    with pytest.raises(fastckpt.UnsupportedError, match="no quantized tensors on the meta device"):
        fastckpt.load(data, "meta")


def test_meta_into_a_module():
    with torch.device("meta"):
        module = nn.Linear(3, 2)
    module.load_state_dict(fastckpt.load(saved(nn.Linear(3, 2).state_dict()), "meta"), assign=True)
    assert module.weight.is_meta


# -- devices that are not here -----------------------------------------------------------------------------------------

ABSENT = [
    "cuda:7",
    "cuda",
    "mps",
    "xpu:0",
    "hpu:1",
    "npu:3",
    "privateuseone:0",
    "some backend",
    "cpu:0",
    "",
]


@WITHOUT_CUDA
@pytest.mark.parametrize("location", ABSENT)
class TestAbsent:
    def test_comes_out_on_the_cpu_with_one_warning(self, location):
        obj = example()
        data = tagged(saved(obj), location)
        for options in ({}, {"map_location": {}}, {"threads": 1}, {"weights_only": False}):
            with pytest.warns(UserWarning, match="come out on the CPU") as caught:
                loaded = fastckpt.load(data, **options)
            assert [repr(location) in str(w.message) for w in caught] == [True]
            same(obj | {"storage": loaded["storage"]}, loaded)

    def test_warning_points_at_the_caller(self, location):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fastckpt.load(tagged(saved([torch.ones(2)]), location))
        assert [w.filename for w in caught] == [__file__]

    @pytest.mark.parametrize(
        ("said", "shown"),
        [
            ("no CUDA. Please use the CPU.", "no CUDA"),
            ("word " * 99, f"{'word ' * 31}..."),
            ("", ""),
        ],
        ids=["a sentence", "long", "nothing"],
    )
    def test_reasons_are_cut_between_words(self, location, said, shown):
        with pytest.warns(UserWarning, match="come out on the CPU") as caught:
            Placement(None).warn(location, RuntimeError(said))
        assert f"not available here ({shown}); map_location" in str(caught[0].message)

    def test_mapped_without_a_word(self, location):
        data = tagged(saved(example()), location)
        for target in ("cpu", {location: "cpu"}, lambda storage, tag: storage):
            fastckpt.load(data, target)

    def test_arrays_know_no_devices(self, location):
        assert fastckpt.load(
            tagged(saved(torch.ones(2)), location), framework="numpy"
        ).tolist() == [1, 1]

    def test_meta(self, location):
        assert fastckpt.load(tagged(saved(torch.ones(2)), location), "meta").is_meta


@WITHOUT_CUDA
def test_each_absent_device_is_named_once(monkeypatch):
    tensors = {f"cuda:{n}": torch.full((3,), n) for n in range(3)}
    tags = {t.untyped_storage().data_ptr(): location for location, t in tensors.items()}
    monkeypatch.setattr(
        torch.serialization, "location_tag", lambda storage: tags[storage.data_ptr()]
    )
    data = saved([[t, t[1:]] for t in tensors.values()])
    with pytest.warns(UserWarning, match="come out on the CPU") as caught:
        fastckpt.load(data)
    assert [str(w.message).split("'")[1] for w in caught] == list(tensors)


@WITHOUT_CUDA
@pytest.mark.parametrize(
    "location", ["cuda", "cuda:1", torch.device("cuda", 1), {"cpu": "cuda:0"}], ids=repr
)
def test_an_absent_device_that_is_asked_for(location):
    with pytest.raises(RuntimeError, match="CUDA"):
        fastckpt.load(saved([torch.ones(2)]), location)


def test_an_unknown_device_that_is_asked_for():
    with pytest.raises(RuntimeError, match="npu"):
        fastckpt.load(saved([torch.ones(2)]), "npu:3")


def test_a_backend_of_the_users(monkeypatch):
    """What torch.serialization.register_package adds is asked, and its storage taken."""
    moved = []

    def deserialize(storage, location):
        if location.startswith("mine"):
            moved.append(location)
            return storage.clone()
        return None

    registry = list(torch.serialization._package_registry)
    monkeypatch.setattr(torch.serialization, "_package_registry", registry)
    torch.serialization.register_package(5, lambda storage: None, deserialize)
    same([torch.ones(3)], fastckpt.load(tagged(saved([torch.ones(3)]), "mine:1")))
    assert moved == ["mine:1"]


@pytest.mark.skipif("not torch.cuda.is_available()", reason="CUDA is needed")
@pytest.mark.parametrize(
    "how", ["cuda", "cuda:0", torch.device("cuda"), {"cpu": "cuda:0"}], ids=repr
)
def test_cuda(how):
    data = saved(example())
    same(torch_loads(data, how), fastckpt.load(data, how))
    same(torch_loads(data), fastckpt.load(tagged(data, "cuda:0"), "cpu"))
    assert fastckpt.load(tagged(data, "cuda:0"))["plain"].device == torch.device("cuda:0")
