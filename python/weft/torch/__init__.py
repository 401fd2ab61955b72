"""weft as a backend of torch.distributed:

    import torch.distributed
    import weft.torch                       # not needed where weft is installed: torch finds it by its entry point

    torch.distributed.init_process_group("weft")

CPU tensors move over shared memory, and over gloo or mpi where ranks are on several hosts. docs/torch.md
is the guide.
"""
import torch

from . import needs

needs.check()  # before the imports that need it
# pylint: disable=wrong-import-position
from .. import dtypes  # noqa: E402
from ..arrays import SharedTensor  # noqa: E402
from .backend import WeftBackend  # noqa: E402
from .create import create  # noqa: E402
from .meeting import context  # noqa: E402
from .options import BackendOptions  # noqa: E402
from .works import AbortedError, BackendError, MismatchError, PeerLostError, TimeoutError  # noqa: E402  # pylint: disable=redefined-builtin

__all__ = ["AbortedError", "BackendError", "BackendOptions", "MismatchError", "PeerLostError", "TimeoutError", "WeftBackend", "empty", "register"]


def register():
    """Tells torch.distributed of the backend "weft". Importing this module does it, too."""
    distributed = torch.distributed
    if "WEFT" not in distributed.Backend._plugins:
        default = dict(distributed.Backend.default_device_backend_map)
        distributed.Backend.register_backend("weft", create, extended_api=True, devices=["cpu"])
        # A program that names no backend gets torch's choice.
        distributed.Backend.default_device_backend_map.update(default)


def empty(*shape, dtype=None, requires_grad=False):
    """As torch.empty on the CPU, in memory that ranks of this host may map: collectives of more than a few
    kilobytes on it copy nothing."""
    tensor = SharedTensor(context(), shape[0] if len(shape) == 1 else shape, dtypes.of(dtype or torch.get_default_dtype())).torch()
    return tensor.requires_grad_() if requires_grad else tensor


register()
