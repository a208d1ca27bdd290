"""The tar checkpoints of torch 0.1.2 to 0.1.9: members ``storages``, ``tensors`` and ``pickle``.

Storages and tensors have numbers of their own, and the object's pickle refers to both by them.
"""

from .._spec import Global, storage_spec, tensor_spec
from .._unpickler import PIDS_TAR
from ..dtypes import DTYPES
from ..errors import CheckpointError, FormatError, short
from ..records import Records
from ._tar_members import checkpoint_members
from .stream import PickleStream

MOST_DIMENSIONS = 64  # torch's own bound


def is_key(value):
    """Whether a value can be the number of a storage or tensor: an address, in practice."""
    return type(value) is int and -(2**63) <= value < 2**64


class TarContainer:
    """A tar checkpoint, opened; see LegacyContainer for what it offers.

    ``left`` says by member how many bytes stand behind what was read of it. With ``problems`` what follows an error is left out;
    ``unpickled`` is None then.
    """

    kind = "tar"
    byteorder = "little"

    def __init__(self, source, problems=None, **options):
        self.source, self.problems = source, problems
        self.members = self._find_members()
        self.end = source.nbytes
        self.options = options
        self.storages, self.tensors, self.objects, self.unknown = [], [], {}, []
        self._names, self._offsets, self._nbytes = [], [], []
        self.left, self.unpickled = {}, None
        try:
            self._read()
        except CheckpointError as error:
            if problems is None:
                raise
            problems.append(error)
        self.records = Records(self._names, self._offsets, self._nbytes)
        self.rows = {name: row for row, name in enumerate(self._names)}

    def _read(self):
        self._read_storages(self._stream("storages"))
        self._read_tensors(self._stream("tensors"))
        self.unpickled = self.unpickle_again()
        self.unpickled.unknown = self.unknown + self.unpickled.unknown

    def _find_members(self):
        return checkpoint_members(self.source)

    def _stream(self, member):
        offset, nbytes = self.members[member]
        return PickleStream(self.source, offset, offset + nbytes, **self.options)

    def _count(self, stream, what):
        count = stream.pickle(f"number of {what}").obj
        if type(count) is not int or count < 0:
            raise stream.error(f"the number of {what} is {short(count)}")
        return count

    def _read_storages(self, stream):
        for _ in range(self._count(stream, "storages")):
            described = stream.pickle("storage").obj
            if not isinstance(described, tuple) or len(described) != 3:
                raise stream.error(
                    f"a storage is described by {short(described)}; (key, location, class) is expected (the layouts of "
                    f"2016's alpha releases are not known to any release)"
                )
            key, location, cls = described
            if not is_key(key) or not isinstance(cls, Global) or cls.storage_dtype < 0:
                raise stream.error(
                    f"a storage is described by {short(described)}; (key, location, class) is expected"
                )
            if isinstance(location, bytes):
                location = location.decode("latin-1")
            location = location if isinstance(location, str) else short(location)
            count, itemsize = stream.int64("element count"), DTYPES[cls.storage_dtype].itemsize
            if not 0 <= count <= (stream.end - stream.offset) // itemsize:
                raise stream.cut_short(f"storage {key} of {count} elements", count * itemsize)
            if key in self.objects:
                raise stream.error(f"storage {key} is there twice; the file is damaged")
            offset = stream.skip(count * itemsize, f"storage {key}")
            self._add_storage(key, cls.storage_dtype, count * itemsize, location)
            self._names.append(str(key))
            self._offsets.append(offset)
            self._nbytes.append(count * itemsize)
        self._read_views(stream)
        self.left["storages"] = stream.end - stream.offset
        self.unknown += stream.unknown

    def _add_storage(self, key, dtype, nbytes, location, root=None, offset=0):
        ref = storage_spec(str(key), dtype, nbytes, location, len(self.storages), root, offset)
        self.storages.append(ref.storage)
        self.objects[key] = ref

    def _read_views(self, stream):
        """Slices of storages that are storages of their own: (key, key of the root, offset, count) in elements."""
        views = stream.pickle("list of storage views").obj
        if not isinstance(views, list):
            raise stream.error(f"the list of storage views is {short(views)}")
        for view in views:
            if not isinstance(view, tuple) or len(view) != 4 or not all(map(is_key, view)):
                raise stream.error(
                    f"a storage view is {short(view)}; (key, root, offset, count) is expected"
                )
            key, root_key, offset, count = view
            if root_key not in self.objects or key in self.objects:
                raise stream.error(
                    f"storage view {key} of storage {root_key}: no such root, or a key that is taken"
                )
            root = self.objects[root_key].storage
            itemsize = DTYPES[root.dtype].itemsize
            room = root.nbytes // itemsize
            if offset < 0 or count < 0 or count > room or offset > room - count:
                raise stream.error(
                    f"storage view {key}: {count} elements at {offset} lie outside its root, which has {room}"
                )
            start = (
                root.offset + offset * itemsize
            )  # a view of a view counts from the storage at the bottom
            bottom = root if root.root is None else root.root
            self._add_storage(key, root.dtype, count * itemsize, root.location, bottom, start)

    def _read_tensors(self, stream):
        for _ in range(self._count(stream, "tensors")):
            described = stream.pickle("tensor").obj
            if not isinstance(described, tuple) or len(described) != 3:
                raise stream.error(
                    f"a tensor is described by {short(described)}; (key, storage, class) is expected"
                )
            key, storage_key, _ = described
            ndim = int.from_bytes(stream.take(8, "number of dimensions")[:4], "little", signed=True)
            if not 0 <= ndim <= MOST_DIMENSIONS:
                raise stream.error(
                    f"a tensor has {ndim} dimensions; 0 to {MOST_DIMENSIONS} are possible"
                )
            shape, stride = stream.int64s(ndim, "sizes"), stream.int64s(ndim, "strides")
            offset = stream.int64("storage offset")
            numbers = is_key(key) and is_key(storage_key)
            ref = self._storage(storage_key) if numbers and key not in self.objects else None
            if ref is None:
                raise stream.error(
                    f"tensor {short(key)} of storage {short(storage_key)}: no such storage, or a key that is taken"
                )
            if not hasattr(ref, "storage") or hasattr(ref, "shape"):
                raise stream.error(f"tensor {key} lies in {storage_key}, which is a tensor")
            try:
                spec = tensor_spec(ref, ref.dtype, offset, shape, stride, len(self.tensors))
            except FormatError as error:
                raise stream.error(f"tensor {key}: {error}") from None
            self.tensors.append(spec)
            self.objects[key] = spec
        self.left["tensors"] = stream.end - stream.offset
        self.unknown += stream.unknown

    def _storage(self, key):
        """The storage of a key, None where there is none."""
        return self.objects.get(key)

    def locate(self, rows):
        """Every offset is known."""

    def unpickle_again(self, **options):
        """The object, with containers of its own; ``options`` are more of those of unpickle."""
        stream = self._stream("pickle")
        options = {"tar_objects": self.objects, **options}
        return stream.pickle(
            "object",
            1 << 18,
            pids=PIDS_TAR,
            storages=self.storages,
            tensors=self.tensors,
            **options,
        )

    def pickle_bytes(self):
        """The bytes of the object's pickle."""
        offset, nbytes = self.members["pickle"]
        return self.source.read(offset, nbytes)
