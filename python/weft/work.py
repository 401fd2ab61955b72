"""Calls in flight."""
import asyncio
import ctypes
import itertools
import os
import threading
import time
import traceback
import weakref

from . import _api, _calls, arrays, errors
from ._handle import Handle, _hold, _let_go
from ._library import lib, per_thread

__all__ = ["Work", "wait_all"]

POLL_NS = 1_000_000  # how long the driver of works that are awaited waits for one of them
SLICE_NS = 50_000_000  # how long the main thread waits inside of the library before Python sees signals
_wait, _wait_for, _destroy, _done = lib.work_wait, lib.work_wait_for, lib.work_destroy, lib.work_done
_main = threading.main_thread().ident
_ident = threading.get_ident
_fast_wait = _calls.wait


class Work(Handle):
    """A ticket for a call. It keeps the call's arrays alive; neither read nor write them until it is done.

    `wait()` gives the call's result; so does `await work`. A Work that goes before its call has ended
    aborts the group, for all ranks: nobody would know whether the memory is free. For one thread at a
    time.
    """
    __slots__ = ("_group", "_keep", "_result", "_failure", "_is_recv", "_awaited", "source", "sources", "_reductions")
    _destroy = _destroy

    def __init__(self, handle, group, keep, result, is_recv=False, reductions=None):
        """is_recv: True of a recv; of a batch, how many of its calls are a recv from ANY_SOURCE."""
        Handle.__init__(self, handle)
        self._group, self._keep, self._result, self._failure = group, keep, result, None
        self._is_recv, self._reductions = is_recv, reductions
        # An _Awaited once a coroutine has awaited it: from then on the thread that drives it alone uses its
        # handle.
        self._awaited = None
        self.source = None  # of a recv that is done: the rank that sent
        # For a batch (or send_recv) that is done: the source of each recv from ANY_SOURCE among its calls, in
        # their order.
        self.sources = None

    def wait(self, timeout=None):
        """Blocks until the call is done, driving everything that this rank has in flight; its result: the
        array that was written, or None.

        timeout: seconds; builtins.TimeoutError after them, and the call is still pending. Raises the
        call's Error. Ctrl-C interrupts it, and the call stays in flight, too.
        """
        if _fast_wait is not None and timeout is None and self._awaited is None and self._handle is not None:
            if _fast_wait(self, not self._is_recv):
                if self._is_recv:
                    self._end(0)
                else:
                    self._forget()
            else:
                self._end(1)
            return self._ended()
        left = None if timeout is None else errors.nanoseconds(timeout, "timeout")
        if self._awaited is not None:
            if not self._awaited.ended.wait(None if left is None else left / 1e9):
                raise self._late(timeout)
            return self._ended()
        if self._handle is None:
            return self._ended()
        if timeout is None and _ident() != _main:
            self._end(_wait(self._handle, per_thread.ref))
            return self._ended()
        done = ctypes.c_bool()
        ref = ctypes.byref(done)
        while True:
            limit = SLICE_NS if left is None else min(SLICE_NS, max(left, 1))
            status = _wait_for(self._handle, limit, ref, per_thread.ref)
            if status or done:
                self._end(status)
                return self._ended()
            if left is not None:
                left -= limit
                if left <= 0:
                    raise self._late(timeout)

    def then(self, function):
        """Has function(error) called once, when the call has ended: None where it ended well, else its
        Error. That includes that the Work goes before. Several are called in the order in which they were
        given; where the call has ended already it is called at once, here.

        It runs in the thread that takes the last step: one that waits or asks, for whatever call of this
        rank, or the helper thread (progress="thread"). It should be short, may begin calls and ask `done`,
        and may not wait for a call of its own group. `wait` raises its exception, unless the call itself
        has failed. Before the Work is awaited, not after.
        """
        if not callable(function):
            raise errors.BadArgumentError(f"function is {function!r}; expected one of (error)")
        if self._awaited is not None and not self._awaited.ended.is_set():
            raise errors.BadArgumentError("this Work is awaited; expected then() before that")
        if self._handle is None:
            function(self._failure and errors.again(self._failure))
            return
        number = next(_numbers)
        _thens[number] = weakref.ref(self), function
        if lib.work_then(self._handle, _THEN, number, per_thread.ref):
            del _thens[number]
            raise errors.last()

    @staticmethod
    def _late(timeout):
        return TimeoutError(f"weft: the call is still pending after {timeout} s")

    def done(self):
        """Whether the call has ended. Takes the next steps it can and never blocks; raises the call's
        Error."""
        if self._awaited is not None:
            if not self._awaited.ended.is_set():
                return False
        elif self._handle is not None:
            done = ctypes.c_bool()
            status = _done(self._handle, ctypes.byref(done), per_thread.ref)
            if not status and not done:
                return False
            self._end(status)
        self._ended()
        return True

    def close(self):
        """Gives the Work up. Where its call has not ended that aborts the group, for all ranks; wait() has
        no result then."""
        if self._handle is not None and self._awaited is None:
            self._broke(errors.BadArgumentError("the Work was closed before it was waited for; it has no result"))
        super().close()

    def _end(self, status):
        """The call has ended: its error, its source; the handle goes, and the arrays that were kept.
        Raises where it was the asking that was wrong (within a function of then())."""
        if status:
            failure, done = errors.last(), ctypes.c_bool()
            if isinstance(failure, errors.BadArgumentError) and not _done(self._handle, ctypes.byref(done), per_thread.ref):
                raise failure
            self._failure = failure
            if not self._failure.quiesced and self._group is not None:
                self._group._unquiet.append(self._keep)
        elif self._is_recv is True:
            source = ctypes.c_int32()
            if not lib.work_source(self._handle, ctypes.byref(source), None):
                self.source = source.value
        elif self._is_recv:
            sources, count = (ctypes.c_int32 * self._is_recv)(), ctypes.c_size_t()
            if not lib.work_sources(self._handle, sources, self._is_recv, ctypes.byref(count), None):
                self.sources = tuple(sources[:count.value])
        handle, self._handle = self._handle, None
        _destroy(handle)
        self._forget()

    def _forget(self):
        if self._reductions is not None:
            for reduction in self._reductions:
                self._failure = reduction._failed(self._group, self._failure)
        self._keep = self._group = None

    def _broke(self, error):
        """Something else than the call has failed: its failure, where it has none of its own."""
        self._failure = self._failure or error

    def _ended(self):
        if self._failure is not None:
            raise errors.again(self._failure)
        result = self._result
        if result is not None and type(result) in _MADE:
            result = self._result = arrays.finish(result)
        elif type(result) is list:
            result = self._result = [arrays.finish(r) for r in result]
        return result

    def __await__(self):
        return (yield from _in_loop(self).__await__())


