from typing import Any

from _typeshed import ReadableBuffer

WRONG_COUNT: int

def compare_counts(
    source: Any, offset: ReadableBuffer, expected: ReadableBuffer
) -> tuple[int, int, int]: ...
