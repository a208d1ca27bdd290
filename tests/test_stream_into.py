"""out=: streams into tensors that are there."""

import collections
import io
import socket
import threading

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

import fastckpt
from fastckpt import stream
from overlaps import OVERLAPPING, check_overlapping
from support import same

each_format = pytest.mark.parametrize("format", stream.FORMATS)


def dumped(obj, **options):
    f = io.BytesIO()
    stream.dump(obj, f, **options)
    return f.getvalue()


def load(obj, out, format="native", **options):
    f = io.BytesIO(dumped(obj, format=format) + b"tail")
    result = stream.load(f, out, **options)
    assert f.read() == b"tail"
    return result


def expanded():
    return torch.arange(3.0).expand(2, 3)


def fake(*shape):
    with FakeTensorMode():
        return torch.zeros(shape)


BASE = torch.arange(100.0)
SQUARE = torch.arange(16.0).view(4, 4)
EIGHTH = torch.arange(8.0).to(torch.float8_e4m3fn)
# What is sent, what is there.
CASES = {
    "the_same": ({"a": torch.ones(3, 4), "b": torch.arange(5)}, {"a": torch.zeros(3, 4), "b": torch.zeros(5, dtype=torch.int64)}),
    "one_tensor": (torch.ones(3), torch.zeros(3)),
    "nested": ({"m": {"w": torch.ones(2)}, "l": [torch.ones(3)], "step": 4}, {"m": {"w": torch.zeros(2)}, "l": [torch.zeros(3)]}),
    "empty": ({"e": torch.empty(0, 3), "a": torch.ones(2)}, {"e": torch.empty(0, 3), "a": torch.zeros(2)}),
    "no_tensors": ({"n": 3}, {}),
    "other_strides": ({"a": torch.arange(6.0).view(2, 3)}, {"a": torch.zeros(3, 2).t()}),
    "transposed_alike": ({"a": torch.arange(6.0).view(2, 3).t()}, {"a": torch.zeros(2, 3).t()}),
    "into_a_slice": ({"a": torch.ones(4)}, {"a": torch.zeros(4, 2)[:, 0]}),
    "part_of_a_storage": ({"a": BASE[10:20]}, {"a": torch.zeros(10)}),
    "parts_of_a_storage": ({"a": BASE[10:20], "b": BASE[20:25], "c": BASE[90:]}, {"a": torch.zeros(10), "b": torch.zeros(5), "c": torch.zeros(10)}),
    "parts_that_overlap": ({"a": BASE[10:20], "b": BASE[15:25]}, {"a": torch.zeros(10), "b": torch.zeros(10)}),
    "one_storage_twice": ({"a": SQUARE, "b": SQUARE.view(16)}, {"a": torch.zeros(4, 4), "b": torch.zeros(16)}),
    "one_storage_transposed": ({"a": SQUARE, "b": SQUARE.t()}, {"a": torch.zeros(4, 4), "b": torch.zeros(4, 4).t()}),
    "one_storage_as_bytes": ({"a": EIGHTH, "b": EIGHTH.view(torch.uint8)}, {"a": torch.zeros(8).to(torch.float8_e4m3fn), "b": torch.zeros(8, dtype=torch.uint8)}),
    "one_storage_as_another_float": ({"a": EIGHTH, "b": EIGHTH.view(torch.float8_e5m2)}, {"a": torch.zeros(8).to(torch.float8_e4m3fn), "b": torch.zeros(8).to(torch.float8_e5m2)}),
    "gaps": ({"a": BASE[::2]}, {"a": torch.zeros(50)}),
    "expanded": ({"a": expanded()}, {"a": torch.zeros(2, 3)}),
    "parameters": ({"w": torch.nn.Parameter(torch.ones(3))}, {"w": torch.nn.Parameter(torch.zeros(3))}),
    "conjugate": ({"c": torch.tensor([1 + 2j]).conj()}, {"c": torch.zeros(1, dtype=torch.complex64)}),
}  # fmt: skip
IN_LEAVES = [
    name
    for name in CASES
    if name not in ("conjugate", "one_storage_as_bytes", "one_storage_as_another_float")
]  # which have no word for it


