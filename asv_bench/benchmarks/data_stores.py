"""Samples out of the stores of others: LitData folders and nvalchemi's Zarr stores, against those who wrote them.

litdata, nvalchemi-toolkit and zarr are needed for their rows alone; what is not installed is left out. The stores are written here,
byte by byte, so that their form does not depend on what is installed.
"""

import json
import os
import struct

import numpy as np

from .common import Measured, needed, optional
from .data_loading import SCALE, epoch

LITDATA_ITEMS = int(80_000 * SCALE)
CHUNK_ITEMS = 20_000
GRAPHS = int(4_000 * SCALE)
GRAPH_CHUNK = 10_000  # rows
BATCH = 64
FUSE = 16


class Store(Measured):
    """Goes through a store again and again, in one process: an epoch is a sample."""

    repeat = (3, 10, 2.0)
    rounds = 1

    def setup_cache(self):
        for kind in KINDS:
            litdata_folder(os.getcwd(), kind)
        return os.getcwd()

    def prepare_once(self, make):
        if self.call is None:
            self.call = make()
            self.call()
        self.prepare(self.call)


# ---- LitData


class LitDataItems(Store):
    """One sample after the other, each a dict of four leaves: two ints and two floats, or two ints and two tensors."""

    params = [
        ["litdata PyTreeLoader", "litdata StreamingDataset", "fastckpt"],
        ["scalars", "mixed"],
    ]
    param_names = ["reader", "samples"]

    def setup(self, folder, reader, samples):
        items = {
            "litdata PyTreeLoader": pytree_loader,
            "litdata StreamingDataset": lambda path: needed("litdata").StreamingDataset(path),
            "fastckpt": lit_data_reader,
        }[reader]
        self.prepare_once(lambda: drainer(items(litdata_folder(folder, samples))))

    def time_items(self, folder, reader, samples):
        self.measure()


