"""load_into: into a module's or a dict's tensors, with nothing touched where names or shapes do not fit."""

import io
import subprocess
import sys

import pytest
import torch

import fastckpt
from overlaps import OVERLAPPING, check_overlapping
from ziprewrite import rewritten, with_damage


def saved(obj, **options):
    file = io.BytesIO()
    torch.save(obj, file, **options)
    return file.getvalue()


def model(width=8, device=None):
    with torch.device(device or "cpu"):
        torch.manual_seed(width)
        return torch.nn.Sequential(
            torch.nn.Linear(6, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 3)
        )


def assert_equal(expected, actual):
    assert list(expected) == list(actual)
    for name in expected:
        assert torch.equal(expected[name], actual[name]), name


STATE = model().state_dict()


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_module(device, zipped):
    target = model(device=device)
    for parameter in target.parameters():
        if device == "cpu":
            torch.nn.init.zeros_(parameter)
    places = {name: t.data_ptr() for name, t in target.state_dict().items() if device == "cpu"}
    result = fastckpt.load_into(target, saved(STATE, _use_new_zipfile_serialization=zipped))
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert_equal(STATE, target.state_dict())
    for name, place in places.items():
        assert target.state_dict()[name].data_ptr() == place
    assert all(isinstance(p, torch.nn.Parameter) and p.requires_grad for p in target.parameters())


def test_tied_parameters_on_the_meta_device_stay_tied():
    def tied():
        net = torch.nn.Sequential(
            torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
        )
        net[1].weight = net[0].weight
        return net

    source = tied()
    with torch.device("meta"):
        target = tied()
    fastckpt.load_into(target, saved(source.state_dict()))
    assert target[0].weight is target[1].weight
    assert torch.equal(target[0].weight, source[0].weight)


TARGETS = {
    "as it is": lambda t: torch.zeros_like(t),
    "half": lambda t: torch.zeros_like(t, dtype=torch.float16) if t.is_floating_point() else t * 0,
    "double": lambda t: t.double() * 0 if t.is_floating_point() else t * 0,
    "transposed": lambda t: torch.zeros(t.shape[::-1], dtype=t.dtype).mT if t.dim() == 2 else t * 0,
    "every second": lambda t: torch.zeros(tuple(2 * n for n in t.shape), dtype=t.dtype)[
        tuple(slice(None, None, 2) for _ in t.shape)
    ],
}


@pytest.mark.parametrize("kind", TARGETS)
def test_dict(kind):
    target = {name: TARGETS[kind](tensor) for name, tensor in STATE.items()}
    fastckpt.load_into(target, saved(STATE))
    for name in STATE:
        assert torch.equal(STATE[name].to(target[name].dtype), target[name]), name


