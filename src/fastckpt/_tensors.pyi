from collections.abc import Callable
from typing import Any

from _typeshed import ReadableBuffer

from ._spec import TensorSpec

def make_tensors(
    specs: list[TensorSpec],
    owners: list[Any],
    address: ReadableBuffer,
    dtypes: tuple[tuple[int, int] | None, ...],
    first: list[Any],
    from_dlpack: Callable[[Any], Any],
    any_location: bool = False,
) -> list[Any]: ...
