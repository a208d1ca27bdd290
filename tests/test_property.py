"""Whatever torch.save writes, load gives what torch.load gives: objects made by chance, equal to the bit."""

import io
import os
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fastckpt
from objects import saved, saved_objects, torch_loads
from support import QUIET, same

pytestmark = QUIET

PROTOCOLS = st.sampled_from([2, 2, 3, 4, 5])
COMMON = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


def check(obj, legacy, protocol, folder):
    """Compare load, in every way to call it, with torch.load on one object."""
    data = saved(obj, legacy=legacy, protocol=protocol)
    # Of a legacy file torch cannot read what it writes of young dtypes and of nested tensors: its ZIP twin says what is in it.
    expected = torch_loads(saved(obj, protocol=protocol))
    path = folder / "file.pt"
    path.write_bytes(data)
    same(expected, fastckpt.load(path, threads=1), "threads=1")
    with mock.patch.dict(os.environ, FASTCKPT_SERIAL_BELOW="0"):
        same(expected, fastckpt.load(path, threads=3), "threads=3")
    file = io.BytesIO(b"before" + data)
    file.seek(6)
    same(expected, fastckpt.load(file), "file object")
    same(expected, fastckpt.load(data), "bytes")
    same(expected, fastckpt.load(path, mmap=True), "mmap")
    same(expected, fastckpt.load(path, weights_only=False), "weights_only=False")


@settings(max_examples=100, derandomize=True, **COMMON)
@given(saved_objects(), st.booleans(), PROTOCOLS)
def test_load(tmp_path_factory, obj, legacy, protocol):
    check(obj, legacy, protocol, tmp_path_factory.getbasetemp())


@pytest.mark.slow
@settings(max_examples=5000, **COMMON)
@given(saved_objects(), st.booleans(), PROTOCOLS)
def test_load_much(tmp_path_factory, obj, legacy, protocol):
    check(obj, legacy, protocol, tmp_path_factory.getbasetemp())
