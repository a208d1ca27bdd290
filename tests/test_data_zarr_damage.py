"""ZarrReader: stores that contradict themselves, edges that a writer left unshifted, and what check_integrity says of them."""

import json
import shutil
import sys
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

zarr = pytest.importorskip("zarr")

import zarrcraft  # noqa: E402
from fastckpt import FormatError, LimitError, Limits, UnsupportedError  # noqa: E402
from fastckpt.data import ZarrReader  # noqa: E402
from fastckpt.data.zarr_window import AMBIGUOUS, BROKEN, edge_bases  # noqa: E402


@pytest.fixture
def store(tmp_path):
    """(path, the open group, its samples): 5 graphs of 3, 2, 5, 1 and 4 atoms."""
    samples = zarrcraft.graphs()
    return tmp_path / "s", zarrcraft.write(tmp_path / "s", samples), samples


def reader(path, **options):
    return ZarrReader(path, framework="numpy", **options)


def kinds(path):
    return [finding.kind for finding in reader(path, fields=["energy"]).check_integrity().findings]


class TestInterruptedAppend:
    @pytest.mark.parametrize("done", [1, 2, 3])
    def test_only_what_is_committed_is_seen(self, store, done):
        path, group, samples = store
        zarrcraft.append(
            group, zarrcraft.graphs((4, 2), seed=9), parts=("pointers", "masks", "fields")[:done]
        )
        found = reader(path)
        assert len(found) == 5
        for got, expected in zip(found.read_many(range(5)), samples, strict=True):
            for name, value in expected.items():
                np.testing.assert_array_equal(got[name], value)
        report = found.check_integrity()
        assert not report.ok
        assert {finding.kind for finding in report.findings} == {"interrupted_append"}
        (finding,) = (f for f in report.findings if f.record == "meta/atoms_ptr")
        assert "has 8 rows, 6 are committed; an append was cut off" in finding.message

    def test_a_whole_append(self, store):
        path, group, samples = store
        more = zarrcraft.graphs((4, 2), seed=9)
        zarrcraft.append(group, more)
        found = reader(path)
        assert found.check_integrity().ok
        for got, expected in zip(found[:], samples + more, strict=True):
            np.testing.assert_array_equal(got["neighbor_list"], expected["neighbor_list"])


def cut_positions(group):
    group["core/positions"].resize((9, 3))


def cut_pointer(group):
    group["meta/atoms_ptr"].resize((4,))


def falling_pointer(group):
    group["meta/atoms_ptr"][2] = 1


def negative_pointer(group):
    group["meta/edges_ptr"][2] = -5


def no_mask(group):
    del group["meta/samples_mask"]


def float_pointer(group):
    del group["meta/atoms_ptr"]
    group.create_array("meta/atoms_ptr", data=np.arange(6.0))


def wrong_count(group):
    group.attrs["num_samples"] = "5"


def true_count(group):
    group.attrs["num_samples"] = True


def wrong_fields(group):
    group.attrs["fields"] = {"core": ["positions"]}


def named_field(group):
    group.attrs["fields"] = {"core": {**zarrcraft.LEVELS, "forces": "atom"}}


def twice(group):
    group.create_array("custom/energy", data=np.zeros(5))


def unknown_level(group):
    group.attrs["fields"] = {"core": {**zarrcraft.LEVELS, "cell": "molecule"}}


def level_is_a_list(group):
    group.attrs["fields"] = {"core": {**zarrcraft.LEVELS, "cell": [1]}}


def later_levels(group):
    group.attrs["levels"] = {"version": 2, "definitions": {}}


def wrong_levels(group):
    group.attrs["levels"] = [1]


def product_of_itself(group):
    group.attrs["levels"] = {
        "version": 1,
        "definitions": {"pairs": {"kind": "product", "left": "pairs", "right": "atoms"}},
    }
    group.create_array("levels/pairs/weight", data=np.zeros(4))
    group.create_array("meta/level_ptrs/pairs", data=np.array([0, 0, 1, 2, 3, 4]))


def edges_of_floats(group):
    del group["core/neighbor_list"]
    group.create_array("core/neighbor_list", data=np.zeros((55, 2)))


def edge_outside(group):
    group["core/neighbor_list"][20, 0] = 10


def text(group):
    group.create_array(
        "custom/name", data=np.array(["a"] * 5, dtype="U1").astype(object).astype("U1")
    )


