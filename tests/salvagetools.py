"""What the tests of salvage share: a checkpoint whose parts are known, ways to damage it, and what must hold of any result."""

import io
import struct
import zipfile

import torch

from fastckpt import salvage
from objects import saved
from support import same


def model():
    """Nested, with a shared storage, an empty one and one of zeros."""
    shared = torch.arange(12.0)
    return {
        "w": torch.linspace(0, 1, 60).reshape(20, 3),
        "e": torch.empty(0),
        "l": [shared[2:], torch.arange(4), shared.view(3, 4)],
        "n": 3,
        "opt": {"state": {0: {"m": torch.zeros(7)}}},
    }


NAMES = {"w", "e", "l.0", "l.1", "l.2", "opt.state.0.m"}
# storages in the order of the file, and the tensors in each
IN_RECORD = {"0": {"w"}, "1": {"e"}, "2": {"l.0", "l.2"}, "3": {"l.1"}, "4": {"opt.state.0.m"}}
GOOD = saved(model())


def at(obj, name):
    for key in name.split("."):
        obj = obj[int(key) if key.isdigit() else key]
    return obj


def salvaged(data, out, expected=None, names=NAMES):
    """Salvage bytes, and check what comes out: (report, object)."""
    report = salvage(data, out, overwrite=True)
    assert {*report.kept, *report.lost} == set(names)
    assert len(report.kept) + len(report.lost) == len(names)
    contradicted = any(each.kind == "contradiction" for each in report.findings)
    assert report.ok == (not report.lost and not contradicted)
    with zipfile.ZipFile(out) as packed:
        assert packed.testzip() is None
    result = torch.load(out, weights_only=True)
    expected = model() if expected is None else expected
    for name in report.kept:
        same(at(expected, name), at(result, name), name, {})
    return report, result


def places(data):
    """Where the parts of an archive lie: name of a record -> (header, data, descriptor, end), and where its directory begins."""
    with zipfile.ZipFile(io.BytesIO(data)) as packed:
        found = {}
        for info in packed.infolist():
            head = data[info.header_offset :]
            start = info.header_offset + 30 + sum(struct.unpack_from("<HH", head, 26))
            stop = start + info.compress_size
            found[info.filename.partition("/")[2]] = (
                info.header_offset,
                start,
                stop,
                stop + 16 * bool(info.file_size),
            )
        return found, packed.start_dir


PLACES, DIRECTORY = places(GOOD)


def flipped(data, where):
    return data[:where] + bytes([data[where] ^ 0x41]) + data[where + 1 :]
