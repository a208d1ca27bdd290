"""Inert objects into real ones: what is shared stays shared, cycles close, keys can be looked up, names are in order."""

import collections
import pickle
import sys
import uuid

import numpy as np
import pytest
import torch

import fastckpt
from fastckpt._tree import leaves, named_leaves, named_tensors, substitute
from fastckpt._unpickler import PIDS_ZIP, unpickle
from fastckpt.errors import CheckpointError, FormatError, LimitError
from fastckpt.limits import Limits
from fastckpt.nodes import Opaque
from fastckpt.numpy_bridge import NumpyBridge
from fastckpt.selection import dotted, specs_in
from picklecraft import Call, Name, Raw, craft, emit, storage, torch_file
from support import QUIET, same

pytestmark = QUIET


def tensor(key="0", kind="FloatStorage"):
    return Call(
        Name("torch._utils _rebuild_tensor_v2"),
        (storage(kind, key, 16), 0, (2, 2), (2, 1), False, None),
    )


STORAGE = b"\0\0\x80?" * 16
F4 = Call(Name("numpy dtype"), ("f4", False, True), (3, "<", None, None, None, -1, -1, 0))


def memo(value, index):
    return Raw(emit(value) + b"q" + bytes([index]))


def get(index):
    return Raw(b"h" + bytes([index]))


def load(obj, **options):
    return fastckpt.load(torch_file(craft(obj), STORAGE), **options)


# -- keys that are made -------------------------------------------------------------------------------------------