OPEN = {
    cut_pointer: "array 'meta/atoms_ptr' has shape (4,) of int64, 6 whole numbers are expected",
    no_mask: "array 'meta/samples_mask' is missing",
    float_pointer: "has shape (6,) of float64, 6 whole numbers",
    wrong_count: "attribute 'num_samples' is '5', a count is expected",
    true_count: "attribute 'num_samples' is True",
    wrong_fields: "attribute 'fields' is",
    named_field: "names a field 'forces' in 'core', and has no array for it",
    twice: "field 'energy' is both 'core/energy' and 'custom/energy'",
    unknown_level: "level 'molecule' is of kind None",
    level_is_a_list: "a level is <list of int>, a name is expected",
    later_levels: "levels of version 2, version 1 is handled",
    wrong_levels: "attribute 'levels' is <list of int>",
    edges_of_floats: "array 'core/neighbor_list' is of float64, numbers of atoms are expected",
}
READ = {
    cut_positions: (2, "'core/positions' has 9 rows, sample 2 (row 2 of the store) needs rows 5 to 9"),
    falling_pointer: (1, "sample 1 (row 1 of the store): the pointer of level 'atom' goes from 3 to 1"),
    negative_pointer: (1, "sample 1 (row 1 of the store): the pointer of level 'edge' goes from 9 to -5"),
    edge_outside: (2, "'core/neighbor_list', sample 2 (row 2 of the store): the edges are between atoms 5 and 10, 5 to 9 are"),
    product_of_itself: (1, "level 'pairs' has 1 rows, 1 x 2 are expected"),
}  # fmt: skip


class TestDamage:
    @pytest.mark.parametrize("damage", OPEN, ids=lambda damage: damage.__name__)
    def test_seen_when_opened(self, store, damage):
        path, group, _ = store
        damage(group)
        with pytest.raises((FormatError, UnsupportedError)) as error:
            reader(path)
        assert OPEN[damage] in str(error.value)
        assert str(path) in str(error.value)

    @pytest.mark.parametrize("damage", READ, ids=lambda damage: damage.__name__)
    def test_seen_when_read_and_others_are_whole(self, store, damage):
        path, group, samples = store
        damage(group)
        index, sentence = READ[damage]
        found = reader(path)
        for use in (
            found.read,
            lambda i: found.read_many([0, i]),
            lambda i: found.read_batch([i, 0]),
        ):
            with pytest.raises(FormatError) as error:
                use(index)
            assert sentence in str(error.value)
        np.testing.assert_array_equal(found[0]["neighbor_list"], samples[0]["neighbor_list"])

    def test_damaged_chunk(self, store):
        path, _, samples = store
        (path / "core" / "positions" / "c" / "1" / "0").write_bytes(b"no zstd")
        found = reader(path, cache_bytes=0)
        with pytest.raises(FormatError, match=r"'core/positions': rows 4 to 11 cannot be decoded"):
            found.read(2)
        np.testing.assert_array_equal(found[0]["positions"], samples[0]["positions"])
        assert "energy" in reader(path, fields=["energy"])[2]

    @pytest.mark.parametrize(
        "text",
        ["{", "[]", '{"zarr_format": 9}', "[" * 50_000],
        ids=["cut", "list", "format", "deep"],
    )
    @pytest.mark.parametrize("where", ["", "core", "core/energy", "meta/atoms_ptr"])
    def test_damaged_metadata(self, store, where, text):
        path, _, _ = store
        (path / where / "zarr.json").write_text(text)
        with pytest.raises(FormatError, match=r"cannot be read|there is no Zarr group"):
            reader(path)

    def test_nothing_there(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"nowhere\.zarr") as error:
            reader(tmp_path / "nowhere.zarr")
        assert error.value.filename == str(tmp_path / "nowhere.zarr")
        with pytest.raises(FormatError, match="there is no Zarr group or array"):
            reader(tmp_path)
        zarr.open_group(tmp_path, mode="w")
        with pytest.raises(FormatError, match="the group has no arrays of its own"):
            reader(tmp_path)

    def test_arrays_of_different_length(self, tmp_path):
        group = zarr.open_group(tmp_path / "s", mode="w")
        group.create_array("x", data=np.arange(3))
        group.create_array("y", data=np.arange(4))
        group.create_array("z", data=np.array(1.0))
        with pytest.raises(UnsupportedError, match="'z' has no axis"):
            reader(tmp_path / "s")
        with pytest.raises(FormatError, match="'y' has 4 rows, 'x' has 3"):
            reader(tmp_path / "s", fields=["x", "y"])
        assert reader(tmp_path / "s", fields=["y"])[3] == {"y": 3}
        assert kinds_of_rows(tmp_path / "s") == ["length_mismatch", "length_mismatch"]

    def test_integrity_of_plain_rows_is_their_lengths(self, tmp_path):
        group = zarr.open_group(tmp_path / "s", mode="w")
        group.create_array("x", data=np.arange(1, 13), chunks=(4,), fill_value=-1)
        chunks = tmp_path / "s" / "x" / "c"
        (chunks / "0").unlink()
        (chunks / "1").write_bytes(b"damaged")
        found = reader(tmp_path / "s")
        assert found.read_many([0, 11]) == [{"x": -1}, {"x": 12}]
        with pytest.raises(FormatError, match="cannot be decoded"):
            found[4]
        assert found.check_integrity().ok  # as its docstring says

    def test_elements_without_a_fixed_size(self, tmp_path):
        group = zarr.open_group(tmp_path / "s", mode="w", zarr_format=2)
        names = group.create_array("name", shape=(3,), dtype=str)
        names[:] = ["a", "b", "c"]
        group.create_array("when", shape=(3,), dtype="M8[s]")
        group.create_array("x", data=np.arange(3))
        with pytest.raises(
            UnsupportedError, match=r"array 'name' has elements of .* no fixed size"
        ):
            reader(tmp_path / "s")
        pytest.importorskip("torch")
        with pytest.raises(UnsupportedError, match="array 'when' is of datetime64"):
            ZarrReader(tmp_path / "s", fields=["x", "when"])
        assert reader(tmp_path / "s", fields=["x", "when"])[0]["when"].dtype == "M8[s]"


