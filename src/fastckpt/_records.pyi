from collections.abc import Buffer  # type: ignore[attr-defined]

def first_impossible(
    offset: Buffer,
    nbytes: Buffer,
    stored_nbytes: Buffer,
    method: Buffer,
    count: int,
    rows: Buffer,
    source_nbytes: int,
) -> int: ...
def compare(
    crc: Buffer, crc32: Buffer, nbytes: Buffer, count: int, rows: Buffer, wrong: Buffer
) -> tuple[int, int]: ...
