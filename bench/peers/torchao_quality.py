#!/usr/bin/env python3
"""Losses of the demo's model in float8: weft, and torchao with the same initial values on the same batches.

    torchao_quality.py [--weft build/release/bin/weft] [--seeds 1,2,3,4] [--recipe tensorwise] [--steps 300] [--only weft|torchao]

For each seed trains without and with the recipe, on one rank with one thread, and prints the mean loss of the
last 20 steps of both, and their difference: rows of a Markdown table. weft: `weft train --weights bf16`.
torch: the same transformer, batches, schedule and AdamW, from the values of a checkpoint of weft; in its
products the operands are rounded to bf16 and the sums are f32, as in weft; converted layers are torchao's
Float8Linear, emulated, on f32 activations. One difference is left: torch computes attention in f32, weft with
operands of bf16, with float8 and without. A run of torch takes some minutes.
"""
import argparse
import dataclasses
import json
import math
import pathlib
import re
import struct
import subprocess
import tempfile

DIM, LAYERS, HEADS, HIDDEN, VOCAB, BATCH, SEQ = 128, 4, 4, 352, 256, 16, 128
TEXT, RATE, LAST_RATE, WARMUP = "/usr/share/common-licenses/GPL-3", 2e-3, 2e-4, 100
MASK = 0xFFFFFFFF


