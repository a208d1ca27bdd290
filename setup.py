"""Build the compiled modules; everything else is said in pyproject.toml."""

import runpy

from setuptools import setup

# By path, not by import: the package need not be importable while it is built.
setup(ext_modules=runpy.run_path("src/fastckpt/build.py")["extensions"]("fastckpt", "src"))
