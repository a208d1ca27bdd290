"""Stores that LitData and nvalchemi wrote hold what went into them."""

from pathlib import Path

import pytest
import torch

from fastckpt import FormatError
from fastckpt.data import LitDataReader, ZarrReader, fernet_key
from make_sample_fixtures import APPENDED, DELETED, FIXTURES, GRAPHS, PASSWORD, graph
from support import same
from test_data_litdata import litdata_rows, plain_rows

LITDATA = sorted(path.name for path in (FIXTURES / "litdata").iterdir())
LIBRARIES = {
    "framed": "zstandard",
    "zstd": "zstandard",
    "fernet": "cryptography",
    "arrow": "pyarrow",
}


def contents(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
@pytest.mark.parametrize("name", LITDATA)
def test_litdata(name, mmap):
    if library := LIBRARIES.get(name.partition("_")[0]):
        pytest.importorskip(library)
    folder = FIXTURES / "litdata" / name
    before, make = contents(folder), plain_rows if name == "arrow" else litdata_rows
    key = fernet_key(folder / "key.json", PASSWORD) if name.startswith("fernet") else None
    with LitDataReader(folder, mmap, key=key) as reader:
        assert len(reader) == 6
        for found in (list(reader), reader.read_many(range(6)), [reader[i] for i in range(-6, 0)]):
            for i, sample in enumerate(found):
                same(make(i), sample)
        same([make(i) for i in (5, 0)], reader.read_many([5, 0]))
    assert contents(folder) == before


def test_nvalchemi():
    """An append, whose edges the writer left unshifted, and a graph that was deleted."""
    pytest.importorskip("zarr")
    store = FIXTURES / "zarr" / "nvalchemi.zarr"
    atoms = [n for i, n in enumerate(GRAPHS) if i != DELETED] + APPENDED
    reader = ZarrReader(store)
    assert len(reader) == len(atoms)
    assert [finding.kind for finding in reader.check_integrity().findings] == ["unshifted_edges"]
    with pytest.raises(FormatError, match="repair=True"):
        reader[-1]
    repaired = ZarrReader(store, repair=True)
    batch = repaired.read_batch(range(len(atoms)))
    for i, n in enumerate(atoms):
        sample, expected = repaired[i], graph(n)
        one = repaired.cut_batch(batch, i, i + 1)
        for name, value in expected.items():
            same(torch.from_numpy(value), sample[name].clone())
            assert torch.equal(one[name].reshape(value.shape), sample[name]), name
        assert not sample["velocities"].any()  # an array without a single chunk
