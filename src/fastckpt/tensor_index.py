"""The tensors of an inert object by name or by path: what ``checkpoint[name]`` looks in."""

from ._tree import named_tensors
from .selection import dotted, index_of, no_tensor


class TensorIndex:
    """What is made of an object's tensors when somebody asks for one: ``leaves``, {name: leaf}, and their paths."""

    def __init__(self, root):
        self.root, self.leaves = root, index_of(root)
        self._by_path = self._paths = None

    def get(self, name):
        """The leaf of a name, or at a path, a tuple of keys, which always works; None where there is none."""
        leaf = self.leaves.get(name)
        if leaf is None and isinstance(name, tuple):
            if self._by_path is None:
                self._by_path = {typed(path): leaf for path, leaf in named_tensors(self.root)}
            leaf = self._by_path.get(typed(name))
        return leaf

    def path_of(self, leaf):
        """The path of a tensor: the first, where it has several."""
        if self._paths is None:
            found = named_tensors(self.root)
            self._paths = {id(each): path for path, each in reversed(found)}
        return self._paths.get(id(leaf), ())

    def missing(self, name):
        """The KeyError for a name that is no tensor's, or that several paths have."""
        alike = [path for path in self.leaves if isinstance(path, tuple) and dotted(path) == name]
        if alike:
            return KeyError(f"{name!r} is ambiguous; use one of {', '.join(map(repr, alike[:4]))}")
        return no_tensor(name, self.leaves, self.root)


def typed(path):
    """A path whose keys of different types differ: 0, "0" and False are three keys."""
    return tuple([(type(key), key) for key in path])
