from collections.abc import Buffer  # type: ignore[attr-defined]
from typing import Literal

BLOCK: int

def header(block: Buffer) -> tuple[bytes, bytes, int] | Literal[False] | None: ...
