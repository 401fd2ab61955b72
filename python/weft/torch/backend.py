"""The operations of torch.distributed over a group of weft's.

A Python subclass of torch's own Backend: C++ (DDP, functional collectives) reaches it through torch's trampoline, Python through the ProcessGroup of
process_group.py. Tensors are on the CPU and are used where they lie; lists of tensors that do not lie in a row go through one copy.
"""
import ctypes
from datetime import timedelta
import os

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, ReduceOp

from .. import _api, _calls, dtypes, errors
from .._api import weft_buffer, weft_call, weft_call_options
from .._library import lib, per_thread
from . import sparse
from .meeting import context, meet
from .works import DoneWork, PeerLostError, TimeoutError, WeftWork, as_torch, last  # pylint: disable=redefined-builtin

_byref, _addressof, _c_void_p, _all_reduce = ctypes.byref, ctypes.addressof, ctypes.c_void_p, lib.all_reduce
_fast_begin = _calls.begin
_calls.learn(torch.Tensor, False)
UNSET = timedelta(milliseconds=-1)
FOREVER_NS = 10 * 365 * 86400 * 10**9
_BLANK = bytes(_api.make(weft_call))
# By the number of ReduceOp.RedOpType: a list is looked up sooner than a dict of pybind's enumerators.
_OPS = [None] * 16
for _torch_op, _op in ((ReduceOp.SUM, _api.SUM), (ReduceOp.AVG, _api.AVG), (ReduceOp.PRODUCT, _api.PROD), (ReduceOp.MIN, _api.MIN), (ReduceOp.MAX, _api.MAX),
                       (ReduceOp.BAND, _api.BIT_AND), (ReduceOp.BOR, _api.BIT_OR), (ReduceOp.BXOR, _api.BIT_XOR),
                       (ReduceOp.PREMUL_SUM, _api.PREMUL_SUM)):
    _OPS[int(_torch_op)] = _op
_SUM = int(ReduceOp.SUM)
# Of truth values: what is true where the sum, the product, ... of zeros and ones is not 0.
_OF_BOOL = {_api.SUM: _api.LOGICAL_OR, _api.MAX: _api.LOGICAL_OR, _api.BIT_OR: _api.LOGICAL_OR, _api.PROD: _api.LOGICAL_AND, _api.MIN: _api.LOGICAL_AND,
            _api.BIT_AND: _api.LOGICAL_AND, _api.BIT_XOR: _api.LOGICAL_XOR}
_CODES = {}  # torch.dtype -> weft_dtype
_plain_options = {}  # (reduce op, tag) -> weft_call_options of these alone


def _code(tensor, name):
    code = _CODES.get(tensor.dtype)
    if code is None:
        code = dtypes.of_torch(tensor.dtype)
        if code is None:
            raise errors.UnsupportedError(f"{name} is of dtype {tensor.dtype}; expected one of {', '.join(dtypes.NAMES)}")
        _CODES[tensor.dtype] = code
    return code


def _is_dense(tensor):
    """Whether the elements lie in a row, in whatever order of dimensions."""
    expected = 1
    for stride, extent in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape) if n != 1):
        if stride != expected:
            return False
        expected *= extent
    return True


def buffer(tensor, name="tensor", any_dense=False):
    """A tensor's elements as they lie. `any_dense`: in whatever order of dimensions, where all ranks have the same."""
    if not tensor.is_cpu or tensor.is_sparse:
        raise errors.UnsupportedError(f"{name} is on {tensor.device}{' and sparse' if tensor.is_sparse else ''}; expected a dense tensor on cpu")
    if not tensor.is_contiguous() and not (any_dense and _is_dense(tensor)):
        raise errors.LayoutError(f"{name} is not contiguous; tensors must be contiguous: .contiguous() first")
    return weft_buffer(tensor.data_ptr(), tensor.numel(), _code(tensor, name), 0)


def _one(tensors, name="tensors"):
    if len(tensors) != 1:
        raise errors.BadArgumentError(f"{name} has {len(tensors)} tensors; expected 1")
    return tensors[0]


class BackendOptions(Backend.Options):
    """What init_process_group(..., pg_options=) may say: `transport`: "shm", "gloo", "mpi-openmpi", "mpi-mpich", None: shm where all ranks are on one
    host, else what "auto" chooses; `progress`: "thread" for a helper
    thread that carries on calls while the program computes, "caller" for none, None: a thread where this host has two cores for each rank."""

    def __init__(self, transport=None, progress=None, timeout=dist.default_pg_timeout):
        super().__init__("weft", timeout)
        self.transport, self.progress = transport, progress


