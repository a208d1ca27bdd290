"""Read torch.save files: fast, in parallel, verified, and without running a byte of them.

tensors = load("model.pt")                 # what torch.load gives
with open("model.pt") as checkpoint:       # a Mapping; no tensor is read yet
    rows = checkpoint["embedding.weight"][:128]
"""

from importlib import import_module

from ._version import __version__
from .importing import importing

# Where each public name lives. It is imported on first use, so that this package imports where the compiled modules
# are not built (``python -m <package>.build`` builds them) and costs nothing until it is used.
_HOME = {
    "load": "loading",
    "load_into": "loading",
    "save": "saving",
    "save_sharded": "sharding",
    "open": "checkpoint",
    "salvage": "salvaging",
    "scan": "scanning",
    "verify": "verifying",
    "Checkpoint": "checkpoint",
    "ShardedCheckpoint": "sharded",
    "ShardedReport": "sharded_reports",
    "LazyTensor": "checkpoint",
    "stream": None,  # a module of its own
    "Opaque": "nodes",
    "VerifyReport": "verify_report",
    "RecordCheck": "verify_report",
    "Finding": "findings",
    "Limits": "limits",
    "SalvageReport": "salvage_report",
    "ScanReport": "scanning",
    "CheckpointError": "errors",
    "FormatError": "errors",
    "ChecksumError": "errors",
    "UnsupportedError": "errors",
    "UnsafePickleError": "errors",
    "LimitError": "errors",
}

__all__ = ["__version__", "data", *_HOME]


def __getattr__(name):
    if name == "data":  # a package of its own, which is imported on first use, too
        with importing:
            return import_module(".data", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        with importing:
            module = import_module(f".{_HOME[name] or name}", __name__)
        value = module if _HOME[name] is None else getattr(module, name)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(f"{__name__}._"):
            raise
        raise ImportError(
            f"{__name__}: the compiled modules are missing ({error.name}); build them with "
            f"'python -m {__name__}.build' (needs Cython, setuptools and a C compiler)",
            name=error.name,
        ) from None
    globals()[name] = value
    return value


def __dir__():
    return sorted(__all__)
