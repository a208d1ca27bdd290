"""Tensors of a checkpoint into memory that is there already: straight, in one parallel fill, or through a chunk."""

import math
from typing import NamedTuple

import numpy as np

from ._crc32 import crc32
from .errors import CheckpointError
from .lazy import LazyTensor
from .materialize import fill, mismatch
from .needs_torch import torch
from .plan import root_of
from .records import NO_CRC, STORED, Records
from .torch_tensors import DTYPE_OF, PLAIN_TENSORS, reach

# Memory that a tensor passes through on its way, where it cannot be read straight into its place.
CHUNK = 8 << 20
# Tensors that are made at a time: each takes half a KiB beside its bytes.
MOST_TOGETHER = 4096


class Copy(NamedTuple):
    """One tensor of the file, and the one that takes its values."""

    name: str
    lazy: LazyTensor
    target: torch.Tensor


def fill_parts(parts, copies, progress):
    """Fill from each of the files that a checkpoint consists of, one after the other; what shares its memory with others comes last."""
    last = crowded(copies)
    tally = _Tally(progress, sum(copy.lazy.nbytes for copy in copies))
    fillings = {id(part): _Filling(part, tally) for part in parts}
    by_part = {id(part): [] for part in parts}
    for position, copy in enumerate(copies):
        if position not in last:
            by_part[id(copy.lazy.checkpoint)].append(copy)
    touched = []
    try:
        for part in parts:
            fillings[id(part)].run(by_part[id(part)], touched)
        for position in sorted(last):
            copy = copies[position]
            fillings[id(copy.lazy.checkpoint)].copy(copy, touched)
    except (CheckpointError, OSError) as error:
        say_overwritten(error, touched)
        raise


class _Tally:
    """How many bytes were read, of how many, for ``progress(done, total)``."""

    def __init__(self, progress, total):
        self.progress, self.done, self.total = progress, 0, total

    def tell(self, more):
        """Tell of bytes beyond those that are counted."""
        if self.progress:
            self.progress(self.done + more, self.total)

    def count(self, nbytes):
        self.done += nbytes


class _Filling:
    """Reads what goes straight into its place in one parallel fill, and the rest in chunks."""

    def __init__(self, checkpoint, tally):
        self.checkpoint, self.tally = checkpoint, tally

    def run(self, copies, touched):
        """Fill; ``touched`` are the names of tensors that were overwritten, to which these are added."""
        direct, others = self.divide(copies)
        touched += [copy.name for _, copy in direct]
        self.fill_direct(direct)
        for group in groups_of(others):
            if len(group) > 1:
                self.copy_group(group, touched)
            else:
                self.copy(*group, touched)

    def divide(self, copies):
        """Those whose bytes in the file are the target's, in the same order, as (part of the file, copy); and all others.

        A part is (row of the record, first byte in it, nbytes).
        """
        with_spec = [(copy, copy.lazy.spec) for copy in copies]
        with_spec = [(copy, spec) for copy, spec in with_spec if spec is not None]
        rows = self.checkpoint.rows_of([root_of(spec.storage) for _, spec in with_spec])
        stored = (self.checkpoint.contents.records.method[rows] == STORED).tolist()
        in_order = not (self.checkpoint.swapped or self.checkpoint.map_file)
        direct = {}
        for row, is_stored, (copy, spec) in zip(rows, stored, with_spec, strict=True):
            if in_order and is_stored and takes_bytes(copy.target, spec):
                start = spec.storage.offset + spec.offset * spec.itemsize
                direct[id(copy)] = (row, start, spec.nbytes), copy
        return list(direct.values()), [copy for copy in copies if id(copy) not in direct]

    def fill_direct(self, copies):
        """Fill the targets of (part, copy)."""
        contents = self.checkpoint.contents
        # tied tensors are read once
        places = {(*part, copy.target.data_ptr()) for part, copy in copies}
        if not places:
            return
        records = contents.records
        rows, inside, nbytes, address = map(list, zip(*sorted(places), strict=True))
        crcs = [
            int(records.crc32[row]) if n == records.nbytes[row] else NO_CRC
            for row, n in zip(rows, nbytes, strict=True)
        ]
        wanted = Records(
            [records.names[row] for row in rows],
            records.offset[rows] + np.array(inside),
            nbytes,
            crc32=crcs,
        )
        fill(
            contents.source, wanted, np.arange(len(rows)), np.array(address, dtype=np.int64),
            [copy.target for _, copy in copies],
            verify=self.checkpoint.verifies, threads=self.checkpoint.threads,
            progress=(lambda n, _: self.tally.tell(n)) if self.tally.progress else None,
        )  # fmt: skip
        for _, copy in copies:  # so that autograd notices, as it does of copy_
            torch.autograd.graph.increment_version(copy.target)
        self.tally.count(sum(nbytes))

    def copy_group(self, copies, touched):
        """Small ones that are read together, whole, and verified, before their targets are touched."""
        values = self.checkpoint.read_leaves([copy.lazy.leaf for copy in copies])
        for copy, value in zip(copies, values, strict=True):
            copy.target.copy_(value)
        touched += [copy.name for copy in copies]
        self.tally.count(sum([copy.lazy.nbytes for copy in copies]))
        self.tally.tell(0)

    def copy(self, copy, touched):
        """Through a chunk: another dtype, order, device or layout."""
        lazy, target = copy.lazy, copy.target
        plain = is_plain(copy)
        chunks = list(chunks_of(lazy.shape, lazy.spec.itemsize)) if plain else []
        if len(chunks) > 1:
            touched.append(copy.name)
            self.copy_chunks(copy, chunks)
        else:  # read whole, and verified, before the target is touched
            target.copy_(lazy[...] if plain else lazy.read())
            touched.append(copy.name)
        self.tally.count(lazy.nbytes)
        self.tally.tell(0)

    def copy_chunks(self, copy, chunks):
        """Some rows at a time; their bytes are summed on the way where they are the record's, one behind the other."""
        lazy, target = copy.lazy, copy.target
        spec, records = lazy.spec, self.checkpoint.contents.records
        row = self.checkpoint.row_of(root_of(spec.storage))
        expected = int(records.crc32[row])
        ordered = (
            self.checkpoint.verifies
            and expected > 0
            and spec.nbytes == records.nbytes[row]
            and records.method[row] == STORED
            and not (self.checkpoint.swapped or spec.conj or spec.neg)
            and is_contiguous(spec.shape, spec.stride)
        )
        actual = 0
        for index in chunks:
            part = lazy[index]
            if ordered:
                actual = crc32(part.detach().reshape(-1).view(torch.uint8).numpy(), actual)
            target[index].copy_(part)
        if ordered and actual != expected:
            raise mismatch(self.checkpoint.source, records, row, actual, expected)


