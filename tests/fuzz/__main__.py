"""Mutate fixtures, read the mutants in worker processes, print what came of it.

    python -m fuzz --minutes 10 --jobs 2 --seed 1
    python -m fuzz --seed 1 --only 4711        # one mutant again, with its findings
    python -m fuzz --file build/fuzz/findings/exception-1234/mutant.pt

Needs the folder ``tests`` on the path. Exits with 1 where there is a finding.
"""

import argparse
import collections
import multiprocessing
import os
import pathlib
import sys
import tempfile
import time
from multiprocessing.connection import wait

from . import compare  # noqa: F401 - imports torch before the workers are forked
from .contract import Finding
from .findings import Findings
from .mutate import Mutant, Mutator
from .worker import COMPARING, STAGES, TORCH, Reader, work

END = 1 << 40  # of the mutants of a seed number


class Worker:
    """A forked process and what its parent knows of it."""

    def __init__(self, number, mutator, indexes, deadline, scratch):
        self.folder = pathlib.Path(tempfile.mkdtemp(dir=scratch))
        self.log = pathlib.Path(scratch, f"{self.folder.name}.log")
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe(duplex=False)
        self.state = context.RawArray("q", 2)
        self.state[0] = -1
        self.number, self.ended = number, False
        arguments = (theirs, self.state, mutator, indexes, deadline, self.folder, self.log)
        self.process = context.Process(target=work, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def receive(self):
        """The next result; None where there will be none."""
        try:
            result = self.pipe.recv()
        except EOFError:
            self.process.join()
            return None
        self.ended = result is None
        return result

    def death(self):
        """(index of the mutant, finding or None, word) for a worker that died over a mutant."""
        index, stage = self.state
        log = self.log.read_text()
        kind = "hang" if "Timeout" in log else "crash"
        if stage in (TORCH, COMPARING):  # torch's own business
            return index, None, f"{kind} in {STAGES[stage]}"
        text = f"exit code {self.process.exitcode}\n{log}"
        return index, Finding(kind, STAGES[stage], log.partition("File")[2][:120], text), kind


class Campaign:
    """A run of the fuzzer: workers, and the counts of what they report."""

    def __init__(self, mutator, findings):
        self.mutator, self.findings = mutator, findings
        self.mutants, self.words = 0, collections.Counter()
        self.deaths = []  # mutants that a worker died over
        self.statuses = collections.defaultdict(collections.Counter)

    def run(self, jobs, minutes, most=None):
        """Read mutants for some minutes, or the first ``most``."""
        started = time.monotonic()
        deadline = started + 60 * minutes
        with tempfile.TemporaryDirectory() as scratch:

            def start(number, index):
                return Worker(
                    number, self.mutator, range(index, most or END, jobs), deadline, scratch
                )

            workers = [start(number, number) for number in range(jobs)]
            while workers:
                ready = wait([worker.pipe for worker in workers])
                for worker in [worker for worker in workers if worker.pipe in ready]:
                    result = worker.receive()
                    if result is not None:
                        self.note(*result)
                        continue
                    workers.remove(worker)
                    if not worker.ended:
                        workers += self.bury(worker, start, jobs, deadline)
        self.seconds = time.monotonic() - started

    def bury(self, worker, start, jobs, deadline):
        """Note what a worker died of; the one that goes on behind the mutant it died of."""
        index, finding, word = worker.death()
        if index < 0:
            raise SystemExit(f"a worker died before its first mutant:\n{worker.log.read_text()}")
        self.deaths.append(index)
        self.note(index, {}, word, [finding] if finding else [])
        return [start(worker.number, index + jobs)] if time.monotonic() < deadline else []

    def note(self, index, statuses, word, findings):
        self.mutants += 1
        self.words[word] += 1
        for way, status in statuses.items():
            self.statuses[way][status] += 1
        for finding in findings:
            self.findings.add(finding, self.mutator.mutant(index))

    def report(self):
        """What came of it, as text."""
        lines = [
            f"{self.mutants} mutants in {self.seconds:.0f} s, {self.mutants / max(self.seconds, 1e-9):.0f} a second"
        ]
        for way, counts in self.statuses.items():
            total = counts.total()
            shares = ", ".join(
                f"{status} {count / total:.1%}" for status, count in counts.most_common()
            )
            lines.append(f"  {way}: {shares}")
        total = max(1, self.words.total())
        shares = ", ".join(
            f"{word} {count} ({count / total:.1%})" for word, count in self.words.most_common()
        )
        lines.append(f"loaded by torch.load(weights_only=True) and by load: {shares}")
        if self.deaths:
            lines.append(f"workers died over the mutants {self.deaths}")
        lines.append(self.findings.report())
        return "\n".join(lines)


def reread(mutant, seeds):
    """Read one mutant in this process and show what is found."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        reader = Reader()
        reader.warm_up(seeds)
        statuses, word, findings = reader.read(mutant)
        os.chdir("/")
    print(mutant.name, *mutant.steps, sep=", ")
    print(*(f"{way}: {status}" for way, status in statuses.items()), word, sep="\n")
    for finding in findings:
        print(f"\n{finding.kind}, {finding.way}: {finding.text}")
    return bool(findings)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--seed", type=int, default=0, help="the same number makes the same mutants"
    )
    parser.add_argument(
        "--findings", default="build/fuzz/findings", help="the folder to save them in"
    )
    parser.add_argument(
        "--only", type=int, metavar="INDEX", help="read this mutant of the seed again"
    )
    parser.add_argument("--file", help="read this file as if it were a mutant")
    options = parser.parse_args(arguments)
    mutator = Mutator(options.seed)
    if options.file:
        data = pathlib.Path(options.file).read_bytes()
        return reread(Mutant(0, options.file, (), data), mutator.seeds)
    if options.only is not None:
        return reread(mutator.mutant(options.only), mutator.seeds)
    campaign = Campaign(mutator, Findings(options.findings))
    campaign.run(options.jobs, options.minutes)
    print(campaign.report())
    return bool(campaign.findings.count)


if __name__ == "__main__":
    sys.exit(main())
