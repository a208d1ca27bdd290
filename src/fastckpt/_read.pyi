from _typeshed import ReadableBuffer, WriteableBuffer

STATUS_OK: int
STATUS_SHORT: int
STATUS_STOPPED: int
OPENMP: int

def fill(
    fd: int,
    base: int,
    view: ReadableBuffer | None,
    origin_nbytes: int,
    offset: ReadableBuffer,
    nbytes: ReadableBuffer,
    address: ReadableBuffer,
    crc: WriteableBuffer | None,
    status: WriteableBuffer,
    control: WriteableBuffer,
    *,
    kernel: int = 0,
    num_threads: int = 1,
    go_on: bool = False,
    huge: bool | None = None,
    unit_nbytes: int = ...,
    chunk_nbytes: int = ...,
    slow_page_ns: int = ...,
) -> int: ...
def view_of(address: int, nbytes: int) -> memoryview: ...
