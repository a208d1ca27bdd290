"""Say what a ZIP archive without data.pkl holds instead, and what to do with it."""

from ..errors import FormatError

CHECKPOINT_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".pt.tar", ".pth.tar", ".safetensors")
# How many names a sentence shows.
SHOWN = 3


def no_pickle(source, names):
    """The error for an archive that has none of the records that are looked for. ``names`` are all its names."""
    names = list(names)
    if not names:
        message = "a ZIP archive without entries; whatever should have been saved in it was not"
    else:
        # entries of folders stand for nothing by themselves
        files = [name for name in names if not name.endswith("/")]
        message = (
            _known(files)
            or f"a ZIP archive without data.pkl, it holds {listed(files)}; it is no checkpoint"
        )
    return FormatError(f"{source.name}: {message}", path=source.name)


def listed(names):
    """The first names, quoted, and how many more there are."""
    if not names:
        return "only folders"
    shown = ", ".join(repr(name) for name in names[:SHOWN])
    return shown + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _known(files):
    """A sentence about a known kind of archive, or None."""
    last_parts = {name.rpartition("/")[2] for name in files}
    twin = next((name for name in files if name.rpartition("/")[2].lower() == "data.pkl"), None)
    if twin:
        return f"a ZIP archive that holds {twin!r}; the record must be called data.pkl, in lower case: rename it"
    if any(name.endswith(".data/extern_modules") for name in files):
        return "a torch.package archive without data.pkl at its top; torch.package.PackageImporter reads it"
    if files and all(name.endswith(".npy") for name in files):
        return f"a ZIP archive without data.pkl, it holds .npy files ({listed(files)}): a NumPy .npz; numpy.load reads it"
    if "model.weights.h5" in last_parts:
        return "a Keras model (.keras); keras.models.load_model reads it"
    if "[Content_Types].xml" in last_parts:
        return "an Office document"
    if "archive_format" in last_parts:
        return "a torch.export archive (.pt2); torch.export.load reads it"
    if ".metadata" in last_parts and any(name.endswith(".distcp") for name in files):
        return "a packed torch.distributed.checkpoint folder; unpack it first"
    inside = [name for name in files if name.lower().endswith(CHECKPOINT_SUFFIXES)]
    if inside:
        return f"a ZIP archive without data.pkl, it contains {listed(inside)}; unpack it first, then load that file"
    if any(name.endswith(".npy") for name in files):
        return f"a ZIP archive without data.pkl, it holds .npy files among others ({listed(files)}); it is no checkpoint"
    if any(name.startswith("META-INF/") for name in files):
        return "a Java archive (.jar)"
    return None
