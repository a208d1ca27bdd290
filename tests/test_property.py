"""Whatever torch.save writes, load gives what torch.load gives: objects made by chance, to the bit."""

import io
import os
from unittest import mock

import fastckpt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from objects import saved, saved_objects, torch_loads
from support import same

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(beta state|prototype stage|is deprecated)"),
    pytest.mark.filterwarnings("ignore:Detected pickle protocol"),
]

WAYS = st.fixed_dictionaries({"legacy": st.booleans(), "protocol": st.sampled_from([2, 2, 3, 4, 5])})


def check(obj, way, folder):
    """Compare load with torch.load on one object, saved in one way and read in every way."""
    data = saved(obj, **way)
    expected = torch_loads(data)
    if isinstance(expected, Exception):
        expected = as_loaded(obj)
    path = folder / "file.pt"
    path.write_bytes(data)
    same(expected, fastckpt.load(path, threads=1), "threads=1")
    with mock.patch.dict(os.environ, FASTCKPT_SERIAL_BELOW="0"):
        same(expected, fastckpt.load(path, threads=3), "threads=3")
    file = io.BytesIO(data + b"more")
    same(expected, fastckpt.load(io.BytesIO(data)), "file object")
    same(expected, fastckpt.load(data), "bytes")
    same(expected, fastckpt.load(path, mmap=True), "mmap")
    same(expected, fastckpt.load(path, weights_only=False), "weights_only=False")
    del file


@settings(max_examples=60)
@given(saved_objects(), WAYS)
def test_load(tmp_path_factory, obj, way):
    check(obj, way, tmp_path_factory.mktemp("property"))
