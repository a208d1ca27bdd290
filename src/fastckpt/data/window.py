"""Window: numbered jobs, run by threads a bounded way ahead of the caller, who takes their results in order."""

import atexit
import os
import queue
import threading
import time
import weakref

# How long the end of the interpreter waits for jobs under way, in seconds: not for ever for one that hangs.
LAST_WAIT = 5.0
# A caller who comes back within so many seconds computes nothing between batches: to wake a thread for it would cost both more
# time (the interpreter is handed to and fro) than the batch that it could make meanwhile is worth.
HURRY = 100e-6
# In place of a result: the thread that ran the job could not even say what went wrong.
LOST = object()
STOPPED = object()


class Window:
    """Runs ``run(0)`` ... ``run(count - 1)`` on at most ``workers`` threads; ``get(job)`` gives a result, ``release(job)`` is done with it.

    Job j may start only while ``j < next_out + width``, ``next_out`` being the job that is released next: however long one
    hangs, no more than ``width`` are begun and not released. Where there is no thread (``workers`` is 0, or the system has
    none to give) the caller does each job when it is asked for. With ``helps``, the caller does a job that no thread has begun
    yet, rather than wait for one to begin it: for jobs that never block, which are often done before a thread has the interpreter.

    ``run`` returns, whatever happens; what ends a program may pass through it in the caller's thread, or come anywhere in ``get`` and ``release``,
    which may be called again then. One thread calls them at a time. Nothing here waits for a job that nobody wants any more.
    """

    def __init__(self, run, count, width, workers, helps=False):
        self.run, self.count, self.helps = run, count, helps
        self.width = max(1, min(width, count))
        self.next_in = self.next_out = (
            0  # the job that is started next, the one that is released next
        )
        self.ready = {}  # job -> what it gave
        self.stopped = False
        # If the caller helps: when the last job was released, and whether the next one was asked for soon after that.
        self.handed_out, self.hurries = 0.0, False
        self.pid = os.getpid()
        # Over next_in, next_out, idle and ready; never held while a job runs.
        self.lock = threading.Lock()
        self.idle = 0  # threads that found no job they may start; each takes one word from ``wake`` to look again
        self.wake = (
            queue.SimpleQueue()
        )  # whose put may be called anywhere, even where a garbage collection ends up
        # Released when there is news. A bare lock and no Condition: Ctrl-C while it waits leaves nothing half done.
        self.news = threading.Lock()
        self.news.acquire()
        self.threads = []
        self._start_threads(min(workers, self.width, count))

    def _start_threads(self, number):
        if number:
            _windows.add(self)
        try:
            for _ in range(number):
                # daemon: so that the interpreter's end does not wait before _end_all has told them to end
                thread = threading.Thread(
                    target=_work, args=(weakref.ref(self), self.wake), name="loader", daemon=True
                )
                thread.start()
                self.threads.append(thread)
        except RuntimeError:  # no more are to be had: those that are there do it, or the caller
            pass
        except BaseException:
            self.stop()
            raise

    # -- the caller

    def get(self, job):
        """What job ``next_out``, or a later one, gave; it stays until ``release``. RuntimeError in a process that was forked meanwhile,
        for what the threads of the parent had not done yet; StopIteration once the window was stopped.
        """
        if self.stopped:
            raise StopIteration
        if self.threads and os.getpid() != self.pid:
            return self._left_over(job)
        if self.helps:  # before it makes the job itself, which takes time, too
            self.hurries = time.perf_counter() - self.handed_out < HURRY
        while job not in self.ready:
            if not self.threads or (self.helps and self._take(job)):
                self.ready[job] = LOST
                break
            self.news.acquire()
            if self.stopped:
                raise StopIteration
        result = self.ready.get(job, STOPPED)
        if result is LOST:
            result = self.ready[job] = self.run(job)
        if result is STOPPED:  # between the two lines, by another thread
            raise StopIteration
        return result

    def release(self, job):
        """Forget what a job gave, the first that was not released yet, and let another begin.

        May be interrupted anywhere, and called again then: ``next_out`` moves last, and no word for a thread is lost.
        """
        if not self.threads or os.getpid() != self.pid:
            # There is nobody to tell; in a child the lock might be one that is held for ever.
            self.ready.pop(job, None)
            self.next_out = job + 1
            return
        with self.lock:
            self.ready.pop(job, None)
            limit = min(self.count, job + 1 + self.width)
            if self.idle and not self.hurries and self.next_in < limit:
                self.idle -= 1
                self.wake.put(None)
            self.next_out = job + 1
        if self.helps:
            self.handed_out = time.perf_counter()

    def _take(self, job):
        """Begin a job for the caller; not if a thread has begun it."""
        with self.lock:
            free = self.next_in == job and not self.stopped
            if free:
                self.ready[job] = LOST
                self.next_in += 1
        return free

    def _left_over(self, job):
        # The lock may be held by a thread that does not exist here, so it is not asked for.
        result = self.ready.get(job, LOST)
        if result is LOST:
            raise RuntimeError(
                "this epoch was started before fork(), and its threads are not in this process; start a new one with iter(loader)"
            )
        return result

    def stop(self):
        """Start no more jobs and forget what they gave. Returns at once; jobs under way end by themselves.

        Takes no lock: it runs wherever the last reference to its user is dropped, be it in a thread that has the lock.
        """
        self.stopped = True
        self.ready.clear()
        for _ in self.threads:
            self.wake.put(None)
        self._tell()

    # -- the threads

    def _begin(self):
        """The job that a thread is to do now; None if it has to wait for a word. StopIteration where there is no more to do."""
        with self.lock:
            job = self.next_in
            if self.stopped or job >= self.count:
                raise StopIteration
            if job < self.next_out + self.width:
                self.next_in += 1
                return job
            self.idle += 1  # under one lock with what moves the window on: no word is lost
            return None

    def _do(self, job):
        try:
            result = self.run(job)
        except BaseException:  # out of memory, most likely: let the caller meet it
            result = LOST
        with self.lock:
            if not self.stopped:
                self.ready[job] = result
        if job == self.next_out:
            self._tell()

    def _tell(self):
        try:
            self.news.release()
        except RuntimeError:  # it is known already
            pass


def _work(window_of, wake):
    """What a thread does. It holds no window while it waits: whoever uses one may lead back to itself, and still be dropped."""
    while (window := window_of()) is not None:
        try:
            job = window._begin()
        except StopIteration:
            return
        if job is not None:
            window._do(job)
        del window
        if job is None:
            wake.get()


# Those that have threads, for the end of the interpreter: a thread that is still computing then may crash.
_windows: weakref.WeakSet = weakref.WeakSet()


@atexit.register
def _end_all():
    windows = list(_windows)
    for window in windows:
        window.stop()
    until = time.monotonic() + LAST_WAIT
    for window in windows:
        for thread in window.threads:
            thread.join(max(0.0, until - time.monotonic()))
