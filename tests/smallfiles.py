"""The same small object in each container, in as few bytes as it takes: for tests that try every byte of a file."""

import io
import struct
import tarfile

import numpy as np
import torch

import streamcraft
from fastckpt.errors import CheckpointError
from picklecraft import Call, Name, craft, storage
from streamcraft import Pid, legacy_stream, tar_checkpoint
from zipcraft import Entry, archive, checkpoint

FLOATS = struct.pack("<2f", 1, 2)
LONGS = struct.pack("<2q", 7, -8)
STEP = 17


def expected():
    return {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor([[7], [-8]]), "step": STEP}


def is_expected(loaded):
    """Whether it is the object to the bit, as arrays or as tensors; ``same`` of support says what is not."""
    if type(loaded) is not dict or list(loaded) != ["w", "n", "step"]:
        return False
    w, n = (np.asarray(loaded[name]) for name in ("w", "n"))
    right = w.dtype == np.float32 and n.dtype == np.int64 and w.shape == (2,) and n.shape == (2, 1)
    return right and w.tobytes() + n.tobytes() == FLOATS + LONGS and loaded["step"] == STEP


REFUSED = object()


def outcome(read, data):
    """What ``read(data)`` gives, or REFUSED where it raises an error of ours; any other error is the test's."""
    try:
        return read(data)
    except CheckpointError as error:
        return REFUSED if str(error) else error


def zip_tensor(kind, numel, offset=0, size=(2,), stride=(1,), key="0"):
    """A tensor of ``numel`` elements in a ZIP's pickle."""
    hooks = Call(Name("collections OrderedDict"))
    args = (storage(kind, key, numel), offset, size, stride, False, hooks)
    return Call(Name("torch._utils _rebuild_tensor_v2"), args)


ZIP_PICKLE = craft(
    {
        "w": zip_tensor("FloatStorage", 2),
        "n": zip_tensor("LongStorage", 2, 0, (2, 1), (1, 1), "1"),
        "step": STEP,
    }
)


def zip_file(*, swap=False, wide=False, **fields):
    """A ZIP; ``wide`` puts its numbers into zip64 fields, ``swap`` makes it big-endian, ``fields`` are those of Entry."""
    storages = [struct.pack(">2f", 1, 2), struct.pack(">2q", 7, -8)] if swap else [FLOATS, LONGS]
    records = {"data.pkl": ZIP_PICKLE, "byteorder": b"big" if swap else b"little"}
    entries = [
        Entry(entry.name, entry.data, wide=wide, align=0, **fields)
        for entry in checkpoint(storages, root="a/", **records)
    ]
    return archive(entries, wide=wide)


def saved():
    data = io.BytesIO()
    torch.save(expected(), data)
    return data.getvalue()


def legacy_file(**options):
    w = streamcraft.tensor(streamcraft.storage("0", 2), (2,))
    n = streamcraft.tensor(streamcraft.storage("1", 2, "LongStorage"), (2, 1))
    storages = {"0": (2, FLOATS), "1": (2, LONGS)}
    return legacy_stream({"w": w, "n": n, "step": STEP}, storages, **options)


def tar_file(**options):
    """A tar without the padding that tar itself puts behind the last member."""
    data = tar_checkpoint(
        {"w": Pid("3"), "n": Pid("4"), "step": STEP},
        [(3, 1, (2,), (1,), 0), (4, 2, (2, 1), (1, 1), 0)],
        [(1, "FloatStorage", FLOATS, 2), (2, "LongStorage", LONGS, 2)],
        form=tarfile.USTAR_FORMAT,
        order=("pickle", "tensors", "storages"),
        **options,
    )
    return data.rstrip(b"\0") + bytes(1024)


ZIPS = {
    "zip": zip_file(),
    "zip64": zip_file(wide=True),
    "deflated": zip_file(method=8),
    "big-endian": zip_file(swap=True),
    "zip of torch": saved(),
}
STREAMS = {"legacy": legacy_file(), "legacy of protocol 0": legacy_file(protocol=0)}
TARS = {"tar": tar_file()}
FILES = {**ZIPS, **STREAMS, **TARS}
