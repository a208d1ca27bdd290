"""Samples for training: readers give them by number, a loader delivers batches of them in order."""

from importlib import import_module

from ..importing import importing

# Where each public name lives; imported on first use.
_HOME = {
    "LitDataReader": "litdata",
    "Reader": "reader",
    "ZarrReader": "zarr_reader",
    "IntegrityReport": "zarr_integrity",
    "CheckpointReader": "checkpoint_reader",
    "MultiReader": "multi",
    "Dataset": "dataset",
    "DataLoader": "loader",
    "stack": "collate",
    "fernet_key": "litdata_codecs",
}

__all__ = list(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with importing:
        value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted(__all__)
