from typing import Any, final

ENDED: int

@final
class Flow:
    rows: int
    row: int
    done: int
    def __new__(
        cls,
        address: Any,
        nbytes: Any,
        gap: Any,
        crc: Any = None,
        kernel: int = 0,
        huge: bool | None = None,
        slow_page_ns: int = ...,
    ) -> Flow: ...
    def receive(self, fd: int, end: int) -> int: ...
    def place(self, end: int) -> memoryview | None: ...
    def filled(self, nbytes: int) -> None: ...
    def send(self, fd: int, end: int) -> int: ...
    def sent(self, end: int) -> bool: ...
    def piece(self, end: int) -> memoryview | bytes | None: ...
