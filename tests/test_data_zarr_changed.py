"""ZarrReader: stores that are written to, or replaced, while a reader is open."""

import importlib.util
import os
import shutil

import numpy as np
import pytest

zarr = pytest.importorskip("zarr")

from fastckpt import FormatError  # noqa: E402
from fastckpt.data import ZarrReader, zarr_tensorstore  # noqa: E402
from fastckpt.data.zarr_rows import Rows  # noqa: E402

OLD = np.arange(40).reshape(10, 4)
CHUNKS = (5, 4)
# What is there now: values, and their chunks.
NOW = {
    "fractions": (OLD + 0.9, CHUNKS),
    "elements of equal size": (OLD.astype("u8"), CHUNKS),
    "complex numbers": (OLD + 1j, CHUNKS),
    "wider rows": (np.arange(80).reshape(10, 8), (5, 8)),
    "narrower rows": (OLD[:, :2], (5, 2)),
    "one axis more": (OLD.reshape(10, 2, 2), (5, 2, 2)),
    "one axis less": (OLD[:, 0], (5,)),
    "fewer rows": (OLD[:7], CHUNKS),
    "other chunks": (OLD, (10, 2)),
}
WHEN = ["before the first read", "after a read", "in a fork"]


@pytest.fixture(params=["by zarr", "by tensorstore"])
def path(tmp_path, request, monkeypatch):
    """Where a store is, and by whom it is decoded."""
    if request.param == "by zarr":
        monkeypatch.setattr(zarr_tensorstore, "_lacks_threads", True)  # as in a forked child
    elif not importlib.util.find_spec("tensorstore"):
        pytest.skip("no tensorstore")
    return tmp_path / "s"


def write(store, values=OLD, chunks=CHUNKS, zarr_format=3):
    group = zarr.open_group(store, mode="w", zarr_format=zarr_format)
    group.create_array("x", data=values, chunks=chunks)
    return group


def opened(store, when="after a read", **options):
    reader = ZarrReader(store, framework="numpy", cache_bytes=0, **options)
    if when != "before the first read":
        assert reader[0]["x"].tolist() == OLD[0].tolist()
    return reader


def check(when, work, *args):
    """Run what asserts; in a child where that is wanted."""
    if when != "in a fork":
        return work(*args)
    child = os.fork()
    if not child:
        try:
            work(*args)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def refuses(reader, sentence="the store has changed: array 'x'.* is expected; refresh"):
    for read in (reader.read, lambda i: reader.read_batch([i, 2])):
        with pytest.raises(FormatError, match=sentence):
            read(9)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("now", NOW)
def test_another_array(path, now, when):
    write(path)
    reader = opened(path, when)
    values, chunks = NOW[now]
    write(path, values, chunks)
    check(when, refuses, reader)
    reader.refresh()
    np.testing.assert_array_equal(reader.read_batch([6, 1])["x"], values[[6, 1]])


@pytest.mark.parametrize("when", WHEN)
def test_more_rows(path, when):
    group = write(path, OLD[:8])
    reader = opened(path, when)
    group["x"].append(OLD[8:])

    def goes_on():
        np.testing.assert_array_equal(reader.read_batch([7, 1])["x"], OLD[[7, 1]])
        assert len(reader) == 8

    check(when, goes_on)
    reader.refresh()
    np.testing.assert_array_equal(reader.read_batch([9, 1])["x"], OLD[[9, 1]])


@pytest.mark.parametrize("kind", ["format 2", "consolidated", "in memory"])
def test_kinds_of_stores(path, kind):
    zarr_format = 2 if kind == "format 2" else 3
    place = zarr.storage.MemoryStore() if kind == "in memory" else path
    write(place, zarr_format=zarr_format)
    if kind == "consolidated":
        with pytest.warns(UserWarning, match="Consolidated"):
            zarr.consolidate_metadata(path)
    reader = opened(place, "before the first read" if kind == "in memory" else "after a read")
    write(place, OLD + 0.9, zarr_format=zarr_format)
    refuses(reader)


def test_single_array(path):
    zarr.create_array(path, data=OLD, chunks=CHUNKS)
    reader = ZarrReader(path, framework="numpy", cache_bytes=0)
    assert reader[9].tolist() == OLD[9].tolist()
    zarr.create_array(path, data=OLD + 0.9, chunks=CHUNKS, overwrite=True)
    refuses(reader, "array ''.*float64.*refresh")


@pytest.mark.parametrize("left", ["nothing", "a group in its place"])
def test_no_array(path, left):
    group = write(path)
    reader = opened(path)
    if left == "nothing":
        shutil.rmtree(path)  # whose chunks would read as the fill value
    else:
        group.create_group("x", overwrite=True)
    refuses(reader, "array 'x' cannot be opened as it was before; refresh")


@pytest.mark.parametrize(
    "other", [OLD + 0.9, OLD[:3], OLD.reshape(10, 2, 2)], ids=["fractions", "too few", "an axis"]
)
def test_what_is_decoded_is_compared(other):
    """Whoever decodes: rows are then counted in bytes."""
    rows = Rows("here", "x", zarr.create_array({}, data=OLD, chunks=CHUNKS))
    with pytest.raises(FormatError, match="the store has changed: array 'x': what was read has"):
        rows.read(other, [0])
