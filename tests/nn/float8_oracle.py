"""Casts, scales and layers of other libraries, for float8_oracle_test.cpp.

    python float8_oracle.py casts FOLDER

Reads x.f32 (values to cast) and amax.f32 (largest magnitudes) of FOLDER, and writes there for each format,
e4m3 and e5m2: the codes of x by torch, torchao and ml_dtypes, the values of all 256 codes by torch and
ml_dtypes, and the scales of amax by torchao, plain and rounded down to powers of two.

    python float8_oracle.py layers FOLDER

Each folder in FOLDER is a layer: shape.txt has its numbers of tokens, inputs and outputs; x.f32, w.f32
(out, in) and dy.f32 are what it gets. Writes y, dx and dw of torchao's Float8Linear, emulated, for each
recipe: RECIPE.y.f32 and so on.
"""

import dataclasses
import pathlib
import sys

import ml_dtypes
import numpy as np
import torch
from torchao.float8 import Float8LinearConfig, float8_utils
from torchao.float8.float8_linear import Float8Linear


def casts(folder):
    x = np.fromfile(folder / "x.f32", np.float32)
    amax = torch.from_numpy(np.fromfile(folder / "amax.f32", np.float32))
    codes = np.arange(256, dtype=np.uint8)
    for name, of_torch, of_numpy in (
        ("e4m3", torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn),
        ("e5m2", torch.float8_e5m2, ml_dtypes.float8_e5m2),
    ):
        largest = torch.finfo(of_torch).max
        clamped = np.clip(x, -largest, largest)  # a cast of ml_dtypes does not saturate; a NaN stays one
        torch.from_numpy(clamped).to(of_torch).view(torch.uint8).numpy().tofile(folder / f"torch_{name}.u8")
        float8_utils.to_fp8_saturated(torch.from_numpy(x), of_torch).view(torch.uint8).numpy().tofile(
            folder / f"torchao_{name}.u8"
        )
        clamped.astype(of_numpy).view(np.uint8).tofile(folder / f"ml_dtypes_{name}.u8")
        torch.from_numpy(codes).view(of_torch).float().numpy().tofile(folder / f"torch_{name}.f32")
        codes.view(of_numpy).astype(np.float32).tofile(folder / f"ml_dtypes_{name}.f32")
        for power in (False, True):
            scales = float8_utils.amax_to_scale(amax, of_torch, round_scales_to_power_of_2=power)
            scales.numpy().tofile(folder / f"{'power_' if power else ''}scales_{name}.f32")


def layers(folder):
    for at in sorted(f for f in folder.iterdir() if f.is_dir()):
        tokens, inputs, outputs = map(int, (at / "shape.txt").read_text().split())

        def tensor(name, *shape):
            return torch.from_numpy(np.fromfile(at / f"{name}.f32", np.float32).reshape(shape))

        for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
            config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
            layer = Float8Linear(inputs, outputs, bias=False, config=config)
            with torch.no_grad():
                layer.weight.copy_(tensor("w", outputs, inputs))
            x = tensor("x", tokens, inputs).requires_grad_()
            y = layer(x)
            y.backward(tensor("dy", tokens, outputs))
            for name, result in (("y", y.detach()), ("dx", x.grad), ("dw", layer.weight.grad)):
                result.contiguous().numpy().tofile(at / f"{recipe.replace('_with', '')}.{name}.f32")


{"casts": casts, "layers": layers}[sys.argv[1]](pathlib.Path(sys.argv[2]))
print(f"torch {torch.__version__}, ml_dtypes {ml_dtypes.__version__}")
