"""Run Python over native modules that are compiled with the address and the undefined-behaviour sanitizer.

``python scripts/sanitize.py -m pytest -k zip``: the arguments are those of Python. A copy of the sources is compiled in
build/sanitize (what is newer than its module), so that the modules beside the sources stay as they are. Needs gcc.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).absolute().parent.parent
SOURCES = PROJECT / "src"
COPY = PROJECT / "build" / "sanitize"
SANITIZE = "-fsanitize=address,undefined -fno-sanitize-recover=undefined"
FLAGS = {"CFLAGS": f"-O1 -g -fno-omit-frame-pointer {SANITIZE}", "LDFLAGS": SANITIZE}
# What a C compiler or Python leaves beside the sources.
BUILT = shutil.ignore_patterns("*.so", "_*.c", "__pycache__")

OPTIONS = {
    # Python frees little when it ends. Memory that cannot be had is a MemoryError, as it is without the sanitizer.
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    # Python's own allocator would hide where an object ends.
    "PYTHONMALLOC": "malloc",
}
# The sanitizer looks for the C++ runtime's throw when it starts, which is before torch brings it.
LIBRARIES = ("libasan.so", "libubsan.so", "libstdc++.so")

CHECK = """
import importlib, pathlib, sys
from fastckpt.build import extensions
for name in [extension.name for extension in extensions("fastckpt", sys.argv[1])]:
    path = pathlib.Path(importlib.import_module(name).__file__)
    assert path.is_relative_to(sys.argv[1]), f"{path} is not in {sys.argv[1]}"
    assert b"__asan_init" in path.read_bytes(), f"{path} is compiled without the sanitizer"
"""


def update_copy():
    """Bring the copy up to date; what is compiled there stays, unless its source is gone."""
    # copy2 keeps the times, by which the build goes.
    shutil.copytree(SOURCES, COPY, ignore=BUILT, dirs_exist_ok=True)
    for path in [path for path in COPY.rglob("*") if path.is_file()]:
        built_from = {".so": ".pyx", ".c": ".pyx"}.get(path.suffix, path.suffix)
        source = SOURCES / path.relative_to(COPY).with_name(
            path.name.partition(".")[0] + built_from
        )
        if not source.exists() and not (SOURCES / path.relative_to(COPY)).exists():
            path.unlink()


def build():
    """Compile the copy as any copy is compiled, with other flags: those above, which have the date of this file."""
    command = [sys.executable, str(COPY / "fastckpt" / "build.py")]
    since = Path(__file__).stat().st_mtime
    if any(module.stat().st_mtime < since for module in COPY.rglob("*.so")):
        command.append("--force")
    subprocess.run(command, env={**os.environ, **FLAGS}, check=True)


def library(name):
    """Where the compiler has a library."""
    command = ["gcc", f"-print-file-name={name}"]
    path = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    if not os.path.isabs(path):
        sys.exit(
            f"sanitize: gcc has no {name}; install the sanitizers' libraries (libasan, libubsan)"
        )
    return os.path.realpath(path)


def main(arguments):
    update_copy()
    build()
    paths = [str(COPY), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        **OPTIONS,
        "LD_PRELOAD": ":".join(map(library, LIBRARIES)),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    subprocess.run([sys.executable, "-c", CHECK, str(COPY)], env=environment, check=True)
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *arguments], environment)


if __name__ == "__main__":
    main(sys.argv[1:])
