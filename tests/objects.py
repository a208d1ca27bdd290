"""Hypothesis strategies for the objects that people hand to torch.save, and ways to save them."""

import collections
import datetime
import decimal
import io
import pathlib
import random
import warnings

import torch
from hypothesis import strategies as st
from torch import nn

TYPED = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex128 complex64".split()
UNTYPED = (
    "float8_e5m2 float8_e4m3fn float8_e5m2fnuz float8_e4m3fnuz float8_e8m0fnu float4_e2m1fn_x2 "
    "bits8 bits16 bits1x8 bits2x4 bits4x2 complex32 uint16 uint32 uint64"
).split()
QUANTIZED = "qint8 quint8 qint32".split()


def can_save(name):
    """Whether this torch has a dtype, and can save it: 2.4 cannot save all that it has."""
    try:
        with warnings.catch_warnings(action="ignore"):
            saved(torch.empty(0, dtype=getattr(torch, name)))
    except (AttributeError, KeyError):
        return False
    return True


def saved(obj, *, legacy=False, protocol=2):
    """The bytes that torch.save writes."""
    file = io.BytesIO()
    torch.save(obj, file, pickle_protocol=protocol, _use_new_zipfile_serialization=not legacy)
    return file.getvalue()


def torch_loads(data, *args, **options):
    """What torch.load gives."""
    return torch.load(io.BytesIO(data), *args, **{"weights_only": False, **options})


DENSE = [name for name in TYPED + UNTYPED if can_save(name)]


def random_storage(dtype, numel, seed):
    """A storage of any bits that a dtype can have."""
    data = random.Random(seed).randbytes(numel * dtype.itemsize)
    if dtype is torch.bool:
        data = bytes(byte & 1 for byte in data)
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8).untyped_storage()
        if data
        else torch.UntypedStorage(0)
    )


def view(storage, dtype, offset, shape, stride):
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


