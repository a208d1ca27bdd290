"""Imports on first use: a fork waits for them, so that no module stays locked, or half there, in a child."""

import ast
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import fastckpt
from support import forks_among_threads

PACKAGE = Path(fastckpt.__file__).parent
FILES = [path for path in PACKAGE.rglob("*.py") if path.name != "build.py"]  # a script


def unguarded(node, inside=False):
    """Lines of imports inside of functions that do not stand in ``with importing``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)) and inside:
            yield child.lineno
        elif isinstance(child, ast.With) and ast.unparse(child.items[0]) == "importing":
            continue
        else:
            yield from unguarded(child, inside or isinstance(child, ast.FunctionDef))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_of_functions_are_guarded(path):
    assert list(unguarded(ast.parse(path.read_text()))) == []


CHILD = """
import os, signal, sys, threading, time
import torch
import fastckpt.data
path = sys.argv[1]

def in_child(work):
    pid = os.fork()
    if pid == 0:
        signal.alarm(240)
        try:
            work()
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
"""

FIRST_USES = {
    "load": """
thread = threading.Thread(target=lambda: fastckpt.load(path))
thread.start()
in_child(lambda: fastckpt.load(path))
thread.join()
""",
    "a loader's threads": """
reader = fastckpt.data.CheckpointReader(path)
reader = fastckpt.data.MultiReader(reader, reader)
epoch = iter(fastckpt.data.DataLoader(reader, 2, num_workers=2))
in_child(lambda: [len(list(fastckpt.data.DataLoader(reader, 2, num_workers=2))), fastckpt.load(path)])
assert len(list(epoch)) == 8
""",
    "a file each": """
reader = fastckpt.data.CheckpointReader([path] * 8)
epoch = iter(fastckpt.data.DataLoader(reader, 2, num_workers=2))
in_child(lambda: list(fastckpt.data.DataLoader(reader, 2, num_workers=2)))
assert len(list(epoch)) == 4
""",
}


@forks_among_threads
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
@pytest.mark.parametrize("how", FIRST_USES)
def test_a_fork_during_the_first_use(how, tmp_path):
    torch.save({"x": torch.arange(16.0).reshape(8, 2)}, tmp_path / "x.pt")
    code = CHILD + textwrap.dedent(FIRST_USES[how])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "x.pt")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
