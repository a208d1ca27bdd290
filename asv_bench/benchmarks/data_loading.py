"""An epoch of batches: over samples in memory, over a store that makes one wait, over rows of a checkpoint."""

import os
import time
import warnings

from .common import Measured

# A small run, such as the tests', makes small epochs.
SCALE = min(1.0, int(os.environ.get("FASTCKPT_BENCH_MB", "256")) / 256)
ITEMS = int(20_000 * SCALE)
WAITS = int(512 * SCALE)
WAIT = 0.005  # seconds; about what a request of an object store in the same region takes, at best
ROWS = int(65_536 * SCALE)
LOADERS = ["torch DataLoader", "fastckpt"]


class Epoch(Measured):
    """An epoch in one process, again and again."""

    repeat = (3, 10, 2.0)
    rounds = 1

    def prepare_loader(self, loader, dataset, **options):
        if self.call is None:
            self.call = lambda: epoch(loader, dataset, **options)
        self.prepare(self.call)


class InMemory(Epoch):
    """A list of samples of four numbers each: what a loader itself costs."""

    params = [LOADERS, ["sequential", "shuffled"], ["stacked", "lists"], [0, 2]]
    param_names = ["loader", "order", "batches", "workers"]

    def setup(self, loader, order, batches, workers):
        items = [{"a": i, "b": -i, "c": i / 2, "d": 1.0} for i in range(ITEMS)]
        collate = {"collate_fn": as_it_is} if batches == "lists" else {}
        self.prepare_loader(
            loader,
            items,
            batch_size=64,
            shuffle=order == "shuffled",
            num_workers=workers,
            **collate,
        )

    def time_epoch(self, loader, order, batches, workers):
        self.measure()


class Waiting(Epoch):
    """A reader that sleeps for 5 ms in each read of a batch: how far workers overlap the waits, and ``fuse`` saves them."""

    params = [[*LOADERS, "fastckpt, fuse=4"], [0, 2, 8]]
    param_names = ["loader", "workers"]

    def setup(self, loader, workers):
        loader, _, fuse = loader.partition(", fuse=")
        more = {"fuse": int(fuse)} if fuse else {}
        self.prepare_loader(loader, sleeping_reader(), batch_size=8, num_workers=workers, **more)

    def time_epoch(self, loader, workers):
        self.measure()


class CheckpointRows(Epoch):
    """Rows of two tensors of a checkpoint in the page cache, 64 to a batch."""

    params = [LOADERS, ["sequential", "shuffled"], [0, 2]]
    param_names = ["loader", "order", "workers"]

    def setup_cache(self):
        write_rows(os.getcwd())
        return os.getcwd()

    def setup(self, folder, loader, order, workers):
        from fastckpt.data import CheckpointReader

        shuffle = order == "shuffled"
        reader = CheckpointReader(write_rows(folder))
        self.prepare_loader(loader, reader, batch_size=64, shuffle=shuffle, num_workers=workers)

    def time_epoch(self, folder, loader, order, workers):
        self.measure()


def write_rows(folder):
    """The file of CheckpointRows, made if it is not there."""
    import torch

    path = os.path.join(folder, "rows.pt")
    if not os.path.exists(path):
        torch.save({"x": torch.randn(ROWS, 64), "y": torch.arange(ROWS)}, path)
    return path


def epoch(loader, dataset, **options):
    """Go through an epoch of one loader; how many batches it had."""
    if loader == "fastckpt":
        from fastckpt.data import DataLoader
    else:
        from torch.utils.data import DataLoader
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # torch's, of more workers than CPUs: here they are on purpose
        return sum(1 for _ in DataLoader(dataset, **options))


def as_it_is(samples):
    return samples


def sleeping_reader():
    import torch

    from fastckpt.data import Reader

    class Sleeping(Reader):
        def __len__(self):
            return WAITS

        def _read(self, positions):
            time.sleep(WAIT)
            return [torch.tensor(position) for position in positions.tolist()]

    return Sleeping()
