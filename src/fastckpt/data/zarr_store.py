"""Opening Zarr stores, and what is in them: every fault of theirs is a FormatError that says where."""

import contextlib
import errno
import os

from ..errors import CheckpointError, FormatError, short
from ..importing import importing
from .extras import missing, remedy


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
        with importing:
            import zarr
    except ModuleNotFoundError as error:
        if error.name != "zarr":
            raise
        raise missing(error, "zarr", "it opens Zarr stores") from None
    if int(zarr.__version__.partition(".")[0]) < 3:
        raise ImportError(f"zarr {zarr.__version__} is too old; {remedy('zarr')}", name="zarr")
    if isinstance(store, (zarr.Group, zarr.Array)):
        raise TypeError(
            f"store: {store!r:.200} is open already; its path is expected, or a store (its .store_path is one)"
        )
    if isinstance(store, os.PathLike):
        store = os.fspath(store)
    if isinstance(store, str) and "://" not in store and not os.path.exists(store):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), store)
    with translated(
        f"{where}: there is no Zarr group or array; the folder that has zarr.json, .zgroup or .zarray in it is expected"
    ):
        return zarr.open(store, mode="r")


def array_anew(root, path):
    """An array by its own metadata, as they are now; what is open as ``root`` may hold older copies of them."""
    with importing:
        import zarr

    return zarr.open_array(root.store_path / path, mode="r", zarr_format=root.metadata.zarr_format)


def folder_of(node):
    """The folder of a group or an array; None in stores that are none."""
    root = getattr(node.store_path.store, "root", None)
    return os.path.join(root, node.path) if root is not None and os.path.isdir(root) else None


def metadata_file(root, path):
    """Where an array's own metadata are; None in stores that are no folders."""
    folder = folder_of(root)
    name = "zarr.json" if root.metadata.zarr_format == 3 else ".zarray"
    return None if folder is None else os.path.join(folder, path, name)


def version_of(file):
    """Another one whenever the file is written anew, or is gone; None for no file."""
    if file is None:
        return None
    try:
        found = os.stat(file)
    except OSError as error:
        return error.errno
    return found.st_ino, found.st_mtime_ns, found.st_size


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


def names_in(where, group):
    """The names of a group's own arrays, and then of its groups, as "name/…"."""
    with translated(f"{where}: the metadata of what is in {group.path!r} cannot be read"):
        return sorted(group.array_keys()) + [f"{name}/…" for name in sorted(group.group_keys())]
