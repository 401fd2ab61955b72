"""Handles of the library as Python objects, and calls that block.

A handle is destroyed with its object. In a child made by fork() it is left alone: it is the parent's."""
import os
import signal
import threading

from . import errors
from ._library import per_thread

_generation = 0  # how often this process is a child made by fork() since the package was loaded


class Handle:
    """One handle. `_destroy` is the function of the library that ends it."""
    __slots__ = ("_handle", "_born", "__weakref__")
    _destroy = None

    def __init__(self, handle):
        self._handle = handle
        self._born = _generation

    def close(self):
        """Destroys the handle now; a second time does nothing."""
        handle, self._handle = getattr(self, "_handle", None), None
        if handle and self._born == _generation:
            type(self)._destroy(handle)

    def __del__(self, close=close):
        try:
            close(self)
        except (TypeError, AttributeError):  # the interpreter ends, and modules are gone
            pass

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __reduce__(self):
        raise TypeError(f"weft: a {type(self).__name__} cannot be pickled or copied: it belongs to this process")


class _Worker:
    """A thread that makes calls which block, so that the main thread hears of signals meanwhile. For one caller at a time."""

    def __init__(self):
        self._begin, self._end = threading.Semaphore(0), threading.Semaphore(0)
        self._task = self._failure = None
        threading.Thread(target=self._run, name="weft-blocking", daemon=True).start()

    def _run(self):
        while True:
            self._begin.acquire()
            function, args = self._task
            self._failure = errors.last() if function(*args, per_thread.ref) else None
            self._task = function = args = None
            self._end.release()

    def call(self, function, args):
        self._task = function, args
        self._begin.release()
        self._end.acquire()  # a signal's handler may raise here: then this worker is of no more use
        failure, self._failure = self._failure, None
        return failure


_idle = []  # workers that wait for a task


def blocking(function, *args):
    """function(*args, error), raising what it says. On the main thread a signal (Ctrl-C) interrupts the wait; the call goes on in another thread,
    with all that its arguments refer to, until it ends by itself or its group is destroyed."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) in (signal.SIG_DFL, signal.SIG_IGN, None):
        errors.call(function, *args)
        return
    worker = _idle.pop() if _idle else _Worker()
    failure = worker.call(function, args)
    _idle.append(worker)
    if failure is not None:
        raise failure


def _after_fork():
    global _generation
    _generation += 1
    _idle.clear()


os.register_at_fork(after_in_child=_after_fork)
