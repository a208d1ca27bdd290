"""The pages of docs/: their examples as programs."""

import ast
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "docs"
# For a file that tests pages.
needed = pytest.mark.skipif(not FOLDER.exists(), reason="the pages are not part of an sdist")


def text_of(page):
    """What a page says; nothing where it is not there."""
    return (FOLDER / page).read_text() if FOLDER.exists() else ""


def run_examples(page):
    """Run all examples of a page, one after the other, over the same names.

    Returns a function: what a statement of theirs gave, by its text.
    """
    names, said = {}, {}
    for example in re.findall(r"^```python\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL):
        for statement in ast.parse(example).body:
            if isinstance(statement, ast.Expr):
                said[ast.unparse(statement)] = eval(ast.unparse(statement), names)
            else:
                exec(compile(ast.Module([statement], []), page, "exec"), names)
    return lambda text: said[ast.unparse(ast.parse(text).body[0])]
