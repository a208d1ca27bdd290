"""salvage: a good checkpoint out of what is whole of a damaged one, and a list of what is lost."""

from __future__ import annotations

import collections
import contextlib
import errno
import functools
import os
import stat
from typing import TYPE_CHECKING

import numpy as np

from . import pickle_writer
from ._crc32 import crc32
from ._descriptor import Owned
from ._spec import StorageRef, TensorSpec
from ._tree import named_leaves
from ._unpickler import PIDS_ZIP, unpickle
from .arguments import kind_of
from .containers import sniff
from .containers._zip_names import BYTEORDER_RECORD, PICKLE, STORAGE_FOLDERS, is_text
from .containers.zip_writer import (
    ALIGNMENT,
    SERIALIZATION_ID,
    SERIALIZATION_ID_NBYTES,
    ZipLayout,
    archive_name,
    serialization_id,
)
from .copying import copy_records, read_record
from .destination import Replacement, write_at
from .dtypes import DTYPES
from .errors import FormatError, UnsupportedError
from .loading import check_types
from .losses import lost_parts
from .nodes import TensorNode
from .pickle_writer import StorageId
from .plan import root_of
from .progress import Phases, reporting
from .ratings import DANGEROUS
from .records import NO_CRC, STORED, Records
from .salvage_report import SalvageReport
from .scanning import scan_source
from .selection import Names, specs_in, spelled
from .shard_index import is_index, weights_of
from .source import FileSource, open_source
from .stream_recovery import LegacyRecovery, TarRecovery
from .workers import check_threads
from .zip_recovery import ALIGNMENT_RECORD, FORMAT_VERSION, VERSION, ZipRecovery

if TYPE_CHECKING:
    from ._annotations import CheckpointFile, Progress
    from .limits import Limits

RECOVERIES = {"zip": ZipRecovery, "legacy": LegacyRecovery, "tar": TarRecovery}


def salvage(
    broken: CheckpointFile,
    out: str | bytes | os.PathLike[str],
    *,
    overwrite: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    limits: Limits | None = None,
) -> SalvageReport:
    """Write a checkpoint of all that is whole in a damaged one, as torch.save would write it today, and list what is lost.

    broken: as ``f`` of ``load``: a ZIP, legacy or tar checkpoint that was cut off, overwritten in part, or lost its directory.
        It is only read. Nothing of it is run, and objects of any class are carried over as they are; what ``scan`` calls
        dangerous in the new file is a finding. Of a checkpoint in several files, one of them.
    out: path of the new file, a ZIP. It appears when it is whole; nothing is left behind where that fails.
    overwrite: replace a file that is there; never the damaged one.
    threads, progress, limits: as for ``load``. The file is read twice: to see what is whole, and to copy it.

    What needs lost data goes with it: entries of dicts vanish, None takes the place of members of lists and tuples. Data whose
    checksum is wrong is lost; legacy and tar files have none. Of several checkpoints in a file, the first is taken: a finding.

    Returns a SalvageReport: ``kept`` and ``lost`` tensors by name. Raises FormatError where the object's pickle is damaged, so
    that nothing has a name, where nothing is left, or for an archive of something else; FileExistsError, OSError, and what
    ``load`` raises of limits.
    """
    check_types(progress, limits)
    check_threads(threads)
    if not isinstance(out, (str, bytes, os.PathLike)):
        raise TypeError(f"out is {kind_of(out)}: the path of the new file is expected")
    broken = weights_of(broken)
    if is_index(broken):
        path = os.fsdecode(broken)  # type: ignore[arg-type]  # an index is a path
        raise UnsupportedError(
            f"{path}: an index of several files, and salvage takes one: verify says which shards are damaged; "
            f"salvage each of these, and load the files one by one",
            path=path,
        )
    source = open_source(broken)
    try:
        with (
            new_file(out, overwrite, files_of(source)) as file,
            reporting(progress, source.name) as tell,
        ):
            phases = Phases(tell)
            recovery = RECOVERIES[sniff.kind(source)](
                source, threads=threads, progress=phases, limits=limits
            )
            return _Salvage(recovery, limits).write(file, threads, phases.next())
    finally:
        source.close()


