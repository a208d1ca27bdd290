"""out=: a stream into tensors that are there, straight into their memory where it takes the bytes as they come."""

from .._spec import StorageRef
from .._tree import leaves, named_leaves, named_tensors, place, substitute
from ..dtypes import DTYPES
from ..errors import CheckpointError, UnsupportedError
from ..filling import crowded, say_overwritten, takes_bytes
from ..into import EXTRA_STATE, is_extra, is_of_extra, plan_dict
from ..lazy import core_of, dtype_of, plain_spec, shape_of
from ..needs_torch import torch
from ..plan import root_of, roots_of, with_bytes
from ..selection import index_of, names_of
from .receiving import StreamReader


class Coming:
    """A tensor of a stream, with what into.plan_dict wants to know of it."""

    def __init__(self, leaf):
        self.leaf, self.spec, self.shape = leaf, plain_spec(leaf), shape_of(core_of(leaf))


def plan_targets(contents, out, extra, strict):
    """The Copies of a stream into the tensors of ``out``, by name. Raises where something does not fit.

    ``extra`` are the names of the extra states that a module takes, which are not filled; None where ``out`` is no module.
    """
    found = [(path, t) for path, t in named_leaves(out) if isinstance(t, torch.Tensor)]
    names = names_of([path for path, _ in found])
    there = dict(zip(names, [tensor for _, tensor in found], strict=True))
    root, sent = contents.unpickled.obj, frozenset()
    if extra is not None and isinstance(root, dict):
        sent = {key for key in root if isinstance(key, str) and is_extra(key)}
    coming = {
        name: Coming(leaf) for name, leaf in index_of(root).items() if not is_of_extra(name, sent)
    }
    extra = frozenset(extra or ())
    copies, _, _ = plan_dict(there | dict.fromkeys(extra - sent), coming, sent - extra, strict)
    problems = [problem for copy in copies if (problem := misfit(copy))]
    if problems:
        raise RuntimeError(
            "Error(s) in loading a stream into tensors:\n\t{}".format("\n\t".join(problems))
        )
    return copies


def misfit(copy):
    """Why a tensor cannot take the values of the one that comes, or None."""
    name, coming, target = copy
    dtype = f"torch.{DTYPES[dtype_of(coming.leaf)].name}"
    if coming.spec is None:
        raise UnsupportedError(
            f"{name!r} is a {coming.leaf.kind} tensor, and out= takes strided ones; load it without out="
        )
    if str(target.dtype) != dtype:
        return f"dtype mismatch for {name}: {dtype} arrives, the tensor there is of {target.dtype}."
    if target.layout is not torch.strided or target.is_nested:
        return f"{name} is a strided tensor, the one there is {'nested' if target.is_nested else target.layout}."
    if target.is_meta or target.untyped_storage().device.type == "meta":  # a fake tensor, say
        return f"{name} is a tensor without memory."
    if any(n > 1 and step == 0 for n, step in zip(target.shape, target.stride(), strict=True)):
        return f"{name} is expanded: its elements share their memory."
    return None


def extra_states(module):
    """The parts of a module that take an extra state, by its name in the module's state dict."""
    default = torch.nn.Module.set_extra_state
    return {
        f"{path}.{EXTRA_STATE}" if path else EXTRA_STATE: part
        for path, part in module.named_modules(remove_duplicate=False)
        if type(part).set_extra_state is not default
    }


def looks_alike(a, b):
    """Whether two tensors that take the same bytes have the same elements then."""
    return (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())


class TargetReader(StreamReader):
    """Makes the object of a stream with the tensors of ``out`` in it, filled."""

    def __init__(self, contents, out, strict, **options):
        super().__init__(contents, "torch", "error", None, **options)
        self.extra = {}
        is_module = isinstance(out, torch.nn.Module)
        if is_module:
            self.extra = extra_states(out)
            out = {key: t for key, t in out.state_dict().items() if not is_extra(key)}
        self.refuse(contents.unpickled.unknown)
        self.copies = plan_targets(contents, out, self.extra if is_module else None, strict)

    def make(self, root, storages, tensors, limits):
        plan = TargetPlan(self.contents, self.copies)
        arrival = self.arrival(plan.wanted, plan.parts)
        bridge = self.empty_bridge(arrival.places)
        with torch.no_grad():
            try:
                for records in arrival.groups():
                    for row in records:
                        plan.fill(row, bridge)
            except (CheckpointError, OSError) as error:
                say_overwritten(error, plan.touched(arrival.begun()))
                raise
            plan.fill_late(bridge)
        for copy in self.copies:
            torch.autograd.graph.increment_version(copy.target)
        made = [None] * len(self.contents.unpickled.tensors)
        free = [spec for spec in tensors if spec.index not in plan.first]
        for spec, tensor in zip(free, bridge.tensors(free), strict=True):
            made[spec.index] = tensor
        # For what is in no container, such as the arguments of an object.
        for index, copy in plan.first.items():
            made[index] = copy.target
        root = placed(root, {copy.name: copy.target for copy in self.copies})
        result = substitute(root, bridge, made, limits)
        for name, part in self.extra.items():
            if isinstance(result, dict) and name in result:
                part.set_extra_state(result[name])
        return result


