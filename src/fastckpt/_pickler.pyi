from collections.abc import Callable
from typing import Any, final

@final
class Pickler:
    def save_reduce(
        self,
        obj: Any,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        state: Any = None,
        items: Any = None,
        pairs: Any = None,
        setter: Any = None,
    ) -> None: ...

def dump(
    obj: Any,
    protocol: int = 2,
    describers: dict[type, Callable[[Any], tuple[Any, ...] | None]] | None = None,
    persistent_id: Callable[[Any], tuple[Any, ...] | None] | None = None,
    foreign: dict[type, tuple[str, str]] | None = None,
) -> bytes: ...
