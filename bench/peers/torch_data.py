#!/usr/bin/env python3
"""Measures the cases of data_bench in torch over Gloo: gradients reduced in several ways, and a step of 24 x
Linear(512) on each rank by itself, with DistributedDataParallel, and with fully_shard (FSDP2). The flags,
numbers, checks, samples and rows are those of data_bench (bench/train/data_bench.cpp, bench/measure.hpp).
sent_bytes is the loopback device's count of bytes, divided by the number of ranks.

    torch_data.py --ranks 2 --cases reduce/one,step/ddp --rows
"""
import math

from torch_collectives import parse_flags, rank_flags, words
from torch_layers import DY, PROBE, WEIGHTS, X, in_turn, join, measure, numbers, print_row, start_ranks

DIM, LAYERS, ROWS = 512, 24, 64
COUNTS = [64000 if i % 2 == 0 else 1000 for i in range(200)]
BUCKET = 4 << 20  # bytes, as BucketOptions::bucket_bytes
CASES = ["reduce/one", "reduce/one_foreign", "reduce/buckets", "reduce/bound", "reduce/each", "step/local", "step/ddp", "step/fully_shard"]


def flags():
    p = rank_flags(__doc__)
    p.add_argument("--cases", type=words, default=CASES)
    p.add_argument("--rounds", type=int, default=1)
    return parse_flags(p, {"cases": CASES})


class Reduction:
    """one: a flat tensor. buckets: gradients are views of flat buckets; each bucket is reduced while the
    next begins. bound: separate gradients, copied into a flat tensor and back. each: one gradient at a
    time."""

    def __init__(self, torch, dist, how, rank, ranks):
        self.torch, self.dist, self.how, self.rank, self.n = torch, dist, how.removesuffix("_foreign"), rank, ranks
        self.buckets = []
        if self.how in ("bound", "each"):
            self.gradients = [torch.zeros(n) for n in COUNTS]
        else:
            groups, open_bytes = [[]], 0
            for n in COUNTS:
                groups[-1].append(n)
                open_bytes += 4 * n
                if self.how == "buckets" and open_bytes >= BUCKET:
                    groups.append([])
                    open_bytes = 0
            self.buckets = [torch.zeros(sum(g)) for g in groups if g]
            self.gradients = [v for b, g in zip(self.buckets, groups) for v in b.split(g)]
        for i, g in enumerate(self.gradients):
            g.fill_((rank + 1) * (i % 100 + 1))
        self.run()
        for i, g in enumerate(self.gradients):
            want = ranks * (ranks + 1) // 2 * (i % 100 + 1)
            if not bool((g == want).all()):
                raise RuntimeError(f"gradient {i} is wrong; expected {want}")

    def run(self):
        if self.how == "bound":
            flat = self.torch.cat(self.gradients)
            self.dist.all_reduce(flat)
            self.torch._foreach_copy_(self.gradients, list(flat.split(COUNTS)))
        elif self.how == "each":
            for g in self.gradients:
                self.dist.all_reduce(g)
        else:
            for work in [self.dist.all_reduce(b, async_op=True) for b in self.buckets]:
                work.wait()

    def checks(self):
        return {}

    def theory(self):
        return 2 * (self.n - 1) / self.n * 4 * sum(COUNTS)


class Step:
    def __init__(self, torch, dist, form, rank, ranks):
        self.torch, self.form, self.n = torch, form, ranks
        net = torch.nn.Sequential(*(torch.nn.Linear(DIM, DIM) for _ in range(LAYERS)))
        with torch.no_grad():
            for k, p in enumerate(net.parameters()):
                p.copy_(numbers(torch, tuple(p.shape), WEIGHTS + k) * (3 / math.sqrt(DIM)))
        if form == "ddp":
            net = torch.nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
        if form == "fully_shard":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (ranks,))
            for layer in net:
                fully_shard(layer, mesh=mesh)
            fully_shard(net, mesh=mesh)
        self.net = net
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        first = rank * ROWS * DIM
        self.x = 2 * numbers(torch, (ROWS, DIM), X, first)
        # DistributedDataParallel and fully_shard average over ranks; weft sums.
        self.dy = (2 if form == "local" else 2 * ranks) * numbers(torch, (ROWS, DIM), DY, first)

    def run(self):
        self.optimizer.zero_grad()
        self.net(self.x).backward(self.dy)
        self.optimizer.step()

    def checks(self):
        found = {}
        parameters = list(self.net.parameters())
        for k in (0, LAYERS, 2 * LAYERS - 2):
            g = parameters[k].grad
            g = (g.full_tensor() if hasattr(g, "full_tensor") else g).to(self.torch.float64)
            found[f"along_dw{k}"] = float((g * numbers(self.torch, list(g.shape), PROBE)).sum())
            found[f"norm_dw{k}"] = math.sqrt(float((g * g).sum()))
        return found

    def theory(self):
        once = 4 * LAYERS * (DIM * DIM + DIM) * (self.n - 1) / self.n
        return {"local": 0, "ddp": 2 * once, "fully_shard": 3 * once}[self.form]


def loopback_sent():
    with open("/proc/net/dev") as f:
        for line in f:
            if line.strip().startswith("lo:"):
                return int(line.split(":")[1].split()[8])
    return 0


def body(rank, a, port):
    torch, dist, agree = join(rank, a, port, " over Gloo")
    for name in in_turn(a, a.cases * a.rounds):
        kind, how = name.split("/")
        case = (Reduction if kind == "reduce" else Step)(torch, dist, how, rank, a.ranks)
        for _ in range(2):
            case.run()
        dist.barrier()
        before = loopback_sent()
        for _ in range(8):
            case.run()
        dist.barrier()
        sent = (loopback_sent() - before) / 8 / a.ranks
        median, p99, samples = measure(case, agree, a.seconds)
        checks = case.checks()
        if rank == 0:
            print_row({"op": "data", "case": name, "ranks": a.ranks, "bytes": 0, "median_us": median, "p99_us": p99, "samples": samples,
                       "sent_bytes": sent, "theory_bytes": case.theory(), **checks})
    dist.destroy_process_group()


if __name__ == "__main__":
    start_ranks(flags(), body)
