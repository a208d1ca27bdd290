"""What a Zarr store holds: fields, the level each belongs to, and which rows are those of a sample.

Two layouts are known. *nvalchemi*: groups meta, core, custom and levels; rows of atoms and edges lie one behind the other, and
pointers say where those of a sample begin. *Rows*: arrays of equal length, or a single one; sample i is row i of each.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..errors import FormatError, UnsupportedError, short
from .zarr_rows import Arrays, Rows
from .zarr_store import array_at, arrays_of, child, describe, names_in, open_store

ATOM, EDGE, SYSTEM = "atom", "edge", "system"
ROW = "row"  # of a plain array: a sample is the row itself, without the axis of rows
ALIASES = {"atoms": ATOM, "edges": EDGE}
POINTERS = {ATOM: "meta/atoms_ptr", EDGE: "meta/edges_ptr"}

# Levels of core fields where the store does not say; all others are atoms'.
EDGE_FIELDS = frozenset(
    "neighbor_list edge_index shifts neighbor_list_shifts edge_embeddings".split()
)
SYSTEM_FIELDS = frozenset(
    "energy stress virial dipole charge graph_embeddings cell pbc spin".split()
)
# Fields that hold global numbers of atoms: today's name, and that of early writers, who kept it as [2, edges].
EDGES, OLD_EDGES = "neighbor_list", "edge_index"


@dataclass(frozen=True, slots=True)
class Field:
    """``name`` is what samples call it, ``edges`` whether its values are global numbers of atoms."""

    name: str
    level: str
    rows: Rows
    edges: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """An array of a store, as it was found: nothing of it is checked yet."""

    name: str
    path: str
    level: str
    array: object


@dataclass(frozen=True)
class Layout:
    """A store at one moment; never changed, so that readers in other threads see all of it or nothing.

    ``samples``: int64 or EveryRow, the row of each sample that is not deleted among the ``committed`` ones. ``pointers``: by level, int64
    [committed + 1]; levels that have none have a row for each sample. ``products``: by level, the levels of its two axes.
    ``single``: the store is one array, and a sample is no dict.
    """

    where: str
    fields: tuple
    samples: object
    committed: int
    pointers: dict
    products: dict
    single: bool
    arrays: Arrays


class EveryRow:
    """The rows of samples where each row is one: theirs are the same numbers, however many a store says that there are."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, samples):
        return samples


def open_layout(store, fields, repair, cache_bytes, limits=None):
    """Open a store. Raises FileNotFoundError, FormatError, UnsupportedError, LimitError, and KeyError for a field it does not have."""
    where = describe(store)

    def open_root():
        return open_store(store, where)

    arrays = Arrays(open_root, cache_bytes, limits)
    root = arrays.here().root
    if not hasattr(root, "members"):
        entries = [Entry("", "", ROW, root)]
        if fields is not None:
            raise KeyError(f"{where}: the store is a single array, which has no fields to choose")
        return rows_layout(where, entries, arrays, single=True)
    if not is_nvalchemi(where, root):
        entries = plain_entries(where, root, fields)
        return rows_layout(where, entries, arrays)
    entries = alchemi_entries(where, root, repair)
    if fields is None:
        check_declared(where, root, entries)
    entries = chosen(where, entries, fields)
    return alchemi_layout(where, root, entries, arrays, repair)


# -- plain rows


def plain_entries(where, root, fields):
    if fields is None:
        return [
            Entry(name, name, ROW, array) for name, array in sorted(arrays_of(where, root).items())
        ]
    entries = []
    for name in fields:  # a path to an array inside of groups will do
        array = array_at(where, root, name)
        if array is None:
            raise no_field(where, name, names_in(where, root))
        entries.append(Entry(name, name, ROW, array))
    return entries


