"""Casts and scales of other libraries, for float8_oracle_test.cpp.

    python float8_oracle.py FOLDER

Reads x.f32 (values to cast) and amax.f32 (largest magnitudes) of FOLDER, and writes there for each format,
e4m3 and e5m2: the codes of x by torch, torchao and ml_dtypes, the values of all 256 codes by torch and
ml_dtypes, and the scales of amax by torchao, plain and rounded down to powers of two.
"""

import sys

import ml_dtypes
import numpy as np
import torch
from torchao.float8 import float8_utils

folder = sys.argv[1] + "/"
x = np.fromfile(folder + "x.f32", np.float32)
amax = torch.from_numpy(np.fromfile(folder + "amax.f32", np.float32))
codes = np.arange(256, dtype=np.uint8)
for name, of_torch, of_numpy in (
    ("e4m3", torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn),
    ("e5m2", torch.float8_e5m2, ml_dtypes.float8_e5m2),
):
    largest = torch.finfo(of_torch).max
    clamped = np.clip(x, -largest, largest)  # a cast of ml_dtypes does not saturate; a NaN stays one
    torch.from_numpy(clamped).to(of_torch).view(torch.uint8).numpy().tofile(folder + f"torch_{name}.u8")
    float8_utils.to_fp8_saturated(torch.from_numpy(x), of_torch).view(torch.uint8).numpy().tofile(
        folder + f"torchao_{name}.u8"
    )
    clamped.astype(of_numpy).view(np.uint8).tofile(folder + f"ml_dtypes_{name}.u8")
    torch.from_numpy(codes).view(of_torch).float().numpy().tofile(folder + f"torch_{name}.f32")
    codes.view(of_numpy).astype(np.float32).tofile(folder + f"ml_dtypes_{name}.f32")
    for power in (False, True):
        scales = float8_utils.amax_to_scale(amax, of_torch, round_scales_to_power_of_2=power)
        scales.numpy().tofile(folder + f"{'power_' if power else ''}scales_{name}.f32")
print(f"torch {torch.__version__}, ml_dtypes {ml_dtypes.__version__}")
