"""Records out of one file into another, by position: in chunks, several at a time, each summed on the way."""

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from . import workers
from ._crc32 import combine, crc32
from .materialize import CHUNK, inflated
from .records import STORED

PIECE = (
    16 << 20
)  # bytes that one thread copies before it takes others; deflated records are one piece


class Piece(NamedTuple):
    """Some bytes of the content of a record: the one at position ``i`` of those to be copied."""

    i: int
    row: int
    start: int
    nbytes: int


def contents_of(source, records, row, start=0, nbytes=None):
    """The content of a record, or ``nbytes`` of it from ``start`` on: yields bytes-like chunks of at most CHUNK bytes.

    A chunk is overwritten by the next one. A deflated record comes whole. Raises what reading raises.
    """
    if records.method[row] != STORED:
        yield from inflated(source, records, row)
        return
    at = int(records.offset[row]) + start
    nbytes = int(records.nbytes[row]) - start if nbytes is None else nbytes
    buffer = memoryview(bytearray(min(CHUNK, nbytes)))
    for done in range(0, nbytes, CHUNK):
        view = buffer[: min(CHUNK, nbytes - done)]
        source.readinto(at + done, view)
        yield view


def read_record(source, records, row):
    """The content of a record, whole."""
    return b"".join([bytes(chunk) for chunk in contents_of(source, records, row)])


def copy_records(source, records, rows, write, offsets, *, threads=None, progress=None):
    """Copy the content of records: ``write(offset, data)`` is called for each chunk, from any thread and in any order.

    ``offsets`` says where the content of each row begins. Returns an int64 column of their CRC-32s. ``progress(done, total)`` is
    called from this thread, in bytes. Raises what reading and writing raise.
    """
    pieces = pieces_of(records, rows)
    total = sum(piece.nbytes for piece in pieces)
    crc = np.zeros(len(rows), dtype=np.int64)

    def copy(piece):
        found, at = 0, int(offsets[piece.i]) + piece.start
        for chunk in contents_of(source, records, piece.row, piece.start, piece.nbytes):
            write(at, chunk)
            found = crc32(chunk, found)
            at += len(chunk)
        return found

    done = 0
    for piece, found in zip(pieces, in_order(copy, pieces, total, threads), strict=True):
        crc[piece.i] = combine(int(crc[piece.i]), found, piece.nbytes)
        done += piece.nbytes
        if progress:
            progress(done, total)
    return crc


def pieces_of(records, rows):
    """What is copied at a time, in order."""
    pieces = []
    for i, row in enumerate(np.asarray(rows, dtype=np.int64).tolist()):
        nbytes = int(records.nbytes[row])
        step = PIECE if records.method[row] == STORED else max(nbytes, 1)
        pieces += [
            Piece(i, row, start, min(step, nbytes - start)) for start in range(0, nbytes, step)
        ]
    return pieces


def in_order(call, items, nbytes, threads):
    """``call(item)`` for all items, by several threads where that pays; yields what they return, in order."""
    number = 1 if nbytes < workers.serial_below() else workers.thread_count(threads)
    if number == 1:
        yield from map(call, items)
        return
    with ThreadPoolExecutor(number, "checkpoint copier") as pool:
        try:
            yield from pool.map(call, items)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
