"""Models of layers over meshes: built, trained, saved, resumed on another mesh; errors name the place."""
import json
import os
import pathlib
import re
import subprocess
import sys
import traceback

import numpy as np
import pytest

import weft
from test_complete import run
from test_examples import EXAMPLES

try:
    from weft import _modules, experts, float8, nn, train
except ImportError as reason:
    pytest.skip(f"libweft_train is not there: {reason}", allow_module_level=True)

from weft import _train_api

WITHOUT = {  # the layers of a framework of the program's own: docs/python_models.md says so
    name for name in _train_api.FUNCTIONS if re.match(r"weft_(column|row|vocab|matrix|maps|loss_scaler|mean_squared|binary_cross|convert|gather_output|conv|global_count)", name)}


def test_every_function():
    source = "".join(pathlib.Path(module.__file__).read_text(encoding="utf-8") for module in (train, float8, experts, _modules))
    used = {f"weft_{name}" for name in re.findall(r"\blib\.(\w+)", source)}
    other = {  # by the functions for any recipe; logits are of tokens
        "weft_transformer_create", "weft_transformer_create_from_text", "weft_model_text", "weft_trainer_create", "weft_trainer_step", "weft_trainer_backward",
        "weft_cosine_rate", "weft_model_logits", "weft_router_sums",
        "weft_model_parameter_layout", "weft_model_parameter_dlpack", "weft_model_parameter_dlpack_versioned", "weft_model_set_parameter_from_dltensor",
        "weft_compute_threads"}
    assert set(_train_api.FUNCTIONS) - used - WITHOUT == other
    assert used <= set(_train_api.FUNCTIONS)


def test_weft_alone_is_light():
    done = run("-c", "import sys, weft; print([m for m in sys.modules if m.startswith('weft.') and ('train' in m or m == 'weft.nn')], "
                     "'libweft_train' in open('/proc/self/maps').read())")
    assert done.stdout.strip() == "[] False", done.stdout + done.stderr


TYPED = """
import numpy as np
import weft
import weft.nn as nn
from weft import train
mesh = weft.Mesh(weft.Context().group(), dp=1)
recipe = train.Recipe(nn.Sequential(nn.Linear(2, 3, bias=True), head=nn.RMSNorm(3)), loss="cross_entropy")
with train.build_parallel_model(recipe, mesh, seed=1) as model:
    loss: float = train.Trainer(model, optimizer="sgd").step(train.Batch(np.ones((1, 2)), np.ones(1)), 0.1).loss
    rows: slice = model.rows(3)
"""
MISTYPED = ["weft.train.Recipe(3)", 'weft.nn.Linear("2", 3)', "weft.nn.ReLU().forward()", "weft.train.Trainer(3)"]


def test_a_type_checker_knows_the_modules(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "well.py").write_text(TYPED, encoding="utf-8")
    (tmp_path / "wrong.py").write_text("import weft.nn\nimport weft.train\n" + "\n".join(MISTYPED), encoding="utf-8")
    options = ["-m", "mypy", "--cache-dir", str(tmp_path / "cache"), "--strict", "--python-version", "3.11"]
    done = run(*options, str(tmp_path / "well.py"))
    assert done.returncode == 0, done.stdout
    done = run(*options, str(tmp_path / "wrong.py"))
    assert f"Found {len(MISTYPED)} errors" in done.stdout, done.stdout


def classifier(dropout=0.1):
    stages = (nn.Residual(nn.ChannelFeedForward(8, 16, dropout=dropout, init=0.2, down_init=0.2)) for _ in range(2))
    return train.Recipe(nn.Sequential(embed=nn.Conv2d(1, 8, kernel=3, padding=1, init=0.3), act=nn.GELU(), pool=nn.AdaptiveAvgPool2d(1),
                                      stages=nn.Sequential(*stages), head=nn.Conv2d(8, 1, init=0.3)),
                        loss="binary_cross_entropy", blocks=["stages.*"], name="classifier")


def pictures(step, rows=6):
    random = np.random.default_rng(step)
    kinds = np.arange(rows, dtype=np.float32).reshape(-1, 1, 1, 1) % 2
    i, j = np.indices((8, 8))
    return (np.where(kinds == 1, j % 2, i % 2) + 0.3 * random.normal(size=(rows, 1, 8, 8))).astype(np.float32), kinds