_MADE = (arrays.Number, arrays._Foreign)


_thens = {}  # number -> (a reference to the Work, the function of the program's)
_numbers = itertools.count(1)


def _then(number, error):
    work, function = _thens.pop(number)
    try:
        function(errors.from_struct(error.contents) if error else None)
    except BaseException as failure:  # pylint: disable=broad-except
        work = work()
        if work is None or work._handle is None:  # nobody can ask any more
            traceback.print_exception(type(failure), failure, failure.__traceback__)
        else:
            work._broke(errors.caught(failure))


_THEN = _api.weft_work_callback(_then)


def wait_all(works, timeout=None):
    """Waits for all of them, of one group or of several, in any order; their results. Where some fail: the
    Error of the first in the list that did, after all have ended.

    timeout: seconds for all together; then the Error of one that has failed, else builtins.TimeoutError;
    the others are still pending.
    """
    works, failure, pending = list(works), None, 0
    errors.nanoseconds(timeout, "timeout")
    until = None if timeout is None else time.monotonic() + timeout
    for work in works:
        try:
            work.wait(None if until is None else max(0, until - time.monotonic()))
        except errors.Error as error:
            failure = failure or error
        except TimeoutError:
            pending += 1
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # the error refers to this frame
    if pending:
        raise TimeoutError(f"weft: {pending} of {len(works)} calls are still pending after {timeout} s")
    return [work.wait() for work in works]


class _Awaited:
    """The driver's data of a Work: its handle, whether its call has ended, and what to call then (None:
    the coroutine was cancelled)."""
    __slots__ = ("handle", "ended", "tell")

    def __init__(self, handle, tell):
        self.handle, self.ended, self.tell = handle, threading.Event(), tell


class _Driver:
    """One thread that waits for the works that coroutines await, so that their calls go on. It alone uses
    such a Work until its call has ended.

    Works are Work's or weft.torch's: with _handle, _open(), _awaited (None at first), _end(status) and
    _broke(error)."""

    def __init__(self):
        self._works, self._more = [], threading.Condition()
        self._thread = None

    def add(self, work, tell):
        """Has `tell` called once the work has ended; False: it has already."""
        with self._more:
            awaited = work._awaited
            if awaited is not None:
                if awaited.ended.is_set():
                    return False
                if awaited.tell is not None:
                    raise errors.BadArgumentError("this Work is awaited already; expected one coroutine")
                awaited.tell = tell
                return True
            if work._handle is None:
                return False
            work._awaited = _Awaited(_hold([work])[0], tell)
            self._works.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="weft-await", daemon=True)
                self._thread.start()
            self._more.notify()
            return True

    def forget(self, work):
        """The coroutine that awaited it is gone. The driver goes on with it, and it may be awaited again."""
        with self._more:
            work._awaited.tell = None

    def _run(self):
        while True:
            with self._more:
                while not self._works:
                    if not self._more.wait(5):
                        self._thread = None
                        return
                works = list(self._works)
            ended = []
            # The thread that waits for the last one drives all of them meanwhile.
            for i, work in enumerate(works):
                if self._step(work, i == len(works) - 1 and not ended):
                    ended.append(work)
            with self._more:
                self._works = [w for w in self._works if w not in ended]
                tells = [w._awaited.tell for w in ended]
                for work in ended:
                    work._awaited.ended.set()
            for tell in tells:
                if tell is not None:
                    tell()

    @staticmethod
    def _step(work, waits):
        """Whether the work has ended. An error here is the work's failure, and never ends this thread."""
        handle = work._awaited.handle
        try:
            done = ctypes.c_bool()
            ref = ctypes.byref(done)
            status = _wait_for(handle, POLL_NS, ref, per_thread.ref) if waits else _done(handle, ref, per_thread.ref)
            if not status and not done:
                return False
            if work._handle is None:
                work._broke(errors.BadArgumentError("the Work was closed while a coroutine awaited it"))
            else:
                work._end(status)
        except BaseException as error:  # pylint: disable=broad-except
            work._broke(errors.caught(error))
        _let_go([handle])
        return True


_driver = _Driver()


async def _in_loop(work):
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def tell():
        try:
            loop.call_soon_threadsafe(lambda: ended.done() or ended.set_result(None))
        except RuntimeError:  # the loop is closed
            pass
    if _driver.add(work, tell):
        try:
            await ended
        except BaseException:  # cancelled
            _driver.forget(work)
            raise
    return work._ended()


def _after_fork():
    global _driver
    _driver = _Driver()


os.register_at_fork(after_in_child=_after_fork)
