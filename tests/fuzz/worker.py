"""One process that reads mutants. Whatever happens to it, its parent knows which mutant and which way it was at."""

import codecs
import faulthandler
import os
import time
import warnings

from . import compare, ways
from .contract import LOADED, Guard, limit_memory

# Of real time for one mutant: several times what the slowest takes on a machine that is busy.
HANG_SECONDS = 60
TORCH_SECONDS = 10  # it knows no bounds, and whether it comes to an end is not our business
MORE_MEMORY = 2 << 30
NAME = "mutant.pt"
CODECS = ("utf-16", "unicode-escape")  # which the library asks for by name, and Python imports
STAGES = [*(way.__name__ for way in ways.EVERY_WAY), "torch.load", "comparing"]
TORCH, COMPARING = len(STAGES) - 2, len(STAGES) - 1


class Reader:
    """Reads mutants every way, in a folder of its own that is the current one."""

    def __init__(self, state=None, watch=lambda seconds: None):
        self.watch = watch  # ends the process if it is not called again in time
        self.state = [0, 0] if state is None else state  # index of the mutant, number of its stage
        self.guard = Guard()

    def warm_up(self, seeds):
        """Import what reading imports, so that later imports are on some file's word."""
        for name in CODECS:
            codecs.lookup(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for seed in seeds:
                write(seed.data)
                for way in ways.EVERY_WAY:
                    try:
                        way(NAME, seed.data)
                    except Exception:
                        pass

    def read(self, mutant):
        """Read a mutant; (status by way, how it stands to torch.load, findings)."""
        self.state[0] = mutant.index
        self.watch(HANG_SECONDS)
        write(mutant.data)
        outcomes, findings = {}, []
        for stage, way in enumerate(ways.EVERY_WAY):
            loaded = outcomes and outcomes["load"].status == LOADED
            if loaded or ways.takes_turn(way, mutant.index):
                self.state[1] = stage
                outcome = outcomes[way.__name__] = self.try_way(way, mutant.data)
                findings += outcome.findings or compare.disagreement(way, outcome, outcomes["load"])
        statuses = {name: outcome.status for name, outcome in outcomes.items()}
        if statuses["load"] == "LimitError":  # torch has no limits
            return statuses, "neither", findings
        self.state[1] = TORCH
        self.watch(TORCH_SECONDS)
        theirs = compare.torch_load(NAME)
        self.state[1] = COMPARING
        word, found = compare.compared(theirs, outcomes["load"], mutant.data)
        if (verify := outcomes.get("verify")) and verify.value:
            status, wrong = compare.foretold(verify.value, theirs, outcomes["load"])
            statuses["verify on torch.load"] = status
            found = found + wrong
        return statuses, word, findings + found

    def try_way(self, way, data):
        self.guard.writable = way in ways.WRITERS
        return self.guard.call(way.__name__, lambda: way(NAME, data))


def write(data):
    with open(NAME, "wb") as file:
        file.write(data)


def work(pipe, state, mutator, indexes, deadline, folder, log):
    """The body of a worker: reads the mutants of ``indexes`` until the deadline and sends what it found."""
    import torch

    torch.set_num_threads(1)
    os.chdir(folder)
    log_file = open(log, "w")  # noqa: SIM115 - as long as the process
    os.dup2(log_file.fileno(), 2)
    faulthandler.enable(log_file)
    warnings.simplefilter("ignore")

    def watch(seconds):
        faulthandler.dump_traceback_later(seconds, exit=True, file=log_file)

    reader = Reader(state, watch)
    reader.warm_up(mutator.seeds)
    limit_memory(MORE_MEMORY)
    for index in indexes:
        if time.monotonic() > deadline:
            break
        mutant = mutator.mutant(index)
        pipe.send((index, *reader.read(mutant)))
    faulthandler.cancel_dump_traceback_later()
    pipe.send(None)
