"""What a checkpoint holds: the container of a source, its object as inert specs, and the record of each storage."""

import sys

import numpy as np

from . import _plan
from ._unpickler import PIDS_ZIP, unpickle
from .containers import sniff
from .containers._zip_names import PICKLE
from .containers.legacy import LegacyContainer
from .containers.tar import TarContainer
from .containers.zip import open_zip
from .errors import FormatError


class ZipContents:
    """A ZIP checkpoint, opened; see LegacyContainer for what it offers."""

    kind = "zip"

    def __init__(self, source, *, verify=True, **options):
        self.source, self.options = source, options
        self.archive = open_zip(source, verify=verify)
        self.records, self.rows, self.end = (
            self.archive.records,
            self.archive.storages,
            self.archive.end,
        )
        self.byteorder = self.archive.byteorder or default_byteorder()
        self._pickle = self.archive.read_record(PICKLE)
        self.unpickled = self.unpickle_again()

    def locate(self, rows):
        """Find where the data of some rows begins."""
        self.archive.locate(rows)

    def unpickle_again(self):
        """The object, with containers of its own."""
        where = f"{self.source.name}: record {PICKLE!r}"
        # A scripted module comes as data, and its tensors as its state_dict() would give them: detached.
        gradients = not self.archive.is_torchscript
        return unpickle(
            self._pickle, pids=PIDS_ZIP, where=where, gradients=gradients, **self.options
        )

    def pickle_bytes(self):
        """The bytes of the object's pickle."""
        return self._pickle


SALVAGE = "(salvage gets out what is whole, if the pickle of the object is)"


def default_byteorder():
    """What a file without a byteorder record is taken for: little, unless torch was told otherwise."""
    serialization = getattr(sys.modules.get("torch"), "serialization", None)
    get = getattr(serialization, "get_default_load_endianness", None)
    name = getattr(get() if get else None, "name", None)
    return {"BIG": "big", "NATIVE": sys.byteorder}.get(name, "little")


def open_contents(source, *, verify=True, **options):
    """Find out what a source is, and read everything but its storages.

    ``options`` are the encoding, errors and limits of unpickle.

    Raises FormatError and its kin; the message says what the file looks like where it is no checkpoint.
    """
    kind = sniff.kind(source)
    try:
        if kind == "zip":
            return ZipContents(source, verify=verify, **options)
        reader = LegacyContainer if kind == "legacy" else TarContainer
        return reader(source, **options)
    except FormatError as error:
        if error.cut:
            error.args = (f"{error} {SALVAGE}",)
        raise


def storage_rows(contents, storages):
    """The row of each storage's record, an int64 column, located and compared with the size that the pickle gives.

    A record may be longer than its storage by less than one item: torch counts whole items of a storage of odd size.
    Raises FormatError where one is missing, or has another size.
    """
    rows = np.empty(len(storages), dtype=np.int64)
    status, wrong = _plan.match_rows(storages, contents.rows, contents.records.nbytes, rows)
    if status == _plan.MISSING_RECORD:
        raise FormatError(
            f"{contents.source.name}: storage {storages[wrong].key!r} is named by the pickle and is not in the file, which is "
            f"incomplete" + (f" {SALVAGE}" if contents.kind == "zip" else ""),
            path=contents.source.name,
            record=storages[wrong].key,
        )
    if status == _plan.WRONG_SIZE:
        row, name = rows[wrong], contents.records.names[rows[wrong]]
        raise FormatError(
            f"{contents.source.name}: record {name!r} has {contents.records.nbytes[row]} bytes, the pickle says "
            f"{storages[wrong].nbytes}; the file is damaged",
            path=contents.source.name,
            record=name,
        )
    contents.locate(rows)
    return rows
