"""The whole storages of a damaged legacy stream or tar checkpoint.

Neither format has checksums: a storage is whole where its bytes are all there, its count of elements is the one that the
object gives, and no zeros fill up a file whose copy stopped in it.
"""

from types import MappingProxyType

from ._spec import Global, StorageRef
from .containers._tar_members import NEEDED, tar_members
from .containers.legacy import COUNT_NBYTES, LegacyContainer
from .containers.tar import TarContainer
from .dtypes import UINT8
from .errors import CheckpointError, FormatError, without_object
from .findings import Finding
from .nodes import Opaque
from .records import Records
from .second_archives import checkpoint_behind, second_archive

LOOK = 1 << 20  # bytes that are looked at together
# A disk writes no less at a time.
SUSPICIOUS_ZEROS = 512  # bytes
# No element lies outside of a storage whose size is not known.
ANY_NBYTES = 1 << 62

REBUILD_TENSOR = Global("torch._utils", "_rebuild_tensor_v2")
ORDERED_DICT = Global("collections", "OrderedDict")


class _Recovery:
    """What the two have in common with ZipRecovery: see there for the attributes."""

    root = serialization_id = None
    version = b"3\n"
    others = MappingProxyType[str, str]({})

    def _find_lost(self):
        """Say which storages are lost, from the errors about them and from the zeros that fill up the file."""
        told = {error.record: error for error in reversed(self.problems)}
        told |= self._cut_by_zeros()
        general = told.pop(None, None)
        self.lost = {}
        for spec in self.unpickled.storages:
            if spec.root is not None or spec.key in self.rows and spec.key not in told:
                continue
            self.rows.pop(spec.key, None)
            if spec.nbytes:
                error = told.get(spec.key) or general or self._missing(spec.key)
                self.lost[spec.key] = Finding("lost_storage", str(error), spec.key, error.offset)
        self.findings = [
            Finding("damaged", str(error), None, error.offset)
            for error in self.problems
            if error.record is None
        ]
        message = "the format has no checksums: what is kept was written to its end, and more cannot be told"
        self.findings.append(Finding("no_checksums", f"{self.source.name}: {message}"))
        self._note_zeros()
        at = checkpoint_behind(self.source, self.end)
        if at is not None:
            self.findings.append(second_archive(self.source, at, 0))

    def _note_zeros(self):
        """Say of a last storage that ends in zeros that it may be one in which a copy stopped: nothing behind it tells."""
        begin, end = zeros_at_end(self.source), self.source.nbytes
        if end - begin < SUSPICIOUS_ZEROS or not len(self.records):
            return
        key, offset = self.records.names[-1], int(self.records.offset[-1])
        if key in self.rows and offset < end <= offset + int(self.records.nbytes[-1]):
            message = (
                f"storage {key!r} ends in {end - max(begin, offset)} zeros, as does a file whose copy stopped in it; "
                f"whether they are data cannot be told"
            )
            self.findings.append(
                Finding("zeros_at_end", f"{self.source.name}: {message}", key, begin)
            )

    def _cut_by_zeros(self):
        """{key: error} of the storage in which a copy stopped whose file was filled up with zeros; mostly {}."""
        begin = zeros_at_end(self.source) if self.problems else self.source.nbytes
        if not any(self._is_zero(error.offset, begin) for error in self.problems):
            return {}
        for row, key in enumerate(self.records.names):
            offset, nbytes = int(self.records.offset[row]), int(self.records.nbytes[row])
            if offset - COUNT_NBYTES < begin < offset + nbytes:
                problem = f"from byte {begin} on zeros fill up the file; which of them are storage {key!r} cannot be told"
                return {key: self._error(problem, offset, key)}
        return {}

    def _is_zero(self, offset, begin):
        """Whether an error is about zeros in the place of a number or of a pickle."""
        return offset is not None and begin <= offset <= self.source.nbytes - COUNT_NBYTES

    def _missing(self, key):
        return self._error(f"storage {key!r} is not in what is left of the file", None, key)

    def _error(self, problem, offset=None, record=None):
        name = self.source.name
        return FormatError(f"{name}: {problem}", path=name, record=record, offset=offset)


