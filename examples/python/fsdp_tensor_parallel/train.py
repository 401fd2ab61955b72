"""PyTorch's FSDP2 over one axis of a mesh, and its tensor and sequence parallelism over the other axis, with
weft as the backend."""
import torch
import torch.distributed as dist
import weft.torch  # not needed where the wheel is installed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module


class Block(torch.nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(width), torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


dist.init_process_group("weft")
mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
dp, tp = mesh["dp"], mesh["tp"]
torch.manual_seed(0)
model = torch.nn.Sequential(*(Block() for _ in range(4)))
for block in model:  # between blocks each rank of tp has a part of the sequence
    parallelize_module(block, tp, {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))})
    fully_shard(block, mesh=dp)
fully_shard(model, mesh=dp)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
x = torch.randn(8, 32, 64)
y = x.roll(1, -1)
part = lambda t: t.chunk(dp.size())[dp.get_local_rank()].chunk(2, 1)[tp.get_local_rank()].contiguous()  # noqa: E731
for step in range(51):
    loss = (model(part(x)) - part(y)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach().clone()
    dist.all_reduce(shown, dist.ReduceOp.AVG)
    if step % 25 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {shown.item():.3f}", flush=True)
dist.destroy_process_group()
