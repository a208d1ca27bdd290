"""Fresh memory: aligned, private, huge where it pays, and given back piece by piece."""

import gc
import itertools
import os
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastckpt import _memory, memory
from support import flags_at, needs_true_memory

MIB = 1 << 20
HUGE = 2 * MIB
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="counts pages in /proc")

SIZES = {
    "none": [],
    "empty": [0],
    "heap": [1, 63, 64, 65, 0, 4096],
    "heap, just": [MIB - 64],
    "mapped, just": [MIB],
    "a huge page, one less": [HUGE - 1],
    "a huge page": [HUGE],
    "a huge page, one more": [HUGE + 1],
    "own, one less": [memory.OWN_FROM - 1],
    "own": [memory.OWN_FROM],
    "own between shared": [5, memory.OWN_FROM + 3, 7, memory.OWN_FROM, 9],
    "two arenas": [30 * MIB] * 3,
    "an arena to the brim": [16 * MIB] * 5,
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("huge", ["0", "1"])
def test_buffers_are_aligned_apart_and_writable(sizes, huge, monkeypatch):
    monkeypatch.setenv("FASTCKPT_HUGEPAGES", huge)
    owners, address, _ = memory.allocate(sizes)
    assert address.dtype == np.int64
    assert len(owners) == len(address) == len(sizes)
    assert not (address % memory.ALIGNMENT).any()
    assert address.all()
    spans = sorted((a, a + n) for a, n in zip(address.tolist(), sizes, strict=True) if n)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    for i, (owner, nbytes) in enumerate(zip(owners, sizes, strict=True)):
        view = memoryview(owner)
        assert len(view) == len(owner) == nbytes
        assert not view.readonly
        if nbytes:
            array = np.frombuffer(owner, np.uint8)
            assert array.ctypes.data == address[i]
            assert array.flags.writeable
            array[0] = array[-1] = i + 1
        if nbytes >= memory.OWN_FROM:
            assert address[i] % HUGE == 0
    assert all(
        owner[-1:] == bytes([i + 1])[: len(owner)]
        for i, owner in enumerate(map(memoryview, owners))
    )


def test_order_is_kept_inside_an_arena():
    _, address, _ = memory.allocate([100, 3 * MIB, 64, 5])
    assert np.diff(address).tolist() == [128, 3 * MIB, 64]


def test_torch_tensors_own_their_storage():
    torch = pytest.importorskip("torch")
    owners, address, _ = memory.allocate([40, 4000])
    tensor = torch.frombuffer(owners[1], dtype=torch.float32)
    tensor.fill_(3)
    assert tensor.untyped_storage().nbytes() == 4000
    assert tensor.data_ptr() == address[1]
    del owners
    gc.collect()
    assert tensor.sum() == 3000


@pytest.mark.parametrize(
    ("sizes", "error", "words"),
    [
        ([-1], ValueError, "cannot be negative"),
        ([5, 2**62], MemoryError, "bytes of memory"),
        ([2**61, 2**61, 2**61], MemoryError, "bytes of memory"),
        ([2**55, 1], MemoryError, "bytes of memory"),
    ],
    ids=["negative", "overflow", "overflow together", "more than there is"],
)
def test_what_cannot_be_had(sizes, error, words):
    with pytest.raises(error, match=words):
        memory.allocate(sizes)


def test_columns_must_fit():
    limits = {"own_from": 1, "shared_most": 1, "heap_below": 1, "alignment": 64, "huge": False}
    with pytest.raises(ValueError, match="two int64 columns fit"):
        _memory.allocate(np.zeros(2, np.int64), np.zeros(1, np.int64), **limits)


@pytest.mark.parametrize(("text", "huge"), [(None, True), ("", True), ("1", True), ("0", False)])
def test_switch(text, huge, monkeypatch):
    monkeypatch.delenv("FASTCKPT_HUGEPAGES", raising=False)
    if text is not None:
        monkeypatch.setenv("FASTCKPT_HUGEPAGES", text)
    assert memory.use_huge_pages() is huge


def test_switch_refuses_other_words(monkeypatch):
    monkeypatch.setenv("FASTCKPT_HUGEPAGES", "yes")
    with pytest.raises(ValueError, match="FASTCKPT_HUGEPAGES=yes is neither 0"):
        memory.allocate([1 << 20])


def resident():
    """Bytes of anonymous memory of this process that are there."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith("RssAnon"))


def touch(owners):
    for i, owner in enumerate(owners):
        np.frombuffer(owner, np.uint8)[:] = i % 251 + 1


@on_linux
class TestPages:
    SLACK = 3 * MIB  # what the interpreter itself may take or leave meanwhile

    @pytest.mark.parametrize(
        "sizes",
        [
            [33 * MIB] * 4,
            [32 * MIB + HUGE // 2 + 1] * 4,
            [64 * MIB + 1] * 2,
            [3 * MIB] * 40,
            [700] * 100_000,
        ],
        ids=["33 MiB", "32 and half a huge page", "a byte more", "arenas", "tiny"],
    )
    @needs_true_memory
    def test_overhead_is_under_three_percent(self, sizes):
        gc.collect()
        before = resident()
        owners, *_ = memory.allocate(sizes)
        python = resident() - before  # the buffers' own objects
        touch(owners)
        # 700 bytes are 704 when aligned
        assert resident() - before - python <= 1.03 * sum(sizes) + self.SLACK

    def test_an_own_mapping_goes_alone(self):
        owners, *_ = memory.allocate([40 * MIB, 40 * MIB])
        touch(owners)
        before = resident()
        del owners[0]
        assert before - resident() > 40 * MIB - self.SLACK
        assert set(memoryview(owners[0])[:: 1 << 16]) == {2}

    def test_a_shared_huge_page_goes_with_the_last_that_touches_it(self):
        owners, *_ = memory.allocate([8 * MIB] * 4)
        touch(owners)
        before = resident()
        del owners[1:3]
        assert before - resident() > 16 * MIB - self.SLACK
        assert bytes(owners[0]) == b"\1" * (8 * MIB)
        assert bytes(owners[1]) == b"\4" * (8 * MIB)

    def test_neighbours_in_one_huge_page_stay(self):
        owners, *_ = memory.allocate([HUGE // 4] * 16)
        touch(owners)
        kept = owners[::2]
        del owners
        assert [set(bytes(owner)) for owner in kept] == [{i + 1} for i in range(0, 16, 2)]

    def test_nothing_is_kept(self):
        gc.collect()
        before = resident()
        owners, *_ = memory.allocate([40 * MIB, 5 * MIB, 700, 20 * MIB])
        touch(owners)
        assert resident() - before > 60 * MIB
        del owners
        assert resident() - before < self.SLACK

    @pytest.mark.parametrize(("switch", "flag"), [("1", "hg"), ("0", "nh")])
    def test_advice_is_given(self, switch, flag, monkeypatch):
        if not os.path.exists("/sys/kernel/mm/transparent_hugepage"):
            pytest.skip("a kernel without transparent huge pages")
        monkeypatch.setenv("FASTCKPT_HUGEPAGES", switch)
        _owners, address, _ = memory.allocate([64 * MIB])
        assert flag in flags_at(int(address[0]))[0]

    def test_mappings_are_private(self):
        owners, *_ = memory.allocate([MIB, 40 * MIB])
        touch(owners)
        if (pid := os.fork()) == 0:
            touch(owners[::-1])
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert memoryview(owners[0])[0] == 1
        assert memoryview(owners[1])[-1] == 2


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.sampled_from([0, 1, 64, 1000, 65536, MIB, HUGE - 64, HUGE, HUGE + 1, 3 * MIB]),
        max_size=12,
    ),
    st.randoms(use_true_random=False),
)
def test_what_is_alive_keeps_its_bytes(sizes, random):
    owners = dict(enumerate(memory.allocate(sizes).owners))
    touch(owners.values())
    order = list(owners)
    random.shuffle(order)
    for dead in order:
        del owners[dead]
        for i, owner in owners.items():
            assert not len(owner) or (np.frombuffer(owner, np.uint8) == i % 251 + 1).all()
