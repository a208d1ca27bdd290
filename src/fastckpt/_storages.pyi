from collections.abc import Iterable

from ._spec import StorageSpec, TensorSpec

class Storages:
    storages: list[StorageSpec]
    tensors: list[TensorSpec]
    def __init__(
        self,
        storages: Iterable[StorageSpec] = (),
        tensors: Iterable[TensorSpec] = (),
        gradients: bool = True,
    ) -> None: ...
