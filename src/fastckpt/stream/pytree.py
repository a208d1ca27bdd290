"""The first streams of torchft's checkpoints: a length, a pickle of (leaves, treespec), the storage of each tensor.

The peer's classes go by the names TensorMetadata (of whichever module wrote it), TreeSpec and LeafSpec. They stay inert
here; the tree is put together from what they say.
"""

import collections
import functools

import numpy as np

from .._pickler import dump
from .._spec import Global, storage_spec, tensor_spec
from .._unpickler import unpickle
from ..dtypes import CODE_BY_NAME, QUANTIZED
from ..errors import FormatError, LimitError, UnsupportedError
from ..importing import importing
from ..nodes import MISSING, Opaque, TensorNode, short
from ..python_rows import FACTORIES
from ..refusal import unsafe_name
from ..stand_ins import refusing
from .contents import Contents, bounded, error
from .layout import Layout
from .sending import Outgoing

LENGTH_NBYTES = 8
SPECS = ("torch.utils._pytree.TreeSpec", "torch.utils._pytree.LeafSpec")
ATOMS = (str, int, float, bool, bytes, type(None))


# -- out


class TensorMetadata:
    """What is said of a tensor; pickled as the class of this name in the peer's main module."""

    def __init__(self, nbytes, dtype, storage_offset, size, stride):
        self.nbytes, self.dtype = nbytes, dtype
        self.storage_offset, self.size, self.stride = storage_offset, size, stride


PEERS_NAME = {TensorMetadata: ("__main__", "TensorMetadata")}


