from typing import Any

from ._spec import Global, TensorSpec
from ._stack import Stack
from ._storages import Storages
from .nodes import Opaque

CONTENT_ERRORS: tuple[type[Exception], ...]

class Objects(Stack):
    described: Storages
    names: list[Global]
    unknown: list[tuple[str, str]]
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
