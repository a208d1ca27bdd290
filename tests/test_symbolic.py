"""The pickle machine's symbolic mode: what the pickle says, kept so that it can be said again."""

import collections
import pickle
import tracemalloc

import pytest

from fastckpt import FormatError
from fastckpt._spec import Global, StorageRef
from fastckpt._unpickler import PIDS_ZIP, unpickle
from fastckpt.nodes import MISSING, Opaque
from picklecraft import Call, Name, Raw, craft, emit, storage


def symbolic(value, **options):
    return unpickle(
        value if isinstance(value, bytes) else craft(value), symbolic=True, **options
    ).obj


CALLS = {
    "REDUCE": {"opcode": "REDUCE", "args": (1,), "kwargs": {}, "new": False},
    "OBJ": {"opcode": "OBJ", "args": (1,), "kwargs": {}, "new": False},
    "INST": {"opcode": "INST", "args": (1,), "kwargs": {}, "new": False},
    "NEWOBJ": {"opcode": "NEWOBJ", "args": (1,), "kwargs": {}, "new": True},
    "NEWOBJ_EX": {"opcode": "NEWOBJ_EX", "args": (1,), "kwargs": {"k": 2}, "new": True},
}


@pytest.mark.parametrize("known", ["lab Net", "collections OrderedDict", "torch Size"])
@pytest.mark.parametrize("how", CALLS)
def test_calls(how, known):
    kwargs = {"k": 2} if how == "NEWOBJ_EX" else None
    made = symbolic(Call(Name(known), (1,), how=how, kwargs=kwargs))
    assert {name: getattr(made, name) for name in CALLS[how]} == CALLS[how]
    assert made.qualname == known.replace(" ", ".")
    assert (made.callee.module, made.callee.name) == tuple(known.split(" "))


def test_a_tensor():
    hooks = Call(Name("collections OrderedDict"))
    ref = storage("FloatStorage", "0", 4)
    args = (ref, 0, (2, 2), (2, 1), False, hooks)
    made = symbolic(Call(Name("torch._utils _rebuild_tensor_v2"), args), pids=PIDS_ZIP)
    assert made.qualname == "torch._utils._rebuild_tensor_v2"
    assert type(made.args[0]) is StorageRef
    assert made.args[1:5] == (0, (2, 2), (2, 1), False)
    assert made.args[5].qualname == "collections.OrderedDict"


def test_what_is_not_called():
    listed = symbolic([Name("torch float32"), Name("lab Net")])
    assert [type(name) for name in listed] == [Global, Global]


@pytest.mark.parametrize("protocol", range(6))
def test_filling(protocol):
    ordered = collections.OrderedDict(a=1, b=2)
    made = symbolic(pickle.dumps(ordered, protocol))
    assert made.pairs == {"a": 1, "b": 2}
    made = symbolic(pickle.dumps(collections.deque([1, 2]), protocol))
    assert made.items == [1, 2]


def steps(*opcodes):
    return symbolic(Raw(emit(Call(Name("lab Net"))) + b"".join(opcodes)))


def test_order():
    items, pairs, state, more = b"(K\1K\2e", b"(K\3K\4u", b"K\5b", b"K\6b"
    made = steps(items, pairs, state)
    assert (made.items, made.pairs, made.state, made.later) == ([1, 2], {3: 4}, 5, ())
    made = steps(state, more, pairs, items, b"(K\7\x90")
    assert (made.items, made.pairs, made.state) == ([], {}, 5)
    assert made.later == [
        ("BUILD", 6), ("SETITEMS", [3, 4]), ("APPENDS", [1, 2]), ("ADDITEMS", [7]),
    ]  # fmt: skip
    assert steps(pairs, items).later == [("APPENDS", [1, 2])]
    assert steps(b"]K\1s").later == [("SETITEM", [[], 1])]  # a key that cannot be hashed


def test_what_the_pickle_did_not_make():
    found = unpickle(craft(Raw(emit(Name("sys modules")) + b"K\1K\2sK\3b")), symbolic=True)
    ((target, changes),) = found.touched
    assert target is found.obj
    assert (changes.args, changes.pairs, changes.state) == (None, {1: 2}, 3)
    assert unpickle(craft([1, {}, {2}]), symbolic=True).touched == []


def test_what_stands_for_arguments():
    arguments = Call(Name("builtins tuple"), ([1],))
    made = symbolic(Raw(emit(Name("lab f")) + emit(arguments) + b"R"))
    assert type(made.args) is Opaque
    made = symbolic(Raw(emit(Call(Name("builtins str"), ("os",))) + emit("system") + b"\x93)R"))
    assert made.callee.opcode == "STACK_GLOBAL"
    assert made.callee.args[1] == "system"
    assert symbolic(b"\x82\7.").opcode == "EXT1"


def test_what_cannot_be_called():
    with pytest.raises(FormatError, match="1 is called"):
        symbolic(b"K\1)R.")


def test_persistent_ids():
    with pytest.raises(FormatError, match="persistent id"):
        symbolic(b"K\1Q.", pids=PIDS_ZIP)
    made = symbolic(b"K\1Q.", pids=PIDS_ZIP, observe=lambda *event: None)
    assert (made.opcode, made.args) == ("BINPERSID", (1,))


def test_events():
    events = []
    data = craft(Raw(emit(Call(Name("lab f"), ())) + b"0" + emit(Name("lab x")) + b"}b"))
    symbolic(data, observe=lambda *event: events.append(event))
    assert [(at, opcode) for at, opcode, *_ in events] == [
        (2, "GLOBAL"), (data.index(b"R"), "REDUCE"), (data.rindex(b"c"), "GLOBAL"), (len(data) - 2, "BUILD"),
    ]  # fmt: skip
    assert events[1][2].args == ()
    assert events[3][2:] == (events[2][2], {})


@pytest.mark.parametrize("mode", [False, True])
def test_names_are_not_copied(mode):
    """Neither the name of a result of a result, nor a long one that is called often."""
    chain = b"cos\nf\n" + b")R" * 20_000 + b"."
    often = b"c" + b"o" * 60_000 + b"\nf\nq\0" + b"h\0)R" * 2_000 + b"."
    for data in (chain, often):
        tracemalloc.start()
        try:
            unpickle(data, symbolic=mode)
            assert tracemalloc.get_traced_memory()[1] < 1000 * len(data)
        finally:
            tracemalloc.stop()


def test_honest_loads_have_no_callee():
    made = unpickle(craft(Call(Name("lab f"), (1,)))).obj
    assert (made.callee, made.opcode, made.later, made.state) == (None, None, (), MISSING)
