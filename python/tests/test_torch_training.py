"""Training by PyTorch's own parallel modules over weft: the losses are those of one process with the whole
batch."""
import pytest

pytest.importorskip("torch")
from torch_ranks import run  # noqa: E402  pylint: disable=wrong-import-position

COMMON = """
begin()
import copy
import torch.nn as nn
import torch.nn.functional as F
class Block(nn.Module):
    def __init__(self, width=32, hidden=64):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(32, 5)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)
torch.manual_seed(1)
model = Model()
torch.manual_seed(2)
batches = [(torch.randn(8, 4, 32), torch.randint(0, 5, (8, 4)))] * 6
def train(model, part, share=lambda loss: loss):
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for x, y in batches:
        x, y = part(x), part(y)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        losses.append(share(loss.detach()).item())
    return losses
def mean(loss):
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    return loss
def check(losses, expected, tolerance=2e-4):
    assert expected[0] > expected[-1] * 1.05, expected
    for ours, one in zip(losses, expected):
        assert abs(ours - one) < tolerance * abs(one), (losses, expected)
alone = train(copy.deepcopy(model), lambda t: t)
"""

DDP = COMMON + """
from torch.nn.parallel import DistributedDataParallel
for options in [{}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01}, {"static_graph": True}, {"find_unused_parameters": True}]:
    check(train(DistributedDataParallel(copy.deepcopy(model), **options), lambda t: t[rank::size], mean), alone)
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
half = DistributedDataParallel(copy.deepcopy(model))
half.register_comm_hook(None, default_hooks.bf16_compress_hook)
check(train(half, lambda t: t[rank::size], mean), alone, 0.1)
dist.destroy_process_group()
print("all well")
"""

FSDP = COMMON + """
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cpu", (size,))
for reshard in (True, False):
    sharded = copy.deepcopy(model)
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(sharded, mesh=mesh)
    check(train(sharded, lambda t: t[rank::size], mean), alone)
mixed = copy.deepcopy(model)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in mixed.blocks:
    fully_shard(block, mesh=mesh, mp_policy=policy)
fully_shard(mixed, mesh=mesh, mp_policy=policy)
check(train(mixed, lambda t: t[rank::size], mean), alone, 0.1)
if size == 4:
    hybrid = copy.deepcopy(model)
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for block in hybrid.blocks:
        fully_shard(block, mesh=grid)
    fully_shard(hybrid, mesh=grid)
    check(train(hybrid, lambda t: t[rank::size], mean), alone)
# a checkpoint of the shards, by torch's own
import tempfile, os
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
folder = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(folder)
state = get_model_state_dict(sharded)
dcp.save(state, checkpoint_id=folder[0])
before = {k: v.full_tensor().clone() for k, v in state.items()}
for v in state.values():
    v.to_local().zero_()
dcp.load(state, checkpoint_id=folder[0])
assert all(torch.equal(v.full_tensor(), before[k]) for k, v in state.items())
dist.destroy_process_group()
print("all well")
"""

TENSOR_PARALLEL = COMMON + """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
def split(model, mesh):
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model
check(train(split(copy.deepcopy(model), mesh), lambda t: t), alone)
# every redistribution of a tensor
x = torch.arange(7 * 5.).reshape(7, 5)
for start in (Replicate(), Shard(0), Shard(1)):
    for end in (Replicate(), Shard(0), Shard(1)):
        t = distribute_tensor(x, mesh, [start]).redistribute(mesh, [end])
        assert torch.equal(t.full_tensor(), x), (start, end)
p = DTensor.from_local(x.clone(), mesh, [Partial()])
assert torch.equal(p.full_tensor(), x * size) and torch.equal(p.redistribute(mesh, [Shard(0)]).full_tensor(), x * size)
p = DTensor.from_local(x.clone(), mesh, [Partial("avg")])
assert torch.equal(p.redistribute(mesh, [Replicate()]).to_local(), x)
# tensor parallel with its activations divided over the sequence
class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 5)
    def forward(self, x):
        return self.down(F.gelu(self.up(self.norm(x))))
torch.manual_seed(3)
stack = Stack()
expected = train(copy.deepcopy(stack), lambda t: t)
plan = {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel()}
check(train(parallelize_module(copy.deepcopy(stack), mesh, plan), lambda t: t.chunk(size, 1)[rank].contiguous() if t.dim() == 3 else t), expected)
# fully sharded over one axis, tensor parallel over the other
if size == 4:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    both = split(copy.deepcopy(model), grid["tp"])
    for block in both.blocks:
        fully_shard(block, mesh=grid["dp"])
    fully_shard(both, mesh=grid["dp"])
    check(train(both, lambda t: t[grid["dp"].get_local_rank()::2], mean), alone)
# functional collectives, and compiled code
import torch.distributed._functional_collectives as funcol
y = funcol.all_reduce(torch.ones(3), "sum", mesh)
assert (y == size).all()
y = funcol.all_gather_tensor(torch.full((2,), float(rank)), 0, mesh)
assert y.tolist() == [float(r) for r in range(size) for _ in range(2)]
y = funcol.reduce_scatter_tensor(torch.ones(2 * size), "avg", 0, mesh)
assert y.tolist() == [1, 1]
y = funcol.all_to_all_single(torch.full((size,), float(rank)), None, None, mesh)
assert y.tolist() == list(map(float, range(size)))
dist.destroy_process_group()
print("all well")
"""


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("program", [DDP, FSDP, TENSOR_PARALLEL], ids=["ddp", "fsdp", "tensor_parallel"])
def test_training(program, size):
    assert run(size, program) == ["all well\n"] * size