def announce(path, **changes):
    """Change what an array's metadata says, of its shape or of that of its chunks."""
    path = path / "zarr.json"
    metadata = json.loads(path.read_text())
    if "shape" in changes:
        metadata["shape"] = changes["shape"]
    if "chunks" in changes:
        metadata["chunk_grid"]["configuration"]["chunk_shape"] = changes["chunks"]
    path.write_text(json.dumps(metadata))


class TestAnnounced:
    """Chunks need not be there, so that some bytes of metadata can ask for any amount of them."""

    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            ({"shape": [15, 2**31], "chunks": [4, 3]}, "sample 2 (row 2 of the store) takes 1431655766 chunks, and Limits.zarr_chunks allows 100000"),
            ({"shape": [15, 2**31], "chunks": [4, 2**31]}, "takes 42949672960 bytes, and Limits.zarr_nbytes allows 4294967296"),
            ({"shape": [2**40, 3], "chunks": [2**40, 3]}, "takes 13194139533312 bytes"),
        ],
        ids=["chunks", "row", "chunk"],
    )  # fmt: skip
    def test_a_field(self, store, changes, sentence):
        path, _, samples = store
        announce(path / "core" / "positions", **changes)
        found = reader(path)
        for use in (found.read, lambda i: found.read_batch([i])):
            with pytest.raises(LimitError) as error:
                use(2)
            assert sentence in str(error.value)
            assert f"{path}: array 'core/positions'" in str(error.value)
        fields = ["energy", "cell"]
        np.testing.assert_array_equal(reader(path, fields=fields)[2]["cell"], samples[2]["cell"])

    @pytest.mark.parametrize(
        ("chunk", "sentence"),
        [(4, "takes 2147483648 chunks"), (2**33, "takes 8589934592 bytes")],
        ids=["chunks", "bytes"],
    )
    def test_a_mask(self, store, chunk, sentence):
        path, group, _ = store
        found = reader(path, fields=["energy"])
        announce(path / "meta" / "samples_mask", shape=[2**33], chunks=[chunk])
        group.attrs["num_samples"] = 2**33
        for use in (lambda: reader(path), found.check_integrity):
            with pytest.raises(LimitError) as error:
                use()
            assert f"array 'meta/samples_mask': all of it {sentence}" in str(error.value)

    def test_rows_without_number(self, tmp_path):
        group = zarr.open_group(tmp_path / "s", mode="w")
        group.create_array("x", shape=(2**50, 2), chunks=(10, 2), dtype="f4", fill_value=7)
        found = reader(tmp_path / "s")
        assert len(found) == 2**50
        assert found[2**50 - 1]["x"].tolist() == [7, 7]
        assert found.read_batch([2**49, 0])["x"].shape == (2, 2)

    @pytest.mark.parametrize("shape", [[10**30, 3], [15, 10**30]], ids=["rows", "across"])
    def test_sizes_that_cannot_be(self, store, shape):
        path, _, _ = store
        announce(path / "core" / "positions", shape=shape)
        with pytest.raises(
            FormatError, match=r"'core/positions' has shape .* sizes that cannot be"
        ):
            reader(path)
        assert set(kinds(path)) == {"bad_metadata"}

    @pytest.mark.parametrize(
        ("enough", "too_little"),
        [({"zarr_nbytes": 40}, {"zarr_nbytes": 39}), ({"zarr_chunks": 3}, {"zarr_chunks": 2})],
        ids=["nbytes", "chunks"],
    )
    def test_limits(self, tmp_path, enough, too_little):
        group = zarr.open_group(tmp_path / "s", mode="w")
        group.create_array("x", data=np.arange(30, dtype="f4").reshape(3, 10), chunks=(1, 4))
        found = reader(tmp_path / "s", limits=Limits(**enough))
        assert found[1]["x"].tolist() == list(range(10, 20))
        assert len(found[:]) == 3
        with pytest.raises(
            LimitError, match=r"sample 1 \(row 1 of the store\) takes .* limits= has"
        ):
            reader(tmp_path / "s", limits=Limits(**too_little)).read(1)


