"""LitData chunks whose samples are rows of an Arrow table, which stands behind an empty list of items.

LitData writes such chunks where pyarrow is installed and samples are dicts of plain values. pyarrow reads them here too.
"""

import numpy as np

from .litdata_codecs import missing
from .litdata_errors import BadItem, Uneven

MAGIC = b"LDARW01\0"
FOOTER_NBYTES = 4 + len(MAGIC)  # behind the table: its length, and the magic
FILE_MAGIC = b"ARROW1"  # of an IPC file; otherwise it is an IPC stream


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


class ArrowRows:
    """A chunk whose items are the rows of a table, checked when it is opened."""

    opened = False

    def __init__(self, source, offset, nbytes, count):
        try:
            import pyarrow
        except ModuleNotFoundError as error:
            raise missing(
                error, "pyarrow", f"the samples of {source.name} are in an Arrow table"
            ) from None
        data = bytes(source.read(offset, nbytes))
        try:
            is_file = data.startswith(FILE_MAGIC)
            opened = (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(data)
            self.table = opened.read_all()
            self.table.validate(full=True)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise BadItem(f"its Arrow table cannot be read ({error})") from None
        if self.table.num_rows != count:
            raise BadItem(
                f"its Arrow table has {self.table.num_rows} rows, and the index says {count}"
            )
        self.nbytes = self.table.nbytes

    def read(self, layout, columns, start, stop, samples):
        items, slots = columns[0][start:stop], columns[1][start:stop].tolist()
        rows, at = np.unique(items, return_inverse=True)
        found = self.table.take(rows).to_pylist()
        taken = set()
        for slot, row, item in zip(slots, at.tolist(), items.tolist(), strict=True):
            # a row that is asked for twice is made twice
            samples[slot] = self.read_one(layout, item) if row in taken else found[row]
            taken.add(row)

    def read_one(self, layout, item):
        return self.table.slice(item, 1).to_pylist()[0]

    def stack(self, batch, columns, start, stop):
        raise Uneven
