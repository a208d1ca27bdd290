"""The tensors of an open checkpoint as rows, and rows as a table of aligned columns."""

from ._spec import TensorSpec
from .contents import storage_rows
from .errors import CheckpointError
from .lazy import core_of
from .plan import root_of, with_bytes
from .records import STORED
from .selection import spelled
from .terminal import printable

NUMBERS = ("nbytes", "offset")
COLUMNS = ("name", "dtype", "shape", "nbytes", "offset")


def tensor_rows(checkpoint):
    """A dict for each tensor: name, kind, dtype, shape, nbytes, and the ``offset`` in the file where its first element is.

    Where keys with dots make two names alike, the name is the tuple of keys, as text, which ``checkpoint[...]`` takes.
    ``offset`` is None where there is no such place: for other layouts, deflated records, and tensors without bytes. ``file`` is
    the shard that a tensor is in, where there are several.
    """
    found = {id(part): offsets(part) for part in checkpoint.parts}
    files = {id(part): file for file, part in getattr(checkpoint, "shards", {}).items()}
    rows = []
    for name, tensor in checkpoint.items():
        shape, part = tensor.shape, id(tensor.checkpoint)
        rows.append(
            {
                "name": name if isinstance(name, str) else spelled(name),
                "kind": tensor.kind,
                "dtype": tensor.dtype,
                "shape": None if shape is None else list(shape),
                "nbytes": tensor.nbytes,
                "offset": found[part](tensor.leaf),
            }
            | ({"file": files[part]} if part in files else {})
        )
    return rows


def offsets(checkpoint):
    """A function that gives the byte in a file, a Checkpoint, where a leaf begins, or None."""
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
    columns = COLUMNS + (("file",) if any("file" in row for row in rows) else ())
    cells = [columns, *(tuple(cell(row, column) for column in columns) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for line in cells:
        padded = [
            f"{text:>{width}}" if column in NUMBERS else f"{text:{width}}"
            for text, width, column in zip(line, widths, columns, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
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