def named(obj, path=""):
    if isinstance(obj, torch.Tensor):
        return {path: obj}
    items = (
        obj.items() if isinstance(obj, dict) else enumerate(obj) if isinstance(obj, list) else ()
    )
    return {name: t for key, value in items for name, t in named(value, f"{path}.{key}").items()}


@pytest.mark.parametrize(
    ("name", "format"),
    [
        (name, format)
        for name in CASES
        for format in stream.FORMATS
        if format != "pytree" or name in IN_LEAVES
    ],
)
def test_whatever_is_there(name, format):
    sent, there = CASES[name]
    for tensor in named(there).values():
        tensor.detach().zero_()
    pointers = {name: tensor.data_ptr() for name, tensor in named(there).items()}
    found = load(sent, there, format)
    for path, tensor in named(there).items():
        assert torch.equal(tensor, named(sent)[path]), path
        assert tensor.data_ptr() == pointers[path], path
        assert named(found)[path].data_ptr() == pointers[path], path
    assert named(found).keys() == named(sent).keys()


def test_the_object_comes_with_these_tensors():
    out = {"w": torch.zeros(2)}
    found = load({"w": torch.ones(2), "step": 3}, out)
    assert found["w"] is out["w"]
    assert found["step"] == 3
    assert out.keys() == {"w"}


def parameter(*shape):
    return torch.nn.Parameter(torch.zeros(shape))


WEIGHT, PAIR = torch.ones(3), [torch.ones(3), torch.ones(2)]
EACH_ITS_OWN = {
    "two names": ({"a": WEIGHT, "b": WEIGHT}, {"a": torch.zeros(3), "b": torch.zeros(3)}),
    "in tuples": ([(WEIGHT,), (WEIGHT, 1)], [(torch.zeros(3),), (torch.zeros(3), 1)]),
    "in an OrderedDict": (
        collections.OrderedDict(a=[WEIGHT], b=collections.deque([WEIGHT])),
        {"a": [torch.zeros(3)], "b": [torch.zeros(3)]},
    ),
    "parameters": ({"a": torch.nn.Parameter(WEIGHT)}, {"a": parameter(3)}),
    "one parameter": (torch.nn.Parameter(WEIGHT), torch.zeros(3)),
    "a tensor for a parameter": ({"a": WEIGHT, "b": WEIGHT}, {"a": parameter(3), "b": parameter(3)}),
}  # fmt: skip


@pytest.mark.parametrize("name", EACH_ITS_OWN)
def test_each_name_has_its_own_tensor(name):
    sent, out = EACH_ITS_OWN[name]
    found, there = pytree.tree_leaves(load(sent, out)), pytree.tree_leaves(out)
    assert all(a is b for a, b in zip(found, there, strict=True))
    assert all(leaf.sum() == 3 for leaf in there if isinstance(leaf, torch.Tensor))


def test_one_list_under_two_names_stays_one():
    out = {"a": [torch.zeros(3), torch.zeros(2)], "b": [torch.zeros(3), torch.zeros(2)]}
    found = load({"a": PAIR, "b": PAIR}, out)
    assert found["a"] is found["b"]
    assert [x is y for x, y in zip(found["a"], out["a"], strict=True)] == [True, True]
    assert torch.equal(out["b"][0], WEIGHT)


@pytest.mark.parametrize("there_are_tied", [True, False], ids=["tied_there", "apart_there"])
def test_tied_tensors(there_are_tied):
    weight = torch.arange(1000.0)
    out = {"a": torch.zeros(1000), "b": torch.zeros(1000)}
    if there_are_tied:
        out["b"] = out["a"]
    for sent in ({"a": weight, "b": weight}, {"a": weight, "b": weight.view(1000)}):
        load(sent, out)
        assert torch.equal(out["a"], weight)
        assert torch.equal(out["b"], weight)
        out["a"].zero_()
        out["b"].zero_()


def test_a_modules_state_dict():
    source, target = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    load(source.state_dict(), target.state_dict())
    assert torch.equal(source.weight, target.weight)
    assert target.weight.requires_grad


