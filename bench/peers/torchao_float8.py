#!/usr/bin/env python3
"""Processor time of a step, and peak memory, of the demo's model in float8, beside torchao's emulation.

    torchao_float8.py [--weft build/release/bin/weft] [--threads 1] [--steps 10] [--repeat 3] [--rows f32,bf16]

Both train the demo's transformer (4 blocks, width 128, 16 sequences of 128 bytes) on one rank. torch: f32
parameters and AdamW; autocast to bf16 in all rows except the first; float8 by torchao with `emulate=True`,
which a CPU needs. weft: f32 masters, `--weights bf16` in all rows except the first. The output head stays as
it is in both. Each run is a process of its own. A step's processor time: torch's smallest of --steps; of weft
the difference of the smallest of --repeat runs of 2 and of 8 times as many steps, so that its start does not
count. Peak memory: the largest resident set, and for comparison that of a process that imports torch and
torchao alone. Prints the rows of a Markdown table.
"""
import argparse
import os
import subprocess
import sys
import time

ROWS = ("f32", "bf16", "tensorwise", "rowwise", "rowwise_gw_hp")
DIM, LAYERS, HEADS, HIDDEN, VOCAB, BATCH, SEQ = 128, 4, 4, 352, 256, 16, 128


def train_torch(row, steps, threads):
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.set_num_threads(threads)
    torch.manual_seed(1)
    work = torch.float32 if row == "f32" else torch.bfloat16
    angle = torch.outer(torch.arange(SEQ), 10000.0 ** (-torch.arange(0, DIM // HEADS, 2) / (DIM // HEADS)))
    cos, sin = torch.cos(angle), torch.sin(angle)

    def rope(x):
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mlp_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
            self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
            self.gate, self.up = (nn.Linear(DIM, HIDDEN, bias=False) for _ in range(2))
            self.down = nn.Linear(HIDDEN, DIM, bias=False)

        def forward(self, x):
            h = self.norm(x).to(work)
            q, k, v = (p(h).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
            y = F.scaled_dot_product_attention(rope(q), rope(k), v, is_causal=True)
            x = x + self.o(y.transpose(1, 2).flatten(2))
            h = self.mlp_norm(x).to(work)
            return x + self.down(F.silu(self.gate(h)) * self.up(h))

    model = nn.Sequential(nn.Embedding(VOCAB, DIM), *(Block() for _ in range(LAYERS)), nn.RMSNorm(DIM))
    head = nn.Linear(DIM, VOCAB, bias=False)
    if row not in ("f32", "bf16"):
        import dataclasses

        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = dataclasses.replace(Float8LinearConfig.from_recipe_name(row.replace("_gw", "_with_gw")), emulate=True)
        convert_to_float8_training(model, config=config)
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.1)
    with open("/usr/share/common-licenses/GPL-3", "rb") as text:
        data = torch.frombuffer(bytearray(text.read()), dtype=torch.uint8).long()
    times = []
    for _ in range(steps):
        began = time.process_time()
        first = torch.randint(len(data) - SEQ - 1, (BATCH,))
        window = torch.stack([data[i : i + SEQ + 1] for i in first.tolist()])
        with torch.autocast("cpu", torch.bfloat16, enabled=row != "f32"):
            logits = head(model(window[:, :-1]))
        loss = F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.process_time() - began)
    print(f"loss {loss.item():.3f}, the fastest step in ms {min(times) * 1000:.1f}")


def measured(command, environment):
    """Its processor time in seconds, its largest resident set in MiB, and what it printed."""
    child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    text = child.stdout.read().decode()
    _, status, usage = os.wait4(child.pid, 0)
    if status != 0:
        sys.exit(f"{' '.join(command)}:\n{text}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, text


def of_weft(command_for, steps, repeat, environment):
    """Milliseconds of a step and MiB: long runs less short ones, so that the start does not count."""
    short = [measured(command_for(steps), environment) for _ in range(repeat)]
    long = [measured(command_for(4 * steps), environment) for _ in range(repeat)]
    return (min(long)[0] - min(short)[0]) / (3 * steps) * 1000, max(run[1] for run in long)


def of_torch(command, repeat, environment):
    runs = [measured(command, environment) for _ in range(repeat)]
    return min(float(run[2].split()[-1]) for run in runs), max(run[1] for run in runs)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--weft", default="build/release/bin/weft")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--steps", type=int, default=10)
    p.add_argument("--repeat", type=int, default=3)
    p.add_argument("--rows", type=lambda text: text.split(","), default=ROWS, help="some of " + ",".join(ROWS))
    p.add_argument("--torch-row", choices=ROWS, help=argparse.SUPPRESS)
    o = p.parse_args()
    if o.torch_row:
        return train_torch(o.torch_row, o.steps, o.threads)
    environment = dict(os.environ, OMP_NUM_THREADS=str(o.threads))
    imports = "import torch; from torchao.float8 import convert_to_float8_training"
    print(f"torch and torchao imported: {measured([sys.executable, '-c', imports], environment)[1]:.0f} MiB\n")
    print("| row | weft, ms a step | weft, MiB | torchao, ms a step | torchao, MiB |\n|---|---:|---:|---:|---:|")
    for row in o.rows:
        def weft(steps):
            weights = "f32" if row == "f32" else "bf16"
            float8 = [] if row in ("f32", "bf16") else ["--float8", row]
            return [o.weft, "train", "--ranks", "1", "--threads", str(o.threads), "--steps", str(steps),
                    "--weights", weights, *float8]  # fmt: skip

        torch = [sys.executable, __file__, "--torch-row", row, "--steps", str(o.steps), "--threads", str(o.threads)]
        ours = of_weft(weft, 2 * o.steps, o.repeat, environment)
        theirs = of_torch(torch, o.repeat, environment)
        print(f"| {row} | {ours[0]:.1f} | {ours[1]:.0f} | {theirs[0]:.1f} | {theirs[1]:.0f} |", flush=True)


if __name__ == "__main__":
    main()
