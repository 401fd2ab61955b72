"""The parts of torch that the backend uses and another version may lack: checked before anything else of
weft.torch is imported, so that the error says what is missing."""
import torch

from .. import errors

TESTED = ("2.14.1", "2.15.0")
C10D = "torch._C._distributed_c10d"
# A class with an "__init__" of its own: torch's trampoline, by which C++ calls methods of a subclass in
# Python.
NAMES = ("torch.futures.Future", "torch.distributed._Work.__init__", "torch.distributed.DistBackendError", "torch.distributed.Backend.register_backend",
         "torch.distributed.Backend.default_device_backend_map", "torch.distributed.Backend._plugins",
         "torch.distributed.distributed_c10d._DistributedBackendOptions", f"{C10D}.Backend.__init__", f"{C10D}.Backend.Options", f"{C10D}.ReduceOp",
         f"{C10D}.AllgatherOptions", f"{C10D}.ProcessGroup.__init__", f"{C10D}.ProcessGroup.BackendType", f"{C10D}.ProcessGroup._register_backend",
         f"{C10D}.ProcessGroup._set_default_backend", f"{C10D}.ProcessGroup.allreduce", f"{C10D}.ProcessGroup._end_coalescing",
         "torch.autograd.profiler._is_profiler_enabled", "torch._C._autograd._record_function_with_args_enter")


def has(path):
    """Whether torch has what a dotted name says."""
    thing, *names = torch, *path.split(".")[1:]
    for name in names:
        if name == "__init__" and name not in vars(thing) or not hasattr(thing, name):
            return False
        thing = getattr(thing, name)
    return True


def check():
    """UnsupportedError that names all that this torch lacks."""
    if not torch.distributed.is_available():
        raise errors.UnsupportedError(f"torch {torch.__version__} has no torch.distributed; expected a build with USE_DISTRIBUTED")
    missing = [name for name in NAMES if not has(name)]
    if missing:
        raise errors.UnsupportedError(f"torch {torch.__version__} has no {', no '.join(missing)}; expected a version that has: weft.torch is tested with "
                                      f"{' and '.join(TESTED)}")
