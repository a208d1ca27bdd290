from typing import Any, Self

from ._litdata_layout import Layout

class Batch:
    rows: int
    columns: list[Any]
    def __new__(cls, layout: Layout, rows: int) -> Self: ...
