"""weft: programs that compute on many ranks at once.

    import numpy as np
    import weft

    context = weft.Context()
    group = context.group()                       # the ranks that `python -m weft.run -n 4 program.py` has started
    total = group.all_reduce(np.ones(1000)).wait()

Arrays of NumPy, PyTorch and JAX are used where they lie. `weft.torch` is a backend of torch.distributed.
docs/python.md is the guide.
"""
from . import checkpoint
from .arrays import SharedTensor
from .context import Context, version
from .errors import (AbortedError, BadArgumentError, CorruptError, Error, LayoutError, MismatchError, PeerLostError, SystemError,  # pylint: disable=W0622
                     TimeoutError, UnsupportedError)
from .meshes.gradients import BucketHook, Reducer, Sampler, average_gradients, clip_grad_norm, grad_norm, reduce_gradients, sync_replicated_gradients
from .exchanges import Box, ExchangePlan, PersistentExchange
from .group import ANY_SOURCE, Batch, Group, Message, Persistent, Reduction, start_all
from .meshes.layout import Layout, check_replicas, partial, redistribute, replicate, shard
from .meshes.mesh import Mesh
from .meshes.shards import ShardedParameters
from .store import Store, new_secret, secret_from_env
from .store_server import StoreServer
from .meshes.transfers import Exchange, Transfer
from .traits import Traits
from .transport import Transport
from .meshes.windows import Halo, Window, pole, start_together
from .work import Work, wait_all

__version__ = version()
__all__ = ["ANY_SOURCE", "AbortedError", "BadArgumentError", "Batch", "Box", "BucketHook", "Context", "CorruptError", "Error", "Exchange", "ExchangePlan", "Group",
           "Halo", "Layout", "LayoutError", "Mesh", "Message", "MismatchError", "PeerLostError", "Persistent", "PersistentExchange", "Reducer", "Reduction", "Sampler",
           "ShardedParameters", "SharedTensor", "Store", "StoreServer", "SystemError", "TimeoutError", "Traits", "Transfer", "Transport", "UnsupportedError", "Window", "Work", "average_gradients",
           "check_replicas", "checkpoint", "clip_grad_norm", "grad_norm", "new_secret", "partial", "pole", "redistribute",
           "reduce_gradients", "replicate", "secret_from_env", "shard", "start_all", "start_together", "sync_replicated_gradients", "version", "wait_all"]
