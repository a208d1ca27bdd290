"""Which parts of an object are wanted: ``keys=`` of load, and the specs that a part needs."""

import collections.abc
import fnmatch

from ._spec import StorageRef, TensorSpec
from ._tree import children, leaves
from .errors import LimitError
from .nodes import MISSING, Node, Opaque, QuantizedNode

_ABSENT = object()


def dotted(path):
    """The name of a path of keys."""
    return ".".join([str(key) for key in path])


def chooser(keys):
    """A predicate on names out of a glob pattern, a list of names or a callable; and the names that must occur."""
    if isinstance(keys, str):
        return (lambda name: fnmatch.fnmatchcase(name, keys)), ()
    if callable(keys):
        return keys, ()
    names = list(keys) if isinstance(keys, collections.abc.Iterable) else [keys]
    if not all(isinstance(name, str) for name in names):
        raise TypeError("keys: a glob pattern, a list of names or a callable on names is expected")
    wanted = set(names)
    return wanted.__contains__, names


def prune(root, keys):
    """Take the leaves that ``keys`` does not want out of an inert object; the nesting stays.

    An object of an unknown class stays whole where a part of it is wanted: what it needs, its class knows.

    Raises KeyError for a listed name that does not occur.
    """
    wanted, listed = chooser(keys)
    found, memo = set(), {}

    def visit(value, path):
        members = None if isinstance(value, (set, frozenset)) else children(value)
        if members is None:
            name = dotted(path)
            found.add(name)
            return value if wanted(name) else _ABSENT
        if id(value) in memo:
            return memo[id(value)][0]
        memo[id(value)] = (value, value)  # a cycle ends here; the second keeps the id taken
        kept = [(key, visit(member, (*path, key))) for key, member in list(members)]
        result = _keep(
            value, [(key, member) for key, member in kept if member is not _ABSENT], bool(kept)
        )
        memo[id(value)] = (result, value)
        return result

    try:
        result = visit(root, ())
    except RecursionError:
        raise LimitError("the object nests too deep for keys=; load it whole") from None
    if missing := [name for name in listed if name not in found]:
        raise KeyError(
            f"not in the checkpoint: {', '.join(missing[:10])}{' ...' if len(missing) > 10 else ''}"
        )
    return None if result is _ABSENT else result


def _keep(container, members, had_any):
    """A container of some of its members only, the same object where it can change."""
    if isinstance(container, dict):
        kept = dict(members)
        for key in [key for key in container if key not in kept]:
            del container[key]
        for key in container:
            container[key] = kept[key]
        return container
    if isinstance(container, list):
        container[:] = [member for _, member in members]
        return container
    if isinstance(container, tuple):
        return tuple([member for _, member in members])
    if isinstance(container, Opaque):
        return container if members or not had_any else _ABSENT
    if hasattr(container, "maxlen"):
        container.clear()
        container.extend(member for _, member in members)
        return container
    for key in set(vars(container)) - {key for key, _ in members}:
        delattr(container, key)
    return container


def specs_in(root):
    """(storages, tensors, opaque) that an inert object holds, however deep: each spec once, by its index."""
    storages, tensors, opaque, todo, seen = {}, {}, [], [root], set()
    walked = set()
    while todo:
        for leaf in leaves(todo.pop(), walked):
            if isinstance(leaf, TensorSpec):
                tensors[leaf.index] = leaf
                storages[leaf.storage.index] = leaf.storage
            elif isinstance(leaf, StorageRef):
                storages[leaf.storage.index] = leaf.storage
            elif isinstance(leaf, Node) and id(leaf) not in seen:
                seen.add(id(leaf))
                if isinstance(leaf, QuantizedNode):
                    todo.append(leaf.spec)
                todo.append(leaf.args)
                if leaf.state is not MISSING:
                    todo.append(leaf.state)
                if isinstance(leaf, Opaque):
                    opaque.append(leaf)
    for storage in list(storages.values()):
        if storage.root is not None:
            storages[storage.root.index] = storage.root
    return [storages[i] for i in sorted(storages)], [tensors[i] for i in sorted(tensors)], opaque
