"""ZarrReader: what comes out of stores that are as they should be."""

import os
import pickle
import threading

import numpy as np
import pytest

zarr = pytest.importorskip("zarr")
torch = pytest.importorskip("torch")

import zarrcraft  # noqa: E402
from fastckpt import _rows  # noqa: E402
from fastckpt.data import DataLoader, MultiReader, ZarrReader  # noqa: E402
from fastckpt.data.zarr_rows import Cache, Plan, Rows  # noqa: E402

REQUESTS = {
    "in order": [0, 1, 2, 3, 4],
    "backwards": [4, 3, 2, 1, 0],
    "repeated": [2, 0, 2, 2, 4],
    "negative": [-1, 0, -5],
    "one": [3],
    "none": [],
}


def same(found, expected, kind=np.ndarray):
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert isinstance(found[name], kind), name
        got = np.asarray(found[name])
        assert (got.dtype, got.shape) == (value.dtype, value.shape), name
        np.testing.assert_array_equal(got, value, err_msg=name)


@pytest.fixture
def store(tmp_path):
    samples = zarrcraft.graphs()
    zarrcraft.write(tmp_path / "graphs.zarr", samples)
    return tmp_path / "graphs.zarr", samples


class TestGraphs:
    @pytest.mark.parametrize("chunk", [1, 3, 1000])
    def test_samples(self, tmp_path, chunk):
        samples = zarrcraft.graphs()
        zarrcraft.write(tmp_path / "s", samples, chunk=chunk)
        for cache_bytes in (0, 200, 1 << 20):
            with ZarrReader(tmp_path / "s", cache_bytes=cache_bytes, framework="numpy") as reader:
                for request in REQUESTS.values():
                    found = reader.read_many(request)
                    assert len(found) == len(request)
                    for sample, index in zip(found, request, strict=True):
                        same(sample, samples[index])

    def test_shards(self, tmp_path):
        samples = zarrcraft.graphs()
        zarrcraft.write(tmp_path / "s", samples, chunk=2, shards=2)
        reader = ZarrReader(tmp_path / "s", framework="numpy")
        for found, sample in zip(
            reader.read_many([3, 1, 4]), (samples[i] for i in (3, 1, 4)), strict=True
        ):
            same(found, sample)

    def test_tensors_belong_to_the_caller(self, store):
        path, samples = store
        reader = ZarrReader(path)
        first, again = reader.read_many([1, 1])
        first["positions"].fill_(7)
        same(again, samples[1], torch.Tensor)
        same(reader[1], samples[1], torch.Tensor)
        weight = torch.ones(3, requires_grad=True)
        assert first["positions"].mul_(weight).requires_grad

    def test_deleted_samples_are_skipped(self, tmp_path):
        samples = zarrcraft.graphs()
        zarrcraft.write(tmp_path / "s", samples, deleted=(0, 3))
        reader = ZarrReader(tmp_path / "s", framework="numpy")
        assert len(reader) == 3
        assert reader.counts().tolist() == [2, 5, 4]
        for found, i in zip(reader[:], (1, 2, 4), strict=True):
            same(found, samples[i])
        with pytest.raises(IndexError, match="index 3 is out of range; there are 3 samples"):
            reader.read(3)

    @pytest.mark.parametrize(
        "names", [["energy"], ["neighbor_list", "cell"], ["positions"]], ids=str
    )
    def test_fields(self, store, names, monkeypatch):
        path, samples = store
        seen, read = set(), Rows.read
        monkeypatch.setattr(
            Rows, "read", lambda self, *args: seen.add(self.path) or read(self, *args)
        )
        reader = ZarrReader(path, fields=iter(names), framework="numpy")
        assert reader.fields == tuple(names)
        same(reader[2], {name: samples[2][name] for name in names})
        assert {name for name in seen if "meta" not in name} == {f"core/{name}" for name in names}

    def test_order_is_the_stores_word(self, store):
        path, _ = store
        assert ZarrReader(path).fields == tuple(zarrcraft.LEVELS)

    def test_levels_are_known_by_name(self, store):
        path, samples = store
        group = zarr.open_group(path, mode="r+")
        del group.attrs["fields"]
        same(ZarrReader(path, framework="numpy")[2], dict(sorted(samples[2].items())))

    def test_custom_fields(self, store):
        path, _ = store
        group = zarr.open_group(path, mode="r+")
        group.create_array("custom/charge_guess", data=np.arange(15.0))
        group.create_array("custom/tag", data=np.arange(5))
        group.attrs["fields"] = {"core": zarrcraft.LEVELS, "custom": {"charge_guess": "atoms"}}
        found = ZarrReader(path, framework="numpy")[1]
        assert found["charge_guess"].tolist() == [3.0, 4.0]
        assert found["tag"].tolist() == [1]

    def test_absent_chunks_are_fill_value(self, store):
        path, _ = store
        group = zarr.open_group(path, mode="r+")
        group.create_array(
            "core/velocities", shape=(15, 3), chunks=(4, 3), dtype="f4", fill_value=2.5
        )
        found = ZarrReader(path, framework="numpy", fields=["velocities"])[2]
        assert (found["velocities"] == 2.5).all()
        assert found["velocities"].shape == (5, 3)

    def test_edges_of_other_integers(self, store):
        path, samples = store
        group = zarr.open_group(path, mode="r+")
        for kind, expected in [("i4", "i4"), ("i2", "i8"), ("u4", "i8"), ("u1", "i8")]:
            edges = group["core/neighbor_list"][:].astype(kind)
            del group["core/neighbor_list"]
            group.create_array("core/neighbor_list", data=edges)
            found = ZarrReader(path, framework="numpy", fields=["neighbor_list"])[4]
            assert found["neighbor_list"].dtype == expected
            assert (found["neighbor_list"] == samples[4]["neighbor_list"]).all()


