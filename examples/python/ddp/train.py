"""PyTorch's DistributedDataParallel over weft."""
import torch
import torch.distributed as dist
import weft.torch  # not needed where the wheel is installed
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("weft")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
inputs = torch.randn(256, 16)
targets = inputs.sum(1, keepdim=True)
for step in range(101):
    loss = (model(inputs[rank::size]) - targets[rank::size]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    dist.all_reduce(loss.detach(), dist.ReduceOp.AVG)
    if step % 50 == 0 and rank == 0:
        print(f"step {step}: loss {loss.item():.3f}", flush=True)
dist.destroy_process_group()
