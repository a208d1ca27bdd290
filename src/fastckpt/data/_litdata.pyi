from typing import Any, Self

from _typeshed import ReadableBuffer, WriteableBuffer

from ._litdata_batch import Batch
from ._litdata_layout import Layout

class Block:
    source: Any
    count: int
    def __new__(
        cls,
        source: Any,
        table: bytes,
        first: int,
        count: int,
        shift: int,
        mapping: ReadableBuffer | None = None,
    ) -> Self: ...
    def span(self, item: int) -> tuple[int, int]: ...

class Rounds: ...

def read_items(
    layout: Layout,
    block: Block,
    items: ReadableBuffer,
    slots: ReadableBuffer,
    start: int,
    stop: int,
    samples: list[Any],
) -> None: ...
def read_one(layout: Layout, block: Block, item: int) -> Any: ...
def read_raw(block: Block, items: ReadableBuffer, start: int, stop: int) -> list[bytes]: ...
def stack_items(
    batch: Batch,
    block: Block,
    items: ReadableBuffer,
    slots: ReadableBuffer,
    start: int,
    stop: int,
) -> None: ...
def stack_bytes(batch: Batch, row: int, item: bytes) -> None: ...
def split(
    begins: ReadableBuffer,
    positions: ReadableBuffer,
    items: WriteableBuffer,
    slots: WriteableBuffer,
    ordered: bool,
) -> list[tuple[int, int, int]] | None: ...
