"""Calls in flight as torch.distributed.Work, and weft's errors as torch's."""
import ctypes
import threading

import torch
import torch.distributed as dist

from .. import _calls, errors
from .._library import lib, per_thread
from ..work import SLICE_NS, _Driver
from . import interrupts

_wait_for, _done, _destroy = lib.work_wait_for, lib.work_done, lib.work_destroy
_fast_wait = _calls.wait
_c_bool, _byref = ctypes.c_bool, ctypes.byref
_new_work = dist._Work.__init__
# How long get_future waits for the call itself, where ranks have no core to spare for a thread that does.
EAGER_NS = 20_000_000


class BackendError(dist.DistBackendError, errors.Error):
    """A failure over weft, as torch's error: `code`, `op`, `call`, `ranks` and `quiesced` are weft's."""
    __init__ = errors.Error.__init__


class TimeoutError(BackendError, errors.TimeoutError):  # pylint: disable=redefined-builtin
    """The time-out passed."""


class PeerLostError(BackendError, errors.PeerLostError):
    """A rank died or left."""


class AbortedError(BackendError, errors.AbortedError):
    """The group was aborted."""


class MismatchError(BackendError, errors.MismatchError):
    """Ranks called different things."""


_AS_TORCH = {errors.TimeoutError: TimeoutError, errors.PeerLostError: PeerLostError, errors.AbortedError: AbortedError,
             errors.MismatchError: MismatchError, errors.SystemError: BackendError, errors.CorruptError: BackendError}


def as_torch(error):
    """An Error of weft's as torch's; what tells of a wrong argument stays what it is (ValueError)."""
    kind = _AS_TORCH.get(type(error))
    if kind is None:
        return error
    # Programs look for "Timed out" in torch's texts.
    text = f"weft: Timed out in {error.text}" if kind is TimeoutError else error.text
    made = kind(text, op=error.op, call=error.call, ranks=error.ranks, rank_count=error.rank_count, quiesced=error.quiesced)
    made.code = error.code
    return made


def last():
    """The error of the call that has just failed on this thread, as torch's."""
    return as_torch(errors.last())


def _how_it_ended(future, error):
    result = torch.futures.Future()

    def tell(_):
        failure = error()
        result.set_result(0 if failure is None else 1 if isinstance(failure, errors.TimeoutError) else 2)
    future.add_done_callback(tell)
    return result