@pytest.fixture
def levels(tmp_path):
    """A store with levels of its own: bonds (pointers), pairs (atoms x bonds), and shells, one row for each sample."""
    samples = zarrcraft.graphs((2, 3, 1))
    bonds, atoms = np.array([1, 0, 2]), np.array([2, 3, 1])
    definitions = {
        "bonds": {"kind": "segmented"},
        "pairs": {"kind": "product", "left": "atoms", "right": "bonds"},
        "shells": {"kind": "uniform"},
    }
    group = zarrcraft.write(
        tmp_path / "levels.zarr", samples, levels={"version": 1, "definitions": definitions}
    )
    group.create_array("meta/level_ptrs/bonds", data=zarrcraft.pointer(bonds))
    group.create_array("meta/level_ptrs/pairs", data=zarrcraft.pointer(atoms * bonds))
    group.create_array("levels/bonds/length", data=np.arange(3.0))
    group.create_array("levels/pairs/weight", data=np.arange(8).reshape(4, 2))
    group.create_array("levels/shells/filled", data=np.arange(3))
    group.attrs["fields"] = {
        "core": zarrcraft.LEVELS,
        "levels": {"length": "bonds", "weight": "pairs", "filled": "shells"},
    }
    return tmp_path / "levels.zarr"


class TestLevels:
    def test_samples(self, levels):
        reader = ZarrReader(levels, fields=["length", "weight", "filled"], framework="numpy")
        found = reader.read_many([2, 0, 1])
        assert [s["length"].tolist() for s in found] == [[1.0, 2.0], [0.0], []]
        assert [s["weight"].shape for s in found] == [(1, 2, 2), (2, 1, 2), (3, 0, 2)]
        assert found[1]["weight"].tolist() == [[[0, 1]], [[2, 3]]]
        assert [s["filled"].tolist() for s in found] == [[2], [0], [1]]
        assert reader.counts("bonds").tolist() == [1, 0, 2]
        with pytest.raises(KeyError, match="no level 'shells' has a pointer"):
            reader.counts("shells")

    def test_batch(self, levels):
        reader = ZarrReader(levels, fields=["length", "weight", "filled"], framework="numpy")
        batch = reader.read_batch([2, 0])
        assert batch["length"].tolist() == [1.0, 2.0, 0.0]
        assert batch["bonds_ptr"].tolist() == [0, 2, 3]
        assert batch["weight"].tolist() == [[4, 5], [6, 7], [0, 1], [2, 3]]
        assert batch["pairs_ptr"].tolist() == [0, 2, 4]
        assert batch["filled"].tolist() == [2, 0]
        assert "atoms_ptr" not in batch


