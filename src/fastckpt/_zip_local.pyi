from collections.abc import Buffer  # type: ignore[attr-defined]
from typing import Any

UNREADABLE: int
LOCAL_OK: int
LOCAL_SHORT: int
LOCAL_SIGNATURE: int
LOCAL_FLAGS: int
LOCAL_NAME: int
LOCAL_DATA: int
LOCAL_UNUSABLE: int
MOST_INFLATION: int

def locate(
    directory: Buffer, columns: Buffer, count: int, rows: Buffer, offsets: Buffer, source: Any
) -> tuple[int, int]: ...
def unusable_rows(columns: Buffer, count: int, marks: Buffer) -> None: ...
