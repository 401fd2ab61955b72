"""Optimizers, schedules and losses of weft.train against those of PyTorch, and of the packages of their
fields (schedulefree, lion-pytorch, transformers) where they are there: 100 steps each, on one rank and on
two."""
import numpy as np
import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional
torch.set_num_threads(1)

import weft  # noqa: E402  pylint: disable=wrong-import-position

try:
    from weft import nn, train
except ImportError as reason:
    pytest.skip(f"libweft_train is not there: {reason}", allow_module_level=True)

STEPS, RATE, DECAY = 100, 0.01, 0.1
SHAPES = {"up.weight": (12, 8), "up.bias": (12,), "down.weight": (6, 12), "down.bias": (6,)}


def model_of(group, loss="mean_squared_error", data="ddp"):
    recipe = train.Recipe(nn.Sequential(up=nn.Linear(8, 12, bias=True, init=0.3), act=nn.GELU(), down=nn.Linear(12, 6, bias=True, init=0.3)), loss=loss)
    return train.build_parallel_model(recipe, weft.Mesh(group, dp=-1, tp=1), data=data, seed=3)


def gradients_of(step):
    """The same gradients for both sides, whatever the parameters are."""
    random = np.random.default_rng(step)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def start():
    """The parameters of weft's model as tensors of torch, on one rank."""
    with weft.Context().group_in(weft.Store.local(), 0, 1) as group, model_of(group) as model:
        return {name: torch.tensor(model.value(name)) for name in SHAPES}


def by_weft(ranks, size, optimizer, rate=lambda step: RATE):
    """The parameters after STEPS steps with these gradients, and those to evaluate."""
    def program(group):
        trainer = train.Trainer(model_of(group), optimizer=optimizer, max_norm=0)
        x = np.ones((size, 8), np.float32)
        mine = trainer.model.rows(size)
        batch = train.Batch(x[mine], np.zeros((size, 6), np.float32)[mine], global_rows=size)
        for step in range(STEPS):
            trainer.backward(batch)
            trainer.set_gradients(gradients_of(step))
            trainer.update(rate(step))
        trained = {name: trainer.model.value(name) for name in SHAPES}
        trainer.swap_evaluation(True)
        return trained, {name: trainer.model.value(name) for name in SHAPES}
    return ranks(size, program)[0]


def groups_of(values, decay=DECAY):
    """weft's decay is for parameters of two dimensions or more."""
    return [{"params": [v for v in values.values() if v.dim() > 1], "weight_decay": decay},
            {"params": [v for v in values.values() if v.dim() == 1], "weight_decay": 0.0}]


def by_torch(values, optimizers, rate=lambda step: RATE):
    for step in range(STEPS):
        for name, gradient in gradients_of(step).items():
            values[name].grad = torch.tensor(gradient)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
            optimizer.step()
    return {name: v.detach().numpy() for name, v in values.items()}


def expect_same(ours, theirs, tolerance=2e-5):
    for name, value in ours.items():
        np.testing.assert_allclose(value, theirs[name], rtol=tolerance, atol=tolerance, err_msg=name)


def parameters():
    return {name: torch.nn.Parameter(value) for name, value in start().items()}


def warm(step):
    return RATE * min(1.0, (step + 1) / 10)


@pytest.mark.parametrize("size", [1, 2])
def test_adamw(ranks, size):
    values = parameters()
    optimizer = torch.optim.AdamW(groups_of(values), lr=RATE, betas=(0.9, 0.99), eps=1e-8)
    expect_same(by_weft(ranks, size, {"name": "adamw", "beta2": 0.99, "weight_decay": DECAY}, warm)[0], by_torch(values, [optimizer], warm))


@pytest.mark.parametrize("size", [1, 2])
def test_sgd(ranks, size):
    values = parameters()
    optimizer = torch.optim.SGD(groups_of(values), lr=RATE, momentum=0.9)
    expect_same(by_weft(ranks, size, {"name": "sgd", "momentum": 0.9, "weight_decay": DECAY})[0], by_torch(values, [optimizer]))


@pytest.mark.parametrize("size", [1, 2])
def test_lion(ranks, size):
    lion = pytest.importorskip("lion_pytorch")
    values = parameters()
    optimizer = lion.Lion(groups_of(values), lr=RATE, betas=(0.9, 0.99))
    expect_same(by_weft(ranks, size, {"name": "lion", "beta2": 0.99, "weight_decay": DECAY})[0], by_torch(values, [optimizer]))