class TestBatches:
    def check(self, batch, samples):
        atoms = zarrcraft.pointer([len(sample["positions"]) for sample in samples])
        assert batch["atoms_ptr"].tolist() == atoms.tolist()
        assert (
            batch["atoms_batch"].tolist()
            == np.repeat(np.arange(len(samples)), np.diff(atoms)).tolist()
        )
        edges = [s["neighbor_list"] + a for s, a in zip(samples, atoms, strict=False)]
        np.testing.assert_array_equal(batch["neighbor_list"], np.concatenate(edges))
        assert batch["edges_ptr"].tolist() == zarrcraft.pointer(list(map(len, edges))).tolist()
        for name in ("positions", "energy", "cell", "atomic_numbers"):
            expected = np.concatenate([sample[name] for sample in samples])
            np.testing.assert_array_equal(batch[name], expected)
            assert np.asarray(batch[name]).dtype == expected.dtype

    @pytest.mark.parametrize("framework", ["torch", "numpy"])
    @pytest.mark.parametrize("request_", [[0, 1, 2, 3, 4], [4, 0, 0, 2], [3]], ids=str)
    def test_graphs(self, store, request_, framework):
        path, samples = store
        reader = ZarrReader(path, framework=framework)
        assert reader.supports_batch
        batch = reader.read_batch(request_)
        assert isinstance(batch["cell"], torch.Tensor if framework == "torch" else np.ndarray)
        self.check(batch, [samples[i] for i in request_])

    @pytest.mark.parametrize("framework", ["torch", "numpy"])
    def test_cut(self, store, framework):
        path, samples = store
        reader = ZarrReader(path, framework=framework)
        batch = reader.read_batch([4, 1, 2, 0])
        self.check(reader.cut_batch(batch, 1, 3), [samples[1], samples[2]])
        self.check(reader.cut_batch(batch, 3, 4), [samples[0]])
        self.check(batch, [samples[i] for i in (4, 1, 2, 0)])

    @pytest.mark.parametrize("framework", ["torch", "numpy"])
    def test_several_readers(self, tmp_path, framework):
        stores = [zarrcraft.graphs((3, 1, 2), seed=1), zarrcraft.graphs((2, 4), seed=2)]
        for i, samples in enumerate(stores):
            zarrcraft.write(tmp_path / str(i), samples)
        reader = MultiReader(*(ZarrReader(tmp_path / str(i), framework=framework) for i in (0, 1)))
        both = stores[0] + stores[1]
        for request in ([4, 0, 3, 2, 4], [1, 0], [-1]):
            self.check(reader.read_batch(request), [both[i] for i in request])

    @pytest.mark.parametrize("fuse", [1, 3])
    def test_loader(self, store, fuse):
        path, samples = store
        loader = DataLoader(ZarrReader(path), batch_size=2, shuffle=True, seed=3, fuse=fuse)
        for batch in loader:
            found = [
                next(s for s in samples if (s["energy"] == e).all())
                for e in batch["energy"].numpy()[:, None, None]
            ]
            self.check(batch, found)

    def test_pointers_that_are_fields(self, store):
        path, _ = store
        group = zarr.open_group(path, mode="r+")
        group.create_array("custom/atoms_ptr", data=np.arange(5))
        with pytest.raises(ValueError, match="a field is called 'atoms_ptr'"):
            ZarrReader(path).read_batch([0])


class TestRows:
    @pytest.mark.parametrize("chunk", [(1, 2, 2), (3, 1, 2), (100, 3, 2)], ids=str)
    def test_group(self, tmp_path, chunk):
        images, labels = np.arange(30).reshape(5, 3, 2), np.arange(5) * 10
        group = zarr.open_group(tmp_path / "s", mode="w")
        group.create_array("image", data=images, chunks=chunk)
        group.create_array("label", data=labels, chunks=(2,))
        reader = ZarrReader(tmp_path / "s", framework="numpy")
        assert (len(reader), reader.fields) == (5, ("image", "label"))
        for request in REQUESTS.values():
            for found, i in zip(reader.read_many(request), request, strict=True):
                same(found, {"image": images[i], "label": labels[i, ...]})
            if request:
                batch = {"image": images[request], "label": labels[request]}
                same(reader.read_batch(request), batch)

    def test_many_scattered_chunks(self, tmp_path):
        rows = np.arange(400).reshape(100, 4)
        zarr.create_array(tmp_path / "s", data=rows, chunks=(3, 4))
        reader = ZarrReader(tmp_path / "s", framework="numpy", cache_bytes=500)
        for request in ([1, 10, 20, 30, 40, 50, 99], list(range(99, -1, -7)), range(100)):
            assert (reader.read_batch(request) == rows[list(request)]).all()

    @pytest.mark.parametrize("dtype", [">f4", "<f4", ">i8", "bool", "c8", "u2"])
    def test_single_array(self, tmp_path, dtype):
        rows = np.arange(6).reshape(3, 2).astype(dtype)
        kept = zarr.create_array(tmp_path / "s", shape=(3, 2), dtype=dtype, zarr_format=2)
        kept[:] = rows
        reader = ZarrReader(tmp_path / "s")
        assert reader.fields == ()
        for found, row in zip(reader.read_many([2, 0]), rows[[2, 0]], strict=True):
            assert isinstance(found, torch.Tensor)
            assert found.numpy().tolist() == row.tolist()
        assert reader.read_batch([1, 1]).numpy().tolist() == rows[[1, 1]].tolist()
        assert len(list(DataLoader(reader, batch_size=2))) == 2

    def test_arrays_inside_of_groups(self, tmp_path):
        group = zarr.open_group(tmp_path / "s", mode="w")
        group.create_array("train/x", data=np.arange(3))
        reader = ZarrReader(tmp_path / "s", fields=["train/x"], framework="numpy")
        assert reader[1] == {"train/x": 1}

    @pytest.mark.parametrize("place", [{}, zarr.storage.MemoryStore()], ids=["dict", "store"])
    def test_in_memory(self, place):
        zarr.open_group(place, mode="w").create_array("x", data=np.arange(4))
        assert ZarrReader(place, framework="numpy")[3] == {"x": 3}

    def test_torch_dataloader(self, tmp_path):
        zarr.create_array(tmp_path / "s", data=np.arange(7.0))
        loader = torch.utils.data.DataLoader(ZarrReader(tmp_path / "s"), batch_size=3)
        assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5], [6]]


