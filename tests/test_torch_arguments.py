"""load takes what torch.load takes, in the same places and with the same meaning."""

import inspect
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

import fastckpt
from objects import saved, torch_loads
from support import QUIET, TORCH, same
from ziprewrite import big_endian, rewritten, swapped

pytestmark = QUIET

THEIRS = inspect.signature(torch.load).parameters
OURS = inspect.signature(fastckpt.load).parameters


@pytest.mark.parametrize(
    "name", [name for name in THEIRS if THEIRS[name].kind is not inspect.Parameter.VAR_KEYWORD]
)
def test_signature(name):
    assert OURS[name].kind == THEIRS[name].kind
    assert list(OURS)[:3] == list(THEIRS)[:3]


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in inspect.signature(pickle.Unpickler).parameters
        if name not in ("file", "buffers")
    ],
)
def test_arguments_of_the_unpickler(name):
    assert OURS[name].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize(
    "keywords",
    [{"map_locations": "cpu"}, {"nonsense": 1}, {"weights_only_": True}, {"buffers": []}],
    ids=lambda keywords: next(iter(keywords)),
)
def test_no_such_argument(keywords):
    with pytest.raises(TypeError, match=next(iter(keywords))):
        fastckpt.load(saved([1]), **keywords)


def test_positional():
    data = saved([torch.ones(2)])
    same([torch.ones(2)], fastckpt.load(data, "cpu", None))
    same([torch.ones(2)], fastckpt.load(data, "cpu", pickle, weights_only=False))
    with pytest.raises(TypeError):
        fastckpt.load(data, "cpu", None, True)


@pytest.mark.parametrize("weights_only", [None, True])
def test_pickle_module_is_for_pickles_that_are_run(weights_only):
    with pytest.raises(TypeError, match="pickle_module is used with weights_only=False only"):
        fastckpt.load(saved([1]), pickle_module=pickle, weights_only=weights_only)


@pytest.mark.parametrize(
    ("keyword", "value", "error", "message"),
    [
        ("framework", "jax", ValueError, "expected one of: torch, numpy"),
        ("unknown", "ignore", ValueError, "expected one of: error, opaque"),
        ("threads", 0, ValueError, "at least 1"),
        ("threads", "two", TypeError, "a number is expected"),
        ("threads", True, TypeError, "a number is expected"),
        ("offset", -1, ValueError, "negative"),
        ("nbytes", -1, ValueError, "negative"),
        ("keys", 5, TypeError, "keys"),
        ("keys", [5], TypeError, "keys"),
        ("progress", 5, TypeError, "callable"),
        ("limits", 5, TypeError, "Limits"),
    ],
)  # fmt: skip
def test_nonsense(keyword, value, error, message):
    with pytest.raises(error, match=message):
        fastckpt.load(saved([torch.ones(2)]), **{keyword: value})


@pytest.mark.parametrize(
    "keywords", [{"map_location": "cuda"}, {"map_location": {}}, {"weights_only": False}], ids=repr
)
def test_numpy_has_no_torch_arguments(keywords):
    with pytest.raises(TypeError, match="framework='numpy'"):
        fastckpt.load(saved([torch.ones(2)]), framework="numpy", **keywords)


# -- weights_only, and the environment ---------------------------------------------------------------------------------


class Custom:
    """A class that no checkpoint should need."""

    def __eq__(self, other):
        return type(other) is Custom


FORCE, FORCE_NOT = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
CASES = [
    # environment, weights_only, does the pickle run?
    ({}, None, False),
    ({}, True, False),
    ({}, False, True),
    ({FORCE: "1"}, False, False),
    ({FORCE: "True"}, False, False),
    ({FORCE: "YES"}, None, False),
    ({FORCE: "0"}, False, True),
    ({FORCE: ""}, False, True),
    ({FORCE: "no"}, False, True),
    ({FORCE_NOT: "1"}, None, True),
    ({FORCE_NOT: "Y"}, None, True),
    ({FORCE_NOT: "1"}, True, False),
    ({FORCE_NOT: "0"}, None, False),
]


