"""A copy of the sources builds under another name, and lives beside the installed one."""

import importlib
import os
import pickle
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

import fastckpt

pytest.importorskip("Cython", "3.3", reason="compiling a copy needs Cython")
pytest.importorskip("setuptools", reason="compiling a copy needs setuptools")

PACKAGE = Path(fastckpt.__file__).parent
COPY = "lab._vendor.fastckpt"
ERRORS = (
    "CheckpointError",
    "FormatError",
    "ChecksumError",
    "UnsupportedError",
    "UnsafePickleError",
    "LimitError",
)
PUBLIC_CLASSES = ("Checkpoint", "LazyTensor", "Opaque", *ERRORS)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A project whose ``lab._vendor.fastckpt`` was copied as sources and built there."""
    root = tmp_path_factory.mktemp("project")
    vendor = root / "lab" / "_vendor"
    built = shutil.ignore_patterns("*.so", "*.pyd", "_*.c", "__pycache__")
    shutil.copytree(PACKAGE, vendor / "fastckpt", ignore=built)
    for folder in (vendor.parent, vendor):
        (folder / "__init__.py").touch()
    # Unoptimised: this is about names, and a third of the time.
    build(root, CFLAGS="-O0")
    return root


def build(root, name=COPY, **environment):
    """Run the copy's own build, as its documentation says."""
    done = subprocess.run(
        [sys.executable, "-m", f"{name}.build"],
        cwd=root,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def vendored(root):
    """The copy, imported into this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root)
        yield importlib.import_module(COPY)
        for name in [name for name in sys.modules if name.split(".")[0] == "lab"]:
            del sys.modules[name]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A small checkpoint, which both copies load."""
    path = tmp_path_factory.mktemp("checkpoint") / "small.pt"
    torch.save({"weight": torch.arange(12.0).reshape(3, 4), "step": 7}, path)
    return path


def native_names(package):
    """The compiled modules of a package: one for each .pyx file, wherever it lies."""
    folder = Path(package.__file__).parent
    return [
        ".".join([package.__name__, *source.relative_to(folder).with_suffix("").parts])
        for source in sorted(folder.rglob("*.pyx"))
    ]


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_both_copies_load_the_same_file_in_one_process(vendored, checkpoint, framework):
    ours = fastckpt.load(checkpoint, framework=framework)
    theirs = vendored.load(checkpoint, framework=framework)
    assert ours["step"] == theirs["step"] == 7
    np.testing.assert_array_equal(np.asarray(ours["weight"]), np.asarray(theirs["weight"]))


def test_every_native_module_of_the_copy_is_its_own(vendored, root):
    names = native_names(vendored)
    assert names
    for name in names:
        module = importlib.import_module(name)
        assert module.__name__ == name
        assert Path(module.__file__).is_relative_to(root)


def test_copy_imports_nothing_of_the_installed_package(root, checkpoint):
    script = (
        "import sys, importlib\n"
        f"copy = importlib.import_module({COPY!r})\n"
        "copy.load(sys.argv[1])\n"
        "with copy.open(sys.argv[1]) as opened: opened['weight'].read()\n"
        "print(*[name for name in sys.modules if name.split('.')[0] == 'fastckpt'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, checkpoint],
        cwd=root,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("name", PUBLIC_CLASSES)
def test_classes_are_distinct_and_know_their_own_module(vendored, name):
    ours, theirs = getattr(fastckpt, name), getattr(vendored, name)
    assert ours is not theirs
    assert not issubclass(theirs, ours)
    assert theirs.__module__.startswith(f"{COPY}.")
    assert ours.__module__.startswith("fastckpt.")


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_pickled_under_the_name_of_their_copy(vendored, name):
    error = getattr(vendored, name)("model.pt: an example")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)


def test_an_error_of_the_copy_is_not_one_of_the_installed_package(vendored, tmp_path):
    path = tmp_path / "not-a-checkpoint.pt"
    path.write_bytes(b"<!DOCTYPE html><html></html>")
    with pytest.raises(vendored.FormatError) as caught:
        vendored.load(path)
    assert not isinstance(caught.value, fastckpt.CheckpointError)


def test_building_again_compiles_nothing(vendored, root):
    modules = sorted((root / "lab").rglob("*.so"))
    before = [module.stat().st_mtime_ns for module in modules]
    assert modules
    build(root, CFLAGS="-O0")
    assert [module.stat().st_mtime_ns for module in modules] == before


def test_a_folder_that_was_copied_with_what_was_built_is_built_anew(tmp_path):
    # What came with the copy is newer than its sources, and of another name.
    original, copy = tmp_path / "original", tmp_path / "lab" / "copy"
    original.mkdir()
    (original / "__init__.py").touch()
    shutil.copy(PACKAGE / "build.py", original)
    (original / "_native.pyx").write_text("cdef class Thing:\n    pass\n")
    build(tmp_path, "original", CFLAGS="-O0")
    shutil.copytree(original, copy)
    (copy.parent / "__init__.py").touch()
    build(tmp_path, "lab.copy", CFLAGS="-O0")
    script = "from lab.copy._native import Thing; print(Thing.__module__)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True
    )
    assert done.stdout.strip() == "lab.copy._native"


@pytest.fixture(scope="module")
def own_distribution(root):
    """The project as a distribution, by the files that the page on vendoring shows."""
    page = PACKAGE.parent.parent / "docs" / "vendoring.md"
    if not page.exists():
        pytest.skip("the pages are not part of an sdist")
    blocks = re.findall(
        r"^  ```\w+\n  # (\S+)\n(.*?)^  ```", page.read_text(), re.MULTILINE | re.DOTALL
    )
    files = {name: textwrap.dedent(text) for name, text in blocks}
    assert files.keys() == {"setup.py", "pyproject.toml"}
    for name, text in files.items():
        (root / name).write_text(text)
    with (root / "pyproject.toml").open("a") as file:
        file.write('\n[project]\nname = "lab"\nversion = "1"\n')
    return root


def test_the_wheel_of_a_project_has_sources_and_no_generated_c(own_distribution, tmp_path):
    root, folder = own_distribution, tmp_path / "lab" / "_vendor" / "fastckpt"
    assert list((root / "lab").rglob("_*.c"))
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_py", "--build-lib", tmp_path],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    packaged = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    sources = {
        path.relative_to(PACKAGE)
        for suffix in ("py", "pyx", "pxd", "h", "pyi")
        for path in PACKAGE.rglob(f"*.{suffix}")
    }
    assert packaged == sources | {Path("crc32.c"), Path("py.typed"), Path("LICENSE")}
