from typing import Any, final

from _typeshed import ReadableBuffer, WriteableBuffer

@final
class Storage:
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __len__(self) -> int: ...

def allocate(
    sizes: ReadableBuffer,
    address: WriteableBuffer,
    *,
    own_from: int,
    shared_most: int,
    heap_below: int,
    alignment: int,
    huge: bool,
) -> list[Storage]: ...

@final
class Pages:
    def __new__(
        cls, address: Any, nbytes: Any, huge: bool | None, slow_page_ns: int = ...
    ) -> Pages: ...
    def make(self, start: int, nbytes: int) -> None: ...

@final
class Mapping:
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __len__(self) -> int: ...
    def will_need(self, start: int, stop: int) -> None: ...

def map_file(fd: int, nbytes: int) -> tuple[Mapping, int]: ...
