"""The storages of an object into a stream."""

import numpy as np

from .. import _crc32
from .._flow import Flow


def send_blocks(outlet, blocks, layout, tell=None):
    """Write the Blocks of a Layout. ``tell(done, total)`` is told how far that is, in bytes."""
    count = len(blocks)
    extents = [block.extents[0] if block.extents else (0, 0) for block in blocks]
    columns = np.array(extents, dtype=np.int64).reshape(count, 2).T.copy()
    segments = layout.segments(np.arange(count), *columns)
    segments.send_own_sums()
    kernel = _crc32.kernel_id(None)
    crc = segments.crc if layout.sums else None
    flow = Flow(segments.address, segments.nbytes, segments.gap, crc, kernel)
    total, staged = int(layout.nbytes.sum() + layout.gap.sum()), 0

    def tell_done(done):
        tell(min(done + staged, total), total)

    progress = tell_done if tell else None
    segment_of = np.flatnonzero(segments.records >= 0)
    for row, block in enumerate(blocks):
        if block.extents is None:  # made piece by piece, between what is in memory as it is
            segment = int(segment_of[row])
            outlet.send(flow, segment, progress)
            for piece in block.staged():
                outlet.write(piece)
                staged += piece.nbytes
                if layout.sums:
                    before = int(segments.crc[segment])
                    segments.crc[segment] = _crc32.crc32(piece, before)
                if progress:
                    progress(flow.done)
    outlet.send(flow, flow.rows, progress)
