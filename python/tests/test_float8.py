"""Numbers of eight bits: casts against plain arithmetic, and models that train in eight bits."""
import numpy as np
import pytest

import weft

try:
    from weft import float8, nn, train
except ImportError as reason:
    pytest.skip(f"libweft_train is not there: {reason}", allow_module_level=True)


@pytest.fixture
def casts():
    with weft.Context() as context, float8.Casts(context, threads=2) as made:
        yield made


def values_of(mantissa, bias, largest):
    """The values of the codes from 0 to `largest`, from the definition of the format."""
    codes = np.arange(largest + 1)
    exponent, rest = codes >> mantissa, (codes & ((1 << mantissa) - 1)) / (1 << mantissa)
    return np.where(exponent == 0, rest * 2.0 ** (1 - bias), (1 + rest) * 2.0 ** (exponent - bias))


@pytest.mark.parametrize("format, definition", [("e4m3", (3, 7, 0x7E)), ("e5m2", (2, 15, 0x7B))])
@pytest.mark.parametrize("by", ["tensor", "rows", "columns"])
def test_casts(casts, format, definition, by):
    x = np.random.default_rng(3).normal(size=(3, 5, 33)).astype("f4")
    values = values_of(*definition)
    axes = {"tensor": None, "rows": -1, "columns": (0, 1)}[by]
    amax = casts.amax(x, by=by)
    np.testing.assert_array_equal(amax, np.ravel(np.abs(x).max(axis=axes)))
    scales = float8.scales(amax, format=format)
    np.testing.assert_array_equal(scales, (values[-1] / amax.astype("f8")).astype("f4"))
    codes = casts.quantise(x, scales, format=format, by=by)
    scaled = x * (scales.reshape(3, 5, 1) if by == "rows" else scales)
    near = np.abs(np.abs(scaled)[..., None].astype("f8") - values).argmin(axis=-1)  # random: no ties
    np.testing.assert_array_equal(codes, near | np.where(np.signbit(scaled), 0x80, 0))
    np.testing.assert_array_equal(casts.widen(codes, format=format), np.where(np.signbit(scaled), -1, 1) * values[near])


def test_scales_are_powers_of_two(casts):
    assert list(float8.scales([448, 3, float.fromhex("0x1.c00002p-1"), 0], power_of_two=True)[:3]) == [1, 128, 512]
    assert list(casts.widen(casts.quantise(np.float32([1000, -0.0, 17]), [1]))) == [448, 0, 16]


def test_mistakes(casts):
    x = np.ones((2, 3), "f4")
    with pytest.raises(weft.BadArgumentError, match="by is 'row'; expected one of 'tensor', 'rows', 'columns'"):
        casts.amax(x, by="row")
    with pytest.raises(weft.BadArgumentError, match="format is 'f8'; expected one of 'e4m3', 'e5m2'"):
        float8.scales([1], format="f8")
    with pytest.raises(weft.BadArgumentError, match="scales has 1 elements of f32 on cpu; expected 2 of f32 on the CPU"):
        casts.quantise(x, [1], by="rows")
    with pytest.raises(weft.BadArgumentError, match="x is f64; expected f32 or bf16"):
        casts.amax(x.astype("f8"))
    with pytest.raises(weft.BadArgumentError, match="codes is of dtype float32; expected bytes"):
        casts.widen(x)


def test_models_train_in_eight_bits(ranks):
    """With scales of the whole the losses of two ranks are those of one, except for the order of sums."""
    def losses(group):
        recipe = train.transformer(dim=32, layers=1, heads=2, ffn_hidden=48, vocab=32, max_seq=8, init_std=0.1)
        model = train.build_parallel_model(recipe, weft.Mesh(group, dp=-1, tp=1), seed=5, float8="rowwise", float8_scales="whole")
        trainer = train.Trainer(model)
        rows = slice(group.rank * 4 // group.size, (group.rank + 1) * 4 // group.size)
        tokens = np.arange(32, dtype=np.int64).reshape(4, 8)
        batch = train.Batch(tokens[rows], np.roll(tokens, -1, 1)[rows])
        return [trainer.step([batch], 1e-2).loss for _ in range(8)]

    one, = ranks(1, losses)
    assert one[-1] < 0.8 * one[0]
    for other in ranks(2, losses):
        assert other == pytest.approx(one, rel=1e-2)


def test_wrong_options_are_refused(ranks):
    def refuse(group):
        recipe = train.transformer(dim=32, layers=1, heads=2, ffn_hidden=48, vocab=32, max_seq=8)
        mesh = weft.Mesh(group, dp=-1, tp=1)
        for options, text in (
            ({"float8": "delayed"}, "options: float8: float8: the recipe is delayed; expected tensorwise, rowwise or rowwise_gw_hp"),
            ({"float8": "rowwise", "float8_scales": "all"}, 'options: float8_scales is "all"; expected own, whole'),
            ({"float8_scales": "whole"}, 'options: float8_scales is "whole"; expected a recipe in float8'),
        ):
            with pytest.raises(weft.BadArgumentError, match=text):
                train.build_parallel_model(recipe, mesh, **options)

    ranks(1, refuse)
