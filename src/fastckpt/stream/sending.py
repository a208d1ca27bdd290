"""The storages of an object into a stream."""

from typing import Any, NamedTuple

import numpy as np

from .. import _crc32
from .._flow import Flow
from .layout import Layout


class Outgoing(NamedTuple):
    """What is sent for an object: the bytes of ``head``, then storages, in the order of ``layout``.

    ``address`` is where each storage lies, an int64 column; 0 where ``blocks`` has, by number, a Block that is made piece by
    piece. ``holder`` keeps the memory alive.
    """

    head: bytes
    address: np.ndarray
    layout: Layout
    blocks: dict
    holder: Any


def send(outlet, outgoing, tell=None):
    """Write the head and the storages. ``tell(done, total)`` is told how far that is, in bytes."""
    layout, blocks = outgoing.layout, outgoing.blocks
    nbytes = layout.nbytes.copy()
    nbytes[list(blocks)] = 0  # these come between the segments
    if len(nowhere := np.flatnonzero((outgoing.address == 0) & (nbytes > 0))):
        raise ValueError(
            f"storage {nowhere[0]} has {nbytes[nowhere[0]]} bytes and no memory, as that of a fake tensor; nothing to send"
        )
    segments = layout.segments(np.arange(len(nbytes)), outgoing.address, nbytes)
    segments.send_own_sums()
    crc = segments.crc if layout.sums else None
    kernel = _crc32.kernel_id(None)
    flow = Flow(segments.address, segments.nbytes, segments.gap, crc, kernel)
    total, staged = int(layout.nbytes.sum() + layout.gap.sum()), 0

    def tell_done(done):
        tell(min(done + staged, total), total)

    progress = tell_done if tell else None
    outlet.write(outgoing.head)
    segment_of = np.flatnonzero(segments.records >= 0)
    for number, block in sorted(blocks.items()):
        segment = int(segment_of[number])
        outlet.send(flow, segment, progress)
        for piece in block.staged():
            outlet.write(piece)
            staged += piece.nbytes
            if layout.sums:
                segments.crc[segment] = _crc32.crc32(piece, int(segments.crc[segment]))
            if progress:
                progress(flow.done)
    outlet.send(flow, flow.rows, progress)
