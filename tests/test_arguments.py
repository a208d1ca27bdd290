"""Arguments that cannot be meant are refused before anything is read, in words that say what is expected."""

import io
import sys

import pytest
import torch

import fastckpt
from fastckpt import Limits
from objects import saved
from readers import Numbers, Stacked
from support import QUIET

pytestmark = QUIET
FILE = saved({"w": torch.ones(2)})

REFUSED = {
    "a limit as text": (lambda: Limits(key_depth="a"), TypeError, "key_depth='a': a whole number"),
    "a limit below zero": (lambda: Limits(zarr_chunks=-1), ValueError, "zarr_chunks=-1: at least 0"),
    "a limit beyond all": (lambda: Limits(zarr_chunks=1 << 5000), ValueError, "zarr_chunks=<int of 5001 bits>: at most"),
    "a limit beyond the stack": (lambda: Limits(key_depth=10_001), ValueError, "10001: at most 10000 is"),
    "a limit as a bool": (lambda: Limits(scan_events=True), TypeError, "scan_events=True: a whole"),
    "no limit where there is one": (lambda: Limits(object_depth=None), TypeError, "object_depth=None: a"),
    "stand-ins of a pickle that is run": (
        lambda: fastckpt.load(FILE, weights_only=False, unknown="opaque"),
        TypeError,
        "unknown='opaque' needs weights_only=True",
    ),
    "a new file that is open": (
        lambda: fastckpt.salvage(FILE, io.BytesIO()), TypeError, "out is a BytesIO: the path of the new file"),
    "one index for many": (lambda: Numbers(9).read_many(5), TypeError, "in a list, .*not an int"),
    "one index for a batch": (lambda: Stacked(9).read_batch(5), TypeError, "in a list, .*not an int"),
    "no index": (lambda: Numbers(9).read_many(None), TypeError, "in a list, .*not a NoneType"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("bound", [None, sys.maxsize])
def test_no_bounds(bound):
    limits = Limits(key_items=bound, stream_nbytes=bound, key_depth=10_000, object_depth=2**31 - 1)
    assert fastckpt.load(FILE, limits=limits)["w"].sum() == 2
