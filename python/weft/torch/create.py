"""Groups for init_process_group("weft") and new_group(backend="weft")."""
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from .. import errors
from .backend import WeftBackend
from .meeting import meet
from .options import BackendOptions
from .process_group import WeftProcessGroup
from .works import as_torch


def _default_backend():
    """The WeftBackend of the default group, where it has one."""
    if not dist.is_initialized():
        return None
    try:
        backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    except RuntimeError:
        return None
    return backend if isinstance(backend, WeftBackend) and backend._handle is not None else None


def create(opts, options=None):
    """The function that torch calls for a group: the ProcessGroup of this rank."""
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
