"""How load_into works: a checkpoint into memory that somebody has already, a module's or a dict's tensors, without a second copy."""

import collections
import collections.abc
from functools import partial
from typing import NamedTuple

import numpy as np

from ._crc32 import crc32
from ._spec import TensorSpec
from .checkpoint import open as open_checkpoint
from .dtypes import DTYPES
from .errors import ChecksumError
from .lazy import LazyTensor
from .materialize import fill, mismatch
from .near_names import suggestion
from .needs_torch import torch
from .nodes import TensorNode
from .plan import root_of
from .progress import check as check_progress
from .progress import reporting
from .records import NO_CRC, STORED, Records
from .selection import dotted

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.nn.Parameter))
# Memory that a tensor passes through on its way, where it cannot be read straight into its place.
CHUNK = 8 << 20


class Copy(NamedTuple):
    """One tensor of the file, and the one that takes its values."""

    name: str
    lazy: LazyTensor
    target: torch.Tensor


def fill_target(target, f, *, strict, prefix, rename, progress, **options):
    """What loading.load_into does; ``options`` are those of ``open``."""
    check_progress(progress)
    check_target(target)
    with open_checkpoint(f, **options) as checkpoint:
        names = named(checkpoint, prefix, rename)
        others, metadata = {}, None
        for part in checkpoint.parts:
            found, versions = others_of(part, prefix, names)
            others, metadata = others | found, metadata or versions
        if prefix and not names and not others:
            raise RuntimeError(
                f"{checkpoint.name}: no name begins with prefix={prefix!r}{suggestion(prefix, map(dotted_name, checkpoint))}"
            )
        try:
            if isinstance(target, torch.nn.Module):
                copies, result, assign = plan_module(target, names, others, metadata, strict)
            else:
                copies, result, assign = plan_dict(target, names, others, strict)
        except RuntimeError as error:
            advice = "" if rename else advice_on_names(names_in(target), names, prefix)
            if not advice:
                raise
            raise RuntimeError(f"{error}\n\t{advice}") from error
        with torch.no_grad(), reporting(progress, checkpoint.name) as tell:
            fill_parts(checkpoint.parts, copies, tell)
        for put in assign:
            put()
        return result


def check_target(target):
    """Raise TypeError for what is neither a module nor a dict."""
    if isinstance(target, (torch.nn.Module, collections.abc.Mapping)):
        return
    kind = type(target).__name__
    advice = ""
    if hasattr(target, "load_state_dict"):
        advice = (
            f"; {kind}.load_state_dict(load(f)[...]) takes the part of the file that is its own"
        )
    raise TypeError(f"target is {kind!r}: a module or a dict of tensors is expected{advice}")


def names_in(target):
    if not isinstance(target, torch.nn.Module):
        return [name for name in target if isinstance(name, str)]
    return [name for name, _ in (*target.named_parameters(), *target.named_buffers())]


def advice_on_names(wanted, there, prefix):
    """What helps where most names of one side are those of the other behind a prefix; "" where they are not."""
    missing = [name for name in wanted if name not in there]
    for name in missing[:1]:
        longer = [each[: -len(name)] for each in there if each.endswith(f".{name}")]
        for found in longer:
            if 2 * sum(found + each in there for each in wanted) > len(wanted):
                return f"(names in the file begin with {prefix + found!r}: prefix={prefix + found!r} takes them without it)"
        shorter = [name[: -len(each)] for each in there if name.endswith(f".{each}")]
        for found in shorter:
            if 2 * sum(found + each in wanted for each in there) > len(there):
                return (
                    f"(names in the target begin with {found!r}, and those in the file do not: rename=lambda name: {found!r} + name "
                    f"gives it to them)"
                )
    return ""


def dotted_name(name):
    return name if isinstance(name, str) else dotted(name)


def named(checkpoint, prefix, rename):
    """{name in the target: LazyTensor}."""
    found = {}
    for name in checkpoint:
        text = dotted_name(name)
        if not text.startswith(prefix):
            continue
        new = text[len(prefix) :]
        if rename is not None:
            new = rename(new) if callable(rename) else rename.get(new, new)
        if new is None:
            continue
        if new in found:
            raise ValueError(
                f"two tensors of the file would be called {new!r} in the target; rename= tells them apart"
            )
        found[new] = checkpoint[name]
    return found


def others_of(checkpoint, prefix, names):
    """What else the dict at ``prefix`` holds: {name: value} without its tensors, and its ``_metadata``.

    A module's extra state is made real; anything else only has a name that somebody may not expect.
    """
    container = checkpoint.root
    for key in prefix.split(".")[:-1]:
        container = container.get(key) if isinstance(container, dict) else None
    if not isinstance(container, dict):
        return {}, None
    others = {}
    for key, value in dict.items(container):
        if not isinstance(key, str):
            continue
        if key.endswith("_extra_state"):
            others[key] = checkpoint.read_leaf(value)
            for name in [name for name in names if name == key or name.startswith(f"{key}.")]:
                del names[name]
        elif key not in names and not isinstance(value, (TensorSpec, TensorNode, dict)):
            others[key] = value
    return others, getattr(container, "__dict__", {}).get("_metadata")


