from typing import Any

from ._litdata_layout import Layout

class Batch:
    rows: int
    columns: list[Any]
    def __init__(self, layout: Layout, rows: int) -> None: ...
