"""LitData chunks whose samples are rows of an Arrow table, which stands behind an empty list of items.

LitData writes such chunks where pyarrow is installed and samples are dicts of plain values. pyarrow reads them here too.
"""

import numpy as np

from ..importing import importing
from ._litdata_layout import BOOL, DICT, FLOAT, INT
from .extras import missing
from .litdata_errors import BadItem, Uneven

MAGIC = b"LDARW01\0"
FOOTER_NBYTES = 4 + len(MAGIC)  # behind the table: its length, and the magic
FILE_MAGIC = b"ARROW1"  # of an IPC file; otherwise it is an IPC stream

# Leaves that a column may be turned into: what Arrow calls its type, and the bytes of a value.
NUMBERS = {INT: ("int64", "<i8"), FLOAT: ("double", "<f8"), BOOL: ("bool", "u1")}
MOST_NBYTES = 2**32 - 1  # offsets have 32 bits


def find_footer(source):
    """Where the table lies in a chunk, as (offset, nbytes); None if there is none."""
    if source.nbytes < FOOTER_NBYTES:
        return None
    footer = bytes(source.read(source.nbytes - FOOTER_NBYTES, FOOTER_NBYTES))
    if footer[4:] != MAGIC:
        return None
    nbytes = int.from_bytes(footer[:4], "little")
    if nbytes > source.nbytes - FOOTER_NBYTES:
        raise BadItem(f"its Arrow table has {nbytes} bytes, and there are {source.nbytes}")
    return source.nbytes - FOOTER_NBYTES - nbytes, nbytes


def read_arrow(source, offset, nbytes, count):
    """Read and check a table, which must have ``count`` rows."""
    try:
        with importing:
            import pyarrow
    except ModuleNotFoundError as error:
        raise missing(
            error, "pyarrow", f"the samples of {source.name} are in an Arrow table"
        ) from None
    data = bytes(source.read(offset, nbytes))
    try:
        is_file = data.startswith(FILE_MAGIC)
        table = (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(data).read_all()
        table.validate(full=True)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise BadItem(f"its Arrow table cannot be read ({error})") from None
    if table.num_rows != count:
        raise BadItem(f"its Arrow table has {table.num_rows} rows, and the index says {count}")
    return table


def as_items(table, index):
    """The rows as ordinary items, (offsets, bytes), where each is a dict of the numbers that the index says; else None.

    This makes reading them as quick as if pyarrow had not been installed where the data set was written.
    """
    if index.tree is None or index.tree[0] != DICT or list(index.tree[1]) != table.column_names:
        return None
    fields = []
    for column, (_, kind, *_), child in zip(
        table.columns, index.leaves, index.tree[2], strict=True
    ):
        if (
            child is not None
            or str(column.type) != NUMBERS.get(kind, (None, None))[0]
            or column.null_count
        ):
            return None
        fields.append(NUMBERS[kind][1])
    leaves = len(fields)
    item = np.dtype(
        [(f"size {i}", "<u4") for i in range(leaves)] + [(str(i), fields[i]) for i in range(leaves)]
    )
    if item.itemsize * table.num_rows > MOST_NBYTES:
        return None
    items = np.empty(table.num_rows, dtype=item)
    for i in range(leaves):
        items[f"size {i}"], items[str(i)] = item[str(i)].itemsize, table.column(i).to_numpy()
    offsets = np.arange(table.num_rows + 1, dtype=np.int64) * item.itemsize
    return offsets.astype("<u4").tobytes(), items.tobytes()


class ArrowRows:
    """A chunk whose items are the rows of a table."""

    opened = False

    def __init__(self, table):
        self.table, self.nbytes = table, table.nbytes

    def read(self, layout, columns, start, stop, samples):
        items, slots = columns[0][start:stop], columns[1][start:stop].tolist()
        first, last = int(items[0]), int(items[-1])
        if last - first == len(items) - 1 and (np.diff(items) == 1).all():
            rows = self.table.slice(first, len(items)).to_pylist()
        else:
            rows = self.table.take(items).to_pylist()
        for slot, row in zip(slots, rows, strict=True):
            samples[slot] = row

    def read_one(self, layout, item):
        return self.table.slice(item, 1).to_pylist()[0]

    def stack(self, batch, columns, start, stop):
        raise Uneven
