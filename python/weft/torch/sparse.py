"""all_reduce of sparse COO tensors: indices and values of all ranks are gathered, and added up on each."""
import torch
from torch._C._distributed_c10d import AllgatherOptions, ReduceOp

from .. import errors
from .calls import give
from .works import DoneWork


def all_reduce(backend, tensor, opts):
    """In place. Blocks: how many elements there are is only known on the way."""
    if opts.reduceOp.op != ReduceOp.SUM:
        raise errors.UnsupportedError(f"all_reduce of a sparse tensor with {opts.reduceOp.op}; expected ReduceOp.SUM")
    if tensor.layout is not torch.sparse_coo:
        raise errors.UnsupportedError(f"tensor is of layout {tensor.layout}; expected torch.sparse_coo")
    mine = tensor.detach().coalesce()
    ranks = backend.size()
    options = AllgatherOptions()
    options.timeout = opts.timeout
    about = torch.tensor([mine.sparse_dim(), mine.dense_dim(), *mine.shape, mine._nnz()])
    abouts = torch.empty(ranks * len(about), dtype=torch.int64)
    backend.all_gather_single(abouts, about, options).wait()
    abouts = abouts.view(ranks, -1)
    for rank in range(ranks):
        if abouts[rank][:-1].tolist() != about[:-1].tolist():
            raise errors.BadArgumentError(f"tensor has the sparse and dense dimensions and shape {about[:-1].tolist()}; rank {rank} has "
                                          f"{abouts[rank][:-1].tolist()}; expected the same on all ranks")
    counts = abouts[:, -1].tolist()
    room = max(counts)
    gathered = []
    for part in (mine.indices().t().contiguous(), mine.values()):  # one row for each element
        padded = part.new_zeros((room, *part.shape[1:]))
        padded[:part.shape[0]] = part
        every = part.new_empty((ranks * room, *part.shape[1:]))
        backend.all_gather_single(every, padded, options).wait()
        gathered.append(torch.cat([every[rank * room:rank * room + counts[rank]] for rank in range(ranks)]))
    total = torch.sparse_coo_tensor(gathered[0].t(), gathered[1], tensor.shape).coalesce()
    with torch.no_grad():
        tensor.copy_(total)
    return give(DoneWork([tensor]))
