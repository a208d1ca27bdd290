"""The tree of an open checkpoint: lazy tensors in place of tensors."""

from .lazy import LazyStorage, LazyTensor
from .nodes import Opaque


class LazyBridge:
    """Makes the tree of an open checkpoint: nothing is read. ``known`` are the leaves that its names lead to, by id."""

    def __init__(self, checkpoint, known):
        self.checkpoint, self.known, self.storages = checkpoint, known, {}
        self._names = None

    def lazy(self, node):
        return LazyTensor(self.checkpoint, self.known.get(id(node), node))

    def storage(self, ref):
        key = (ref.storage.index, ref.dtype)
        return self.storages.setdefault(key, LazyStorage(self.checkpoint, ref))

    @property
    def names(self):
        """The bridge that makes names, sizes and devices; torch is imported when the first is met."""
        if self._names is None:
            self._names = self.checkpoint._reader().empty_bridge()
        return self._names

    def name(self, path):
        return self.names.name(path)

    def named(self, name):
        return self.names.named(name)

    def size(self, sizes):
        return self.names.size(sizes)

    def device(self, *args):
        return self.names.device(*args)

    def generator(self, *args):
        return Opaque("torch.Generator", args)

    def keeps(self, opaque):
        return True

    def opaque(self, node):
        return node