class LitDataRandom(Store):
    """Single samples in random order, a hundredth of them: LitData decodes a window of neighbours for each."""

    params = [["litdata StreamingDataset", "fastckpt"], ["scalars", "mixed"]]
    param_names = ["reader", "samples"]

    def setup(self, folder, reader, samples):
        path = litdata_folder(folder, samples)

        def make():
            rows = lit_data_reader(path)
            if reader != "fastckpt":
                rows = needed("litdata").StreamingDataset(path)
            order = np.random.default_rng(0).permutation(len(rows))[: len(rows) // 100].tolist()
            return lambda: [rows[i] for i in order] and None

        self.prepare_once(make)

    def time_random_items(self, folder, reader, samples):
        self.measure()


class LitDataBatches(Store):
    """Stacked batches of 64: the loaders, without workers, and the reader's own."""

    params = [
        ["torch DataLoader", "litdata StreamingDataLoader", "fastckpt", "fastckpt, read_batch"],
        ["scalars", "mixed"],
        ["sequential", "shuffled", "shuffled, mapped"],
    ]
    param_names = ["loader", "samples", "order"]

    def setup(self, folder, loader, samples, order):
        path, shuffle = litdata_folder(folder, samples), order != "sequential"

        def make():
            if loader == "litdata StreamingDataLoader":
                if shuffle:
                    raise NotImplementedError("its own order is another")
                litdata = needed("litdata")
                return drainer(
                    litdata.StreamingDataLoader(litdata.StreamingDataset(path), batch_size=BATCH)
                )
            reader = lit_data_reader(path, mmap=order.endswith("mapped"))
            if loader != "fastckpt, read_batch":
                return lambda: epoch(loader, reader, batch_size=BATCH, shuffle=shuffle)
            indices = range(len(reader))
            if shuffle:
                indices = np.random.default_rng(0).permutation(len(reader))
            batches = [indices[i : i + BATCH] for i in range(0, len(indices), BATCH)]
            return drainer(map_again(reader.read_batch, batches))

        self.prepare_once(make)

    def time_batches(self, folder, loader, samples, order):
        self.measure()


def pytree_loader(path):
    """What LitData reads chunks with, without its threads and samplers; all chunks mapped."""
    loaders = needed("litdata.streaming.item_loader")
    serializers = needed("litdata.streaming.serializers")._get_serializers(None)
    with open(os.path.join(path, "index.json")) as f:
        index = json.load(f)
    config, chunks = index["config"], index["chunks"]
    trees = optional("litdata.utilities._pytree") or needed("torch.utils._pytree")
    config["data_spec"] = trees.treespec_loads(config["data_spec"])
    loader = loaders.PyTreeLoader()
    loader.setup(config, chunks, serializers)
    if hasattr(loader, "set_mmap_allowed_chunks"):
        loader.set_mmap_allowed_chunks(set(range(len(chunks))))

    def items():
        begin = 0
        for number, chunk in enumerate(chunks):
            name = os.path.join(path, chunk["filename"])
            for i in range(begin, begin + chunk["chunk_size"]):
                yield loader.load_item_from_chunk(i, number, name, begin, chunk["chunk_bytes"])
            begin += chunk["chunk_size"]

    return Again(items)


def lit_data_reader(path, mmap=False):
    from fastckpt.data import LitDataReader

    return LitDataReader(path, mmap)


class Again:
    """What can be gone through more than once."""

    def __init__(self, begin):
        self.begin = begin

    def __iter__(self):
        return self.begin()


def map_again(function, values):
    return Again(lambda: map(function, values))


def drainer(samples):
    def drain():
        for _ in samples:
            pass

    return drain


KINDS = {
    "scalars": (["int", "int", "float", "float"], "<4I2q2d"),
    "mixed": (["int", "int", "no_header_tensor:1", "tensor"], "<4I2q16f>4I<16f"),
}


def litdata_folder(folder, kind):
    """A data set as LitData writes it where pyarrow is not installed; made if it is not there."""
    folder = os.path.join(folder, kind)
    if os.path.exists(os.path.join(folder, "index.json")):
        return folder
    os.makedirs(folder, exist_ok=True)
    formats, chunks = KINDS[kind][0], []
    for first in range(0, LITDATA_ITEMS, CHUNK_ITEMS):
        items = [
            litdata_item(kind, i) for i in range(first, min(first + CHUNK_ITEMS, LITDATA_ITEMS))
        ]
        ends = np.cumsum([4 + 4 * (len(items) + 1), *map(len, items)], dtype="<u4")
        data = struct.pack("<I", len(items)) + ends.tobytes() + b"".join(items)
        name = f"chunk-0-{len(chunks)}.bin"
        with open(os.path.join(folder, name), "wb") as f:
            f.write(data)
        chunks.append(
            {"filename": name, "chunk_bytes": len(data), "chunk_size": len(items), "dim": None}
        )
    leaf = {"type": None, "context": None, "children_spec": []}
    keys = json.dumps(list("abcd"))
    spec = {"type": "builtins.dict", "context": keys, "children_spec": [leaf] * 4}
    config = dict.fromkeys(["chunk_size", "compression", "encryption"])
    config |= {"chunk_bytes": 1 << 26, "item_loader": "PyTreeLoader"}
    config |= {"data_format": formats, "data_spec": json.dumps([1, spec])}
    with open(os.path.join(folder, "index.json"), "w") as f:
        json.dump({"chunks": chunks, "config": config, "updated_at": "0"}, f)
    return folder


def litdata_item(kind, i):
    numbers = struct.pack("<2q", i, -i)
    if kind == "scalars":
        return struct.pack("<4I", 8, 8, 8, 8) + numbers + struct.pack("<2d", i / 2, 1)
    elements = np.full(16, i, "<f4").tobytes()
    header = struct.pack(">4I", 1, 2, 4, 4)  # float32, two axes of four
    return struct.pack("<4I", 8, 8, 64, 80) + numbers + elements + header + elements


# ---- Zarr


class ZarrShuffled(Measured):
    """Graphs in random order: a request for 1,024 samples, what a loader with batches of 64 and fuse=16 asks for at once."""

    repeat = (3, 10, 2.0)
    rounds = 1
    params = [
        ["zarr", "nvalchemi", "fastckpt", "fastckpt, cache_bytes=0", "fastckpt, read_batch", "fastckpt, DataLoader"]
    ]  # fmt: skip
    param_names = ["reader"]

    def setup_cache(self):
        if optional("zarr"):
            graphs(os.getcwd())
        return os.getcwd()

    def setup(self, folder, reader):
        needed("zarr")
        path = graphs(folder)
        order = np.random.default_rng(1).permutation(GRAPHS)[: BATCH * FUSE].tolist()
        if self.call is None:
            self.call = getattr(self, SHUFFLED[reader])(path, order)
            self.call()
        self.prepare(self.call)

    def time_shuffled_graphs(self, folder, reader):
        self.measure()

    def zarr_itself(self, path, order):
        """All rows of a field in one selection, in ascending order, cut up again."""
        group = needed("zarr").open_group(path, mode="r")
        bounds = {level: group[f"meta/{level}s_ptr"][:] for level in ("atom", "edge")}
        fields = group.attrs["fields"]["core"]
        arrays = {
            name: (group[f"core/{name}"], bounds.get(level)) for name, level in fields.items()
        }
        ascending = np.sort(order)

        def column(array, ptr):
            if ptr is None:
                return list(array.oindex[ascending])
            begins, ends = ptr[ascending], ptr[ascending + 1]
            rows = [np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)]
            return np.split(array.oindex[np.concatenate(rows)], np.cumsum(ends - begins)[:-1])

        def read():
            columns = [column(*array) for array in arrays.values()]
            samples = [dict(zip(arrays, row, strict=True)) for row in zip(*columns, strict=True)]
            places = np.argsort(np.argsort(order)).tolist()
            return [samples[place] for place in places]

        return read

    def nvalchemi(self, path, order):
        backend = needed("nvalchemi.data.datapipes.backends.zarr")
        reader = backend.AtomicDataZarrReader(path)
        return lambda: reader.read_many(order)

    def ours(self, path, order):
        reader = zarr_reader(path)
        return lambda: reader.read_many(order)

    def ours_uncached(self, path, order):
        reader = zarr_reader(path, cache_bytes=0)
        return lambda: reader.read_many(order)

    def ours_stacked(self, path, order):
        reader = zarr_reader(path)
        return lambda: [
            reader.read_batch(order[i : i + BATCH]) for i in range(0, len(order), BATCH)
        ]

    def ours_loaded(self, path, order):
        reader = zarr_reader(path)
        options = {"batch_size": BATCH, "sampler": order, "fuse": FUSE}
        return lambda: epoch("fastckpt", reader, **options)


