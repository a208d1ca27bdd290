"""Write fixtures/expected.json: what torch.load makes of each fixture, or the error that is right.

    python tests/make_expected.py

Only for fixtures that are new: the entries of others are kept, whatever the torch of today says. What torch cannot
read has a twin, a file of the same tensors that it can. Fixtures that are refused get the error that is raised now, to
be looked at before it is committed.
"""

import collections
import hashlib
import json
import pathlib
import sys
import warnings

import numpy as np
import torch

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "fixtures"
EXPECTED = FOLDER / "expected.json"

OPTIONS = {"legacy/python2_latin1.pt": {"encoding": "latin1"}}
TWINS = {
    "zip/torch_1.4_tensors_folder.pt": "zip/tensors_folder_twin.pt",
    "legacy/complex32.pt": "zip/complex32.pt",
    "legacy/float8_e5m2.pt": "zip/float8_e5m2.pt",
    "legacy/nested.pt": "zip/nested_two.pt",
    "legacy/untyped.pt": "zip/untyped.pt",
}


def walk(obj, path=(), seen=None):
    """(path, leaf) of everything that is no container, attributes of dicts and tensors among them."""
    seen = set() if seen is None else seen
    attributes = [
        (("vars", name), value) for name, value in sorted(getattr(obj, "__dict__", {}).items())
    ]
    if isinstance(obj, dict):
        members = [*obj.items(), *attributes]
    elif isinstance(obj, (list, tuple, collections.deque)) and not isinstance(obj, torch.Size):
        members = list(enumerate(obj))
    else:
        yield path, obj
        members = attributes if isinstance(obj, torch.Tensor) else []
    if id(obj) not in seen:
        seen.add(id(obj))
        for key, member in members:
            yield from walk(member, (*path, key), seen)


def spelled(path):
    """A path as JSON keeps it: keys by what they are, not only by how they read."""
    return "/".join(repr(key) for key in path)


def digest(data):
    return hashlib.sha256(data).hexdigest()[:32]


def bytes_of(tensor):
    """The elements of a plain tensor, row by row."""
    tensor = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().contiguous()
    flat = tensor.as_strided(
        (tensor.numel(),), (1,)
    )  # a single element may have kept another stride
    return flat.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


class Describe:
    """Turns leaves into plain values; storages are numbered in the order in which they occur."""

    def __init__(self):
        self.storages, self.kept = {}, []

    def __call__(self, leaf):
        if isinstance(leaf, torch.Tensor):
            return self.tensor(leaf)
        if isinstance(leaf, torch.storage.TypedStorage):
            untyped = leaf._untyped_storage
            return {"storage_of": str(leaf.dtype), **self.storage(untyped)}
        if isinstance(leaf, (np.ndarray, np.generic)):
            return {
                "numpy": leaf.dtype.str,
                "shape": list(leaf.shape),
                "sha256": digest(leaf.tobytes()),
            }
        if isinstance(leaf, (set, frozenset)):
            return {"type": type(leaf).__name__, "value": sorted(map(repr, leaf))}
        return {"type": type(leaf).__name__, "value": repr(leaf)[:200]}

    def storage(self, untyped):
        if not untyped.nbytes():
            return {"storage": None, "storage_nbytes": 0}
        self.kept.append(untyped)
        number = self.storages.setdefault(untyped._cdata, len(self.storages))
        return {"storage": number, "storage_nbytes": untyped.nbytes()}

    def tensor(self, tensor):
        found = {
            "type": type(tensor).__name__,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "layout": str(tensor.layout).removeprefix("torch."),
            "requires_grad": tensor.requires_grad,
        }
        if tensor.is_nested:
            parts = [part.contiguous() for part in tensor.detach().unbind()]
            return found | {
                "nested": [[list(part.shape), digest(bytes_of(part))] for part in parts]
            }
        found["shape"] = list(tensor.shape)
        if tensor.layout is not torch.strided:
            return found | {
                "parts": {
                    name: self.tensor(part) for name, part in sparse_parts(tensor.detach()).items()
                }
            }
        found["stride"] = list(tensor.stride())
        if tensor.is_meta:
            return found | {"device": "meta"}
        found |= self.storage(tensor.untyped_storage())
        found["offset"] = tensor.storage_offset()
        if tensor.is_quantized:
            return found | {
                "sha256": digest(bytes_of(tensor.int_repr())),
                "quantizer": quantizer(tensor),
            }
        if tensor.is_conj() or tensor.is_neg():
            found["bits"] = [name for name in ("conj", "neg") if getattr(tensor, f"is_{name}")()]
        return found | {"sha256": digest(bytes_of(tensor))}


def sparse_parts(tensor):
    if tensor.layout is torch.sparse_coo:
        return {"indices": tensor._indices(), "values": tensor._values()}
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return {
            "crow": tensor.crow_indices(),
            "col": tensor.col_indices(),
            "values": tensor.values(),
        }
    return {"ccol": tensor.ccol_indices(), "row": tensor.row_indices(), "values": tensor.values()}


def quantizer(tensor):
    if tensor.qscheme() == torch.per_tensor_affine:
        return [tensor.q_scale(), tensor.q_zero_point()]
    return [
        tensor.q_per_channel_scales().tolist(),
        tensor.q_per_channel_zero_points().tolist(),
        tensor.q_per_channel_axis(),
    ]


def described(obj):
    """{path: description} of every leaf."""
    describe = Describe()
    return {spelled(path): describe(leaf) for path, leaf in walk(obj)}


def reference(name):
    """What torch makes of a fixture, or of its twin. The files are ours: those that torch does not trust may run."""
    path, options = FOLDER / TWINS.get(name, name), OPTIONS.get(name, {})
    try:
        return torch.load(path, weights_only=True, **options)
    except Exception:
        return torch.load(path, weights_only=False, **options)


def refusal(name):
    import fastckpt

    try:
        fastckpt.load(FOLDER / name)
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}")
        return type(error).__name__
    raise SystemExit(f"{name} is not refused")


def main():
    warnings.simplefilter("ignore")
    expected = (
        json.loads(EXPECTED.read_text()) if EXPECTED.exists() and "--all" not in sys.argv else {}
    )
    names = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.glob("*/*.pt"))
    for name in names:
        if name in expected:
            continue
        expected[name] = {
            "sha256": digest((FOLDER / name).read_bytes()),
            "options": OPTIONS.get(name, {}),
        }
        if name.startswith("refused/"):
            expected[name]["refused"] = refusal(name)
        else:
            expected[name]["leaves"] = described(reference(name))
    lines = [f"{json.dumps(name)}: {json.dumps(expected[name])}" for name in names]
    EXPECTED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