SOURCES = {
    "parameter": torch.nn.Parameter(torch.arange(6.0)),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "expanded": torch.arange(3.0).expand(2, 3),
    "a part of a larger storage": torch.arange(100.0)[10:16],
    "negated": torch._neg_view(torch.arange(6.0)),
    "conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "0-dim": torch.tensor(3.0),
    "empty": torch.empty(0, 3),
    "bfloat16": torch.arange(6.0).bfloat16(),
    "sparse": torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_whatever_is_in_the_file(kind):
    source = SOURCES[kind]
    target = {"x": torch.zeros_like(source.detach()).clone()}
    fastckpt.load_into(target, saved({"x": source}))
    expected, actual = source.detach(), target["x"]
    if source.is_sparse:
        expected, actual = expected.to_dense(), actual.to_dense()
    assert torch.equal(expected.resolve_neg().resolve_conj(), actual.resolve_neg().resolve_conj())


def test_names():
    data = saved({"epoch": 3, "model": {"module.a": torch.ones(2), "module.b": torch.ones(3)}})
    target = {"a": torch.zeros(2), "c": torch.zeros(3)}
    fastckpt.load_into(target, data, prefix="model.module.", rename={"b": "c"})
    assert target["a"].sum() == 2
    assert target["c"].sum() == 3
    target = {"A": torch.zeros(2)}
    fastckpt.load_into(
        target, data, prefix="model.module.", rename=lambda n: n.upper() if n == "a" else None
    )
    assert target["A"].sum() == 2
    with pytest.raises(ValueError, match="would be called 'x'"):
        fastckpt.load_into({"x": torch.zeros(2)}, data, prefix="model.", rename=lambda name: "x")
    everything = {"epoch": None, "model.module.a": "a", "model.module.b": None}
    fastckpt.load_into({"a": torch.zeros(2)}, data, rename=everything)
    result = fastckpt.load_into(target, data, rename={"typo": "A"}, strict=False)
    assert result.missing_keys == ["A"]


@pytest.mark.parametrize("rename", ["x", 3, ["w"]])
def test_what_gives_no_names(rename):
    with pytest.raises(TypeError, match=r"rename=.*a dict .* a callable"):
        fastckpt.load_into({"w": torch.zeros(2)}, saved({"w": torch.ones(2)}), rename=rename)


def test_extra_state_is_renamed_too():
    class Counts(torch.nn.Module):
        def get_extra_state(self):
            return {"count": torch.ones(1) * getattr(self, "count", 0)}

        def set_extra_state(self, state):
            self.count = int(state["count"])

    module, new = Counts(), torch.nn.ModuleDict({"new": Counts()})
    module.count = 5
    fastckpt.load_into(new, saved(module.state_dict()), rename=lambda name: f"new.{name}")
    assert new["new"].count == 5


# Names in the file, names of the target, options, and what is advised.
ADVICE = {
    "a prefix in the file": ({"model": {"a.w": 2, "a.b": 2}, "epoch": 1}, ["a.w", "a.b"], {}, r"prefix='model\.' takes them"),
    "one more prefix": ({"model.module.w": 2}, ["w"], {"prefix": "model."}, r"prefix='model\.module\.' takes them"),
    "a prefix in the target": ({"w": 2, "b": 2}, ["module.w", "module.b"], {}, r"rename=lambda name: 'module\.' \+ name"),
    "a prefix that nothing has": ({"model.w": 2}, ["w"], {"prefix": "modle."}, r"no name begins with prefix='modle\.'; near it: model\.w"),
    "the same, not strict": ({"w": 2}, ["w"], {"prefix": "x.", "strict": False}, r"no name begins with prefix='x\.'"),
    "rename of nothing": ({"weight": 2}, ["weight"], {"rename": {"wieght": "w"}}, r"rename= has names .* not have: wieght; near it: weight \(strict=False"),
    "rename with the prefix": ({"m.w": 2}, ["w"], {"prefix": "m.", "rename": {"m.w": "w"}}, r"behind prefix='m\.': m\.w; there are: w"),
}  # fmt: skip


@pytest.mark.parametrize("case", ADVICE)
@pytest.mark.parametrize("as_module", [False, True], ids=["dict", "module"])
def test_advice_on_names(case, as_module):
    there, wanted, options, words = ADVICE[case]
    data = saved(tensors_of(there))
    target = {name: torch.zeros(2) for name in wanted}
    if as_module:
        target = torch.nn.Module()
        for name in wanted:
            holder = target
            for part in name.split(".")[:-1]:
                if not hasattr(holder, part):
                    holder.add_module(part, torch.nn.Module())
                holder = getattr(holder, part)
            holder.register_buffer(name.rpartition(".")[2], torch.zeros(2))
    with pytest.raises(RuntimeError, match=words):
        fastckpt.load_into(target, data, **options)


def tensors_of(sizes):
    """Tensors in place of numbers."""
    if isinstance(sizes, dict):
        return {name: tensors_of(value) for name, value in sizes.items()}
    return torch.ones(sizes)


def test_no_advice_where_names_have_nothing_in_common():
    with pytest.raises(RuntimeError) as caught:
        fastckpt.load_into({"a": torch.zeros(1), "b": torch.zeros(1)}, saved({"x": torch.ones(1)}))
    assert "prefix" not in str(caught.value)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (torch.optim.SGD([torch.zeros(1)]), r"target is 'SGD'.*SGD\.load_state_dict\(load\(f\)"),
        ([torch.zeros(1)], "a module or a dict of tensors is expected$"),
        (None, "a module or a dict"),
    ],
    ids=["optimizer", "list", "None"],
)
def test_other_targets(target, words):
    with pytest.raises(TypeError, match=words):
        fastckpt.load_into(target, saved({"a": torch.ones(1)}))