def rows_layout(where, entries, arrays, *, single=False):
    if not entries:
        raise FormatError(
            f"{where}: the group has no arrays of its own, and is no nvalchemi store either (meta/atoms_ptr is missing)"
        )
    fields = tuple(
        Field(entry.name, ROW, Rows(where, entry.path, entry.array)) for entry in entries
    )
    first = fields[0].rows
    for field in fields:
        if field.rows.length != first.length:
            raise FormatError(
                f"{where}: array {field.name!r} has {field.rows.length} rows, {first.path!r} has {first.length}; "
                "arrays of equal length are expected, and fields= chooses some"
            )
    return Layout(where, fields, EveryRow(first.length), first.length, {}, {}, single, arrays)


def chosen(where, entries, names):
    if names is None:
        return entries
    by_name = {entry.name: entry for entry in entries}
    for name in names:
        if name not in by_name:
            raise no_field(where, name, by_name)
    return [by_name[name] for name in names]


def no_field(where, name, names):
    there = ", ".join(names) or "none"
    return KeyError(f"{where}: there is no field {name!r:.200}; there are: {there:.500}")


# -- nvalchemi


def is_nvalchemi(where, root):
    there = [child(where, root, f"meta/{name}") for name in ("atoms_ptr", "samples_mask")]
    return there != [None, None]


def declared_levels(where, root):
    """What the store says of the level of each field: {"core": {name: level}, "custom": …, "levels": …}."""
    declared = root.attrs.get("fields", {})
    if not isinstance(declared, Mapping) or not all(
        isinstance(group, Mapping) for group in declared.values()
    ):
        raise FormatError(
            f"{where}: the attribute 'fields' is {short(declared)}, names of groups and in each names of fields are expected"
        )
    return declared


def alchemi_entries(where, root, repair=False):
    """Every field's array: core, custom, levels; in each in the order in which the store names them, then by name.

    With ``repair`` edges that have the name of early writers get today's, where it is free.
    """
    declared = declared_levels(where, root)
    places = [("core", "core", None), ("custom", "custom", None)]
    places += [(f"levels/{level}", "levels", level) for level in definitions(where, root)]
    entries, seen = [], {}
    for path, kind, own_level in places:
        group = child(where, root, path)
        arrays = arrays_of(where, group) if hasattr(group, "arrays") else {}
        levels = declared.get(kind, {})
        for name in [name for name in levels if name in arrays] + sorted(arrays.keys() - levels):
            level = own_level or levels.get(name, default_level(kind, name))
            old = repair and name == OLD_EDGES and kind == "core" and EDGES not in arrays
            entry = Entry(
                EDGES if old else name,
                f"{path}/{name}",
                level_name(where, level),
                arrays[name],
            )
            if seen.setdefault(entry.name, entry) is not entry:
                raise FormatError(
                    f"{where}: field {name!r} is both {seen[entry.name].path!r} and {entry.path!r}"
                )
            entries.append(entry)
    return entries


def level_name(where, level):
    if not isinstance(level, str):
        raise FormatError(f"{where}: a level is {short(level)}, a name is expected")
    return ALIASES.get(level, level)


def check_declared(where, root, entries):
    """Raise FormatError for a field that the store names and has no array for."""
    for kind, name in missing_fields(where, root, entries):
        raise FormatError(
            f"{where}: the store names a field {name!r} in {kind!r}, and has no array for it; fields= reads the others"
        )


def missing_fields(where, root, entries):
    there = {entry.path.rpartition("/")[2] for entry in entries}
    return [
        (kind, name)
        for kind, names in declared_levels(where, root).items()
        for name in names
        if name not in there
    ]


def default_level(kind, name):
    if kind == "core" and name not in SYSTEM_FIELDS:
        return EDGE if name in EDGE_FIELDS else ATOM
    return SYSTEM


def definitions(where, root):
    """The levels that a store defines for itself: {name: {"kind": …}}."""
    levels = root.attrs.get("levels")
    if levels is None:
        return {}
    found = levels.get("definitions") if isinstance(levels, Mapping) else None
    if isinstance(found, Mapping) and levels.get("version") != 1:
        raise UnsupportedError(
            f"{where}: levels of version {short(levels.get('version'))}, version 1 is handled"
        )
    if not isinstance(found, Mapping) or not all(isinstance(d, Mapping) for d in found.values()):
        raise FormatError(
            f"{where}: the attribute 'levels' is {short(levels)}, a version and definitions are expected"
        )
    return found


