"""Readers: indices, batches, closing, pickling; several as one; rows and files of checkpoints."""

import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from fastckpt import FormatError, UnsupportedError, save_sharded
from fastckpt import open as open_checkpoint
from fastckpt.data import CheckpointReader, DataLoader, MultiReader, Reader, stack
from readers import Numbers, Stacked, drain, values
from support import same

# ---- the base class

REQUESTS = {
    "list": ([3, 0, 3], [3, 0, 3]),
    "negative": ([-1, -10, 0], [9, 0, 0]),
    "range": (range(8, 2, -3), [8, 5]),
    "array": (np.array([1, 2], dtype=np.uint8), [1, 2]),
    "tensor": (torch.tensor([4, -2]), [4, 8]),
    "numbers of others": ([np.int16(1), torch.tensor(2), 3], [1, 2, 3]),
    "tuple": ((7,), [7]),
    "generator": ((i for i in (5, 6)), [5, 6]),
    "nothing": ([], []),
    "empty array": (np.array([]), []),
}


@pytest.mark.parametrize(("indices", "expected"), REQUESTS.values(), ids=REQUESTS)
def test_read_many(indices, expected):
    assert [sample["x"].item() for sample in Numbers(10).read_many(indices)] == expected


@pytest.mark.parametrize(
    ("indices", "named"),
    [
        ([0, 10], "index 10"),
        ([-11], "index -11"),
        (range(5, 15), "index 10"),
        ([1, 2**70], f"index {2**70}"),
        ([-(2**63) - 1], "index -9223372036854775809"),
        (np.array([2**63], dtype=np.uint64), "index 9223372036854775808"),
        (range(2**64, 2**64 + 1), "index 18446744073709551616"),
        (range(8, 10**30, 3), "index 11"),
        (range(-8, -(10**30), -3), "index -11"),
        (range(10**30, 0, -1), f"index {10**30}"),
    ],
    ids=[
        "end",
        "before the start",
        "range",
        "huge",
        "huge negative",
        "uint64",
        "huge range",
        "endless",
        "endless down",
        "from afar",
    ],
)
def test_index_out_of_range(indices, named):
    reader = Numbers(10)
    with pytest.raises(IndexError, match=rf"{named} is out of range; there are 10 samples"):
        reader.read_many(indices)
    assert not reader.reads


@pytest.mark.parametrize(
    "indices",
    [[True, False], [1.0], ["1"], [[1, 2]], [None], np.array(3), torch.tensor([0.5])],
    ids=["bools", "floats", "text", "nested", "None", "no axis", "float tensor"],
)
def test_what_is_no_index(indices):
    with pytest.raises(TypeError, match="whole numbers"):
        Numbers(10).read_many(indices)


def test_single_items():
    reader = Numbers(4)
    assert [reader[i]["x"].item() for i in (0, -1, np.int64(2), torch.tensor(1))] == [0, 3, 2, 1]
    assert [sample["x"].item() for sample in reader[::-2]] == [3, 1]
    assert [sample["x"].item() for sample in reader] == [0, 1, 2, 3]
    with pytest.raises(IndexError, match=r"index 4 .* 4 samples"):
        reader.read(4)
    with pytest.raises(TypeError, match="not float"):
        reader.read(1.0)


def test_read_batch_collates_unless_there_is_a_native_one():
    plain, native = Numbers(5), Stacked(5)
    assert (plain.supports_batch, native.supports_batch) == (False, True)
    for reader in (plain, native):
        same({"x": torch.tensor([4, 0, 4])}, reader.read_batch([-1, 0, 4]))
        with pytest.raises(ValueError, match="no samples"):
            reader.read_batch([])


def test_a_wrong_count_is_an_error():
    class Greedy(Numbers):
        def _read(self, positions):
            return super()._read(positions)[1:]

    with pytest.raises(RuntimeError, match="1 samples were read where 2 were asked for"):
        Greedy(5).read_many([1, 2])


class Given(Numbers):
    """Gives for a batch what ``make`` makes of its positions."""

    def __init__(self, make, count=6):
        super().__init__(count)
        self.make = make

    def _read_batch(self, positions):
        return self.make(torch.from_numpy(positions))


class Ragged(Given):
    def cut_batch(self, batch, start, end):
        return batch["rows"][batch["ptr"][start] : batch["ptr"][end]]