@pytest.mark.parametrize("strict", [True, False])
def test_a_module(strict):
    source, target = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    load(source.state_dict(), target, strict=strict)
    assert torch.equal(source.weight, target.weight)


class Scaled(torch.nn.Module):
    """A module with an extra state, in a module without."""

    def __init__(self, extra):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("no_extra_state", torch.ones(2))
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def scaled(extra, fill=0.0):
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), Scaled(extra))
    for tensor in module.state_dict().values():
        if isinstance(tensor, torch.Tensor):
            tensor.fill_(fill)
    return module


@each_format
@pytest.mark.parametrize(
    "extra",
    [{"scale": 3}, torch.arange(5.0), {"amax": torch.ones(7), "steps": [1, 2]}],
    ids=["plain", "a tensor", "tensors"],
)
def test_the_extra_state_of_a_module(extra, format):
    """It goes to set_extra_state, of whatever size it is."""
    target = scaled({"scale": 1})
    load(scaled(extra, 5.0).state_dict(), target, format)
    same(extra, target[1].extra)
    assert torch.equal(target[1].weight, torch.full((3,), 5.0))
    assert torch.equal(target[1].no_extra_state, torch.full((2,), 5.0))


PLAIN = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(3, 3))
WITHOUT_EXTRA = {k: v for k, v in scaled(1).state_dict().items() if not k.endswith("._extra_state")}
EXTRA_MISFITS = {
    "missing": (WITHOUT_EXTRA, scaled(1, 5.0), r'Missing key.*"1\._extra_state"'),
    "unexpected": ({**PLAIN.state_dict(), "1._extra_state": 2}, PLAIN, r'Unexpected key.*"1\._extra_state"'),
}  # fmt: skip


@pytest.mark.parametrize("name", EXTRA_MISFITS)
def test_an_extra_state_that_does_not_fit(name):
    sent, there, words = EXTRA_MISFITS[name]
    before = there[1].weight.detach().clone()
    with pytest.raises(RuntimeError, match=words):
        load(sent, there)
    assert torch.equal(there[1].weight, before)
    load(sent, there, strict=False)
    assert torch.equal(there[1].weight, sent["1.weight"])


def test_autograd_notices():
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * weight).sum()
    load({"w": torch.zeros(3)}, {"w": weight})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


