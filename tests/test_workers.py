"""How many threads, where they run, and how they are told to stop."""

import _thread
import os
import sys
import threading
import types

import pytest

from fastckpt import workers


class Flag:
    def __init__(self):
        self.set = 0

    def __call__(self):
        self.set += 1


class TestCount:
    @pytest.mark.parametrize("threads", [1, 2, 1000])
    def test_what_is_asked_for_counts(self, threads):
        assert workers.thread_count(threads) == threads

    @pytest.mark.parametrize(
        "threads", [1025, 2**31 - 1, 2**31, 10**5000], ids=["1025", "int", "long", "huge"]
    )
    def test_too_many_are_as_many_as_can_be(self, threads):
        assert workers.thread_count(threads) == workers.MOST_ASKED

    @pytest.mark.parametrize(
        ("threads", "error"),
        [(0, ValueError), (-1, ValueError), (True, TypeError), ("2", TypeError), (1.5, TypeError)],
    )
    def test_refused(self, threads, error):
        with pytest.raises(error, match="threads="):
            workers.thread_count(threads)

    @pytest.mark.parametrize(
        ("torch", "cpus", "quota", "count"),
        [(8, 4, 6, 4), (1, 4, 6, 1), (8, 9, 2, 2), (99, 99, 16, 16)],
        ids=["affinity", "torch, as in a DataLoader's worker", "cgroup", "most"],
    )
    def test_the_least_decides(self, torch, cpus, quota, count, monkeypatch):
        monkeypatch.setitem(
            sys.modules, "torch", types.SimpleNamespace(get_num_threads=lambda: torch)
        )
        monkeypatch.setattr(workers, "cpus", lambda: cpus)
        monkeypatch.setattr(workers, "cgroup_cpus", lambda: quota)
        assert workers.thread_count() == count

    def test_torch_that_is_being_imported_has_no_say(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
        assert workers.torch_threads() == workers.MOST_THREADS

    @pytest.mark.skipif(
        not hasattr(os, "sched_setaffinity"), reason="a system without affinity masks"
    )
    def test_affinity(self):
        mask = os.sched_getaffinity(0)
        os.sched_setaffinity(0, [min(mask)])
        try:
            assert workers.cpus() == workers.thread_count() == 1
        finally:
            os.sched_setaffinity(0, mask)


@pytest.mark.parametrize(
    ("number", "cpus", "team"), [(1, 1, 1), (1, 4, 1), (3, 4, 3), (4, 4, 5), (9, 4, 9), (2, 1, 2)]
)
def test_team_outnumbers_the_cpus_it_fills(number, cpus, team, monkeypatch):
    monkeypatch.setattr(workers, "cpus", lambda: cpus)
    assert workers.team(number) == team


class TestCgroups:
    @pytest.mark.parametrize(
        ("membership", "files", "count"),
        [
            ("", {}, 16),
            ("0::/\n", {}, 16),
            ("0::/\n", {"cpu.max": "max 100000\n"}, 16),
            ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
            ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),
            ("0::/\n", {"cpu.max": "1000 100000\n"}, 1),
            ("0::/a/b\n", {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n"}, 3),
            ("0::/../x\n", {"cpu.max": "400000 100000\n"}, 4),
            (
                "4:cpu,cpuacct:/a\n",
                {"cpu/a/cpu.cfs_quota_us": "500000\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
                5,
            ),
            (
                "4:cpu:/\n",
                {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
                16,
            ),
            ("7:memory:/\n", {"cpu.max": "100000 100000\n"}, 16),
            ("0::/\n", {"cpu.max": "nonsense"}, 16),
            ("nonsense\n", {}, 16),
        ],
    )
    def test_quota(self, membership, files, count, tmp_path):
        (tmp_path / "membership").write_text(membership)
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        assert workers.cgroup_cpus(str(tmp_path), str(tmp_path / "membership")) == count

    def test_here(self):
        assert 1 <= workers.cgroup_cpus() <= workers.MOST_THREADS


class TestSerialBelow:
    @pytest.mark.parametrize(
        ("text", "nbytes"), [("", workers.SERIAL_BELOW), ("0", 0), ("12345", 12345)]
    )
    def test_values(self, text, nbytes, monkeypatch):
        monkeypatch.setenv("FASTCKPT_SERIAL_BELOW", text)
        assert workers.serial_below() == nbytes

    @pytest.mark.parametrize("text", ["-1", "4MB", "²"])
    def test_refused(self, text, monkeypatch):
        monkeypatch.setenv("FASTCKPT_SERIAL_BELOW", text)
        with pytest.raises(ValueError, match="FASTCKPT_SERIAL_BELOW="):
            workers.serial_below()


class TestRun:
    @pytest.fixture(autouse=True)
    def limit(self, monkeypatch):
        monkeypatch.setenv("FASTCKPT_SERIAL_BELOW", "1000")

    def where(self, nbytes, threads=3):
        return workers.run(lambda n: (n, threading.get_ident()), nbytes, threads, pytest.fail)

    def test_small_work_is_done_here(self):
        assert self.where(999) == (1, threading.get_ident())

    def test_other_work_is_done_on_a_thread_of_its_own(self):
        number, thread = self.where(1000)
        assert number == workers.team(3)
        assert thread != threading.get_ident()

    def test_wrong_threads_are_refused_for_small_work_too(self):
        with pytest.raises(ValueError, match="threads=0"):
            self.where(1, 0)

    def test_where_no_thread_is_to_be_had(self, monkeypatch):
        def start(function, arguments):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(_thread, "start_new_thread", start)
        assert self.where(1000) == (1, threading.get_ident())

    def test_a_handler_that_raises_what_threads_raise(self, monkeypatch):
        """The thread is there: its work is not done twice at once."""
        start, called = _thread.start_new_thread, []

        def start_and_raise(function, arguments):
            start(function, arguments)
            began.wait()
            raise RuntimeError("of a handler")

        def call(number):
            called.append(number)
            began.set()

        began = threading.Event()
        monkeypatch.setattr(_thread, "start_new_thread", start_and_raise)
        with pytest.raises(RuntimeError, match="of a handler"):
            workers.run(call, 1000, 3, Flag())
        assert called == [workers.team(3)]

    def test_errors_come_back(self):
        def call(number):
            raise KeyError("from the thread")

        with pytest.raises(KeyError, match="from the thread"):
            workers.run(call, 1000, 2, pytest.fail)

    def test_what_interrupts_cancels_and_waits(self):
        cancelled, ended = threading.Event(), Flag()

        def call(number):
            cancelled.wait()
            ended()

        def progress():
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            workers.run(call, 1000, 2, cancelled.set, progress)
        assert ended.set == 1

    def test_what_interrupts_once_more_does_not_hurry_it(self):
        cancelled, ended, times = threading.Event(), Flag(), Flag()

        def call(number):
            cancelled.wait()
            ended()

        def cancel():
            times()
            if times.set < 3:
                raise KeyError("of a handler")
            cancelled.set()

        def progress():
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            workers.run(call, 1000, 2, cancel, progress)
        assert (ended.set, times.set) == (1, 3)

    def test_progress_is_told(self):
        told, go_on = Flag(), threading.Event()

        def progress():
            told()
            go_on.set()

        workers.run(lambda n: go_on.wait(), 1000, 2, pytest.fail, progress)
        assert told.set >= 1


@pytest.mark.parametrize("number", [1, 2, 5])
def test_together(number):
    seen, all_here = set(), threading.Barrier(number)

    def work():
        all_here.wait(60)
        seen.add(threading.get_ident())

    workers.together(work, number)
    assert len(seen) == number
    assert threading.get_ident() in seen


def test_together_alone(monkeypatch):
    def start(function, arguments):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", start)
    done = Flag()
    workers.together(done, 5)
    assert done.set == 1
