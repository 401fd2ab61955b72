"""Trains a small GPT on the bytes of a text with DistributedDataParallel. An argument selects the backend:
with --backend gloo the program runs over Gloo."""
import argparse
import pathlib
import time

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="weft")
parser.add_argument("--text", default=__file__)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--width", type=int, default=384)
parser.add_argument("--context", type=int, default=64)
given = parser.parse_args()
if given.backend == "weft":
    import weft.torch  # not needed where the wheel is installed


class Block(torch.nn.Module):
    def __init__(self, width, heads=6):
        super().__init__()
        self.heads = heads
        self.first, self.second = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width))

    def forward(self, x):
        batch, time_, width = x.shape
        q, k, v = (t.view(batch, time_, self.heads, -1).transpose(1, 2) for t in self.qkv(self.first(x)).split(width, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, time_, width))
        return x + self.mlp(self.second(x))


class GPT(torch.nn.Module):
    def __init__(self, layers, width, context):
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(256, width), torch.nn.Embedding(context, width)
        self.blocks = torch.nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, 256)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.tokens(x) + self.places.weight[:x.shape[1]])))


dist.init_process_group(given.backend)
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(GPT(given.layers, given.width, given.context))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
text = torch.tensor(list(pathlib.Path(given.text).read_bytes()))
began = time.perf_counter()
for step in range(given.steps + 1):
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - given.context - 1, (8,), generator=generator)[rank::size]
    batch = torch.stack([text[s:s + given.context + 1] for s in starts])
    loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach().clone()
    dist.all_reduce(shown)
    if step % 10 == 0 and rank == 0:
        print(f"step {step}: loss {shown.item() / size:.3f}", flush=True)
if rank == 0:
    print(f"{(time.perf_counter() - began) / (given.steps + 1) * 1000:.0f} ms a step over {given.backend}")
dist.destroy_process_group()
