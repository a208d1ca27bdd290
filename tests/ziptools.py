"""A good ZIP checkpoint, and how tests read one."""

import numpy as np

from fastckpt.containers.zip import open_zip
from fastckpt.source import open_source
from zipcraft import Entry, archive, checkpoint

STORAGES = (b"0123456789ab", b"", b"z" * 1000)
DATA_0 = 2  # where data/0 stands among the entries of a checkpoint
GOOD = archive(checkpoint(STORAGES), wide=True)


def opened(data, **options):
    """Open bytes, and locate every record."""
    container = open_zip(open_source(data), **options)
    container.locate(np.arange(len(container.records)))
    return container


def contents(container):
    return {name: bytes(container.read_record(name)) for name in container.index}


def changed(index, **fields):
    """The entries of a good checkpoint, one of them changed."""
    entries = checkpoint(STORAGES)
    values = {"name": entries[index].name, "data": entries[index].data, **fields}
    entries[index] = Entry(**values)
    return entries
