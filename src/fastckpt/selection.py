"""Which parts of an object are wanted: ``keys=`` of load, and the specs that a part needs."""

import collections
import collections.abc
import fnmatch

from ._spec import StorageRef, TensorSpec
from ._tree import children, is_flat, leaves, named_leaves, named_tensors
from .errors import LimitError, short
from .near_names import not_found, suggestion
from .nodes import MISSING, Node, Opaque, QuantizedNode

_ABSENT = object()


class Names:
    """Makes names of paths, and bounds how much text they are: a key of a megabyte may stand in a million paths."""

    MOST_TEXT = 1 << 26  # characters of all names, where some are longer than HONEST
    HONEST = 1000

    def __init__(self):
        self.text = 0

    def __call__(self, path):
        parts = [spelled(key) for key in path]
        length = sum(map(len, parts))
        self.text += length
        if self.text > self.MOST_TEXT and length > self.HONEST:
            raise LimitError(
                f"the names of this object's parts have {length} characters and more; load it whole"
            )
        return ".".join(parts)


def spelled(key):
    """A key as a part of a name."""
    try:
        return str(key)
    except (ValueError, RecursionError):  # an int of 4301 digits, by itself or inside
        return short(key)


def dotted(path):
    """The name of one path of keys."""
    return Names()(path)


def names_of(paths):
    """The name of each path: its keys joined by dots; the path itself, a tuple, where several would read alike."""
    name_of = Names()
    names = [
        path[0] if len(path) == 1 and type(path[0]) is str else name_of(path) for path in paths
    ]
    count = collections.Counter(names)
    return [path if count[name] > 1 else name for name, path in zip(names, paths, strict=True)]


def index_of(root):
    """{name: leaf} of the tensors of an inert object."""
    if is_flat(root):  # most are: a dict of tensors, which is its own index
        return root
    found = named_tensors(root)
    names = names_of([path for path, _ in found])
    return dict(zip(names, [leaf for _, leaf in found], strict=True))


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
    """An inert object without the leaves that ``keys`` does not want; the nesting stays.

    A container that occurs twice stays one where the same is wanted of it under both paths, and becomes two where not. An
    object of an unknown class stays whole where a part of it is wanted: what it needs, its class knows.
    Raises KeyError for a listed name that does not occur, and for a pattern that nothing matches.
    """
    pruning = _Pruning(keys)
    try:
        result = pruning.visit(root, ())
    except RecursionError:
        raise LimitError("the object nests too deep for keys=; load it whole") from None
    if missing := [name for name in pruning.listed if name not in pruning.found]:
        raise not_found(missing, pruning.found)
    if isinstance(keys, str) and pruning.found and not pruning.chose:
        raise not_found(keys, pruning.found, pattern=True)
    return None if result is _ABSENT else result


class _Pruning:
    MOST_KEYS = 4_000_000  # in the paths of members of containers that were visited before; there can be 2**depth

    def __init__(self, keys):
        self.wanted, self.listed = chooser(keys)
        self.found, self.name = {}, Names()  # a dict, for the order of the file
        self.chose = False  # anything
        self.results = {}  # id of a container -> (it, [(what was kept, the container of that)])
        self.open = {}  # id of a container around this one -> the new one
        self.repeated_keys = 0

    def visit(self, value, path):
        """What is left of a value at a path, or _ABSENT."""
        members = None if isinstance(value, (set, frozenset)) else children(value)
        if members is None:
            name = self.name(path)
            self.found[name] = None
            if not self.wanted(name):
                return _ABSENT
            self.chose = True
            return value
        if id(value) in self.open:
            return self.open[id(value)]  # a cycle
        members = list(members)
        if id(value) in self.results:
            self.repeated_keys += (len(members) + 1) * (len(path) + 1)
            if self.repeated_keys > self.MOST_KEYS:
                raise LimitError("the object has too many paths for keys=; load it whole")
        new = self.open[id(value)] = (
            value if isinstance(value, (tuple, Opaque)) else _emptied(value)
        )
        kept = [(key, self.visit(member, (*path, key))) for key, member in members]
        del self.open[id(value)]
        kept = [(key, member) for key, member in kept if member is not _ABSENT]
        _, results = self.results.setdefault(id(value), (value, []))
        for before, result in results:
            if [(key, id(member)) for key, member in before] == [(k, id(m)) for k, m in kept]:
                return result
        result = _filled(value, new, kept, bool(members))
        results.append((kept, result))
        return result


def _emptied(container):
    """A container of the same type, with nothing in it."""
    if isinstance(container, collections.defaultdict):
        return collections.defaultdict(container.default_factory)
    if isinstance(container, collections.deque):
        return collections.deque(maxlen=container.maxlen)
    return type(container)()


def _filled(container, new, members, had_any):
    """``new``, with the members that are kept."""
    if isinstance(container, dict):
        attributes = vars(container) if hasattr(container, "__dict__") else {}
        for key, member in members:
            if key in container:
                type(new).__setitem__(new, key, member)  # an attribute may have any name
            elif key in attributes:
                vars(new)[key] = member
        return new
    if isinstance(container, tuple):
        return tuple([member for _, member in members])
    if isinstance(container, Opaque):
        return container if members or not had_any else _ABSENT
    if isinstance(container, (list, collections.deque)):
        new.extend(member for _, member in members)
        return new
    vars(new).update(members)
    return new


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


def no_tensor(name, names, root):
    """The KeyError for a name that is none of the ``names`` of tensors; of what else it may be there is in the object."""
    text = name if isinstance(name, str) else dotted(name) if isinstance(name, tuple) else str(name)
    names = [each if isinstance(each, str) else dotted(each) for each in names]
    if text in names:  # keys of other types
        return KeyError(f"{short(name)} is no path of a tensor; {text!r:.200} is the name of one")
    inside = next((each for each in names if each.startswith(f"{text}.")), None)
    if inside is not None:
        what = f"a container, of {inside!r:.200} for example"
    elif any(dotted(path) == text for path, _ in named_leaves(root)):
        what = "there, and no tensor"
    else:
        return KeyError(f"{text!r:.200} is no tensor of the checkpoint{suggestion(text, names)}")
    return KeyError(f"{text!r:.200} is {what}; .tree has it")


def name_list(names):
    """The names that somebody lists; TypeError for one text, whose letters they would be."""
    if isinstance(names, (str, bytes)):
        raise TypeError(
            f"names={names!r:.100}: a list of names is expected; checkpoint[name].read() reads one"
        )
    return list(names)
