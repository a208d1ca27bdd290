"""How load_into works: a checkpoint into memory that somebody has already, a module's or a dict's tensors, without a second copy."""

import collections
import collections.abc
from functools import partial

from ._spec import TensorSpec
from .checkpoint import open as open_checkpoint
from .filling import Copy, fill_parts
from .near_names import in_a_row, suggestion
from .needs_torch import torch
from .nodes import TensorNode
from .progress import check as check_progress
from .progress import reporting
from .selection import dotted
from .torch_tensors import memory_problem


def fill_target(target, f, *, strict, prefix, rename, progress, **options):
    """What loading.load_into does; ``options`` are those of ``open``."""
    check_progress(progress)
    check_target(target)
    check_rename(rename)
    with open_checkpoint(f, **options) as checkpoint:
        pairs = named(checkpoint, prefix)
        names, others, metadata = dict(pairs), {}, None
        for part in checkpoint.parts:
            found, versions = others_of(part, prefix, names)
            others, metadata = others | found, metadata or versions
        if prefix and not names and not others:
            raise RuntimeError(
                f"{checkpoint.name}: no name begins with prefix={prefix!r}{suggestion(prefix, map(dotted_name, checkpoint))}"
            )
        if strict:
            refuse_strays(rename, names | others, checkpoint.name, prefix)
        others = renamed(others.items(), rename)
        names = renamed([pair for pair in pairs if pair[0] in names], rename, others)
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


def check_rename(rename):
    """Raise TypeError for what gives no names."""
    if (
        rename is not None
        and not isinstance(rename, collections.abc.Mapping)
        and not callable(rename)
    ):
        raise TypeError(
            f"rename={rename!r:.100}: a dict from names in the file to names in the target, a callable on names, or None is expected"
        )


def refuse_strays(rename, there, where, prefix):
    """Raise RuntimeError for a dict that renames what the file does not have."""
    names = rename if isinstance(rename, collections.abc.Mapping) else ()
    if strays := [str(name) for name in names if name not in there]:
        behind = f" behind prefix={prefix!r}" if prefix else ""
        raise RuntimeError(
            f"{where}: rename= has names that the file does not have{behind}: {in_a_row(strays[:10])}"
            f"{' ...' if len(strays) > 10 else ''}{suggestion(strays[0], there)} (strict=False lets them pass)"
        )


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


def named(checkpoint, prefix):
    """[(name in the file without the prefix, LazyTensor)]; keys with dots in them can make two names alike."""
    pairs = [(dotted_name(name), tensor) for name, tensor in checkpoint.items()]
    return [(name[len(prefix) :], tensor) for name, tensor in pairs if name.startswith(prefix)]


def renamed(pairs, rename, taken=()):
    """{name in the target: value}, without what has none; ValueError where two have one, or one of those that are ``taken``."""
    found = {}
    for name, value in pairs:
        if isinstance(rename, collections.abc.Mapping):
            name = rename.get(name, name)
        elif rename is not None:
            name = rename(name)
        if name is None:
            continue
        if name in found or name in taken:
            raise ValueError(
                f"two parts of the file would be called {name!r:.200} in the target; rename= tells them apart"
            )
        found[name] = value
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
    others, extra = {}, set()
    for key, value in dict.items(container):
        if not isinstance(key, str):
            continue
        if is_extra(key):
            others[key] = checkpoint.read_leaf(value)
            extra.add(key)
        elif key not in names and not isinstance(value, (TensorSpec, TensorNode, dict)):
            others[key] = value
    for name in [name for name in names if is_of_extra(name, extra)]:
        del names[name]
    return others, getattr(container, "__dict__", {}).get("_metadata")


EXTRA_STATE = "_extra_state"  # the last part of its name in a state dict


def is_extra(key):
    """Whether a key of a module's state dict is that of an extra state."""
    return key.rpartition(".")[2] == EXTRA_STATE


def is_of_extra(name, keys):
    """Whether a name is that of an extra state, or leads to something in one; ``keys`` are those of the extra states."""
    if isinstance(name, tuple):
        return name[0] in keys
    if not keys or EXTRA_STATE not in name:
        return False
    parts = name.split(".")
    return any(".".join(parts[:end]) in keys for end in range(1, len(parts) + 1))


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
    problems = [
        f"{name} cannot be filled: {problem}."
        for name, target in recorder.noted
        if (problem := memory_problem(target))
    ]
    refuse(module, problems)
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


def refuse(target, problems):
    """Raise for what does not fit, as torch does."""
    if problems:
        raise RuntimeError(
            "Error(s) in loading state_dict for {}:\n\t{}".format(
                type(target).__name__, "\n\t".join(problems)
            )
        )


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
        elif lazy.shape is not None and tensor.is_nested:
            problems.append(
                f"size mismatch for {name}: a tensor of shape {lazy.shape} comes, the one there is nested."
            )
        elif lazy.shape is not None and tuple(tensor.shape) != lazy.shape:
            problems.append(
                f"size mismatch for {name}: copying a param with shape {torch.Size(lazy.shape)} from checkpoint, "
                f"the shape in current model is {tensor.shape}."
            )
        elif problem := memory_problem(tensor):
            problems.append(f"{name} cannot be filled: {problem}.")
        else:
            copies.append(Copy(name, lazy, tensor))
    refuse(target, problems)
    return copies, torch.nn.modules.module._IncompatibleKeys(missing, unexpected), ()
