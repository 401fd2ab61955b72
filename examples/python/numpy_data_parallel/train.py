"""Fits a linear model with NumPy on several ranks: each rank has a part of every batch, and weft averages the
gradients in place."""
import numpy as np
import weft

context = weft.Context()
group = context.group()
mesh = weft.Mesh(group, dp=-1)
generator = np.random.default_rng(0)
inputs = generator.standard_normal((1024, 16))
targets = inputs @ np.arange(16.0) + 3.0

weight = np.zeros(16)
bias = np.zeros(1)
gradients = {name: (np.empty_like(value), weft.Layout(mesh, value.shape, dp=weft.partial("avg"))) for name, value in {"weight": weight, "bias": bias}.items()}
with weft.Sampler(mesh, len(inputs), 64, seed=1) as sampler:
    for step in range(101):
        rows = sampler.batch(step)
        error = inputs[rows] @ weight + bias - targets[rows]
        gradients["weight"][0][...] = inputs[rows].T @ error / len(rows)
        gradients["bias"][0][...] = error.mean()
        weft.reduce_gradients(gradients, mesh, data_axes=mesh)
        weight -= 0.1 * gradients["weight"][0]
        bias -= 0.1 * gradients["bias"][0]
        loss = group.all_reduce(float((error**2).mean()), op="avg").wait()
        if step % 50 == 0 and group.rank == 0:
            print(f"step {step}: loss {loss:.4f}", flush=True)
if group.rank == 0:
    print("weights:", np.round(weight, 2)[:4], "bias:", np.round(bias, 2))
