"""PyTorch over weft, started again when a rank dies: it goes on from its checkpoint."""
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import weft.torch  # not needed where the wheel is installed
from torch.nn.parallel import DistributedDataParallel
from weft.run import report_step

checkpoint = os.path.join(tempfile.gettempdir(), f"weft-elastic-example-{os.getuid()}.pt")
start = int(os.environ["WEFT_RESTART_COUNT"])
dist.init_process_group("weft")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
inputs = torch.randn(256, 16)
targets = inputs.sum(1, keepdim=True)
done = 0
if start > 0 and os.path.exists(checkpoint):
    state = torch.load(checkpoint)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    done = state["done"]
if rank == 0:
    print(f"start {start}: {size} ranks, from step {done}", flush=True)
for step in range(done, 101):
    if start == 0 and rank == 1 and sys.argv[1:] == ["die", str(step)]:
        os.kill(os.getpid(), 9)  # as if its machine were lost
    loss = (model(inputs[rank::size]) - targets[rank::size]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss = loss.detach()
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    if rank == 0:
        report_step(step + 1)
        if step % 10 == 9:  # whole, or the last one stays
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": step + 1}, checkpoint + ".new")
            os.replace(checkpoint + ".new", checkpoint)
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
