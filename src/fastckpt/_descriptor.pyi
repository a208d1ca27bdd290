from collections.abc import Callable
from typing import Any, final

@final
class Owned:
    fd: int
    def __new__(cls, call: Callable[..., int], *args: Any) -> Owned: ...
    def close(self) -> None: ...