WRONG_BATCHES = {
    "too few": (lambda p: p[:-1], "1 samples where 2 were"),
    "too many": (lambda p: torch.cat([p, p]), "4 samples where 2 were"),
    "none": (lambda p: {"x": p[:0]}, r"0 samples in \['x'\] where 2 were"),
    "an array": (lambda p: (p, p.numpy()[1:]), r"1 samples in \[1\] where 2 were"),
    "deep": (lambda p: {"a": [p, {"b": p[1:]}]}, r"1 samples in \['a'\]\[1\]\['b'\] where 2 were"),
    "texts": (lambda p: {"x": p, "t": ["a"] * 3}, r"3 samples in \['t'\] where 2 were"),
}


@pytest.mark.parametrize("fuse", [1, 2, 3])
@pytest.mark.parametrize("wrong", WRONG_BATCHES)
def test_a_wrong_count_in_a_batch_is_an_error(wrong, fuse):
    make, sentence = WRONG_BATCHES[wrong]
    reader = Given(make)
    with pytest.raises(RuntimeError, match=f"<Given, 6 samples>: _read_batch gave {sentence}"):
        reader.read_batch([1, 2])
    found = drain(iter(DataLoader(reader, batch_size=2, fuse=fuse)))
    assert [type(batch) for batch in found] == [RuntimeError] * 3
    assert all("where 2 were asked for" in str(error) for error in found)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: {"x": p, "all": torch.tensor(3)},
        lambda p: {"x": p, "all": np.float64(3)},
        lambda p: [p, {"words": ("a", "b")}, []],
        lambda p: {"x": p, "own": object()},
        lambda p: torch.nested.as_nested_tensor([torch.ones(1), torch.ones(2), torch.ones(3)]),
    ],
    ids=["no axes", "a number", "texts", "an object", "nested"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_what_has_no_rows_is_not_counted(make):
    Given(make).read_batch([1, 2])


def test_batches_of_another_form_are_not_counted():
    def make(positions):
        return {"rows": torch.arange(9), "ptr": torch.tensor([0, 4, 9])}

    assert Ragged(make).read_batch([1, 2])["rows"].tolist() == list(range(9))


def test_closing():
    closed = []

    class Closing(Numbers):
        def _close(self):
            closed.append(True)

    with Closing(3) as reader:
        sample = reader.read(1)
    reader.close()
    assert reader.closed
    assert closed == [True]
    assert sample["x"] == 1
    for use in (
        lambda: reader.read(0),
        lambda: reader.read_many([0]),
        lambda: pickle.dumps(reader),
    ):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_pickling_makes_it_again():
    reader = Numbers(5, bad=[3])
    reader.read(1)
    copy = pickle.loads(pickle.dumps(reader))
    assert (len(copy), copy.bad, copy.reads) == (5, {3}, [])


def test_two_hooks_are_needed():
    with pytest.raises(TypeError, match="abstract"):
        Reader()


@pytest.mark.parametrize("workers", [0, 2])
def test_torch_loads_from_it_as_it_is(workers):
    loader = torch.utils.data.DataLoader(Numbers(10), batch_size=4, num_workers=workers)
    assert values(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_stack_without_torch():
    samples = [{"a": i, "b": (np.full(2, i), "t"), "c": [1.5, b"x"]} for i in range(3)]
    batch = stack(samples)
    assert batch["a"].tolist() == [0, 1, 2]
    assert batch["b"][0].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert batch["b"][1] == ["t"] * 3
    assert batch["c"][0].tolist() == [1.5] * 3
    with pytest.raises(ValueError, match="different lengths"):
        stack([[1], [1, 2]])


def test_nothing_imports_torch():
    code = """
import sys, fastckpt, numpy as np
assert "fastckpt.data" not in sys.modules
data = fastckpt.data
class Squares(data.Reader):
    framework = "numpy"
    def __len__(self): return 6
    def _read(self, positions): return [{"x": np.array(p * p)} for p in positions.tolist()]
batches = list(data.DataLoader(data.Dataset(Squares()), batch_size=4, num_workers=2, shuffle=True))
assert sorted(x for batch in batches for x in batch["x"].tolist()) == [0, 1, 4, 9, 16, 25]
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


# ---- several as one


@pytest.mark.parametrize("kind", [Numbers, Stacked])
class TestMulti:
    def test_order_duplicates_and_negative_indices(self, kind):
        first, empty, last = kind(3), kind(0), kind(4)
        reader = MultiReader(first, empty, last)
        first.reads.clear(), last.reads.clear()
        assert len(reader) == 7
        indices = [-1, 0, 3, 2, 3, -7, 6]
        expected = [3, 0, 0, 2, 0, 0, 3]
        assert [sample["x"].item() for sample in reader.read_many(indices)] == expected
        assert (len(first.reads), len(empty.reads), len(last.reads)) == (1, 0, 1)  # one each
        same({"x": torch.tensor(expected)}, reader.read_batch(indices))
        same({"x": torch.tensor([2, 1])}, reader.read_batch([5, 4]))
        assert reader.supports_batch == (kind is Stacked)
        assert [reader.locate(i) for i in (0, 2, 3, -1)] == [(0, 0), (0, 2), (2, 0), (2, 3)]
        with pytest.raises(IndexError, match=r"index 7 .* 7 samples"):
            reader.read_many([7])

    def test_pickles_and_closes_its_readers(self, kind):
        reader = pickle.loads(pickle.dumps(MultiReader(kind(3), kind(4))))
        assert reader.read(4)["x"] == 1
        reader.close()
        assert all(child.closed for child in reader.readers)


class Fields(Numbers):
    def __init__(self, count, *names):
        super().__init__(count)
        self.names = names

    def _read(self, positions):
        return [dict.fromkeys(self.names, 0) if self.names else 0 for _ in positions]


def test_field_names_must_match():
    MultiReader(Fields(1, "a", "b"), Fields(0, "c"), Fields(1, "b", "a"))  # their order may differ
    for other in (Fields(1, "a"), Fields(1, "a", "c"), Fields(1)):
        with pytest.raises(ValueError, match=r"reader 1 .* reader 0 gives the fields a, b"):
            MultiReader(Fields(1, "a", "b"), other)
        MultiReader(Fields(1, "a", "b"), other, check_fields=False)


def test_multi_refuses_mixed_frameworks():
    numpy_reader = Numbers(1)
    numpy_reader.framework = "numpy"
    with pytest.raises(ValueError, match="numpy and torch"):
        MultiReader(Numbers(1), numpy_reader)
    with pytest.raises(ValueError, match="at least one"):
        MultiReader()
    with pytest.raises(TypeError, match="readers are expected, not list"):
        MultiReader(Numbers(1), [1, 2])


def test_merged_batches_keep_their_form():
    class Rich(Numbers):
        def _read(self, positions):
            return [(f"t{p}", [torch.tensor(p), {"y": float(p)}]) for p in positions.tolist()]

        def _read_batch(self, positions):
            return Reader._read_batch(self, positions)

    batch = MultiReader(Rich(2), Rich(3)).read_batch([4, 0, 2])
    same([["t2", "t0", "t0"], [torch.tensor([2, 0, 0]), {"y": torch.tensor([2.0, 0, 0], dtype=torch.float64)}]], batch)  # fmt: skip


# ---- checkpoints


def tensors():
    torch.manual_seed(0)
    return {
        "x": torch.randn(100, 4, 3),
        "deep": {"labels": torch.arange(100), "half": torch.randn(100, 2).bfloat16()},
        "weight": torch.nn.Parameter(torch.randn(100, 2)),
        "slice": torch.randn(300, 2)[50:150],
        "strided": torch.randn(200, 2)[::2],
        "transposed": torch.randn(3, 100).t(),
        "expanded": torch.randn(1, 2).expand(100, 2),
        "conj": torch.randn(100, dtype=torch.complex64).conj(),
        "empty": torch.empty(100, 0),
        "flags": torch.arange(100) % 3 == 0,
        "note": "not a tensor",
    }


def names_of(obj):
    flat = {name: value for name, value in obj.items() if isinstance(value, torch.Tensor)}
    return flat | {f"deep.{name}": value for name, value in obj.get("deep", {}).items()}


FORMS = {
    "zip": {},
    "legacy": {"_use_new_zipfile_serialization": False},
}
POSITIONS = {
    "one": [7],
    "run": range(10, 60),
    "all": range(100),
    "shuffled": [5, 99, 0, 1, 2, 50, 2, -1],
    "backwards": range(20, 0, -1),
}


@pytest.fixture(scope="module", params=FORMS)
def stacked_file(request, tmp_path_factory):
    obj, path = tensors(), tmp_path_factory.mktemp("rows") / "samples.pt"
    torch.save(obj, path, **FORMS[request.param])
    return path, names_of(obj)


class TestRows:
    @pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
    def test_equal_to_indexing(self, stacked_file, positions):
        path, expected = stacked_file
        with CheckpointReader(path) as reader:
            assert (len(reader), reader.supports_batch) == (100, True)
            batch, samples = reader.read_batch(positions), reader.read_many(positions)
        assert batch.keys() == expected.keys() == samples[0].keys()
        for name, tensor in expected.items():
            tensor = tensor.detach()[list(positions)].resolve_conj()
            assert torch.equal(batch[name].resolve_conj(), tensor), name
            assert batch[name].dtype == tensor.dtype
            assert not batch[name].requires_grad
            for sample, row in zip(samples, tensor, strict=True):
                assert torch.equal(sample[name].resolve_conj(), row), name

    def test_numpy(self, stacked_file):
        path, expected = stacked_file
        reader = CheckpointReader(path, framework="numpy", keys=["x", "deep.labels", "transposed"])
        batch = reader.read_batch([3, 1])
        assert list(batch) == ["x", "deep.labels", "transposed"]
        sample = reader.read(3)
        for name, array in batch.items():
            assert isinstance(sample[name], np.ndarray)
            assert array.tobytes() == expected[name][[3, 1]].numpy().tobytes()
            assert np.array_equal(sample[name], expected[name][3].numpy())

    def test_samples_are_the_callers(self, stacked_file):
        path, expected = stacked_file
        with CheckpointReader(path, keys="x") as reader:
            one, other = reader.read_many([3, 3])
        one["x"].add_(1)  # a mapping would be read-only, or change the file
        assert torch.equal(other["x"], expected["x"][3])
        assert torch.equal(CheckpointReader(path).read(3)["x"], expected["x"][3])

    def test_pickles_by_opening_again(self, stacked_file):
        path, _ = stacked_file
        copy = pickle.loads(pickle.dumps(CheckpointReader(path, keys="deep.*")))
        assert copy.read(4)["deep.labels"] == 4
        assert list(copy.read(4)) == ["deep.labels", "deep.half"]

    def test_from_threads(self, stacked_file):
        path, expected = stacked_file
        reader, wrong = CheckpointReader(path), []

        def work(k):
            for i in range(k, 100, 4):
                if not torch.equal(reader.read(i)["x"], expected["x"][i]):
                    wrong.append(i)

        threads = [threading.Thread(target=work, args=[k]) for k in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert not wrong


@pytest.mark.parametrize("start", ["fork", None])
def test_torch_loads_rows(tmp_path, start):
    torch.save({"x": torch.arange(6)}, tmp_path / "a.pt")
    reader = CheckpointReader(tmp_path / "a.pt")
    loader = torch.utils.data.DataLoader(
        reader, 3, num_workers=1 if start else 0, multiprocessing_context=start
    )
    assert values(loader) == [[0, 1, 2], [3, 4, 5]]


def test_a_copy_refuses_another_file(tmp_path):
    torch.save({"x": torch.arange(6)}, tmp_path / "a.pt")
    pickled = pickle.dumps(CheckpointReader(tmp_path / "a.pt"))
    torch.save({"x": torch.arange(7)}, tmp_path / "a.pt")
    with pytest.raises(FormatError, match="has changed"):
        pickle.loads(pickled)


def test_runs_of_rows_are_one_read(tmp_path, monkeypatch):
    from fastckpt import rows

    torch.save({"x": torch.arange(200).view(100, 2), "y": torch.arange(100)}, tmp_path / "a.pt")
    asked = []
    fill = rows.fill
    monkeypatch.setattr(
        rows,
        "fill",
        lambda s, records, *a, **k: asked.append(len(records)) or fill(s, records, *a, **k),
    )
    reader = CheckpointReader(tmp_path / "a.pt")
    batch = reader.read_batch([*range(10, 40), *range(50, 60), 3])
    assert batch["y"].tolist() == [*range(10, 40), *range(50, 60), 3]
    assert asked == [6]  # one fill; of each tensor, three runs


def test_a_bare_tensor(tmp_path):
    torch.save(torch.arange(12).view(4, 3), tmp_path / "bare.pt")
    reader = CheckpointReader(tmp_path / "bare.pt")
    assert reader.read(-1).tolist() == [9, 10, 11]
    assert reader.read_batch([1, 0]).tolist() == [[3, 4, 5], [0, 1, 2]]


@pytest.mark.filterwarnings("ignore:.*deprecated")  # said once in a process
def test_quantized_rows(tmp_path):
    tensor = torch.quantize_per_tensor(torch.randn(5, 2), 0.1, 0, torch.qint8)
    torch.save({"q": tensor}, tmp_path / "q.pt")
    found = CheckpointReader(tmp_path / "q.pt").read_batch([4, 1])["q"]
    assert torch.equal(found.dequantize(), tensor[[4, 1]].dequantize())
    with pytest.raises(UnsupportedError, match="'q': a quantized_per_tensor tensor has no rows"):
        CheckpointReader(tmp_path / "q.pt", framework="numpy")


REFUSED = {
    "lengths": ({"a": torch.zeros(3), "b": torch.zeros(4)}, ValueError, "'b' has 4 rows, 'a' has 3"),
    "scalar": ({"step": torch.tensor(1)}, ValueError, "'step'.*without dimensions.*keys="),
    "sparse": ({"s": torch.eye(3).to_sparse()}, UnsupportedError, "sparse_coo.*keys="),
    "nothing": ({"note": 1}, ValueError, "no tensors"),
    "repeated": ({"r": torch.zeros(1).expand(2, 1 << 40)}, UnsupportedError, "row is larger"),
}  # fmt: skip


@pytest.mark.parametrize(("obj", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_rows(tmp_path, obj, error, message):
    torch.save(obj, tmp_path / "a.pt")
    with pytest.raises(error, match=message):
        CheckpointReader(tmp_path / "a.pt")


def test_shards_have_no_rows(tmp_path):
    save_sharded({"x": torch.zeros(3), "y": torch.zeros(3)}, tmp_path, max_shard_bytes=20)
    for found in (tmp_path, open_checkpoint(tmp_path)):
        with pytest.raises(UnsupportedError, match="rows of one file"):
            CheckpointReader(found)


def test_keys_choose(tmp_path):
    torch.save({"a": torch.zeros(3), "b": torch.zeros(4)}, tmp_path / "a.pt")
    assert len(CheckpointReader(tmp_path / "a.pt", keys="b")) == 4
    with pytest.raises(KeyError, match="c"):
        CheckpointReader(tmp_path / "a.pt", keys=["c"])


def test_a_file_that_shrinks_is_an_error(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"x": torch.zeros(1000, 100)}, path)
    reader = CheckpointReader(path)
    with open(path, "r+b") as f:
        f.truncate(100_000)
    with pytest.raises(FormatError, match="shorter"):
        reader.read(999)
    with pytest.raises(FormatError, match="without its end record"):
        pickle.loads(pickle.dumps(reader))


def test_an_open_checkpoint(tmp_path):
    torch.save({"x": torch.arange(3)}, tmp_path / "a.pt")
    checkpoint = open_checkpoint(tmp_path / "a.pt", framework="numpy")
    with CheckpointReader(checkpoint) as reader:
        assert reader.framework == "numpy"
        assert reader.read(2)["x"] == 2
    assert checkpoint.source.closed
    with pytest.raises(ValueError, match="what is open"):
        CheckpointReader(checkpoint, threads=2)


class TestFiles:
    @pytest.fixture
    def folder(self, tmp_path):
        for i in range(4):
            torch.save({"x": torch.tensor(i), "y": torch.zeros(2)}, tmp_path / f"{i}.pt")
        return tmp_path

    def test_pattern(self, folder):
        reader = CheckpointReader(str(folder / "*.pt"), keys="x")
        assert (len(reader), reader.supports_batch) == (4, False)
        assert values(reader.read_many([3, 0, -1])) == [3, 0, 3]
        copy = pickle.loads(pickle.dumps(reader))
        (folder / "9.pt").touch()  # a worker sees the same samples
        assert len(copy) == len(pickle.loads(pickle.dumps(reader))) == 4
        same({"x": torch.tensor([1, 2])}, copy.read_batch([1, 2]))

    def test_list(self, folder):
        reader = CheckpointReader([folder / "2.pt", str(folder / "1.pt")], framework="numpy")
        assert [sample["x"].item() for sample in reader] == [2, 1]
        assert isinstance(reader.read(0)["y"], np.ndarray)

    def test_nothing_fits(self, folder):
        with pytest.raises(FileNotFoundError, match="no file fits"):
            CheckpointReader(str(folder / "*.npz"))
