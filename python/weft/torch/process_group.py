"""The ProcessGroup that torch gets. Its operations go through torch's dispatcher, as those of every backend (so that hooks, profilers and debug modes
see them), and come out in WeftBackend; to Python they then give the backend's own Work, whose methods are all there. torch's holder of a
Python Work forwards wait() and get_future() alone."""
import torch
from torch._C._distributed_c10d import ProcessGroup

OPERATIONS = ("allreduce", "allreduce_coalesced", "reduce", "broadcast", "allgather", "all_gather_single", "allgather_coalesced",
              "all_gather_single_coalesced", "gather", "gather_single", "scatter", "reduce_scatter", "reduce_scatter_single",
              "reduce_scatter_single_coalesced", "all_to_all_single", "alltoall", "send", "recv", "recv_anysource", "barrier", "_end_coalescing")
# Names that torch had before. Where it has the later name too, only that may be overridden: inside of it, torch's trampoline would call the former.
FORMER = {"all_gather_single": "_allgather_base", "all_gather_single_coalesced": "allgather_into_tensor_coalesced", "gather_single": "gather_into_tensor",
          "reduce_scatter_single": "_reduce_scatter_base", "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
          "all_to_all_single": "alltoall_base"}


class WeftProcessGroup(ProcessGroup):
    """A ProcessGroup whose backend for cpu is a WeftBackend.

    Its operations are methods in Python, which C++ reaches by torch's trampoline. They go on to a second, plain ProcessGroup over the same backend: on this
    one the trampoline would look at Python's frames to find out that the method itself called it, which costs as much as all the rest of a call."""

    @classmethod
    def around(cls, backend, opts):
        group = cls(opts.store, opts.group_rank, opts.group_size)
        group._weft = backend
        group._plain = ProcessGroup(opts.store, opts.group_rank, opts.group_size)
        for each in (group, group._plain):
            each._set_default_backend(ProcessGroup.BackendType.CUSTOM)
            each._register_backend(torch.device("cpu"), ProcessGroup.BackendType.CUSTOM, backend)
        return group

    def getBackendName(self):
        return "weft"

    def _set_group_name(self, name):
        super()._set_group_name(name)
        self._plain._set_group_name(name)

    def _set_group_desc(self, description):
        super()._set_group_desc(description)
        self._plain._set_group_desc(description)


def _operation(name):
    inherited = getattr(ProcessGroup, name)

    def operation(self, *args, **kwargs):
        inherited(self._plain, *args, **kwargs)
        return self._weft._latest
    operation.__name__, operation.__qualname__ = name, f"WeftProcessGroup.{name}"
    operation.__doc__ = f"torch's {name}; the Work is weft's."
    return operation


for _name in OPERATIONS:
    if not hasattr(ProcessGroup, _name):
        _name = FORMER.get(_name)
    if _name is not None and hasattr(ProcessGroup, _name):
        setattr(WeftProcessGroup, _name, _operation(_name))