def test_what_does_not_fit_is_said_at_once_and_touches_nothing():
    target = {
        "0.weight": torch.zeros(8, 6),
        "0.bias": torch.zeros(7),
        "more": torch.zeros(2),
    }
    with pytest.raises(RuntimeError) as caught:
        fastckpt.load_into(target, saved(STATE))
    message = str(caught.value)
    assert 'Missing key(s) in state_dict: "more"' in message
    assert 'Unexpected key(s) in state_dict: "1.weight"' in message
    assert "size mismatch for 0.bias: copying a param with shape torch.Size([8])" in message
    assert not target["0.weight"].any()


def test_a_module_says_what_torch_says():
    narrow, data = model(5), saved(STATE)
    with pytest.raises(RuntimeError) as ours:
        fastckpt.load_into(narrow, data)
    with pytest.raises(RuntimeError) as theirs:
        model(5).load_state_dict(STATE)
    assert str(ours.value) == str(theirs.value)
    assert_equal(model(5).state_dict(), narrow.state_dict())


def test_not_strict():
    target = {"0.bias": torch.zeros(8), "more": torch.zeros(2)}
    result = fastckpt.load_into(target, saved(STATE), strict=False)
    assert result.missing_keys == ["more"]
    assert "1.weight" in result.unexpected_keys
    assert torch.equal(target["0.bias"], STATE["0.bias"])


@pytest.mark.parametrize(
    ("dtype", "chunk", "touched"),
    [
        (torch.float32, 8 << 20, "a, b"),
        (torch.float64, 8 << 20, "nothing"),
        (torch.float64, 250, "a"),
    ],
    ids=["straight", "cast together", "cast singly"],
)
def test_checksums(dtype, chunk, touched, monkeypatch):
    monkeypatch.setattr("fastckpt.filling.CHUNK", chunk)
    data = with_damage(saved({"a": torch.ones(50), "b": torch.ones(60)}), "data/1")
    target = {"a": torch.zeros(50, dtype=dtype), "b": torch.zeros(60, dtype=dtype)}
    with pytest.raises(fastckpt.ChecksumError, match=rf"data/1.*overwritten already: {touched}$"):
        fastckpt.load_into(target, data)
    fastckpt.load_into(target, data, verify=False)


TOGETHER = {
    "chunk": (1 << 20, 4096),
    "few": (1 << 20, 3),
    "little": (4000, 4096),
    "none": (1, 4096),
}


@pytest.mark.parametrize(("chunk", "most"), TOGETHER.values(), ids=TOGETHER)
def test_small_ones_that_are_cast_are_read_together(chunk, most, monkeypatch):
    """Whatever fits into a group: views of one storage, tied tensors, empty ones, large ones and other layouts among them."""
    monkeypatch.setattr("fastckpt.filling.CHUNK", chunk)
    monkeypatch.setattr("fastckpt.filling.MOST_TOGETHER", most)
    base = torch.arange(2000.0)
    state = {f"view {i}": base[i * 100 : i * 100 + 90] for i in range(8)}
    state |= {f"own {i}": torch.full((3, i), float(i)) for i in range(8)}
    state["tied"], state["across"] = state["own 7"], base[:600].view(20, 30).T
    state |= {"large": torch.arange(4000.0).view(40, 100), "sparse": torch.eye(5).to_sparse()}
    state |= {f"last {i}": torch.full((), float(i)) for i in range(5)}
    target = {name: torch.zeros(value.shape, dtype=torch.float64) for name, value in state.items()}
    target["sparse"] = torch.zeros(5, 5).to_sparse()
    fastckpt.load_into(target, saved(state))
    for name, value in state.items():
        assert torch.equal(value.to_dense().double(), target[name].to_dense()), name


def test_checksums_of_what_goes_through_in_chunks(monkeypatch):
    monkeypatch.setattr("fastckpt.filling.CHUNK", 64)
    good = saved({"a": torch.arange(600.0).view(20, 30)})
    target = {"a": torch.zeros(20, 30, dtype=torch.float64)}
    fastckpt.load_into(target, good)
    assert torch.equal(target["a"], torch.arange(600.0, dtype=torch.float64).view(20, 30))
    with pytest.raises(fastckpt.ChecksumError, match=r"overwritten already: a$"):
        fastckpt.load_into(target, with_damage(good, "data/0"))