class WeftBackend(Backend):
    """One rank's membership in a group. All ranks call collectives in the same order."""

    def __init__(self, place, rank, size, timeout, options, name, owns_place):
        super().__init__(rank, size)
        self._options, self._place, self._owns_place = options, place, owns_place
        self._rank, self._size = rank, size
        progress = getattr(options, "progress", None) or ("thread" if len(os.sched_getaffinity(0)) >= 2 * place.local_ranks else "caller")
        self._threaded = progress == "thread"
        self._group = context().group_in(place.store, rank, size, backend=getattr(options, "transport", None) or place.transport, name=name,
                                         process_rank=0, deadline=timeout.total_seconds() or FOREVER_NS / 1e9, progress=progress)
        self._handle = self._group._handle
        self._timeout, self._own_timeout = timeout, False  # whether it is another than the group was made with
        self._pending, self._unquiet, self._calls = set(), [], None
        self._latest = None  # the Work that the last operation gave
        self._sequence = 0

    # ---- what torch asks of a backend ----

    @property
    def options(self):
        return self._options

    @property
    def supports_splitting(self):
        return True

    @property
    def supports_coalescing(self):
        return True

    def getBackendName(self):
        return "weft"

    def _set_sequence_number_for_group(self):
        pass

    def _get_sequence_number_for_group(self):
        return self._sequence

    def set_timeout(self, timeout):
        self._timeout, self._own_timeout = timeout, True
        self._options._timeout = timeout

    def get_error(self):
        return super().get_error()

    def shutdown(self):
        """Leaves the group, once what is in flight has ended or failed."""
        for work in list(self._pending):
            try:
                work.wait()
            except errors.Error:
                pass
        self._close()

    def _close(self):
        self._handle = None
        self._group.close()
        if self._owns_place:
            self._place.close()

    def abort(self):
        """Fails every pending and later call of every rank."""
        if self._handle is not None:
            self._group.abort(f"rank {self._rank} called abort()")

    def split(self, store, ranks, opts):
        if self._rank not in ranks:
            return None
        options = opts if opts is not None else self._options
        made = _joined(self._place, store, list(ranks).index(self._rank), len(ranks), getattr(options, "_timeout", self._timeout), options,
                       getattr(options, "group_name", "") or f"split of {self._group.name}", ranks, self)
        return made

    def merge(self, store, opts, rank, size):
        return WeftBackend(meet(store, rank, size, None), rank, size, opts._timeout, opts, getattr(opts, "group_name", "") or "merged", True)

    # ---- calls ----

    def _call_options(self, op, timeout, tag=0, scale=0.0):
        """A weft_call_options; None for the defaults."""
        if timeout == UNSET and not self._own_timeout and not scale:
            if op == _api.SUM and not tag:
                return None
            made = _plain_options.get((op, tag))
            if made is not None:
                return made
        made = _api.make(weft_call_options)
        made.reduce_op, made.tag, made.scale = op, tag, scale
        if timeout == UNSET and self._own_timeout:
            timeout = self._timeout
        if timeout != UNSET:
            made.deadline_ns = int(timeout.total_seconds() * 1e9) or FOREVER_NS
        elif not scale:
            _plain_options[op, tag] = made
        return made

    def _reduction(self, opts, tensor):
        """The weft_call_options of a reduction."""
        reduce_op = opts.reduceOp
        if tensor.dtype is not torch.bool and not self._own_timeout and opts.timeout == UNSET and int(reduce_op.op) == _SUM:
            return None
        op, scale = _OPS[int(reduce_op.op)], 0.0
        if op == _api.PREMUL_SUM:
            factor = reduce_op.factor
            scale = float(factor.item() if isinstance(factor, torch.Tensor) else factor)
        elif tensor.dtype is torch.bool:
            op = _OF_BOOL.get(op, op)
        return self._call_options(op, opts.timeout, scale=scale)

    def _begin(self, op, in_, out, options, keep, result, after=None, root=-1, peer=-1, in_blocks=None, out_blocks=None):
        """Begins a call, or keeps it until those that are coalesced begin together."""
        if self._handle is None:
            raise errors.BadArgumentError(f"{lib.op_name(op).decode()}: the group {self._group.name!r} has been shut down; expected one that runs")
        call = weft_call.from_buffer_copy(_BLANK)
        call.op, call.root, call.peer = op, root, peer
        if in_ is not None:
            call.in_ = in_
        if out is not None:
            call.out = out
        if options is not None:
            call.options = ctypes.pointer(options)
        if in_blocks is not None:
            call.in_blocks = _blocks(in_blocks, keep)
        if out_blocks is not None:
            call.out_blocks = _blocks(out_blocks, keep)
        if self._calls is not None:
            self._calls.append((call, keep, result, after))
            self._latest = DoneWork(result)
            return self._latest
        handle = ctypes.c_void_p()
        if lib.submit(self._handle, _byref(call), _byref(handle), per_thread.ref):
            raise last()
        return self._started(handle.value, keep, result, after, op == _api.OP_RECV)

    def _started(self, handle, keep, result, after, is_recv=False):
        self._sequence += 1
        work = self._latest = WeftWork(self, handle, keep, result)
        if after is not None:
            work._after = after
        if is_recv:
            work._is_recv = True
        pending = self._pending
        pending.add(work)
        if len(pending) % 32 == 0:  # those that nobody waits for
            for old in list(pending):
                old.is_completed()
        return work

    def _together(self, calls):
        """Begins several calls as one."""
        array = (weft_call * max(1, len(calls)))(*(call for call, _, _, _ in calls))
        handle = ctypes.c_void_p()
        if lib.coalesced(self._handle, array, len(calls), _byref(handle), per_thread.ref):
            raise last()
        afters = [after for _, _, _, after in calls if after is not None]

        def after_all():
            for after in afters:
                after()
        result = []
        for _, _, written, _ in calls:
            result += written
        return self._started(handle.value, [calls, array], result, after_all if afters else None)

    def start_coalescing(self):
        self._calls = []

    def end_coalescing(self):
        calls, self._calls = self._calls or [], None
        if not calls:
            self._latest = DoneWork([])
            return self._latest
        return self._together(calls)

    def _many(self, begin, *lists):
        """One Work for `begin` of each of several tensors."""
        if self._calls is not None:
            for each in zip(*lists):
                begin(*each)
            self._latest = DoneWork(list(lists[0]))
            return self._latest
        self.start_coalescing()
        try:
            for each in zip(*lists):
                begin(*each)
        finally:
            calls, self._calls = self._calls, None
        if not calls:
            self._latest = DoneWork([])
            return self._latest
        return self._together(calls)

    # ---- operations; their names and arguments are torch's ----

    def allreduce(self, tensors, opts):
        if len(tensors) != 1:
            return self._many(lambda tensor: self.allreduce([tensor], opts), tensors)
        tensor = tensors[0]
        if _fast_begin is not None and self._calls is None:  # the shortest way: it is called most
            options = self._reduction(opts, tensor)
            handle = _fast_begin(self._handle, _api.OP_ALL_REDUCE, tensor, tensor, 0 if options is None else _addressof(options), -1, -1)
            if handle:
                return self._started(handle, tensor, tensors, None)
            if handle is not None:
                raise last()
        if tensor.is_sparse:
            return sparse.all_reduce(self, tensor, opts)
        data = buffer(tensor, any_dense=True)
        if self._calls is None and self._handle is not None:
            options, handle = self._reduction(opts, tensor), _c_void_p()
            data_ref = _byref(data)
            if _all_reduce(self._handle, data_ref, data_ref, options, _byref(handle), per_thread.ref):
                raise last()
            return self._started(handle.value, tensor, tensors, None)
        return self._begin(_api.OP_ALL_REDUCE, data, data, self._reduction(opts, tensor), tensor, [tensor])

    def allreduce_sparse(self, tensors, opts):
        return sparse.all_reduce(self, _one(tensors), opts)

    def allreduce_coalesced(self, tensors, opts):
        return self._many(lambda tensor: self.allreduce([tensor], opts), tensors)

    def reduce(self, tensors, opts):
        tensor = _one(tensors)
        data = buffer(tensor, any_dense=True)
        return self._begin(_api.OP_REDUCE, data, data, self._reduction(opts, tensor), tensor, [tensor], root=opts.rootRank)

    def broadcast(self, tensors, opts):
        if len(tensors) != 1:
            return self._many(lambda tensor: self.broadcast([tensor], opts), tensors)
        data = buffer(tensors[0], any_dense=True)
        return self._begin(_api.OP_BROADCAST, data, data, self._call_options(_api.SUM, opts.timeout), tensors[0], [tensors[0]], root=opts.rootRank)

    def allgather(self, output_lists, inputs, opts):
        if len(inputs) != 1:
            return self._many(lambda outputs, tensor: self.allgather([outputs], [tensor], opts), output_lists, inputs)
        outputs, tensor = _one(output_lists, "output_tensors"), inputs[0]
        self._expect_all(outputs, tensor, "output_tensors")
        flat, after = _gathered_into(outputs, self._size)
        tensor = tensor.contiguous()
        return self._begin(_api.OP_ALL_GATHER, buffer(tensor), buffer(flat), self._call_options(_api.SUM, opts.timeout), (tensor, flat, outputs), outputs,
                           after)

    def all_gather_single(self, output, tensor, opts):
        _expect_size(output, tensor.numel() * self._size, "output", "elements of input x ranks")
        return self._begin(_api.OP_ALL_GATHER, buffer(tensor, "input"), buffer(output, "output"), self._call_options(_api.SUM, opts.timeout),
                           (tensor, output), [output])

    def allgather_coalesced(self, output_lists, inputs, opts):
        """output_lists[r] is of rank r: a tensor for each of the inputs."""
        if len(output_lists) != self._size:
            raise errors.BadArgumentError(f"output_lists has {len(output_lists)} lists; expected {self._size}, one for each rank")
        if any(len(outputs) != len(inputs) for outputs in output_lists):
            raise errors.BadArgumentError(f"invalid argument: length of output lists should match length of input list, {len(inputs)}")
        return self._many(lambda outputs, tensor: self.allgather([list(outputs)], [tensor], opts), list(zip(*output_lists)), inputs)

    def all_gather_single_coalesced(self, outputs, inputs, opts):
        return self._many(lambda output, tensor: self.all_gather_single(output, tensor, opts), outputs, inputs)

    def gather(self, output_lists, inputs, opts):
        tensor, flat, after, outputs = _one(inputs, "input_tensors").contiguous(), None, None, []
        if self._rank == opts.rootRank:
            outputs = _one(output_lists, "output_tensors")
            self._expect_all(outputs, tensor, "output_tensors")
            flat, after = _gathered_into(outputs, self._size)
        elif output_lists:
            raise errors.BadArgumentError(f"gather: output_tensors is given on rank {self._rank}, which is not root {opts.rootRank}; expected none")
        return self._begin(_api.OP_GATHER, buffer(tensor), None if flat is None else buffer(flat), self._call_options(_api.SUM, opts.timeout),
                           (tensor, flat, outputs), outputs, after, root=opts.rootRank)

    def gather_single(self, output, tensor, opts):
        root = self._rank == opts.rootRank
        return self._begin(_api.OP_GATHER, buffer(tensor, "input"), buffer(output, "output") if root else None,
                           self._call_options(_api.SUM, opts.timeout), (tensor, output), [output] if root else [], root=opts.rootRank)

    def scatter(self, outputs, input_lists, opts):
        output, flat = _one(outputs, "output_tensors"), None
        if self._rank == opts.rootRank:
            inputs = _one(input_lists, "input_tensors")
            self._expect_all(inputs, output, "input_tensors")
            flat = _in_a_row(inputs)
        elif input_lists:
            raise errors.BadArgumentError(f"scatter: input_tensors is given on rank {self._rank}, which is not root {opts.rootRank}; expected none")
        return self._begin(_api.OP_SCATTER, None if flat is None else buffer(flat), buffer(output), self._call_options(_api.SUM, opts.timeout),
                           (output, flat), [output], root=opts.rootRank)

    def reduce_scatter(self, outputs, input_lists, opts):
        if len(outputs) != 1:
            return self._many(lambda output, inputs: self.reduce_scatter([output], [inputs], opts), outputs, input_lists)
        output, inputs = outputs[0], _one(input_lists, "input_tensors")
        if len(inputs) != self._size:
            raise errors.BadArgumentError(f"input_tensors has {len(inputs)} tensors; expected {self._size}, one for each rank")
        counts = [tensor.numel() for tensor in inputs]
        if output.numel() != counts[self._rank]:
            raise errors.BadArgumentError(f"output has {output.numel()} elements; expected {counts[self._rank]}, those of input {self._rank}")
        flat = _in_a_row(inputs)
        uneven = min(counts) != max(counts)
        return self._begin(_api.OP_REDUCE_SCATTER_V if uneven else _api.OP_REDUCE_SCATTER, buffer(flat), buffer(output), self._reduction(opts, output),
                           [output, flat], [output], in_blocks=counts if uneven else None)

    def reduce_scatter_single(self, output, tensor, opts):
        _expect_size(tensor, output.numel() * self._size, "input", "elements of output x ranks")
        return self._begin(_api.OP_REDUCE_SCATTER, buffer(tensor, "input"), buffer(output, "output"), self._reduction(opts, output), (tensor, output),
                           [output])

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts):
        return self._many(lambda output, tensor: self.reduce_scatter_single(output, tensor, opts), outputs, inputs)

    def all_to_all_single(self, output, tensor, output_sizes, input_sizes, opts):
        options, keep = self._call_options(_api.SUM, opts.timeout), [tensor, output]
        if not output_sizes and not input_sizes:
            for name, each in (("input", tensor), ("output", output)):
                if each.dim() and each.size(0) % self._size:
                    raise errors.BadArgumentError(f"{name} has {each.size(0)} rows; expected a number that {self._size} (group size) divides")
            return self._begin(_api.OP_ALL_TO_ALL, buffer(tensor, "input"), buffer(output, "output"), options, keep, [output])
        counts = [_split(tensor, input_sizes, self._size, "input"), _split(output, output_sizes, self._size, "output")]
        return self._begin(_api.OP_ALL_TO_ALL_V, buffer(tensor, "input"), buffer(output, "output"), options, keep, [output], in_blocks=counts[0],
                           out_blocks=counts[1])

    def alltoall(self, outputs, inputs, opts):
        for name, tensors in (("output_tensors", outputs), ("input_tensors", inputs)):
            if len(tensors) != self._size:
                raise errors.BadArgumentError(f"{name} has {len(tensors)} tensors; expected {self._size}, one for each rank")
        flat_in = _in_a_row(inputs)
        flat_out, after = _gathered_into(outputs, self._size)
        return self._begin(_api.OP_ALL_TO_ALL_V, buffer(flat_in), buffer(flat_out), self._call_options(_api.SUM, opts.timeout),
                           [flat_in, flat_out, outputs], outputs, after, in_blocks=[t.numel() for t in inputs], out_blocks=[t.numel() for t in outputs])

    def send(self, tensors, destination, tag=0):
        tensor = _one(tensors)
        return self._begin(_api.OP_SEND, buffer(tensor, any_dense=True), None, self._call_options(_api.SUM, UNSET, tag), tensor, [tensor], peer=destination)

    def recv(self, tensors, source, tag=0):
        tensor = _one(tensors)
        return self._begin(_api.OP_RECV, None, buffer(tensor, any_dense=True), self._call_options(_api.SUM, UNSET, tag), tensor, [tensor], peer=source)

    def recv_anysource(self, tensors, tag=0):
        return self.recv(tensors, _api.ANY_SOURCE, tag)

    def barrier(self, opts):
        return self._begin(_api.OP_BARRIER, None, None, self._call_options(_api.SUM, opts.timeout), None, [])

    def monitored_barrier(self, opts, wait_all_ranks=False):
        """A barrier that tells who did not come, in torch's words and then in weft's. Afterwards the group has failed, as after any time-out."""
        limit = self._timeout if opts.timeout == UNSET else opts.timeout
        within = f"in {limit.total_seconds() * 1000:g} ms"
        if not limit:  # elsewhere a time-out of zero is none
            raise TimeoutError(f"Rank {self._rank} timed out in monitoredBarrier {within}", op="barrier")
        try:
            self.barrier(opts).wait()
        except (TimeoutError, PeerLostError) as error:
            absent = sorted(error.ranks)
            if self._rank:
                said = f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0"
            elif wait_all_ranks or not absent:
                said = f"Ranks {', '.join(map(str, absent))} failed to pass monitoredBarrier {within}"
            else:
                said = f"Rank {absent[0]} failed to pass monitoredBarrier {within}"
            raise type(error)(f"{said}: {error.text}", op=error.op, call=error.call, ranks=error.ranks, rank_count=error.rank_count,
                              quiesced=error.quiesced) from error

    def _wait_for_pending_works(self):
        for work in list(self._pending):
            work.wait()

    # ---- helpers ----

    def _expect_all(self, tensors, like, name):
        if len(tensors) != self._size:
            raise errors.BadArgumentError(f"{name} has {len(tensors)} tensors; expected {self._size}, one for each rank")
        for i, tensor in enumerate(tensors):
            if tensor.numel() != like.numel() or tensor.dtype != like.dtype:
                raise errors.BadArgumentError(f"{name}[{i}] has {tensor.numel()} elements of {tensor.dtype}; expected {like.numel()} of {like.dtype}: "
                                              "tensors of all ranks have the same size and dtype")


