"""The ways to read a file that the fuzzer tries: a new one is a function in one of two tables.

Each takes (path, data) of a mutant and returns what it read.
"""

import contextlib
import json
import os

import fastckpt

ALL = slice(None)


def load(path, data):
    return fastckpt.load(path)


def load_parallel(path, data):
    """Every load, however small, through the threads."""
    with serial_below("0"):
        return fastckpt.load(path, threads=2)


@contextlib.contextmanager
def serial_below(nbytes):
    os.environ["FASTCKPT_SERIAL_BELOW"] = nbytes
    try:
        yield
    finally:
        del os.environ["FASTCKPT_SERIAL_BELOW"]


def load_bytes(path, data):
    return fastckpt.load(data)


def load_object(path, data):
    return fastckpt.load(Object(data))


class Object:
    """A file object that gives its bytes in pieces."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def seek(self, offset, whence=0):
        self.at = offset + (0, self.at, len(self.data))[whence]
        return self.at

    def tell(self):
        return self.at

    def read(self, nbytes=-1):
        part = self.data[self.at :][: min(nbytes, 1000) if nbytes >= 0 else None]
        self.at += len(part)
        return part


def load_mapped(path, data):
    return fastckpt.load(path, mmap=True)


def open_and_read(path, data):
    with fastckpt.open(path, unknown="error") as checkpoint:
        return checkpoint.read()


def numpy(path, data):
    return fastckpt.load(path, framework="numpy")


def numpy_opaque(path, data):
    with serial_below("0"):
        return fastckpt.load(path, framework="numpy", unknown="opaque")


def opaque(path, data):
    return fastckpt.load(path, unknown="opaque")


def unverified(path, data):
    return fastckpt.load(path, verify=False)


def keys(path, data):
    try:
        return fastckpt.load(path, keys="*[a-m]*", unknown="opaque")
    except KeyError as error:  # it has other names
        if "no name in the checkpoint matches" not in str(error):
            raise


def lazy(path, data, **options):
    """Everything an open checkpoint says and gives: names, shapes, parts, the object without its tensors."""
    read = {}
    with fastckpt.open(path, **options) as checkpoint:
        repr(checkpoint), json.dumps(checkpoint.info, default=str)
        for name, tensor in list(checkpoint.items())[:20]:
            repr(tensor), tensor.nbytes, tensor.requires_grad
            each_part(read, name, tensor)
        checkpoint.tree  # noqa: B018 - to print it is Python's business, for ever where tuples stand in tuples twice
    return read


def each_part(read, name, tensor):
    """One tensor: whole and in slices. That one cannot be read hides no other."""
    indexes = [...]
    if tensor.spec is not None and tensor.shape:
        indexes += [0 if tensor.shape[0] else ALL, slice(1, None, 2), (..., slice(0, 1))]
    for index in indexes:
        with contextlib.suppress(fastckpt.CheckpointError):
            read[name, str(index)] = tensor.read() if tensor.spec is None else tensor[index]
    with contextlib.suppress(fastckpt.CheckpointError):
        read[name, "whole"] = tensor.read()


def lazy_numpy(path, data):
    return lazy(path, data, framework="numpy", encoding="latin1")


def lazy_mapped(path, data):
    return lazy(path, data, mmap=True)


def report(check):
    """A way for a function that gives a report, which can be shown and written as JSON."""

    def read(path, data):
        found = check(path)
        str(found), json.dumps(found.as_dict())
        return found

    read.__name__ = check.__name__
    return read


def salvage(path, data):
    """What is written is a good file, whatever it came from; its object where nothing is lost."""
    out = f"{path}.salvaged"
    try:
        salvaged = report(lambda path: fastckpt.salvage(path, out, overwrite=True))(path, data)
        written = fastckpt.verify(out)
        assert written.ok, f"salvage wrote what verify finds bad: {written}"
        return fastckpt.load(out, unknown="opaque") if salvaged.ok else None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(out)


# These give the same object, or refuse the file for the same reason: the first is the one that counts.
SAME = (load, load_parallel, load_bytes, load_object, open_and_read, load_mapped)
OTHERS = (numpy, numpy_opaque, opaque, unverified, keys, lazy, lazy_numpy, lazy_mapped)
REPORTS = (report(fastckpt.verify), report(fastckpt.scan))
WRITERS = (salvage,)
EVERY_WAY = (*SAME, *OTHERS, *REPORTS, *WRITERS)
# A mutant that load reads is read every way; others by these, and by some of the rest in turn.
ALWAYS = (load, numpy, lazy)
IN_TURN = [way for way in EVERY_WAY if way not in ALWAYS]
AT_ONCE = 4


def takes_turn(way, index):
    """Whether a mutant that load refuses is read this way, too."""
    return way in ALWAYS or (IN_TURN.index(way) - AT_ONCE * index) % len(IN_TURN) < AT_ONCE
