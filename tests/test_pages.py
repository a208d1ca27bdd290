"""Pages made ahead of their bytes: the bytes are the same however that goes, and slow huge pages end in small ones."""

import os
import zlib

import numpy as np
import pytest

from fastckpt import _crc32, _read, memory
from fastckpt._flow import Flow
from fastckpt._memory import Pages
from support import flags_at

MIB = 1 << 20
HUGE = 2 * MIB
# Arenas and mappings of their own, neighbours that are read together, what straddles huge pages.
SIZES = {
    "large": [40 * MIB, 33 * MIB],
    "middling": [3 * MIB - 5] * 12,
    "small": [64 << 10] * 400,
    "tiny": [1000] * 30_000,
    "mixed": [5, 7 * MIB, 1000, 1000, 1000, 40 * MIB, 100, 2 * MIB, 0, 70_000],
}
NEVER = 1 << 60
# (Allocation.huge, from how many nanoseconds on a huge page is slow)
PAGES = {
    "in use": (None, NEVER),
    "small ones": (False, NEVER),
    "quick huge ones": (True, NEVER),
    "slow huge ones": (True, 0),
}


@pytest.fixture(scope="module", params=SIZES)
def file(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("pages") / "data"
    sizes = np.array(SIZES[request.param], dtype=np.int64)
    data = np.random.default_rng(1).bytes(int(sizes.sum()))
    path.write_bytes(data)
    with open(path, "rb", buffering=0) as f:
        yield f.fileno(), sizes, data


def read(fd, allocation, sizes, **options):
    offset = np.cumsum(sizes) - sizes
    crc, status = (np.zeros(len(sizes), dtype=np.int64) for _ in range(2))
    control = np.zeros(2, dtype=np.int64)
    failed = _read.fill(
        fd, 0, None, int(sizes.sum()), offset, sizes, allocation.address, crc, status, control,
        kernel=_crc32.kernel_id(), **options,
    )  # fmt: skip
    assert not failed
    return crc.tolist()


def receive(fd, allocation, sizes, **options):
    os.lseek(fd, 0, os.SEEK_SET)
    crc = np.zeros(len(sizes), dtype=np.uint32)
    flow = Flow(allocation.address, sizes, np.zeros_like(sizes), crc, _crc32.kernel_id(), **options)
    while flow.row < flow.rows:
        assert flow.receive(fd, flow.rows) == 0
    return crc.tolist()


def copy(fd, allocation, sizes, *, huge, **options):
    """As files are read that have no descriptor."""
    pages, crc, start = Pages(allocation.address, sizes, huge, **options), [], 0
    for address, nbytes in zip(allocation.address.tolist(), sizes.tolist(), strict=True):
        for done in range(0, nbytes, MIB):
            n = min(MIB, nbytes - done)
            pages.make(address + done, n)
            assert os.preadv(fd, [_read.view_of(address + done, n)], start + done) == n
        start += nbytes
        crc.append(zlib.crc32(_read.view_of(address, nbytes)))
    return crc


WAYS = {
    "read": read,
    "read by 3 threads": lambda *a, **k: read(*a, num_threads=3, **k),
    "received": receive,
    "copied": copy,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pages", PAGES)
def test_bytes_are_the_same(file, pages, way):
    fd, sizes, data = file
    huge, slow_page_ns = PAGES[pages]
    allocation = memory.allocate(sizes)
    sums = WAYS[way](fd, allocation, sizes, huge=huge, slow_page_ns=slow_page_ns)
    start = 0
    for owner, crc in zip(allocation.owners, sums, strict=True):
        wanted = data[start : start + len(owner)]
        assert bytes(owner) == wanted
        assert crc == zlib.crc32(wanted)
        start += len(owner)


@pytest.mark.skipif(
    not os.path.exists("/sys/kernel/mm/transparent_hugepage"),
    reason="a system without transparent huge pages",
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("slow", [False, True], ids=["quick", "slow"])
def test_the_rest_goes_to_small_pages_once_huge_ones_are_slow(file, way, slow, monkeypatch):
    monkeypatch.setenv("FASTCKPT_HUGEPAGES", "1")
    fd, sizes, _ = file
    allocation = memory.allocate(sizes)
    WAYS[way](fd, allocation, sizes, huge=allocation.huge, slow_page_ns=0 if slow else NEVER)
    touched = {int(a + n - 1) // HUGE for a, n in zip(allocation.address, sizes, strict=True) if n}
    first = min(touched)
    flags = flags_at(*[page * HUGE for page in sorted(touched - {first})])
    small = sum("nh" in each for each in flags)
    assert small == 0 if not slow else small > len(flags) // 2


def test_memory_that_may_be_in_use_is_not_written_ahead(tmp_path):
    """A read that fails leaves what it did not come to as it was."""
    data = np.full(4 * MIB, 7, np.uint8)
    columns = [np.array([n], dtype=np.int64) for n in (0, len(data), data.ctypes.data)]
    crc, status, control = (np.zeros(n, dtype=np.int64) for n in (1, 1, 2))
    assert _read.fill(-1, 0, b"", 1 << 40, *columns, crc, status, control) == 1
    with open(tmp_path / "short", "wb+", buffering=0) as f:
        assert _read.fill(f.fileno(), 0, None, 1 << 40, *columns, crc, status, control) == 1
    assert (data == 7).all()
