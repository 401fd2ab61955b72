"""The options of a group of torch's, and of each of its calls."""
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, ReduceOp

from .. import _api, errors
from .._api import weft_call_options

UNSET = timedelta(milliseconds=-1)  # torch's word for the group's own time-out
FOREVER_NS = 10 * 365 * 86400 * 10**9
# By the number of ReduceOp.RedOpType: a list is looked up sooner than a dict of pybind's enumerators.
_OPS = [None] * 16
for _torch_op, _op in ((ReduceOp.SUM, _api.SUM), (ReduceOp.AVG, _api.AVG), (ReduceOp.PRODUCT, _api.PROD), (ReduceOp.MIN, _api.MIN), (ReduceOp.MAX, _api.MAX),
                       (ReduceOp.BAND, _api.BIT_AND), (ReduceOp.BOR, _api.BIT_OR), (ReduceOp.BXOR, _api.BIT_XOR),
                       (ReduceOp.PREMUL_SUM, _api.PREMUL_SUM)):
    _OPS[int(_torch_op)] = _op
# Truth values are combined so: the result is true if the sum, the product, ... of zeros and ones is not 0.
_OF_BOOL = {_api.SUM: _api.LOGICAL_OR, _api.MAX: _api.LOGICAL_OR, _api.BIT_OR: _api.LOGICAL_OR, _api.PROD: _api.LOGICAL_AND, _api.MIN: _api.LOGICAL_AND,
            _api.BIT_AND: _api.LOGICAL_AND, _api.BIT_XOR: _api.LOGICAL_XOR}
_plain = {}  # (reduce op, tag) -> weft_call_options of these alone


class BackendOptions(Backend.Options):
    """The options of init_process_group(..., pg_options=): `transport`: "shm", "gloo", "mpi-openmpi",
    "mpi-mpich", None: shm where all ranks are on one host, else what "auto" chooses; `progress`: "thread"
    for a helper thread that carries on calls while the program computes, "caller" for none, None: a thread
    where this host has two cores for each rank."""

    def __init__(self, transport=None, progress=None, timeout=dist.default_pg_timeout):
        super().__init__("weft", timeout)
        self.transport, self.progress = transport, progress


class CallOptions:
    """Makes the weft_call_options of a group's calls; None for the defaults."""

    own_timeout = None  # a timedelta where it is another than the group was made with

    def of(self, timeout, op=_api.SUM, tag=0, scale=0.0):
        """The options of a call with a time-out, a reduction, a tag and a factor (premul_sum)."""
        if timeout == UNSET and self.own_timeout is None and not scale:
            if op == _api.SUM and not tag:
                return None
            made = _plain.get((op, tag))
            if made is not None:
                return made
        made = _api.make(weft_call_options)
        made.reduce_op, made.tag, made.scale = op, tag, scale
        if timeout == UNSET and self.own_timeout is not None:
            timeout = self.own_timeout
        if timeout != UNSET:
            made.deadline_ns = errors.nanoseconds(timeout.total_seconds(), "timeout") or FOREVER_NS
        elif not scale:
            _plain[op, tag] = made
        return made

    def of_reduction(self, opts, tensor):
        """The options of weft for torch's options of a reduction of such a tensor."""
        reduce_op = opts.reduceOp
        op, scale = _OPS[int(reduce_op.op)], 0.0
        if op == _api.PREMUL_SUM:
            factor = reduce_op.factor
            scale = float(factor.item() if isinstance(factor, torch.Tensor) else factor)
        elif tensor.dtype is torch.bool:
            op = _OF_BOOL.get(op, op)
        return self.of(opts.timeout, op, scale=scale)