@contextlib.contextmanager
def new_file(out, overwrite, not_to_be_replaced):
    """A Replacement at a path, which counts where the with statement ends well."""
    name = os.fsdecode(out)
    with contextlib.suppress(FileNotFoundError):
        there = os.stat(name)
        if any(os.path.samestat(there, other) for other in not_to_be_replaced):
            raise ValueError(f"{name}: this is the file that is read; give another name")
        if stat.S_ISDIR(there.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
        if not stat.S_ISREG(there.st_mode):
            raise ValueError(f"{name}: no regular file; give another name")
        if not overwrite:
            raise FileExistsError(errno.EEXIST, "there is a file; overwrite=True replaces it", name)
    file = Replacement(name, os.path.realpath(name), fsync=True, exclusive=not overwrite)
    try:
        yield file
        file.commit(os.fstat(file.fd).st_size)
    except BaseException:
        file.abort()
        raise


def files_of(source):
    """The files that a source may be reading from, as stat results."""
    if source.fd >= 0:
        return [os.fstat(source.fd)]
    with contextlib.suppress(OSError, ValueError):
        return [os.stat(source.name)]  # such as that of a gzip file
    return []


class _Salvage:
    """One salvage under way: first what is to be written, then the writing."""

    def __init__(self, recovery, limits):
        self.recovery, self.limits = recovery, limits
        self.numbers = {}  # storage index -> number of its record in the new file
        self.storages = []
        self._make_pickle()
        self._name_losses()

    # -- the object

    def _is_lost(self, spec):
        return root_of(spec).key in self.recovery.lost

    def _make_pickle(self):
        """The pickle as it is where nothing of it is lost, else a new one of what can be made."""
        recovery = self.recovery
        # A key that is no text is no name of a record.
        named = all(is_text(spec.key) for spec in recovery.unpickled.storages)
        if recovery.kind == "zip" and not recovery.lost and named:
            self.verbatim, self.pickle = True, bytes(recovery.pickle_bytes())
            self.storages = list(recovery.unpickled.storages)
            self.keys = [spec.key for spec in self.storages]
            return
        self.verbatim = False
        # Strings of Python 2 stay what they are: which encoding they have, their reader knows.
        python2 = not is_newer(recovery.pickle_bytes())
        symbolic = recovery.unpickle(symbolic=True, encoding="bytes")
        if symbolic.touched:
            raise UnsupportedError(
                f"{recovery.source.name}: the pickle changes {symbolic.touched[0][1]!r:.80}, which cannot be written again; "
                f"no torch.save writes such a pickle"
            )
        lost = lost_parts(symbolic.obj, self._is_lost)
        if id(symbolic.obj) in lost:
            raise FormatError(
                f"{recovery.source.name}: the whole object needs what is lost, nothing is left to be written: "
                f"{next(iter(recovery.lost.values())).message}",
                path=recovery.source.name,
            )
        self.pickle = pickle_writer.dump(symbolic.obj, self._storage_id, lost=lost, python2=python2)
        self.keys = [str(number) for number in range(len(self.storages))]
        where = f"{recovery.source.name}: the salvaged pickle"
        self.left = unpickle(self.pickle, pids=PIDS_ZIP, where=where, limits=self.limits)

    def _storage_id(self, ref):
        """Number a storage that is kept. A slice of another, as legacy and tar files have them, gets a record of its own."""
        spec = ref.storage
        number = self.numbers.setdefault(spec.index, len(self.storages))
        if number == len(self.storages):
            self.storages.append(spec)
        dtype = DTYPES[ref.dtype]
        return StorageId(dtype.storage, str(number), spec.location, spec.nbytes // dtype.itemsize)

    def _name_losses(self):
        """Compare the tensors of the object with those of what is written: names and reasons."""
        before = tensors_of(self.recovery.unpickled.obj)
        after = before if self.verbatim else tensors_of(self.left.obj)
        name_of = Names()
        names = {path: name_of(path) for path, _ in before}
        count = collections.Counter(names[path] for path, _ in before)
        names = {path: name if count[name] == 1 else spelled(path) for path, name in names.items()}
        kept = dict.fromkeys(path for path, _ in after)
        self.kept = tuple(names[path] if path in names else name_of(path) for path in kept)
        self.lost, reasons = {}, {key: each.message for key, each in self.recovery.lost.items()}
        if not reasons:
            return
        unnamed = dict(reasons)
        for path, leaf in before:
            keys = [root_of(spec).key for spec in specs_in([leaf])[0] if self._is_lost(spec)]
            for key in keys:
                unnamed.pop(key, None)
            if path not in kept:
                self.lost[names[path]] = reasons[keys[0]] if keys else PART_OF_LOST
            elif keys:
                self.lost[f"{names[path]} (an attribute of it)"] = reasons[keys[0]]
        self.lost |= {f"storage {key}": reason for key, reason in unnamed.items()}

    # -- the file

    def write(self, file, threads, progress):
        """Write the new file; the report."""
        recovery = self.recovery
        names, extents = self._extents()
        before, behind = self._records_before(), {VERSION: recovery.version}
        first, stop = len(before), len(before) + len(names)
        names = [*before, *names, *behind, SERIALIZATION_ID]
        nbytes = [len(data) for data in before.values()] + extents.nbytes.tolist()
        nbytes += [len(data) for data in behind.values()] + [SERIALIZATION_ID_NBYTES]
        root = recovery.root or archive_name(file.name)
        layout = ZipLayout([f"{root}/{name}" for name in names], nbytes)
        crc = np.zeros(len(names), dtype=np.int64)
        put = functools.partial(write_at, file.fd, name=file.name)
        crc[first:stop] = self._copy(put, extents, layout.offset[first:stop], threads, progress)
        rows = [*range(first), *range(stop, len(names) - 1)]
        small = [*before.values(), *behind.values()]
        crc[rows] = [crc32(data) for data in small]
        small.append(self._serialization_id(names[:-1], crc[:-1]))
        crc[-1] = crc32(small[-1])
        for row, data in zip([*rows, len(names) - 1], small, strict=True):
            put(int(layout.offset[row]), data)
        for offset, frame in layout.frames(crc):
            put(offset, frame)
        return self._report(file)

    def _records_before(self):
        """The records in front of the storages."""
        records = {PICKLE: self.pickle}
        # torch computes offsets where these two are there, for storages that are numbered as they appear.
        if self.keys == [str(number) for number in range(len(self.keys))]:
            records |= {FORMAT_VERSION: b"1", ALIGNMENT_RECORD: b"%d" % ALIGNMENT}
        return records | {BYTEORDER_RECORD: self.recovery.byteorder.encode()}

    def _extents(self):
        """The names of the records that are copied, and Records of where their contents lie: other records, then storages."""
        recovery, records = self.recovery, self.recovery.records
        storages = [f"data/{key}" for key in self.keys]
        taken = set(storages)
        names, columns = [], []
        for name, row in recovery.others.items():
            # Storages of which the pickle knows nothing keep their names where the others do.
            if name not in taken and (self.verbatim or not name.startswith(STORAGE_FOLDERS)):
                names.append(name)
                columns.append(whole_record(records, row))
        for name, spec in zip(storages, self.storages, strict=True):
            names.append(name)
            row = recovery.rows.get(root_of(spec).key)
            if row is None:  # it has no bytes
                columns.append((0, 0, 0, 0, STORED))
            elif spec.root is None:
                columns.append(whole_record(records, row))
            else:
                offset = int(records.offset[row]) + spec.offset
                columns.append((offset, spec.nbytes, spec.nbytes, NO_CRC, STORED))
        return names, Records(names, *np.array(columns, dtype=np.int64).reshape(-1, 5).T)

    def _copy(self, put, extents, offsets, threads, progress):
        """Copy the records that were found whole; their CRC-32s, which must be what they were then."""
        source, rows = self.recovery.source, np.arange(len(extents))
        crc = copy_records(source, extents, rows, put, offsets, threads=threads, progress=progress)
        changed = np.flatnonzero((extents.crc32 != NO_CRC) & (extents.crc32 != crc))
        if len(changed):
            name, offset = extents.names[changed[0]], int(extents.offset[changed[0]])
            raise FormatError(
                f"{source.name}: record {name!r} at byte {offset} has changed while it was read; salvage a copy that nobody writes to",
                path=source.name,
                record=name,
                offset=offset,
            )
        return crc

    def _serialization_id(self, names, crc):
        """What the file had, where all of it is there, else one of its own."""
        recovery, row = self.recovery, self.recovery.serialization_id
        if not self.verbatim or row is None:
            return serialization_id(names, crc)
        if recovery.records.nbytes[row] != SERIALIZATION_ID_NBYTES:
            return serialization_id(names, crc)
        return read_record(recovery.source, recovery.records, row)

    def _report(self, file):
        recovery = self.recovery
        dangers = dangers_in(file, self.limits)
        return SalvageReport(
            recovery.source.name,
            file.name,
            recovery.kind,
            self.kept,
            self.lost,
            (*dangers, *recovery.findings, *recovery.lost.values()),
        )


def dangers_in(file, limits):
    """The findings of a scan of the new file that speak of danger: what is carried over is carried over as it is."""
    source = FileSource(Owned(os.dup, file.fd), file.name)
    try:
        findings = scan_source(source, limits).findings
    finally:
        source.close()
    return [finding for finding in findings if finding.kind.startswith(DANGEROUS)]


def whole_record(records, row):
    """The columns of a record, but for its name, in the order of Records."""
    columns = (
        records.offset,
        records.nbytes,
        records.stored_nbytes,
        records.crc32,
        records.method,
    )
    return [int(column[row]) for column in columns]


PART_OF_LOST = "it is part of an object that needs a tensor which is lost"
# Nodes of torch's that hold no tensor.
NO_TENSORS = ("size", "device")


def is_newer(pickle):
    """Whether a pickle is of a protocol that has bytes, and so no strings of Python 2."""
    return pickle[:1] == b"\x80" and pickle[1] >= 3


def tensors_of(obj):
    """[(path, leaf)] of the tensors and bare storages of an object."""
    return [
        (path, leaf)
        for path, leaf in named_leaves(obj)
        if isinstance(leaf, (TensorSpec, StorageRef, TensorNode))
        and getattr(leaf, "kind", None) not in NO_TENSORS
    ]