def kinds_of_rows(path):
    return [f.kind for f in reader(path, fields=["x"]).check_integrity().findings]


class TestArguments:
    @pytest.mark.parametrize(
        ("options", "error", "words"),
        [
            ({"fields": "energy"}, TypeError, "fields='energy': a list of names"),
            ({"fields": [1]}, TypeError, "names are expected"),
            ({"fields": []}, ValueError, "at least one name"),
            ({"fields": ["energy", "energy"]}, ValueError, "none twice"),
            ({"fields": ["forces"]}, KeyError, "no field 'forces'; there are: atomic_numbers, positions"),
            ({"cache_bytes": -1}, ValueError, "cache_bytes=-1"),
            ({"cache_bytes": 1.5}, ValueError, "cache_bytes=1.5"),
            ({"limits": 3}, TypeError, "limits=3: a Limits is expected"),
            ({"framework": "jax"}, ValueError, "expected one of: torch, numpy"),
        ],
        ids=lambda value: str(value)[:30],
    )  # fmt: skip
    def test_refused(self, store, options, error, words):
        with pytest.raises(error, match=words):
            ZarrReader(store[0], **options)

    def test_single_arrays_have_no_fields(self, tmp_path):
        zarr.create_array(tmp_path / "s", data=np.arange(3))
        with pytest.raises(KeyError, match="single array"):
            reader(tmp_path / "s", fields=["x"])

    def test_without_zarr(self, store, monkeypatch):
        monkeypatch.setitem(sys.modules, "zarr", None)
        with pytest.raises(
            ModuleNotFoundError, match=r"pip install 'zarr>=3\.0\.8', or .* extra 'data'"
        ):
            reader(store[0])
        monkeypatch.setitem(sys.modules, "zarr", types.SimpleNamespace(__version__="2.18.3"))
        with pytest.raises(ImportError, match=r"zarr 2\.18\.3 is too old; pip install 'zarr>=3"):
            reader(store[0])

    def test_what_is_open_already(self, tmp_path):
        root = zarr.open_group(tmp_path / "s", mode="w")
        inner = root.create_group("inner")
        array = inner.create_array("x", data=np.arange(3))
        for node in (root, inner, array):
            with pytest.raises(TypeError, match=r"is open already; its path is expected"):
                reader(node)
        assert reader(inner.store_path)[1] == {"x": 1}
        assert reader(array.store_path)[1] == 1

    def test_a_field_that_is_not_there(self, tmp_path):
        root = zarr.open_group(tmp_path / "s", mode="w")
        root.create_array("inner/y", data=np.arange(3))
        for name in ("b", "a"):
            root.create_array(name, data=np.arange(3))
        with pytest.raises(KeyError, match=r"no field 'nope'; there are: a, b, inner/…"):
            reader(tmp_path / "s", fields=["a", "nope"])
        with pytest.raises(KeyError, match="no field 'inner'"):
            reader(tmp_path / "s", fields=["inner"])
        assert reader(tmp_path / "s", fields=["inner/y"])[1] == {"inner/y": 1}


