"""docs/api.md: every public name has its place there, with the signature of the code, and the examples run."""

import inspect
import re

import pytest

import docpages
import fastckpt
from fastckpt import data

pytestmark = docpages.needed
TEXT = docpages.text_of("api.md")
FLAT = " ".join(TEXT.split())

NAMES = [name for name in fastckpt.__all__ if name not in ("data", "stream", "__version__")]
NAMES += [f"data.{name}" for name in data.__all__]
NAMES += [f"stream.{name}" for name in ("dump", "load", "iter")]
# They are made by others, and not called.
UNCALLED = [
    name for name in NAMES if re.search("Report|Check|Finding|LazyTensor|Opaque|Error", name)
]
UNCALLED.remove("data.CheckpointReader")
UNCALLED.remove("data.IntegrityReport")


def find(name):
    found = fastckpt
    for part in name.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_name_has_its_place(name):
    heading, row = f"\n### {name}\n", rf"\n\| `{re.escape(name)}[`(]"
    assert heading in TEXT or re.search(row, TEXT)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in UNCALLED])
def test_signatures(name):
    signature = inspect.signature(find(name))
    parameters = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    expected = str(signature.replace(parameters=parameters, return_annotation=signature.empty))
    prefix = "" if name.startswith("data.") else "fastckpt."
    assert f"{prefix}{name}{expected}" in FLAT


def sections():
    """{name: what the page says of it} of the classes."""
    parts = re.split(r"^#{2,3} (.*)\n", TEXT, flags=re.MULTILINE)
    said = dict(zip(parts[1::2], parts[2::2], strict=True))
    return {
        name: text for name, text in said.items() if inspect.isclass(getattr(fastckpt, name, None))
    }


@pytest.mark.parametrize("name", sections())
def test_members_that_it_names_are_there(name):
    cls = getattr(fastckpt, name)
    text = re.sub(r"^```.*?^```", "", sections()[name], flags=re.MULTILINE | re.DOTALL)
    fields = {*getattr(cls, "__dataclass_fields__", ()), "name", "shape", "shards"}
    members = re.findall(r"`\.(\w+)", text)
    missing = [each for each in members if each not in fields and not hasattr(cls, each)]
    assert not missing
    assert members or name == "Limits"


# What the line gives -> what stands there.
SAYS = {
    'state["epoch"]': 3,
    'resume("model.pt", model, optimizer)': 4,
    "report.ok, report.rating": (True, "known"),
    "report.ok, report.counts": (True, {"ok": 8}),
    'fastckpt.load("saved.pt")["epoch"]': 3,
    "report.kept": ("model.weight", "model.bias"),
    'fastckpt.open("small.pt").metadata': {"step": 1000},
}


def test_examples(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = docpages.run_examples("api.md")
    for text, value in SAYS.items():
        assert said(text) == value, text
