"""What of its storages a checkpoint uses: bytes that no tensor reaches, and storages that several names share."""

import numpy as np

from ._spec import TensorSpec
from ._tree import named_tensors
from .lazy import core_of
from .plan import root_of, with_bytes
from .selection import Names, specs_in


def unreached_nbytes(unpickled):
    """How many bytes of each storage no tensor reaches: (storages, counts), those with any.

    Counted is the union of what lies from each tensor's first element to its last; what a stride leaves out in between is
    reached. A storage that no tensor looks at is one that the object holds as such, and used.
    """
    tensors = [spec for spec in unpickled.tensors if spec.extent]
    roots = [root_of(spec.storage) for spec in tensors]
    index = np.array([root.index for root in roots], dtype=np.int64)
    begin = np.array(
        [spec.storage.offset + spec.offset * spec.itemsize for spec in tensors], dtype=np.int64
    )
    end = begin + np.array([spec.extent * spec.itemsize for spec in tensors], dtype=np.int64)
    reached = dict.fromkeys(index.tolist(), 0)
    order = np.lexsort((begin, index))
    root, until = -1, 0
    for i in order.tolist():
        if index[i] != root:
            root, until = int(index[i]), 0
        reached[root] += max(0, int(end[i]) - max(until, int(begin[i])))
        until = max(until, int(end[i]))
    found = [
        (spec, spec.nbytes - reached[spec.index])
        for spec in with_bytes(unpickled.storages)
        if spec.index in reached and reached[spec.index] < spec.nbytes
    ]
    return [spec for spec, _ in found], [count for _, count in found]


def shared_storages(unpickled):
    """The storages that tensors of several names lie in: [(storage, names)], in the order of the pickle."""
    users = {}
    for path, leaf in named_tensors(unpickled.obj):
        core = core_of(leaf)
        specs = [core] if isinstance(core, TensorSpec) else specs_in([leaf])[1]
        for root in {root_of(spec.storage).index: root_of(spec.storage) for spec in specs}.values():
            if root.nbytes:
                users.setdefault(root.index, (root, []))[1].append(path)
    shared = [users[index] for index in sorted(users) if len(users[index][1]) > 1]
    name_of = Names()
    return [(root, [name_of(path) for path in paths]) for root, paths in shared]