class Pool:
    """Storages of one object: tensors of one dtype may share one, as torch.save allows no two dtypes over one memory."""

    def __init__(self, draw):
        self.draw, self.storages = draw, {}

    def storage(self, dtype):
        numel = self.draw(st.sampled_from([0, 1, 5, 64, 200, 3000]))
        which = self.draw(st.integers(0, 2))
        known = self.storages.setdefault(dtype, {})
        if which not in known:
            known[which] = random_storage(dtype, numel, self.draw(st.integers(0, 99)))
        return known[which]

    def strided(self, dtype):
        """A tensor that lies in its storage in any way that torch allows."""
        storage = self.storage(dtype)
        room = storage.nbytes() // dtype.itemsize
        shape, stride, last = [], [], 0
        offset = self.draw(st.integers(0, min(room, 7)))
        for _ in range(self.draw(st.integers(0, 4))):
            step = self.draw(st.sampled_from([0, 1, 1, 2, 3, 4, 12, 24]))
            most = 6 if not step else max(1, (room - offset - last - 1) // step + 1)
            size = self.draw(st.integers(0, min(6, most)))
            shape.append(size)
            stride.append(step)
            last += max(0, size - 1) * step
        if 0 not in shape and offset + last >= room:
            return view(storage, dtype, offset, [0, *shape], [1, *stride])
        return view(storage, dtype, offset, shape, stride)


def real(draw, pool):
    return pool.strided(getattr(torch, draw(st.sampled_from(DENSE))))


def with_bits(draw, pool):
    """A lazily conjugated or negated view."""
    tensor = pool.strided(
        getattr(torch, draw(st.sampled_from(["complex64", "complex128", "float32", "int16"])))
    )
    if tensor.dtype.is_complex and draw(st.booleans()):
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if draw(st.booleans()) else tensor


def wants_gradient(draw, pool):
    names = ["float32", "float64", "bfloat16", "float16", "complex64"]
    tensor = pool.strided(getattr(torch, draw(st.sampled_from(names))))
    return tensor.requires_grad_()


def parameter(draw, pool):
    tensor = pool.strided(getattr(torch, draw(st.sampled_from(["float32", "bfloat16", "float64"]))))
    made = nn.Parameter(tensor, requires_grad=draw(st.booleans()))
    if draw(st.booleans()):
        made.tag, made.parts = draw(st.text(max_size=5)), [1, pool.strided(torch.float32)]
    return made


def attributed(draw, pool):
    tensor = pool.strided(torch.float32)
    tensor.origin = {"step": draw(st.integers()), "other": pool.strided(torch.int64)}
    return tensor


def layout(draw, pool):
    """A dense tensor of a common make: contiguous, transposed, channels last, expanded."""
    dtype = getattr(torch, draw(st.sampled_from(TYPED)))
    tensor = view(random_storage(dtype, 2 * 3 * 4 * 5, 1), dtype, 0, (2, 3, 4, 5), (60, 20, 5, 1))
    how = draw(
        st.sampled_from(["contiguous", "transposed", "channels_last", "expanded", "diagonal"])
    )
    if how == "transposed":
        return tensor.transpose(1, 3)
    if how == "channels_last":
        return tensor.contiguous(memory_format=torch.channels_last)
    if how == "expanded":
        return tensor[:, :1].expand(2, 7, 4, 5)
    return tensor.diagonal(dim1=1, dim2=2) if how == "diagonal" else tensor


def sparse(draw, pool):
    dtype = getattr(
        torch,
        draw(st.sampled_from(["float32", "float64", "int64", "complex64", "bool", "bfloat16"])),
    )
    numbers = random.Random(draw(st.integers(0, 99)))
    shape = draw(st.sampled_from([(4, 6), (8, 2), (2, 4, 4), (0, 4), (6, 6)]))
    numel = torch.Size(shape).numel()
    dense = (
        torch.tensor([numbers.choice([0, 0, 1, 3]) for _ in range(numel)]).reshape(shape).to(dtype)
    )
    how = draw(st.sampled_from(["coo", "uncoalesced", "hybrid", "csr", "csc", "bsr", "bsc"]))
    if how == "coo" or not numel:
        return dense.to_sparse()
    if how == "hybrid":
        return dense.to_sparse(1)
    if how == "uncoalesced":
        indices = torch.tensor([[1, 1, 0], [0, 0, 1]])
        return torch.sparse_coo_tensor(indices, torch.ones(3, dtype=dtype), (4, 6))
    if len(shape) == 3:  # a batch needs as many values in each part
        dense = torch.ones(shape).to(dtype)
    return getattr(dense, f"to_sparse_{how}")(*[(2, 2)] if how in ("bsr", "bsc") else [])


def quantized(draw, pool):
    dtype = getattr(torch, draw(st.sampled_from(QUANTIZED)))
    tensor = torch.linspace(-3, 3, 24).reshape(2, 3, 4)
    if draw(st.booleans()):
        made = torch.quantize_per_tensor(
            tensor, draw(st.floats(0.01, 2)), draw(st.integers(0, 100)), dtype
        )
        return made.transpose(0, 2) if draw(st.booleans()) else made
    axis = draw(st.integers(0, 2))
    scales = torch.linspace(0.1, 1, tensor.shape[axis], dtype=torch.float64)
    return torch.quantize_per_channel(tensor, scales, torch.arange(tensor.shape[axis]), axis, dtype)


def nested(draw, pool):
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    return torch.nested.nested_tensor([torch.arange(3.0 * n).reshape(n, 3) for n in sizes])


def meta(draw, pool):
    return torch.empty_strided((2, 3), draw(st.sampled_from([(3, 1), (1, 2)])), device="meta")


def storage(draw, pool):
    dtype = getattr(torch, draw(st.sampled_from(TYPED)))
    untyped = random_storage(dtype, draw(st.sampled_from([0, 3, 100])), 5)
    if draw(st.booleans()):
        return untyped
    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


KINDS = [
    real, real, real, layout, layout, with_bits, wants_gradient, parameter, attributed, sparse, quantized, nested, meta, storage,
]  # fmt: skip

NUMBERS = st.one_of(
    st.integers(),
    st.integers(-300, 300),
    st.integers(-(2**3000), 2**3000),
    st.sampled_from([2**31, -(2**31) - 1, 2**63, -(2**63), 255, 256, 65535, 65536]),
    st.floats(),
    st.booleans(),
    st.complex_numbers(),
)
TEXT = st.one_of(st.text(max_size=9), st.sampled_from(["", "x" * 300, "\ud800", "grüße", "a\nb"]))
HASHABLE = st.one_of(
    st.integers(), TEXT, st.binary(max_size=9), st.none(), st.tuples(st.integers(), TEXT)
)
PLAIN = st.one_of(
    st.none(),
    NUMBERS,
    TEXT,
    st.binary(max_size=300),
    st.binary(max_size=9).map(bytearray),
    st.sets(HASHABLE, max_size=4),
    st.frozensets(HASHABLE, max_size=4),
    st.builds(range, st.integers(-9, 9), st.integers(-9, 9)),
    st.builds(slice, st.none(), st.integers(), st.none()),
    st.datetimes(),
    st.timedeltas(),
    st.decimals(allow_nan=False),
    st.just(datetime.UTC),
    st.just(pathlib.PurePosixPath("/a/b")),
    st.just(decimal.Decimal("1e-999")),
    st.uuids(),
    st.sampled_from(
        [torch.float32, torch.bfloat16, torch.Size([2, 3]), torch.Size([]), torch.device("cuda", 1)]
    ),
    st.sampled_from([torch.strided, torch.sparse_csr, torch.per_tensor_affine]),
)


@st.composite
def saved_objects(draw):
    """Nested objects with tensors of every kind, of which some share their storage, and some containers occur twice."""
    pool = Pool(draw)
    leaf = st.booleans().flatmap(lambda tensor: st.sampled_from(KINDS) if tensor else PLAIN)

    def container(inner):
        items = st.lists(inner, min_size=1, max_size=5)
        pairs = st.lists(st.tuples(HASHABLE, inner), min_size=1, max_size=5)
        return st.one_of(
            items,
            items.map(tuple),
            pairs.map(dict),
            pairs.map(collections.OrderedDict),
            items.map(collections.deque),
            pairs.map(lambda found: collections.defaultdict(list, found)),
        )

    shape = draw(st.recursive(leaf, container, max_leaves=12))
    made = materialized(shape, draw, pool)
    if draw(st.booleans()):
        made = {"first": made, "again": made, "cycle": []}
        made["cycle"].append(made["cycle"])
    if draw(st.booleans()):
        made = collections.OrderedDict(state=made)
        made._metadata = collections.OrderedDict(version=1)
    return made


def materialized(shape, draw, pool):
    """The shape with each maker of a tensor replaced by a tensor."""
    if callable(shape):
        return shape(draw, pool)
    if isinstance(shape, torch.Size):
        return shape
    if isinstance(shape, (list, tuple, collections.deque)):
        return type(shape)(materialized(member, draw, pool) for member in shape)
    if isinstance(shape, dict):
        for key, value in shape.items():
            shape[key] = materialized(value, draw, pool)
    return shape


def one_of_each():
    """A dict of a tensor of every kind, by a short name, and some text."""
    shared = torch.arange(24.0)
    return {
        "weight": torch.randn(300, 5),
        "views": [shared[3:], shared.view(4, 6).t(), shared[:2].expand(3, 2)],
        "parameter": nn.Parameter(torch.ones(2)),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "conj": torch.view_as_complex(torch.randn(3, 2)).conj(),
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.5, 1, torch.qint8),
        "channels": torch.quantize_per_channel(
            torch.ones(3, 2), torch.ones(3), torch.zeros(3), 0, torch.quint8
        ),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(5),
        "meta": torch.empty(2, 3, device="meta"),
        "storage": torch.ones(2).storage(),
        "integers": torch.arange(5, dtype=torch.int32),
        "text": "text",
    }


class Dripping(io.RawIOBase):
    """A seekable file of our own that gives a few bytes at a time."""

    def __init__(self, data):
        self.file = io.BytesIO(data)

    def readable(self):
        return True

    def seekable(self):
        return True

    def seek(self, *args):
        return self.file.seek(*args)

    def tell(self):
        return self.file.tell()

    def readinto(self, view):
        return self.file.readinto(memoryview(view)[:1000])
