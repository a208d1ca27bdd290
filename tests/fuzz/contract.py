"""What must hold whatever the bytes are: a value or a documented error, in bounded time and memory, and nothing run."""

import collections
import dataclasses
import os
import resource
import sys
import time
import traceback

from fastckpt import CheckpointError
from support import SANITIZED

from .pickles import MARKER

# What a file may be refused with. TypeError and plain ValueError are for arguments, and the fuzzer's are right.
DOCUMENTED = (CheckpointError, OSError)
MOST_SECONDS = 5  # of CPU time, for files of some kilobytes
# Of memory, beyond what the process had; the sanitizer keeps what was freed.
MOST_NBYTES = 96 << 20 if not SANITIZED else 1 << 30
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Audit events that reading a file has no business with, by what stands before their first dot.
FORBIDDEN = frozenset(
    "import exec compile os subprocess shutil socket ctypes pickle marshal code tempfile pty fcntl webbrowser urllib".split()
)
PROCESSES = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty")
HARMLESS = ("os.listdir", "os.scandir", "os.putenv", "os.unsetenv")

LOADED = "loaded"

Finding = collections.namedtuple("Finding", "kind way key text")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of reading a file one way: ``status`` is LOADED or the name of the error."""

    value: object
    status: str
    error: BaseException | None = None
    findings: list = ()


class Escape(BaseException):
    """Something ran, was imported or was about to be written; no handler for Exception hides it."""


class Guard:
    """Calls ways of reading and watches what they do; an audit hook cannot be taken away, so there is one in a process."""

    def __init__(self):
        self.watching, self.seen, self.writable = False, [], False
        sys.addaudithook(self._audit)

    def _audit(self, event, args):
        if self.watching and self._forbids(event, args):
            self.seen.append(f"{event}{args!r:.300}")
            raise Escape(self.seen[-1])

    def _forbids(self, event, args):
        if event == "open":
            return bool(args[2] & WRITES) and not self.writable
        module = event.partition(".")[0]
        if module == "os" and self.writable:  # what is written is renamed, linked, removed
            return event in PROCESSES
        return module in FORBIDDEN and event not in HARMLESS

    def call(self, way, read):
        """Call ``read()``, an Outcome."""
        value = error = None
        findings, status = [], LOADED
        self.seen, started, before = [], time.process_time(), reset_peak()
        self.watching = True
        try:
            value = read()
        except DOCUMENTED as raised:
            error, status = raised, type(raised).__name__
        except (KeyboardInterrupt, SystemExit):
            raise
        except Escape:
            status = "Escape"  # which is in what was seen
        except BaseException as raised:
            self.watching = False
            error, status = raised, type(raised).__name__
            text = "".join(traceback.format_exception(raised))
            findings.append(Finding("exception", way, f"{status} {place_of(raised)}", text))
        finally:
            self.watching = False
        seconds, nbytes = time.process_time() - started, peak() - before
        if self.seen:
            findings.append(Finding("escape", way, self.seen[0][:60], "\n".join(self.seen)))
        if seconds > MOST_SECONDS:
            findings.append(Finding("slow", way, status, f"{seconds:.1f} s of CPU time; {error}"))
        if nbytes > MOST_NBYTES:
            findings.append(
                Finding("memory", way, status, f"{nbytes >> 20} MiB of memory at the peak; {error}")
            )
        if made := [name for name in os.listdir() if name == MARKER]:
            os.rmdir(MARKER) if os.path.isdir(MARKER) else os.unlink(MARKER)
            findings.append(Finding("escape", way, "marker", f"the payload ran: {made}"))
        return Outcome(value, status, error, findings)


def place_of(error):
    """Where an error was raised, the last line of Python code that knows of it."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].name}" if frames else "nowhere"


def reset_peak():
    """Begin to measure the peak anew; bytes that are in memory now."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return status_nbytes("VmRSS:")


def peak():
    return status_nbytes("VmHWM:")


def status_nbytes(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(field))


def limit_memory(nbytes):
    """Let this process take no more than ``nbytes`` of address space beyond what it has."""
    if SANITIZED:  # which ends the process where it gets none for itself
        return
    most = status_nbytes("VmSize:") + nbytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
