"""Every prefix of a small file of each container: an error of ours, by whichever road it is read; never another object."""

import os

import pytest

import fastckpt
from fastckpt.errors import FormatError
from smallfiles import FILES, REFUSED, STREAMS, TARS, ZIPS, is_expected, outcome


def read_lazily(data):
    with fastckpt.open(data) as ckpt:
        return {name: ckpt[name].read() for name in ckpt}


ROADS = {
    "load": fastckpt.load,
    "arrays": lambda data: fastckpt.load(data, framework="numpy"),
    "a part": lambda data: fastckpt.load(data, keys=["w"]),
    "lazily": read_lazily,
}


def needed(name, data):
    """How many bytes a file needs: the rest is padding behind the last member of a tar."""
    return len(data.rstrip(b"\0")) if name in TARS else len(data)


@pytest.mark.parametrize("name", FILES)
def test_who_is_told_of_salvage(name, tmp_path):
    """Those whom it helps, of all whose file ends too early."""
    data, out = FILES[name], tmp_path / "out.pt"
    for nbytes in range(0, needed(name, data), 41):
        with pytest.raises(FormatError) as caught:
            fastckpt.load(data[:nbytes])
        told = "(salvage gets out what is whole, if the pickle of the object is)" in str(
            caught.value
        )
        try:
            kept = bool(fastckpt.salvage(data[:nbytes], out, overwrite=True).kept)
        except FormatError:
            kept = False
        assert told or not kept, nbytes


@pytest.mark.parametrize("name", FILES)
def test_load(name):
    data = FILES[name]
    for nbytes in range(needed(name, data)):
        with pytest.raises(FormatError) as caught:
            fastckpt.load(data[:nbytes])
        assert str(caught.value).startswith("<bytes>: ")
    for nbytes in range(needed(name, data), len(data) + 1):
        assert is_expected(fastckpt.load(data[:nbytes]))


@pytest.mark.parametrize("road", [road for road in ROADS if road != "load"])
@pytest.mark.parametrize("name", FILES)
def test_other_roads(name, road):
    data = FILES[name]
    for nbytes in range(0, needed(name, data), 7):
        assert outcome(ROADS[road], data[:nbytes]) is REFUSED


@pytest.mark.parametrize("options", [{}, {"mmap": True}], ids=["read", "mapped"])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_cut(name, options, tmp_path):
    """One and the same file, from its whole length down."""
    path = tmp_path / "model.pt"
    path.write_bytes(FILES[name])
    assert is_expected(fastckpt.load(path, **options))
    for nbytes in range(needed(name, FILES[name]) - 1, -1, -5):
        os.truncate(path, nbytes)
        assert outcome(lambda path: fastckpt.load(path, **options), path) is REFUSED


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_cut_while_it_is_open(name, tmp_path):
    """Tensors whose bytes are still there may be read; what is gone is an error that says so."""
    path = tmp_path / "model.pt"
    data = FILES[name]
    for nbytes in range(needed(name, data) - 1, -1, -11):
        path.write_bytes(data)
        with fastckpt.open(path) as ckpt:
            os.truncate(path, nbytes)
            for tensor, value in (("w", [1, 2]), ("n", [[7], [-8]])):
                loaded = outcome(lambda name: ckpt[name].read().tolist(), tensor)
                assert loaded in (REFUSED, value)


@pytest.mark.parametrize("name", [*ZIPS, *STREAMS])
def test_zeros_in_place_of_the_end(name):
    """A download that was given its length before its bytes."""
    data = FILES[name]
    zeros = len(data) - len(data.rstrip(b"\0"))
    for nbytes in range(0, len(data) - zeros, 3):
        cut = data[:nbytes] + bytes(len(data) - nbytes)
        loaded = outcome(fastckpt.load, cut)
        # A stream has no checksum: zeros may be its numbers.
        assert loaded is REFUSED or name in STREAMS and list(loaded) == ["w", "n", "step"]
