"""LitData folders written by hand, and read by a slow parser that shares nothing with the package."""

import base64
import collections
import itertools
import json
import struct

import numpy as np
import torch

TENSORS = [
    torch.float32,
    torch.float32,
    torch.float64,
    torch.float64,
    torch.complex64,
    torch.complex64,
]
TENSORS += [
    torch.complex128,
    torch.complex128,
    torch.float16,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
]
TENSORS += [
    torch.int8,
    torch.int16,
    torch.int16,
    torch.int32,
    torch.int32,
    torch.int64,
    torch.int64,
]
TENSORS += [torch.bool, torch.uint16]
ARRAYS = "i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8 c8 c16 ?".split()


def raw(tensor):
    return (
        tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    )


def number_of(tensor):
    return max(i for i, dtype in enumerate(TENSORS) if dtype == tensor.dtype)


def tensor(value):
    return struct.pack(f">II{value.ndim}I", number_of(value), value.ndim, *value.shape) + raw(
        value.reshape(-1)
    )


def array(value):
    number = next(i for i, name in enumerate(ARRAYS) if np.dtype(name) == value.dtype)
    return struct.pack(f"<II{value.ndim}I", number, value.ndim, *value.shape) + value.tobytes()


ENCODE = {
    "int": lambda value: struct.pack("<q", value),
    "float": lambda value: struct.pack("<d", value),
    "bool": lambda value: bytes([value]),
    "str": str.encode,
    "text": str.encode,
    "bytes": bytes,
    "jpeg": bytes,
    "tensor": tensor,
    "no_header_tensor": raw,
    "numpy": array,
    "no_header_numpy": lambda value: value.tobytes(),
    "json": lambda value: json.dumps(value).encode(),
    "pickle": bytes,
}


def item(formats, leaves):
    """The bytes of one item."""
    payloads = [
        ENCODE[name.partition(":")[0]](leaf) for name, leaf in zip(formats, leaves, strict=True)
    ]
    return struct.pack(f"<{len(payloads)}I", *map(len, payloads)) + b"".join(payloads)


# ---- treespecs


def spec(tree):
    """The node of a treespec: None is a leaf."""
    if tree is None:
        return {"type": None, "context": None, "children_spec": []}
    kinds = {dict: "builtins.dict", list: "builtins.list", tuple: "builtins.tuple"}
    kinds |= {
        collections.OrderedDict: "collections.OrderedDict",
        collections.deque: "collections.deque",
    }
    kinds |= {collections.defaultdict: "collections.defaultdict"}
    name, children = kinds.get(type(tree), "collections.namedtuple"), list(tree)
    context = "null"
    if isinstance(tree, dict):
        children = list(tree.values())
        context = json.dumps(list(tree))
    if type(tree) is collections.defaultdict:
        factory = tree.default_factory
        context = {
            "default_factory_module": factory.__module__,
            "default_factory_name": factory.__name__,
        }
        context["dict_context"] = list(tree)
    if type(tree) is collections.deque:
        context = json.dumps(tree.maxlen)
    if name == "collections.namedtuple":
        context = type(tree).__name__
    return {"type": name, "context": context, "children_spec": [spec(child) for child in children]}


# ---- envelopes


def classic(items):
    ends = np.cumsum([4 + 4 * (len(items) + 1), *map(len, items)])
    return struct.pack(f"<I{len(ends)}I", len(items), *ends.tolist()) + b"".join(items)


def zstd(data):
    import zstandard

    return zstandard.ZstdCompressor().compress(data)


def framed(items, rows):
    offsets = np.cumsum([0, *map(len, items)]).tolist()
    groups = [items[i : i + rows] for i in range(0, len(items), rows)]
    frames = [zstd(b"".join(group)) for group in groups]
    head = b"LDFZ01\0\0" + struct.pack("<HHIII", 1, 0, len(items), rows, len(groups))
    head += struct.pack(f"<{len(offsets)}I", *offsets)
    at, table = len(head) + 24 * len(groups), b""
    for i, (group, frame) in enumerate(zip(groups, frames, strict=True)):
        table += struct.pack("<IIQII", i * rows, len(group), at, len(frame), sum(map(len, group)))
        at += len(frame)
    return head + table + b"".join(frames)


def arrow(samples, is_file=True):
    import pyarrow as pa

    table, sink = pa.Table.from_pylist(samples), pa.BufferOutputStream()
    with (pa.ipc.new_file if is_file else pa.ipc.new_stream)(sink, table.schema) as writer:
        writer.write_table(table)
    data = sink.getvalue().to_pybytes()
    return classic([b""] * len(samples)) + data + struct.pack("<I", len(data)) + b"LDARW01\0"


KEY = base64.urlsafe_b64encode(bytes(range(32)))


def fernet(data):
    from cryptography.fernet import Fernet

    return Fernet(KEY).encrypt(data)


