#!/usr/bin/env python3
"""Measures the layers of layers_bench in torch: on one rank, or tensor parallel over Gloo with Megatron's f
and g as autograd functions around all_reduce. The flags, numbers, checks, samples and rows are those of
layers_bench (bench/train/layers_bench.cpp, bench/measure.hpp). In bf16 weights, activations and gradients are
all bf16, as is usual in torch.

    torch_layers.py --ranks 2 --layers mlp,attention --tokens 128,512 --passes both --dtype f32 --rows
"""
import functools
import math
import multiprocessing
import os
import sys
import time

from torch_collectives import die_with, parse_flags, print_row, rank_flags, words

DIM, HIDDEN, HEADS, VOCAB, CHANNELS, HIDDEN_CHANNELS = 1024, 4096, 16, 32000, 512, 2048
X, DY, PROBE, WEIGHTS = 1, 2, 3, 10


def flags():
    p = rank_flags(__doc__)
    p.add_argument("--layers", type=words, default=["mlp"])
    p.add_argument("--tokens", type=lambda t: [int(w) for w in t.split(",")], default=[512])
    p.add_argument("--passes", type=words, default=["both"])
    p.add_argument("--dtype", type=words, default=["f32"])
    p.add_argument("--rounds", type=int, default=1)
    return parse_flags(p, {"layers": SHAPES, "passes": ("forward", "both"), "dtype": ("f32", "bf16")})


# The parameters' global shapes, and the dimension that ranks split; None: each rank has the whole parameter.
PAIR = (((HIDDEN, DIM), 0), ((HIDDEN,), 0), ((DIM, HIDDEN), 1), ((DIM,), None))
SHAPES = {
    "linear2": PAIR,
    "mlp": PAIR,
    "attention": (((DIM, DIM), 0), ((DIM, DIM), 0), ((DIM, DIM), 0), ((DIM, DIM), 1)),
    "conv": (((HIDDEN_CHANNELS, CHANNELS, 1, 1), 0), ((HIDDEN_CHANNELS,), 0), ((CHANNELS, HIDDEN_CHANNELS, 1, 1), 1), ((CHANNELS,), None)),
    "head": (((VOCAB, DIM), 0),),
}


@functools.lru_cache(maxsize=16)  # the tensors of a layer, for each of its cases; nothing writes to them
def cached_numbers(torch, shape, stream):
    return make_numbers(torch, shape, stream, 0)


def numbers(torch, shape, stream, first=0):
    """Numbers uniform on [-0.5, 0.5), as number() of bench/train/inputs.hpp. Do not write to them."""
    return cached_numbers(torch, tuple(shape), stream) if first == 0 else make_numbers(torch, shape, stream, first)


def make_numbers(torch, shape, stream, first):
    mask = 0xFFFFFFFF
    i = torch.arange(first, first + math.prod(shape), dtype=torch.int64)
    h = ((i + stream * 0x9E3779B9) & mask) * 2654435761 & mask
    h ^= h >> 15
    h = h * 2246822519 & mask
    h ^= h >> 13
    h = h * 3266489917 & mask
    h ^= h >> 16
    return ((h >> 8).to(torch.float64) * 2.0**-24 - 0.5).to(torch.float32).reshape(shape)


