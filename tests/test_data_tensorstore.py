"""ZarrReader where tensorstore is installed: it decodes what is in a folder, and all is as without it."""

import os

import numpy as np
import pytest

zarr = pytest.importorskip("zarr")
pytest.importorskip("tensorstore")

import zarrcraft  # noqa: E402
from fastckpt import FormatError  # noqa: E402
from fastckpt.data import ZarrReader, zarr_tensorstore  # noqa: E402
from fastckpt.data.zarr_tensorstore import quicker  # noqa: E402


def is_quick(array):
    return quicker(array) is not array


@pytest.fixture(params=["of tensorstore", "of zarr"])
def decoder(request, monkeypatch):
    """By whom: the tests that follow hold for both."""
    if request.param == "of zarr":
        monkeypatch.setattr(zarr_tensorstore, "_lacks_threads", True)  # as in a forked child


DTYPES = ["?", "i1", "u2", "<i4", ">i4", "u8", "f2", "<f4", ">f8", "c8", "c16"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("zarr_format", "options"),
    [(2, {}), (3, {}), (3, {"shards": (6, 2)})],
    ids=["2", "3", "shards"],
)
def test_rows(tmp_path, decoder, dtype, zarr_format, options):
    if zarr_format == 3:
        dtype = np.dtype(dtype).newbyteorder("=")  # it is the codec's business there
    rows = (np.arange(32) % 7).reshape(16, 2).astype(dtype)
    array = zarr.create_array(
        tmp_path / "s",
        shape=(16, 2),
        chunks=(3, 2),
        dtype=dtype,
        zarr_format=zarr_format,
        **options,
    )
    array[:9] = rows[:9]
    array[12:] = rows[12:]
    rows[9:12] = 0  # chunks that are not there
    reader = ZarrReader(tmp_path / "s", framework="numpy")
    for order in (range(16), [15, 0, 7, 7], [10], list(range(0, 16, 4))):
        found = reader.read_batch(order)
        np.testing.assert_array_equal(found, rows[list(order)])
        assert found.dtype == rows.dtype.newbyteorder("=")
        found[:] = 1  # it is the caller's


def test_graphs(tmp_path, decoder):
    samples = zarrcraft.graphs()
    zarrcraft.write(tmp_path / "s", samples)
    for found, sample in zip(ZarrReader(tmp_path / "s", framework="numpy"), samples, strict=True):
        for name, value in sample.items():
            np.testing.assert_array_equal(found[name], value)


def test_damage(tmp_path, decoder):
    zarr.create_array(tmp_path / "s", data=np.arange(8), chunks=(4,))
    (tmp_path / "s" / "c" / "1").write_bytes(b"no zstd")
    reader = ZarrReader(tmp_path / "s", framework="numpy")
    with pytest.raises(FormatError, match="rows 4 to 7 cannot be decoded"):
        reader[5]
    assert reader[3] == 3


def test_who_decodes(tmp_path, monkeypatch):
    array = zarr.create_array(tmp_path / "s", data=np.arange(8), chunks=(4,))
    assert is_quick(array)
    assert not is_quick(zarr.create_array({}, data=np.arange(8)))
    text = zarr.create_array(tmp_path / "t", shape=(3,), dtype=str, zarr_format=2)
    assert not is_quick(text)
    monkeypatch.setattr(zarr_tensorstore, "_lacks_threads", True)
    assert not is_quick(array)


def test_forked_children(tmp_path):
    """The threads of tensorstore are not there in a child, which would wait for them for ever."""
    zarr.create_array(tmp_path / "s", data=np.arange(800), chunks=(4,))
    reader = ZarrReader(tmp_path / "s", framework="numpy", cache_bytes=0)
    expected = list(range(800))
    assert reader.read_batch(range(800)).tolist() == expected
    child = os.fork()
    if not child:
        good = reader.read_batch(range(800)).tolist() == expected
        os._exit(0 if good and not is_quick(zarr.open(tmp_path / "s", mode="r")) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