# how a chunk is made of its items, what it adds to the configuration, and how its file is called
ENVELOPES = {
    "classic": (classic, {}, ".bin"),
    "framed": (
        lambda items: framed(items, 3),
        {"compression": "zstd", "compression_level": "batch"},
        ".bin",
    ),
    "zstd-sample": (
        lambda items: classic([zstd(data) for data in items]),
        {"compression": "zstd:4", "compression_level": "sample"},
        ".bin",
    ),
    "zstd-chunk": (lambda items: zstd(classic(items)), {"compression": "zstd"}, ".zstd.bin"),
    "fernet-sample": (
        lambda items: classic([fernet(data) for data in items]),
        {"encryption": {"algorithm": "fernet", "level": "sample"}},
        ".bin",
    ),
    "fernet-chunk": (
        lambda items: fernet(classic(items)),
        {"encryption": {"algorithm": "fernet", "level": "chunk"}},
        ".bin",
    ),
    "fernet-in-zstd": (
        lambda items: zstd(fernet(classic(items))),
        {
            "compression": "zstd",
            "compression_level": "chunk",
            "encryption": {"algorithm": "fernet", "level": "chunk"},
        },
        ".zstd.bin",
    ),
}


def write_index(folder, chunks, formats, tree, **config):
    index = {"chunks": chunks, "updated_at": "0"}
    index["config"] = {
        "chunk_size": None,
        "compression": None,
        "data_format": list(formats),
        "data_spec": json.dumps([1, spec(tree)]),
        "encryption": None,
        "item_loader": "PyTreeLoader",
        **config,
    }
    (folder / "index.json").write_text(json.dumps(index))


def write(folder, formats, tree, rows, *, chunk=5, envelope="classic"):
    """Write leaves of ``rows`` samples, so many to a ``chunk``."""
    make, config, suffix = ENVELOPES[envelope]
    folder.mkdir(exist_ok=True)
    chunks = []
    for number, first in enumerate(range(0, len(rows), chunk)):
        items = [item(formats, leaves) for leaves in rows[first : first + chunk]]
        data, name = make(items), f"chunk-0-{number}{suffix}"
        (folder / name).write_bytes(data)
        nbytes = len(data) if suffix == ".bin" else whole_nbytes(data)
        chunks.append(
            {"filename": name, "chunk_bytes": nbytes, "chunk_size": len(items), "dim": None}
        )
    write_index(folder, chunks, formats, tree, **config)
    return folder


def whole_nbytes(data):
    import zstandard

    return zstandard.frame_content_size(data)


# ---- the slow parser


def decode(name, data):
    kind, _, number = name.partition(":")
    if kind == "int":
        return struct.unpack("<q", data)[0]
    if kind == "float":
        return struct.unpack("<d", data)[0]
    if kind == "bool":
        return data != b"\0"
    if kind in ("str", "text"):
        return data.decode()
    if kind == "json":
        return json.loads(data)
    if kind == "no_header_tensor":
        return from_raw(data, TENSORS[int(number)], [-1])
    if kind == "no_header_numpy":
        return np.frombuffer(data, ARRAYS[int(number)]).copy()
    if kind in ("tensor", "numpy"):
        order = ">" if kind == "tensor" else "<"
        number, rank = struct.unpack_from(order + "II", data)
        shape, data = struct.unpack_from(f"{order}{rank}I", data, 8), data[8 + 4 * rank :]
        if kind == "tensor":
            return from_raw(data, TENSORS[number], shape)
        return np.frombuffer(data, ARRAYS[number]).reshape(shape).copy()
    return data


def from_raw(data, dtype, shape):
    if not data:
        return torch.empty([0] if -1 in shape else shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(list(shape))


def unflatten(tree, leaves):
    if tree is None:
        return next(leaves)
    if isinstance(tree, dict):
        made = tree.copy()
        made.update((key, unflatten(child, leaves)) for key, child in tree.items())
        return made
    children = [unflatten(child, leaves) for child in tree]
    if type(tree) is collections.deque:
        return collections.deque(children, tree.maxlen)
    return type(tree)(*children) if hasattr(tree, "_fields") else type(tree)(children)


def parse_item(formats, tree, data):
    sizes = struct.unpack_from(f"<{len(formats)}I", data)
    at, leaves = 4 * len(formats), []
    for name, size in zip(formats, sizes, strict=True):
        leaves.append(decode(name, data[at : at + size]))
        at += size
    assert at == len(data)
    return unflatten(tree, iter(leaves))


def parse(folder, tree):
    """All samples of a folder in classic envelopes."""
    index = json.loads((folder / "index.json").read_bytes())
    for chunk in index["chunks"]:
        data = (folder / chunk["filename"]).read_bytes()
        (count,) = struct.unpack_from("<I", data)
        ends = struct.unpack_from(f"<{count + 1}I", data, 4)
        for begin, end in itertools.pairwise(ends):
            yield parse_item(index["config"]["data_format"], tree, data[begin:end])
