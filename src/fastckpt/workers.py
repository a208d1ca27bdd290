"""How many threads, and the one fresh thread that parallel work runs on: all that is known of OpenMP and fork.

OpenMP keeps its threads for whoever made them. A process that forks while its main thread owns such a pool has
children that hang as soon as they enter a parallel region, be it ours or torch's. A pool that belongs to a thread
which has ended is gone. So a parallel fill never runs on the caller's thread but on one made for it, and waited for.
"""

import _thread
import os
import sys
import threading

# More readers than this wait for memory, not for work.
MOST_THREADS = 16
# What is asked for counts up to here: OpenMP ends the process where it cannot make the threads that it is asked for.
MOST_ASKED = 1024
# Below this many bytes the caller's thread reads alone. Medians, two CPUs (EPYC), one thread and two: 8 MiB 0.68
# and 0.72 ms, 16 MiB 1.9 and 1.5 ms, 64 MiB 7.8 and 5.3 ms.
SERIAL_BELOW = 8 << 20
# How often progress is told, in seconds.
PROGRESS_EVERY = 0.1


def serial_below():
    """Loads of fewer bytes are read by the caller's thread alone (FASTCKPT_SERIAL_BELOW; 0: none is)."""
    text = os.environ.get("FASTCKPT_SERIAL_BELOW")
    if not text:
        return SERIAL_BELOW
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"FASTCKPT_SERIAL_BELOW={text}: a number of bytes is expected")
    return int(text)


def thread_count(threads=None):
    """How many threads to read with: ``threads``, or where that is None as many as are ours to use."""
    if threads is not None:
        return check_threads(threads)
    return max(1, min(torch_threads(), cpus(), cgroup_cpus(), MOST_THREADS))


def check_threads(threads):
    """Give back what was asked for, MOST_ASKED at most, or raise TypeError or ValueError where it cannot be meant."""
    if threads is None:
        return None
    if isinstance(threads, bool) or not hasattr(threads, "__index__"):
        raise TypeError(f"threads={threads!r}: a number is expected, or None for as many as fit")
    if threads < 1:
        raise ValueError(f"threads={threads}: at least 1 is needed, or None for as many as fit")
    return int(min(threads, MOST_ASKED))


def team(number):
    """How many threads to ask OpenMP for, so that ``number`` CPUs are kept busy.

    Where all CPUs are taken, one more: libgomp waits for a thread it made by spinning, unless it has more threads
    than CPUs; and the new thread may be waiting for the very CPU that spins. Two CPUs, median of 64 MiB: 11.6 ms
    with two threads, 5.3 with three.
    """
    return number + 1 if number > 1 and number == cpus() else number


def torch_threads():
    """What torch is set to, where it is loaded: 1 in a DataLoader's worker."""
    get = getattr(sys.modules.get("torch"), "get_num_threads", None)
    return get() if get else MOST_THREADS


def cpus():
    """How many CPUs this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return os.cpu_count() or 1


def cgroup_cpus(root="/sys/fs/cgroup", membership="/proc/self/cgroup"):
    """How many CPUs' time the cgroups of this process grant, rounded up; MOST_THREADS where nothing limits it."""
    fewest = MOST_THREADS
    for line in read_text(membership).splitlines():
        _, controllers, path = ([*line.split(":", 2), "", ""])[:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        for group in upwards(os.path.join(root, "cpu") if controllers else root, path):
            if controllers:  # version 1
                words = [
                    read_text(os.path.join(group, f"cpu.cfs_{word}_us")).strip()
                    for word in ("quota", "period")
                ]
            else:
                words = read_text(os.path.join(group, "cpu.max")).split()
            if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
                fewest = min(
                    fewest, -(-int(words[0]) // int(words[1]))
                )  # "max" and -1 limit nothing
    return max(1, fewest)


def upwards(root, path):
    """The folders of a group and of the groups around it; in a container those below the root may not be there."""
    parts = [part for part in path.split("/") if part and part != ".."]
    return [os.path.join(root, *parts[:depth]) for depth in range(len(parts) + 1)]


def read_text(path):
    try:
        with open(path) as f:
            return f.read()
    except OSError:
        return ""


def apart(call):
    """Call ``call()`` on a thread of its own, and return or raise what it does.

    For torch's parallel kernels, some of which are parallel for three numbers: in a process that was forked from one
    that has computed with torch, they hang on any thread that was there before.
    """
    outcome, error = [], []

    def body():
        try:
            outcome.append(call())
        except BaseException as raised:
            error.append(raised)

    thread = threading.Thread(target=body, name="checkpoint checker")
    thread.start()
    thread.join()
    if error:
        raise error.pop()
    return outcome.pop()


def run(call, nbytes, threads, cancel, progress=None):
    """Call ``call(number of threads)`` for ``nbytes`` bytes of work, and return or raise what it does.

    Small work is done here, with one thread. Else a thread is made for it, and a KeyboardInterrupt (or whatever
    a signal handler raises) arrives here at once: then ``cancel()`` is called, the thread is waited for, and the
    exception goes on. Another one may cut that short: what the thread works on must live as long as ``call``.
    ``progress()`` is called now and then meanwhile; what it raises is treated alike.
    """
    if nbytes < serial_below():
        check_threads(threads)
        return call(1)
    number = team(thread_count(threads))
    outcome, error, began, ended, given_up = [], [], [], [], []
    busy = threading.Lock()  # held until the thread ends
    busy.acquire()

    def body():
        began.append(True)
        try:
            if not given_up:
                outcome.append(call(number))
        except BaseException as raised:
            error.append(raised)
        finally:
            ended.append(True)
            busy.release()

    try:
        try:
            # A threading.Thread loses count of itself where a signal handler raises in its start().
            _thread.start_new_thread(body, ())
        except RuntimeError:  # none is to be had: a limit, or the interpreter is on its way out
            given_up.append(True)
            if began:  # it was had, and a handler raised this
                raise
            return call(1)
        while not ended:
            busy.acquire(timeout=PROGRESS_EVERY if progress else -1)
            if progress:
                progress()
    except BaseException:
        # In this order: a thread that has not begun yet sees it, and one that has is seen below.
        given_up.append(True)
        while True:
            try:
                cancel()
                while began and not ended:
                    busy.acquire(timeout=0.05)
                break
            except BaseException:  # another Ctrl-C does not hurry it
                continue
        raise
    if error:
        raise error.pop()  # pop: or its traceback would keep it, and the memory in its frames, alive
    return outcome.pop()


def together(work, number):
    """Call ``work()``, which raises nothing, on this thread and on as many others as there can be, ``number`` in all."""
    busy = []  # a lock for each of the others, held until it ends

    def body(lock):
        try:
            work()
        finally:
            lock.release()

    for _ in range(number - 1):
        lock = _thread.allocate_lock()
        lock.acquire()
        try:
            _thread.start_new_thread(body, (lock,))
        except RuntimeError:
            break
        busy.append(lock)
    work()
    for lock in busy:
        lock.acquire()