def placed(root, targets):
    """An inert object with the tensors of ``targets`` in it, by name, so that each name has its own where two are one tensor."""
    paths = [path for path, _ in named_tensors(root)]
    for name, path in zip(names_of(paths), paths, strict=True):
        if name in targets:
            root = place(root, path, targets[name])
    return root


class TargetPlan:
    """What is done with each record: its bytes go to tensors of ``out``, or to memory of its own and from there.

    ``wanted`` are the storages that need memory, ``parts`` are those of Arrival, ``first`` has by index of a spec the copy
    that it is used in first.
    """

    def __init__(self, contents, copies):
        unpickled = contents.unpickled
        self.rows, self.parts, self.first, self.late = contents.rows, {}, {}, []
        self._direct, self._staged, self._filled = {}, {}, []  # the first two by row
        for copy in copies:
            self.first.setdefault(copy.lazy.spec.index, copy)
        self._keep = self._kept(unpickled)  # indices of storages that the object needs as such
        by_storage = {}
        for copy in copies:
            by_storage.setdefault(root_of(copy.lazy.spec.storage).index, []).append(copy)
        last = crowded(copies)
        self._last = [copies[position] for position in sorted(last)]
        self._crowded = {id(copy) for copy in self._last}
        storages = with_bytes(roots_of(unpickled.storages))
        self.wanted = [
            storage
            for storage in storages
            if storage.index in self._keep or not self._goes_straight(storage, by_storage)
        ]
        for storage in self.wanted:
            self._staged[self.rows[storage.key]] = storage, by_storage.get(storage.index, ())

    def _part(self, copy):
        """(row of the record, first byte in it, nbytes) of a tensor that arrives."""
        spec = copy.lazy.spec
        start = spec.storage.offset + spec.offset * spec.itemsize
        return self.rows[root_of(spec.storage).key], start, spec.nbytes

    def _kept(self, unpickled):
        """Storages that something else than a tensor of ``out`` lies in."""
        keep = {root_of(t.storage).index for t in unpickled.tensors if t.index not in self.first}
        refs = [leaf for leaf in leaves(unpickled.obj, set()) if isinstance(leaf, StorageRef)]
        return keep | {root_of(ref.storage).index for ref in refs}

    def _goes_straight(self, storage, by_storage):
        """Plan the parts of a record; False where it has to go through memory of its own."""
        taken, parts, late = {}, [], []
        for copy in by_storage.get(storage.index, ()):
            spec, target = copy.lazy.spec, copy.target
            if not spec.numel:
                continue
            part = self._part(copy)
            if not takes_bytes(target, spec) or id(copy) in self._crowded:
                return False
            first = taken.setdefault(part, copy)
            if first is copy:
                parts.append((*part[1:], target.data_ptr()))
            elif not looks_alike(first.target, target):
                return False
            elif first.target.data_ptr() != target.data_ptr():
                late.append((copy, first))
        parts.sort()
        ends = [start + nbytes for start, nbytes, _ in parts]
        if any(end > start for end, (start, _, _) in zip(ends, parts[1:], strict=False)):
            return False
        row = self.rows[storage.key]
        self.parts[row], self._direct[row] = parts, list(taken.values())
        self.late += late
        return True

    def fill(self, row, bridge):
        """A record has arrived: fill what has not been filled by that."""
        if row not in self._staged:
            return
        storage, copies = self._staged[row]
        now = [copy for copy in copies if id(copy) not in self._crowded]
        for copy in now:
            self._copy(copy, bridge)
        if storage.index not in self._keep and len(now) == len(copies):
            bridge.forget(storage.index)
            bridge.places.owners[storage.index] = None

    def touched(self, count):
        """The names of tensors that were overwritten, in part at least, when the first ``count`` records have begun to arrive."""
        direct = [
            copy.name for row in sorted(self._direct) if row < count for copy in self._direct[row]
        ]
        return direct + self._filled

    def _copy(self, copy, bridge):
        copy.target.copy_(bridge.tensor(copy.lazy.spec))
        self._filled.append(copy.name)

    def fill_late(self, bridge):
        """Tensors whose bytes went to the memory of others; and those that share theirs, in the order of ``out``."""
        for copy, source in self.late:
            copy.target.copy_(source.target)
        for copy in self._last:
            self._copy(copy, bridge)
