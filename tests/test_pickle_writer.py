"""Symbolic pickles written again: torch's own come out byte for byte, others as what they say."""

import collections
import datetime
import io
import pickle
import zipfile

import pytest
import torch
from torch import nn

from fastckpt import UnsupportedError
from fastckpt._unpickler import PIDS_ZIP, unpickle
from fastckpt.dtypes import DTYPES
from fastckpt.losses import lost_parts
from fastckpt.pickle_writer import StorageId, dump
from objects import one_of_each, saved
from picklecraft import Call, Name, craft, storage
from support import QUIET

pytestmark = QUIET


def read(data):
    return unpickle(data, pids=PIDS_ZIP, symbolic=True, encoding="bytes")


def storage_id(ref):
    dtype = DTYPES[ref.dtype]
    spec = ref.storage
    return StorageId(dtype.storage, spec.key, spec.location, spec.nbytes // dtype.itemsize)


def again(data, **options):
    return dump(read(data).obj, storage_id, **options)


def cycle():
    inside = []
    outside = (inside,)
    inside.append(outside)
    return [outside, inside, outside]


# No text occurs twice: equal texts are one here, and are not in torch's pickles.
VERBATIM = {
    "nothing": None,
    "numbers": [0, 255, 256, 65535, 65536, -1, -(2**31), 2**31, 2**63, -(2**70), 2**2000, 1.5, float("inf"), True, False],
    "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
    "dicts": {"a": {}, "b": {1: 2}, "c": {(1, 2): None, 3.5: "x"}},
    "long": list(range(2001)),
    "long dict": {n: str(n) for n in range(1200)},
    "many memo entries": [[n] for n in range(300)],
    "cycle": cycle(),
    "text": ["größe", "\ud800", "x" * 300],
    "bytes": {"b": b"\0\xff", "array": bytearray(b"ab")},
    "ordered": collections.OrderedDict(a=1, b=collections.OrderedDict()),
    "set": {"s": {1}},
    "date": datetime.timedelta(5),
    "tensor": {"w": torch.ones(2, 3)},
    "module": nn.Linear(3, 2),
    "optimizer": {"opt": torch.optim.SGD([torch.ones(2)], lr=0.5).state_dict()},
}  # fmt: skip


@pytest.mark.parametrize("obj", VERBATIM.values(), ids=VERBATIM)
def test_byte_for_byte(obj):
    with zipfile.ZipFile(io.BytesIO(saved(obj))) as packed:
        data = packed.read("archive/data.pkl")
    written = again(data)
    if written != data:  # a text that is there twice
        assert len(written) < len(data)
        assert again(written) == written


@pytest.mark.parametrize("protocol", range(6))
def test_other_protocols(protocol):
    obj = {
        "s": {1, 2},
        "f": frozenset([3]),
        "b": [b"", b"a" * 300],
        "array": bytearray(b"xy"),
        "t": ((1, 2), [3, None]),
    }
    data = pickle.dumps(obj, protocol)
    assert pickle.loads(again(data, python2=protocol < 3)) == obj


def test_every_kind_of_tensor_is_what_it_was():
    with zipfile.ZipFile(io.BytesIO(saved(one_of_each()))) as packed:
        data = packed.read("archive/data.pkl")
    written = again(data)
    assert again(written) == written
    first, second = (unpickle(each, pids=PIDS_ZIP) for each in (data, written))
    assert repr(first.obj) == repr(second.obj)
    assert repr(first.tensors) == repr(second.tensors)


def test_strings_of_python_2():
    data = b"\x80\x02]q\x00(U\x03a\xf6bq\x01T\x2c\x01\x00\x00" + b"\xfc" * 300 + b"q\x02h\x01e."
    assert again(data) == data


@pytest.mark.parametrize(
    "call",
    [
        Call(Name("a b"), (1,), {"x": 5}),
        Call(Name("a b"), (), how="NEWOBJ"),
        Call(Name("a b"), (1,), how="NEWOBJ_EX", kwargs={"k": 2}),
        Call(Call(Name("a b"), (1,)), (2,)),
    ],
    ids=["state", "new", "new with keywords", "a result is called"],
)
def test_calls(call):
    first = read(craft(call)).obj
    second = read(again(craft(call))).obj
    for name in ("qualname", "args", "kwargs", "state", "new", "opcode"):
        if name != "args" or not isinstance(call.callee, Call):
            assert getattr(first, name) == getattr(second, name)


def test_what_is_done_out_of_order():
    # a call, then an item, a state, another item
    data = b"\x80\x02ca\nb\nq\x00)Rq\x01(K\x01eK\x02b(K\x03e."
    node = read(again(data)).obj
    assert (node.items, node.state, list(node.later)) == ([1], 2, [("APPENDS", [3])])


def test_arguments_that_lead_back():
    """An object in the list that is its own argument: the machine makes such, and so can be written."""
    data = b"\x80\x02ca\nb\n]q\x00\x85Rq\x01h\x00h\x01a0."
    node = read(again(data)).obj
    assert node.args[0][0] is node


@pytest.mark.parametrize(
    "opcodes", [b"\x82\x01", b"]X\x01\x00\x00\x00a\x86R"], ids=["extension", "no name"]
)
def test_what_cannot_be_said(opcodes):
    try:
        obj = read(b"\x80\x02" + opcodes + b".").obj
    except ValueError:
        return  # the machine refuses it already
    with pytest.raises(UnsupportedError, match="cannot be written again"):
        dump(obj, storage_id)


# -- what goes with a lost storage


def tensor(key):
    return Call(
        Name("torch._utils _rebuild_tensor"), (storage("FloatStorage", key, 1), 0, (1,), (1,))
    )


GONE, KEPT = tensor("gone"), tensor("kept")


def left(value):
    """The symbolic object that is left without the storage "gone"; None where nothing is."""
    obj = read(craft(value)).obj
    lost = lost_parts(obj, lambda spec: spec.key == "gone")
    return None if id(obj) in lost else read(dump(obj, storage_id, lost=lost)).obj


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": GONE, "b": 1}, {"b": 1}),
        ([GONE, 1], [None, 1]),
        ((GONE, 1), (None, 1)),
        ([(1, [GONE]), 2], [(1, [None]), 2]),
        ({"a": {"b": {"c": GONE}}}, {"a": {"b": {}}}),
        ({(1, 2): GONE}, {}),
        (GONE, None),
        ([Call(Name("a b"), (GONE,))], [None]),
        ([Call(Name("a b"), ([1, (GONE,)],))], [None]),
        ([Call(Name("a b"), ({"k": [GONE]},))], [None]),
        ([Call(Name("a b"), (), (GONE, 1))], [None]),
        ([Call(Call(Name("a b"), (GONE,)), ())], [None]),
        ([Call(Name("a b"), (), how="NEWOBJ_EX", kwargs={"k": GONE})], [None]),
    ],
    ids=[
        "entry", "item", "member", "deep", "deep in dicts", "key stays", "all", "argument", "in an argument",
        "in a dict that is one", "state", "callee", "keyword",
    ],
)  # fmt: skip
def test_what_goes(value, expected):
    assert left(value) == expected


def test_attributes_go_alone():
    node = left(Call(Name("a b"), (), {"x": GONE, "y": 5}))
    assert node.state == {"y": 5}
    node = left(Call(Name("a b"), (), (None, {"x": GONE, "y": 5})))
    assert node.state == (None, {"y": 5})


def test_attributes_of_tensors_go_alone():
    data = Call(
        Name("torch._utils _rebuild_parameter_with_state"), (KEPT, True, None, {"x": GONE, "y": 5})
    )
    assert left(data).args[3] == {"y": 5}
    assert left(Call(Name("torch._utils _rebuild_parameter"), (GONE, True, None))) is None


def test_ordered_dicts_of_python_2_lose_entries():
    node = left(Call(Name("collections OrderedDict"), ([["a", GONE], ["b", 1]],)))
    assert (node.args, node.pairs) == ((), {"b": 1})
