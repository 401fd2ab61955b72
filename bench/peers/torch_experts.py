#!/usr/bin/env python3
"""Measures the cases of experts_bench in torch. dispatch: all_to_all_single over Gloo of a row for each
choice of a token, own rows too, which lie packed in order. layer: torch's grouped product, forward and
backward: the SwiGLU of all eight experts on each rank's own tokens, in f32; nothing travels, and routing is
given. A torch without a grouped product multiplies expert by expert. The choices, samples and rows are those
of experts_bench (bench/train/experts_bench.cpp, bench/measure.hpp).

    torch_experts.py --ranks 2 --dispatch 128x7168 --layers 512 --rows
"""
from torch_collectives import parse_flags, print_row, rank_flags, words
from torch_layers import DY, PROBE, WEIGHTS, X, in_turn, join, measure, numbers, start_ranks

EXPERTS, TOP_K, DIM, HIDDEN = 8, 2, 512, 512


def flags():
    p = rank_flags(__doc__)
    p.add_argument("--dispatch", type=words, default=["128x7168"])
    p.add_argument("--layers", type=lambda text: words(text) if text else [], default=[])
    p.add_argument("--rounds", type=int, default=1)
    return parse_flags(p, {})


def choices(torch, first, tokens):
    """choice_of() of bench/train/choices.hpp, (tokens, 2)."""
    random = numbers(torch, (tokens, 2), PROBE, 2 * first) if first else numbers(torch, (tokens, 2), PROBE)
    one = ((random[:, 0] + 0.5) * EXPERTS).long().clamp(max=EXPERTS - 1)
    step = 1 + ((random[:, 1] + 0.5) * (EXPERTS - 1)).long()
    return torch.stack([one, (one + step.clamp(max=EXPERTS - 1)) % EXPERTS], 1)


class Dispatch:
    def __init__(self, torch, dist, size, rank, ranks):
        self.dist = dist
        tokens, width = (int(n) for n in size.split("x"))
        # chunk_of(): the first ranks have one expert more
        ends = [EXPERTS // ranks * r + min(r, EXPERTS % ranks) for r in range(ranks + 1)]
        owner = torch.tensor([r for r in range(ranks) for _ in range(ends[r], ends[r + 1])])
        rows = [torch.bincount(owner[choices(torch, r * tokens, tokens)].flatten(), minlength=ranks) for r in range(ranks)]
        self.sent, self.came = rows[rank].tolist(), [int(of[rank]) for of in rows]
        # bytes: Gloo has no all_to_all of bf16 in every version
        self.x = torch.full((sum(self.sent), 2 * width), rank + 1, dtype=torch.uint8)
        self.y = torch.empty((sum(self.came), 2 * width), dtype=torch.uint8)
        self.run()
        for r, part in enumerate(self.y.split(self.came)):
            if not bool((part == r + 1).all()):
                raise RuntimeError(f"rows of rank {r} are wrong")

    def run(self):
        self.dist.all_to_all_single(self.y, self.x, self.came, self.sent)


def product_of_each(torch):
    """product(rows, weights, offs): torch's grouped product; without one, a loop over the experts."""
    if hasattr(torch, "_grouped_mm"):
        return torch._grouped_mm

    def product(rows, weights, offs):
        ends = offs.tolist()
        return torch.cat([rows[first:end] @ weights[e] for e, (first, end) in enumerate(zip([0, *ends], ends))])
    return product


class Layer:
    def __init__(self, torch, dist, tokens, rank, ranks):
        self.torch, self.product = torch, product_of_each(torch)
        chosen, order = choices(torch, rank * tokens, tokens).flatten().sort(stable=True)
        self.rows = order // TOP_K
        self.ends = torch.bincount(chosen, minlength=EXPERTS).cumsum(0).to(torch.int32)
        self.x = (2 * numbers(torch, (tokens, DIM), X)).requires_grad_(True)
        self.dy = 2 * numbers(torch, (tokens, DIM), DY)
        shapes = ((EXPERTS, DIM, HIDDEN), (EXPERTS, DIM, HIDDEN), (EXPERTS, HIDDEN, DIM))
        self.w = [(numbers(torch, s, WEIGHTS + k) * 0.1).requires_grad_(True) for k, s in enumerate(shapes)]

    def run(self):
        F, product = self.torch.nn.functional, self.product
        rows = self.x[self.rows]
        hidden = F.silu(product(rows, self.w[0], offs=self.ends)) * product(rows, self.w[1], offs=self.ends)
        y = self.torch.zeros_like(self.x).index_add(0, self.rows, product(hidden, self.w[2], offs=self.ends))
        self.torch.autograd.grad(y, [self.x, *self.w], self.dy)


def body(rank, a, port):
    torch, dist, agree = join(rank, a, port, " over Gloo")
    cases = [("dispatch", size) for size in a.dispatch] + [("layer", tokens) for tokens in a.layers]
    for kind, size in in_turn(a, cases * a.rounds):
        row = {"op": "experts", "case": f"{kind}/{size}", "ranks": a.ranks, "bytes": 0}
        case = Dispatch(torch, dist, size, rank, a.ranks) if kind == "dispatch" else Layer(torch, dist, int(size), rank, a.ranks)
        median, p99, samples = measure(case, agree, a.seconds)
        row.update({"median_us": median, "p99_us": p99, "samples": samples})
        if rank == 0:
            print_row(row)
    dist.destroy_process_group()


if __name__ == "__main__":
    start_ranks(flags(), body)
