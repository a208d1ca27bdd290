from _typeshed import ReadableBuffer

COLUMNS: int

def render(
    columns: ReadableBuffer, names: ReadableBuffer, count: int, row: int, begin: int, end: int
) -> bytes: ...
def directory(columns: ReadableBuffer, names: ReadableBuffer, count: int) -> bytes: ...
