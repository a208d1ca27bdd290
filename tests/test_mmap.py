"""mmap=True: tensors over a private mapping of the file."""

import gc
import io
import os
import sys

import numpy as np
import pytest
import torch

import fastckpt
from fastckpt._memory import map_file
from objects import saved, torch_loads
from support import QUIET, same
from ziprewrite import big_endian, rewritten, with_damage

pytestmark = QUIET


def mapped_from(tensor):
    """The file whose mapping a tensor lies in, or ''."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            start, _, end = line.split()[0].partition("-")
            if int(start, 16) <= tensor.data_ptr() < int(end, 16):
                return line.split(maxsplit=5)[5].strip() if len(line.split(maxsplit=5)) > 5 else ""
    return ""


needs_maps = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc/self/maps")


def write(path, data):
    path.write_bytes(data)
    return path


def example():
    shared = torch.arange(100.0, dtype=torch.float64)
    return {
        "a": torch.randn(50, 4),
        "views": [shared[3:], shared.view(10, 10).t()],
        "b": torch.ones(7, dtype=torch.int8),
    }


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
class TestMapped:
    def test_same(self, legacy, tmp_path):
        path = write(tmp_path / "file.pt", saved(example(), legacy=legacy))
        same(torch_loads(path.read_bytes()), fastckpt.load(path, mmap=True))

    def test_writes_stay_in_memory(self, legacy, tmp_path):
        path = write(tmp_path / "file.pt", saved(example(), legacy=legacy))
        before = path.read_bytes()
        loaded, other = (fastckpt.load(path, mmap=True) for _ in range(2))
        for tensor in (loaded["a"], loaded["views"][0], loaded["b"]):
            tensor.fill_(9)
        assert loaded["views"][1].flatten()[50] == 9  # the other view of that storage
        assert path.read_bytes() == before
        same(torch_loads(before), other)

    def test_outlives_the_name_and_the_file_object(self, legacy, tmp_path):
        path = write(tmp_path / "file.pt", saved(example(), legacy=legacy))
        expected = torch_loads(path.read_bytes())
        with open(path, "rb") as file:
            loaded = fastckpt.load(file, mmap=True)
        path.unlink()
        gc.collect()
        same(expected, loaded)

    def test_read_only_file(self, legacy, tmp_path):
        path = write(tmp_path / "file.pt", saved(example(), legacy=legacy))
        path.chmod(0o400)
        fastckpt.load(path, mmap=True)["a"].zero_()

    def test_arrays(self, legacy, tmp_path):
        path = write(tmp_path / "file.pt", saved({"a": torch.arange(6.0)}, legacy=legacy))
        array = fastckpt.load(path, mmap=True, framework="numpy")["a"]
        array[0] = 5
        assert array.tolist() == [5, 1, 2, 3, 4, 5]
        assert fastckpt.load(path)["a"][0] == 0

    def test_descriptor_and_offset(self, legacy, tmp_path):
        data = saved(example(), legacy=legacy)
        path = write(tmp_path / "file.pt", b"x" * 64 + data + b"behind")
        with open(path, "rb") as file:
            loaded = fastckpt.load(file.fileno(), mmap=True, offset=64, nbytes=len(data))
        same(torch_loads(data), loaded)

    def test_nothing_is_verified(self, legacy, tmp_path):
        if legacy:
            pytest.skip("a legacy file has no checksums")
        path = write(tmp_path / "file.pt", with_damage(saved(example()), "data/0"))
        with pytest.raises(fastckpt.ChecksumError):
            fastckpt.load(path)
        fastckpt.load(path, mmap=True)

    def test_mapping_goes_with_the_last_tensor(self, legacy, tmp_path):
        path = write(tmp_path / "file.pt", saved(example(), legacy=legacy))
        loaded = fastckpt.load(path, mmap=True)
        kept = loaded["views"]
        del loaded
        same(torch_loads(path.read_bytes())["views"], kept)
        del kept
        gc.collect()
        if sys.platform == "linux":
            with open("/proc/self/maps") as maps:
                assert str(path) not in maps.read()


@needs_maps
def test_zip_is_mapped(tmp_path):
    path = write(tmp_path / "file.pt", saved(example()))
    loaded = fastckpt.load(path, mmap=True)
    assert mapped_from(loaded["a"]) == mapped_from(loaded["views"][0]) == str(path)
    assert mapped_from(fastckpt.load(path)["a"]) != str(path)


UNFIT = {
    "deflated": lambda data: rewritten(data, method=8),
    "other byte order": lambda data: big_endian(data, {"0": 4, "1": 8, "2": 1}),
    "not aligned": lambda data: rewritten(data, align=0),
}


@needs_maps
@pytest.mark.parametrize("how", UNFIT)
def test_what_cannot_be_used_where_it_lies_is_read(how, tmp_path):
    """Each storage by itself: bytes have no order and no alignment."""
    data = saved(example())
    path = write(tmp_path / "file.pt", UNFIT[how](data))
    loaded = fastckpt.load(path, mmap=True)
    same(torch_loads(data), loaded)
    for tensor in (loaded["a"], loaded["views"][0]):
        assert tensor.data_ptr() % tensor.element_size() == 0
        if how != "not aligned":
            assert mapped_from(tensor) != str(path)
    if how != "deflated":
        assert mapped_from(loaded["b"]) == str(path)


@pytest.mark.parametrize("shift", range(1, 9))
def test_alignment_of_legacy_storages(shift, tmp_path):
    """They lie wherever the pickle before them ends."""
    obj = {
        "x" * shift: torch.arange(5.0, dtype=torch.float64),
        "c": torch.ones(3, dtype=torch.complex128),
    }
    path = write(tmp_path / "file.pt", saved(obj, legacy=True))
    loaded = fastckpt.load(path, mmap=True)
    same(obj, loaded)
    assert all(tensor.data_ptr() % 8 == 0 for tensor in loaded.values())


def test_a_damaged_record_that_is_read_is_verified(tmp_path):
    data = rewritten(saved([torch.arange(100)]), align=0)
    path = write(tmp_path / "file.pt", b"" + data)
    loaded = fastckpt.load(path, mmap=True)[0]
    if sys.platform == "linux" and mapped_from(loaded) != str(path):
        path.write_bytes(with_damage(data, "data/0"))
        with pytest.raises(fastckpt.ChecksumError):
            fastckpt.load(path, mmap=True)


@pytest.mark.parametrize("source", ["bytes", "BytesIO"])
def test_what_has_no_file(source):
    data = saved(example())
    with pytest.raises(ValueError, match="mmap=True needs a file that has a descriptor"):
        fastckpt.load(data if source == "bytes" else io.BytesIO(data), mmap=True)


def test_many_storages_have_one_mapping(tmp_path):
    path = write(tmp_path / "file.pt", saved([torch.ones(20) for _ in range(2000)]))
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    loaded = fastckpt.load(path, mmap=True)
    if sys.platform == "linux":
        with open("/proc/self/maps") as maps:
            # A private mapping shows once; every part that was written shows, too.
            assert sum(str(path) in line for line in maps) <= 3
        assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert sum(t.sum() for t in loaded) == 40_000


@pytest.mark.parametrize(
    "copy", [torch.clone, lambda t: t.numpy().copy(), lambda t: torch.tensor(t.tolist())]
)
def test_copies_need_no_file(copy, tmp_path):
    path = write(tmp_path / "file.pt", saved([torch.arange(5.0)]))
    loaded = fastckpt.load(path, mmap=True)
    copied = copy(loaded[0])
    del loaded
    gc.collect()
    path.unlink()
    np.testing.assert_array_equal(copied, np.arange(5.0))


def test_a_mapping_holds_no_descriptor(tmp_path):
    path = tmp_path / "model.pt"
    torch.save({"w": torch.arange(100.0)}, path)
    before = len(os.listdir("/proc/self/fd"))
    held = [fastckpt.load(path, mmap=True) for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert all(torch.equal(each["w"], torch.arange(100.0)) for each in held)


class TestReadAhead:
    def test_same(self, tmp_path):
        path = write(tmp_path / "file.pt", saved(example()))
        same(torch_loads(path.read_bytes()), fastckpt.load(path, mmap="willneed"))

    @pytest.mark.parametrize("region", [(0, 1 << 30), (-5, 10), (10, 5), (1 << 40, 1 << 41)])
    def test_any_region_is_a_wish(self, region, tmp_path):
        path = write(tmp_path / "file", bytes(300_000))
        with open(path, "rb") as file:
            mapping, _ = map_file(file.fileno(), 300_000)
        mapping.will_need(*region)
        assert bytes(mapping) == bytes(300_000)

    def test_other_words_are_refused(self, tmp_path):
        path = write(tmp_path / "file.pt", saved(example()))
        with pytest.raises(ValueError, match="mmap='populate' is invalid"):
            fastckpt.load(path, mmap="populate")


@needs_maps
class TestParts:
    """ckpt[name][index] of a mapped file is a view of the mapping."""

    @pytest.mark.parametrize(
        "index", [3, slice(5, 20), (slice(None), 2), (..., slice(0, 4, 3))], ids=str
    )
    def test_mapped(self, index, tmp_path):
        path = write(tmp_path / "file.pt", saved(example()))
        with fastckpt.open(path, mmap=True) as checkpoint:
            part = checkpoint["a"][index]
        assert mapped_from(part) == str(path)
        assert torch.equal(part, torch_loads(path.read_bytes())["a"][index])

    def test_mapped_array(self, tmp_path):
        path = write(tmp_path / "file.pt", saved(example()))
        with fastckpt.open(path, mmap=True, framework="numpy") as checkpoint:
            part = checkpoint["views.1"][2:4]
        assert np.array_equal(part, np.arange(100.0).reshape(10, 10).T[2:4])
        part[:] = 0

    def test_another_device_gets_the_part_alone(self, tmp_path):
        path = write(tmp_path / "file.pt", saved(example()))
        with fastckpt.open(path, mmap=True, map_location=lambda storage, _: storage) as checkpoint:
            part = checkpoint["a"][3]
        assert part.untyped_storage().nbytes() == part.nbytes

    @pytest.mark.parametrize(
        "change",
        [
            lambda data: big_endian(data, {"0": 4, "1": 8, "2": 1}),
            lambda data: rewritten(data, method=8),
        ],
        ids=["swapped", "deflated"],
    )
    def test_what_cannot_be_mapped_is_read(self, change, tmp_path):
        path = write(tmp_path / "file.pt", change(saved(example())))
        with fastckpt.open(path, mmap=True) as checkpoint:
            part = checkpoint["a"][3:5]
        assert mapped_from(part) != str(path)
        assert torch.equal(part, torch_loads(path.read_bytes())["a"][3:5])
