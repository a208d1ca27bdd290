"""progress= of everything long: a callable, or a bar of tqdm's."""

import sys
import types

import pytest
import torch

import fastckpt


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.pt"
    torch.save({f"w{i}": torch.full((1000,), float(i)) for i in range(5)}, path)
    return str(path)


class Bar:
    """What tqdm.auto.tqdm offers, as far as it is used."""

    made = ()

    def __init__(self, **options):
        self.options, self.n, self.total, self.closed = options, 0, None, False
        type(self).made = (*self.made, self)

    def update(self, count):
        self.n += count

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.closed = True


def test_a_bar(path, monkeypatch):
    monkeypatch.setattr(Bar, "made", ())
    monkeypatch.setitem(sys.modules, "tqdm", types.ModuleType("tqdm"))
    monkeypatch.setitem(sys.modules, "tqdm.auto", types.SimpleNamespace(tqdm=Bar))
    fastckpt.load(path, progress=True)
    (bar,) = Bar.made
    assert (bar.n, bar.total, bar.closed) == (20_000, 20_000, True)
    assert bar.options["desc"] == path


def test_a_bar_without_tqdm(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ModuleNotFoundError, match="pip install tqdm"):
        fastckpt.load(path, progress=True)


@pytest.mark.parametrize("call", ["load", "load_into"])
def test_a_callable_is_told_of_the_file(path, call):
    told = []

    def tell(*args):
        told.append(args)

    if call == "load":
        fastckpt.load(path, progress=tell)
    else:
        fastckpt.load_into({f"w{i}": torch.empty(1000) for i in range(5)}, path, progress=tell)
    assert told[-1] == (20_000, 20_000, path)


@pytest.mark.parametrize("off", [None, False])
def test_nobody_is_told(path, off):
    assert len(fastckpt.load(path, progress=off)) == 5