class TestRefresh:
    def test_appended_and_deleted(self, store):
        path, samples = store
        group = zarr.open_group(path, mode="r+")
        reader = ZarrReader(path, framework="numpy")
        same(reader[-1], samples[-1])
        more = zarrcraft.graphs((2, 6), seed=5)
        zarrcraft.append(group, more)
        group["meta/samples_mask"][0] = False
        assert len(reader) == 5
        reader.refresh()
        assert len(reader) == 6
        same(reader[0], samples[1])
        same(reader[-1], more[-1])

    def test_all_or_nothing(self, store):
        path, samples = store
        reader = ZarrReader(path, framework="numpy")
        reader.read_many(range(5))
        (path / "meta" / "atoms_ptr" / "zarr.json").write_text("{")
        with pytest.raises(ValueError, match="metadata of 'meta/atoms_ptr' cannot be read"):
            reader.refresh()
        same(reader[2], samples[2])

    def test_fewer_samples_meanwhile(self, store):
        path, _ = store
        reader = ZarrReader(path, framework="numpy")
        positions = reader._positions([4])
        zarr.open_group(path, mode="r+")["meta/samples_mask"][3] = False
        reader.refresh()
        with pytest.raises(IndexError, match="index 4 is out of range; there are 4 samples"):
            reader._read(positions)


class TestProcesses:
    def test_pickle(self, store):
        path, samples = store
        reader = pickle.loads(pickle.dumps(ZarrReader(path, fields=["energy"], framework="numpy")))
        same(reader[3], {"energy": samples[3]["energy"]})

    def test_fork_while_locked(self, store):
        path, samples = store
        reader = ZarrReader(path, framework="numpy")
        reader.read_many([0, 1])
        here = reader._layout.arrays.here()
        lock = here._locks.setdefault("core/positions", threading.Lock())
        with lock, here.cache._lock:  # as if other threads were reading
            child = os.fork()
            if not child:
                try:
                    same(reader[4], samples[4])
                    same(reader[0], samples[0])
                except BaseException:
                    os._exit(1)
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    @pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
    def test_workers(self, store, method):
        path, samples = store
        reader = ZarrReader(path, fields=["energy"])
        reader[0]
        loader = torch.utils.data.DataLoader(
            reader, batch_size=2, num_workers=1, multiprocessing_context=method
        )
        energies = torch.cat([batch["energy"] for batch in loader])
        assert energies.flatten().tolist() == [s["energy"].item() for s in samples]

    def test_threads(self, store):
        path, samples = store
        reader = ZarrReader(path, cache_bytes=300, framework="numpy")
        barrier, errors = threading.Barrier(4), []

        def work(seed):
            order = np.random.default_rng(seed).permutation(10) % 5
            barrier.wait()
            try:
                for i in order.tolist():
                    same(reader[i], samples[i])
                reader.refresh()
                same(reader[seed], samples[seed])
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []

    def test_closed(self, store):
        path, samples = store
        reader = ZarrReader(path, framework="numpy")
        sample = reader[1]
        reader.close()
        same(sample, samples[1])
        for use in (lambda: reader[0], reader.refresh, reader.check_integrity, reader.counts):
            with pytest.raises(ValueError, match="the reader is closed"):
                use()


