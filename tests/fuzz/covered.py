"""Let coverage lead: build the native modules with clang and AddressSanitizer, and run libFuzzer (atheris) over a target.

    python -m fuzz.covered --target pickle --minutes 5

Everything it makes lies in build/fuzz: a copy of the sources with its modules, a corpus for each target, which is kept,
and crashes. Needs clang and atheris (the extra ``fuzz``); torch is not used. Exits with 1 where there is a crash.
"""

import argparse
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

PROJECT = pathlib.Path(__file__).resolve().parent.parent.parent
TARGETS = ("zip", "legacy", "tar", "pickle", "load")
# -O1: AddressSanitizer's reports name lines. Assertions of Cython and Python stay out, as in what is shipped.
FLAGS = "-O1 -g -fno-omit-frame-pointer -fsanitize=address,fuzzer-no-link"
LIMITS = ("-timeout=20", "-rss_limit_mb=3000", "-malloc_limit_mb=256", "-max_len=20000")


def require(clang):
    """One sentence where something is missing."""
    if shutil.which(clang) is None:
        return f"{clang} is missing: coverage of native code needs clang (apt install clang), or CLANG=path"
    if importlib.util.find_spec("atheris") is None:
        return "atheris is missing: pip install -e '.[fuzz]' brings it (it has no build for this Python if that fails)"
    return None


def build(folder, clang):
    """Compile a copy of the sources, as far as it is older than they are; the folder to import it from."""
    root = folder / "src"
    for source in (PROJECT / "src").rglob("*"):
        made = (
            source.suffix in (".so", ".pyc")
            or source.suffix == ".c"
            and source.name.startswith("_")
        )
        copy = root / source.relative_to(PROJECT / "src")
        if (
            source.is_file()
            and not made
            and not (copy.exists() and copy.stat().st_mtime >= source.stat().st_mtime)
        ):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy)
    # No OpenMP: its runtime is not instrumented, and threads would make a crash depend on luck.
    environment = {
        **os.environ,
        "CC": clang,
        "CFLAGS": FLAGS,
        "FASTCKPT_OPENMP": "0",
        "PYTHONPATH": str(root),
    }
    subprocess.run([sys.executable, "-m", "fastckpt.build"], cwd=root, env=environment, check=True)
    return root


def write_corpus(folder, target):
    """Fixtures of the kind that a target reads; for the pickle machine all their pickles."""
    from .mutate import read_seeds

    folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(read_seeds()):
        if target == "pickle":
            contents = [
                bytes([number % 3]) + part.data for part in seed.parts if part.kind == "pickle"
            ]
        else:
            contents = [seed.data] if target in ("load", seed.kind) else []
        for i, content in enumerate(contents):
            (folder / f"seed-{number}-{i}").write_bytes(content)


def fuzz(folder, root, target, minutes):
    """Run libFuzzer over a target for some minutes; its exit status."""
    import atheris

    corpus, crashes = folder / "corpus" / target, folder / "crashes"
    write_corpus(corpus, target)
    crashes.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": os.path.join(atheris.path(), "asan_with_fuzzer.so"),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "PYTHONMALLOC": "malloc",  # or the sanitizer does not see the ends of Python's objects
        "PYTHONPATH": os.pathsep.join([str(root), str(PROJECT / "tests")]),
    }
    arguments = [
        f"-max_total_time={60 * minutes:.0f}",
        f"-artifact_prefix={crashes}/{target}-",
        "-print_final_stats=1",
        *LIMITS,
    ]
    command = [sys.executable, "-m", "fuzz.entry", target, *arguments, str(corpus)]
    return subprocess.run(command, env=environment).returncode


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="python -m fuzz.covered", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--target", choices=[*TARGETS, "all"], default="all")
    parser.add_argument("--minutes", type=float, default=10, help="for each target")
    options = parser.parse_args(arguments)
    clang = os.environ.get("CLANG", "clang")
    if problem := require(clang):
        parser.exit(2, f"{problem}\n")
    folder = PROJECT / "build" / "fuzz" / "covered"
    root = build(folder, clang)
    targets = TARGETS if options.target == "all" else [options.target]
    failed = [target for target in targets if fuzz(folder, root, target, options.minutes)]
    if failed:
        print(f"crashed: {', '.join(failed)}; the inputs are in {folder / 'crashes'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