class Layer:
    """One rank's layer, its input and its gradient."""

    def __init__(self, torch, dist, layer, dtype, tokens, each_pass, rank, ranks):
        self.torch, self.dist, self.layer, self.rank, self.n, self.both = torch, dist, layer, rank, ranks, each_pass == "both"
        self.w, self.split = [], []
        for k, (shape, dim) in enumerate(SHAPES[layer]):
            whole = numbers(torch, shape, WEIGHTS + k) * (3 / math.sqrt(shape[1] if len(shape) > 1 else shape[0]))
            mine = whole if dim is None else whole.chunk(ranks, dim)[rank].contiguous()
            self.w.append(mine.to(dtype).requires_grad_(self.both))
            self.split.append(dim)
        if layer == "attention":
            x = (1, tokens, DIM)
        elif layer == "conv":
            height = 1
            while 4 * height * height <= tokens:
                height *= 2
            x = (1, CHANNELS, height, tokens // height)
        else:
            x = (tokens, DIM)
        y = (tokens, VOCAB) if layer == "head" else x
        self.x = (2 * numbers(torch, x, X)).to(dtype).requires_grad_(self.both)
        dy = 2 * numbers(torch, y, DY)
        self.dy = (dy.chunk(ranks, 1)[rank].contiguous() if layer == "head" else dy).to(dtype)
        group = dist

        class Enter(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x

            @staticmethod
            def backward(ctx, dx):
                dx = dx.contiguous()
                group.all_reduce(dx)
                return dx

        class Leave(torch.autograd.Function):
            @staticmethod
            def forward(ctx, y):
                group.all_reduce(y)
                return y

            @staticmethod
            def backward(ctx, dy):
                return dy

        self.enter = Enter.apply if ranks > 1 else lambda x: x
        self.leave = Leave.apply if ranks > 1 else lambda y: y

    def forward(self):
        F, w, x = self.torch.nn.functional, self.w, self.enter(self.x)
        if self.layer == "head":
            return F.linear(x, w[0])
        if self.layer == "attention":
            q, k, v = (F.linear(x, m).unflatten(-1, (HEADS // self.n, DIM // HEADS)).transpose(1, 2) for m in w[:3])
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.leave(F.linear(out.transpose(1, 2).flatten(2), w[3]))
        if self.layer == "conv":
            hidden = F.gelu(F.conv2d(x, w[0], w[1]))
            return self.leave(F.conv2d(hidden, w[2])) + w[3].view(1, -1, 1, 1) if self.n > 1 else F.conv2d(hidden, w[2], w[3])
        hidden = F.linear(x, w[0], w[1])
        hidden = F.gelu(hidden) if self.layer == "mlp" else hidden
        return self.leave(F.linear(hidden, w[2])) + w[3] if self.n > 1 else F.linear(hidden, w[2], w[3])

    def run(self):
        if not self.both:
            with self.torch.no_grad():
                self.y = self.forward()
            return
        self.y = self.forward()
        self.gradients = self.torch.autograd.grad(self.y, [self.x, *self.w], self.dy)

    def checks(self):
        """Projections and norms, as Layer::checks() of layers_bench.cpp."""
        found = {}

        def add(what, t, dim):
            t, whole = t.detach().to(self.torch.float64), list(t.shape)
            if dim is not None:
                whole[dim] *= self.n
            probe = numbers(self.torch, whole, PROBE)
            if dim is not None:
                probe = probe.chunk(self.n, dim)[self.rank]
            sums = self.torch.stack([(t * probe).sum(), (t * t).sum()])
            if dim is not None and self.n > 1:
                self.dist.all_reduce(sums)
            found[f"along_{what}"], found[f"norm_{what}"] = float(sums[0]), math.sqrt(float(sums[1]))

        add("y", self.y, 1 if self.layer == "head" else None)
        if self.both:
            add("dx", self.gradients[0], None)
            for k, dw in enumerate(self.gradients[1:]):
                add(f"dw{k}", dw, self.split[k])
        return found


def measure(case, agree, seconds):
    """(median, 99th percentile, samples) in us: bench/measure.cpp in Python."""
    for _ in range(3):  # the first three runs do not count, however long they take
        start = time.perf_counter()
        case.run()
        us = (time.perf_counter() - start) * 1e6
    block = agree(0 if us >= seconds * 1e6 else 1)
    while block:
        start = time.perf_counter()
        for _ in range(block):
            case.run()
        took = time.perf_counter() - start
        us = took * 1e6 / block
        block = agree(0 if took >= seconds / 5 else 2 * block)
    enough = agree(int(min(max(2e6 * seconds / us, 2), 8)))
    batch = agree(int(min(max(seconds * 1e6 / 4 / us, 4), 16)))
    samples = []
    begin = time.perf_counter()
    more = 1
    while more:
        if enough == 8:
            case.run()
        for _ in range(batch if enough == 8 else enough):
            start = time.perf_counter()
            case.run()
            samples.append((time.perf_counter() - start) * 1e6)
        more = agree(int(time.perf_counter() - begin < seconds or len(samples) < enough))
    samples.sort()
    return samples[(len(samples) - 1) // 2], samples[len(samples) * 99 // 100], len(samples)


def join(rank, a, port, over=""):
    """Makes this rank one of a.ranks over Gloo. Returns torch, torch.distributed and agree(number), which
    returns rank 0's number on all ranks."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=a.ranks)
    dist.barrier()
    if rank == 0:
        print_row({"who": "torch", "settings": f"torch {torch.__version__}{over}, {torch.backends.cpu.get_cpu_capability()}"})
    word = torch.zeros(1, dtype=torch.int64)

    def agree(mine):
        word[0] = mine
        dist.broadcast(word, 0)
        return int(word[0])

    return torch, dist, agree


def in_turn(a, cases):
    """Yields the cases, each when `weft bench` gives this peer a turn, until there are no more cases or
    turns."""
    turns = open(a.turns, "rb", buffering=0) if a.turns else None
    take = lambda: turns is None or len(turns.read(1)) == 1
    for case in cases:
        if not take():
            return
        yield case
    take()


def body(rank, a, port):
    torch, dist, agree = join(rank, a, port)
    types = {"f32": torch.float32, "bf16": torch.bfloat16}
    cases = [(l, d, t, p) for l in a.layers for d in a.dtype for t in a.tokens for p in a.passes] * a.rounds
    for layer, dtype, tokens, each_pass in in_turn(a, cases):
        case = Layer(torch, dist, layer, types[dtype], tokens, each_pass, rank, a.ranks)
        median, p99, samples = measure(case, agree, a.seconds)
        checks = case.checks()
        if rank == 0:
            print_row({"op": "layers", "case": f"{layer}/{dtype}/{tokens}/{each_pass}", "ranks": a.ranks, "bytes": 0,
                       "median_us": median, "p99_us": p99, "samples": samples, **checks})
    dist.destroy_process_group()


def rank_main(rank, a, body, port, parent):
    die_with(parent)
    cores = sorted(os.sched_getaffinity(0))
    if a.bind == "cores" and len(cores) >= a.ranks:
        os.sched_setaffinity(0, {cores[rank]})
    body(rank, a, port)


def start_ranks(a, body):
    """Runs body(rank, a, port) in a.ranks processes and exits with their status."""
    import socket

    try:
        import torch.distributed  # noqa: F401  for a clear error before anything is started
    except ImportError as e:
        sys.exit(f"Error: {e}; pip install torch, and name its python by --python")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    start = multiprocessing.get_context("fork")
    ranks = [start.Process(target=rank_main, args=(r, a, body, port, os.getpid())) for r in range(a.ranks)]
    for r in ranks:
        r.start()
    for r in ranks:
        r.join()
    sys.exit(max(abs(r.exitcode) for r in ranks))


if __name__ == "__main__":
    start_ranks(flags(), body)