class TestCache:
    def test_bound(self):
        cache = Cache(100)
        for i in range(10):
            cache.put(("x", i), np.zeros(30, np.uint8))
            assert cache._nbytes == sum(b.nbytes for b in cache._blocks.values()) <= 100
        assert [i for i in range(10) if cache.get(("x", i)) is not None] == [7, 8, 9]
        cache.get(("x", 7))
        cache.put(("x", 10), np.zeros(30, np.uint8))
        assert [i for i in range(11) if cache.get(("x", i)) is not None] == [7, 9, 10]
        cache.put(("x", 11), np.zeros(101, np.uint8))
        assert cache.get(("x", 11)) is None
        cache.put(("x", 7), np.zeros(10, np.uint8))
        assert cache._nbytes == 70

    @pytest.mark.parametrize(("cache_bytes", "decoded"), [(1 << 20, 5), (0, 10), (2 * 32, 8)])
    def test_what_is_decoded(self, tmp_path, monkeypatch, cache_bytes, decoded):
        """Twice all rows of five chunks of 32 bytes: what is cached is taken before it is displaced."""
        zarr.create_array(tmp_path / "s", data=np.arange(20), chunks=(4,))
        seen, read = [], Rows.read
        monkeypatch.setattr(
            Rows,
            "read",
            lambda self, array, blocks: seen.extend(blocks) or read(self, array, blocks),
        )
        reader = ZarrReader(tmp_path / "s", cache_bytes=cache_bytes, framework="numpy")
        for _ in range(2):
            assert reader.read_batch(range(19, -1, -1)).tolist() == list(range(19, -1, -1))
        assert len(seen) == decoded

    @pytest.mark.parametrize("block_rows", [1, 2, 3, 7, 100])
    def test_plan(self, block_rows):
        rng = np.random.default_rng(block_rows)
        source = np.arange(40)
        starts = rng.integers(0, 30, 12)
        counts = rng.integers(0, 10, 12)
        for some in (slice(None), slice(0, 1), slice(0, 0)):
            plan = Plan(starts[some], counts[some], block_rows)
            target = np.full(int(counts[some].sum()), -1)
            for k, block in enumerate(plan.blocks):
                pieces = plan.pieces[plan.bounds[k] : plan.bounds[k + 1]]
                rows = source[block * block_rows : (block + 1) * block_rows].copy()
                assert _rows.copy_rows(target, rows, pieces, 8) == -1
            expected = [source[a : a + n] for a, n in zip(starts[some], counts[some], strict=True)]
            assert target.tolist() == np.concatenate([[], *expected]).tolist()


class TestNative:
    @pytest.mark.parametrize(
        "piece",
        [
            (-1, 0, 1),
            (0, -1, 1),
            (0, 0, -1),
            (3, 0, 2),
            (0, 2, 2),
            (0, 0, 5),
            (2**62, 0, 2**62),
            (1, 0, 2**63 - 1),
        ],
        ids=str,
    )
    def test_pieces_outside(self, piece):
        target, source = np.zeros(3), np.ones(4)
        pieces = np.array([(0, 0, 1), piece], np.int64)
        assert _rows.copy_rows(target, source, pieces, 8) == 1
        assert not target.any()

    @pytest.mark.parametrize("dtype", [np.int32, np.int64])
    def test_move_numbers(self, dtype):
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        table = np.array([(2, 10, 5, 100), (0, 0, 0, 0), (1, 0, 1, 7)], np.int64)
        values = np.array([10, 14, 0], dtype)
        assert _rows.move_numbers(values, table, values.itemsize) == -1
        assert values.tolist() == [100, 104, 7]
        for bad in (9, 15, low, high):
            values = np.array([10, bad, 0], dtype)
            assert _rows.move_numbers(values, table, values.itemsize) == 0
            assert values.tolist() == [10, bad, 0]

    @pytest.mark.parametrize("counts", [(4,), (2, 2), (-1, 2), (2**62, 2**62, 2**62)], ids=str)
    def test_more_values_than_there_are(self, counts):
        values, counts = np.zeros(3, np.int64), np.array(counts, np.int64)
        with pytest.raises(ValueError, match="values, there are"):
            _rows.value_bounds(values, counts, np.zeros((len(counts), 2), np.int64), 8)

    @pytest.mark.parametrize("dtype", [np.int32, np.int64])
    def test_bounds(self, dtype):
        values, counts = np.array([3, -1, 2, 9], dtype), np.array([3, 0, 1], np.int64)
        bounds = np.zeros((3, 2), np.int64)
        _rows.value_bounds(values, counts, bounds, values.itemsize)
        assert bounds.tolist() == [[-1, 3], [0, -1], [9, 9]]