def steps_of(trainer, count, rows=6):
    mine = trainer.model.rows(rows)
    losses = []
    for _ in range(count):
        x, y = pictures(trainer.steps, rows)
        losses.append(trainer.step(train.Batch(x[mine], y[mine], global_rows=rows), rate=0.02).loss)
    return losses


def test_trains_saves_and_resumes_on_other_ranks(ranks, tmp_path):
    """dp 2 x tp 2, fsdp, activation checkpointing; resumed on three ranks: the losses of one rank."""
    def one(group):
        return steps_of(train.Trainer(train.build_parallel_model(classifier(), weft.Mesh(group, dp=1, tp=1), seed=3), seed=1), 16)

    def four(group):
        model = train.build_parallel_model(classifier(), weft.Mesh(group, dp=2, tp=2), data="fsdp", ac="full", seed=3)
        with train.Trainer(model, optimizer={"name": "adamw"}, seed=1) as trainer:
            losses = steps_of(trainer, 8)
            trainer.save(tmp_path / "run")
            assert trainer.steps == 8
            return losses

    def three(group):
        model = train.build_parallel_model(classifier(), weft.Mesh(group, dp=3, tp=1), seed=4)
        trainer = train.Trainer(model)
        trainer.load(tmp_path / "run")
        assert trainer.steps == 8 and model.load(str(tmp_path / "run")) == 8
        return steps_of(trainer, 8)
    whole = ranks(1, one)[0]
    assert whole[-1] < 0.5 * whole[0]
    for losses in ranks(4, four):
        assert losses == pytest.approx(whole[:8], abs=1e-4)
    for losses in ranks(3, three):
        assert losses == pytest.approx(whole[8:], abs=1e-3)


def trained(group, **options):
    model = train.build_parallel_model(classifier(0), weft.Mesh(group, dp=-1, tp=1), seed=3, **options)
    return train.Trainer(model, seed=1)


def batch_of(trainer, step, rows=6):
    x, y = pictures(step, rows)
    mine = trainer.model.rows(rows)
    return train.Batch(x[mine], y[mine], global_rows=rows)


def test_a_wrong_argument_of_one_rank_is_an_error_of_all(ranks):
    """Arrays that cannot be read, a rate that is no number: the other rank does not wait for its deadline."""
    def program(group):
        trainer = trained(group)
        calls = [lambda batch: trainer.step(batch, 0.02), trainer.backward, trainer.evaluate]
        x, y = pictures(0, 3)
        for wrong in (train.Batch(x[:, :, ::2], y), train.Batch(None, y), train.Batch(x.astype(object), y), None):
            for call in calls:
                with pytest.raises((weft.Error, ValueError, TypeError)) as error:
                    call(wrong if group.rank == 1 else batch_of(trainer, 0))
                if group.rank == 0:
                    assert "another rank has given up" in str(error.value) or "another rank was given a batch" in str(error.value)
        with pytest.raises(weft.Error):
            trainer.step(batch_of(trainer, 0), "fast" if group.rank == 1 else 0.02)
        return trainer.step(batch_of(trainer, 0), 0.02).loss
    first, second = ranks(2, program)
    assert first == second


def test_whole_training(ranks, tmp_path):
    """Hooks in their order, checkpoints by steps, an early end; resumed from the newest whole checkpoint."""
    def program(group):
        trainer, seen = trained(group), []
        plan = {"evaluate": lambda: trainer.evaluate(batch_of(trainer, 99)), "folder": tmp_path / "run", "save_every": 2, "keep": 2}
        step = lambda number: trainer.step(batch_of(trainer, number), 0.02)  # noqa: E731
        end = trainer.train(3, step, evaluate_every=2, **plan, on_begin=lambda: seen.append("begin"), on_step=lambda r: seen.append(r.step),
                            on_evaluation=lambda e: seen.append(type(e).__name__), on_checkpoint=lambda n: seen.append(f"saved {n}"), on_end=seen.append)
        assert seen == ["begin", 0, 1, "Evaluation", "saved 2", 2, "saved 3", end]
        assert end.why == "steps" and end.steps == 3 == trainer.steps and end.reason == 0 and end.best_loss > 0
        stopped = trainer.train(50, step, stop=lambda: 15 if group.rank == 1 else 0)
        assert stopped == train.TrainingEnd("stop", 4, 15, None)
        patient = {"evaluate_every": 1, "patience": 3, "least_gain": 1e9, **plan}
        assert trainer.train(6, step, **patient).why == "steps"  # of two evaluations, one had no gain
        group.barrier().wait()
        if group.rank == 0:
            (tmp_path / "run" / "step-00000006" / "index.json").write_bytes(b"")
        group.barrier().wait()
        trainer.load(tmp_path / "run")
        assert trainer.steps == 3  # two were kept, and the newer is broken
    ranks(2, program)


