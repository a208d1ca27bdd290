"""Page-locked memory for storages: an accelerator copies from it without the CPU, and faster."""

import numpy as np

from .memory import ALIGNMENT, OWN_FROM, SHARED_MOST, Allocation
from .needs_torch import torch


def allocate_pinned(sizes):
    """Page-locked memory for storages of ``sizes`` bytes, from torch's own pool, each 64-byte aligned: an Allocation.

    Small ones lie together in the order given, for page-locking is a call of the driver. Raises RuntimeError where there
    is no accelerator.
    """
    sizes = np.asarray(sizes, dtype=np.int64)
    owners, address = [], np.zeros(len(sizes), dtype=np.int64)
    taken = -(-sizes // ALIGNMENT) * ALIGNMENT
    for first, last in regions(taken):
        region = lock(int(taken[first:last].sum()))
        start = 0
        for row in range(first, last):
            owners.append(region[start : start + int(sizes[row])])
            address[row] = region.ctypes.data + start
            start += int(taken[row])
    return Allocation(owners, address)


def regions(sizes):
    """[(first row, last row exclusive)]: big ones alone, neighbours that are smaller together up to a bound."""
    found, first, nbytes = [], 0, 0
    for row, size in enumerate(sizes.tolist()):
        if row > first and (size >= OWN_FROM or nbytes >= OWN_FROM or nbytes + size > SHARED_MOST):
            found.append((first, row))
            first, nbytes = row, 0
        nbytes += size
    if first < len(sizes):
        found.append((first, len(sizes)))
    return found


def lock(nbytes):
    """An array of ``nbytes`` page-locked bytes."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise RuntimeError(
            f"pin_memory=True needs an accelerator, such as CUDA: {reason}"
        ) from None
