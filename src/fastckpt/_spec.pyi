from typing import Any, Self, final

@final
class Global:
    module: str
    name: str
    qualname: str
    known: Any
    storage_dtype: int
    rebuild: int
    def __init__(self, module: str, name: str, known: Any = None) -> None: ...
    def __deepcopy__(self, memo: Any) -> Global: ...

@final
class StorageSpec:
    key: str
    dtype: int
    nbytes: int
    location: str
    index: int
    root: StorageSpec | None
    offset: int

@final
class StorageRef:
    storage: StorageSpec
    dtype: int
    def __deepcopy__(self, memo: Any) -> StorageRef: ...

@final
class TensorSpec:
    storage: StorageSpec
    dtype: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    numel: int
    extent: int
    requires_grad: bool
    conj: bool
    neg: bool
    index: int
    def __deepcopy__(self, memo: Any) -> TensorSpec: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class Leaf:
    _checkpoint: Any
    leaf: Any
    def __new__(cls, checkpoint: Any, leaf: Any) -> Self: ...
    @property
    def shape(self) -> tuple[int, ...] | None: ...

def tensor_spec(
    ref: StorageRef,
    dtype: int,
    offset: Any,
    shape: Any,
    stride: Any,
    index: int = -1,
    requires_grad: bool = False,
) -> TensorSpec: ...
def storage_spec(
    key: str,
    dtype: int,
    nbytes: int,
    location: str,
    index: int,
    root: StorageSpec | None = None,
    offset: int = 0,
) -> StorageRef: ...
