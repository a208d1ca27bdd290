"""The examples of docs/data.md: they run in their order, and give what their comments say."""

from pathlib import Path

import pytest
import torch

import docpages
import litdatacraft
from support import same

pytestmark = docpages.needed

# What the line gives -> what stands there.
SAYS = {
    'reader[3]["image"].shape': torch.Size([8, 8]),
    'reader.read_batch(range(64))["image"].shape': torch.Size([64, 8, 8]),
    "reader[3]": {"x": torch.full((4,), 3.0), "label": 1, "name": "three"},
    "batch['x'].shape": torch.Size([64, 4]),
    "batch['label'].shape, len(batch['name'])": (torch.Size([64]), 64),
    "reader[-1]['y']": torch.tensor(999),
    "batch['positions'].shape, batch['atoms_ptr'].tolist()": (torch.Size([7, 3]), [0, 4, 7]),
    "graphs.check_integrity().ok": True,
    "len(both), both.locate(-1)": (7, (1, 0)),
    "len(good)": 49,
    "len(loader)": 10,
    "len(batches)": 11,
    'sum(len(batch["label"]) for batch in loader)': 1000,
}


def write_with_litdata():
    """What the page has litdata make, in the one example that is not run."""
    names = ["zero", "one", "two", "three"]
    rows = [[torch.full((4,), float(i)), i % 2, names[i % 4]] for i in range(200)]
    tree = dict.fromkeys(["x", "label", "name"])
    formats = ["no_header_tensor:1", "int", "str"]
    litdatacraft.write(Path("optimized"), formats, tree, rows, chunk=50)


def test_examples(tmp_path, monkeypatch, capsys):
    pytest.importorskip("zarr")
    monkeypatch.chdir(tmp_path)
    write_with_litdata()
    said = docpages.run_examples("data.md")
    for text, value in SAYS.items():
        same(value, said(text))
    assert "sample 5 cannot be read with 47 batches to come" in capsys.readouterr().out