# -- who decides what goes where

# What may be asked of a placeholder without its values.
METADATA = frozenset(
    "__get__ __len__ size dim stride numel nelement ndimension is_floating_point is_complex is_contiguous "
    "element_size storage_offset untyped_storage get_device is_signed is_conj is_neg".split()
)


class _Recorder(torch.overrides.TorchFunctionMode):
    """While a module loads placeholders, notes each ``target.copy_(placeholder)`` instead of doing it.

    Whatever else is done with one, by a hook or by a module's own loading code, is done with the real tensor.
    """

    def __init__(self, placeholders, names):
        super().__init__()
        self.names = {id(placeholder): name for name, placeholder in placeholders.items()}
        self.lazy = names
        self.noted = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_ and len(args) > 1 and id(args[1]) in self.names:
            self.noted.append((self.names[id(args[1])], args[0]))
            return args[0]
        if getattr(func, "__name__", "") not in METADATA:
            args, kwargs = self.real(args), self.real(kwargs or {})
        return func(*args, **(kwargs or {}))

    def real(self, value):
        """The same with tensors of the file in place of placeholders."""
        if isinstance(value, torch.Tensor):
            return self.lazy[self.names[id(value)]].read() if id(value) in self.names else value
        if type(value) in (list, tuple):
            return type(value)([self.real(each) for each in value])
        if type(value) is dict:
            return {key: self.real(each) for key, each in value.items()}
        return value


def plan_module(module, names, others, metadata, strict):
    """Let ``module.load_state_dict`` go over placeholders of the right shapes, on the meta device."""
    placeholders = {name: placeholder(lazy) for name, lazy in names.items()}
    state = collections.OrderedDict({**placeholders, **others})
    if metadata is not None:
        state._metadata = metadata
    with _Recorder(placeholders, names) as recorder:
        result = module.load_state_dict(state, strict=strict)
    copies, fresh = (
        [],
        {},
    )  # id of a tensor on the meta device -> (it, the one that takes its place)
    for name, target in recorder.noted:
        if target.device.type == "meta":
            if id(target) not in fresh:
                fresh[id(target)] = (target, torch.empty_like(target, device="cpu"))
            target = fresh[id(target)][1]
        copies.append(Copy(name, names[name], target))
    refuse_kept(module, placeholders)
    return copies, result, [partial(replace, module, old, new) for old, new in fresh.values()]


def refuse_kept(module, placeholders):
    """A module that keeps what it is given, instead of copying it, would keep a tensor without memory."""
    storages = {tensor.untyped_storage()._cdata for tensor in placeholders.values()}
    for path, part in module.named_modules():
        for holder in (part._parameters, part._buffers, vars(part)):
            for name, value in holder.items():
                if not isinstance(value, torch.Tensor) or value.device.type != "meta":
                    continue
                if value.untyped_storage()._cdata in storages:
                    raise RuntimeError(
                        f"{path or type(module).__name__}: {name!r} keeps the tensor that it is given instead of copying it; "
                        f"module.load_state_dict(load(f)) loads such a module"
                    )


def placeholder(lazy):
    """A tensor without memory that looks like the one in the file."""
    dtype = getattr(torch, lazy.dtype or "float32")
    if lazy.spec is None:
        return torch.empty(lazy.shape or (0,), dtype=torch.float32, device="meta")
    return torch.empty_strided(lazy.shape, lazy.stride, dtype=dtype, device="meta")


def replace(module, old, new):
    """Put a fresh tensor wherever a module holds one of the meta device."""
    fresh = None  # one, for all places that shared the old one
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is old:
                if fresh is None:
                    fresh = type(old)(new, requires_grad=old.requires_grad)
                part._parameters[name] = fresh
        for name, buffer in part._buffers.items():
            if buffer is old:
                part._buffers[name] = new


def plan_dict(target, names, others, strict):
    """The same for a dict, with the same words."""
    missing = [name for name in target if name not in names]
    unexpected = [name for name in [*names, *others] if name not in target]
    problems = []
    if strict and unexpected:
        problems.append(
            "Unexpected key(s) in state_dict: {}. ".format(
                ", ".join(f'"{name}"' for name in unexpected)
            )
        )
    if strict and missing:
        problems.insert(
            0,
            "Missing key(s) in state_dict: {}. ".format(", ".join(f'"{name}"' for name in missing)),
        )
    copies = []
    for name, tensor in target.items():
        lazy = names.get(name)
        if lazy is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            problems.append(
                f'While copying the parameter named "{name}", expected torch.Tensor but found {type(tensor)}'
            )
        elif lazy.shape is not None and tuple(tensor.shape) != lazy.shape:
            problems.append(
                f"size mismatch for {name}: copying a param with shape {torch.Size(lazy.shape)} from checkpoint, "
                f"the shape in current model is {tensor.shape}."
            )
        else:
            copies.append(Copy(name, lazy, tensor))
    if problems:
        raise RuntimeError(
            "Error(s) in loading state_dict for {}:\n\t{}".format(
                type(target).__name__, "\n\t".join(problems)
            )
        )
    return copies, torch.nn.modules.module._IncompatibleKeys(missing, unexpected), ()


