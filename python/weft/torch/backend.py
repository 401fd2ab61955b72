"""The operations of torch.distributed over a group of weft's.

A Python subclass of torch's own Backend: C++ (DDP, functional collectives) reaches it through torch's
trampoline, Python through the ProcessGroup of process_group.py. Tensors are on the CPU and are used where
they lie.
"""
import os

from .. import _api, errors
from . import sparse
from .calls import Calls
from .meeting import context, meet
from .options import FOREVER_NS, UNSET
from .tensors import expect_alike, expect_count, expect_each, gathered_into, in_a_row, one, split_counts
from .works import PeerLostError, TimeoutError  # pylint: disable=redefined-builtin


class WeftBackend(Calls):
    """One rank's membership in a group. All ranks call collectives in the same order."""

    def __init__(self, place, rank, size, timeout, options, name, owns_place):
        super().__init__(rank, size)
        self._options, self._place, self._owns_place = options, place, owns_place
        self._rank, self._size, self._timeout = rank, size, timeout
        progress = getattr(options, "progress", None) or ("thread" if len(os.sched_getaffinity(0)) >= 2 * place.local_ranks else "caller")
        self._threaded = progress == "thread"
        self._group = context().group_in(place.store, rank, size, backend=getattr(options, "transport", None) or place.transport, name=name,
                                         process_rank=0, deadline=timeout.total_seconds() or FOREVER_NS / 1e9, progress=progress)
        self._handle = self._group._handle

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
        errors.nanoseconds(timeout.total_seconds(), "timeout")
        self._timeout = self._call_options.own_timeout = timeout
        self._options._timeout = timeout

    def get_error(self):
        return super().get_error()

    def shutdown(self):
        """Leaves the group, once what is in flight has ended or failed."""
        for work in list(self._pending):
            try:
                if not work._waited:  # another thread's
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

    def interrupted(self):
        """A signal has ended this rank's wait in one of the group's calls."""
        if self._handle is not None:
            self._group.abort("it was interrupted")

    def split(self, store, ranks, opts):
        if self._rank not in ranks:  # see WeftProcessGroup.split_group
            raise errors.BadArgumentError(f"split: rank {self._rank} is none of {list(ranks)}; expected a call on these alone")
        options = opts if opts is not None else self._options
        return WeftBackend(self._place, list(ranks).index(self._rank), len(ranks), getattr(options, "_timeout", self._timeout), options,
                           getattr(options, "group_name", "") or f"split of {self._group.name}", False)

    def merge(self, store, opts, rank, size):
        return WeftBackend(meet(store, rank, size, None), rank, size, opts._timeout, opts, getattr(opts, "group_name", "") or "merged", True)

    # ---- operations; their names and arguments are torch's ----

    def allreduce(self, tensors, opts):
        if len(tensors) != 1:
            return self._many(lambda tensor: self.allreduce([tensor], opts), tensors)
        tensor = tensors[0]
        if tensor.is_sparse:
            return sparse.all_reduce(self, tensor, opts)
        return self._begin(_api.OP_ALL_REDUCE, tensor, tensor, self._call_options.of_reduction(opts, tensor), tensor, tensors, any_dense=True)

    def allreduce_sparse(self, tensors, opts):
        return sparse.all_reduce(self, one(tensors), opts)

    def allreduce_coalesced(self, tensors, opts):
        return self._many(lambda tensor: self.allreduce([tensor], opts), tensors)

    def reduce(self, tensors, opts):
        tensor = one(tensors)
        return self._begin(_api.OP_REDUCE, tensor, tensor, self._call_options.of_reduction(opts, tensor), tensor, [tensor], root=opts.rootRank,
                           any_dense=True)

    def broadcast(self, tensors, opts):
        if len(tensors) != 1:
            return self._many(lambda tensor: self.broadcast([tensor], opts), tensors)
        tensor = tensors[0]
        return self._begin(_api.OP_BROADCAST, tensor, tensor, self._call_options.of(opts.timeout), tensor, [tensor], root=opts.rootRank, any_dense=True)

    def allgather(self, output_lists, inputs, opts):
        if len(inputs) != 1:
            return self._many(lambda outputs, tensor: self.allgather([outputs], [tensor], opts), output_lists, inputs)
        outputs, tensor = one(output_lists, "output_tensors"), inputs[0]
        expect_alike(outputs, self._size, tensor, "output_tensors")
        flat, after = gathered_into(outputs)
        tensor = tensor.contiguous()
        return self._begin(_api.OP_ALL_GATHER, tensor, flat, self._call_options.of(opts.timeout), (tensor, flat, outputs), outputs, after)

    def all_gather_single(self, output, tensor, opts):
        expect_count(output, tensor.numel() * self._size, "output", "elements of input x ranks")
        return self._begin(_api.OP_ALL_GATHER, tensor, output, self._call_options.of(opts.timeout), (tensor, output), [output], names=("input", "output"))

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
        tensor, flat, after, outputs = one(inputs, "input_tensors").contiguous(), None, None, []
        if self._rank == opts.rootRank:
            outputs = one(output_lists, "output_tensors")
            expect_alike(outputs, self._size, tensor, "output_tensors")
            flat, after = gathered_into(outputs)
        elif output_lists:
            raise errors.BadArgumentError(f"gather: output_tensors is given on rank {self._rank}, which is not root {opts.rootRank}; expected none")
        return self._begin(_api.OP_GATHER, tensor, flat, self._call_options.of(opts.timeout), (tensor, flat, outputs), outputs, after, root=opts.rootRank)

    def gather_single(self, output, tensor, opts):
        root = self._rank == opts.rootRank
        return self._begin(_api.OP_GATHER, tensor, output if root else None, self._call_options.of(opts.timeout), (tensor, output),
                           [output] if root else [], root=opts.rootRank, names=("input", "output"))

    def scatter(self, outputs, input_lists, opts):
        output, flat = one(outputs, "output_tensors"), None
        if self._rank == opts.rootRank:
            inputs = one(input_lists, "input_tensors")
            expect_alike(inputs, self._size, output, "input_tensors")
            flat = in_a_row(inputs)
        elif input_lists:
            raise errors.BadArgumentError(f"scatter: input_tensors is given on rank {self._rank}, which is not root {opts.rootRank}; expected none")
        return self._begin(_api.OP_SCATTER, flat, output, self._call_options.of(opts.timeout), (output, flat), [output], root=opts.rootRank,
                           tensors=input_lists[0] if input_lists else None)

    def reduce_scatter(self, outputs, input_lists, opts):
        if len(outputs) != 1:
            return self._many(lambda output, inputs: self.reduce_scatter([output], [inputs], opts), outputs, input_lists)
        output, inputs = outputs[0], one(input_lists, "input_tensors")
        expect_each(inputs, self._size, "input_tensors")
        counts = [tensor.numel() for tensor in inputs]
        if output.numel() != counts[self._rank]:
            raise errors.BadArgumentError(f"output has {output.numel()} elements; expected {counts[self._rank]}, those of input {self._rank}")
        flat = in_a_row(inputs)
        uneven = min(counts) != max(counts)
        return self._begin(_api.OP_REDUCE_SCATTER_V if uneven else _api.OP_REDUCE_SCATTER, flat, output, self._call_options.of_reduction(opts, output),
                           [output, flat], [output], in_blocks=counts if uneven else None, tensors=inputs)

    def reduce_scatter_single(self, output, tensor, opts):
        expect_count(tensor, output.numel() * self._size, "input", "elements of output x ranks")
        return self._begin(_api.OP_REDUCE_SCATTER, tensor, output, self._call_options.of_reduction(opts, output), (tensor, output), [output],
                           names=("input", "output"))

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts):
        return self._many(lambda output, tensor: self.reduce_scatter_single(output, tensor, opts), outputs, inputs)

    def all_to_all_single(self, output, tensor, output_sizes, input_sizes, opts):
        options, keep = self._call_options.of(opts.timeout), [tensor, output]
        if not output_sizes and not input_sizes:
            for name, each in (("input", tensor), ("output", output)):
                if each.dim() and each.size(0) % self._size:
                    raise errors.BadArgumentError(f"{name} has {each.size(0)} rows; expected a number that {self._size} (group size) divides")
            return self._begin(_api.OP_ALL_TO_ALL, tensor, output, options, keep, [output], names=("input", "output"))
        return self._begin(_api.OP_ALL_TO_ALL_V, tensor, output, options, keep, [output], names=("input", "output"),
                           in_blocks=split_counts(tensor, input_sizes, self._size, "input"),
                           out_blocks=split_counts(output, output_sizes, self._size, "output"))

    def alltoall(self, outputs, inputs, opts):
        expect_each(outputs, self._size, "output_tensors")
        expect_each(inputs, self._size, "input_tensors")
        flat_in = in_a_row(inputs)
        flat_out, after = gathered_into(outputs)
        return self._begin(_api.OP_ALL_TO_ALL_V, flat_in, flat_out, self._call_options.of(opts.timeout), [flat_in, flat_out, outputs], outputs, after,
                           in_blocks=[t.numel() for t in inputs], out_blocks=[t.numel() for t in outputs], tensors=inputs)

    def send(self, tensors, destination, tag=0):
        tensor = one(tensors)
        return self._begin(_api.OP_SEND, tensor, None, self._call_options.of(UNSET, tag=tag), tensor, [tensor], peer=destination)

    def recv(self, tensors, source, tag=0):
        tensor = one(tensors)
        return self._begin(_api.OP_RECV, None, tensor, self._call_options.of(UNSET, tag=tag), tensor, [tensor], peer=source)

    def recv_anysource(self, tensors, tag=0):
        return self.recv(tensors, _api.ANY_SOURCE, tag)

    def barrier(self, opts):
        return self._begin(_api.OP_BARRIER, None, None, self._call_options.of(opts.timeout), None, [])

    def monitored_barrier(self, opts, wait_all_ranks=False):
        """A barrier that tells who did not come, in torch's words and then in weft's. Afterwards the group
        has failed, as after any time-out."""
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
