from collections.abc import Buffer  # type: ignore[attr-defined]

HEADER: int
STORED: int
NBYTES: int
CRC: int
METHOD: int
FLAGS: int
NAME: int
NAME_NBYTES: int
LIMIT: int
KIND: int
COLUMNS: int

IS_FOLDER: int
IS_PICKLE: int

OK: int
ENTRY_CUT: int
ENTRY_SIGNATURE: int
ENTRY_NAME: int
ENTRY_EXTRA: int
ENTRY_DISK: int
ENTRY_MASKED: int
ENTRY_HEADER: int
ENTRY_STORED: int
ENTRY_NBYTES: int
ENTRIES_LEFT: int
ENTRY_LENGTH: int

def find_end_records(window: Buffer, most: int) -> list[int]: ...
def has_header(buffer: Buffer, at: int, central: bool) -> bool: ...
def end_record(buffer: Buffer, at: int) -> tuple[int, int, int, int, int, int, int] | None: ...
def end_locator_64(buffer: Buffer, at: int) -> tuple[int, int, int] | None: ...
def end_record_64(buffer: Buffer, at: int) -> tuple[int, int, int, int, int, int, int] | None: ...
def read_directory(
    directory: Buffer, columns: Buffer, count: int, start: int, bias: int
) -> tuple[int, int, int]: ...
def survey_directory(
    directory: Buffer,
    columns: Buffer,
    count: int,
    start: int,
    bias: int,
    status: Buffer,
    places: Buffer,
) -> int: ...
def is_ascending(values: Buffer) -> bool: ...
def set_limits(columns: Buffer, order: Buffer | None, count: int, directory: int) -> int: ...
def set_kinds(names: Buffer, columns: Buffer, count: int) -> None: ...
def rows_under(names: Buffer, columns: Buffer, count: int, prefix: bytes, rows: Buffer) -> int: ...
def index_names(
    names: Buffer, columns: Buffer, count: int, skip: int, folder: bytes
) -> tuple[dict[str, int], dict[str, int], list[str]]: ...
