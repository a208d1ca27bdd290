from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

INT: int
FLOAT: int
BOOL: int
TEXT: int
BYTES: int
TENSOR: int
FLAT_TENSOR: int
ARRAY: int
FLAT_ARRAY: int
CALL: int
DICT: int
LIST: int
TUPLE: int
MADE: int

class Node: ...

class Layout:
    names: tuple[str, ...]
    count: int
    def __new__(
        cls,
        leaves: Sequence[tuple[str, int, int, Callable[[bytes], Any] | None]],
        tree: tuple[Any, ...] | None,
        elements: Sequence[Sequence[tuple[Any, ...]]],
        new: tuple[Callable[..., Any], Callable[..., Any]],
        from_dlpack: Callable[[Any], Any] | None,
    ) -> Self: ...
    def decode_bytes(self, item: bytes) -> Any: ...

def compile_tree(tree: tuple[Any, ...] | None) -> Node | None: ...
def unflatten(tree: Node | None, values: Iterable[Any]) -> Any: ...
