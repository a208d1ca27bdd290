"""Dataset: checks, transforms, devices."""

import pickle

import pytest
import torch

from fastckpt.data import DataLoader, Dataset, Reader
from readers import Numbers, Stacked, batches_of, drain, values

WORKERS = [0, 1, 3]
each_workers = pytest.mark.parametrize("workers", WORKERS)

# ---- Dataset


class Samples(Reader):
    def __init__(self, *samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def _read(self, positions):
        return [self.samples[position] for position in positions]


GOOD = {"x": torch.zeros(2), "n": {"y": 1}, "t": (1.0, "a")}
BAD = {
    "lacks a field": ({"x": torch.zeros(2), "n": {"y": 1}}, "it lacks 't'"),
    "has a field": (GOOD | {"z": 1}, "it has 'z'"),
    "inner field": (GOOD | {"n": {}}, r"\['n'\] lacks 'y'"),
    "dtype": (GOOD | {"x": torch.zeros(2).double()}, r"\['x'\] is Tensor of torch\.float64 with 1 axes instead of Tensor of torch\.float32"),
    "axes": (GOOD | {"x": torch.zeros(2, 2)}, "2 axes instead of"),
    "type": (GOOD | {"n": {"y": 1.0}}, r"\['n'\]\['y'\] is float instead of int"),
    "tuple": (GOOD | {"t": (1.0, "a", 2)}, "a tuple of 3 instead of a tuple of 2"),
    "kind": ([1], "it is list instead of a mapping"),
}  # fmt: skip


class TestDataset:
    @pytest.mark.parametrize(("bad", "said"), BAD.values(), ids=BAD)
    def test_samples_of_another_form(self, bad, said):
        reader = Samples(GOOD, GOOD | {"x": torch.zeros(5)}, bad)
        dataset = Dataset(reader)
        assert len(dataset[1]["x"]) == 5  # sizes may differ
        with pytest.raises(
            ValueError, match=f"sample 2 does not have the form of sample 0: .*{said}"
        ):
            dataset.read_many([0, 2])
        for unchecked in (Dataset(reader, validate=False), Dataset(reader, skip_validation=True)):
            assert unchecked[2] is bad

    def test_a_check_of_ones_own(self):
        def check(sample):
            if sample["x"] == 2:
                raise ArithmeticError("two")

        dataset = Dataset(Stacked(4), validate=check)
        assert not dataset.supports_batch  # it wants to see each sample
        found = drain(iter(DataLoader(dataset)))
        assert type(found[2]) is ArithmeticError
        assert drain(iter(DataLoader(Dataset(Stacked(4), validate=check, skip_validation=True))))

    @pytest.mark.parametrize("answer", [False, torch.tensor(False), 0], ids=repr)
    def test_a_check_that_says_no(self, answer):
        dataset = Dataset(Stacked(4), validate=lambda sample: sample["x"] != 2 or answer)
        assert dataset.read_many([0, -1])
        with pytest.raises(ValueError, match=r"validate= gave .* for sample 2"):
            dataset.read_many([1, 2])

    @pytest.mark.parametrize("name", ["transform", "validate"])
    @pytest.mark.parametrize("workers", [0, 1])
    def test_an_error_says_of_which_sample_it_is(self, name, workers):
        def bad(sample):
            return 1 / (int(sample["x"]) - 2)

        loader = DataLoader(Dataset(Stacked(4), **{name: bad}), 4, num_workers=workers)
        with pytest.raises(ZeroDivisionError) as caught:
            next(iter(loader))
        assert caught.value.__notes__[0].startswith(f"in {name}= of sample 2 of <Stacked")

    def test_stacked_batches_are_checked_as_a_whole(self):
        class Drifts(Stacked):
            def _read_batch(self, positions):
                batch = super()._read_batch(positions)
                return {"x": batch["x"].double()} if 3 in positions else batch

        found = drain(iter(DataLoader(Dataset(Drifts(6)), batch_size=2)))
        assert found[::2] == [[0, 1], [4, 5]]
        assert "a batch does not have the form of sample 0: ['x'] is Tensor" in str(found[1])

    @each_workers
    @pytest.mark.parametrize("fuse", [1, 2])
    def test_one_bad_sample_fails_its_batch_alone(self, workers, fuse):
        reader = Samples(GOOD, GOOD, BAD["dtype"][0], GOOD)
        loader = DataLoader(Dataset(reader), num_workers=workers, fuse=fuse)
        found = drain(iter(loader))
        assert type(found[2]) is ValueError
        assert [len(found[i][0]) for i in (0, 1, 3)] == [2] * 3

    @each_workers
    def test_transform(self, workers):
        dataset = Dataset(Stacked(4), transform=lambda sample: {"x": sample["x"] * 10})
        assert values(DataLoader(dataset, 2, num_workers=workers)) == [[0, 10], [20, 30]]
        assert dataset[-1]["x"] == 30

    def test_device(self):
        dataset = Dataset(Stacked(4), device="meta")  # as good as any device that is not the CPU
        assert (
            dataset[0]["x"].device.type == dataset.__getitems__([1])[0]["x"].device.type == "meta"
        )
        assert dataset.read_many([0])[0]["x"].device.type == "cpu"
        for workers in (0, 2):
            batches = list(DataLoader(dataset, 2, num_workers=workers))
            assert [(b["x"].device.type, len(b["x"])) for b in batches] == [("meta", 2)] * 2
        assert Dataset(Stacked(1), device="cpu")[0]["x"] == 0

    def test_device_needs_torch(self):
        reader = Numbers(1)
        reader.framework = "numpy"
        with pytest.raises(ValueError, match="framework='torch' for device"):
            Dataset(reader, device="cpu")

    def test_a_cuda_device_that_is_not_there(self):
        there = f"cuda:{torch.cuda.device_count()}"
        for device in ["cuda", there] if there == "cuda:0" else [there]:
            with pytest.raises(RuntimeError, match=rf"device='{device}': .*device=None"):
                Dataset(Numbers(1), device=device)

    def test_torch_loads_from_it_in_processes(self):
        loader = torch.utils.data.DataLoader(Dataset(Numbers(5)), 2, num_workers=2)
        assert values(loader) == [[0, 1], [2, 3], [4]]
        assert len(pickle.loads(pickle.dumps(Dataset(Numbers(5), device="cpu")))) == 5

    def test_what_is_no_reader(self):
        with pytest.raises(TypeError, match="a Reader is expected, not list"):
            Dataset([1, 2])
        with pytest.raises(TypeError, match="validate=3"):
            Dataset(Numbers(1), validate=3)
        with pytest.raises(TypeError, match="transform=3"):
            Dataset(Numbers(1), transform=3)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_pinning_needs_an_accelerator():
    with pytest.raises(RuntimeError, match="pin_memory=True needs an accelerator"):
        DataLoader(Numbers(1), pin_memory=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@each_workers
def test_cuda(workers):
    dataset = Dataset(Stacked(1000), device="cuda")
    batches = list(DataLoader(dataset, 10, num_workers=workers, fuse=3))
    assert all(batch["x"].is_cuda for batch in batches)
    assert values(batches) == batches_of(1000, 10)
    [pinned, *_] = DataLoader(Stacked(10), 10, pin_memory=True)
    assert pinned["x"].is_pinned()
