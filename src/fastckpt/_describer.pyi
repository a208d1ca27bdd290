from typing import Any

class Describer:
    kinds: dict[Any, tuple[Any, ...]]
    keys: dict[int, str]
    types: dict[int, Any]
    moves: dict[int, Any]
    nbytes: list[int]
    address: list[int | None]
    dtypes: list[Any]
    holders: list[Any]
    def __init__(
        self, strided: Any, moves: dict[int, Any], plain_cpu: bool, named: bool
    ) -> None: ...
    def describe(self, tensor: Any) -> tuple[Any, ...] | None: ...
    def key(self, storage: Any, dtype: Any, taken_for: Any, on_cpu: bool, holder: Any) -> str: ...
