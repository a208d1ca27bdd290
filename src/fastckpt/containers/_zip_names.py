"""What the records of a checkpoint in a ZIP are called, and names as the directory has them."""

from collections.abc import Mapping, Sequence

import numpy as np

from .. import _zip

PICKLE = "data.pkl"
VERSION_RECORDS = (".data/version", "version")  # the first one counts where both are there
BYTEORDER_RECORD = "byteorder"
TORCHSCRIPT_RECORD = "constants.pkl"
METADATA_RECORD = (
    "metadata.json"  # what a writer has to say beside the object; torch does not look at it
)
METADATA_MOST_NBYTES = 16 << 20  # parsed, it may take thirty times as much
STORAGE_FOLDERS = ("data/", "tensors/")  # the second is torch 1.4's


class RecordNames(Sequence):
    """The names of rows, decoded when one is asked for: 70,000 strings that nobody looks at take 10 ms."""

    __slots__ = ("_at", "_nbytes", "_skip", "_text")

    def __init__(self, text, columns, skip):
        self._text, self._skip = text, skip
        self._at, self._nbytes = columns[_zip.NAME], columns[_zip.NAME_NBYTES]

    def __len__(self):
        return len(self._at)

    def __getitem__(self, row):
        at, nbytes = int(self._at[row]), int(self._nbytes[row])
        return bytes(self._text[at + self._skip : at + nbytes]).decode("utf-8", "surrogateescape")


def folded(name):
    """A name as torch compares it: its ASCII letters small."""
    try:
        return name.encode("utf-8", "surrogateescape").lower()
    except UnicodeEncodeError:  # a pickle's; no record is called so
        return name.encode("utf-8", "surrogatepass").lower()


def is_text(name):
    """Whether a name is one in UTF-8."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


class RecordIndex(Mapping):
    """Name -> row of every record, over the dict of storages and the dict of the others."""

    __slots__ = ("_folder", "_others", "_storages")

    def __init__(self, storages, others, folder):
        self._storages, self._others, self._folder = storages, others, folder

    def __getitem__(self, name):
        if name.startswith(self._folder):
            key = name[len(self._folder) :]
            if key in self._storages:
                return self._storages[key]
        return self._others[name]

    def __len__(self):
        return len(self._storages) + len(self._others)

    def __iter__(self):
        yield from self._others
        for key in self._storages:
            yield self._folder + key


def find_prefixes(names, columns):
    """The folders of checkpoints, each with its slash; only one should there be."""
    _zip.set_kinds(names, columns, columns.shape[1])
    text = RecordNames(names, columns, 0)
    rows = np.flatnonzero(columns[_zip.KIND] == _zip.IS_PICKLE)
    prefixes = list(dict.fromkeys([text[row].removesuffix(PICKLE) for row in rows.tolist()]))
    if len(prefixes) < 2:
        return prefixes
    prefixes.sort(key=lambda prefix: prefix.count("/"))
    # a storage may have any key, and TorchScript code any module name
    inside = tuple(prefixes[0] + folder for folder in (*STORAGE_FOLDERS, "code/"))
    return prefixes[:1] + [other for other in prefixes[1:] if not other.startswith(inside)]


def two_checkpoints(prefixes):
    return (
        f"two checkpoints, {prefixes[0] + PICKLE!r} and {prefixes[1] + PICKLE!r}; "
        f"unpack it and pack each folder into an archive of its own"
    )
