"""The benchmarks: each can be set up and called, on files of a few tensors. Nothing is timed here."""

import importlib
import inspect
import json
import os
from pathlib import Path

import pytest

SUITE = Path(__file__).resolve().parent.parent / "asv_bench"
pytestmark = pytest.mark.skipif(
    not SUITE.exists(), reason="the benchmarks are not part of an sdist"
)
MODULES = sorted(
    path.stem for path in SUITE.glob("benchmarks/*.py") if path.stem not in ("__init__", "common")
)
KINDS = ("time_", "timeraw_", "peakmem_", "track_")


@pytest.fixture(scope="module")
def suite():
    """A function that imports a module of benchmarks."""
    before = dict(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SUITE)
        os.environ["FASTCKPT_BENCH_MB"] = "4"
        yield lambda name: importlib.import_module(f"benchmarks.{name}")
    os.environ.clear()  # benchmarks set variables, too
    os.environ.update(before)


@pytest.fixture(scope="module")
def folder(suite, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("bench"))
    suite("common").make_files(folder, large_mb=4, small_mb=4, many=20)
    return folder


def classes_in(module):
    return [
        kind
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if kind.__module__ == module.__name__ and methods_of(kind)
    ]


def methods_of(kind):
    return [name for name in dir(kind) if name.startswith(KINDS)]


def combinations(kind):
    """Each value of each parameter at least once, with the first of the others."""
    first = [values[0] for values in kind.params]
    for i, values in enumerate(kind.params):
        for value in values:
            yield (*first[:i], value, *first[i + 1 :])


def test_configuration():
    found = json.loads((SUITE / "asv.conf.json").read_text())
    assert found["project"] == "fastckpt"
    assert (SUITE / found["benchmark_dir"]).is_dir()
    for name in ("env_dir", "results_dir", "html_dir"):
        assert found[name].startswith(".asv/")


@pytest.mark.parametrize("module", MODULES)
def test_each_benchmark_runs(suite, folder, monkeypatch, module):
    monkeypatch.setattr(suite("common"), "touch_memory", lambda nbytes: None)
    ran = 0
    for kind in classes_in(suite(module)):
        assert len(kind.params) == len(kind.param_names)
        for values in dict.fromkeys(combinations(kind)):
            ran += runs(kind, ([folder] if hasattr(kind, "setup_cache") else []), values)
    assert ran


def runs(kind, cache, values):
    """Whether a benchmark runs with these parameters, or skips itself as asv asks for it."""
    benchmark = kind()
    try:
        if hasattr(benchmark, "setup"):
            benchmark.setup(*cache, *values)
    except NotImplementedError:
        return False
    for name in methods_of(kind):
        result = getattr(benchmark, name)(*cache, *values)
        if name.startswith("timeraw_"):
            compile(result, name, "exec")
        elif name.startswith("track_"):
            assert result > 0
    if hasattr(benchmark, "teardown"):
        benchmark.teardown(*cache, *values)
    return True