class WeftWork(dist._Work):
    """A call in flight. Its backend keeps it, with its tensors, until the call has ended."""

    _error = _future = _promise = _ended = _after = _awaited = None
    _record = None  # of a profiler
    _is_recv, _source = False, -1
    _waited = False  # a thread is in wait(): until it has ended no other one looks at the call

    def __init__(self, backend, keep, result):
        _new_work(self)
        self._backend, self._handle, self._keep, self._result = backend, None, keep, result

    def wait(self, timeout=None):
        """Blocks until the call is done; raises its error. A timeout of zero is none."""
        if timeout is not None:
            errors.nanoseconds(timeout.total_seconds(), "timeout")
        self._waited = True
        try:
            if self._ended is not None:  # the driving thread has it
                if not self._ended.wait(timeout.total_seconds() if timeout else None):
                    raise self._late(timeout)
            elif self._handle is not None and _fast_wait is not None and timeout is None:
                self._end(0 if _fast_wait(self, False) else 1)
            elif self._handle is not None:
                done = _c_bool()
                if timeout is None and not _wait_for(self._handle, SLICE_NS, _byref(done), per_thread.ref) and done:
                    self._end(0)
                    if self._error is None:
                        return True
                    raise errors.again(self._error)
                left = int(timeout.total_seconds() * 1e9) if timeout else None
                while True:
                    limit = SLICE_NS if left is None else min(SLICE_NS, max(left, 1))
                    status = _wait_for(self._handle, limit, _byref(done), per_thread.ref)
                    if status or done:
                        self._end(status)
                        break
                    if left is not None:
                        left -= limit
                        if left <= 0:
                            raise self._late(timeout)
        except BaseException as why:
            self._waited = False
            if not isinstance(why, Exception):  # KeyboardInterrupt: the others hear of it now
                self._backend.interrupted()
            raise
        if self._error is not None:
            raise errors.again(self._error)
        return True

    def _late(self, timeout):
        return TimeoutError(f"the call is still pending after {timeout.total_seconds():g} s, the time-out given to wait()")

    def is_completed(self):
        if self._handle is not None and self._ended is None and not self._waited:
            done = _c_bool()
            status = _done(self._handle, _byref(done), per_thread.ref)
            if status or done:
                self._end(status)
        return self._handle is None

    def _end(self, status):
        """The call has ended: its error or what is left to do; its handle goes."""
        handle, self._handle = self._handle, None
        if status:
            self._error = last()
            if not self._error.quiesced:
                self._backend._unquiet.append(self._keep)
        else:
            if self._is_recv:
                source = ctypes.c_int32()
                if not lib.work_source(handle, _byref(source), None):
                    self._source = source.value
            if self._after is not None:
                try:
                    self._after()
                except BaseException as error:  # pylint: disable=broad-except
                    self._error = errors.caught(error)
        _destroy(handle)
        self._backend._pending.discard(self)
        self._keep = self._after = None
        if self._record is not None:
            self._record.end()
            self._record = None

    def is_success(self):
        return self.is_completed() and self._error is None

    def exception(self):
        return errors.again(self._error) if self.is_completed() and self._error is not None else None

    def result(self):
        return self._result

    def synchronize(self):
        self.wait()

    def _source_rank(self):
        return self._source

    source_rank = _source_rank

    def get_future(self):
        """A future of the list of tensors that the call writes."""
        if self._future is None:
            self._promise = promise = torch.futures.Future()
            # A Future's own set_exception() is seen by Python alone: to C++ the exception is a value, in
            # which DDP looks for tensors. An exception of then() is an error to both.
            self._future = promise.then(self._outcome)
            if self._handle is not None and not self._backend._threaded:
                done = _c_bool()
                status = _wait_for(self._handle, EAGER_NS, _byref(done), per_thread.ref)
                if status or done:
                    self._end(status)
            if self._handle is None:
                promise.set_result(None)
            else:
                self._ended = threading.Event()
                interrupts.watch(self)
                _drive(self)
        return self._future

    def _outcome(self, _):
        if self._error is not None:
            raise errors.again(self._error)
        return self._result

    def get_future_result(self):
        """A future of how the call ended: 0 well, 1 its time-out passed, 2 otherwise (torch's WorkResult)."""
        return _how_it_ended(self.get_future(), lambda: self._error)

    def _open(self):
        return self._handle

    def _broke(self, error):
        self._error = self._error or error

    def _told(self):
        interrupts.forget(self)
        self._ended.set()
        self._promise.set_result(None)


_driver = {}


def _drive(work):
    """A thread takes the call's steps from now on, and completes its future."""
    import os
    if os.getpid() not in _driver:
        _driver.clear()
        _driver[os.getpid()] = _Driver()
    _driver[os.getpid()].add(work, work._told)


class DoneWork(dist._Work):
    """A call that had nothing to do, or is a part of one that begins later (coalescing)."""

    def __init__(self, result):
        dist._Work.__init__(self)
        self._result = result

    def wait(self, timeout=None):
        return True

    def is_completed(self):
        return True

    is_success = is_completed

    def exception(self):
        return None

    def result(self):
        return self._result

    def synchronize(self):
        pass

    def _source_rank(self):
        return -1

    source_rank = _source_rank

    def get_future(self):
        future = torch.futures.Future()
        future.set_result(self._result)
        return future

    def get_future_result(self):
        return _how_it_ended(self.get_future(), lambda: None)
