"""Print what ``make bench`` measured as Markdown: a row for each case, a column for each reader.

A cell is the best sample, and how many times as fast as torch's own way that is. The best, not the mean: other work on
the machine only ever adds time.
"""

import argparse
import itertools
import json
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "asv_bench" / ".asv" / "results"
# The parameters that become columns, and what each is compared with: the first that stands here.
COMPARED = ("reader", "writer", "machine", "loader", "setting")
FIRST = ("torch.load", "torch.load, mmap", "torch.save", "torch DataLoader", "default")
FIRST += (
    "C pickle that makes nothing",
    "litdata PyTreeLoader",
    "litdata StreamingDataset",
    "nvalchemi",
    "zarr",
)

# Named where they are installed: whom rows of samples are compared with.
PEERS = ("litdata", "nvalchemi-toolkit", "zarr")
NOT_INSTALLED = "not installed"


def newest():
    """Find the result file that was written last."""
    files = [path for path in RESULTS.glob("*/*.json") if path.name != "machine.json"]
    if not files:
        sys.exit(f"no results in {RESULTS}: run 'make bench' first")
    return max(files, key=lambda path: path.stat().st_mtime)


def read_results(path):
    """Yield (benchmark, parameter names, {parameter values: best value}) from a result file of asv."""
    content = json.loads(path.read_text())
    known = json.loads((path.parent.parent / "benchmarks.json").read_text())
    for name, row in sorted(content["results"].items()):
        found = dict(zip(content["result_columns"], row, strict=False))
        if name not in known or not found["result"]:
            continue
        samples = found.get("samples") or [None] * len(found["result"])
        best = [min(s) if s else r for r, s in zip(found["result"], samples, strict=True)]
        values = [
            tuple(map(unquoted, combination)) for combination in itertools.product(*found["params"])
        ]
        yield known[name], known[name]["param_names"], dict(zip(values, best, strict=True))


def unquoted(text):
    """The value whose repr asv wrote down."""
    return text[1:-1] if text[:1] in "'\"" else text


def is_number(value):
    """Whether something was measured: asv writes None for a failure, and NaN for what was skipped."""
    return value is not None and value == value


def number(value, unit):
    """A value with three digits and a unit that suits it."""
    if unit == "seconds":
        for scale, name in ((1, "s"), (1e-3, "ms"), (1e-6, "us")):
            if value >= scale or name == "us":
                return f"{value / scale:.3g} {name}"
    return f"{value / 1e6:.0f} MB" if unit == "bytes" else f"{value:.3g} {unit}"


def cell(value, base, unit, is_base):
    """One field of a table."""
    if not is_number(value):
        return "-"
    if is_base or not is_number(base):
        return number(value, unit)
    ratio = f" ({base / value:.1f}x)" if unit == "seconds" else ""
    return number(value, unit) + ratio


def title(benchmark, rest):
    """What stands at the head of a row."""
    words = benchmark["name"].rpartition(".")[2].split("_", 1)[1].replace("_", " ")
    if benchmark["type"] == "peakmemory":
        words = f"peak memory, {words}"
    return ", ".join([words, *rest])


def tables(results):
    """Yield lines of Markdown: a table for each set of columns, then what has none."""
    grouped, others = {}, []
    for benchmark, names, values in results:
        at = next((names.index(name) for name in COMPARED if name in names), None)
        if at is None:
            others += [
                (title(benchmark, key), number(v, benchmark["unit"]))
                for key, v in values.items()
                if is_number(v)
            ]
            continue
        columns = tuple(dict.fromkeys(key[at] for key in values))
        rows = {}
        for key, value in values.items():
            rows.setdefault(key[:at] + key[at + 1 :], {})[key[at]] = value
        grouped.setdefault(columns, []).extend((benchmark, rest, row) for rest, row in rows.items())
    for columns, rows in grouped.items():
        rows = [entry for entry in rows if any(is_number(value) for value in entry[2].values())]
        if not rows:
            continue
        yield from [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        base = next((name for name in FIRST if name in columns), columns[0])
        for benchmark, rest, row in rows:
            unit = benchmark["unit"]
            fields = [cell(row[name], row[base], unit, name == base) for name in columns]
            yield f"| {title(benchmark, rest)} | {' | '.join(fields)} |"
        yield ""
    if others:
        yield from ["| | |", "|---|---|", *(f"| {head} | {value} |" for head, value in others)]


def circumstances(path):
    """The machine and the versions, in a line."""
    machine = json.loads((path.parent / "machine.json").read_text())
    ram = int(machine["ram"] or 0) / 2**30
    return ", ".join(
        [
            f"{machine['num_cpu']} CPUs ({machine['cpu']})",
            f"{ram:.0f} GiB",
            machine["os"],
            f"huge pages: {huge_pages()}",
            f"Python {sys.version.split()[0]}",
            *(f"{name} {version_of(name)}" for name in ("torch", "safetensors", "numpy")),
            *(f"{name} {version(name)}" for name in PEERS if version_of(name) != NOT_INSTALLED),
        ]
    )


def huge_pages():
    """When the system gives huge pages: the word in brackets."""
    try:
        words = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        return words.partition("[")[2].partition("]")[0]
    except OSError:
        return "not known"


def version_of(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return NOT_INSTALLED


def main():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "results", nargs="?", type=Path, help="a result file of asv; the newest by default"
    )
    parser.add_argument(
        "--into", type=Path, metavar="DOCUMENT", help="replace the tables that stand in it"
    )
    options = parser.parse_args()
    path = options.results or newest()
    text = "\n".join([f"{circumstances(path)}\n", *tables(read_results(path))])
    print(text)
    if options.into:
        replace_part(options.into, "make bench", text)


def replace_part(document, name, text):
    """Put text between the comments ``<!-- name -->`` and ``<!-- end of name -->`` of a document."""
    first, last = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, found, rest = document.read_text().partition(first)
    _, found_last, after = rest.partition(last)
    if not found or not found_last:
        sys.exit(
            f"{document}: the comments {first.strip()} and {last} are missing; they say where the figures go"
        )
    document.write_text(f"{before}{first}\n{text}\n\n{last}{after}")


if __name__ == "__main__":
    main()
