"""The one list of compiled modules, and how to build them where they lie.

``setup.py`` runs this file without importing the package. A vendored copy is built under the name that
it has there: ``python -m lab._vendor.NAME.build``. Needs setuptools, Cython and a C compiler.
"""

import argparse
import os
import shlex
import signal
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).absolute().parent

# -g0: distributors' Pythons compile with -g, which made a 200 KB module 1.2 MB.
COMPILE_FLAGS = ["-O3", "-g0", "-fvisibility=hidden"]

# C files that are compiled into a module. They hold no state, so that two modules may have one each.
C_SOURCES = {name: ["crc32.c"] for name in ("_crc32", "_flow", "_read", "_write")}

# Only these modules need the OpenMP runtime, so that the others load where the runtime is missing.
OPENMP_MODULES = {"_read", "_write"}


def extensions(package, root):
    """List the setuptools Extensions of ``package`` (a dotted name), whose top folder lies in ``root``.

    Every ``.pyx`` file under the package is a module. ``CFLAGS`` from the environment come last, so that
    they can undo the flags above; ``FASTCKPT_OPENMP=0`` leaves OpenMP out, and loads are then serial.
    """
    from setuptools import Extension

    folder = Path(root, *package.split("."))
    # This file is a dependency of each: other flags make other modules.
    depends = [(folder / "build.py").as_posix(), *_paths(folder, "*.h")]
    return [
        Extension(
            ".".join([package, *source.relative_to(folder).with_suffix("").parts]),
            [source.as_posix(), *_c_sources(source)],
            depends=depends,
            extra_compile_args=[*COMPILE_FLAGS, *_openmp(source), *_environment_flags()],
            extra_link_args=_openmp(source),
        )
        for source in sorted(folder.rglob("*.pyx"))
    ]


def _paths(folder, pattern):
    return [path.as_posix() for path in sorted(folder.rglob(pattern))]


def _c_sources(source):
    return [(source.parent / name).as_posix() for name in C_SOURCES.get(source.stem, [])]


def _openmp(source):
    # Apple's clang knows no -fopenmp: prange is an ordinary loop there.
    wanted = sys.platform != "darwin" and os.environ.get("FASTCKPT_OPENMP") != "0"
    return ["-fopenmp"] if wanted and source.stem in OPENMP_MODULES else []


def _environment_flags():
    return shlex.split(os.environ.get("CFLAGS", ""))


def _location():
    """Find the dotted name that this copy is imported by, and the folder where that name starts."""
    name = __spec__.parent if __spec__ else None
    if name:
        return name, HERE.parents[name.count(".")]
    # Started by path: the packages above are those that have an __init__.py.
    top = HERE
    while (top.parent / "__init__.py").exists():
        top = top.parent
    return ".".join(HERE.relative_to(top.parent).parts), top.parent


def _discard_other_names(extension):
    """Delete C that was generated under another name: it came with a copy, and looks up to date.

    Without it the module, which may have come too, is out of date.
    """
    generated = Path(extension.sources[0]).with_suffix(".c")
    if generated.exists():
        metadata = generated.read_text(encoding="utf-8").partition("END: Cython Metadata")[0]
        if f'"module_name": "{extension.name}"' not in metadata:
            generated.unlink()


def build(package, root, *, force=False, verbose=False):
    """Compile, beside their sources, the modules whose sources are newer than they are."""
    from setuptools import Distribution

    modules = extensions(package, root)
    for extension in modules:
        _discard_other_names(extension)
    distribution = Distribution({"name": package, "ext_modules": modules})
    distribution.verbose = int(verbose)
    builder = distribution.get_command_obj("build_ext")
    builder.force = force
    builder.build_lib = str(root)  # not "inplace", which would compile into another folder and copy
    with tempfile.TemporaryDirectory() as objects:
        builder.build_temp = objects
        builder.ensure_finalized()
        builder.run()


def main(arguments=None):
    """Build the modules of this copy; the exit status is that of the build."""
    package, root = _location()
    parser = argparse.ArgumentParser(
        prog=f"python -m {package}.build", description=f"Compile the native modules of {package}."
    )
    parser.add_argument("--force", action="store_true", help="compile what is up to date, too")
    parser.add_argument("--list", action="store_true", help="print the modules' names instead")
    parser.add_argument("--verbose", action="store_true", help="print the compiler's command lines")
    options = parser.parse_args(arguments)
    for folder in (HERE, *HERE.parents[: package.count(".")]):
        if not (folder / "__init__.py").exists():
            # Cython goes by these files when it resolves a relative cimport.
            parser.exit(1, f"{package}: {folder} has no __init__.py; make an empty one\n")
    try:
        import Cython  # noqa: F401
        import setuptools  # noqa: F401
    except ModuleNotFoundError as error:
        remedy = "pip install 'Cython>=3.3' setuptools"
        parser.exit(1, f"{package}: building needs {error.name}, which is missing; {remedy}\n")
    if options.list:
        names = [extension.name for extension in extensions(package, root)]
        try:
            print(*names, sep="\n", flush=True)
        except BrokenPipeError:
            # Whoever reads has enough; what is still buffered must not fail again at the end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            parser.exit(128 + signal.SIGPIPE)
    else:
        build(package, root, force=options.force, verbose=options.verbose)


if __name__ == "__main__":
    if not __spec__:
        # Python put this folder first on the path; our _pickle must not stand for the library's.
        sys.path[:] = [entry for entry in sys.path if Path(entry or ".").absolute() != HERE]
    main()