def philox(counter, key):
    """The first word of Philox 4x32-10 (J. Salmon et al., SC 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & MASK, (a >> 32) ^ c3 ^ k1, a & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0


def sample(position, population, seed):
    """As weft::Sampler for a population above 64 that is no power of 4: the sample at a position."""
    half = ((population - 1).bit_length() + 1) // 2
    walk, number = divmod(position, population)
    while True:
        left, right = number >> half, number & ((1 << half) - 1)
        for step in range(6):
            drawn = philox((right, step, walk & MASK, walk >> 32), (seed & MASK, seed >> 32))
            left, right = right, (left ^ drawn) & ((1 << half) - 1)
        number = left << half | right
        if number < population:
            return number


def values_of(folder):
    """The parameters of a checkpoint of one rank."""
    import torch

    (file,) = pathlib.Path(folder).glob("step-*/*.safetensors")
    blob = file.read_bytes()
    (size,) = struct.unpack("<Q", blob[:8])
    found = {}
    for name, of in json.loads(blob[8 : 8 + size]).items():
        if name.startswith("param."):
            begin, end = (8 + size + at for at in of["data_offsets"])
            found[name[len("param.") :]] = torch.frombuffer(bytearray(blob[begin:end]), dtype=torch.float32).reshape(of["shape"])
    return found


def model_of(recipe):
    import torch
    from torch import nn
    from torch.nn import functional as F

    def rounded(x):
        return x + (x.bfloat16().float() - x).detach()  # its gradient passes as it is

    class Products(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            x, w = x.bfloat16().float(), w.bfloat16().float()
            ctx.save_for_backward(x, w)
            return x @ w.t()

        @staticmethod
        def backward(ctx, dy):
            x, w = ctx.saved_tensors
            dy = dy.bfloat16().float()
            return dy @ w, dy.flatten(0, -2).t() @ x.flatten(0, -2)

    class Linear(nn.Linear):
        def __init__(self, inputs, outputs):
            super().__init__(inputs, outputs, bias=False)

        def forward(self, x):
            return Products.apply(x, self.weight)

    half = DIM // HEADS // 2
    angle = torch.outer(torch.arange(SEQ), 10000.0 ** (-torch.arange(half) / half))
    cos, sin = torch.cos(angle), torch.sin(angle)

    def rope(x):
        low, high = x[..., :half], x[..., half:]
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    def tree(**children):
        module = nn.Module()
        for name, child in children.items():
            module.add_module(name, child)
        return module

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention_norm, self.mlp_norm = nn.RMSNorm(DIM, eps=1e-5), nn.RMSNorm(DIM, eps=1e-5)
            self.attention = tree(**{f"{name}_proj": Linear(DIM, DIM) for name in "qkvo"})
            self.mlp = tree(gate_proj=Linear(DIM, HIDDEN), up_proj=Linear(DIM, HIDDEN), down_proj=Linear(HIDDEN, DIM))

        def forward(self, x):
            a, m, h = self.attention, self.mlp, self.attention_norm(x)
            q, k, v = (p(h).view(*h.shape[:2], HEADS, -1).transpose(1, 2) for p in (a.q_proj, a.k_proj, a.v_proj))
            y = F.scaled_dot_product_attention(rope(q), rope(k), v, is_causal=True)
            x = x + a.o_proj(y.transpose(1, 2).flatten(2))
            h = self.mlp_norm(x)
            return x + m.down_proj(F.silu(m.gate_proj(h)) * m.up_proj(h))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.token_embedding = tree(embedding=nn.Embedding(VOCAB, DIM))
            self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm = nn.RMSNorm(DIM, eps=1e-5)
            self.output_head = tree(proj=Linear(DIM, VOCAB))

        def forward(self, tokens):
            x = F.embedding(tokens, rounded(self.token_embedding.embedding.weight))
            for layer in self.layers:
                x = layer(x)
            return self.output_head.proj(self.norm(x))

    model = Model()
    if recipe != "none":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training, float8_linear

        class Converted(float8_linear.Float8Linear):  # of weights in bf16, as weft's
            def forward(self, x):
                w = rounded(self.weight)
                return float8_linear.matmul_with_hp_or_float8_args.apply(x, w.t(), self.linear_mm_config, self.config)

        name = recipe.replace("_gw", "_with_gw")
        config = dataclasses.replace(Float8LinearConfig.from_recipe_name(name), emulate=True)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, path: "output_head" not in path)
        converted = [m for m in model.modules() if isinstance(m, float8_linear.Float8Linear)]
        assert len(converted) == 7 * LAYERS
        for module in converted:
            module.__class__ = Converted
    return model


def train_torch(recipe, seed, steps, values):
    import torch
    from torch.nn import functional as F

    torch.set_num_threads(1)
    model = model_of(recipe)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(values[name])
    groups = [{"params": [p for p in parameters.values() if (p.dim() >= 2) == decays], "weight_decay": 0.1 * decays} for decays in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    text = torch.frombuffer(bytearray(pathlib.Path(TEXT).read_bytes()), dtype=torch.uint8).long()
    warmup = min(WARMUP, steps // 3)
    losses = []
    for step in range(steps):
        fall = 1 + math.cos(math.pi * (step - warmup) / (steps - warmup))
        for group in optimizer.param_groups:
            group["lr"] = RATE * (step + 1) / warmup if step < warmup else LAST_RATE + (RATE - LAST_RATE) / 2 * fall
        starts = [sample(BATCH * step + i, len(text) - SEQ, seed) for i in range(BATCH)]
        window = torch.stack([text[at : at + SEQ + 1] for at in starts])
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-20:]) / len(losses[-20:])


def weft_train(weft, seed, steps, *more):
    command = [weft, "train", "--ranks", "1", "--threads", "1", "--weights", "bf16", "--seed", str(seed), "--steps", str(steps)]
    out = subprocess.run([*command, "--progress", "none", *more], check=True, capture_output=True, text=True).stdout
    return float(re.search(r"mean of the last \d+ steps ([\d.]+)", out)[1])


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--weft", default="build/release/bin/weft")
    p.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[1, 2, 3, 4])
    p.add_argument("--recipe", default="tensorwise", help="tensorwise or rowwise")
    p.add_argument("--steps", type=int, default=300)
    p.add_argument("--only", choices=("weft", "torchao"))
    o = p.parse_args()
    print("| seed | program | none | " + o.recipe + " | difference |\n|---|---|---:|---:|---:|")
    for seed in o.seeds:
        with tempfile.TemporaryDirectory() as folder:
            # A step at the rate 0 leaves the initial values.
            weft_train(o.weft, seed, o.steps, "--until", "1", "--lr", "0", "--lr-floor", "0", "--save", folder + "/run")
            values = None if o.only == "weft" else values_of(folder + "/run")
        for program in ("weft", "torchao"):
            if o.only in (None, program):
                plain, narrow = (
                    weft_train(o.weft, seed, o.steps, "--float8", recipe) if program == "weft" else train_torch(recipe, seed, o.steps, values)
                    for recipe in ("none", o.recipe)
                )
                print(f"| {seed} | {program} | {plain:.4f} | {narrow:.4f} | {narrow / plain * 100 - 100:+.1f} % |", flush=True)


if __name__ == "__main__":
    main()
