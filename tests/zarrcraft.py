"""Small Zarr stores, laid out by hand as nvalchemi's writer lays them out, and what a reader must give for them."""

import numpy as np
import zarr

LEVELS = {
    "atomic_numbers": "atom",
    "positions": "atom",
    "neighbor_list": "edge",
    "cell": "system",
    "energy": "system",
}


def graphs(atoms=(3, 2, 5, 1, 4), seed=0):
    """Samples as a reader gives them: dicts of arrays, each atom with an edge to every atom."""
    rng = np.random.default_rng(seed)
    return [
        {
            "atomic_numbers": rng.integers(1, 90, n),
            "positions": rng.random((n, 3), dtype=np.float32),
            "neighbor_list": np.stack(np.indices((n, n)), axis=-1).reshape(-1, 2).astype(np.int64),
            "cell": rng.random((1, 3, 3), dtype=np.float32),
            "energy": rng.random((1, 1)),
        }
        for n in atoms
    ]


def pointer(counts):
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def write(path, samples, *, chunk=4, shifted=True, deleted=(), shards=None, **root):
    """Write graphs; ``shifted=False`` leaves the numbers of atoms as they are in each sample."""
    group = zarr.open_group(path, mode="w")
    counts = [len(sample["positions"]) for sample in samples]
    atoms, edges = pointer(counts), pointer([len(s["neighbor_list"]) for s in samples])
    active = np.array([i not in deleted for i in range(len(samples))])

    def put(name, data):
        size = (min(chunk, max(1, len(data))), *data.shape[1:])
        shape = None if shards is None else (shards * chunk, *data.shape[1:])
        group.create_array(
            name, data=data, chunks=size if shards is None else (chunk, *size[1:]), shards=shape
        )

    put("meta/atoms_ptr", atoms)
    put("meta/edges_ptr", edges)
    put("meta/samples_mask", active)
    put("meta/atoms_mask", np.repeat(active, np.diff(atoms)))
    put("meta/edges_mask", np.repeat(active, np.diff(edges)))
    for name in LEVELS:
        rows = [
            sample[name] + (start if name == "neighbor_list" and shifted else 0)
            for sample, start in zip(samples, atoms, strict=False)
        ]
        put(f"core/{name}", np.concatenate(rows))
    group.create_group("custom")
    group.attrs.update(
        {"num_samples": len(samples), "fields": {"core": LEVELS, "custom": {}}, **root}
    )
    return group


def extend(array, rows):
    """Append rows to an array, as an append does."""
    before = array.shape[0]
    array.resize((before + len(rows), *array.shape[1:]))
    array[before:] = rows


def append(group, samples, *, shifted=True, parts=("pointers", "masks", "fields", "count")):
    """Append graphs as nvalchemi does: pointers, masks, fields, and the count last; ``parts`` cuts it off in between.

    ``shifted=False`` numbers atoms through the appended graphs alone, as version 0.3.0 does.
    """
    counts = np.array([len(sample["positions"]) for sample in samples])
    edges = np.array([len(sample["neighbor_list"]) for sample in samples])
    atoms_before, edges_before = int(group["meta/atoms_ptr"][-1]), int(group["meta/edges_ptr"][-1])
    if "pointers" in parts:
        extend(group["meta/atoms_ptr"], atoms_before + np.cumsum(counts))
        extend(group["meta/edges_ptr"], edges_before + np.cumsum(edges))
    if "masks" in parts:
        for name, n in [("samples", len(samples)), ("atoms", counts.sum()), ("edges", edges.sum())]:
            extend(group[f"meta/{name}_mask"], np.ones(n, bool))
    if "fields" in parts:
        starts = pointer(counts)[:-1] + (atoms_before if shifted else 0)
        for name in LEVELS:
            rows = [
                sample[name] + (start if name == "neighbor_list" else 0)
                for sample, start in zip(samples, starts, strict=True)
            ]
            extend(group[f"core/{name}"], np.concatenate(rows))
    if "count" in parts:
        group.attrs["num_samples"] = group.attrs["num_samples"] + len(samples)
