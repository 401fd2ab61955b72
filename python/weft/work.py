"""Calls in flight."""
import asyncio
import ctypes
import os
import threading

from . import _api, arrays, errors
from ._handle import Handle
from ._library import lib, per_thread

__all__ = ["Work", "wait_all"]

POLL_NS = 1_000_000  # how long whoever drives works that are awaited waits for one of them
SLICE_NS = 50_000_000  # how long the main thread waits inside of the library before Python sees signals
_wait, _wait_for, _destroy, _done = lib.work_wait, lib.work_wait_for, lib.work_destroy, lib.work_done
_main = threading.main_thread().ident
_ident = threading.get_ident


class Work(Handle):
    """A ticket for a call. It keeps the call's arrays alive; neither read nor write them until it is done.

    `wait()` gives the call's result; so does `await work`. A Work that goes before its call has ended aborts the group, for all ranks: nobody would know
    whether the memory is free. For one thread at a time.
    """
    __slots__ = ("_group", "_keep", "_result", "_failure", "_is_recv", "_awaited", "source", "_reduction")
    _destroy = _destroy

    def __init__(self, handle, group, keep, result, is_recv=False, reduction=None):
        Handle.__init__(self, handle)
        self._group, self._keep, self._result, self._failure = group, keep, result, None
        self._is_recv, self._reduction = is_recv, reduction
        self._awaited = False  # by a coroutine: then the thread that drives it alone may use it
        self.source = None  # of a recv that is done: the rank that sent

    def wait(self, timeout=None):
        """Blocks until the call is done, driving everything that this rank has in flight; its result: the array that was written, or None.

        timeout: seconds; builtins.TimeoutError after them, and the call is still pending. Raises the call's Error. Ctrl-C interrupts it.
        """
        if self._handle is None:
            return self._ended()
        if self._awaited:
            raise errors.BadArgumentError("this Work is awaited by a coroutine; expected it to end there")
        if timeout is None and _ident() != _main:
            self._end(_wait(self._handle, per_thread.ref))
            return self._ended()
        left = None if timeout is None else int(timeout * 1e9)
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
                    raise TimeoutError(f"weft: the call is still pending after {timeout} s")

    def done(self):
        """Whether the call has ended. Takes the next steps it can and never blocks; raises the call's Error."""
        if self._handle is not None:
            if self._awaited:
                return False
            done = ctypes.c_bool()
            status = _done(self._handle, ctypes.byref(done), per_thread.ref)
            if not status and not done:
                return False
            self._end(status)
        self._ended()
        return True

    def _end(self, status):
        """The call has ended: its error, its source; the handle goes, and the arrays that were kept."""
        if status:
            self._failure = errors.last()
            if not self._failure.quiesced and self._group is not None:
                self._group._unquiet.append(self._keep)
        elif self._is_recv:
            source = ctypes.c_int32()
            if not lib.work_source(self._handle, ctypes.byref(source), None):
                self.source = source.value
        handle, self._handle = self._handle, None
        _destroy(handle)
        if self._reduction is not None:
            self._failure = self._reduction._failed(self._group, self._failure)
        self._keep = self._group = None

    def _ended(self):
        if self._failure is not None:
            raise self._failure
        result = self._result
        if result is not None and type(result) in _MADE:
            result = self._result = arrays.finish(result)
        elif type(result) is list:
            result = self._result = [arrays.finish(r) for r in result]
        return result

    def __await__(self):
        return (yield from _in_loop(self).__await__())


_MADE = (arrays.Number, arrays._Foreign)


def wait_all(works):
    """Waits for all of them, of one group or of several, in any order; their results. Where some fail: the Error of the first in the list that did,
    after all have ended."""
    works, failure = list(works), None
    for work in works:
        try:
            work.wait()
        except errors.Error as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return [work.wait() for work in works]


class _Driver:
    """One thread that waits for the works that coroutines await, so that their calls go on. It alone uses such a Work until its call has ended."""

    def __init__(self):
        self._works, self._more = [], threading.Condition()  # (work, what to call with its status and error once it has ended)
        self._thread = None

    def add(self, work, tell):
        with self._more:
            self._works.append((work, tell))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="weft-await", daemon=True)
                self._thread.start()
            self._more.notify()

    def _run(self):
        done = ctypes.c_bool()
        ref = ctypes.byref(done)
        while True:
            with self._more:
                while not self._works:
                    if not self._more.wait(5):
                        self._thread = None
                        return
                works = list(self._works)
            ended = []
            for i, (work, tell) in enumerate(works):  # whoever waits for the last drives all of them meanwhile
                last = i == len(works) - 1 and not ended
                status = (_wait_for(work._handle, POLL_NS, ref, per_thread.ref) if last else _done(work._handle, ref, per_thread.ref))
                if status or done:
                    work._end(status)
                    ended.append((work, tell))
            with self._more:
                self._works = [w for w in self._works if w not in ended]
            for _, tell in ended:
                tell()


_driver = _Driver()


async def _in_loop(work):
    if work._handle is None:
        return work._ended()
    if work._awaited:
        raise errors.BadArgumentError("this Work is awaited already; expected one coroutine")
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def tell():
        try:
            loop.call_soon_threadsafe(lambda: ended.done() or ended.set_result(None))
        except RuntimeError:  # the loop is closed
            pass
    work._awaited = True
    _driver.add(work, tell)
    await ended
    return work._ended()


def _after_fork():
    global _driver
    _driver = _Driver()


os.register_at_fork(after_in_child=_after_fork)
