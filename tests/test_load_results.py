"""What load gives is as good as what torch.load gives, whatever is done with it; and its memory goes with it."""

import copy
import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

import fastckpt
from objects import one_of_each, saved, torch_loads
from support import QUIET, needs_true_memory, same

pytestmark = QUIET

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc/self")


# -- what is done with the result --------------------------------------------------------------------------------------

DENSE = (
    "weight",
    "parameter",
    "half",
    "conj",
    "empty",
    "scalar",
    "integers",
    "quantized",
    "channels",
    "sparse",
    "csr",
)


@pytest.mark.parametrize("name", DENSE)
class TestUse:
    def loaded(self, name):
        obj = one_of_each()[name]
        return torch_loads(saved(obj)), fastckpt.load(saved(obj))

    @pytest.mark.parametrize("protocol", [2, 5])
    def test_pickle(self, name, protocol):
        expected, loaded = self.loaded(name)
        same(expected, pickle.loads(pickle.dumps(loaded, protocol)))

    def test_deepcopy(self, name):
        expected, loaded = self.loaded(name)
        for duplicate in (
            (copy.copy, copy.deepcopy) if name != "csr" else (copy.copy,)
        ):  # torch has no deep copy of it
            same(duplicate(expected), duplicate(loaded))

    def test_save_again(self, name):
        expected, loaded = self.loaded(name)
        assert len(saved(loaded)) == len(saved(expected))
        same(expected, torch_loads(saved(loaded)))
        same(expected, fastckpt.load(saved(loaded)))

    def test_arithmetic_in_place(self, name):
        expected, loaded = self.loaded(name)
        if expected.is_quantized:
            return
        with torch.no_grad():
            same(expected.mul_(3), loaded.mul_(3))


def test_share_memory():
    loaded = fastckpt.load(saved({"a": torch.arange(6.0), "b": torch.ones(2)}))
    tensor = loaded["a"].share_memory_()
    assert tensor.is_shared()
    assert tensor.tolist() == [0, 1, 2, 3, 4, 5]
    assert not loaded["b"].is_shared()


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_resize(legacy):
    """Within its storage a tensor may take another shape; no loaded storage grows, as none of torch.load does from a ZIP file."""
    tensor = fastckpt.load(saved([torch.arange(6.0)], legacy=legacy))[0]
    assert tensor.resize_(2, 2).tolist() == [[0, 1], [2, 3]]
    assert not tensor.untyped_storage().resizable()
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.resize_(100)
    tensor.set_(torch.arange(100.0))
    assert tensor.numel() == 100


def test_training_goes_on():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(fastckpt.load(saved(list(model.parameters()))), lr=1)
    weight, bias = optimizer.param_groups[0]["params"]
    assert weight.is_leaf
    assert weight.requires_grad
    torch.nn.functional.linear(torch.ones(3), weight, bias).sum().backward()
    optimizer.step()
    assert torch.equal(weight.detach(), model.weight.detach() - 1)


def test_numpy_shares_memory():
    tensor = fastckpt.load(saved([torch.arange(4.0)]))[0]
    tensor.numpy()[0] = 7
    assert tensor[0] == 7
    assert torch.utils.dlpack.from_dlpack(tensor).data_ptr() == tensor.data_ptr()


def test_alignment():
    loaded = fastckpt.load(
        saved([torch.ones(n, dtype=torch.int8) for n in (1, 3, 64, 65, 1000, 5 << 20)])
    )
    assert [tensor.data_ptr() % 64 for tensor in loaded] == [0] * 6


def test_a_tensor_owns_its_storage():
    loaded = fastckpt.load(saved([torch.ones(3), torch.ones(5), torch.ones(7)[2:]]))
    assert [tensor.untyped_storage().nbytes() for tensor in loaded] == [12, 20, 28]
    assert len({tensor.untyped_storage().data_ptr() for tensor in loaded}) == 3


def in_worker(path, queue):
    queue.put(fastckpt.load(path)["a"].sum().item())


class Samples(torch.utils.data.Dataset):
    def __init__(self, path):
        self.path, self.table = path, fastckpt.load(path)

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return self.table["a"][i] + fastckpt.load(self.path, keys=["a"])["a"][i]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
@pytest.mark.parametrize("below", ["0", ""], ids=["parallel", "serial"])
def test_data_loader(below, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTCKPT_SERIAL_BELOW", below)
    path = tmp_path / "file.pt"
    torch.save({"a": torch.arange(6.0)}, path)
    torch.ones(1 << 20).sum()  # a pool of torch's own, in this process
    loader = torch.utils.data.DataLoader(
        Samples(path), batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=300
    )
    assert torch.cat(list(loader)).tolist() == [0, 2, 4, 6, 8, 10]


@pytest.mark.slow
def test_spawned_process(tmp_path):
    path = tmp_path / "file.pt"
    torch.save({"a": torch.arange(6.0)}, path)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=in_worker, args=(str(path), queue))
    process.start()
    assert queue.get(timeout=300) == 15
    process.join()


# -- memory ------------------------------------------------------------------------------------------------------------


MEMORY = """
import gc, os, sys, torch, fastckpt

def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
"""

GIVEN_BACK = """
path, size = sys.argv[1], int(sys.argv[2])
fastckpt.load(path)
before = resident()
for _ in range(3):
    loaded = fastckpt.load(path)
    assert resident() - before > 0.8 * size
    del loaded
    assert resident() - before < 0.3 * size, (resident() - before) / size
"""

SMALL_KEPT = """
path, size = sys.argv[1], int(sys.argv[2])
fastckpt.load(path)
before = resident()
kept = [fastckpt.load(path)["small"] for _ in range(4)]
assert resident() - before < 0.3 * size
"""


def run_python(*parts, arguments):
    done = subprocess.run(
        [sys.executable, "-c", "".join(parts), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@needs_proc
@needs_true_memory
@pytest.mark.parametrize(
    "sizes", [[64 << 20], [1 << 20] * 64, [10_000] * 6_000], ids=["one", "many", "small"]
)
def test_memory_is_given_back(sizes, tmp_path):
    path = tmp_path / "file.pt"
    torch.save([torch.ones(n, dtype=torch.int8) for n in sizes], path)
    run_python(MEMORY, GIVEN_BACK, arguments=[path, sum(sizes)])


@needs_proc
def test_a_small_tensor_of_a_large_file_can_be_kept(tmp_path):
    """Storages from 32 MiB up have memory of their own, which goes without the small ones."""
    path = tmp_path / "file.pt"
    torch.save({"small": torch.ones(4), "large": torch.ones(48 << 20, dtype=torch.int8)}, path)
    run_python(MEMORY, SMALL_KEPT, arguments=[path, 48 << 20])


def test_nothing_is_kept_alive():
    data = saved({"a": torch.ones(3), "custom": [torch.ones(1)]})
    loaded = fastckpt.load(data)
    ghosts = [weakref.ref(loaded["a"]), weakref.ref(loaded["a"].untyped_storage())]
    del loaded
    gc.collect()
    assert [ghost() for ghost in ghosts] == [None, None]
