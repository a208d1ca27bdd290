"""Opening Zarr stores, and what is in them: every fault of theirs is a FormatError that says where."""

import contextlib
import errno
import os

from ..errors import CheckpointError, FormatError, short


@contextlib.contextmanager
def translated(sentence):
    """Turn whatever zarr and its codecs raise into a FormatError that says ``sentence``; the system's errors stay what they are."""
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        # zarr's own "not found" is a ValueError besides
        if isinstance(error, OSError) and not isinstance(error, ValueError):
            raise
        raise FormatError(f"{sentence} ({type(error).__name__}: {error!s:.500})") from error


def describe(store):
    return os.fspath(store) if isinstance(store, (str, os.PathLike)) else f"<{short(store)}>"


def open_store(store, where):
    try:
        import zarr
    except ModuleNotFoundError as error:
        if error.name != "zarr":
            raise
        raise ImportError(
            "reading Zarr stores needs zarr; pip install 'zarr>=3'", name="zarr"
        ) from None
    if int(zarr.__version__.partition(".")[0]) < 3:
        raise ImportError(f"zarr {zarr.__version__} is too old; pip install 'zarr>=3'", name="zarr")
    if isinstance(store, os.PathLike):
        store = os.fspath(store)
    if isinstance(store, str) and "://" not in store and not os.path.exists(store):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), store)
    with translated(
        f"{where}: there is no Zarr group or array; the folder that has zarr.json, .zgroup or .zarray in it is expected"
    ):
        return zarr.open(store, mode="r")


def child(where, group, path):
    """An array or a group inside of a group; None where there is none."""
    with translated(f"{where}: the metadata of {path!r} cannot be read"):
        return group.get(path)


def array_at(where, group, path):
    node = child(where, group, path)
    return node if hasattr(node, "chunks") else None


def arrays_of(where, group):
    """The arrays of a group itself: {name: array}."""
    with translated(f"{where}: the metadata of what is in {group.path!r} cannot be read"):
        return dict(group.arrays())
