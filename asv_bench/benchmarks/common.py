"""What benchmarks share: the files, the readers, and a fair start for each measurement.

FASTCKPT_BENCH_MB sets the size of the large files. All bring files and libraries into memory first, unless it says cold.
"""

import errno
import gc
import mmap
import os
import time

import numpy as np

LARGE_MB = int(os.environ.get("FASTCKPT_BENCH_MB", "256"))
SMALL_MB = 16
TENSOR_MB = 4
MANY = 10_000
ROW = 1024  # elements of float32, in the file that holds one big tensor
SUFFIX = {"zip": ".pt", "legacy": ".legacy", "safetensors": ".safetensors"}


# ---- files


def make_files(folder, large_mb, small_mb, many):
    """Write all files into ``folder``: names are what path_of gives."""
    import torch

    torch.manual_seed(0)
    small = small_tensors(many)
    objects = {
        "tiny": {"weight": torch.ones(4, 4)},
        "large": float_tensors(large_mb),
        "small": float_tensors(small_mb),
        "many": small,
        "big": {"weight": torch.randn(large_mb << 20 >> 2).view(-1, ROW)},
    }
    for name, tensors in objects.items():
        torch.save(tensors, path_of(folder, name, "zip"))
        torch.save(tensors, path_of(folder, name, "legacy"), _use_new_zipfile_serialization=False)
        if safetensors := optional("safetensors.torch"):
            safetensors.save_file(tensors, path_of(folder, name, "safetensors"))
    os.sync()  # what is not on the disk yet cannot be evicted


def float_tensors(mb):
    import torch

    return {
        f"layer{i}.weight": torch.randn(TENSOR_MB << 18) for i in range(max(1, mb // TENSOR_MB))
    }


def small_tensors(count):
    """Tensors of zero to three dimensions, five dtypes and up to 64 elements."""
    import torch

    shapes = [(64,), (8, 8), (4, 4, 4), ()]
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
    return {
        f"layers.{i}.weight": (torch.rand(shapes[i % 4]) * 100).to(dtypes[i % 5])
        for i in range(count)
    }


def path_of(folder, name, container):
    return os.path.join(folder, name + SUFFIX[container])


def optional(module):
    """A module, or None where it is not installed."""
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError:
        return None


# ---- readers: each a function that imports what it needs and gives a callable of a path


def torch_load():
    import torch

    return torch.load


def torch_load_huge_pages():
    # torch's own switch, read when it first allocates. GLIBC_TUNABLES=glibc.malloc.hugetlb=1 does the same for a
    # whole process, from its start on.
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"
    return torch_load()


def torch_mmap_clone():
    import torch

    return lambda path: copies(torch.load(path, mmap=True))


def safetensors_clone():
    load_file = needed("safetensors.torch").load_file
    return lambda path: copies(load_file(path))


def fastckpt_load():
    import fastckpt

    return fastckpt.load


def copies(tensors):
    """The tensors in memory of their own: what is only mapped has not been read yet."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def needed(module):
    """A module; the benchmark is skipped where it is not installed."""
    found = optional(module)
    if found is None:
        raise NotImplementedError(f"{module} is not installed")
    return found


WHOLE = {
    "torch.load": torch_load,
    "torch.load, huge pages": torch_load_huge_pages,
    "torch.load, mmap, clone": torch_mmap_clone,
    "safetensors, clone": safetensors_clone,
    "fastckpt": fastckpt_load,
}
# Which container a reader wants where torch.save's are not for it.
OWN_CONTAINER = {"safetensors, clone": "safetensors", "safetensors": "safetensors"}


def container_for(reader, container="zip"):
    """The container that a reader reads in the place of ``container``; skipped where there is none."""
    if container != "zip" and (reader in OWN_CONTAINER or "mmap" in reader):
        raise NotImplementedError(f"{reader} reads no {container} file")
    return OWN_CONTAINER.get(reader, container)


# ---- the state of the machine


def touch_memory(nbytes):
    """Touch and free as much memory as a load needs, until that is quick.

    A virtual machine may have given free memory back to its host; the first touch of it takes many times as long as the
    next ones, and would be charged to whoever is measured first.
    """
    best, quick = 0.0, 0
    for _ in range(10):
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        start = time.perf_counter()
        np.frombuffer(memory, np.uint8).fill(1)
        rate = nbytes / (time.perf_counter() - start)
        memory.close()
        best = max(best, rate)
        quick = quick + 1 if rate > 0.8 * best else 0
        if quick == 3:
            return


def bring_into_cache(path):
    """Read a file through, so that its pages are in the page cache."""
    with open(path, "rb", buffering=0) as file:
        while file.read(1 << 20):
            pass


def evict(path):
    """Drop the pages of one file from the page cache, and look whether they are gone; skip the benchmark if not.

    Only this file's, and without privileges: dropping all caches would take the libraries' pages along.
    """
    if not hasattr(os, "posix_fadvise") or not hasattr(os, "RWF_NOWAIT"):
        raise NotImplementedError("this system cannot evict the pages of a file")
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        nbytes = os.fstat(fd).st_size
        for offset in range(0, nbytes, nbytes // 64 + 1):
            try:
                os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT)
            except OSError as error:
                if error.errno != errno.EAGAIN:
                    raise NotImplementedError(f"cannot tell what is cached: {error}") from None
            else:
                raise NotImplementedError("pages of the file stay in the page cache")
    finally:
        os.close(fd)


# ---- base classes


class Measured:
    """Runs ``self.call`` in asv's clock, keeps its result until the clock has stopped, and starts with a clean heap."""

    number = 1  # calls per sample: asv then runs setup before each
    warmup_time = 0
    timeout = 300
    call = result = None

    def prepare(self, call, *first):
        """Measure ``call``; before the first sample, call it once for each item of ``first``."""
        if self.call is None:
            self.call = call
            for argument in first:
                call(argument)
        self.result = None
        gc.collect()

    def measure(self, *arguments):
        gc.enable()  # asv's timer turns collection off; where people load, it is on
        self.result = self.call(*arguments)

    def teardown(self, *_):
        self.result = None


class WithFiles(Measured):
    """Has all files in the folder that comes first among the arguments; they are made once for all benchmarks."""

    def setup_cache(self):
        make_files(os.getcwd(), LARGE_MB, SMALL_MB, MANY)
        return os.getcwd()

    setup_cache.timeout = 600


class Fresh(WithFiles):
    """Measures the first call of a process, and repeats that in new processes, in turns with other parameters.

    Later calls may find memory that the allocator has kept, and need no page faults then.
    """

    repeat = 1
    rounds = 3

    def start_fresh(self, folder, call, path, cold=False):
        """Bring all but the call itself into memory."""
        self.prepare(call, path_of(folder, "tiny", SUFFIXES[os.path.splitext(path)[1]]))
        nbytes = os.path.getsize(path)
        touch_memory(nbytes + (nbytes // 8))
        if cold:
            evict(path)
        else:
            bring_into_cache(path)


class Repeated(WithFiles):
    """Measures call after call in one process: for what takes milliseconds and little memory."""

    repeat = (5, 50, 1.0)  # at least, at most, seconds
    rounds = 1


SUFFIXES = {suffix: container for container, suffix in SUFFIX.items()}