class TestUnshifted:
    """A writer that appended may have numbered atoms from zero, through each of its appends."""

    @pytest.fixture
    def appended(self, tmp_path):
        first, second, third = (
            zarrcraft.graphs((3, 2), seed=1),
            zarrcraft.graphs((4, 2, 3), seed=2),
            zarrcraft.graphs((5,), seed=3),
        )
        group = zarrcraft.write(tmp_path / "s", first)
        zarrcraft.append(group, second, shifted=False)
        zarrcraft.append(group, third, shifted=False)
        return tmp_path / "s", first + second + third

    def test_said(self, appended):
        path, samples = appended
        found = reader(path)
        np.testing.assert_array_equal(found[1]["neighbor_list"], samples[1]["neighbor_list"])
        for index in (2, 3, 5):
            with pytest.raises(FormatError, match=r"left them unshifted \(repair=True shifts"):
                found.read(index)
        report = found.check_integrity()
        assert [finding.kind for finding in report.findings] == ["unshifted_edges"]
        assert "edges of 4 samples" in str(report)
        assert json.loads(json.dumps(report.as_dict()))["ok"] is False
        assert found.check_integrity(edges=False).ok

    def test_repaired(self, appended):
        path, samples = appended
        found = reader(path, repair=True)
        for got, expected in zip(found.read_many(range(6)), samples, strict=True):
            np.testing.assert_array_equal(got["neighbor_list"], expected["neighbor_list"])
        batch = found.read_batch([5, 2])
        np.testing.assert_array_equal(batch["neighbor_list"][:25], samples[5]["neighbor_list"])
        np.testing.assert_array_equal(batch["neighbor_list"][25:], samples[2]["neighbor_list"] + 5)

    def test_deleted_samples_say_nothing(self, appended):
        path, samples = appended
        group = zarr.open_group(path, mode="r+")
        group["meta/samples_mask"][3] = False
        group["core/neighbor_list"][29:33] = 0
        found = reader(path, repair=True)
        for got, i in zip(found[:], (0, 1, 2, 4, 5), strict=True):
            np.testing.assert_array_equal(got["neighbor_list"], samples[i]["neighbor_list"])

    def test_broken_edges_are_not_repaired(self, appended):
        path, samples = appended
        group = zarr.open_group(path, mode="r+")
        group["core/neighbor_list"][30, 0] = 1000
        found = reader(path, repair=True)
        with pytest.raises(FormatError, match=r"sample 3 \(row 3 of the store\).* none fit"):
            found.read(3)
        np.testing.assert_array_equal(found[4]["neighbor_list"], samples[4]["neighbor_list"])
        assert [f.kind for f in found.check_integrity().findings] == ["bad_edges"]

    @pytest.mark.parametrize("name", ["neighbor_list", "edge_index"])
    @pytest.mark.parametrize("atoms", [(3, 2), (1, 1)], ids=["many edges", "two edges"])
    def test_old_names_and_shapes(self, tmp_path, name, atoms):
        samples = zarrcraft.graphs(atoms)
        group = zarrcraft.write(tmp_path / "s", samples)
        edges = group["core/neighbor_list"][:]
        del group["core/neighbor_list"]
        old = name == "edge_index" or len(edges) != 2
        group.create_array(
            f"core/{name}", data=edges.T.copy() if old else edges, chunks=(2, 3 if old else 2)
        )
        levels = {k: v for k, v in zarrcraft.LEVELS.items() if k != "neighbor_list"}
        group.attrs["fields"] = {"core": {**levels, name: "edge"}}
        found = reader(tmp_path / "s", repair=True)
        for got, expected in zip(found[:], samples, strict=True):
            np.testing.assert_array_equal(got["neighbor_list"], expected["neighbor_list"])
        if old:
            with pytest.raises(UnsupportedError, match=r"as early writers left it.*repair=True"):
                reader(tmp_path / "s")
            assert kinds(tmp_path / "s") == ["old_layout"]
        assert "energy" in reader(tmp_path / "s", fields=["energy"])[0]

    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), min_size=1, max_size=6),
        st.booleans(),
    )
    def test_every_append_is_found(self, appends, first_is_global):
        """Where each atom has an edge, there is no doubt."""
        sizes = [n for append in appends for n in append]
        atoms = zarrcraft.pointer(sizes)
        expected, i = [], 0
        for append in appends:
            expected += list(zarrcraft.pointer(append)[:-1])
        bounds = [
            (base, base + n - 1) if n else (0, -1) for base, n in zip(expected, sizes, strict=True)
        ]
        found = edge_bases(atoms, np.array(bounds, np.int64))
        for i, n in enumerate(sizes):
            assert n == 0 or found[i] == expected[i]

    @pytest.mark.parametrize(
        ("sizes", "bounds", "expected"),
        [
            ([3, 3], [(0, 2), (3, 5)], [0, 3]),
            ([3, 3], [(0, 2), (0, 2)], [0, 0]),
            ([3, 3], [(0, 2), (4, 4)], [0, 3]),
            # 1 and 2 of sample 2 are atoms 1 and 2 of its own, or 0 and 1 behind the one atom of sample 1
            ([9, 1, 4], [(0, 8), (0, -1), (1, 2)], [0, 9, AMBIGUOUS]),
            ([9, 1, 4], [(0, 8), (0, 0), (1, 4)], [0, 0, 1]),
            # what sample 3 settles holds for sample 2, too
            ([9, 1, 4, 2], [(0, 8), (0, -1), (1, 2), (5, 6)], [0, 0, 1, 5]),
            # what can be global is
            ([1, 4], [(0, -1), (1, 2)], [0, 1]),
            ([3, 3], [(0, 2), (9, 9)], [0, BROKEN]),
            ([3, 3], [(0, 2), (-3, -1)], [0, BROKEN]),
            ([3, 3, 3], [(0, 2), (0, 5), (0, 2)], [0, BROKEN, 0]),
        ],
        ids=["global", "local", "one edge", "in doubt", "settled", "settled later", "global first", "outside", "negative", "too wide"],
    )  # fmt: skip
    def test_bases(self, sizes, bounds, expected):
        found = edge_bases(zarrcraft.pointer(sizes), np.array(bounds, np.int64))
        assert found.tolist() == expected

    def test_doubt_is_an_error(self, tmp_path):
        group = zarrcraft.write(tmp_path / "s", zarrcraft.graphs((9,)))
        doubtful = zarrcraft.graphs((1, 4))
        doubtful[0]["neighbor_list"] = np.empty((0, 2), np.int64)
        doubtful[1]["neighbor_list"] = np.array([[0, 1]])
        zarrcraft.append(group, doubtful, shifted=False)
        found = reader(tmp_path / "s", repair=True)
        assert found[1]["neighbor_list"].shape == (0, 2)
        with pytest.raises(FormatError, match=r"sample 2 .* several fit .* cannot be repaired"):
            found.read(2)


