"""IrisWork by itself, with a stand-in for the engine."""

import datetime
import functools
import gc
import threading
import time
import weakref

import pytest
import torch
from torch._C._distributed_c10d import Work

from iris_pg.errors import DeadlineError, MismatchError, PeerLostError
from iris_pg.operations.base import Operations
from iris_pg.work import IrisWork


def nothing(work):
    pass


def end(work, error=None):
    """What an engine does when it has executed the last packet of ``work``."""
    if callbacks := work.completion.finished(error):
        callbacks()


def test_a_work_that_is_done():
    output = torch.ones(2)
    work = IrisWork([output])
    assert isinstance(work, Work)
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.wait() is True
    assert work.wait(datetime.timedelta(seconds=1)) is True
    assert work.result()[0] is output
    assert work.get_future().wait()[0] is output
    assert work.get_future() is work.get_future()


def test_wait_drives_and_finished_tells_everyone():
    told = []
    work = IrisWork(["out"], drive=end)
    work.completion.after = lambda: told.append("after")
    work.completion.keep = "tensors"
    future = work.get_future()
    future.then(lambda f: told.append(f.value()))
    assert not work.is_completed()
    assert not future.done()
    assert work.wait() is True
    assert told == ["after", ["out"]]
    assert work.completion.keep is None
    assert work.is_success()
    assert work.get_future() is future


@pytest.mark.parametrize("error", [PeerLostError("rank 1 is gone"), MismatchError("different")])
def test_an_error_is_raised_by_wait_and_by_the_future(error):
    work = IrisWork(["out"], drive=lambda w: end(w, error))
    future = work.get_future()
    for _ in range(2):
        with pytest.raises(type(error), match=str(error)):
            work.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert work.exception() is error
    with pytest.raises(type(error), match=str(error)):
        future.wait()
    with pytest.raises(type(error), match=str(error)):
        IrisWork([], drive=lambda w: end(w, error)).wait(datetime.timedelta(seconds=0))


def test_an_error_of_what_runs_after_is_the_error_of_the_work():
    work = IrisWork(["out"], drive=end)

    def after():
        raise ValueError("copy failed")

    work.completion.after = after
    with pytest.raises(ValueError, match="copy failed"):
        work.wait()
    assert not work.is_success()


def test_what_drive_raises_before_the_work_has_ended_is_raised():
    def drive(work):
        raise DeadlineError("late")

    work = IrisWork([], drive=drive)
    with pytest.raises(DeadlineError, match="late"):
        work.wait()
    assert not work.is_completed()


def test_a_timeout_ends_the_wait_and_not_the_work():
    work = IrisWork(["out"], drive=nothing)
    start = time.monotonic()
    with pytest.raises(DeadlineError, match=r"within the 0\.05 s given to wait"):
        work.wait(datetime.timedelta(seconds=0.05))
    assert 0.04 < time.monotonic() - start < 5
    end(work)
    assert work.wait(datetime.timedelta(seconds=0.05)) is True


def test_many_threads_wait():
    work = IrisWork(["out"], drive=nothing)
    seen = []

    def wait(use_future):
        seen.append(work.get_future().wait() if use_future else work.wait() and work.result())

    threads = [threading.Thread(target=wait, args=(i % 2 == 0,)) for i in range(6)]
    for thread in threads:
        thread.start()
    time.sleep(0.02)
    end(work)
    for thread in threads:
        thread.join(10)
    assert seen == [["out"]] * 6


def test_asking_for_the_future_while_the_work_ends():
    for _ in range(300):
        work = IrisWork(["out"], drive=nothing)
        ender = threading.Thread(target=end, args=(work,))
        ender.start()
        future = work.get_future()
        assert future.wait() == ["out"]
        ender.join()


def test_one_work_for_several_operations():
    work = IrisWork(["last"], drive=end).of(["first", "last"])
    assert work.wait()
    assert work.result() == work.get_future().wait() == ["first", "last"]


def test_a_failed_work_and_its_future_do_not_keep_the_frames_alive_that_waited():
    class Held:
        pass

    def wait_in_vain():
        held = Held()
        work = IrisWork([], drive=lambda w: end(w, PeerLostError("gone")))
        work.get_future()
        with pytest.raises(PeerLostError):
            work.wait()
        return weakref.ref(held)

    held = wait_in_vain()
    gc.collect()
    assert held() is None


def test_the_work_of_several_operations_fails_when_one_has_failed_already():
    works = [IrisWork(["a"]), IrisWork(["b"], drive=nothing), IrisWork(["c"])]
    end(works[1], PeerLostError("gone"))
    whole = Operations._all(None, works, ["a", "b", "c"])
    with pytest.raises(PeerLostError, match="gone"):
        whole.wait()
    assert Operations._all(None, [works[0], works[2]], ["a", "c"]).wait()
    works = [IrisWork(["a"], drive=nothing), IrisWork(["b"], drive=nothing), IrisWork(["c"])]
    whole = Operations._all(None, works, ["a", "b", "c"])
    assert not whole.is_completed()
    end(works[0])
    assert not whole.is_completed()
    end(works[1])
    assert whole.is_success()
    assert whole.result() == ["a", "b", "c"]


def test_an_operation_is_seen_to_be_done_when_its_thread_holds_nothing_of_it_any_more():
    """Else a tensor would go, and its block be idle, at a time that differs from rank to rank."""

    class Watched(threading.Event):
        def set(self):
            seen.append(tensor() is None)
            super().set()

    output, seen = torch.ones(3), []
    tensor = weakref.ref(output)
    work = IrisWork([output], drive=lambda work: None)
    completion = work.completion
    completion.keep, completion.after = (output,), functools.partial(output.add_, 1)
    completion._event = Watched()
    del output, work
    assert tensor() is not None
    assert completion.finished(None) is None
    assert seen == [True]
    assert completion.done