def test_a_record_that_does_not_inflate(monkeypatch):
    """Other errors than those of checksums name the tensors that were overwritten, too."""
    monkeypatch.setattr("fastckpt.filling.CHUNK", 250)
    good = rewritten(saved({"a": torch.ones(50), "b": torch.ones(60)}), method=8)
    name = good.index(b"archive/data/1")
    start = name + 14 + int.from_bytes(good[name - 2 : name], "little")  # behind the extra field
    bad = good[:start] + b"\xff" + good[start + 1 :]  # no such kind of block
    target = {"a": torch.zeros(50), "b": torch.zeros(60)}
    with pytest.raises(fastckpt.FormatError, match=r"data/1.*overwritten already: a$") as caught:
        fastckpt.load_into(target, bad)
    assert (type(caught.value), caught.value.record) == (fastckpt.FormatError, "data/1")


def test_hooks_of_the_module_run():
    class Renamed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.new = torch.nn.Parameter(torch.zeros(3))

        def _load_from_state_dict(self, state_dict, prefix, *args):
            state_dict[prefix + "new"] = state_dict.pop(prefix + "old")
            super()._load_from_state_dict(state_dict, prefix, *args)

    target = Renamed()
    fastckpt.load_into(target, saved({"old": torch.ones(3)}))
    assert target.new.sum() == 3


MEMORY = """
import resource, sys, torch, fastckpt
path, dtype = sys.argv[1], getattr(torch, sys.argv[2])
target = {f"w{i}": torch.ones(4_000_000, dtype=dtype) for i in range(4)}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
fastckpt.load_into(target, path)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_no_second_copy(tmp_path, dtype):
    path = tmp_path / "model.pt"
    torch.save({f"w{i}": torch.rand(4_000_000) for i in range(4)}, path)
    run = [sys.executable, "-c", MEMORY, str(path), dtype]
    grown = float(subprocess.run(run, capture_output=True, text=True, check=True).stdout)
    # 64 MB lie in the file; 16 MiB may come on top, and what the library's own code takes.
    assert grown < 16 + 12


def test_autograd_notices():
    """As with load_state_dict: a graph that needs the old values must not go on with the new ones."""
    net = torch.nn.Linear(3, 2)
    data = saved(torch.nn.Linear(3, 2).state_dict())
    loss = (net.weight**2).sum()
    fastckpt.load_into(net, data)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Wrapper(torch.Tensor):
    """A tensor whose memory is not its own, as a DTensor's."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        inner = [a.inner if isinstance(a, Wrapper) else a for a in args]
        return func(*inner, **(kwargs or {}))


def test_a_subclass_has_its_memory_elsewhere():
    target = {"x": Wrapper(torch.zeros(4))}
    fastckpt.load_into(target, saved({"x": torch.ones(4)}))
    assert target["x"].inner.sum() == 4


class Hooked(torch.nn.Linear):
    """A module that looks at what it is given."""

    def _load_from_state_dict(self, state_dict, prefix, *args):
        state_dict[prefix + "weight"] = state_dict[prefix + "weight"][:2] * 2
        state_dict[prefix + "bias"] = state_dict[prefix + "bias"][:2]
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_hooks_may_look_at_values():
    big, net = torch.nn.Linear(3, 5), Hooked(3, 2)
    fastckpt.load_into(net, saved(big.state_dict()))
    assert torch.equal(net.weight, big.weight[:2] * 2)


class Keeps(torch.nn.Linear):
    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.weight = torch.nn.Parameter(state_dict[prefix + "weight"])


def test_a_module_that_keeps_what_it_is_given():
    source, net = torch.nn.Linear(3, 2), Keeps(3, 2)
    with pytest.raises(RuntimeError, match="'weight' keeps the tensor"):
        fastckpt.load_into(net, saved(source.state_dict()), strict=False)


class Extra(torch.nn.Linear):
    extra = None

    def get_extra_state(self):
        return {"steps": 7, "scale": torch.ones(2)}

    def set_extra_state(self, state):
        self.extra = state