def test_what_a_hook_raises_ends_all_ranks(ranks):
    class Lost(Exception):
        pass

    def program(group, where):
        trainer = trained(group)

        def fails(here):
            if here == where and group.rank == 1 and trainer.steps >= 2:
                raise Lost("no file") from KeyError("cause")

        def step(number):
            fails("before")
            trainer.backward(batch_of(trainer, number))
            fails("between")
            result = trainer.update(0.02)
            fails("after")
            return result

        def evaluate():
            fails("evaluate")
            return trainer.evaluate(batch_of(trainer, 99))
        try:
            trainer.train(9, step, evaluate_every=1, evaluate=evaluate, stop=lambda: fails("stop"), on_step=lambda _: fails("on_step"),
                          on_evaluation=lambda _: fails("on_evaluation"))
        except Lost as error:
            assert isinstance(error.__cause__, KeyError)
            assert "fails" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]
            said = "Lost"
        except weft.BadArgumentError as error:
            said = str(error)
        assert trainer.step(batch_of(trainer, 5), 0.02).loss > 0  # nothing is left behind
        return said
    for where in ("before", "between", "after", "evaluate", "stop", "on_step", "on_evaluation"):
        first, second, third = ranks(3, lambda group, where=where: program(group, where))
        assert second == "Lost" and first == third
        gave_up = where in ("before", "between", "evaluate")
        assert first.endswith("trainer: another rank has given up; its own error says why" if gave_up else
                              "train: a hook failed on another rank; its own error says why")


def test_wrong_plans(ranks):
    def program(group):
        trainer = trained(group)
        for arguments, text in [
                (((1, None), {}), "step is None; expected a function"), (((1, 3), {}), "step is 3; expected a function"),
                (((1, lambda n: n), {}), "step(0) returned 0; expected the StepResult of a step"),
                (((-1, lambda n: n), {}), "train: steps is -1; expected 0 or more"),
                (((1, lambda n: n), {"save_every": 1}), "train: checkpoints.folder is empty; expected a folder for the checkpoints"),
                (((1, lambda n: n), {"patience": 1}), "train: patience is 1 and evaluate_every 0; expected evaluations")]:
            with pytest.raises(weft.BadArgumentError) as error:
                trainer.train(*arguments[0], **arguments[1])
            assert text in str(error.value)
    ranks(2, program)


def test_halves_of_a_step(ranks):
    """The gradients between the halves: read, changed, dropped."""
    def program(group, halves):
        trainer = trained(group, data="fsdp")
        for number in range(3):
            if not halves:
                loss = trainer.step(batch_of(trainer, number), 0.02).loss
                continue
            trainer.backward(batch_of(trainer, 7))
            trainer.discard()
            assert trainer.backward(batch_of(trainer, number)).grad_norm == 0
            gradients = trainer.gradients()
            assert list(gradients) == [p.name for p in trainer.model.parameters]
            assert all(gradients[p.name].shape == p.local_shape for p in trainer.model.parameters)
            trainer.set_gradients({name: g for name, g in gradients.items() if name.startswith("stages")})
            with pytest.raises(weft.BadArgumentError, match="values has 'no'; expected names of parameters that have a gradient"):
                trainer.set_gradients({"no": np.zeros(1, np.float32)})
            with pytest.raises(weft.BadArgumentError, match=r"the gradient of head.weight has the shape \(7,\) and dtype f32; expected"):
                trainer.set_gradients({"head.weight": np.zeros(7, np.float32)})
            result = trainer.update(0.02)
            loss = result.loss
            assert result.grad_norm > 0
        with pytest.raises(weft.BadArgumentError, match="there are no gradients; expected backward"):
            trainer.gradients()
        trainer.backward(batch_of(trainer, 3))
        trainer.set_gradients({name: 0 * g for name, g in trainer.gradients().items()})
        assert trainer.update(0.02).grad_norm == 0
        return loss
    whole, halves = (ranks(2, lambda group, h=h: program(group, h)) for h in (False, True))
    assert whole == halves


