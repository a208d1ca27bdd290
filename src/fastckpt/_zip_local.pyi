from collections.abc import Buffer  # type: ignore[attr-defined]
from typing import Any

UNREADABLE: int
LOCAL_OK: int
LOCAL_SHORT: int
LOCAL_SIGNATURE: int
LOCAL_FLAGS: int
LOCAL_NAME: int
LOCAL_DATA: int

def locate(
    directory: Buffer, columns: Buffer, count: int, rows: Buffer, offsets: Buffer, source: Any
) -> tuple[int, int]: ...