KEYS = {
    "dtype": (Name("torch float32"), torch.float32),
    "device": (Call(Name("torch device"), ("cpu",)), torch.device("cpu")),
    "layout": (Call(Name("torch.serialization _get_layout"), ("torch.strided",)), torch.strided),
    "Size": (Call(Name("torch Size"), ((2, 3),)), torch.Size((2, 3))),
    "UUID": (Call(Name("uuid UUID"), (), {"int": 5}), uuid.UUID(int=5)),
    "numpy scalar": (Call(Name("numpy._core.multiarray scalar"), (F4, b"\0\0\x80?")), np.float32(1)),
    "numpy dtype": (F4, np.dtype("<f4")),
    "class": (Name("collections OrderedDict"), collections.OrderedDict),
    "tuple of a dtype": ((Name("torch float32"), 1), (torch.float32, 1)),
    "tuple of tuples": (((Name("torch float32"),), ((Name("torch int8"),), ())), ((torch.float32,), ((torch.int8,), ()))),
    "frozenset of a dtype": (frozenset([Name("torch float32")]), frozenset([torch.float32])),
    "frozenset of a tuple": (frozenset([(Name("torch float32"),)]), frozenset([(torch.float32,)])),
    "tuple of a frozenset": ((frozenset([Name("torch float32"), 1]),), (frozenset([torch.float32, 1]),)),
    "plain": ((1, "a"), (1, "a")),
}  # fmt: skip
K = get(9)
# How a key may occur: where it is first seen, and where it is hashed. Its own value stands at memo entry 9.
PLACES = {
    "dict key": lambda key: ({key: 1},),
    "dict key among others": lambda key: ({"a": 1, key: tensor(), "b": [2], 5: 3},),
    "set member": lambda key: (Raw(b"\x8f(" + emit(key) + b"K\x05\x90"),),
    "frozenset member": lambda key: (Raw(b"(" + emit(key) + b"K\x05\x91"),),
    "OrderedDict key": lambda key: (Call(Name("collections OrderedDict"), ([[key, 1]],)),),
    "Counter key": lambda key: (
        Call(Name("collections Counter"), (Raw(b"}" + emit(key) + b"K\x05s"),)),
    ),
    "first in a list, then a key": lambda key: (key, {K: tensor()}),
    "first a key, then in a list": lambda key: ({key: tensor()}, K),
    "first in a list, then a member": lambda key: (key, Raw(b"\x8f(" + emit(K) + b"\x90")),
    "first a member, then in a list": lambda key: (Raw(b"\x8f(" + emit(key) + b"\x90"), K),
    "first in a list, then in a frozenset": lambda key: (key, Raw(b"(" + emit(K) + b"\x91")),
    "first in a frozenset, then in a list": lambda key: (Raw(b"(" + emit(key) + b"\x91"), K),
    "in a frozenset twice": lambda key: (
        memo(Raw(b"(" + emit(key) + b"\x91"), 8),
        get(8),
        {get(8): 1},
    ),
    "in a dict and its own value": lambda key: (Raw(b"}" + emit(key) + emit(K) + b"s"),),
    "in two dicts": lambda key: ({key: 1}, {K: 2}, [{K: 3}]),
    "deep in a list, then a key": lambda key: ([[[key]]], {K: tensor()}, [{K: 1}]),
    "a key beside its parts": lambda key: ([key, [K]], {(K, K): tensor(), K: 1}),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("kind", [list, tuple])
def test_keys(key, place, kind):
    """Every dict, set and frozenset finds the key, and it is one object wherever it occurs."""
    crafted, expected = key
    obj = load(kind(place(memo(crafted, 9))))
    met = []

    def visit(value):
        if isinstance(value, (dict, set, frozenset)):
            for member in value:
                if type(member) is type(expected) and member == expected:
                    assert expected in value
                    assert hash(member) == hash(expected)
                    met.append(member)
        if isinstance(value, dict):
            for member in [*value.keys(), *value.values()]:
                visit(member)
        elif type(value) is type(expected) and value == expected:
            met.append(value)
        elif isinstance(value, (list, tuple, set, frozenset)):
            for member in value:
                visit(member)

    visit(list(obj))
    assert met
    assert all(type(member) is type(expected) for member in met)
    if not isinstance(expected, (torch.Size, np.generic)):
        assert len({id(member) for member in met}) == 1


def test_a_key_that_cannot_be_one():
    array = Call(
        Name("numpy.core.multiarray _reconstruct"),
        (Name("numpy ndarray"), (0,), b"b"),
        (1, (1,), F4, False, b"abcd"),
    )
    for obj in (
        {array: 1},
        Raw(b"\x8f(" + emit(array) + b"\x90"),
        Raw(b"(" + emit(array) + b"\x91"),
        {(array, 1): 2},
    ):
        with pytest.raises(FormatError, match="dict key or a set's member"):
            load(obj)


def test_keys_that_become_equal():
    one = Call(Name("uuid UUID"), (), {"int": 5})
    assert load(Raw(b"\x8f(" + emit(one) + emit(one) + b"\x90")) == {uuid.UUID(int=5)}
    assert load(Raw(b"}(" + emit(one) + b"K\x01" + emit(one) + b"K\x02u")) == {uuid.UUID(int=5): 2}


def test_the_order_of_a_dict_stays():
    keys = [Name("torch int8"), "a", (Name("torch int16"),), 5, Name("torch int32"), "b"]
    found = load(
        [
            dict(enumerate(keys)),
            Raw(b"}(" + b"".join(emit(k) + emit(tensor()) for k in keys) + b"u"),
        ]
    )
    assert list(found[1]) == [torch.int8, "a", (torch.int16,), 5, torch.int32, "b"]
    assert list(found[1]) == list(found[0].values())


# -- sharing and cycles --------------------------------------------------------------------------------------------


def in_list():
    obj = []
    obj.append(obj)
    return obj


def in_tuple():
    obj = ([],)
    obj[0].append(obj)
    return obj


def in_dict():
    obj = {}
    obj["self"] = obj
    return obj


def in_deque():
    obj = collections.deque()
    obj.append(obj)
    return obj


def in_defaultdict():
    obj = collections.defaultdict(list)
    obj[1] = [obj]
    return obj


def in_ordered_dict():
    obj = collections.OrderedDict()
    obj["self"] = obj
    obj._metadata = obj
    return obj


def in_a_tensors_attribute():
    obj = torch.zeros(2)
    obj.me = [obj]
    return [obj]


CYCLES = {
    f.__name__: f
    for f in (
        in_list,
        in_tuple,
        in_dict,
        in_deque,
        in_defaultdict,
        in_ordered_dict,
        in_a_tensors_attribute,
    )
}


def graph(obj, seen=None):
    """The shape of an object: types, with a number in place of what occurred before."""
    seen = {} if seen is None else seen
    if id(obj) in seen:
        return seen[id(obj)]
    if isinstance(obj, (list, tuple, dict, collections.deque, torch.Tensor)):
        seen[id(obj)] = len(seen)
    inner = []
    if isinstance(obj, dict):
        inner = [[key, graph(value, seen)] for key, value in obj.items()]
    elif isinstance(obj, (list, tuple, collections.deque)):
        inner = [graph(value, seen) for value in obj]
    attributes = graph(vars(obj), seen) if getattr(obj, "__dict__", None) else None
    return [type(obj).__name__, inner, attributes]


@pytest.mark.parametrize("make", CYCLES.values(), ids=CYCLES)
@pytest.mark.parametrize("keys", [None, "*"])
def test_cycles(make, keys, tmp_path):
    obj = make()
    torch.save(obj, tmp_path / "x.pt")
    found = fastckpt.load(tmp_path / "x.pt", keys=keys)
    if keys is None or make not in (in_tuple,):
        assert graph(found) == graph(obj)
    with fastckpt.open(tmp_path / "x.pt") as checkpoint:
        checkpoint.tree  # noqa: B018 - it ends


def test_sharing(tmp_path):
    one, pair = [torch.zeros(2)], (torch.ones(1),)
    attributes = collections.OrderedDict(a=one)
    attributes._metadata = one
    obj = {
        "l": [one, one],
        "t": (pair, pair, one),
        "d": {"x": one},
        "o": attributes,
        "q": collections.deque([one, pair]),
    }
    torch.save(obj, tmp_path / "x.pt")
    found = fastckpt.load(tmp_path / "x.pt")
    same(torch.load(tmp_path / "x.pt", weights_only=False), found)
    assert graph(found) == graph(obj)


def test_containers_keep_their_identity():
    inert = unpickle(craft([[1], {"a": [2]}, ([tensor()],)]), pids=PIDS_ZIP).obj
    parts = [inert, inert[0], inert[1], inert[1]["a"], inert[2], inert[2][0]]
    real = substitute(inert, NumpyBridge({}, unknown="opaque"), ["tensor"])
    assert [id(part) for part in (real, real[0], real[1], real[1]["a"], real[2], real[2][0])] == [
        id(part) for part in parts
    ]
    assert real == [[1], {"a": [2]}, (["tensor"],)]


def test_tuples_in_place_leave_no_reference_behind():
    (spec,) = inert = unpickle(craft((tensor(),)), pids=PIDS_ZIP).obj
    before = sys.getrefcount(spec)
    real = object()
    count = sys.getrefcount(real)
    substitute(inert, NumpyBridge({}), [real])
    assert inert[0] is real
    assert sys.getrefcount(spec) == before - 1
    assert sys.getrefcount(real) == count + 1


def test_an_object_among_its_own_arguments():
    """No pickler writes it; the error must not go in circles either."""
    node = b"ctorch.nn.parameter\nParameter\n)Rq\x01("
    data = node + b"h\x01NNI01\nNtb."
    with pytest.raises(CheckpointError, match="its own arguments"):
        fastckpt.load(torch_file(data, STORAGE))


def test_one_stand_in_for_one_object():
    node = Call(Name("x Y"), (1,))
    first, second, state = load(
        [memo(node, 1), get(1), Call(Name("x Z"), (), {"a": get(1)})], unknown="opaque"
    )
    assert type(first) is Opaque
    assert first is second
    assert state.state["a"] is first


def test_what_is_in_a_stand_in_is_real():
    parts = {
        "args": (tensor(), [tensor()]),
        "state": {"t": tensor(), "d": Name("torch float32")},
    }
    node = load(Call(Name("x Y"), parts["args"], parts["state"]), unknown="opaque")
    assert torch.is_tensor(node.args[0])
    assert torch.is_tensor(node.args[1][0])
    assert torch.is_tensor(node.state["t"])
    assert node.state["d"] is torch.float32
    data = b"cx\nY\n)Rq\x01" + emit(tensor()) + b"ah\x01K\x05" + emit(tensor()) + b"s."
    node = fastckpt.load(torch_file(data, STORAGE), unknown="opaque")
    assert torch.is_tensor(node.items[0])
    assert torch.is_tensor(node.pairs[5])


# -- depth ---------------------------------------------------------------------------------------------------------

DEPTH = 30_000
DEEP = {
    "lists": b"]" * DEPTH + emit(tensor()) + b"a" * DEPTH,
    "tuples": emit(tensor()) + b"\x85" * DEPTH,
    "dicts": b"}" + b"X\1\0\0\0a}" * DEPTH + b"s" * DEPTH,
    "opaque args": b"cx\nY\n" * DEPTH + emit(tensor()) + b"\x85R" * DEPTH,
    "opaque states": b"cx\nY\n)R" * DEPTH + emit(tensor()) + b"b" * DEPTH,
    "tensors at every level": b"]q\x01"
    + emit(tensor())
    + b"q\x020"
    + b"]h\x02a" * DEPTH
    + b"a" * DEPTH,
}


@pytest.mark.parametrize("data", DEEP.values(), ids=DEEP)
def test_deep_objects(data, tmp_path):
    """Whole, they load. By name, they do or are refused with an error of ours."""
    file = torch_file(data + b".", STORAGE)
    assert fastckpt.load(file, unknown="opaque") is not None
    for act in (
        lambda: fastckpt.load(file, unknown="opaque", keys="*"),
        lambda: [lazy.read() for lazy in fastckpt.open(file, unknown="opaque").values()],
        lambda: fastckpt.open(file, unknown="opaque").tree,
        lambda: fastckpt.open(file, unknown="opaque").info,
    ):
        try:
            act()
        except CheckpointError:
            pass


def test_paths_of_deep_leaves_take_no_memory_in_their_square():
    leaf = unpickle(craft(tensor()), pids=PIDS_ZIP).obj
    root = []
    for _ in range(20_000):
        root = [root, leaf]
    with pytest.raises(LimitError, match="load it whole"):
        named_tensors(root)
    assert len(leaves(root, set())) == 20_000
    assert len(specs_in(root)[1]) == 1
    deep = leaf
    for _ in range(50_000):
        deep = [deep]
    ((path, found),) = named_tensors(deep)
    assert (path, found) == ((0,) * 50_000, leaf)


def test_parameters_in_parameters():
    def nested(depth):
        return torch_file(
            b"ctorch.nn.parameter\nParameter\n" * depth + emit(tensor()) + b"\x85R" * depth + b".",
            STORAGE,
        )

    assert type(fastckpt.load(nested(300))) is torch.nn.Parameter
    with pytest.raises(LimitError, match="nest more than 300 deep"):
        fastckpt.load(nested(301))
    assert type(fastckpt.load(nested(301), limits=Limits(object_depth=400))) is torch.nn.Parameter


def test_calls_in_calls():
    """Arguments of rebuild functions that are calls themselves."""
    for depth in (2, 100, 10_000):
        args = tensor().args
        func = Name("torch._utils _rebuild_tensor_v2")
        data = emit(args)
        for _ in range(depth):
            data = b"(" + emit(func) + emit(Name("torch Tensor")) + data + b"Nt"
            func = Name("torch._tensor _rebuild_from_type_v2")
        data = emit(func) + data + b"R."
        if depth == 2:
            assert torch.is_tensor(fastckpt.load(torch_file(data, STORAGE)))
            continue
        try:
            fastckpt.load(torch_file(data, STORAGE))
        except CheckpointError:
            pass


def test_attributes_that_nest_deep():
    """Whole they load; a tensor that is read alone is refused."""
    rebuild = emit(Name("torch._utils _rebuild_parameter_with_state"))
    deep = b"]" * DEPTH + b"a" * (DEPTH - 1)
    file = torch_file(
        rebuild + b"(" + emit(tensor()) + b"\x88N}X\x01\0\0\0a" + deep + b"stR.", STORAGE
    )
    assert isinstance(fastckpt.load(file).a, list)
    with (
        fastckpt.open(file) as checkpoint,
        pytest.raises(LimitError, match="load the whole object"),
    ):
        checkpoint[""].read()


def test_attributes_that_are_shared_are_bounded():
    rebuild = emit(Name("torch._utils _rebuild_parameter_with_state")) + b"q\x010"
    args = (tensor(), False, None, {f"k{i}": i for i in range(10_000)})
    for times in (50, 500):
        file = torch_file(
            rebuild + emit(args) + b"q\x020(" + b"h\x01h\x02R" * times + b"t.", STORAGE
        )
        if times == 50:
            assert len(vars(fastckpt.load(file)[49])) == 10_000
            continue
        with pytest.raises(LimitError, match="share their attributes"):
            fastckpt.load(file)


# -- names ---------------------------------------------------------------------------------------------------------


def paths(obj, only_tensors=False):
    inert = unpickle(craft(obj), pids=PIDS_ZIP).obj
    return [dotted(path) for path, _ in (named_tensors if only_tensors else named_leaves)(inert)]


NAMED = {
    "a tensor": (tensor(), [""]),
    "a flat dict": ({"b": tensor(), "a": tensor()}, ["b", "a"]),
    "a flat dict with an int": ({"b": tensor(), "n": 5}, ["b", "n"]),
    "nested": ({"m": {"w": tensor(), "l": [tensor(), (tensor(), 1)]}, "z": None}, ["m.w", "m.l.0", "m.l.1.0", "m.l.1.1", "z"]),
    "keys of all kinds": ({1: tensor(), None: tensor(), (1, 2): tensor(), b"k": tensor()}, ["1", "None", "(1, 2)", "b'k'"]),
    "shared": ([memo([tensor()], 1), get(1), [get(1)]], ["0.0", "1.0", "2.0.0"]),
    "empty": ([[], {}, ()], []),
    "attributes": (Call(Name("collections OrderedDict"), (), {"_m": {"v": tensor()}}), ["_m.v"]),
    "a namespace": (Call(Name("types SimpleNamespace"), (), {"a": tensor()}), ["a"]),
    "a deque": (Call(Name("collections deque"), ([tensor()],)), ["0"]),
    "a frozenset": (Raw(b"(" + emit(tensor()) + b"\x91"), ["0"]),
    "a stand-in": (Call(Name("x Y"), (1, tensor()), {"s": tensor()}), ["args.0", "args.1", "s"]),
    "a stand-in with a state that is no dict": (Call(Name("x Y"), (), [tensor()]), ["state.0"]),
    "a cycle": (Raw(b"]q\x01h\x01a" + emit(tensor()) + b"a"), ["1"]),
    "a cycle in a dict": (Raw(b"}q\x01(X\1\0\0\0ah\x01X\1\0\0\0b" + emit(tensor()) + b"u"), ["b"]),
}  # fmt: skip


@pytest.mark.parametrize("case", NAMED.values(), ids=NAMED)
def test_names(case):
    obj, expected = case
    assert paths(obj) == expected
    inert = unpickle(craft(obj), pids=PIDS_ZIP).obj
    found = named_leaves(inert)
    count = len([leaf for _, leaf in found if type(leaf).__name__ == "TensorSpec"])
    assert len(named_tensors(inert)) == count
    # and what stands in keys
    assert {id(leaf) for leaf in leaves(inert, set())} >= {id(leaf) for _, leaf in found}


def test_names_of_other_tensors():
    sparse = Call(
        Name("torch._utils _rebuild_sparse_tensor"),
        (
            Call(Name("torch.serialization _get_layout"), ("torch.sparse_coo",)),
            (tensor("1", "LongStorage"), tensor(), (2, 2)),
        ),
    )
    obj = {
        "s": sparse,
        "d": Call(Name("torch device"), ("cpu",)),
        "z": Call(Name("torch Size"), ((1,),)),
        "p": storage("FloatStorage", "0", 16),
    }
    assert paths(obj, only_tensors=True) == ["s"]
    assert paths(obj) == ["s", "d", "z", "p"]


def test_a_large_flat_dict_takes_the_short_way():
    obj = {str(i): tensor() for i in range(500)}
    assert paths(obj, only_tensors=True) == list(obj)
    assert pickle.loads(pickle.dumps(paths(obj))) == list(obj)
