"""Check what ``python -m build`` made: the contents, and that the wheel works without torch.

The sdist and the wheel must both hold every source, since the package is vendored from either. The
wheel is installed into a clean virtual environment, where it loads a small checkpoint into NumPy arrays.
"""

import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path, PurePosixPath

import torch

SOURCES = Path(__file__).resolve().parent.parent / "src"
SHIPPED = {".py", ".pyi", ".pyx", ".pxd", ".c", ".h", ".typed"}

LOAD = """
import sys
import numpy
import fastckpt
loaded = fastckpt.load(sys.argv[1], framework="numpy")
assert numpy.array_equal(loaded["weight"], numpy.arange(12, dtype="f4").reshape(3, 4)), loaded
assert loaded["step"] == 7, loaded
assert "torch" not in sys.modules
print("the installed wheel loads a checkpoint:", fastckpt.__file__)
"""


def sources():
    """List what an archive must hold, relative to src/: no generated C, which starts with "_"."""
    files = (path for path in SOURCES.glob("fastckpt/**/*") if path.is_file())
    return {
        path.relative_to(SOURCES).as_posix()
        for path in files
        if (path.suffix in SHIPPED or path.name == "LICENSE") and not generated(path)
    }


def generated(path):
    """Whether Cython made this file."""
    return PurePosixPath(path).suffix == ".c" and PurePosixPath(path).name.startswith("_")


def check_contents(archive, names):
    """Exit with a sentence if a source is missing, or something that was built has slipped in."""
    missing = sorted(sources() - set(names))
    extra = sorted(name for name in names if generated(name) or "__pycache__" in name)
    if missing or extra:
        sys.exit(f"{archive}: missing {missing}, should not hold {extra}")
    print(f"{archive.name}: all {len(sources())} sources, nothing generated")


def sdist_names(sdist):
    """The names below src/ in an sdist."""
    with tarfile.open(sdist) as archive:
        parts = [PurePosixPath(name).parts for name in archive.getnames()]
    return ["/".join(part[2:]) for part in parts if part[1:2] == ("src",)]


def check_wheel_works(wheel, folder):
    """Install the wheel into a new environment, and load a checkpoint there."""
    checkpoint = folder / "small.pt"
    torch.save({"weight": torch.arange(12.0).reshape(3, 4), "step": 7}, checkpoint)
    environment = folder / "environment"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", wheel], check=True)
    subprocess.run([python, "-I", "-c", LOAD, checkpoint], check=True, cwd=folder)


def main(folder):
    """Check the one sdist and the one wheel in ``folder``."""
    (sdist,), (wheel,) = Path(folder).glob("*.tar.gz"), Path(folder).glob("*.whl")
    check_contents(sdist, sdist_names(sdist))
    check_contents(wheel, zipfile.ZipFile(wheel).namelist())
    with tempfile.TemporaryDirectory() as scratch:
        check_wheel_works(wheel.resolve(), Path(scratch))


if __name__ == "__main__":
    main(*sys.argv[1:])