class TestIntegrity:
    @pytest.mark.parametrize(
        ("damage", "expected"),
        [
            (lambda group: None, []),
            (cut_positions, ["short_array"]),
            (cut_pointer, ["short_array"]),
            (falling_pointer, ["bad_pointer"]),
            (negative_pointer, ["bad_pointer"]),
            (no_mask, ["missing_array"]),
            (wrong_count, ["bad_metadata"]),
            (named_field, ["missing_array"]),
            (edge_outside, ["bad_edges"]),
            (lambda group: group["meta/atoms_mask"].set_basic_selection(slice(3, 5), False), ["mask_mismatch"]),
            (lambda group: group.attrs.pop("num_samples"), ["bad_metadata"]),
            (lambda group: group["meta/atoms_ptr"].set_basic_selection(0, 1), ["bad_pointer"]),
        ],
        ids=["whole", "positions", "pointer", "falls", "negative", "mask", "count", "field", "edge", "atoms_mask", "no count", "begin"],
    )  # fmt: skip
    def test_kinds(self, store, damage, expected):
        path, group, _ = store
        found = reader(path, fields=["energy"])
        damage(group)
        report = found.check_integrity()
        assert [finding.kind for finding in report.findings] == expected
        assert report.ok == (not expected)
        assert str(report).startswith(f"{path}: {'DAMAGED' if expected else 'ok'}")
        for finding in report.findings:
            assert str(path) in finding.message

    def test_damaged_edges(self, store):
        path, _, _ = store
        (path / "core" / "neighbor_list" / "c" / "2" / "0").write_bytes(b"?")
        assert kinds(path) == ["damaged_array"]

    def test_rows(self, tmp_path):
        zarr.create_array(tmp_path / "s", data=np.arange(3))
        report = reader(tmp_path / "s").check_integrity()
        assert (report.ok, report.samples) == (True, 3)

    def test_store_that_is_gone(self, store):
        path, _, _ = store
        found = reader(path)
        shutil.rmtree(path)
        with pytest.raises(FileNotFoundError):
            found.check_integrity()
