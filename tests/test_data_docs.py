"""The examples of docs/data.md: they run in their order, and give what their comments say."""

import ast
import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).resolve().parent.parent / "docs" / "data.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the pages are not part of an sdist")

# What the line gives -> what stands there.
SAYS = {
    'reader[3]["image"].shape': torch.Size([8, 8]),
    'reader.read_batch(range(64))["image"].shape': torch.Size([64, 8, 8]),
    "len(both), both.locate(-1)": (7, (1, 0)),
    "len(good)": 49,
    "len(loader)": 10,
    "len(batches)": 11,
    'sum(len(batch["label"]) for batch in loader)': 1000,
}


def test_examples(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(examples) >= 8
    names, said = {}, {}
    for example in examples:
        for statement in ast.parse(example).body:
            if isinstance(statement, ast.Expr):
                text = ast.unparse(statement)
                said[text] = eval(text, names)
            else:
                exec(compile(ast.Module([statement], []), PAGE.name, "exec"), names)
    for text, value in SAYS.items():
        assert said[ast.unparse(ast.parse(text).body[0])] == value, text
    assert "sample 5 cannot be read with 47 batches to come" in capsys.readouterr().out
