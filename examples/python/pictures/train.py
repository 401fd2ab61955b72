"""A model of one's own over a mesh: a small convolutional classifier of pictures that the program makes. It
trains with divided parameters and activation checkpointing, saves, and goes on on other ranks.

    python -m weft.run -n 4 train.py begin     dp 2 x tp 2, steps 1 to 20, saves
    python -m weft.run -n 3 train.py resume    dp 3, steps 21 to 40
"""
import shutil
import sys

import numpy as np

import weft
import weft.nn as nn
from weft import train

ROWS, SIZE, STEPS, FOLDER = 12, 8, 20, "pictures-checkpoint"


def classifier():
    """(rows, 1, 8, 8) -> (rows, 1, 1, 1), which is positive for stripes along the columns."""
    # The own plan of a ChannelFeedForward splits its products, by columns and by rows.
    stages = (nn.Residual(nn.ChannelFeedForward(8, 16, dropout=0.1, init=0.2, down_init=0.2)) for _ in range(2))
    return nn.Sequential(embed=nn.Conv2d(1, 8, kernel=3, padding=1, init=0.3), act=nn.GELU(), pool=nn.AdaptiveAvgPool2d(1),
                         stages=nn.Sequential(*stages), head=nn.Conv2d(8, 1, init=0.3))


def make_pictures(step):
    """The batch of a step: noisy stripes along the rows (0) or along the columns (1)."""
    random = np.random.default_rng(step)
    kinds = np.arange(ROWS, dtype=np.float32).reshape(-1, 1, 1, 1) % 2
    rows, columns = np.meshgrid(np.arange(SIZE), np.arange(SIZE), indexing="ij")
    stripes = np.where(kinds == 1, columns % 2, rows % 2)
    return (stripes + 0.5 * random.normal(size=(ROWS, 1, SIZE, SIZE))).astype(np.float32), kinds


resumes = sys.argv[1:] == ["resume"]
group = weft.Context().group()
mesh = weft.Mesh(group, dp=-1, tp=2 if group.size % 2 == 0 else 1)
recipe = train.Recipe(classifier(), loss="binary_cross_entropy", blocks=["stages.*"], name="classifier of pictures")
model = train.build_parallel_model(recipe, mesh, data="fsdp", ac="full", seed=3)
trainer = train.Trainer(model, optimizer="adamw", seed=1)
if resumes:
    trainer.load(FOLDER)
mine = model.rows(ROWS)
for step in range(trainer.steps, trainer.steps + STEPS):
    pictures, kinds = make_pictures(step)
    result = trainer.step(train.Batch(pictures[mine], kinds[mine], global_rows=ROWS), rate=5e-3)
    if group.rank == 0 and trainer.steps % 10 == 0:
        print(f"step {trainer.steps}: loss {result.loss:.3f}", flush=True)  # over all ranks
if not resumes:
    if group.rank == 0:
        shutil.rmtree(FOLDER, ignore_errors=True)
    group.barrier().wait()
    trainer.save(FOLDER)
