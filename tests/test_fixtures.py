"""The fixtures hold what they held when they were made: by every way to read them."""

import contextlib
import io
import json
import pathlib

import numpy as np
import pytest
import torch

import fastckpt
from fastckpt import errors
from make_expected import FOLDER, bytes_of, described, digest, spelled, walk
from support import QUIET

pytestmark = QUIET

EXPECTED = json.loads((FOLDER / "expected.json").read_text())
READ = [name for name, entry in EXPECTED.items() if "leaves" in entry]
REFUSED = [name for name, entry in EXPECTED.items() if "refused" in entry]


def options_of(name):
    return EXPECTED[name]["options"]


def test_every_file_is_expected():
    assert sorted(EXPECTED) == sorted(
        path.relative_to(FOLDER).as_posix() for path in FOLDER.glob("*/*.pt")
    )


@pytest.mark.parametrize("name", EXPECTED)
def test_files_are_as_they_were(name):
    assert digest((FOLDER / name).read_bytes()) == EXPECTED[name]["sha256"]


def check(name, loaded):
    leaves = described(loaded)
    assert list(leaves) == list(EXPECTED[name]["leaves"])
    for path, leaf in leaves.items():
        assert leaf == EXPECTED[name]["leaves"][path], path


WAYS = {
    "path": lambda path, **options: fastckpt.load(path, **options),
    "bytes": lambda path, **options: fastckpt.load(path.read_bytes(), **options),
    "three threads": lambda path, **options: fastckpt.load(path, threads=3, **options),
    "file object": lambda path, **options: fastckpt.load(Object(path), **options),
    "mapped": lambda path, **options: fastckpt.load(path, mmap=True, **options),
    "unverified": lambda path, **options: fastckpt.load(path, verify=False, **options),
    "region": lambda path, **options: fastckpt.load(
        b"x" * 9 + path.read_bytes(), offset=9, **options
    ),
}


class Object:
    """A file object that has only what must be there."""

    def __init__(self, path):
        self.name = str(path)
        inner = io.BytesIO(path.read_bytes())
        self.read, self.seek, self.tell = inner.read, inner.seek, inner.tell


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", READ)
def test_load(name, way, monkeypatch):
    monkeypatch.setenv("FASTCKPT_SERIAL_BELOW", "0")
    check(name, way(FOLDER / name, **options_of(name)))


@pytest.mark.parametrize("name", READ)
def test_open(name):
    """What is said of a tensor without reading it, and what is read of it."""
    with fastckpt.open(FOLDER / name, **options_of(name)) as ckpt:
        check(name, ckpt.read())
        for lazy in ckpt.values():
            expected = EXPECTED[name]["leaves"].get(spelled(lazy.path))
            if expected is not None and "dtype" in expected:
                check_lazy(lazy, expected)


def check_lazy(lazy, expected):
    assert lazy.dtype == expected["dtype"]
    assert lazy.requires_grad == expected["requires_grad"]
    assert lazy.shape == (tuple(expected["shape"]) if "shape" in expected else None)
    if lazy.spec is None:
        return
    assert (list(lazy.stride), lazy.storage_offset) == (
        expected["stride"],
        expected.get("offset", lazy.storage_offset),
    )
    if expected.get("device") == "meta":
        return
    part = lazy[...]
    assert digest(bytes_of(part)) == expected["sha256"]
    assert digest(bytes_of(lazy.read())) == expected["sha256"]
    out = torch.empty(lazy.shape, dtype=part.dtype)
    assert digest(bytes_of(lazy.read(out=out))) == expected["sha256"]
    if lazy.shape and lazy.shape[0] > 1:
        assert bytes_of(lazy[1:]) == bytes_of(part[1:])


@pytest.mark.parametrize("name", READ)
def test_numpy(name):
    """Plain tensors are arrays of the same elements; of other kinds NumPy has none, and says so."""
    leaves = EXPECTED[name]["leaves"]
    tensors = {path: leaf for path, leaf in leaves.items() if "dtype" in leaf}
    plain = {
        path: leaf
        for path, leaf in tensors.items()
        if leaf["layout"] == "strided" and "sha256" in leaf and "quantizer" not in leaf
    }
    bits_only = any(leaf["dtype"] == "complex32" and "bits" in leaf for leaf in plain.values())
    if len(plain) < len(tensors) or bits_only:
        with contextlib.suppress(errors.UnsupportedError):
            fastckpt.load(FOLDER / name, framework="numpy", **options_of(name))
        return
    loaded = fastckpt.load(FOLDER / name, framework="numpy", **options_of(name))
    arrays = {spelled(path): leaf for path, leaf in walk(loaded)}
    for path, leaf in plain.items():
        if path.endswith("'vars'") or "('vars'" in path:
            continue  # an array has no place for attributes
        array = arrays[path]
        assert isinstance(array, np.ndarray), path
        assert list(array.shape) == leaf["shape"], path
        assert digest(array.tobytes()) == leaf["sha256"], path


@pytest.mark.parametrize("unknown", ["error", "opaque"])
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, unknown):
    """By whichever way, with the same error; names the file. What only a class is unknown of is opaque where that is wanted."""
    expected = getattr(errors, EXPECTED[name]["refused"])
    opaque = expected is errors.UnsafePickleError and unknown == "opaque"
    path = pathlib.Path(FOLDER / name)
    for source in (path, path.read_bytes(), Object(path)):
        if opaque:
            try:
                fastckpt.load(source, unknown=unknown)
            except errors.CheckpointError:
                pass
            continue
        with pytest.raises(errors.CheckpointError) as caught:
            fastckpt.load(source, unknown=unknown)
        assert type(caught.value) is expected
        assert path.name in str(caught.value) or isinstance(source, bytes)
