"""The tensors of an open checkpoint as rows, and rows as a table of aligned columns."""

from ._spec import TensorSpec
from .contents import storage_rows
from .errors import CheckpointError
from .lazy import core_of
from .plan import root_of, with_bytes
from .records import STORED
from .terminal import printable

COLUMNS = ("name", "dtype", "shape", "nbytes", "offset")


def tensor_rows(checkpoint):
    """A dict for each tensor: name, kind, dtype, shape, nbytes, and the ``offset`` in the file where its first element is.

    ``offset`` is None where there is no such place: for other layouts, deflated records, and tensors without bytes.
    """
    found = offsets(checkpoint)
    rows = []
    for name, tensor in checkpoint.items():
        shape = tensor.shape
        rows.append(
            {
                "name": name if isinstance(name, str) else ".".join(map(str, name)),
                "kind": tensor.kind,
                "dtype": tensor.dtype,
                "shape": None if shape is None else list(shape),
                "nbytes": tensor.nbytes,
                "offset": found(tensor.leaf),
            }
        )
    return rows


def offsets(checkpoint):
    """A function that gives the byte in the file where a leaf begins, or None."""
    contents = checkpoint.contents
    roots = with_bytes([spec for spec in contents.unpickled.storages if spec.root is None])
    try:
        rows = storage_rows(contents, roots)
    except CheckpointError:  # listing goes on where reading would not
        rows = []
    records = contents.records
    begin = {
        root.index: int(records.offset[row])
        for root, row in zip(roots, rows, strict=False)
        if records.method[row] == STORED
    }

    def offset(leaf):
        core = core_of(leaf)
        start = begin.get(root_of(core.storage).index) if isinstance(core, TensorSpec) else None
        if start is None or not core.numel:
            return None
        return start + core.storage.offset + core.offset * core.itemsize

    return offset


def table(rows):
    """Rows as lines of aligned columns, with a line that names them and one that counts."""
    cells = [COLUMNS, *(tuple(cell(row, column) for column in COLUMNS) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]
    lines = []
    for name, dtype, shape, nbytes, offset in cells:
        lines.append(
            f"{name:{widths[0]}}  {dtype:{widths[1]}}  {shape:{widths[2]}}  {nbytes:>{widths[3]}}  {offset:>{widths[4]}}".rstrip()
        )
    return "\n".join(lines)


def cell(row, column):
    value = row[column]
    if value is None:
        return "-"
    if column == "shape":
        return f"({', '.join(map(str, value))}{',' if len(value) == 1 else ''})"
    if column == "dtype" and row["kind"] not in ("strided", "parameter"):
        return f"{value} {row['kind']}"
    return printable(str(value))