def is_plain(copy):
    return copy.lazy.spec is not None and type(copy.target) in PLAIN_TENSORS


def groups_of(copies):
    """Lists of neighbours whose storages fit into a chunk together; what is too large for that, or not plain, is alone."""
    group, roots, nbytes = [], set(), 0
    for copy in copies:
        root = root_of(copy.lazy.spec.storage) if is_plain(copy) else None
        more = root.nbytes if root and root.index not in roots else 0
        if root is None or nbytes + more > CHUNK or len(group) == MOST_TOGETHER:
            if group:
                yield group
            group, roots, nbytes = [], set(), 0
            if root is None or root.nbytes > CHUNK:
                yield [copy]
                continue
            more = root.nbytes
        group.append(copy)
        roots.add(root.index)
        nbytes += more
    if group:
        yield group


def crowded(copies):
    """The positions of copies whose targets share memory with others that take other values.

    Torch fills one after the other, so that what is filled later counts: so must these be, behind all others.
    """
    spans = sorted(
        (*extent, position)
        for position, copy in enumerate(copies)
        if (extent := extent_of(copy.target))
    )
    found, together, behind = set(), [], 0
    for begin, end, position in [*spans, (math.inf, math.inf, None)]:
        if begin >= behind:  # nothing before shares memory with this
            if len(together) > 1 and len({values_of(copies[i]) for i in together}) > 1:
                found.update(together)
            together = []
        together.append(position)
        behind = max(behind, end)
    return found


def extent_of(tensor):
    """(begin, end) of the memory that the elements of a tensor lie in; None where it has none that is known."""
    if type(tensor) not in PLAIN_TENSORS or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    begin = tensor.data_ptr() if tensor.numel() and not tensor.is_meta else 0
    return (begin, begin + reach(tensor) * tensor.element_size()) if begin else None


def values_of(copy):
    """What tells apart what two copies leave in the same memory."""
    spec, target = copy.lazy.spec, copy.target
    if spec is None:
        return id(copy)
    start = spec.storage.offset + spec.offset * spec.itemsize
    source = (
        id(root_of(spec.storage)),
        start,
        spec.dtype,
        spec.shape,
        spec.stride,
        spec.conj,
        spec.neg,
    )
    return (
        source,
        target.data_ptr(),
        target.dtype,
        target.shape,
        target.stride(),
        target.is_conj(),
        target.is_neg(),
    )


def takes_bytes(target, spec):
    """Whether a tensor's memory takes the bytes of ``spec`` as they lie there, all of them and nothing else."""
    if type(target) not in PLAIN_TENSORS or target.layout is not torch.strided:
        return False
    if target.is_nested or not target.data_ptr():
        return False
    same = target.dtype is DTYPE_OF[spec.dtype] and target.stride() == spec.stride
    plain = target.device.type == "cpu" and not (
        target.is_conj() or target.is_neg() or spec.conj or spec.neg
    )
    return same and plain and 0 < spec.numel == spec.extent


def say_overwritten(error, names):
    """Let an error name the tensors that were filled, in part at least, before it was noticed."""
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    said = f"overwritten already: {shown or 'nothing'}"
    if isinstance(error, CheckpointError):
        error.args = (f"{error}; {said}",)
    else:  # of the system, which has words of its own
        error.add_note(said)


def is_contiguous(shape, stride):
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def chunks_of(shape, itemsize):
    """Indices that cut a tensor into parts of at most CHUNK bytes, in the order of its elements."""
    inner = itemsize
    axis = len(shape)
    while axis and inner * shape[axis - 1] <= CHUNK:
        axis -= 1
        inner *= shape[axis]
    if not axis:
        yield (...,)
        return
    step = max(1, CHUNK // inner)
    for outer in np.ndindex(*shape[: axis - 1]):
        for start in range(0, shape[axis - 1], step):
            yield (*outer, slice(start, start + step))