class LegacyRecovery(_Recovery, LegacyContainer):
    """What is whole of a legacy stream. Raises FormatError where the object's pickle is damaged or cut off."""

    def __init__(self, source, *, threads=None, progress=None, limits=None):
        try:
            super().__init__(source, [], limits=limits)
        except FormatError as error:
            raise without_object(error, path=source.name, offset=error.offset) from None
        self._find_lost()

    def _read_keys(self):
        try:
            return super()._read_keys()
        except CheckpointError as error:
            self.problems.append(error)
            return None

    def _lay_out(self, keys):
        if keys is None:  # where which storage lies is not known
            self.records, self.rows, self.end = Records([], [], []), {}, self.stream.offset
        else:
            super()._lay_out(keys)

    def unpickle(self, **options):
        return self.unpickle_again(**options)


class TarRecovery(_Recovery, TarContainer):
    """What is whole of a tar checkpoint. Raises FormatError where its pickle or its list of tensors is damaged or cut off."""

    def __init__(self, source, *, threads=None, progress=None, limits=None):
        super().__init__(source, [], limits=limits)
        if self.unpickled is None:
            error = self.problems[-1]
            if not isinstance(error, FormatError):
                raise error
            raise without_object(error, path=source.name, offset=error.offset)
        self._find_lost()

    def _find_members(self):
        found, source = {}, self.source
        try:
            tar_members(source, found)
        except CheckpointError as error:
            self.problems.append(error)
        found.setdefault("storages", (source.nbytes, 0))
        for name in NEEDED:
            if name not in found:
                why = f"{source.name}: a tar archive without the member {name!r}"
                raise without_object(why, path=source.name, record=name)
        return {
            name: (offset, max(0, min(nbytes, source.nbytes - offset)))
            for name, (offset, nbytes) in found.items()
        }

    def _read_storages(self, stream):
        try:
            super()._read_storages(stream)
        except CheckpointError as error:
            self.problems.append(error)
            if self._offsets and zeros_at_end(self.source) <= self._offsets[-1] - COUNT_NBYTES:
                # It has no elements by a count that is of the zeros which fill up the file.
                del self.objects[int(self._names.pop())], self.storages[-1]
                del self._offsets[-1], self._nbytes[-1]

    def _storage(self, key):
        """The storage of a key; one that the file lacks is as large as it may have to be, and lost."""
        if key not in self.objects:
            self._add_storage(key, UINT8, ANY_NBYTES, "cpu")
            self.problems.append(self._missing(str(key)))
        return self.objects[key]

    def unpickle(self, **options):
        """The object once more; where it is symbolic, its tensors are calls."""
        if options.get("symbolic"):
            refs = {
                ref.storage.index: ref
                for ref in self.objects.values()
                if isinstance(ref, StorageRef)
            }
            options["tar_objects"] = {
                key: value if isinstance(value, StorageRef) else as_call(value, refs)
                for key, value in self.objects.items()
            }
        return self.unpickle_again(**options)


def as_call(spec, refs):
    """A tensor of a tar, which is no part of the pickle, as the call that makes it in a pickle of today."""
    hooks = Opaque(ORDERED_DICT.qualname, (), callee=ORDERED_DICT, opcode="REDUCE")
    args = (refs[spec.storage.index], spec.offset, spec.shape, spec.stride, False, hooks)
    return Opaque(REBUILD_TENSOR.qualname, args, callee=REBUILD_TENSOR, opcode="REDUCE")


def zeros_at_end(source):
    """From which byte on there is nothing but zeros; the end where the last byte is none."""
    end = source.nbytes
    while end:
        start = max(0, end - LOOK)
        left = len(bytes(source.read(start, end - start)).rstrip(b"\0"))
        if left:
            return start + left
        end = start
    return 0
