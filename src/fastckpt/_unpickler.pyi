from collections.abc import Callable, Iterable
from typing import Any, final

from ._spec import Global, StorageSpec, TensorSpec
from ._stack import Stack
from ._storages import Storages
from .errors import FormatError
from .limits import Limits
from .nodes import Opaque

PIDS_NONE: int
PIDS_ZIP: int
PIDS_LEGACY: int
PIDS_TAR: int

class Truncated(FormatError): ...

class Unpickled:
    obj: Any
    end: int
    storages: list[StorageSpec]
    tensors: list[TensorSpec]
    names: list[Global]
    unknown: list[tuple[str, str]]
    undecodable: bytes | None
    touched: list[tuple[Any, Opaque]]
    def __init__(self, machine: Any, obj: Any, end: int) -> None: ...

@final
class Machine(Stack):
    described: Storages
    names: list[Global]
    unknown: list[tuple[str, str]]
    undecodable: bytes | None
    touched: dict[int, tuple[Any, Opaque]]
    def __init__(self, described: Storages) -> None: ...
    def note_unknown(self, qualname: str, note: str = "") -> None: ...
    def spend(self, count: int) -> None: ...
    def update(self, mapping: Any, pairs: Any) -> None: ...
    def check_keys(self, items: Any) -> None: ...
    def tensor(
        self,
        ref: Any,
        offset: Any,
        size: Any,
        stride: Any,
        dtype: int | None = None,
        requires_grad: bool = False,
    ) -> TensorSpec: ...
    def call(self, callee: Any, args: tuple[Any, ...]) -> Any: ...

def unpickle(
    data: Any,
    *,
    pids: int = 0,
    tar_objects: dict[int, Any] | None = None,
    storages: Iterable[StorageSpec] = (),
    tensors: Iterable[TensorSpec] = (),
    encoding: str = "utf-8",
    errors: str = "strict",
    limits: Limits | None = None,
    where: str = "pickle",
    offset: int = 0,
    gradients: bool = True,
    tolerant: bool = False,
    symbolic: bool = False,
    observe: Callable[[int, str, Any, Any], object] | None = None,
) -> Unpickled: ...
