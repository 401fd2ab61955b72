"""Moves of tensors between ranks that are in flight: tickets of redistributions, of sharded parameters, and
of halos and windows. For one thread at a time."""
import asyncio
import ctypes

from .. import arrays, errors
from .._handle import Handle, blocking
from .._library import lib

__all__ = ["Exchange", "Transfer"]


class _Ticket(Handle):
    """It keeps the arrays alive. All ranks begin and finish tickets in the same order; one that is dropped
    before aborts its group, for all ranks."""
    __slots__ = ("_keep", "_result", "_failure")
    _done = _finish = None

    def __init__(self, handle, keep, result):
        Handle.__init__(self, handle)
        self._keep, self._result, self._failure = keep, result, None

    def done(self):
        """Whether `wait` has only later steps to wait for. Takes the next steps it can; never blocks."""
        if self._handle is None:
            return True
        done = ctypes.c_bool()
        errors.call(type(self)._done, self._handle, ctypes.byref(done))
        return done.value

    def wait(self):
        """Blocks until the result is written; the result. Raises the failure, each time that it is asked."""
        if self._handle is not None:
            try:
                blocking(type(self)._finish, self, keep=self._keep)
            except errors.Error as error:
                self._failure = error.with_traceback(None)
            # KeyboardInterrupt: the group fails, and the result was never written.
            except BaseException as why:
                self._failure = errors.AbortedError(f"the wait for this {type(self).__name__} was interrupted by {type(why).__name__}")
                raise
            finally:
                Handle.close(self)
                self._keep = None
            if self._failure is None:
                self._result = _finished(self._result)
        if self._failure is not None:
            raise errors.again(self._failure)
        return self._result

    def close(self):
        if self._handle is not None and self._failure is None:
            self._failure = errors.BadArgumentError(f"this {type(self).__name__} was closed before it was waited for")
        super().close()

    def __await__(self):
        return asyncio.get_running_loop().run_in_executor(None, self.wait).__await__()


def _finished(result):
    if isinstance(result, dict):
        return {name: arrays.finish(array) for name, array in result.items()}
    if isinstance(result, (list, tuple)):
        return type(result)(arrays.finish(array) for array in result)
    return arrays.finish(result)


class Transfer(_Ticket):
    """A redistribution in flight, or what ShardedParameters began: `wait()`, or `await`, gives the result."""
    __slots__ = ()
    _destroy, _done, _finish = lib.transfer_destroy, lib.transfer_done, lib.transfer_finish


class Exchange(_Ticket):
    """An exchange that a Halo or a Window has begun: `wait()`, or `await`, gives the arrays."""
    __slots__ = ()
    _destroy, _done, _finish = lib.exchange_destroy, lib.exchange_done, lib.exchange_finish