@pytest.mark.parametrize("size", [1, 2])
def test_schedule_free_adamw(ranks, size):
    schedulefree = pytest.importorskip("schedulefree")
    values = parameters()
    optimizer = schedulefree.AdamWScheduleFree(groups_of(values), lr=RATE, betas=(0.9, 0.999), eps=1e-8)
    optimizer.train()
    trained, evaluated = by_weft(ranks, size, {"name": "schedule_free_adamw", "weight_decay": DECAY}, warm)
    expect_same(trained, by_torch(values, [optimizer], warm))
    optimizer.eval()
    expect_same(evaluated, {name: v.detach().numpy() for name, v in values.items()})


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("original", [False, True])
def test_muon(ranks, size, original):
    if not hasattr(torch.optim, "Muon"):
        pytest.skip(f"torch {torch.__version__} has no torch.optim.Muon")
    values = parameters()
    matrices, others = ([v for v in values.values() if (v.dim() > 1) == two] for two in (True, False))
    muon = torch.optim.Muon(matrices, lr=RATE, weight_decay=DECAY, momentum=0.95, adjust_lr_fn="original" if original else "match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0)
    ours = by_weft(ranks, size, {"name": "muon", "weight_decay": DECAY, **({"scale": "original"} if original else {})})[0]
    # torch iterates in bf16, weft in f32: each step differs by about 2^-8 of itself.
    theirs = by_torch(values, [muon, adamw])
    expect_same({name: v for name, v in ours.items() if v.ndim == 1}, theirs)
    first = start()
    for name, value in ours.items():
        if value.ndim > 1:
            way = np.linalg.norm(theirs[name] - first[name].numpy())
            assert np.linalg.norm(value - theirs[name]) < 0.02 * way, name


def torch_rates(make):
    """The rates of 100 steps of a scheduler of torch."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    scheduler = make(optimizer)
    rates = []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def warmed(optimizer, after, warmup=10):
    lr = torch.optim.lr_scheduler
    return lr.SequentialLR(optimizer, [lr.LinearLR(optimizer, 1 / warmup, (warmup) / warmup, warmup - 1), after], [warmup])


@pytest.mark.parametrize("form", ["none", "constant", "linear", "cosine"])
def test_schedules_of_torch(form):
    lr = torch.optim.lr_scheduler
    makes = {"none": lambda o: lr.ConstantLR(o, 1.0), "constant": lambda o: warmed(o, lr.ConstantLR(o, 1.0)),
             "linear": lambda o: warmed(o, lr.LinearLR(o, 1.0, 0.1, 80)), "cosine": lambda o: warmed(o, lr.CosineAnnealingLR(o, 80, 1e-4))}
    floor = {} if form in ("none", "constant") else {"floor": 1e-4, "total": 90}
    rate = train.Schedule(form, 1e-3, **floor, **({} if form == "none" else {"warmup": 10}))
    ours = [rate(step) for step in range(STEPS)]
    theirs = torch_rates(makes[form])
    if form == "cosine":  # torch goes up again after the end
        theirs = theirs[:91] + [1e-4] * 9
    np.testing.assert_allclose(ours, theirs, rtol=1e-9)


@pytest.mark.parametrize("shape", ["linear", "cosine", "one_minus_sqrt"])
def test_wsd_of_transformers(shape):
    transformers = pytest.importorskip("transformers")
    of_theirs = {"linear": "linear", "cosine": "cosine", "one_minus_sqrt": "1-sqrt"}[shape]
    rate = train.Schedule("wsd", 1e-3, floor=1e-4, warmup=10, total=90, decay=20, shape=shape)
    theirs = torch_rates(lambda o: transformers.get_wsd_schedule(o, num_warmup_steps=10, num_stable_steps=60, num_decay_steps=20, min_lr_ratio=0.1,
                                                                decay_type=of_theirs))
    ours = [rate(step) for step in range(10, STEPS)]  # its warm-up begins with 0
    np.testing.assert_allclose(ours, theirs[10:], rtol=1e-9)


def batches(step, kind, rows=6):
    random = np.random.default_rng(1000 + step)
    x = random.normal(size=(rows, 8)).astype(np.float32)
    if kind == "cross_entropy":
        y = random.integers(0, 6, rows)
        y[step % rows] = -100
        return x, y
    y = random.normal(size=(rows, 6)) if kind == "mean_squared_error" else random.random((rows, 6))
    return x, y.astype(np.float32)


LOSSES = {
    "mean_squared_error": ({}, F.mse_loss), "binary_cross_entropy": ({}, F.binary_cross_entropy_with_logits), "cross_entropy": ({}, F.cross_entropy),
    "cross_entropy with label smoothing": ({"label_smoothing": 0.1}, lambda y, t: F.cross_entropy(y, t, label_smoothing=0.1)),
    "cross_entropy with z-loss": ({"z_loss": 1e-2}, lambda y, t: F.cross_entropy(y, t) + 1e-2 * (torch.logsumexp(y, 1)[t >= 0] ** 2).mean()),
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(ranks, size, name):
    """100 steps of the whole training: losses and parameters of torch's automatic gradients."""
    options, theirs = LOSSES[name]
    kind = name.split(" ")[0]

    def program(group):
        trainer = train.Trainer(model_of(group, kind), optimizer={"name": "sgd", "momentum": 0.9}, max_norm=0, **options)
        losses = []
        for step in range(STEPS):
            x, y = batches(step, kind)
            mine = trainer.model.rows(len(x))
            losses.append(trainer.step(train.Batch(x[mine], y[mine], global_rows=len(x)), RATE).loss)
        return losses, {parameter: trainer.model.value(parameter) for parameter in SHAPES}
    ours, trained = ranks(size, program)[0]
    values = parameters()
    optimizer = torch.optim.SGD(values.values(), lr=RATE, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x, y = (torch.tensor(part) for part in batches(step, kind))
        optimizer.zero_grad()
        hidden = F.gelu(F.linear(x, values["up.weight"], values["up.bias"]))
        loss = theirs(F.linear(hidden, values["down.weight"], values["down.bias"]), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    np.testing.assert_allclose(ours, losses, rtol=2e-5, atol=1e-6)
    expect_same(trained, {parameter: v.detach().numpy() for parameter, v in values.items()}, 1e-4)
