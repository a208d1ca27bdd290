"""Fresh memory for storages: aligned, on huge pages where that pays, given back as soon as nobody needs it.

Faults, not copying, limit a load: reading into fresh memory runs at 2.3 GB/s on 4 KiB pages and at 13 on 2 MiB
pages (one thread, EPYC). No dead memory is kept for later.
"""

import os
from typing import NamedTuple

import numpy as np

from . import _memory

ALIGNMENT = 64  # bytes; a cache line, and what torch gives
# From here on a storage has a mapping of its own, and is freed alone.
OWN_FROM = 32 << 20
# Smaller ones lie together, in the order given: a huge page each would cost 5 % of memory for 4 MB tensors.
SHARED_MOST = 64 << 20
# Less than this together is heap memory: there is no whole huge page in it to win.
HEAP_BELOW = 1 << 20


class Allocation(NamedTuple):
    """Memory for some storages: ``owners[i]`` is a writable buffer of exactly their size, at ``address[i]``.

    An owner exports its memory to ``torch.frombuffer``, ``numpy.frombuffer`` and ``memoryview``, which keep it
    alive. The bytes are whatever the system gives until they are filled: never pass them on after a failure.
    ``huge`` is for who fills it: whether huge pages were asked for, None where its pages may have been in use before.
    """

    owners: list
    address: np.ndarray
    huge: bool | None = None


def allocate(sizes):
    """Allocate memory for storages of ``sizes`` bytes, each 64-byte aligned; best in the order of the file.

    Raises MemoryError where the system has not got as much.
    """
    sizes = np.ascontiguousarray(sizes, dtype=np.int64)
    address = np.empty(len(sizes), dtype=np.int64)
    is_heap = sizes.sum() < HEAP_BELOW
    huge = not is_heap and use_huge_pages()
    owners = _memory.allocate(
        sizes,
        address,
        own_from=OWN_FROM,
        shared_most=SHARED_MOST,
        heap_below=HEAP_BELOW,
        alignment=ALIGNMENT,
        huge=huge,
    )
    return Allocation(owners, address, None if is_heap else huge)


def use_huge_pages():
    """Whether memory is advised to lie on huge pages: yes, unless FASTCKPT_HUGEPAGES=0."""
    asked = os.environ.get("FASTCKPT_HUGEPAGES") or "1"
    if asked not in ("0", "1"):
        raise ValueError(f"FASTCKPT_HUGEPAGES={asked} is neither 0 (small pages only) nor 1")
    return asked == "1"


THP = "/sys/kernel/mm/transparent_hugepage/enabled"


def huge_pages(path=THP):
    """What huge pages this process gets: "always", "madvise" (where they are asked for, as they are here), "never", or "off".

    "off": FASTCKPT_HUGEPAGES=0 says not to ask. A system without the setting has none to give, or does not tell: "never".
    """
    if not use_huge_pages():
        return "off"
    try:
        with open(path) as f:
            words = f.read().split()
    except OSError:
        return "never"
    return next((word.strip("[]") for word in words if word.startswith("[")), "never")


def machine_nbytes():
    """How many bytes of memory the machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