def write(obj, *, pickle_protocol=2, **_):
    """What is Outgoing for an object.

    Raises UnsupportedError for tensors that are more than strided memory.
    """
    with importing:
        from torch.utils._pytree import tree_flatten

    with importing:
        from ..blocks import Block
        from ..needs_torch import torch

    leaves, treespec = tree_flatten(obj)
    storages, address, blocks = [], [], {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            check_plain(i, leaf)
            storage = leaf.untyped_storage()
            if not leaf.is_cpu:
                blocks[len(storages)] = Block(storage, leaf.dtype)
            address.append(storage.data_ptr() if leaf.is_cpu else 0)
            storages.append(storage)
            leaves[i] = TensorMetadata(
                storage.nbytes(), leaf.dtype, leaf.storage_offset(), leaf.size(), leaf.stride()
            )
        elif is_storage(leaf):
            raise unfit(i, "a bare storage")
    pickled = dump(
        (leaves, treespec),
        pickle_protocol,
        refusing(leaves),
        refusing_tensors(leaves, treespec),
        PEERS_NAME,
    )
    head = len(pickled).to_bytes(LENGTH_NBYTES, "little", signed=True) + pickled
    layout = Layout([storage.nbytes() for storage in storages])
    return Outgoing(head, np.array(address, dtype=np.int64), layout, blocks, storages)


def refusing_tensors(leaves, treespec):
    """What refuses, as the ``persistent_id`` of a Pickler, tensors that are no leaves: they would go as code, which nobody reads."""
    with importing:
        from ..needs_torch import torch

    numbers = {id(leaf): i for i, leaf in enumerate(leaves)}
    inside = None

    def refuse(value):
        nonlocal inside
        if value is treespec or id(value) in numbers:
            inside = numbers.get(id(value))
        if not isinstance(value, torch.Tensor) and not is_storage(value):
            return
        if inside is None:
            raise UnsupportedError(
                "the keys or the context of a container hold a tensor, which this format has no words for; "
                "format='native' and 'torch' have"
            )
        raise unfit(inside, f"a {type(leaves[inside]).__name__} that holds a tensor")

    return refuse


def is_storage(value):
    with importing:
        from ..needs_torch import torch

    return torch.is_storage(value) or isinstance(value, torch.storage.TypedStorage)


def check_plain(i, tensor):
    with importing:
        from ..describing import is_quantized
        from ..torch_tensors import PLAIN_TENSORS

    plain = type(tensor) in PLAIN_TENSORS and str(tensor.layout) == "torch.strided"
    if not plain or tensor.is_nested or tensor.is_meta or is_quantized(tensor.dtype):
        found = (
            f"a {type(tensor).__name__} of {tensor.dtype} and {tensor.layout} on {tensor.device}"
        )
    elif tensor.is_conj() or tensor.is_neg():
        found = "a conjugated or negated view"
    else:
        return
    raise unfit(i, found)


def unfit(i, found):
    return UnsupportedError(
        f"leaf {i} is {found}, which this format has no words for; format='native' and 'torch' have"
    )


# -- in


def read(inlet, begin, limits):
    """Contents of a stream that begins with the bytes ``begin``, its length. It is always read as data alone."""
    nbytes = int.from_bytes(begin[:LENGTH_NBYTES], "little", signed=True)
    bounded(inlet, nbytes, "the pickle", limits)
    offset = inlet.position
    pickled = inlet.read(nbytes, "the pickle")
    where = f"{inlet.name}: the pickle"
    unpickled = unpickle(pickled, where=where, offset=offset, limits=limits)
    if not isinstance(unpickled.obj, tuple) or len(unpickled.obj) != 2:
        raise error(inlet, f"the pickle is {short(unpickled.obj)}, (leaves, treespec) is expected")
    leaves, treespec = unpickled.obj
    if not isinstance(leaves, list):
        raise error(inlet, f"the leaves are {short(leaves)}, a list is expected")
    storages, tensors = [], []
    try:
        check_repeated(leaves)
        leaves = [resolved(leaf, storages, tensors) for leaf in leaves]
        unpickled.obj = Unflattening(leaves, nbytes, f"{where}: ").whole(treespec)
    except RecursionError:
        raise error(inlet, "the treespec nests too deep", LimitError) from None
    except (FormatError, LimitError, UnsupportedError) as problem:
        raise error(inlet, str(problem), type(problem)) from None
    unpickled.storages, unpickled.tensors = storages, tensors
    unpickled.unknown = [each for each in unpickled.unknown if not is_ours(each[0])]
    if sum([storage.nbytes for storage in storages]) > 1 << 62:
        raise error(inlet, "its tensors have sizes that cannot be")
    layout = Layout([storage.nbytes for storage in storages])
    names = [storage.key for storage in storages]
    rows = {key: row for row, key in enumerate(names)}
    contents = Contents(inlet, unpickled, pickled, names, rows, layout, "little")
    contents.always_data = True
    return contents


def check_repeated(leaves):
    """No tensor's metadata stand among the leaves twice: they take two bytes then, and would make a storage and a tensor each time."""
    described = [leaf for leaf in leaves if is_metadata(leaf)]
    distinct = min(
        len({id(leaf) for leaf in described}), len({id(leaf.state) for leaf in described})
    )
    if distinct < len(described):
        raise FormatError(
            "a tensor stands twice among the leaves; a description of its own is expected for each"
        )


def is_ours(qualname):
    return qualname in SPECS or qualname.rpartition(".")[2] == TensorMetadata.__name__


def is_metadata(leaf):
    return isinstance(leaf, Opaque) and leaf.qualname.rpartition(".")[2] == TensorMetadata.__name__


def resolved(leaf, storages, tensors):
    """A TensorSpec, in a storage of its own, for the metadata of a tensor; any other leaf as it is."""
    if not is_metadata(leaf):
        return leaf
    said = leaf.state if type(leaf.state) is dict else {}
    nbytes, dtype, size = said.get("nbytes"), said.get("dtype"), said.get("size")
    code = None
    if isinstance(dtype, Global) and dtype.module == "torch":
        code = CODE_BY_NAME.get(dtype.name)
    if code is None or code in QUANTIZED or type(nbytes) is not int or not 0 <= nbytes < 1 << 62:
        raise FormatError(
            f"a tensor is {short(nbytes)} bytes of {short(dtype)}; a size and a plain dtype are expected"
        )
    if isinstance(size, TensorNode) and size.kind == "size":
        size = size.args[0]
    stride = said.get("stride")
    if not isinstance(size, (tuple, list)) or not isinstance(stride, (tuple, list)):
        raise FormatError(
            f"a tensor's size and stride are {short(size)} and {short(stride)}, tuples are expected"
        )
    key, index = str(len(storages)), len(storages)
    ref = storage_spec(key, code, nbytes, "cpu", index)
    storages.append(ref.storage)
    tensor = tensor_spec(ref, code, said.get("storage_offset"), size, stride, len(tensors))
    tensors.append(tensor)
    return tensor


class Unflattening:
    """Puts leaves together as a treespec says. ``most_visits``: each part of an honest one takes a byte or more."""

    def __init__(self, leaves, most_visits, where):
        self.leaves, self.visits_left, self.where, self.used = leaves, most_visits, where, 0

    def whole(self, treespec):
        result = self.build(treespec)
        if self.used != len(self.leaves):
            raise FormatError(
                f"there are {len(self.leaves)} leaves, and the treespec has {self.used}"
            )
        return result

    def build(self, spec):
        self.visits_left -= 1
        if self.visits_left < 0:
            raise LimitError("the treespec repeats itself, out of proportion to its length")
        kind, context, children = self.parts(spec)
        if kind is None:
            if self.used == len(self.leaves):
                raise FormatError(f"there are {self.used} leaves, and the treespec has more")
            self.used += 1
            return self.leaves[self.used - 1]
        members = [self.build(child) for child in children]
        make = CONTAINERS.get(kind.qualname if isinstance(kind, Global) else None)
        if make is None:
            raise unsafe_name(self.where, getattr(kind, "qualname", short(kind)), "as a container")
        return make(context, members)

    def parts(self, spec):
        """(type, context, children) of a TreeSpec; the type of a leaf is None."""
        if not isinstance(spec, Opaque) or spec.qualname not in SPECS:
            raise FormatError(f"a part of the treespec is {short(spec)}, a TreeSpec is expected")
        state = spec.state
        if isinstance(state, tuple) and len(state) == 2:  # (dict, slots)
            state = state[1] if isinstance(state[1], dict) else state[0]
        if isinstance(state, dict):
            children = state.get("children_specs", state.get("_children", []))
            state = [state.get("type"), state.get("context", state.get("_context")), children]
        if spec.qualname == SPECS[1] and (state is MISSING or state is None):
            return None, None, ()
        if not isinstance(state, list) or len(state) < 3 or not isinstance(state[2], list):
            raise FormatError(
                f"the state of a TreeSpec is {short(state)}; a type, a context and children are expected"
            )
        return state[:3]


def keyed(make):
    def build(keys, members):
        if not isinstance(keys, list) or len(keys) != len(members) or not all(map(is_key, keys)):
            raise FormatError(
                f"the keys of {len(members)} members are {short(keys)}, a list of as many plain keys is expected"
            )
        return make(zip(keys, members, strict=True))

    return build


def is_key(key):
    return isinstance(key, ATOMS) or type(key) is tuple and all(isinstance(k, ATOMS) for k in key)


def default_dict(context, members):
    factory, keys = context if isinstance(context, list) and len(context) == 2 else (None, None)
    name = getattr(factory, "qualname", None)
    if factory is not None and name not in FACTORIES:
        raise UnsupportedError(f"a defaultdict has the factory {name or short(factory)}")
    make = functools.partial(collections.defaultdict, FACTORIES.get(name))
    return keyed(make)(keys, members)


def deque(maxlen, members):
    if maxlen is not None and (type(maxlen) is not int or maxlen < 0):
        raise FormatError(f"the length of a deque is {short(maxlen)}")
    return collections.deque(members, maxlen)


CONTAINERS = {
    "builtins.dict": keyed(dict),
    "builtins.list": lambda context, members: members,
    "builtins.tuple": lambda context, members: tuple(members),
    "collections.OrderedDict": keyed(collections.OrderedDict),
    "collections.defaultdict": default_dict,
    "collections.deque": deque,
}
CONTAINERS |= {name.replace("builtins", "__builtin__"): make for name, make in CONTAINERS.items()}
