"""Write a checkpoint with torch.save, load it with torch.load and with fastckpt, compare and time.

Every tensor is compared for its bits. Each timed load runs in a fresh process, so that neither profits
from memory that the other has already taken from the system; the two take turns.
"""

import argparse
import math
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from pathlib import Path

import torch

WIDTH, VOCABULARY, POSITIONS = 768, 50257, 1024


def transformer_state(layers):
    """Make the state dict of a GPT-2-like decoder; 12 layers are 124 million parameters, 0.5 GB."""
    torch.manual_seed(0)
    state = OrderedDict()

    def add(name, *shape, dtype=torch.float32):
        state[name] = torch.randn(shape).mul_(0.02).to(dtype)

    add("transformer.wte.weight", VOCABULARY, WIDTH)
    add("transformer.wpe.weight", POSITIONS, WIDTH)
    mask = torch.ones(POSITIONS, POSITIONS, dtype=torch.bool).tril()
    for layer in range(layers):
        block = f"transformer.h.{layer}"
        state[f"{block}.attn.mask"] = mask  # one buffer, which all layers share
        for part, rows, columns in (
            ("attn.c_attn", 3 * WIDTH, WIDTH),
            ("attn.c_proj", WIDTH, WIDTH),
            ("mlp.c_fc", 4 * WIDTH, WIDTH),
            ("mlp.c_proj", WIDTH, 4 * WIDTH),
        ):
            add(f"{block}.{part}.weight", rows, columns)
            add(f"{block}.{part}.bias", rows)
        for part in ("ln_1", "ln_2"):
            add(f"{block}.{part}.weight", WIDTH)
            add(f"{block}.{part}.bias", WIDTH)
    add("adapter.weight", WIDTH, 64, dtype=torch.bfloat16)
    embedding = state["transformer.wte.weight"]
    state["lm_head.weight"] = embedding  # tied
    state["transformer.wte.t"] = embedding.t()  # a view that is not contiguous
    return state


def checkpoint(layers):
    """Make what a training script saves: the model, and what it needs to go on."""
    return {
        "model": transformer_state(layers),
        "step": torch.tensor(12_000),
        "rng": torch.get_rng_state(),
        "config": {"layers": layers, "betas": (0.9, 0.95), "name": "demo", "best": math.inf},
    }


def leaves(value, path=()):
    """Yield (path, leaf) of a nesting of dicts, lists and tuples."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path, value


def bits(tensor):
    """The values as integers, so that NaN equals NaN and -0.0 is not 0.0."""
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(size[tensor.element_size()])


def difference(ours, theirs):
    """Say how two leaves differ, or None."""
    if type(ours) is not type(theirs):
        return f"{type(ours).__name__}, not {type(theirs).__name__}"
    if not isinstance(ours, torch.Tensor):
        return None if ours == theirs else f"{ours!r}, not {theirs!r}"
    for what in ("dtype", "shape", "device", "requires_grad"):
        if getattr(ours, what) != getattr(theirs, what):
            return f"{what} {getattr(ours, what)}, not {getattr(theirs, what)}"
    if ours.stride() != theirs.stride() or ours.storage_offset() != theirs.storage_offset():
        return "another layout in its storage"
    return None if torch.equal(bits(ours), bits(theirs)) else "other values"


def sharing(tree):
    """Which tensors share a storage: for each, the number of the storage by first use."""
    numbers = {}
    return [
        numbers.setdefault(leaf.untyped_storage().data_ptr(), len(numbers))
        for _, leaf in leaves(tree)
        if isinstance(leaf, torch.Tensor)
    ]


def compare(ours, theirs):
    """Return the number of tensors compared, and a list of sentences about what differs."""
    our_leaves, their_leaves = list(leaves(ours)), list(leaves(theirs))
    if [path for path, _ in our_leaves] != [path for path, _ in their_leaves]:
        return 0, ["the nestings differ"]
    faults = [
        f"{'.'.join(map(str, path))}: {fault}"
        for (path, our), (_, their) in zip(our_leaves, their_leaves, strict=True)
        if (fault := difference(our, their))
    ]
    if sharing(ours) != sharing(theirs):
        faults.append("other tensors share their storage")
    return sum(isinstance(leaf, torch.Tensor) for _, leaf in our_leaves), faults


def loader(name):
    """Import what is timed, so that the import is not."""
    if name == "torch.load":
        return lambda path: torch.load(path, weights_only=True)
    import fastckpt

    load = fastckpt.load  # the compiled modules load with the first use of a name
    return lambda path: load(path)


def time_in_fresh_process(name, path):
    """Measure one load, in seconds, in a process of its own."""
    command = [sys.executable, __file__, "--time", name, str(path)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def touch_memory(nbytes):
    """Use and free as much memory as a load will need.

    A virtual machine may have lent freed memory to others; to get it back takes longer than any load, and would be
    all that is measured.
    """
    for _ in range(3):
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        for start in range(0, nbytes, 1 << 12):
            memory[start] = 1
        memory.close()


def print_seconds(name, path):
    """Do what the fresh process does."""
    load = loader(name)
    touch_memory(os.path.getsize(path))
    start = time.perf_counter()
    loaded = load(path)
    seconds = time.perf_counter() - start
    del loaded
    print(seconds)


def demonstrate(layers, rounds):
    """Print the comparison and the table; return 1 if anything differs."""
    import fastckpt

    with tempfile.TemporaryDirectory(prefix="fastckpt-demo-") as folder:
        path = Path(folder, "model.pt")
        torch.save(checkpoint(layers), path)
        size = path.stat().st_size
        print(f"torch {torch.__version__}, {os.cpu_count()} CPUs, Python {sys.version.split()[0]}")
        print(f"wrote {path.name} with torch.save: {size / 1e6:.0f} MB")

        theirs = torch.load(path, weights_only=True)
        count, faults = compare(fastckpt.load(path), theirs)
        for fault in faults:
            print(f"DIFFERENT  {fault}", file=sys.stderr)
        if faults:
            return 1
        print(
            f"equal: all {count} tensors (bits, dtype, layout, shared storage), all other values\n"
        )

        times = {"torch.load": [], "fastckpt.load": []}
        for _ in range(rounds):
            for name, seconds in times.items():
                seconds.append(time_in_fresh_process(name, path))

    print(f"{'file in the page cache':24}{'median':>9}{'fastest':>9}{'GB/s':>8}   checksums")
    for name, seconds in times.items():
        median = statistics.median(seconds)
        verified = "verified" if name == "fastckpt.load" else "not looked at"
        speed = size / median / 1e9
        print(f"{name:24}{median:7.3f} s{min(seconds):7.3f} s{speed:8.2f}   {verified}")
    ratio = statistics.median(times["torch.load"]) / statistics.median(times["fastckpt.load"])
    print(
        f"\n{rounds} fresh processes each; by the medians fastckpt.load is {ratio:.1f} times as fast"
    )
    return 0


def main():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12, help="of the model; 12 make 0.5 GB")
    parser.add_argument("--rounds", type=int, default=5, help="timed loads with each")
    parser.add_argument("--time", nargs=2, metavar=("NAME", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.time:
        return print_seconds(*options.time)
    return demonstrate(options.layers, options.rounds)


if __name__ == "__main__":
    sys.exit(main())
