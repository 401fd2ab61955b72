"""Modules with passes in Python (weft.nn.Module): trained on meshes, saved, resumed; their errors on all
ranks."""
import gc
import traceback
import weakref

import numpy as np
import pytest

import weft

try:
    from weft import nn, train
except ImportError as reason:
    pytest.skip(f"libweft_train is not there: {reason}", allow_module_level=True)


class Scale(nn.Module):
    """x * factor + shift, one number for each feature, cut with the features."""

    def __init__(self, features):
        super().__init__()
        self.factor = nn.Parameter(features, init=nn.Constant(1.5), split_dim=0)
        self.shift = nn.Parameter(features, init=0.1, split_dim=0)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.factor.value + self.shift.value

    def backward(self, dy):
        x, = self.inputs
        for parameter, of in ((self.factor, dy * x), (self.shift, dy)):
            if parameter.gradient is not None:
                parameter.gradient[...] += of.sum(axis=0)
        return dy * self.factor.value


class Product(nn.Module):
    """x w^T, like nn.Linear."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(outputs, inputs, init=0.3)

    def forward(self, x):
        self.save_for_backward(2 * x)
        return x @ self.weight.value.T

    def backward(self, dy):
        twice, = self.saved
        if self.weight.gradient is not None:
            self.weight.gradient[...] += dy.T @ twice / 2
        return dy @ self.weight.value


def recipe(middle=None, **more):
    return train.Recipe(nn.Sequential(embed=Product(3, 4), layers=nn.Sequential(nn.Sequential(
        up=nn.Linear(4, 8, init=0.3), act=middle or Scale(8), down=nn.Linear(8, 4, init=0.3))), head=nn.Linear(4, 2, init=0.3)),
        loss="mean_squared_error", blocks=["layers.*"], **more)


PLAN = {"layers.0.up": "column", "layers.0.act": "fed_column", "layers.0.down": "row"}


def batch_of(model, step, rows=6):
    random = np.random.default_rng(step)
    x = random.normal(size=(rows, 3)).astype(np.float32)
    y = np.stack([x[:, 0] + x[:, 1], x[:, 2]], axis=1)
    mine = model.rows(rows)
    return train.Batch(x[mine], y[mine], global_rows=rows)


def steps_of(trainer, count):
    return [trainer.step(batch_of(trainer.model, trainer.steps), 0.02).loss for _ in range(count)]


@pytest.mark.parametrize("options", [{}, {"data": "fsdp"}, {"ac": "full"}, {"data": "fsdp", "ac": "full"}])
def test_trains_on_a_mesh_and_resumes_on_another(ranks, tmp_path, options):
    """dp 2 x tp 2 with a plan that cuts the module; resumed on three ranks: the losses of one rank."""
    def one(group):
        return steps_of(train.Trainer(train.build_parallel_model(recipe(), weft.Mesh(group, dp=1, tp=1), seed=3), seed=1), 12)

    def four(group):
        model = train.build_parallel_model(recipe(plan=PLAN), weft.Mesh(group, dp=2, tp=2), seed=3, **options)
        trainer = train.Trainer(model, seed=1)
        losses = steps_of(trainer, 6)
        trainer.save(tmp_path / "run")
        shapes = {p.name: (p.shape, p.local_shape) for p in model.parameters}
        assert shapes["layers.0.act.factor"][0] == (8,) and shapes["embed.weight"][0] == (4, 3)
        if "data" not in options:
            assert shapes["layers.0.act.factor"][1] == (4,)
        return losses

    def three(group):
        trainer = train.Trainer(train.build_parallel_model(recipe(), weft.Mesh(group, dp=3, tp=1), seed=4))
        trainer.load(tmp_path / "run")
        return steps_of(trainer, 6)
    whole = ranks(1, one)[0]
    assert whole[-1] < 0.8 * whole[0]
    for losses in ranks(4, four):
        assert losses == pytest.approx(whole[:6], rel=1e-4)
    for losses in ranks(3, three):
        assert losses == pytest.approx(whole[6:], rel=1e-3)


def test_equals_the_layer_of_the_library(ranks):
    """Micro-batches, a frozen part and bf16 activations, too."""
    def program(group):
        losses = []
        for first in (Product(3, 4), nn.Linear(3, 4, init=0.3)):
            of = []
            for options in ({}, {"frozen": ["0.weight"]}, {"dtype": "bf16", "activations": "bf16"}):
                model = train.build_parallel_model(train.Recipe(nn.Sequential(first, nn.Linear(4, 2, init=0.3)), loss="mean_squared_error"),
                                                   weft.Mesh(group, dp=1, tp=1), seed=3, **options)
                trainer = train.Trainer(model, optimizer="sgd")
                of.append([trainer.step([batch_of(model, 2 * step), batch_of(model, 2 * step + 1)], 0.1).loss for step in range(5)])
            losses.append(of)
        return losses
    own, library = ranks(1, program)[0]
    assert own[:2] == [pytest.approx(of, rel=1e-5) for of in library[:2]]
    assert own[2] == pytest.approx(library[2], rel=0.02)
    assert own[0] != own[1] and own[0] != own[2]


class Faulty(Scale):
    """Raises an exception in one pass of one rank."""
    wrong = None

    def forward(self, x):
        if self.wrong == ("forward" if self.training else "evaluate"):
            raise ZeroDivisionError("in forward of mine")
        return super().forward(x)

    def backward(self, dy):
        if self.wrong == "backward":
            raise KeyError("in backward of mine")
        return super().backward(dy)


@pytest.mark.parametrize("options", [{}, {"data": "fsdp"}, {"ac": "full"}])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_of_one_rank_is_an_error_of_all(ranks, where, options):
    """It comes out on its own rank as it is, with its traceback; the others get an error at once; all go
    on."""
    def program(group):
        act = Faulty(8)
        model = train.build_parallel_model(recipe(act, plan=PLAN), weft.Mesh(group, dp=2, tp=2), seed=3, **options)
        trainer = train.Trainer(model)
        steps_of(trainer, 1)
        if group.rank == 2:
            act.wrong = where
        with pytest.raises((ZeroDivisionError, KeyError) if group.rank == 2 else weft.Error) as error:
            trainer.step(batch_of(model, 1), 0.02)
        if group.rank == 2:
            assert where in "".join(traceback.format_tb(error.value.__traceback__)) and f"in {where} of mine" in str(error.value)
        else:
            assert f'"layers.0.act": {where} failed on another rank of' in str(error.value)
        act.wrong = None
        return steps_of(trainer, 2)
    losses = ranks(4, program)
    assert losses[0] == losses[1] == losses[2] == losses[3]


def test_an_exception_ends_a_whole_training(ranks):
    """Trainer.train raises it on its rank, and an error on the others."""
    def program(group):
        act = Faulty(8)
        model = train.build_parallel_model(recipe(act, plan=PLAN), weft.Mesh(group, dp=2, tp=1), seed=3)
        trainer = train.Trainer(model)

        def step(number):
            act.wrong = "backward" if (group.rank, number) == (1, 2) else None
            return trainer.step(batch_of(model, number), 0.02)
        with pytest.raises(KeyError if group.rank == 1 else weft.Error, match="in backward of mine" if group.rank == 1 else "failed on another rank of"):
            trainer.train(5, step)
        return trainer.steps
    assert ranks(2, program) == [2, 2]


def test_an_exception_in_evaluate(ranks):
    """The rank with the same rows learns of it in the pass, other data ranks at its end."""
    def program(group):
        act = Faulty(8)
        model = train.build_parallel_model(recipe(act, plan=PLAN), weft.Mesh(group, dp=2, tp=2), seed=3)
        trainer = train.Trainer(model)
        act.wrong = "evaluate" if group.rank == 2 else None
        with pytest.raises(ZeroDivisionError if group.rank == 2 else weft.Error) as error:
            trainer.evaluate(batch_of(model, 1))
        assert ["the passes of another rank failed; its own error says why", "the passes of another rank failed; its own error says why",
                "in forward of mine", '"layers.0.act": forward failed on another rank of'][group.rank] in str(error.value)
        act.wrong = None
        return trainer.evaluate(batch_of(model, 1)).loss
    assert len(set(ranks(4, program))) == 1


def wrong_passes():
    def forward(_, x):
        return x

    def backward(_, dy):
        return dy
    return [
        (lambda m, x: None, backward, "Own.forward returned None; expected an array, or a tuple of arrays"),
        (lambda m, x: "text", backward, "the result of forward is of type str; expected an array of numbers"),
        (lambda m, x: (), backward, '"0": forward made no output; expected 1 or more'),
        (lambda m, x: x * m.inputs[0].fill(1), backward, "read-only"),
        (lambda m, x: m.save_for_backward(object()), backward, "an array to save is of type object; expected an array of numbers"),
        (forward, lambda m, dy: dy[:1], r"Own.backward returned an array of the shape \(1, 3\); expected \(6, 3\), that of the input"),
        (forward, lambda m, dy: (dy, dy), "Own.backward returned 2 arrays; expected 1"),
        (forward, lambda m, dy: m.save_for_backward(dy), "weft_module_keep: pass is not a forward pass that runs"),
        (lambda m, x: x[:, :1].repeat(9, axis=0), backward, "expected|is"),
    ]


@pytest.mark.parametrize("forward, backward, text", wrong_passes())
def test_wrong_results(ranks, forward, backward, text):
    def program(group):
        own = type("Own", (nn.Module,), {"forward": forward, "backward": backward})()
        model = train.build_parallel_model(train.Recipe(nn.Sequential(own, nn.Linear(3, 2)), loss="mean_squared_error"), weft.Mesh(group, dp=1, tp=1))
        with pytest.raises((weft.Error, ValueError), match=text):
            train.Trainer(model).step(batch_of(model, 0), 0.1)
    ranks(1, program)


def test_uses_outside_of_a_pass():
    own = Scale(2)
    for use, text in ((lambda: own.factor.value, "a Parameter has a value only while forward or backward of its module runs"),
                      (lambda: own.factor.gradient, "a Parameter has a gradient only while backward of its module runs"),
                      (lambda: own.inputs, "no pass of Scale runs; expected a use inside of forward or backward"),
                      (lambda: own.save_for_backward(1), "no pass of Scale runs")):
        with pytest.raises(weft.BadArgumentError, match=text):
            use()
    with pytest.raises(NotImplementedError, match="Module has no forward"):
        nn.Module().forward()
    with pytest.raises(NotImplementedError, match="Module has no backward"):
        nn.Module().backward()


def test_plans_and_parameters_that_do_not_fit(ranks):
    class Many(nn.Module):
        def __init__(self, **more):
            super().__init__()
            self.p = nn.Parameter(*([1] * 9), **more)

    def program(group):
        mesh = weft.Mesh(group, dp=1, tp=2)
        for of, text in ((recipe(plan={"layers.0.act": "colum"}), 'recipe: plan: "layers.0.act": style "colum"; expected one of enter'),
                         (recipe(plan={**PLAN, "layers.0.act": "row"}), "the program wrote its passes, which can be split by columns only"),
                         (recipe(plan={**PLAN, "embed": "column"}), "the program wrote its passes, and none of its parameters has a split_dim"),
                         (recipe(plan={"layers.0.act": 3}), "plan is .*; expected an object with styles by paths"),
                         (recipe(Many()), "Many: p has 9 dimensions; expected 8 or fewer")):
            with pytest.raises(weft.Error, match=text):
                train.build_parallel_model(of, mesh)
        own = Scale(8)
        own.factor.split_dim = 4
        with pytest.raises(weft.Error, match='modules.1..parameters of "factor" has split_dim 4; expected less than 1, or -1'):
            train.build_parallel_model(recipe(own), mesh)
        own = Scale(8)
        own.factor.init = -1.0
        with pytest.raises(weft.Error, match='parameters of "factor" has std -1; expected 0 or more'):
            train.build_parallel_model(recipe(own), mesh)
    ranks(2, program)


def test_a_gradient_that_is_a_contribution_is_refused(ranks):
    def program(group):
        middle = nn.Sequential(own=Scale(4), up=nn.Linear(4, 8), down=nn.Linear(8, 2))
        model = train.build_parallel_model(train.Recipe(nn.Sequential(embed=nn.Linear(3, 4), rest=middle), loss="mean_squared_error",
                                                        plan={"rest.up": "fed_column", "rest.down": "row"}),
                                           weft.Mesh(group, dp=1, tp=2))
        with pytest.raises(weft.Error, match='"rest.own": dy is Partial.* needs values, not contributions'):
            train.Trainer(model).step(batch_of(model, 0), 0.1)
    ranks(2, program)


def test_stages_are_refused(ranks):
    def program(group):
        with pytest.raises(weft.Error, match='pipeline_axis is "pp" with modules; expected none'):
            train.build_parallel_model(recipe(), weft.Mesh(group, pp=2, dp=1, tp=1), pipeline_axis="pp")
    ranks(2, program)


def test_a_module_lives_as_long_as_a_model_needs_it(ranks):
    def program(group):
        act = Scale(8)
        alive = weakref.ref(act)
        model = train.build_parallel_model(recipe(act), weft.Mesh(group, dp=1, tp=1))
        trainer = train.Trainer(model)
        del act
        gc.collect()
        steps_of(trainer, 1)
        assert alive() is not None and alive().calls > 0
        model.close()
        trainer.close()
        del model, trainer
        gc.collect()
        assert alive() is None
    ranks(1, program)


def test_one_object_in_two_places_and_two_models(ranks):
    """Each place has parameters of its own."""
    def program(group):
        act = Scale(3)
        of = train.Recipe(nn.Sequential(act, act, nn.Linear(3, 2)), loss="mean_squared_error")
        mesh = weft.Mesh(group, dp=1, tp=1)
        first, second = (train.build_parallel_model(of, mesh) for _ in range(2))
        assert [p.name for p in first.parameters] == ["0.factor", "0.shift", "1.factor", "1.shift", "2.weight"]
        return steps_of(train.Trainer(first), 3), steps_of(train.Trainer(second), 3)
    first, second = ranks(1, program)[0]
    assert first == second


def test_functions_of_torch(ranks):
    torch = pytest.importorskip("torch")

    class Swish(nn.Module):
        def forward(self, x):
            return torch.nn.functional.silu(torch.tensor(x)).numpy()

        def backward(self, dy):
            x = torch.tensor(self.inputs[0], requires_grad=True)
            torch.nn.functional.silu(x).backward(torch.tensor(dy))
            return x.grad.numpy()

    def program(group):
        model = train.build_parallel_model(recipe(Swish()), weft.Mesh(group, dp=2, tp=1), seed=1)
        return steps_of(train.Trainer(model), 20)
    losses = ranks(2, program)[0]
    assert losses[-1] < losses[0]
