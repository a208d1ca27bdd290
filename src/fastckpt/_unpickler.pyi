from collections.abc import Callable, Iterable
from typing import Any, final

from ._pickle_objects import Objects
from ._spec import Global, StorageSpec, TensorSpec
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
class Machine(Objects):
    undecodable: bytes | None

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
