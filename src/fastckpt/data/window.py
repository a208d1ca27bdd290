"""Window: numbered jobs, run by threads a bounded way ahead of the caller, their results handed out in order."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor


class Window:
    """Runs ``run(0)`` ... ``run(count - 1)`` on at most ``workers`` threads; ``next()`` gives their results in order.

    Job j may start only while ``j < next_out + width``, ``next_out`` being the job whose result is handed out next: however long one
    hangs, no more than ``width`` are begun and not handed out. A thread that may not start a job goes back to its pool; whoever
    moves ``next_out`` on sends threads out again. Where no thread is at work (``workers`` is 0, or the system has
    none to give) the caller does the job itself.

    ``run`` returns, whatever happens; the caller's own KeyboardInterrupt may pass through it, and the job is then done by the
    next ``next()``. One thread calls ``next`` at a time. Nothing here waits for a job that nobody wants any more.
    """

    def __init__(self, run, count, width, workers):
        self.run, self.count = run, count
        self.width = max(1, min(width, count))
        self.workers = min(workers, self.width) if count else 0
        self.next_in = self.next_out = (
            0  # the job that is started next, the one that is handed out next
        )
        self.ready = {}  # job -> what it gave
        self.stopped = False
        self.pid = os.getpid()
        # Under the lock: next_in, next_out, tasks. It is never held while a job runs.
        self.lock = threading.Lock()
        self.tasks = set()  # one token for each thread that is at work or sent for
        # Released when there is news. A bare lock and no Condition: Ctrl-C while it waits leaves nothing half done.
        self.news = threading.Lock()
        self.news.acquire()
        self.pool = None
        if self.workers:
            self.pool = ThreadPoolExecutor(self.workers, thread_name_prefix="loader")
            with self.lock:
                self._send_threads()

    # -- the caller

    def next(self):
        """The result of the next job; StopIteration after the last, or once it was stopped.

        Raises RuntimeError in a process that was forked meanwhile, for what the threads of the parent had not done yet.
        """
        if self.next_out >= self.count or self.stopped:
            raise StopIteration
        if self.pool is not None and os.getpid() != self.pid:
            return self._left_over()
        while True:
            with self.lock:
                if self.next_out in self.ready:
                    return self._hand_out()
                if self.stopped:
                    raise StopIteration
                alone = not self.tasks
            if alone:
                result = self.run(self.next_out)
                with self.lock:
                    self.next_in = self.next_out + 1
                    self.ready[self.next_out] = result
                    return self._hand_out()
            self.news.acquire()

    def _hand_out(self):
        # In this order: Ctrl-C while a thread is being made loses nothing.
        result = self.ready[self.next_out]
        if self.pool is not None:
            self._send_threads(more=1)
        del self.ready[self.next_out]
        self.next_out += 1
        return result

    def _left_over(self):
        # The lock may be held by a thread that does not exist here, so it is not asked for.
        if self.next_out not in self.ready:
            raise RuntimeError(
                "this epoch was started before fork(), and its threads are not in this process; start a new one with iter(loader)"
            )
        self.next_out += 1
        return self.ready.pop(self.next_out - 1)

    def stop(self):
        """Start no more jobs and forget what they gave. Returns at once; jobs under way end by themselves.

        Takes no lock that a thread of this window may hold, for it runs wherever the last reference to its user is dropped.
        """
        self.stopped = True
        self.ready.clear()
        if self.pool is not None and os.getpid() == self.pid:
            self.pool.shutdown(wait=False, cancel_futures=True)
            self._tell()

    # -- the threads

    def _startable(self):
        return min(self.count, self.next_out + self.width) - self.next_in

    def _send_threads(self, more=0):
        """Send out as many threads as there are jobs that may start, and ``more``; called with the lock held."""
        for _ in range(min(self.workers - len(self.tasks), self._startable() + more)):
            token = object()
            self.tasks.add(token)
            try:
                self.pool.submit(self._work, token)
            except RuntimeError:  # no more threads, or the interpreter is on its way out
                self.tasks.discard(token)
                return

    def _work(self, token):
        try:
            while (job := self._claim(token)) is not None:
                self._keep(job, self.run(job))
        except BaseException:  # out of memory, most likely; the caller does the job itself
            with self.lock:
                self.tasks.discard(token)
            self._tell()
            raise

    def _claim(self, token):
        """The next job that may start, or None. Under one lock with what moves the window on: no wake-up is lost."""
        with self.lock:
            if token in self.tasks and self._startable() > 0 and not self._over():
                self.next_in += 1
                return self.next_in - 1
            self.tasks.discard(token)
        self._tell()  # who waits for a thread that is gone would wait forever
        return None

    def _over(self):
        return self.stopped or not threading.main_thread().is_alive()

    def _keep(self, job, result):
        with self.lock:
            if not self.stopped:
                self.ready[job] = result
            wanted = job == self.next_out
        if wanted:
            self._tell()

    def _tell(self):
        try:
            self.news.release()
        except RuntimeError:  # it is known already
            pass
