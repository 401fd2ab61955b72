"""How calls of torch.distributed begin: alone, by the compiled module where it reads the tensors, or
several as one (coalescing)."""
import ctypes
import threading

import torch
from torch.autograd import profiler as torch_profiler
from torch._C._distributed_c10d import Backend

from .. import _api, _calls, errors
from .._api import weft_call
from .._handle import Made
from .._library import lib, per_thread
from . import profiler
from .options import CallOptions
from .tensors import blocks, buffer
from .works import DoneWork, WeftWork, last

_byref, _addressof = ctypes.byref, ctypes.addressof
_fast_begin = _calls.begin
_calls.learn(torch.Tensor, False)
REDUCES = (_api.OP_ALL_REDUCE, _api.OP_REDUCE, _api.OP_REDUCE_SCATTER, _api.OP_REDUCE_SCATTER_V)
_BLANK = bytes(_api.make(weft_call))
given = threading.local()  # .work: the Work that the last operation of this thread gave


def give(work):
    given.work = work
    return work


class Calls(Backend):
    """A Backend whose operations begin calls of one group of weft's: that has `_group`, and `_handle`, its
    address until it is left."""

    def __init__(self, rank, size):
        super().__init__(rank, size)
        self._group = self._handle = None
        self._call_options = CallOptions()
        self._pending, self._unquiet = set(), []  # works in flight; memory that a failed call may still touch
        self._calls = None  # those that are coalesced
        self._sequence = 0

    def _begin(self, op, in_, out, options, keep, result, after=None, root=-1, peer=-1, in_blocks=None, out_blocks=None, names=("tensor", "tensor"),
               any_dense=False, tensors=None, recorded=False):
        """Begins a call on the tensors `in_` and `out` (None: the call has none), or keeps it until those
        that are coalesced begin together. `keep` lives until the call has ended, `result` is what its
        future gives; then `after` runs. `in_blocks`, `out_blocks`: elements of each rank, `keep` is then a
        list. `names`: of in_ and out, in errors. `any_dense`: the order of dimensions does not matter, as
        it is that of all ranks. `tensors`: what a profiler shows of it, where that is not in_ or out;
        `recorded`: it does already."""
        if torch_profiler._is_profiler_enabled and not recorded and self._calls is None:
            return self._recorded([(op, peer, profiler.shown(in_, out, tensors))], lambda: self._begin(
                op, in_, out, options, keep, result, after, root, peer, in_blocks, out_blocks, names, any_dense, tensors, True))
        if self._calls is None and in_blocks is None and _fast_begin is not None:
            work = self._work(keep, result, after, op == _api.OP_RECV)
            begun = _fast_begin(self._handle, op, in_, out, 0 if options is None else _addressof(options), root, peer, work)
            if begun:
                return self._started(work)
            self._pending.discard(work)
            if begun is not None:
                raise last()
        if self._handle is None:
            raise errors.BadArgumentError(f"{lib.op_name(op).decode()}: the group {self._group.name!r} has been shut down; expected one that runs")
        call = weft_call.from_buffer_copy(_BLANK)
        call.op, call.root, call.peer = op, root, peer
        if in_ is not None:
            call.in_ = buffer(in_, names[0], any_dense, op not in REDUCES)
        if out is not None:
            call.out = call.in_ if out is in_ else buffer(out, names[1], any_dense, op not in REDUCES)
        if options is not None:
            call.options = ctypes.pointer(options)
        if in_blocks is not None:
            call.in_blocks = blocks(in_blocks, keep)
        if out_blocks is not None:
            call.out_blocks = blocks(out_blocks, keep)
        if self._calls is not None:
            self._calls.append((call, keep, result, after, profiler.shown(in_, out, tensors)))
            return give(DoneWork(result))
        return self._submitted(lib.submit, (_byref(call),), keep, result, after, op == _api.OP_RECV)

    @staticmethod
    def _recorded(calls, begin):
        """The Work that `begin` gives, as events of a profiler that runs."""
        record = profiler.Record(calls)
        try:
            work = begin()
        except BaseException:
            record.end()
            raise
        record.follow(work)
        return work

    def _submitted(self, function, call, keep, result, after, is_recv=False):
        work, made = self._work(keep, result, after, is_recv), Made(lib.work_destroy, keep)
        if function(self._handle, *call, _byref(made), per_thread.ref):
            self._pending.discard(work)
            raise last()
        work._handle = made.value  # no signal's handler runs between these two
        made.value = None
        return self._started(work)

    def _work(self, keep, result, after, is_recv):
        """The Work of a call that is about to begin. It is kept from now on: a signal's handler may raise
        as soon as the call has begun."""
        work = WeftWork(self, keep, result)
        if after is not None:
            work._after = after
        if is_recv:
            work._is_recv = True
        self._pending.add(work)
        return work

    def _started(self, work):
        self._sequence += 1
        given.work = work
        pending = self._pending
        if len(pending) % 32 == 0:  # those that nobody waits for
            for old in list(pending):
                if not old._waited:  # by another thread
                    old.is_completed()
        return work

    # ---- several calls as one ----

    def _together(self, calls, recorded=False):
        if not calls:
            return give(DoneWork([]))
        if torch_profiler._is_profiler_enabled and not recorded:
            return self._recorded([(call.op, call.peer, tensors) for call, *_, tensors in calls], lambda: self._together(calls, True))
        array = (weft_call * len(calls))(*(call for call, *_ in calls))
        afters = [after for _, _, _, after, _ in calls if after is not None]

        def after_all():
            for after in afters:
                after()
        result = []
        for _, _, written, _, _ in calls:
            result += written
        return self._submitted(lib.coalesced, (array, len(calls)), [calls, array], result, after_all if afters else None)

    def start_coalescing(self):
        self._calls = []

    def give_up_coalescing(self):
        """Nothing of what was to begin together begins. Whether there was something."""
        calls, self._calls = self._calls, None
        return calls is not None

    def end_coalescing(self):
        calls, self._calls = self._calls, None
        return self._together(calls)

    def _many(self, begin, *lists):
        """One Work for `begin` of each of several tensors."""
        if self._calls is not None:
            for each in zip(*lists):
                begin(*each)
            return give(DoneWork(list(lists[0])))
        self.start_coalescing()
        try:
            for each in zip(*lists):
                begin(*each)
        finally:
            calls, self._calls = self._calls, None
        return self._together(calls)
