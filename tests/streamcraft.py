"""Write legacy streams and tar checkpoints by hand, each part changeable, so that tests can say exactly what is in one.

An object is plain Python with stand-ins in it: Name (a class or function that the pickle names), Call (a call of one)
and Pid (a persistent id). ``legacy_stream`` and ``tar_checkpoint`` make files; their defaults make good ones.
"""

import dataclasses
import io
import pickle
import struct
import tarfile

MAGIC = 0x1950A86A20F9469CFC6C
SYS_INFO = {
    "protocol_version": 1001,
    "little_endian": True,
    "type_sizes": {"short": 2, "int": 4, "long": 4},
}


@dataclasses.dataclass(frozen=True)
class Name:
    """A class or function, by the names that the pickle has for it."""

    module: str
    name: str


@dataclasses.dataclass(eq=False)
class Call:
    """What ``function(*args)`` gives, and then the state that BUILD gives it."""

    function: Name
    args: tuple = ()
    state: object = None


@dataclasses.dataclass
class Pid:
    """A persistent id."""

    value: object


class Pickler(pickle._Pickler):
    """Writes the stand-ins; ``python2`` writes text as Python 2 wrote its str."""

    dispatch = dict(pickle._Pickler.dispatch)  # noqa: RUF012

    def __init__(self, file, protocol, python2=False):
        super().__init__(file, protocol)
        self.python2 = python2

    def persistent_id(self, obj):
        return obj.value if isinstance(obj, Pid) else None

    def save_pers(self, pid):
        self.save(
            pid, save_persistent_id=False
        )  # also under protocol 0, whose own form has no tuples
        self.write(pickle.BINPERSID)

    def save_name(self, obj):
        self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())

    def save_call(self, obj):
        self.save(obj.function)
        self.save(tuple(obj.args))
        self.write(pickle.REDUCE)
        self.memoize(obj)
        if obj.state is not None:
            self.save(obj.state)
            self.write(pickle.BUILD)

    def save_text(self, obj):
        if not self.python2:
            return self.save_str(obj)
        data = obj.encode("latin-1")
        short = len(data) < 256
        return self.write(
            (b"U" + bytes([len(data)]) if short else b"T" + struct.pack("<i", len(data))) + data
        )

    dispatch[Name] = save_name
    dispatch[Call] = save_call
    dispatch[str] = save_text


def pickled(obj, protocol=2, python2=False):
    out = io.BytesIO()
    Pickler(out, protocol, python2).dump(obj)
    return out.getvalue()


# -- what objects consist of


def storage(key, count, cls="FloatStorage", location="cpu", view=None):
    """A legacy storage; ``view`` is (key of the view, offset, count) in elements."""
    module = "torch.storage" if cls == "UntypedStorage" else "torch"
    return Pid(("storage", Name(module, cls), key, location, count, view))


def tensor(storage, shape, stride=None, offset=0, requires_grad=False):
    """A tensor of ``_rebuild_tensor_v2``, contiguous unless a stride is given."""
    hooks = Call(Name("collections", "OrderedDict"))
    args = (storage, offset, tuple(shape), tuple(stride or contiguous(shape)), requires_grad, hooks)
    return Call(Name("torch._utils", "_rebuild_tensor_v2"), args)


def contiguous(shape):
    stride, step = [], 1
    for size in reversed(shape):
        stride.insert(0, step)
        step *= max(size, 1)
    return tuple(stride)


def floats(*values):
    return struct.pack(f"<{len(values)}f", *values)


# -- files


def legacy_stream(
    obj,
    storages,
    *,
    protocol=2,
    python2=False,
    magic=MAGIC,
    version=1001,
    sys_info=SYS_INFO,
    keys=...,
    counts=None,
    behind=b"",
):
    """A legacy stream. ``storages``: key -> (count, bytes); ``keys`` and ``counts`` (by key) say something else."""
    parts = [pickled(part, protocol, python2) for part in (magic, version, sys_info, obj)]
    keys = sorted(storages, key=str) if keys is ... else keys
    parts.append(pickled(keys, protocol, python2))
    for key in keys if isinstance(keys, list) else ():
        count, data = storages[key] if isinstance(key, (str, int)) and key in storages else (0, b"")
        count = counts.get(key, count) if counts else count
        parts.append(struct.pack("<q", count) + data)
    return b"".join(parts) + behind


def tar_checkpoint(
    obj,
    tensors,
    storages,
    views=(),
    *,
    protocol=2,
    python2=False,
    form=tarfile.PAX_FORMAT,
    order=("sys_info", "pickle", "tensors", "storages"),
    counts=None,
    members=None,
):
    """A tar checkpoint.

    ``tensors``: (key, storage key, shape, stride, offset), or bytes as they stand; ``storages``: (key, class, bytes,
    count[, location]), or bytes; ``views``: (key, root key, offset, count); ``counts``: of tensors and storages where
    they are said to be others; ``members`` replaces what is made of all that, and adds to it.
    """
    counts = {"tensors": len(tensors), "storages": len(storages)} | (counts or {})
    content = {
        "sys_info": pickled({**SYS_INFO, "protocol_version": 1000}, protocol, python2),
        "pickle": pickled(obj, protocol, python2),
        "tensors": b"".join(
            [
                pickled(counts["tensors"], protocol),
                *(
                    t if isinstance(t, bytes) else tar_tensor(*t, protocol=protocol)
                    for t in tensors
                ),
            ]
        ),
        "storages": b"".join(
            [
                pickled(counts["storages"], protocol),
                *(
                    s
                    if isinstance(s, bytes)
                    else tar_storage(*s, protocol=protocol, python2=python2)
                    for s in storages
                ),
                pickled(views if isinstance(views, Call) else list(views), protocol),
            ]
        ),
    }
    content.update(members or {})
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as packed:
        for name in order:
            info = tarfile.TarInfo(name)
            info.size = len(content[name])
            packed.addfile(info, io.BytesIO(content[name]))
    return out.getvalue()


def tar_tensor(key, storage_key, shape, stride, offset, ndim=None, protocol=2):
    described = pickled((key, storage_key, Name("torch", "FloatTensor")), protocol)
    numbers = struct.pack(
        f"<ii{len(shape)}q{len(stride)}qq",
        len(shape) if ndim is None else ndim,
        0,
        *shape,
        *stride,
        offset,
    )
    return described + numbers


def tar_storage(key, cls, data, count, location="cpu", protocol=2, python2=False):
    return (
        pickled((key, location, Name("torch", cls)), protocol, python2)
        + struct.pack("<q", count)
        + data
    )
