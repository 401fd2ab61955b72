"""Ctrl-C in calls of torch's: the group fails, for all ranks, as nobody could go on with a call that one
of them has left.

In `wait()` of a Work the exception of the signal's handler comes through. While the main thread is inside
of torch (the wait() of a Future, DDP's backward) no handler of Python's can run: a thread reads the
numbers of signals from a pipe then, fails the groups of the calls that futures stand for, and so ends that
wait."""
import os
import signal
import threading

_in_flight = set()  # works whose futures somebody may wait for
_pipe = {}  # process id -> (read end, write end); a child made by fork() has its own


def watch(work):
    """Until forget(). From the main thread; from others the thread learns of no signals by it."""
    _in_flight.add(work)
    if threading.get_ident() != threading.main_thread().ident:
        return
    if os.getpid() not in _pipe:
        _pipe.clear()
        _pipe[os.getpid()] = read, write = os.pipe()
        os.set_blocking(write, False)
        threading.Thread(target=_read, args=(read,), name="weft-signals", daemon=True).start()
    write = _pipe[os.getpid()][1]
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    if before not in (-1, write):  # asyncio's, say: it keeps it
        signal.set_wakeup_fd(before)


def forget(work):
    _in_flight.discard(work)


def _read(pipe):
    while True:
        numbers = os.read(pipe, 64)
        # A handler of the program's own may mean to go on.
        if signal.SIGINT in numbers and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            for backend in {work._backend for work in list(_in_flight)}:
                backend.interrupted()


def _after_fork():
    """A signal of the child is not the parent's, whose pipe the child has, too."""
    _in_flight.clear()
    if _pipe:
        before = signal.set_wakeup_fd(-1)
        if before not in (-1, next(iter(_pipe.values()))[1]):
            signal.set_wakeup_fd(before)


os.register_at_fork(after_in_child=_after_fork)
