"""weights_only=False: Python's own unpickler over our storages. The file can run any code; only for files you trust.

The storages are found with the data-only machine, read in parallel and verified like any others; then the pickle is run.
"""

import contextlib
import io
import pickle

from .dtypes import CODE_BY_STORAGE, UINT8
from .errors import FormatError, UnsupportedError, short
from .needs_torch import torch
from .torch_tensors import torch_dtype

RENAMED_MODULES = {"torch.tensor": "torch._tensor"}  # torch 1.7 wrote the first


@contextlib.contextmanager
def mapped_as(map_location):
    """What rebuild functions of torch's ask for while it loads: where tensors of their own device should go."""
    tls = getattr(torch.serialization, "_serialization_tls", None)
    before = getattr(tls, "map_location", None)
    if tls is not None:
        tls.map_location = map_location
    try:
        yield
    finally:
        if tls is not None:
            tls.map_location = before


def unpickle_trusted(reader, keys, pickle_module, map_location, **options):
    """Run the pickle of ``reader``'s checkpoint with ``pickle_module`` (None: pickle)."""

    if keys is not None:
        raise TypeError("keys= needs weights_only=True: the pickle is run as a whole otherwise")
    contents = reader.contents
    if contents.kind == "zip" and contents.archive.is_torchscript:
        raise UnsupportedError(
            f"{contents.source.name}: a TorchScript archive, of which torch.jit.load makes a module; its tensors can be read "
            f"with weights_only=True and unknown='opaque'",
            path=contents.source.name,
        )
    unpickled = contents.unpickled
    bridge = reader.bridge(unpickled.storages)
    by_key = {spec.key: spec for spec in unpickled.storages if spec.root is None}
    made = {}  # what occurs twice is one object

    def typed(spec, cls):
        dtype = torch_dtype(CODE_BY_STORAGE.get(cls.__name__, UINT8))  # an UntypedStorage has bytes
        if (spec.index, dtype) not in made:
            storage = torch.storage.TypedStorage(
                wrap_storage=bridge.untyped(spec), dtype=dtype, _internal=True
            )
            made[spec.index, dtype] = storage
        return made[spec.index, dtype]

    def storage(pid):
        _, cls, key, _, _, *view = pid
        key = key.decode("latin-1") if isinstance(key, bytes) else str(key)
        spec = by_key[key]
        if view and view[0] is not None:
            view_key = str(view[0][0])
            spec = next(s for s in unpickled.storages if s.root is not None and s.key == view_key)
        return typed(spec, cls)

    def numbered(pid):
        found = contents.objects[int(pid)]
        return bridge.tensor(found) if hasattr(found, "shape") else bridge.storage(found)

    class Unpickler((pickle_module or pickle).Unpickler):
        def find_class(self, module, name):
            return super().find_class(RENAMED_MODULES.get(module, module), name)

        def persistent_load(self, pid):
            if contents.kind == "tar":
                return (
                    pid[0] if isinstance(pid, tuple) else made.setdefault(int(pid), numbered(pid))
                )
            if pid[0] in ("storage", b"storage"):
                return storage(pid)
            if pid[0] in ("module", b"module"):
                return pid[1]
            raise FormatError(f"{contents.source.name}: a persistent id is {short(pid)}")

    with mapped_as(map_location):
        return Unpickler(io.BytesIO(contents.pickle_bytes()), **options).load()