MISFITS = {
    "missing": ({"a": torch.ones(2)}, {"a": torch.zeros(2), "b": torch.zeros(1)}, 'Missing key.*"b"'),
    "unexpected": ({"a": torch.ones(2), "b": torch.ones(1)}, {"a": torch.zeros(2)}, 'Unexpected key.*"b"'),
    "shape": ({"a": torch.ones(2), "b": torch.ones(3)}, {"a": torch.zeros(2), "b": torch.zeros(1, 3)}, "size mismatch for b"),
    "dtype": ({"a": torch.ones(2), "b": torch.ones(3)}, {"a": torch.zeros(2), "b": torch.zeros(3).half()}, "dtype mismatch for b: torch.float32 arrives"),
    "meta": ({"a": torch.ones(2)}, {"a": torch.zeros(2, device="meta")}, "without memory"),
    "fake": ({"a": torch.ones(2), "b": torch.ones(2)}, {"a": torch.zeros(2), "b": fake(2)}, "b is a tensor without memory"),
    "sparse_there": ({"a": torch.ones(2), "b": torch.eye(2)}, {"a": torch.zeros(2), "b": torch.zeros(2, 2).to_sparse()}, "b is a strided tensor, the one there is torch.sparse_coo"),
    "mkldnn_there": ({"a": torch.ones(2), "b": torch.ones(2)}, {"a": torch.zeros(2), "b": torch.zeros(2).to_mkldnn()}, "the one there is torch._mkldnn"),
    "expanded": ({"a": torch.ones(2, 3)}, {"a": expanded()}, "share their memory"),
    "sparse": ({"a": torch.eye(2).to_sparse()}, {"a": torch.zeros(2, 2)}, "'a' is a sparse_coo tensor"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_touches_nothing(name):
    sent, there, words = MISFITS[name]
    before = {
        path: t.clone()
        for path, t in there.items()
        if t.is_cpu and t.layout is torch.strided and not t.is_nested and type(t) is torch.Tensor
    }
    with pytest.raises((RuntimeError, fastckpt.UnsupportedError), match=words):
        load(sent, there)
    assert all(torch.equal(before[path], there[path]) for path in before)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_there():
    out = {"a": torch.zeros(2), "b": torch.nested.nested_tensor([torch.ones(1)])}
    with pytest.raises(RuntimeError, match=r"size mismatch for b: .* the one there is nested"):
        load({"a": torch.ones(2), "b": torch.ones(2)}, out)
    assert not out["a"].any()


@each_format
@pytest.mark.parametrize(("views", "sent", "there"), OVERLAPPING)
def test_tensors_that_overlap_there(views, sent, there, format):
    check_overlapping(views, sent, there, lambda values, out: load(values, out, format))


def test_not_strict():
    out = {"a": torch.zeros(2), "b": torch.zeros(1)}
    found = load({"a": torch.ones(2), "c": torch.ones(3)}, out, strict=False)
    assert out["a"].sum() == 2
    assert out["b"].sum() == 0
    assert found["c"].sum() == 3
    base = torch.arange(10.0)
    found = load({"a": base[:2], "c": base}, {"a": out["a"]}, strict=False)
    assert out["a"].tolist() == [0, 1]
    assert torch.equal(found["c"], base)


def test_bare_storages_lie_beside():
    weight = torch.arange(4.0)
    out = {"w": torch.zeros(4)}
    found = load({"w": weight, "s": weight.storage()}, out, "torch")
    assert torch.equal(out["w"], weight)
    assert bytes(found["s"].untyped()) == bytes(weight.untyped_storage())


def test_a_bad_sum_says_what_was_overwritten():
    big = {f"w{i}": torch.full((1 << 18,), float(i + 1)) for i in range(3)}
    data = bytearray(dumped(big))
    data[-2000] ^= 1
    out = {name: torch.zeros(1 << 18) for name in big}
    with pytest.raises(fastckpt.ChecksumError, match=r"record '2'.*already: w0, w1, w2$"):
        stream.load(io.BytesIO(data), out)


LARGE = {name: torch.full((1 << 18,), 7.0) for name in "abc"}  # a MiB each, and a group


STEPS = {"straight": 1, "copied": 2}  # from one element of a target to the next
# How many bytes behind the head arrive; what is touched where they go straight to the tensors, and where whole ones are copied.
CUT = [
    (0, "nothing", "nothing"),
    (4, "a", "nothing"),
    (1 << 20, "a", "a"),
    ((1 << 20) + 500, "a, b", "a"),
    ((3 << 20) - 4, "a, b, c", "a, b"),
]


@pytest.mark.parametrize(("arrives", *STEPS), CUT)
@pytest.mark.parametrize("step", STEPS)
def test_a_stream_that_is_cut_says_what_was_overwritten(arrives, straight, copied, step):
    touched = straight if step == "straight" else copied
    data = dumped(LARGE, crc32=False)
    head = len(data) - (3 << 20)
    out = {name: torch.zeros(1 << 18, STEPS[step])[:, 0] for name in LARGE}
    with pytest.raises(fastckpt.FormatError, match=rf"ends at byte .*already: {touched}$"):
        stream.load(io.BytesIO(data[: head + arrives]), out)
    assert [name for name in out if out[name].any()] == [n for n in touched.split(", ") if n in out]


def test_a_socket_that_falls_silent_says_what_was_overwritten():
    ours, theirs = socket.socketpair()
    out = {name: torch.zeros(1 << 18) for name in LARGE}
    with ours, theirs:
        data = dumped(LARGE)
        ours.settimeout(0.05)
        sender = threading.Thread(target=theirs.sendall, args=(data[: (1 << 20) + 5000],))
        sender.start()
        with pytest.raises(TimeoutError) as caught:
            stream.load(ours, out)
        sender.join()
    assert caught.value.__notes__ == ["overwritten already: a, b"]


def test_code_is_not_run():
    with pytest.raises(TypeError, match="weights_only=True"):
        load({}, {}, weights_only=False)
