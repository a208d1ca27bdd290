"""What holds of the package as files: how it imports, builds, and names itself."""

import ast
import importlib.metadata
import importlib.util
import itertools
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tomllib
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

PACKAGE = Path(importlib.util.find_spec("fastckpt").origin).parent
PROJECT = PACKAGE.parent.parent
SOURCES = [
    path for suffix in ("py", "pyi", "pyx", "pxd") for path in sorted(PACKAGE.rglob(f"*.{suffix}"))
]
NATIVE = sorted(PACKAGE.rglob("*.pyx"))
PUBLIC = [
    "load",
    "open",
    "Checkpoint",
    "LazyTensor",
    "Opaque",
    "CheckpointError",
    "FormatError",
    "ChecksumError",
    "UnsupportedError",
    "UnsafePickleError",
    "LimitError",
]


def relative(path):
    return path.relative_to(PACKAGE).as_posix()


def each(paths):
    return pytest.mark.parametrize("path", paths, ids=relative)


def run_python(*arguments, cwd, path=PACKAGE.parent):
    """Run Python in a process of its own, which sees ``path`` before anything installed."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
    )


# Names: a copy may live under another one


@each(SOURCES)
def test_imports_within_the_package_are_relative(path):
    absolute = re.compile(r"^\s*(from|import|cimport)\s+fastckpt\b", re.MULTILINE)
    assert not absolute.search(path.read_text(encoding="utf-8"))


@each([path for path in SOURCES if path.suffix in {".py", ".pyi"}])
def test_python_code_does_not_spell_out_the_name(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    spelled = [
        f"line {node.lineno}: {node.value!r}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.search(r"\bfastckpt\b", node.value) and id(node) not in docstrings
    ]
    assert not spelled, "use __name__ or __package__"


@each([path for path in SOURCES if path.suffix in {".pyx", ".pxd"}])
def test_cython_code_does_not_spell_out_the_name(path):
    text = path.read_text(encoding="utf-8")
    text = re.sub(r'""".*?"""|#[^\n]*', "", text, flags=re.DOTALL)
    assert not re.search(r"\bfastckpt\b", text), "use __name__ or __package__"


# Native modules


@each(NATIVE)
def test_native_module_has_a_stub(path):
    assert path.with_suffix(".pyi").is_file()


@each(NATIVE)
def test_native_module_declares_its_directives_itself(path):
    # Cython reads them from the comments before the first statement, and nowhere else.
    lines = path.read_text(encoding="utf-8").splitlines()
    head = itertools.takewhile(lambda line: line.startswith("#"), lines)
    directives = " ".join(line for line in head if line.startswith("# cython:"))
    for directive in ("language_level=3", "freethreading_compatible=True"):
        assert directive in directives


@pytest.fixture
def extensions():
    """The function of build.py, as setup.py gets it: without importing the package."""
    pytest.importorskip("setuptools")
    return runpy.run_path(str(PACKAGE / "build.py"))["extensions"]


def make_sources(root, package, *names):
    folder = root.joinpath(*package.split("."))
    for name in names:
        source = folder / name
        source.parent.mkdir(parents=True, exist_ok=True)
        source.touch()


@pytest.mark.parametrize("package", ["fastckpt", "lab._vendor.fastckpt", "reader"])
def test_every_pyx_file_is_a_module(extensions, tmp_path, package):
    make_sources(tmp_path, package, "_zip.pyx", "containers/_tar.pyx", "plain.py", "_bytes.pxd")
    names = {extension.name for extension in extensions(package, tmp_path)}
    assert names == {f"{package}._zip", f"{package}.containers._tar"}


@pytest.mark.parametrize(
    ("module", "c_sources", "openmp"),
    [("_zip", [], False), ("_crc32", ["crc32.c"], False), ("_read", ["crc32.c"], True)],
)
def test_c_sources_and_openmp(extensions, tmp_path, monkeypatch, module, c_sources, openmp):
    monkeypatch.delenv("FASTCKPT_OPENMP", raising=False)
    make_sources(tmp_path, "fastckpt", f"{module}.pyx")
    (extension,) = extensions("fastckpt", tmp_path)
    assert [Path(source).name for source in extension.sources] == [f"{module}.pyx", *c_sources]
    openmp = openmp and sys.platform != "darwin"
    assert ("-fopenmp" in extension.extra_compile_args) == openmp
    assert ("-fopenmp" in extension.extra_link_args) == openmp


def test_openmp_can_be_left_out(extensions, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTCKPT_OPENMP", "0")
    make_sources(tmp_path, "fastckpt", "_read.pyx")
    (extension,) = extensions("fastckpt", tmp_path)
    assert "-fopenmp" not in [*extension.extra_compile_args, *extension.extra_link_args]


def test_flags_from_the_environment_come_last(extensions, tmp_path, monkeypatch):
    monkeypatch.setenv("CFLAGS", "-O1 -g '-DNAME=two words'")
    make_sources(tmp_path, "fastckpt", "_zip.pyx")
    (extension,) = extensions("fastckpt", tmp_path)
    assert extension.extra_compile_args[-3:] == ["-O1", "-g", "-DNAME=two words"]


def test_sources_are_relative_where_the_root_is(extensions, monkeypatch):
    # setuptools refuses absolute paths in an sdist
    monkeypatch.chdir(PACKAGE.parent)
    for extension in extensions(PACKAGE.name, "."):
        assert not any(os.path.isabs(path) for path in [*extension.sources, *extension.depends])


# Importing


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names(name):
    import fastckpt

    assert getattr(fastckpt, name).__name__.endswith(name)
    assert name in dir(fastckpt)
    assert name in fastckpt.__all__


def test_unknown_name_is_an_attribute_error():
    import fastckpt

    with pytest.raises(AttributeError, match="no_such_name"):
        _ = fastckpt.no_such_name


def test_import_loads_neither_torch_nor_native_modules(tmp_path):
    script = (
        "import sys, fastckpt\n"
        "for name, module in list(sys.modules.items()):\n"
        "    print(name, getattr(module, '__file__', None) or '')\n"
    )
    done = run_python("-c", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    loaded = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert "fastckpt" in loaded
    assert "torch" not in loaded
    native = [
        name
        for name, file in loaded.items()
        if name.startswith("fastckpt.") and file.endswith(tuple(EXTENSION_SUFFIXES))
    ]
    assert not native


@pytest.fixture(params=["fastckpt", "lab._vendor.fastckpt", "lab.reader"])
def unbuilt(request, tmp_path):
    """A copy of the sources alone, under some dotted name: (name, the folder where it starts)."""
    built = shutil.ignore_patterns("*.so", "*.pyd", "_*.c", "__pycache__")
    copy = tmp_path.joinpath(*request.param.split("."))
    shutil.copytree(PACKAGE, copy, ignore=built)
    for folder in copy.relative_to(tmp_path).parents:
        if folder.name:
            (tmp_path / folder / "__init__.py").touch()
    return request.param, tmp_path


def test_package_that_is_not_built_imports(unbuilt):
    name, root = unbuilt
    script = f"import importlib; print(importlib.import_module({name!r}).__file__)"
    done = run_python("-c", script, cwd=root, path=root)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(root)


@pytest.mark.parametrize("use", ["load", "open"])
def test_package_that_is_not_built_says_how_to_build_it(unbuilt, use):
    name, root = unbuilt
    (root / "model.pt").touch()
    script = f"import importlib; importlib.import_module({name!r}).{use}('model.pt')"
    done = run_python("-c", script, cwd=root, path=root)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "ImportError" in last or "ModuleNotFoundError" in last
    assert f"python -m {name}.build" in last


@pytest.mark.parametrize("start", ["by name", "by path"])
def test_build_starts_without_native_modules_and_finds_its_name(unbuilt, start):
    pytest.importorskip("Cython")
    pytest.importorskip("setuptools")
    name, root = unbuilt
    by_path = str(root.joinpath(*name.split("."), "build.py"))
    arguments = ["-m", f"{name}.build"] if start == "by name" else [by_path]
    done = run_python(*arguments, "--list", cwd=root, path=root)
    assert done.returncode == 0, done.stderr
    modules = [
        ".".join([name, *source.relative_to(PACKAGE).with_suffix("").parts]) for source in NATIVE
    ]
    assert done.stdout.split() == modules


def test_the_list_for_a_reader_that_has_enough():
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as pipe:
        command = [sys.executable, "-m", f"{PACKAGE.name}.build", "--list"]
        done = subprocess.run(command, cwd=PACKAGE.parent, stdout=pipe, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


# Metadata


def test_package_is_typed_and_licensed_where_it_lies():
    assert (PACKAGE / "py.typed").is_file()
    assert "Apache License" in (PACKAGE / "LICENSE").read_text(encoding="utf-8")


TOP = {
    ".ci", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md", "SECURITY.md",
    "asv_bench", "docs", "fixtures", "pyproject.toml", "scripts", "setup.py", "src", "tests",
}  # fmt: skip


@pytest.mark.skipif(not (PROJECT / ".git").exists(), reason="no repository, such as an sdist")
def test_nothing_has_strayed_into_the_repository():
    """What a trial leaves in the folder is easily added along with a change."""
    command = ["git", "-c", "safe.directory=*", "ls-files"]
    files = subprocess.run(command, cwd=PROJECT, check=True, capture_output=True, text=True).stdout
    assert {name.partition("/")[0] for name in files.splitlines()} == TOP


def test_the_two_licences_are_one():
    licence = PROJECT / "LICENSE"
    if not licence.is_file():
        pytest.skip("not a checkout")
    assert licence.read_bytes() == (PACKAGE / "LICENSE").read_bytes()


def test_version_of_the_package_is_that_of_the_distribution():
    version = runpy.run_path(str(PACKAGE / "_version.py"))["__version__"]
    try:
        installed = importlib.metadata.version("fastckpt-io")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("not installed")
    assert installed == version


def test_optional_libraries_are_asked_for_as_the_extras_have_them():
    pyproject = PROJECT / "pyproject.toml"
    if not pyproject.is_file():
        pytest.skip("not a checkout")
    extras = tomllib.loads(pyproject.read_text())["project"]["optional-dependencies"]
    libraries = runpy.run_path(str(PACKAGE / "data" / "extras.py"))["LIBRARIES"]
    for requirement, extra in libraries.values():
        assert requirement in extras[extra]