# -- filling


def fill_parts(parts, copies, progress):
    """Fill from each of the files that a checkpoint consists of, one after the other."""
    total = sum(copy.lazy.nbytes for copy in copies)
    by_part = {id(part): [] for part in parts}
    for copy in copies:
        by_part[id(copy.lazy.checkpoint)].append(copy)
    touched, done = [], 0
    for part in parts:
        filling = _Filling(part, progress, done, total)
        filling.run(by_part[id(part)], touched)
        done = filling.done


class _Filling:
    """Reads what goes straight into its place in one parallel fill, and the rest in chunks.

    ``done`` bytes of ``total`` were read before.
    """

    def __init__(self, checkpoint, progress, done, total):
        self.checkpoint, self.progress = checkpoint, progress
        self.done, self.total = done, total

    def run(self, copies, touched):
        """Fill; ``touched`` are the names of tensors that were overwritten, to which these are added."""
        direct = [copy for copy in copies if self.fits(copy)]
        others = [copy for copy in copies if not self.fits(copy)]
        touched += [copy.name for copy in direct]
        try:
            self.fill_direct(direct)
            for copy in others:
                self.copy(copy, touched)
        except ChecksumError as error:
            raise overwritten(error, touched) from None

    def fits(self, copy):
        """Whether the bytes in the file are those of the target, in the same order."""
        spec = copy.lazy.spec
        if spec is None or self.checkpoint.swapped or self.checkpoint.map_file:
            return False
        if not takes_bytes(copy.target, spec):
            return False
        row = self.checkpoint.row_of(root_of(spec.storage))
        return self.checkpoint.contents.records.method[row] == STORED

    def fill_direct(self, copies):
        contents, places = self.checkpoint.contents, {}
        for copy in copies:  # tied tensors are read once
            spec = copy.lazy.spec
            root = root_of(spec.storage)
            places[
                self.checkpoint.row_of(root),
                spec.storage.offset + spec.offset * spec.itemsize,
                copy.target.data_ptr(),
            ] = copy
        if not places:
            return
        records, rows, address, crcs = contents.records, [], [], []
        for (row, _, pointer), copy in places.items():
            rows.append(row)
            address.append(pointer)
            crcs.append(
                int(records.crc32[row]) if copy.lazy.spec.nbytes == records.nbytes[row] else NO_CRC
            )
        inside = np.array([start for _, start, _ in places], dtype=np.int64)
        nbytes = [copy.lazy.spec.nbytes for copy in places.values()]
        wanted = Records(
            [records.names[row] for row in rows], records.offset[rows] + inside, nbytes, crc32=crcs
        )
        fill(
            contents.source, wanted, np.arange(len(rows)), np.array(address, dtype=np.int64),
            [copy.target for copy in copies],
            verify=self.checkpoint.verifies, threads=self.checkpoint.threads,
            progress=(lambda n, _: self.progress(self.done + n, self.total)) if self.progress else None,
        )  # fmt: skip
        for copy in copies:  # so that autograd notices, as it does of copy_
            torch.autograd.graph.increment_version(copy.target)
        self.done += sum(nbytes)

    def copy(self, copy, touched):
        """Through a chunk: another dtype, order, device or layout."""
        lazy, target = copy.lazy, copy.target
        plain = lazy.spec is not None and type(target) in PLAIN_TENSORS
        chunks = list(chunks_of(lazy.shape, lazy.spec.itemsize)) if plain else []
        if len(chunks) > 1:
            touched.append(copy.name)
            self.copy_chunks(copy, chunks)
        else:  # read whole, and verified, before the target is touched
            target.copy_(lazy[...] if plain else lazy.read())
            touched.append(copy.name)
        self.tell(lazy.nbytes)

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

    def tell(self, nbytes):
        self.done += nbytes
        if self.progress:
            self.progress(self.done, self.total)


def takes_bytes(target, spec):
    """Whether a tensor's memory takes the bytes of ``spec`` as they lie there, all of them and nothing else."""
    # A subclass, such as a DTensor, may have its memory elsewhere, or none.
    if type(target) not in PLAIN_TENSORS or not target.data_ptr():
        return False
    same = (
        str(target.dtype) == f"torch.{DTYPES[spec.dtype].name}" and target.stride() == spec.stride
    )
    plain = (
        target.device.type == "cpu"
        and target.layout is torch.strided
        and not (target.is_conj() or target.is_neg() or spec.conj or spec.neg)
    )
    return same and plain and 0 < spec.numel == spec.extent


def overwritten(error, names):
    """The same error, with the tensors that were filled before it was noticed."""
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    where = {"path": error.path, "record": error.record, "offset": error.offset}
    message = f"{error}; overwritten already: {shown or 'nothing'}"
    return ChecksumError(message, expected=error.expected, actual=error.actual, **where)


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