def _expect_size(tensor, count, name, reached):
    if tensor.numel() != count:
        raise errors.BadArgumentError(f"{name} has {tensor.numel()} elements; expected {count}: {reached}")


def _split(tensor, sizes, ranks, name):
    """Elements for each rank of a tensor that is cut along its first dimension."""
    rows = tensor.size(0) if tensor.dim() else 1
    if not sizes:
        if rows % ranks:
            raise errors.BadArgumentError(f"{name} has {rows} rows; expected a number that {ranks} (group size) divides, or split sizes")
        sizes = [rows // ranks] * ranks
    if len(sizes) != ranks:
        raise errors.BadArgumentError(f"{name}_split_sizes has {len(sizes)} numbers; expected {ranks}, one for each rank")
    if sum(sizes) != rows:
        raise errors.BadArgumentError(f"{name}_split_sizes adds up to {sum(sizes)}; expected {rows}, the rows of {name}")
    row = tensor.numel() // rows if rows else 0
    return [size * row for size in sizes]


def _blocks(counts, keep):
    array = (ctypes.c_int64 * len(counts))(*counts)
    keep.append(array)
    return _api.weft_blocks(ctypes.cast(array, ctypes.POINTER(ctypes.c_int64)), None, len(counts))


def _row_of(tensors):
    """One tensor over the memory of several that follow one another in one storage; None where they do not."""
    first = tensors[0]
    storage, offset = first.untyped_storage().data_ptr(), first.storage_offset()
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.storage_offset() != offset or tensor.untyped_storage().data_ptr() != storage or tensor.dtype != first.dtype:
            return None
        offset += tensor.numel()
    return first.detach().as_strided((offset - first.storage_offset(),), (1,), first.storage_offset())


def _in_a_row(tensors):
    row = _row_of(tensors)
    return row if row is not None else torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _gathered_into(outputs, ranks):
    """(where blocks of all ranks go, what then brings them to `outputs`)."""
    row = _row_of(outputs)
    if row is not None:
        return row, None
    counts = [tensor.numel() for tensor in outputs]
    flat = torch.empty(sum(counts), dtype=outputs[0].dtype)

    def after():
        with torch.no_grad():
            for tensor, part in zip(outputs, flat.split(counts)):
                tensor.detach().copy_(part.view(tensor.shape))
    del ranks
    return flat, after


def _default_backend():
    """The WeftBackend of the default group, where it has one."""
    if not dist.is_initialized():
        return None
    try:
        backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    except RuntimeError:
        return None
    return backend if isinstance(backend, WeftBackend) and backend._handle is not None else None


def _joined(place, store, rank, size, timeout, options, name, ranks, parent):
    del store, parent, ranks
    return WeftBackend(place, rank, size, timeout, options, name, False)


def create(opts, options=None):
    """What torch calls for init_process_group("weft") and new_group(backend="weft")."""
    from .process_group import WeftProcessGroup
    timeout = opts.timeout if isinstance(opts.timeout, timedelta) else timedelta(seconds=float(opts.timeout))
    if options is None:
        options = BackendOptions(timeout=timeout)
    elif not isinstance(options, Backend.Options):
        raise errors.BadArgumentError(f"pg_options is of type {type(options).__name__}; expected weft.torch.BackendOptions")
    options._timeout = timeout
    options.global_ranks_in_group = opts.global_ranks_in_group
    options.group_name = opts.group_id
    parent = _default_backend() if opts.global_ranks_in_group else None
    try:
        place = parent._place if parent is not None else meet(opts.store, opts.group_rank, opts.group_size, timeout.total_seconds() or None)
        backend = WeftBackend(place, opts.group_rank, opts.group_size, timeout, options, f"torch {opts.group_id}", parent is None)
    except errors.Error as error:
        raise as_torch(error) from error
    return WeftProcessGroup.around(backend, opts)
