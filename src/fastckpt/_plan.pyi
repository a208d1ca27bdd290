from _typeshed import ReadableBuffer, WriteableBuffer

from ._spec import StorageSpec, TensorSpec

MISSING_RECORD: int
WRONG_SIZE: int

def match_rows(
    storages: list[StorageSpec],
    rows: dict[str, int],
    nbytes: ReadableBuffer,
    found: WriteableBuffer,
) -> tuple[int, int]: ...
def roots_of(storages: list[StorageSpec]) -> list[StorageSpec]: ...
def with_bytes(storages: list[StorageSpec]) -> list[StorageSpec]: ...
def largest_items(
    storages: list[StorageSpec], tensors: list[TensorSpec], itemsize: WriteableBuffer
) -> None: ...
