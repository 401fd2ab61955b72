#!/usr/bin/env python3
"""weft beside PyTorch: the transformer of `weft train` and an equal one in plain PyTorch, from the same
initial values, on the same batches of a text, with AdamW, clipping and the same learning rates.

    torch_transformer.py [--steps 300] [--text FILE] [--threads 1]

Needs numpy and torch (without torch it says so and exits with 77), and weft in PYTHONPATH. The initial values
go to PyTorch by a checkpoint that weft exports as safetensors. Prints both losses of the first ten steps, the
means of the last 20, and tokens/s, and fails unless they agree: to 1e-5, and to 1 %.
"""
import argparse
import json
import pathlib
import struct
import sys
import tempfile
import time

try:
    import numpy as np
    import torch
    import torch.nn.functional as F
except ImportError as reason:
    print(f"skipped: {reason}")
    sys.exit(77)
import weft
from weft import train

SIZES = {"dim": 128, "layers": 4, "heads": 4, "kv_heads": 4, "ffn_hidden": 352, "vocab": 256, "max_seq": 128}
BATCH, SEQUENCE, RATE, THETA, EPS = 16, 128, 2e-3, 10000.0, 1e-5


def read_safetensors(path):
    """A length, the JSON of names, dtypes, shapes and offsets, then the elements."""
    whole = pathlib.Path(path).read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    tensors = {}
    for name, of in json.loads(whole[8:8 + length]).items():
        if name == "__metadata__":
            continue
        assert of["dtype"] == "F32", of
        begin, end = (8 + length + at for at in of["data_offsets"])
        tensors[name.removeprefix("param.")] = torch.from_numpy(np.frombuffer(whole[begin:end], np.float32).reshape(of["shape"]).copy())
    return tensors


class Transformer:
    """The model in plain PyTorch, on tensors by weft's names."""

    def __init__(self, values):
        self.values = {name: value.requires_grad_() for name, value in values.items()}
        half = SIZES["dim"] // SIZES["heads"] // 2
        angles = torch.outer(torch.arange(SEQUENCE, dtype=torch.float64), THETA ** (-torch.arange(half, dtype=torch.float64) / half))
        self.cos, self.sin = angles.cos().float(), angles.sin().float()

    def rotated(self, x):
        first, second = x.chunk(2, -1)
        return torch.cat([first * self.cos - second * self.sin, second * self.cos + first * self.sin], -1)

    def loss(self, inputs, targets):
        v = self.values
        x = F.embedding(inputs, v["token_embedding.embedding.weight"])
        norm = lambda x, name: F.rms_norm(x, x.shape[-1:], v[name + ".weight"], EPS)  # noqa: E731
        heads = lambda x: x.unflatten(-1, (SIZES["heads"], -1)).transpose(1, 2)  # noqa: E731
        for layer in range(SIZES["layers"]):
            at = f"layers.{layer}."
            y = norm(x, at + "attention_norm")
            q, k, w = (heads(F.linear(y, v[f"{at}attention.{p}_proj.weight"])) for p in "qkv")
            y = F.scaled_dot_product_attention(self.rotated(q), self.rotated(k), w, is_causal=True)
            x = x + F.linear(y.transpose(1, 2).flatten(2), v[at + "attention.o_proj.weight"])
            y = norm(x, at + "mlp_norm")
            y = F.silu(F.linear(y, v[at + "mlp.gate_proj.weight"])) * F.linear(y, v[at + "mlp.up_proj.weight"])
            x = x + F.linear(y, v[at + "mlp.down_proj.weight"])
        logits = F.linear(norm(x, "norm"), v["output_head.proj.weight"])
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches(text, steps):
    for step in range(steps):
        starts = np.random.default_rng(step).integers(0, len(text) - SEQUENCE - 1, BATCH)
        rows = np.stack([text[s:s + SEQUENCE + 1] for s in starts])
        yield np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])


def by_torch(values, text, rate, steps):
    model = Transformer(values)
    kinds = [[p for p in model.values.values() if (p.dim() > 1) == decays] for decays in (True, False)]
    optimizer = torch.optim.AdamW([{"params": kinds[0], "weight_decay": 0.1}, {"params": kinds[1], "weight_decay": 0.0}], betas=(0.9, 0.95), eps=1e-8)
    for step, (inputs, targets) in enumerate(batches(text, steps)):
        loss = model.loss(torch.from_numpy(inputs), torch.from_numpy(targets))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.values.values(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        yield loss.item()


def by_weft(model, text, rate, steps):
    trainer = train.Trainer(model, optimizer={"name": "adamw", "weight_decay": 0.1}, max_norm=1.0)
    for step, (inputs, targets) in enumerate(batches(text, steps)):
        yield trainer.step(train.Batch(inputs, targets), rate(step)).loss


def in_turns(*trainings):
    """The losses of each training, and its seconds. They take turns step by step: other load meets all."""
    losses, seconds = [[] for _ in trainings], [0.0] * len(trainings)
    more = True
    while more:
        for at, training in enumerate(trainings):
            began = time.perf_counter()
            loss = next(training, None)
            seconds[at] += time.perf_counter() - began
            more = loss is not None
            if more:
                losses[at].append(loss)
    return losses, seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--text", default="/usr/share/common-licenses/GPL-3")
    parser.add_argument("--threads", type=int, default=1)
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    text = np.frombuffer(pathlib.Path(flags.text).read_bytes(), np.uint8).astype(np.int64)
    rate = train.Schedule("cosine", RATE, floor=RATE / 10, warmup=min(100, flags.steps // 3), total=flags.steps)
    mesh = weft.Mesh(weft.Context().group(), dp=1, tp=1)
    model = train.build_parallel_model(train.transformer(**SIZES), mesh, threads=flags.threads, seed=1)
    with tempfile.TemporaryDirectory() as folder:
        model.save(folder)
        weft.checkpoint.export(folder, folder + "/model.safetensors")
        values = read_safetensors(folder + "/model.safetensors")
    (ours, theirs), (our_time, their_time) = in_turns(by_weft(model, text, rate, flags.steps), by_torch(values, text, rate, flags.steps))
    print(f"torch {torch.__version__}, {flags.threads} thread(s), {flags.steps} steps of {BATCH} x {SEQUENCE} tokens")
    for step, (a, b) in enumerate(zip(ours[:10], theirs[:10])):
        print(f"step {step}: weft {a:.7f}  torch {b:.7f}  apart {abs(a - b):.1e}")
    mean, other = (sum(losses[-20:]) / len(losses[-20:]) for losses in (ours, theirs))
    print(f"mean of the last 20: weft {mean:.5f}  torch {other:.5f}  apart {100 * abs(mean - other) / other:.3f} %")
    tokens = BATCH * SEQUENCE * flags.steps
    print(f"tokens/s: weft {tokens / our_time:.0f}  torch {tokens / their_time:.0f}")
    well = all(abs(a - b) <= 1e-5 for a, b in zip(ours[:10], theirs[:10])) and abs(mean - other) <= 0.01 * other
    print("agree" if well else "DIFFER")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