@pytest.mark.parametrize(("environment", "weights_only", "runs"), CASES, ids=repr)
def test_environment(environment, weights_only, runs, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    data = saved([Custom()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert whether_it_runs(fastckpt.load, data, weights_only) == runs
        if AS_TORCH_DOES_TODAY:
            assert whether_it_runs(torch.load, io.BytesIO(data), weights_only) == runs


# Before, torch took these words in lower case only; before 2.6 it ran every pickle.
AS_TORCH_DOES_TODAY = TORCH >= (2, 13)


def whether_it_runs(load, source, weights_only):
    try:
        return load(source, weights_only=weights_only) == [Custom()]
    except pickle.UnpicklingError:
        return False


def test_environment_that_turns_pickles_on_is_told(monkeypatch):
    monkeypatch.setenv(FORCE_NOT, "1")
    with pytest.warns(UserWarning, match=FORCE_NOT) as caught:
        fastckpt.load(saved([Custom()]))
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fastckpt.load(saved([1]), weights_only=False)


def test_environment_that_contradicts_itself(monkeypatch):
    monkeypatch.setenv(FORCE, "1")
    monkeypatch.setenv(FORCE_NOT, "1")
    with pytest.raises(ValueError, match="both set"):
        fastckpt.load(saved([1]))


# -- encoding, errors, fix_imports -------------------------------------------------------------------------------------

# What Python 2 wrote: a list of two str, and of a class of a module that has another name today.
STRINGS = b"\x80\x02]q\x00(U\x03abcU\x02\xe9\xff" + b"e."
MOVED = b"\x80\x02]c__builtin__\nxrange\nK\x03\x85Ra."


def with_pickle(content):
    return rewritten(saved([1]), change=lambda name, old: content if name == "data.pkl" else old)


@pytest.mark.parametrize("encoding", ["latin1", "bytes", "cp1252", "iso-8859-15"])
@pytest.mark.parametrize("weights_only", [True, False])
def test_encoding(encoding, weights_only):
    data = with_pickle(STRINGS)
    expected = torch.load(io.BytesIO(data), weights_only=False, encoding=encoding)
    same(expected, fastckpt.load(data, encoding=encoding, weights_only=weights_only))


@pytest.mark.parametrize("weights_only", [True, False])
def test_wrong_encoding(weights_only):
    with pytest.raises(ValueError, match="encoding" if weights_only else "decode"):
        fastckpt.load(with_pickle(STRINGS), weights_only=weights_only)


@pytest.mark.parametrize("errors", ["replace", "ignore", "surrogateescape", "backslashreplace"])
@pytest.mark.parametrize("weights_only", [True, False])
def test_errors(errors, weights_only):
    data = with_pickle(STRINGS)
    expected = torch.load(io.BytesIO(data), weights_only=False, errors=errors)
    same(expected, fastckpt.load(data, errors=errors, weights_only=weights_only))


@pytest.mark.parametrize("name", ["encoding", "errors"])
def test_no_such_encoding(name):
    with pytest.raises(LookupError, match="nonsense"):
        fastckpt.load(with_pickle(STRINGS), **{name: "nonsense"})


@pytest.mark.parametrize("weights_only", [True, False])
def test_fix_imports(weights_only):
    assert fastckpt.load(with_pickle(MOVED), weights_only=weights_only) == [range(3)]


def test_no_fix_imports():
    with pytest.raises(ModuleNotFoundError, match="__builtin__"):
        fastckpt.load(with_pickle(MOVED), weights_only=False, fix_imports=False)


# -- what torch is set to ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["LITTLE", "BIG", "NATIVE"])
def test_default_endianness(order, monkeypatch):
    """It is asked for files that do not say it: those of torch before 2.1."""
    from torch.serialization import (
        LoadEndianness,
        get_default_load_endianness,
        set_default_load_endianness,
    )

    before = get_default_load_endianness()
    data = rewritten(
        saved([torch.arange(5)]), change=lambda name, old: None if name == "byteorder" else old
    )
    big = rewritten(data, change=lambda name, old: swapped(old, 8) if name == "data/0" else old)
    try:
        set_default_load_endianness(getattr(LoadEndianness, order))
        for content in (data, big):
            same(torch_loads(content), fastckpt.load(content))
        told = big_endian(saved([torch.arange(5)]), {"0": 8})
        assert fastckpt.load(told)[0].tolist() == [0, 1, 2, 3, 4]
    finally:
        set_default_load_endianness(before)


def test_config_load_mmap(tmp_path):
    config = pytest.importorskip("torch.utils.serialization.config")
    path = tmp_path / "file.pt"
    torch.save([torch.ones(1 << 18)], path)
    with config.patch("load.mmap", True):
        mapped, read = fastckpt.load(path)[0], fastckpt.load(path, mmap=False)[0]
        same([torch.ones(2)], fastckpt.load(saved([torch.ones(2)])))  # what has no file is read
    assert [is_mapped(t, path) for t in (mapped, read)] == [True, False]


def is_mapped(tensor, path):
    """Whether a tensor's memory is a mapping of the file."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            start, _, end = line.split()[0].partition("-")
            if int(start, 16) <= tensor.data_ptr() < int(end, 16):
                return str(path) in line
    return False


# -- torch.load = load, in other people's code -------------------------------------------------------------------------


def test_in_place_of_torch_load(tmp_path, monkeypatch):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LSTM(4, 2), nn.Embedding(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    schedule.step()
    path = str(tmp_path / "training.pt")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(),
             "random": torch.get_rng_state(), "epoch": 3}  # fmt: skip
    torch.save(state, path)
    expected = torch.load(path, weights_only=True)
    monkeypatch.setattr(torch, "load", fastckpt.load)
    loaded = torch.load(path, map_location=torch.device("cpu"), weights_only=True, mmap=False)
    same(expected, loaded)
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LSTM(4, 2), nn.Embedding(5, 2))
    other.load_state_dict(loaded["model"])
    again = torch.optim.AdamW(other.parameters(), lr=5)
    again.load_state_dict(loaded["optimizer"])
    torch.optim.lr_scheduler.CosineAnnealingLR(again, 10).load_state_dict(loaded["schedule"])
    torch.set_rng_state(loaded["random"])
    same(optimizer.state_dict(), again.state_dict())
    same(dict(model.state_dict()), dict(other.state_dict()))
    sum(p.sum() for p in other.parameters()).backward()
    again.step()


def test_assign(tmp_path):
    model = nn.Linear(3, 2)
    torch.save(model.state_dict(), tmp_path / "file.pt")
    state = fastckpt.load(tmp_path / "file.pt")
    other = nn.Linear(3, 2)
    other.load_state_dict(state, assign=True)
    assert other.weight.data_ptr() == state["weight"].data_ptr()
    other(torch.ones(3)).sum().backward()
    assert other.weight.grad is not None