def test_extra_state():
    net = Extra(3, 2)
    fastckpt.load_into(net, saved(Extra(3, 2).state_dict()))
    assert net.extra["steps"] == 7
    assert torch.equal(net.extra["scale"], torch.ones(2))


def test_names_that_are_no_tensors_are_unexpected_too():
    data = saved({**torch.nn.Linear(3, 2).state_dict(), "epoch": 5})
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "epoch"'):
        fastckpt.load_into(torch.nn.Linear(3, 2), data)


@pytest.mark.parametrize(("views", "sent", "there"), OVERLAPPING)
@pytest.mark.parametrize("shards", [False, True], ids=["one_file", "shards"])
def test_tensors_that_overlap_are_filled_in_their_order(views, sent, there, shards, tmp_path):
    def fill(values, tensors):
        if shards:
            fastckpt.save_sharded(values, tmp_path, max_shard_bytes=64)
        else:
            torch.save(values, tmp_path / "x.pt")
        fastckpt.load_into(tensors, tmp_path if shards else tmp_path / "x.pt")

    check_overlapping(views, sent, there, fill)


def test_buffers_that_overlap_in_a_module(tmp_path):
    class Overlapping(torch.nn.Module):
        def __init__(self):
            super().__init__()
            flat = torch.zeros(8)
            self.register_buffer("head", flat[::2])
            self.register_buffer("flat", flat)

    state = {"head": torch.ones(4), "flat": torch.full((8,), 2.0)}
    torch.save(state, tmp_path / "x.pt")
    expected, net = Overlapping(), Overlapping()
    expected.load_state_dict(state)
    fastckpt.load_into(net, tmp_path / "x.pt")
    assert torch.equal(net.flat, expected.flat)


@pytest.mark.parametrize("names", [("whole", "part"), ("part", "whole")], ids="-".join)
def test_a_view_that_begins_where_the_whole_does(names, tmp_path):
    """Both in the file and there; whichever comes last, all of the whole is filled."""
    whole, there = torch.arange(8.0), torch.zeros(8)
    torch.save(
        {name: {"whole": whole, "part": whole[:2]}[name] for name in names}, tmp_path / "x.pt"
    )
    fastckpt.load_into(
        {name: {"whole": there, "part": there[:2]}[name] for name in names}, tmp_path / "x.pt"
    )
    assert torch.equal(there, whole)


# -- targets that are larger than their memory -------------------------------------------------------------------------

SHRUNK = {"freed": 0, "nearly freed": 4, "an element short": 4 * 1000 + 4 * 10 - 4}


def into_dict(target, data):
    fastckpt.load_into({"a": torch.zeros(3), "w": target}, data)


def into_module(target, data):
    module = torch.nn.Module()
    module.a, module.w = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(target)
    fastckpt.load_into(module, data)


def into_stream(target, data):
    state = {"a": torch.zeros(3), "w": target}
    fastckpt.stream.load(io.BytesIO(dumped(fastckpt.load(data))), out=state)


def into_out(target, data):
    with fastckpt.open(data) as checkpoint:
        checkpoint["w"].read(out=target)


def dumped(obj):
    file = io.BytesIO()
    fastckpt.stream.dump(obj, file)
    return file.getvalue()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["straight", "cast"])
@pytest.mark.parametrize("nbytes", SHRUNK.values(), ids=SHRUNK)
@pytest.mark.parametrize("fill", [into_dict, into_module, into_stream, into_out])
def test_targets_without_their_memory(fill, nbytes, dtype):
    """torch's own functions write to it all the same."""
    data = saved({"a": torch.ones(3), "w": torch.arange(1000, dtype=dtype)})
    target = torch.zeros(1010)[10:]
    target.untyped_storage().resize_(nbytes)
    words = f"its storage was freed or resized: it has {nbytes} bytes, and the elements need 4040"
    if fill is into_out and dtype is torch.float64:
        words = "a tensor of torch.float32"
    with pytest.raises((RuntimeError, ValueError), match=words):
        fill(target, data)
    assert target.untyped_storage().nbytes() == nbytes
    target.untyped_storage().resize_(4040)
    if dtype is torch.float32 or fill in (into_dict, into_module):
        fill(target, data)
        assert torch.equal(target, torch.arange(1000.0))
