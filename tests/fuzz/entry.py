"""What coverage leads: one target in one process of libFuzzer's. ``covered`` starts it; see there.

A target takes bytes and reads them. CheckpointError and OSError are answers, whatever else comes out is a crash.
"""

import random
import sys
import warnings

import atheris

with atheris.instrument_imports(include=["fastckpt"], enable_loader_override=False):
    import numpy as np

    from fastckpt import CheckpointError
    from fastckpt import load as load_checkpoint
    from fastckpt import open as open_checkpoint
    from fastckpt._tree import substitute
    from fastckpt._unpickler import unpickle
    from fastckpt.containers.legacy import LegacyContainer
    from fastckpt.containers.tar import TarContainer
    from fastckpt.containers.zip import open_zip
    from fastckpt.numpy_bridge import NumpyBridge
    from fastckpt.source import open_source

from . import mutate, pickles

MOST_READ = 1 << 20  # bytes of a record that are read, not only located


def read_zip(data):
    """The directory, local headers, and what is in the records."""
    container = open_zip(open_source(memoryview(data)), verify=False)
    for name in container.index:
        row = container.index[name]
        try:
            container.locate(np.array([row]))
            if container.records.nbytes[row] < MOST_READ:
                container.read_row(row)
        except CheckpointError:
            pass


def read_pickle(data):
    """The pickle machine on bare bytes, and what comes after it; the first byte says which persistent ids there are."""
    unpickled = unpickle(data[1:], pids=data[0] % 3 if data else 0)
    made = [None] * len(unpickled.tensors)
    substitute(unpickled.obj, NumpyBridge(Nowhere(), unknown="opaque"), made)


class Nowhere:
    """Places of storages without bytes, as if all were on the meta device."""

    def __getitem__(self, index):
        return None, 0


def read_whole(data):
    """A load into arrays, and each tensor by itself."""
    view = memoryview(data)
    with open_checkpoint(view, framework="numpy") as checkpoint:
        for tensor in list(checkpoint.values())[:8]:
            try:
                tensor.read()
                tensor[...]
            except CheckpointError:
                pass
    load_checkpoint(view, framework="numpy", unknown="opaque")


TARGETS = {
    "zip": read_zip,
    "legacy": lambda data: LegacyContainer(open_source(memoryview(data))),
    "tar": lambda data: TarContainer(open_source(memoryview(data))),
    "pickle": read_pickle,
    "load": read_whole,
}


class StructuredMutator:
    """libFuzzer's own mutations and ours by turns; checksums are right afterwards."""

    def __init__(self, target):
        self.target, self.mutator = target, mutate.Mutator(0)

    def __call__(self, data, max_nbytes, number):
        rng = random.Random(number)
        ours = rng.random() < 0.5
        if self.target == "pickle":
            changed = self.pickle(rng, data) if ours and data else atheris.Mutate(data, max_nbytes)
        else:
            changed = (
                self.file(rng, data) if ours else self.repaired(atheris.Mutate(data, max_nbytes))
            )
        return changed[:max_nbytes]

    def pickle(self, rng, data):
        return data[:1] + pickles.mutate(rng, data[1:], self.mutator.pickles)[0]

    def file(self, rng, data):
        seed = mutate.seed_of("", bytes(data))
        return self.mutator.change(rng, seed)[0]

    def repaired(self, data):
        return mutate.CONTAINERS[mutate.kind_of(data)].repaired(bytes(data))


def main():
    """``python -m fuzz.entry TARGET [libFuzzer's arguments]``."""
    target = sys.argv.pop(1)
    read = TARGETS[target]

    def test_one_input(data):
        try:
            read(data)
        except (CheckpointError, OSError):
            pass

    warnings.simplefilter("ignore")
    atheris.Setup(sys.argv, test_one_input, custom_mutator=StructuredMutator(target))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
