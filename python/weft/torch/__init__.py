"""weft as a backend of torch.distributed:

    import torch.distributed
    import weft.torch                       # not needed where weft is installed: torch finds it by its entry point

    torch.distributed.init_process_group("weft")

CPU tensors move over shared memory, and over gloo or mpi where ranks are on several hosts. docs/torch.md is the guide.
"""
import torch

from .. import dtypes, errors
from ..arrays import SharedTensor
from .backend import BackendOptions, WeftBackend, create
from .meeting import context
from .works import AbortedError, BackendError, MismatchError, PeerLostError, TimeoutError  # pylint: disable=redefined-builtin

__all__ = ["AbortedError", "BackendError", "BackendOptions", "MismatchError", "PeerLostError", "TimeoutError", "WeftBackend", "empty", "register"]


def register():
    """Tells torch.distributed of the backend "weft". Importing this module does it, too."""
    distributed = torch.distributed
    if not distributed.is_available():
        raise errors.UnsupportedError("this torch has no torch.distributed; expected a build with USE_DISTRIBUTED")
    if not hasattr(distributed.distributed_c10d, "_DistributedBackendOptions"):
        raise errors.UnsupportedError(f"torch {torch.__version__} has no _DistributedBackendOptions; expected torch 2.6 or later")
    if "WEFT" not in distributed.Backend._plugins:
        default = dict(distributed.Backend.default_device_backend_map)
        distributed.Backend.register_backend("weft", create, extended_api=True, devices=["cpu"])
        distributed.Backend.default_device_backend_map.update(default)  # who names no backend gets what torch chooses


def empty(*shape, dtype=None, requires_grad=False):
    """As torch.empty on the CPU, in memory that ranks of this host may map: collectives of more than a few kilobytes on it copy nothing."""
    if len(shape) == 1 and not isinstance(shape[0], int):
        shape = tuple(shape[0])
    tensor = SharedTensor(context(), shape, dtypes.of(dtype or torch.get_default_dtype())).torch()
    return tensor.requires_grad_() if requires_grad else tensor


register()