def test_fine_tuning(ranks, tmp_path):
    def program(group):
        first = trained(group)
        first.step(batch_of(first, 0), 0.02)
        first.save(tmp_path / "run")
        model = train.build_parallel_model(classifier(0), weft.Mesh(group, dp=-1, tp=1), seed=4, frozen=["stages"])
        head = model.value("head.weight").copy()
        assert model.init_from(tmp_path / "run", excepted=["head"]) == 1
        assert np.array_equal(model.value("head.weight"), head) and np.array_equal(model.value("embed.weight"), first.model.value("embed.weight"))
        for arguments, text in [({"excepted": "head"}, "excepted is 'head'; expected a list of patterns"),
                                ({"left_out": [3]}, "left_out is [3]; expected a list of patterns"),
                                ({"excepted": ["tail"]}, "init_from: except: nothing in the model matches \"tail\"")]:
            with pytest.raises(weft.BadArgumentError) as error:
                model.init_from(tmp_path / "run", **arguments)
            assert text in str(error.value)
    ranks(2, program)


class Bottleneck(nn.Residual):
    def __init__(self, channels):
        super().__init__(nn.ChannelFeedForward(channels, channels // 2))


class Two(nn.Sequential):
    def __init__(self):
        super().__init__(Bottleneck(8), nn.Conv2d(8, 1))


def test_classes_of_the_program():
    """They are made of layers; one with passes of its own is refused with what to do instead."""
    assert Two().description() == nn.Sequential(nn.Residual(nn.ChannelFeedForward(8, 4)), nn.Conv2d(8, 1)).description()

    class Own(nn.Layer):
        pass

    class Faster(nn.Linear):
        def forward(self, x):
            return x
    for layer, name in ((Own(), "Own"), (Faster(2, 2), "Faster")):
        with pytest.raises(weft.BadArgumentError) as error:
            train.Recipe(nn.Sequential(layer))
        assert str(error.value) == (
            f"{name} has passes of its own, and is derived from {type(layer).__mro__[1].__name__}; expected a class derived from weft.nn.Module, or one "
            "derived from a layer that only calls its constructor. weft.torch trains models of PyTorch")


def test_transformer_by_recipe(ranks):
    """A decoder trains on tokens; micro-batches, evaluation, averages and a schedule."""
    def program(group):
        recipe = train.transformer(dim=16, layers=2, heads=4, ffn_hidden=24, vocab=32, max_seq=8, init_std=0.1)
        model = train.build_parallel_model(recipe, weft.Mesh(group, dp=1, tp=-1), seed=5, sequence_parallel=True)
        trainer = train.Trainer(model, optimizer="lion", ema=0.9)
        tokens = np.arange(32, dtype=np.int64).reshape(4, 8)
        halves = [train.Batch(tokens[:2], np.roll(tokens, -1, 1)[:2]), train.Batch([tokens[2:]], [np.roll(tokens, -1, 1)[2:]])]
        rate = train.Schedule("cosine", 1e-2, total=20, warmup=2)
        assert rate(2) == pytest.approx(1e-2) and rate(20) == 0
        before = trainer.evaluate(halves)
        results = [trainer.step(halves, rate(trainer.steps)) for _ in range(8)]
        assert before.count == results[0].count == 32 and before.loss == pytest.approx(results[0].loss, abs=1e-5)
        assert before.perplexity == pytest.approx(np.exp(before.loss)) and results[7].step == 7 and not results[7].skipped
        after = trainer.evaluate(halves).loss
        trainer.swap_averages(True)
        averaged = trainer.evaluate(halves).loss
        trainer.swap_averages(False)
        assert trainer.evaluate(halves).loss == after != averaged
        return results[7].loss
    one, two = ranks(1, program), ranks(2, program)
    assert one[0] < 3.0 and two == pytest.approx(one * 2, abs=1e-3)


def test_documents(ranks):
    """Documents that are packed into a row have the outputs and the loss of rows of their own."""
    def program(group):
        recipe = train.transformer(dim=16, layers=2, heads=4, ffn_hidden=24, vocab=32, max_seq=8, init_std=0.1)
        model = train.build_parallel_model(recipe, weft.Mesh(group, dp=1, tp=-1), seed=5)
        tokens = np.arange(32, dtype=np.int64) * 7 % 32
        documents = np.repeat(np.arange(8), 4).reshape(4, 8)
        packed, whole = tokens.reshape(4, 8), tokens.reshape(8, 4)
        labels = np.roll(whole, -1, 1)
        alone, = model.forward(train.Batch(whole))
        together, = model.forward(train.Batch([packed, documents]))
        assert np.array_equal(together.reshape(8, 4, 32), alone)
        assert not np.array_equal(model.forward(train.Batch(packed))[0], together)
        trainer = train.Trainer(model)
        losses = [trainer.evaluate(train.Batch(whole, labels)).loss, trainer.evaluate(train.Batch([packed, documents], labels.reshape(4, 8))).loss]
        assert losses[0] == pytest.approx(losses[1], abs=1e-6)
        with pytest.raises(weft.BadArgumentError, match=r"inputs\[1\], the documents, is f32 \(4, 8\); expected i64 \(4, 8\), as inputs\[0\]"):
            model.forward(train.Batch([packed, documents.astype(np.float32)]))
    ranks(2, program)


def test_pipeline(ranks):
    """Two stages on two ranks, with the losses of one rank."""
    tokens = np.arange(32, dtype=np.int64).reshape(4, 8)
    batches = [train.Batch(tokens[i:i + 2], np.roll(tokens, -1, 1)[i:i + 2]) for i in (0, 2)]

    def program(group):
        recipe = train.transformer(dim=16, layers=2, heads=4, ffn_hidden=24, vocab=32, max_seq=8, init_std=0.1)
        mesh = weft.Mesh(group, pp=-1, dp=1, tp=1)
        model = train.build_parallel_model(recipe, mesh, seed=5, **({"pipeline_axis": "pp", "pipeline": "gpipe"} if group.size == 2 else {}))
        trainer = train.Trainer(model)
        losses = [trainer.step(batches, 0.01).loss for _ in range(3)]
        if group.size == 2:
            with pytest.raises(weft.BadArgumentError, match="compute_outputs: the model is a pipeline; expected a whole model"):
                model.forward(batches[0])
        return losses, len(model.parameters)
    (one, count), = ranks(1, program)
    for losses, own in ranks(2, program):
        assert losses == pytest.approx(one, abs=1e-5) and own < count


def test_parameters(ranks, tmp_path):
    def program(group):
        model = train.build_parallel_model(train.Recipe(nn.SwiGLU(4, 6)), weft.Mesh(group, dp=1, tp=2), seed=5)
        names = {p.name: (p.shape, p.local_shape, p.trained) for p in model.parameters}
        assert names["gate_proj.weight"] == ((6, 4), (3, 4), True) and names["down_proj.weight"] == ((4, 6), (4, 3), True)
        value = model.value("up_proj.weight")
        assert value.shape == (3, 4) and value.any()
        model.set_value("up_proj.weight", value + 1)
        assert (model.value("up_proj.weight") == value + 1).all()
        model.save(tmp_path, 7)
        model.set_value("up_proj.weight", value)
        assert model.load(tmp_path) == 7 and (model.value("up_proj.weight") == value + 1).all()
        with pytest.raises(weft.BadArgumentError, match=r"value has the shape \(2,\); expected \(3, 4\), this rank's part of up_proj.weight"):
            model.set_value("up_proj.weight", value[0, :2])
        with pytest.raises(weft.BadArgumentError, match="name is 'up'; expected the name of one of the model's parameters"):
            model.value("up")
        return value
    assert not (ranks(2, program)[0] == ranks(2, program)[1]).all()


def test_rows(ranks):
    def program(group):
        model = train.build_parallel_model(train.Recipe(nn.ReLU()), weft.Mesh(group, hosts=2, dp=2, tp=1), replicate_axis="hosts", data="fsdp")
        return model.rows(7), model.rows(6)
    assert ranks(4, program) == [(slice(0, 2), slice(0, 2)), (slice(2, 4), slice(2, 3)), (slice(4, 6), slice(3, 5)), (slice(6, 7), slice(5, 6))]


def test_forward(ranks):
    """Predictions of any mesh are those of one rank."""
    x, y = pictures(0)

    def program(group):
        model = train.build_parallel_model(classifier(), weft.Mesh(group, dp=-1, tp=2 if group.size == 4 else 1), data="fsdp", seed=3)
        mine = model.rows(6)
        output, = model.forward(train.Batch(x[mine], global_rows=6))
        if group.size == 1:
            with pytest.raises(weft.BadArgumentError, match="compute_outputs: inputs is empty; expected 1 tensor or more"):
                model.forward(train.Batch([]))
            with pytest.raises(weft.BadArgumentError, match="batch is of type int; expected a weft.train.Batch"):
                model.forward(3)
        assert output.dtype == np.float32
        return mine, output
    (_, one), = ranks(1, program)
    assert one.shape == y.shape and one.std() > 0
    for size in (3, 4):
        for mine, output in ranks(size, program):
            assert output == pytest.approx(one[mine], abs=1e-5)


def test_every_layer_is_one_of_the_library(ranks):
    """Each class builds, with its defaults and with all that it takes."""
    layers = [nn.Linear(2, 3, bias=True, init=nn.Constant(1)), nn.Conv2d(2, 4, (3, 5), stride=2, padding=1, groups=2, padding_mode="circular", bias=False),
              nn.ConvTranspose2d(2, 4, 3, stride=2, output_padding=1), nn.Embedding(5, 4), nn.RMSNorm(4), nn.LayerNorm(4), nn.LayerNorm((2, 3)), nn.ChannelNorm(4),
              nn.GroupNorm(2, 4), nn.BatchNorm(4, axes=["dp"]), nn.GELU("tanh"), nn.ReLU(), nn.Dropout(0.5), nn.SwiGLU(4, 6), nn.ChannelFeedForward(4, 6),
              nn.Residual(nn.RMSNorm(4)), nn.Sequential(nn.ReLU(), last=nn.ReLU()), nn.TransformerBlock(8, 2, max_seq=4), nn.AvgPool2d(2), nn.MaxPool2d(2),
              nn.AdaptiveAvgPool2d((1, 2)), nn.Resize2d(scale=2, mode="bilinear"), nn.Pad2d(top=1, columns="circular"), nn.PixelShuffle(2),
              nn.MoE(4, 6, experts=3, router={"top_k": 1}, shared_hidden=5), nn.MoEBlock(8, 2, max_seq=4, experts=3, expert_hidden=5)]
    assert {type(layer).__name__ for layer in layers} == set(nn.__all__) - {"Layer", "Constant", "Module", "Parameter"}

    def program(group):
        mesh = weft.Mesh(group, dp=1, tp=1)
        for layer in layers:
            json.dumps(layer.description())
            train.build_parallel_model(train.Recipe(layer), mesh)
        return [p.name for p in train.build_parallel_model(train.Recipe(nn.Sequential(*layers[:1], head=nn.RMSNorm(3))), mesh).parameters]
    assert ranks(1, program) == [["0.weight", "0.bias", "head.weight"]]
    assert repr(nn.Residual(nn.RMSNorm(4))) == "Residual(branch=RMSNorm(dim=4, eps=1e-05))"


def test_errors(ranks):
    def program(group):
        mesh = weft.Mesh(group, dp=1, tp=1)
        model = train.build_parallel_model(classifier(), mesh)
        trainer = train.Trainer(model)
        x, y = pictures(0)
        for text, call in [
                ('options: it has no "sed" (build options); is seed meant?', lambda: train.build_parallel_model(classifier(), mesh, sed=1)),
                ('options: it has no "optimiser" (options of a trainer); is optimizer meant?', lambda: train.Trainer(model, optimiser="sgd")),
                ('options: optimizer has no "beta3" (adamw); is beta1 or beta2 meant?', lambda: train.Trainer(model, optimizer={"name": "adamw", "beta3": 1})),
                ('recipe: transformer has no "dims" (a transformer); is dim meant?', lambda: train.build_parallel_model(train.transformer(dims=4), mesh)),
                ("recipe: model.a.kernel is \"3\"; expected a number, or [height, width]",
                 lambda: train.build_parallel_model(train.Recipe(nn.Sequential(a=nn.Conv2d(1, 1, "3"))), mesh)),
                ("recipe is of type ReLU; expected a weft.train.Recipe", lambda: train.build_parallel_model(nn.ReLU(), mesh)),
                ("model is of type int; expected a layer of weft.nn", lambda: train.Recipe(3)),
                ("the child 0 is of type int; expected a layer of weft.nn", lambda: nn.Sequential(3)),
                ("branch is of type int; expected a layer of weft.nn", lambda: nn.Residual(3)),
                ("blocks is 'stages.*'; expected a list of patterns", lambda: train.Recipe(nn.ReLU(), blocks="stages.*")),
                ("model is of type str; expected a weft.train.ParallelModel", lambda: train.Trainer("model")),
                ("a batch is of type int; expected a weft.train.Batch", lambda: trainer.step([3], 0.1)),
                ("trainer: targets[0] has 5 rows; expected 6, as inputs[0]", lambda: trainer.step(train.Batch(x, y[:5]), 0.1)),
                ("inputs[0] is strided; expected elements in a row (row-major, without gaps): make it contiguous first",
                 lambda: trainer.step(train.Batch(x[:, :, ::2], y), 0.1)),
                ("trainer: the model has no loss; expected a Recipe with one",
                 lambda: train.Trainer(train.build_parallel_model(train.Recipe(nn.RMSNorm(2)), mesh))),
                ("form is 'cos'; expected one of 'none', 'constant', 'linear', 'cosine', 'wsd', 'rex'", lambda: train.Schedule("cos", 1))]:
            with pytest.raises(weft.Error) as error:
                call()
            assert error.value.text == text
        with pytest.raises(weft.BadArgumentError, match="options: .* is of type object; expected numbers, strings, lists and dictionaries"):
            train.Trainer(model, seed=object())
        with pytest.raises(TypeError, match="build_parallel_model makes a ParallelModel"):
            train.ParallelModel()
        model.close()  # the trainer keeps the model of the library
        trainer.step(train.Batch(x, y), 0.01)
        trainer.close()
        with pytest.raises(weft.BadArgumentError, match="the Trainer is closed"):
            trainer.steps
    ranks(1, program)


def test_example(tmp_path):
    """The program prints what its page shows: four ranks begin, three go on."""
    page = (EXAMPLES / "pictures/README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n(.*?)^```", page, re.M | re.S)
    assert len(blocks) == 4
    package = os.path.dirname(os.path.dirname(weft.__file__))
    for command, shown in zip(blocks[::2], blocks[1::2]):
        words = command.split()
        words = [sys.executable, *words[1:3], "--no-tag-output", *words[3:5], str(EXAMPLES / "pictures" / words[5]), *words[6:]]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
                              env={**os.environ, "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])})
        assert done.returncode == 0, done.stdout + done.stderr
        said, expected = ([[float(n) for n in re.findall(r"[\d.]+\d", line)] for line in text.splitlines()] for text in (done.stdout, shown))
        assert said == [pytest.approx(line, abs=2e-2) for line in expected], done.stdout


PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs/python_models.md"


@pytest.mark.parametrize("size", [1, 2, 4])
def test_page(processes, size, tmp_path):
    """The blocks of docs/python_models.md are one program."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) >= 3
    (tmp_path / "page.py").write_text("\n".join(blocks), encoding="utf-8")
    done = processes(size, "import os, runpy, sys; os.chdir(sys.argv[1]); runpy.run_path('page.py')", tmp_path)
    # The second line is of the layer in Python.
    assert re.fullmatch(r"loss \d\.\d{3}\nloss 0\.0\d\d\n", done.stdout), done.stdout


SIZES = {"dim": 16, "layers": 2, "heads": 4, "kv_heads": 4, "ffn_hidden": 24, "vocab": 32, "max_seq": 8, "init_std": 0.1, "experts": 4, "expert_hidden": 12,
         "shared_hidden": 8, "router": {"top_k": 2, "scores": "sigmoid", "bias": "selects", "aux_loss": 0.05, "z_loss": 0.01}}


def test_a_model_with_experts(ranks):
    """Losses and the report of balance on dp 2 x ep 2 are those of one rank."""
    def tokens(step):
        return (step * 5 + 7 * np.arange(4)[:, None] + np.arange(9) ** 2) % 32

    def program(group, **axes):
        mesh = weft.Mesh(group, **axes, tp=1)
        model = train.build_parallel_model(train.moe(**SIZES), mesh, expert_axis="ep", seed=3)
        mine, losses = model.rows(4), []
        trainer = train.Trainer(model, seed=1)
        for step in range(3):
            all_tokens = tokens(step)[mine]
            losses.append(trainer.step(train.Batch(all_tokens[:, :-1].copy(), all_tokens[:, 1:].copy(), global_rows=4), 0.01).loss)
        shapes = {p.name: (p.shape, p.local_shape) for p in model.parameters}
        return losses, model.expert_balance(), shapes["layers.1.mlp.experts.up_proj"]
    [(losses, balance, shape)] = ranks(1, lambda group: program(group, dp=1, ep=1))
    assert [layer.path for layer in balance] == ["layers.0.mlp", "layers.1.mlp"] and shape == ((4, 12, 16), (4, 12, 16))
    for layer in balance:
        assert layer.tokens == 32 and layer.assignments == sum(layer.counts) == 64 and layer.dropped == 0 and layer.aux_loss > 0 and layer.z_loss > 0
    for got, reports, of in ranks(4, lambda group: program(group, dp=2, ep=2)):
        assert got == pytest.approx(losses, rel=2e-6) and of == ((4, 12, 16), (2, 12, 16))
        assert [layer.counts for layer in reports] == [layer.counts for layer in balance]


def test_layers_with_experts(ranks):
    """nn.MoE and nn.MoEBlock in a tree of layers; errors name the place."""
    def program(group):
        mesh = weft.Mesh(group, dp=1, ep=1, tp=1)
        tree = nn.Sequential(nn.Residual(nn.MoE(8, 6, experts=4, kind="relu", router={"top_k": 1})), nn.MoEBlock(8, 2, max_seq=4, experts=2),
                             nn.MoE(8, experts=4, expert=nn.Sequential(up=nn.Linear(8, 6, bias=True), act=nn.GELU(), down=nn.Linear(6, 8))))
        model = train.build_parallel_model(train.Recipe(tree), mesh, expert_axis="ep")
        assert model.expert_balance()[0].counts == ()
        out, = model.forward(train.Batch(np.ones((2, 4, 8), np.float32)))
        assert out.shape == (2, 4, 8) and [sum(layer.counts) for layer in model.expert_balance()] == [8, 16, 16]
        assert [layer.path for layer in model.expert_balance()] == ["0.branch", "1.mlp", "2"]
        assert {p.name: p.shape for p in model.parameters}["2.experts.up.weight"] == (4, 6, 8)
        for wrong, words in ((nn.MoE(8, 6, experts=4, router={"topk": 1}), r'recipe: model\.router has no "topk" \(a router\); is top_k meant\?'),
                             (nn.MoE(8, 6, experts=0), "recipe: model: moe: experts is 0; expected at least 1"),
                             (nn.MoE(8, 6, experts=2, kind="tanh"), 'recipe: model.kind is "tanh"; expected swiglu, silu, gelu, relu')):
            with pytest.raises(weft.BadArgumentError, match=words):
                train.build_parallel_model(train.Recipe(wrong), mesh)
        with pytest.raises(weft.BadArgumentError, match="experts.uneven is true, but expert_axis names no axis"):
            train.build_parallel_model(train.moe(**SIZES), mesh, uneven_experts=True)
    ranks(1, program)
