"""The ProcessGroup that torch gets. Its operations go through torch's dispatcher, as those of every
backend (so that hooks, profilers and debug modes see them), and come out in WeftBackend; to Python they
then give the backend's own Work, whose methods are all there. torch's holder of a Python Work forwards
wait() and get_future() alone."""
import os

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import ProcessGroup

from .calls import given
from .tensors import expect_plain_each

OPERATIONS = ("allreduce", "allreduce_coalesced", "reduce", "broadcast", "allgather", "all_gather_single", "allgather_coalesced",
              "all_gather_single_coalesced", "gather", "gather_single", "scatter", "reduce_scatter", "reduce_scatter_single",
              "reduce_scatter_single_coalesced", "all_to_all_single", "alltoall", "send", "recv", "recv_anysource", "barrier", "_end_coalescing")
# Names that torch had before. Where it has the later name too, only that may be overridden: inside of it,
# torch's trampoline would call the former.
FORMER = {"all_gather_single": "_allgather_base", "all_gather_single_coalesced": "allgather_into_tensor_coalesced", "gather_single": "gather_into_tensor",
          "reduce_scatter_single": "_reduce_scatter_base", "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
          "all_to_all_single": "alltoall_base"}


# Hooks of the program's own, which see what goes through the plain group.
HOOKS = ("register_pre_hook", "unregister_pre_hook", "register_post_hook", "unregister_post_hook")
_CPU = torch.device("cpu")


def _hold(group, backend):
    group._set_default_backend(ProcessGroup.BackendType.CUSTOM)
    group._register_backend(_CPU, ProcessGroup.BackendType.CUSTOM, backend)


class WeftProcessGroup(ProcessGroup):
    """A ProcessGroup whose backend for cpu is a WeftBackend.

    Its operations are methods in Python, which C++ reaches by torch's trampoline. They go on to a second,
    plain ProcessGroup over the same backend: on this one the trampoline would look at Python's frames to
    find out that the method itself called it, which costs as much as all the rest of a call."""

    @classmethod
    def around(cls, backend, opts):
        plain = ProcessGroup(opts.store, opts.group_rank, opts.group_size)
        _hold(plain, backend)
        return cls._over(plain, opts.store)

    @classmethod
    def _over(cls, plain, store):
        """The group whose operations go on to `plain`, a group over a WeftBackend."""
        group = cls(store, plain.rank(), plain.size())
        group._plain, group._weft = plain, plain._get_backend(_CPU)
        _hold(group, group._weft)
        # torch attaches these to the group that it gets; they are to see what goes through the plain one.
        if os.environ.get("TORCH_DIST_NAN_CHECK", "0") == "1" and hasattr(c10d, "NanCheckHook"):
            c10d.NanCheckHook.attach(plain)
        if hasattr(c10d, "HealthCheckHook"):
            c10d.HealthCheckHook.attach(plain)
        return group

    def _like(self, plain):
        """A group that torch's C++ made of this one."""
        if plain is None:
            return None
        group = WeftProcessGroup._over(plain, plain.get_group_store())
        group._set_group_name(plain.group_name)
        group._set_group_desc(plain.group_desc)
        return group

    def split_group(self, new_ranks, *args, **kwargs):
        # torch's C++ ends with SIGSEGV where a Backend in Python has no part of a split.
        if self.rank() not in new_ranks:
            return None
        return self._like(super().split_group(new_ranks, *args, **kwargs))

    def merge_remote_group(self, *args, **kwargs):
        return self._like(super().merge_remote_group(*args, **kwargs))

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
        given.work = None
        try:
            expect_plain_each(args)
            if kwargs:
                expect_plain_each(kwargs.values())
            told = inherited(self._plain, *args, **kwargs)
        except BaseException as why:
            if not isinstance(why, Exception):  # KeyboardInterrupt: nobody knows whether the call has begun
                self._weft.interrupted()
            # torch does not end a coalescing that an exception has left: it would keep all later operations
            # for its end.
            if self._weft.give_up_coalescing():
                dist.distributed_c10d._world.pg_coalesce_state.pop(self, None)
            raise
        work = given.work
        return told if work is None else work  # None: the backend was not asked (tensors on "meta")
    operation.__name__, operation.__qualname__ = name, f"WeftProcessGroup.{name}"
    operation.__doc__ = f"torch's {name}; the Work is weft's."
    return operation


def _hook(name):
    def hook(self, *args, **kwargs):
        return getattr(self._plain, name)(*args, **kwargs)
    hook.__name__, hook.__qualname__, hook.__doc__ = name, f"WeftProcessGroup.{name}", f"torch's {name}."
    return hook


for _name in HOOKS:
    if hasattr(ProcessGroup, _name):
        setattr(WeftProcessGroup, _name, _hook(_name))
for _name in OPERATIONS:
    if not hasattr(ProcessGroup, _name):
        _name = FORMER.get(_name)
    if _name is not None and hasattr(ProcessGroup, _name):
        setattr(WeftProcessGroup, _name, _operation(_name))
