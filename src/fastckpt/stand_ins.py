"""What an object may hold that is not the thing itself, and can't be saved in its place: stand-ins, and handles of an open file."""

import pickle

from ._tree import children
from .checkpoint import Checkpoint
from .lazy import LazyStorage, LazyTensor
from .nodes import Opaque
from .selection import dotted
from .sharded import ShardedCheckpoint


def refusing(root):
    """Describers of a Pickler that raise PicklingError for them; ``root`` is the object that is pickled, to say where."""

    def refuse_opaque(value):
        raise pickle.PicklingError(
            f"{place(root, value)}an Opaque stands for an object of {value.qualname:.200}, which was not made when it was loaded; "
            f"saved, it would be lost. Leave it out, or load it with its class allowed (torch.serialization.add_safe_globals)"
        )

    def refuse_lazy(value):
        raise pickle.PicklingError(
            f"{place(root, value)}a {type(value).__name__} is a handle of an open file, and no tensor; its read() gives one"
        )

    def refuse_open(value):
        raise pickle.PicklingError(
            f"{place(root, value)}a {type(value).__name__} is an open file, and none of its tensors; its read() gives the object"
        )

    return {
        Opaque: refuse_opaque,
        LazyTensor: refuse_lazy,
        LazyStorage: refuse_lazy,
        Checkpoint: refuse_open,
        ShardedCheckpoint: refuse_open,
    }


def place(root, value):
    """Where in an object a value is, in front of a sentence; nothing where no containers lead to it."""
    todo, seen = [((), root)], set()
    while todo:
        path, found = todo.pop()
        if found is value:
            return f"{dotted(path)!r:.200}: " if path else ""
        if id(found) not in seen and (members := children(found)) is not None:
            seen.add(id(found))
            todo += [((*path, key), member) for key, member in members]
    return ""
