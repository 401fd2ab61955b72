"""Calls as events of torch's profiler, as torch's own backends have them: weft:all_reduce and its like, from
the beginning of a call to its end, with the shapes of its tensors. Nothing here runs unless a profiler
does."""
import itertools
import threading

import torch
from torch._C import _autograd

from .. import _api
from .._library import lib

_NAMES = {_api.OP_ALL_GATHER_V: "all_gather", _api.OP_REDUCE_SCATTER_V: "reduce_scatter", _api.OP_ALL_TO_ALL_V: "all_to_all"}
_enter = _autograd._record_function_with_args_enter
_end_with = torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction
_numbers = itertools.count(1)
_in_flight = {}  # number -> a Record whose call a helper thread may end
_lock = threading.Lock()


class Record:
    """Events of one Work that has begun: one for each operation of its calls."""

    def __init__(self, calls):
        """calls: (op, peer, tensors) of each."""
        tensors = {}
        for op, peer, each in calls:
            name = "recvAnySource" if op == _api.OP_RECV and peer == _api.ANY_SOURCE else _NAMES.get(op) or lib.op_name(op).decode()
            tensors.setdefault(name, []).extend(each)
        self._thread = threading.get_ident()
        # The event of a thread's profiler ends in another thread where torch brings that profiler's state
        # there: as futures do.
        self._ended = [torch.futures.Future() for _ in tensors]
        for ended, (name, each) in zip(self._ended, tensors.items()):
            _end_with(_enter(f"weft:{name}", *each), ended)

    def follow(self, work):
        """Ends with the call of the Work: in the helper thread, where there is one, else once somebody
        asks for it."""
        work._record = self
        if work._backend._threaded and work._handle is not None:
            number = next(_numbers)
            _in_flight[number] = self
            if lib.work_then(work._handle, _THEN, number, None):
                del _in_flight[number]

    def end(self):
        """A second time does nothing. An event that ends in another thread than that in which it began is
        one that ran beside it (is_async)."""
        if threading.get_ident() == self._thread:
            try:
                thread = threading.Thread(target=self._end)
                thread.start()
            except RuntimeError:  # no thread is to be had
                self._end()
            else:
                thread.join()
        else:
            self._end()

    def _end(self):
        with _lock:
            futures, self._ended = self._ended, []
            for ended in futures:
                ended.set_result(None)


def _then(number, _):
    record = _in_flight.pop(number, None)
    if record is not None:
        record.end()


_THEN = _api.weft_work_callback(_then)


def shown(in_, out, tensors):
    """The tensors of a call that its event shows: those that were given, or else what it reads, or writes."""
    if tensors is not None:
        return list(tensors)
    return [in_] if in_ is not None else [out] if out is not None else []