def alchemi_layout(where, root, entries, arrays, repair):
    committed = committed_samples(where, root)
    mask = whole(where, root, "meta/samples_mask", committed, arrays.limits)
    defined = definitions(where, root)
    fields = tuple(alchemi_field(where, entry, repair) for entry in entries)
    pointers, products = {}, {}
    todo = [ATOM, EDGE, *(field.level for field in fields)]
    while todo:
        level = todo.pop()
        if level == SYSTEM or level in pointers:
            continue
        definition = {"kind": "segmented"} if level in POINTERS else defined.get(level, {})
        kind = definition.get("kind")
        if kind == "product":
            axes = [level_name(where, definition.get(axis)) for axis in ("left", "right")]
            products[level] = tuple(axes)
            todo += axes
        if kind in ("segmented", "product"):
            path = POINTERS.get(level, f"meta/level_ptrs/{level}")
            pointers[level] = whole(where, root, path, committed + 1, arrays.limits)
        elif kind != "uniform":
            raise FormatError(
                f"{where}: level {level!r} is of kind {short(kind)}; uniform, segmented or product is expected"
            )
    samples = np.flatnonzero(mask.astype(bool)).astype(np.int64, copy=False)
    return Layout(where, fields, samples, committed, pointers, products, False, arrays)


def committed_samples(where, root):
    """How many samples are committed: an append counts them last, so that one that was cut off is not seen."""
    committed = root.attrs.get("num_samples")
    if committed is None:
        mask = array_at(where, root, "meta/samples_mask")
        committed = mask.shape[0] if mask is not None and mask.ndim == 1 else None
    if type(committed) is not int or committed < 0:
        raise FormatError(
            f"{where}: the attribute 'num_samples' is {short(committed)}, a count is expected"
        )
    return committed


def whole(where, root, path, length, limits):
    """The first ``length`` entries of a pointer or a mask."""
    array = array_at(where, root, path)
    if array is None:
        raise FormatError(f"{where}: array {path!r} is missing")
    if array.ndim != 1 or array.dtype.kind not in "bui" or array.shape[0] < length:
        raise FormatError(
            f"{where}: array {path!r} has shape {array.shape} of {array.dtype}, "
            f"{length} whole numbers are expected"
        )
    rows = Rows(where, path, array)
    if length > rows.most_rows(limits):
        raise rows.too_much("all of it", length, limits)
    blocks = range(-(-length // rows.block_rows)) if length else ()
    values = np.concatenate(rows.read(array, blocks)) if blocks else rows.empty(0)
    return values[:length].astype(np.int64 if array.dtype.kind != "b" else bool, copy=False)


def is_edges(entry):
    """Whether the values are numbers of atoms."""
    return entry.level == EDGE and entry.path in (f"core/{EDGES}", f"core/{OLD_EDGES}")


def is_turned(entry):
    """Whether edges are stored as [2, edges]; two edges under today's name are taken as [edges, 2]."""
    shape, old_name = entry.array.shape, entry.path == f"core/{OLD_EDGES}"
    return len(shape) == 2 and shape[0] == 2 and (shape[1] != 2 or old_name)


def is_old(entry):
    return is_edges(entry) and (entry.path == f"core/{OLD_EDGES}" or is_turned(entry))


def alchemi_field(where, entry, repair):
    array, edges, old = entry.array, is_edges(entry), is_old(entry)
    if old and not repair:
        raise UnsupportedError(
            f"{where}: array {entry.path!r} has shape {array.shape}, as early writers left it; {EDGES!r} of shape (edges, 2) is "
            "expected. repair=True reads it so, fields= leaves it out"
        )
    if edges and array.dtype.kind not in "iu":
        raise FormatError(
            f"{where}: array {entry.path!r} is of {array.dtype}, numbers of atoms are expected"
        )
    axis = int(old and is_turned(entry))
    return Field(entry.name, entry.level, Rows(where, entry.path, array, axis), edges)
