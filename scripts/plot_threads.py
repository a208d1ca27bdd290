"""Plot GB/s against the number of threads: loads, and what the machine allows (read_limit.c).

The file is in the page cache. Each measurement is the first load of a fresh process, all take turns, and the best
of all rounds counts: other work on the machine only ever takes away. It is waited for, too (--patience).
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_table import replace_part

PROJECT = Path(__file__).resolve().parent.parent
LIMIT, OURS, UNVERIFIED = "limit of the machine", "fastckpt", "fastckpt, verify=False"
TORCH, TORCH_HUGE = "torch.load", "torch.load, huge pages by glibc"
COLOURS = {
    LIMIT: "#8a8f98",
    OURS: "#d1495b",
    UNVERIFIED: "#edae49",
    TORCH: "#2e6f95",
    TORCH_HUGE: "#66a182",
}
FLAT = (TORCH, TORCH_HUGE)  # they have one thread

CHILD = """
import json, os, sys, time
sys.path.insert(0, sys.argv[1])
from benchmarks.common import touch_memory
name, path, tiny, options = sys.argv[2], sys.argv[3], sys.argv[4], json.loads(sys.argv[5])
import torch
if name == "torch":
    load = torch.load
else:
    import fastckpt
    load = fastckpt.load
load(tiny, **options)
nbytes = os.path.getsize(path)
touch_memory(nbytes + nbytes // 8)
start = time.perf_counter()
kept = load(path, **options)
print(nbytes / (time.perf_counter() - start) / 1e9)
"""


class Bench:
    """A folder with the files and the compiled limit."""

    def __init__(self, folder, mb):
        import torch

        self.path, self.tiny = Path(folder, "large.pt"), Path(folder, "tiny.pt")
        self.limit = Path(folder, "read_limit")
        torch.save({f"layer{i}.weight": torch.randn(1 << 20) for i in range(mb // 4)}, self.path)
        torch.save({"weight": torch.ones(4)}, self.tiny)
        compiler = os.environ.get("CC", "cc").split()
        source = Path(__file__).with_name("read_limit.c")
        subprocess.run([*compiler, "-O3", "-pthread", source, "-o", self.limit], check=True)

    def measure(self, series, threads):
        """GB/s, in a fresh process."""
        if series == LIMIT:
            return self.run([self.limit, self.path, str(threads)])
        options = {} if series in FLAT else {"threads": threads, "verify": series == OURS}
        name = "torch" if series in FLAT else "fastckpt"
        tunables = "glibc.malloc.hugetlb=1" if series == TORCH_HUGE else ""
        command = [sys.executable, "-c", CHILD, PROJECT / "asv_bench", name, self.path, self.tiny]
        return self.run([*command, json.dumps(options)], {"GLIBC_TUNABLES": tunables})

    def run(self, command, more=None):
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, env={**os.environ, **(more or {})}
        )
        return float(done.stdout)


def wait_for_quiet(seconds):
    """Wait, at most so long, until the CPUs are idle: what else runs would be measured, too."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and busy_share() > 0.1:
        pass


def busy_share(period=0.2):
    """Which part of the CPUs' time is used by somebody; 0 where the system does not say."""
    before = cpu_times()
    time.sleep(period if before else 0)
    spent = [now - then for now, then in zip(cpu_times(), before, strict=True)]
    idle = sum(spent[3:5])  # nothing to do, and nothing but a disk to wait for
    return 1 - idle / sum(spent) if sum(spent) else 0.0


def cpu_times():
    try:
        words = Path("/proc/stat").read_text().splitlines()[0].split()
    except OSError:
        return []
    return list(map(int, words[1:9]))


def measure_all(mb, counts, rounds, folder, patience):
    """{series: {threads: best GB/s}}."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        bench = Bench(scratch, mb)
        best = {series: {} for series in COLOURS}
        for done in range(rounds):
            for series, found in best.items():
                for threads in counts[:1] if series in FLAT else counts:
                    wait_for_quiet(patience)
                    found[threads] = max(found.get(threads, 0), bench.measure(series, threads))
            print(f"round {done + 1} of {rounds}", file=sys.stderr)
    for series in FLAT:
        best[series] = dict.fromkeys(counts, best[series][counts[0]])
    return best


# ---- the plot

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 400, 60, 270, 44, 52


def draw(best, counts, caption):
    """The plot as SVG."""
    top = nice_top(max(max(found.values()) for found in best.values()))
    low, high = counts[0], max(counts[-1], counts[0] + 1)

    def x(threads):
        return LEFT + (threads - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(speed):
        return HEIGHT - BOTTOM - speed / top * (HEIGHT - TOP - BOTTOM)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"',
        '     font-family="sans-serif" font-size="13" fill="#333">',
        f"<title>GB/s against threads. {caption}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="24" font-size="14">GB/s, a file of torch.save from the page cache into fresh memory</text>',
    ]
    for tick in range(5):
        speed = top * tick / 4
        lines += [
            f'<path d="M{LEFT} {y(speed):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>',
            f'<text x="{LEFT - 8}" y="{y(speed) + 4:.1f}" text-anchor="end">{speed:g}</text>',
        ]
    for threads in counts:
        lines += [
            f'<text x="{x(threads):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{threads}</text>'
        ]
    middle = (LEFT + WIDTH - RIGHT) / 2
    lines += [f'<text x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">threads</text>']
    ends = spread({series: y(found[counts[-1]]) for series, found in best.items()})
    for series, found in best.items():
        lines += curve(
            series,
            [(x(threads), y(found[threads])) for threads in counts],
            ends[series],
            found[counts[-1]],
        )
    return "\n".join([*lines, "</svg>", ""])


def curve(series, points, label_at, last):
    """One line, and its name beside its end."""
    colour, dashes = COLOURS[series], ' stroke-dasharray="5 4"' if series in (LIMIT, *FLAT) else ""
    path = "L".join(f"{px:.1f} {py:.1f}" for px, py in points)
    yield f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'
    if series not in FLAT:
        yield from (
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.5" fill="{colour}"/>' for px, py in points
        )
    yield f'<text x="{points[-1][0] + 12:.1f}" y="{label_at + 4:.1f}" fill="{colour}">{series} {last:.1f}</text>'


def spread(places, gap=17):
    """Move labels apart that would lie on each other."""
    moved, before = {}, -math.inf
    for series in sorted(places, key=places.get):
        before = moved[series] = max(places[series], before + gap)
    return moved


def nice_top(value):
    """The next round number above, which four parts divide well."""
    step = 10 ** math.floor(math.log10(value))
    return next(n * step for n in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10, 12) if n * step >= value)


def table(best, counts):
    """The figures as Markdown."""
    yield f"| threads | {' | '.join(map(str, counts))} |"
    yield "|---" * (len(counts) + 1) + "|"
    for series, found in best.items():
        yield f"| {series} | {' | '.join(f'{found[threads]:.1f}' for threads in counts)} |"


def main():
    """Read the command line."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    default = sorted({1, *(2**i for i in range(10) if 2**i < cores), cores})
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=1024, help="size of the file")
    parser.add_argument(
        "--threads", default=",".join(map(str, default)), help="numbers, with commas between them"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--patience",
        type=float,
        default=5,
        metavar="SECONDS",
        help="how long to wait for idle CPUs before each measurement",
    )
    parser.add_argument(
        "--folder", help="where the file is written; the default is where temporary files are"
    )
    parser.add_argument("--out", type=Path, default=PROJECT / "docs" / "threads.svg")
    parser.add_argument(
        "--into", type=Path, metavar="DOCUMENT", help="replace the table that stands in it"
    )
    options = parser.parse_args()
    counts = sorted(set(map(int, options.threads.split(","))))
    best = measure_all(options.mb, counts, options.rounds, options.folder, options.patience)
    caption = f"{options.mb} MB, best of {options.rounds}, {cores} CPUs."
    options.out.write_text(draw(best, counts, caption))
    text = "\n".join([f"GB/s; {caption}\n", *table(best, counts)])
    print(f"{text}\n\nThe plot is in {options.out}.")
    if options.into:
        replace_part(options.into, "plot_threads.py", text)


if __name__ == "__main__":
    main()
