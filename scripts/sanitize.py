"""Run Python over native modules that are compiled with sanitizers.

``python scripts/sanitize.py -m pytest -k zip``: the arguments are those of Python. With ``--threads`` before them the
sanitizer is that of data races, else those of addresses and undefined behaviour. A copy of the sources is compiled in
build/ (what is newer than its module), so that the modules beside the sources stay as they are. Needs gcc.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).absolute().parent.parent
SOURCES = PROJECT / "src"
# What a C compiler or Python leaves beside the sources.
BUILT = shutil.ignore_patterns("*.so", "_*.c", "__pycache__")


@dataclass(frozen=True)
class Sanitizer:
    """``folder`` in build/, compiler ``flags``, environment of the ``build`` and of the ``run``, libraries to preload."""

    folder: str
    flags: str
    build: dict
    run: dict
    libraries: tuple
    symbol: str  # that a compiled module refers to


ADDRESSES = Sanitizer(
    "sanitize",
    "-fsanitize=address,undefined -fno-sanitize-recover=undefined",
    {},
    {
        # Python frees little when it ends. Memory that cannot be had is a MemoryError, as without the sanitizer.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:detect_stack_use_after_return=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        # Python's own allocator would hide where an object ends.
        "PYTHONMALLOC": "malloc",
    },
    # The sanitizer looks for the C++ runtime's throw when it starts, which is before torch brings it.
    ("libasan.so", "libubsan.so", "libstdc++.so"),
    "__asan_init",
)
THREADS = Sanitizer(
    "sanitize-threads",
    "-fsanitize=thread",
    # OpenMP's own locks are not known to the sanitizer. The threads of callers are.
    {"FASTCKPT_OPENMP": "0"},
    {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1:report_signal_unsafe=0:exitcode=66"},
    ("libtsan.so",),
    "__tsan_init",
)

CHECK = """
import importlib, pathlib, sys
from fastckpt.build import extensions
folder, symbol = sys.argv[1:]
for name in [extension.name for extension in extensions("fastckpt", folder)]:
    path = pathlib.Path(importlib.import_module(name).__file__)
    assert path.is_relative_to(folder), f"{path} is not in {folder}"
    assert symbol.encode() in path.read_bytes(), f"{path} is compiled without the sanitizer"
"""


def update(copy):
    """Bring the copy up to date; what is compiled there stays, unless its source is gone."""
    # copy2 keeps the times, by which the build goes.
    shutil.copytree(SOURCES, copy, ignore=BUILT, dirs_exist_ok=True)
    for path in [path for path in copy.rglob("*") if path.is_file()]:
        source = SOURCES / path.relative_to(copy)
        compiled = source.with_name(path.name.partition(".")[0] + ".pyx")
        if not source.exists() and not (path.suffix in (".so", ".c") and compiled.exists()):
            path.unlink()


def build(sanitizer, copy):
    """Compile the copy as any copy is compiled, with other flags: those above, which have the date of this file."""
    command = [sys.executable, str(copy / "fastckpt" / "build.py")]
    since = Path(__file__).stat().st_mtime
    if any(module.stat().st_mtime < since for module in copy.rglob("*.so")):
        command.append("--force")
    flags = {
        "CFLAGS": f"-O1 -g -fno-omit-frame-pointer {sanitizer.flags}",
        "LDFLAGS": sanitizer.flags,
    }
    subprocess.run(command, env={**os.environ, **flags, **sanitizer.build}, check=True)


def library(name):
    """Where the compiler has a library."""
    command = ["gcc", f"-print-file-name={name}"]
    path = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    if not os.path.isabs(path):
        sys.exit(f"sanitize: gcc has no {name}; install its sanitizers' libraries")
    return os.path.realpath(path)


def main(arguments):
    """Compile what is out of date, see that it is what Python will import, and become Python."""
    sanitizer = ADDRESSES
    if arguments[:1] == ["--threads"]:
        sanitizer, arguments = THREADS, arguments[1:]
    copy = PROJECT / "build" / sanitizer.folder
    preloaded = ":".join(map(library, sanitizer.libraries))
    update(copy)
    build(sanitizer, copy)
    path = os.pathsep.join([str(copy), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        **os.environ,
        **sanitizer.run,
        "LD_PRELOAD": preloaded,
        "PYTHONPATH": path,
    }
    check = [sys.executable, "-c", CHECK, str(copy), sanitizer.symbol]
    subprocess.run(check, env=environment, check=True)
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *arguments], environment)


if __name__ == "__main__":
    main(sys.argv[1:])
