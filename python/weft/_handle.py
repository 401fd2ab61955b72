"""Handles of the library as Python objects, and calls that block.

A handle is destroyed with its object; where calls that block still use it, by the last of them. In a child
made by fork() it is left alone: it is the parent's."""
import atexit
import ctypes
import os
import signal
import threading
import time

from . import errors
from ._library import lib

_lock = threading.RLock()
_in_use = {}  # handle -> [how many calls that block use it, what destroys it after them or None]
_generation = 0  # how often this process is a child made by fork() since the package was loaded


class Handle:
    """One handle. `_destroy` is the function of the library that ends it."""
    __slots__ = ("_handle", "_born", "__weakref__")
    _destroy = None

    def __init__(self, handle):
        """handle: its address, or a Made that has it."""
        self._born = _generation
        if isinstance(handle, Made):
            self._handle = handle.value  # no signal's handler runs between these two
            handle.value = None
        else:
            self._handle = handle

    def close(self):
        """Destroys the handle now, or after the calls that use it; a second time does nothing."""
        handle, self._handle = getattr(self, "_handle", None), None
        if handle and self._born == _generation:
            with _lock:
                uses = _in_use.get(handle)
                if uses is not None:
                    uses[1] = type(self)._destroy
                    return
            type(self)._destroy(handle)

    def _open(self):
        """The handle; an error once it is closed."""
        handle = self._handle
        if handle is None:
            raise errors.BadArgumentError(f"the {type(self).__name__} is closed; expected one that is open")
        return handle

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


class Made(ctypes.c_void_p):
    """Where a call writes the handle that it makes. Until somebody takes it, the handle ends with this
    object, and so does that of a call which was interrupted and ended later: the call's arguments held the
    object. `keep` lives as long."""

    def __init__(self, destroy, keep=None):
        super().__init__()
        self.destroy, self.born, self.keep = destroy, _generation, keep

    def take(self):
        """The handle, which is the caller's from now on; None: none was made. A Handle takes the Made
        itself."""
        handle, self.value = self.value, None
        return handle

    def __del__(self):
        handle = self.value
        if handle and self.born == _generation:
            self.value = None
            self.destroy(handle)


class _Interrupt(Handle):
    """Ends the waits of the thread that is attached to it, once."""
    __slots__ = ()
    _destroy = lib.interrupt_destroy

    def __init__(self):
        made = Made(lib.interrupt_destroy)
        errors.call(lib.interrupt_create, ctypes.byref(made))
        super().__init__(made)


class _Worker:
    """A thread that makes calls which block, so that the main thread hears of signals meanwhile. For one
    caller at a time."""

    def __init__(self):
        self._begin, self._end = threading.Semaphore(0), threading.Semaphore(0)
        self._task = self._failure = None
        self._left = False  # the waiting thread was interrupted: this thread ends after the call
        self._interrupt = _Interrupt()
        self._thread = threading.Thread(target=self._run, name="weft-blocking", daemon=True)
        self._thread.start()

    def _run(self):
        lib.interrupt_attach(self._interrupt._handle, None)
        while True:
            self._begin.acquire()
            if self._task is None:
                return
            function, args, _, used = self._task
            self._failure = None
            try:
                errors.call(function, *args)
            except BaseException as error:  # pylint: disable=broad-except
                self._failure = error.with_traceback(None)  # whose frames would hold the arguments
            self._task = function = args = _ = None
            _let_go(used)
            if self._left:
                return
            self._end.release()

    def call(self, *task):
        try:
            self._task = task
            self._begin.release()
            self._end.acquire()
        except BaseException:  # of a signal's handler
            self._left = True
            lib.interrupt_raise(self._interrupt._handle, None)
            self._begin.release()
            _ending.append(self._thread)
            self._thread.join(GIVES_UP)
            raise
        failure, self._failure = self._failure, None
        return failure


# Seconds: a call that is interrupted mostly ends within this time, and has notified the other ranks then.
GIVES_UP = 0.06
GIVES_UP_AT_EXIT = 2
_idle = []  # workers that wait for a task
_ending = []  # threads of workers whose calls were interrupted


@atexit.register
def _await_ending():
    """An interrupted call tells the other ranks before the process is gone."""
    until = time.monotonic() + GIVES_UP_AT_EXIT
    for thread in _ending:
        thread.join(max(0, until - time.monotonic()))


def _hold(objects):
    """The handles of some objects, which are not destroyed before _let_go."""
    with _lock:
        handles = [o._open() for o in objects]
        for handle in handles:
            _in_use.setdefault(handle, [0, None])[0] += 1
    return handles


def _let_go(handles):
    for handle in handles:
        with _lock:
            uses = _in_use[handle]
            uses[0] -= 1
            if uses[0]:
                continue
            del _in_use[handle]
        if uses[1] is not None:
            uses[1](handle)


def blocking(function, *args, keep=None, also=()):
    """function(*args, error), raising what it says. On the main thread a signal (Ctrl-C) interrupts the
    wait, and the call, which ends within some 20 ms: one that waits for ranks to meet, or in a store,
    gives up; a collective fails its group. Other ranks hear of it. Where that takes longer the call goes
    on in another thread, with all that its arguments refer to and with `keep`; what it has made then
    (Made) goes. An argument that is a Handle stands for its handle, which then lives until the call has
    ended, closed or not, as do those of `also`; a group, whose end is to end its calls, is given as the
    bare handle."""
    used = _hold([a for a in (*args, *also) if isinstance(a, Handle)])
    if used:
        handles = iter(used)
        args = tuple(next(handles) if isinstance(a, Handle) else a for a in args)
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) in (signal.SIG_DFL, signal.SIG_IGN, None):
        try:
            errors.call(function, *args)
        finally:
            _let_go(used)
        return
    _ending[:] = [thread for thread in _ending if thread.is_alive()]
    worker = _idle.pop() if _idle else _Worker()
    failure = worker.call(function, args, keep, used)
    _idle.append(worker)
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # the error refers to this frame


def _after_fork():
    global _generation, _lock
    _generation += 1
    _lock = threading.RLock()
    _in_use.clear()
    _idle.clear()
    _ending.clear()


os.register_at_fork(after_in_child=_after_fork)
