from _typeshed import ReadableBuffer, WriteableBuffer

def write(
    fd: int,
    address: ReadableBuffer,
    nbytes: ReadableBuffer,
    offset: ReadableBuffer,
    crc: WriteableBuffer | None,
    control: WriteableBuffer,
    *,
    kernel: int = 0,
    num_threads: int = 1,
    chunk_nbytes: int = ...,
) -> int: ...