SHUFFLED = {
    "zarr": "zarr_itself",
    "nvalchemi": "nvalchemi",
    "fastckpt": "ours",
    "fastckpt, cache_bytes=0": "ours_uncached",
    "fastckpt, read_batch": "ours_stacked",
    "fastckpt, DataLoader": "ours_loaded",
}


def zarr_reader(path, **options):
    from fastckpt.data import ZarrReader

    return ZarrReader(path, **options)


def graphs(folder):
    """A store of graphs of 20 to 60 atoms, laid out as nvalchemi's writer does it; made if it is not there."""
    path = os.path.join(folder, "graphs.zarr")
    if os.path.exists(path):
        return path
    group = needed("zarr").open_group(path, mode="w")
    rng = np.random.default_rng(0)
    atoms = rng.integers(20, 61, GRAPHS)
    edges = atoms * 6
    first_atom, first_edge = (np.concatenate([[0], np.cumsum(n)]) for n in (atoms, edges))

    def put(name, values):
        group.create_array(name, data=values, chunks=(GRAPH_CHUNK, *values.shape[1:]))

    put("meta/atoms_ptr", first_atom)
    put("meta/edges_ptr", first_edge)
    for name, count in (("samples", GRAPHS), ("atoms", first_atom[-1]), ("edges", first_edge[-1])):
        put(f"meta/{name}_mask", np.ones(count, bool))
    ends = [
        rng.integers(0, n, (m, 2)) + begin
        for n, m, begin in zip(atoms, edges, first_atom, strict=False)
    ]
    fields = {
        "atomic_numbers": ("atom", rng.integers(1, 90, first_atom[-1])),
        "positions": ("atom", rng.random((first_atom[-1], 3), dtype="f4")),
        "forces": ("atom", rng.random((first_atom[-1], 3), dtype="f4")),
        "neighbor_list": ("edge", np.concatenate(ends)),
        "cell": ("system", rng.random((GRAPHS, 3, 3), dtype="f4")),
        "pbc": ("system", np.ones((GRAPHS, 3), bool)),
        "energy": ("system", rng.random((GRAPHS, 1), dtype="f4")),
    }
    for name, (_, values) in fields.items():
        put(f"core/{name}", values)
    group.create_group("custom")
    levels = {name: level for name, (level, _) in fields.items()}
    group.attrs.update({"num_samples": GRAPHS, "fields": {"core": levels, "custom": {}}})
    return path
