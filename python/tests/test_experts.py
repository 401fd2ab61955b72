"""The parts of a mixture of experts: against plain arithmetic of NumPy, on one rank and on several."""
import numpy as np
import pytest

import weft

try:
    from weft import experts
except ImportError as reason:
    pytest.skip(f"libweft_train is not there: {reason}", allow_module_level=True)

EXPERTS, TOKENS, TOP_K, DIM, HIDDEN = 5, 6, 2, 3, 4
RANDOM = np.random.default_rng(5)
UP, GATE = RANDOM.normal(size=(2, EXPERTS, HIDDEN, DIM)).astype("f4")
DOWN = RANDOM.normal(size=(EXPERTS, DIM, HIDDEN)).astype("f4")


def silu(x):
    return x / (1 + np.exp(-x))


def expert(e, x):
    return (silu(x @ GATE[e].T.astype("f8")) * (x @ UP[e].T.astype("f8"))) @ DOWN[e].T.astype("f8")


def reference(logits, x):
    scores = np.exp(logits.astype("f8"))
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, :TOP_K]
    weights = np.take_along_axis(scores, chosen, 1)
    weights /= weights.sum(axis=1, keepdims=True)
    y = np.array([sum(w * expert(e, row) for e, w in zip(es, ws)) for es, ws, row in zip(chosen, weights, x.astype("f8"))])
    return chosen, weights, y


@pytest.mark.parametrize("size", [1, 2, 3])
def test_tokens_travel_to_their_experts_and_back(ranks, size):
    logits = RANDOM.normal(size=(size * TOKENS, EXPERTS)).astype("f4")
    x, dy = RANDOM.normal(size=(2, size * TOKENS, DIM)).astype("f4")
    chosen, weights, y = reference(logits, x)
    all_dx = np.zeros((size * TOKENS, DIM))
    first = [EXPERTS * r // size for r in range(size + 1)]

    def program(group):
        own = slice(group.rank * TOKENS, (group.rank + 1) * TOKENS)
        here = slice(first[group.rank], first[group.rank + 1])
        with weft.Context() as context, experts.Mixture(context) as mixture:
            got, used = experts.route(logits[own], top_k=TOP_K)
            np.testing.assert_array_equal(got, chosen[own])
            np.testing.assert_allclose(used, weights[own], rtol=1e-6)
            with mixture.routes(got, used, first, group) as routes:
                assert routes.results == TOKENS * TOP_K and len(routes.offsets) == here.stop - here.start + 1
                rows = routes.dispatch(x[own])
                out, kept = mixture.forward(rows, routes.offsets, up=UP[here], down=DOWN[here], gate=GATE[here])
                results = routes.combine(out)
                np.testing.assert_allclose(routes.weighted_sum(results, used), y[own], rtol=1e-4, atol=1e-5)
                drows = routes.dispatch(dy[own]) * routes.row_weights[:, None]
                all_dx[own] = routes.weighted_sum(routes.combine(mixture.backward(drows, kept)))
                dup, ddown, dgate = mixture.weight_gradients(drows, kept)
                assert dup.shape == UP[here].shape and ddown.shape == DOWN[here].shape and dgate.shape == GATE[here].shape
                dlogits = experts.route_backward(logits[own], got, used, routes.row_products(results, dy[own]))
                np.testing.assert_allclose(dlogits.sum(axis=1), 0, atol=1e-5)  # weights of a token sum to 1

    ranks(size, program)
    # A step along dx, with the weights of the router as they are: the first-order change of the loss.
    step = 1e-4

    def loss(at):
        return sum((dy[t].astype("f8") * sum(w * expert(e, at[t]) for e, w in zip(chosen[t], weights[t]))).sum() for t in range(len(at)))

    change = (loss(x + step * all_dx) - loss(x - step * all_dx)) / (2 * step)
    np.testing.assert_allclose(change, (all_dx**2).sum(), rtol=1e-3)


def test_mistakes():
    with pytest.raises(weft.BadArgumentError, match="scores is 'max'; expected one of 'softmax', 'sigmoid'"):
        experts.route(np.zeros((2, 3)), scores="max")
    with pytest.raises(weft.BadArgumentError, match=r"logits is \(3,\); expected 2 dimensions"):
        experts.route(np.zeros(3))
    with pytest.raises(weft.BadArgumentError, match="top_k is 4; expected 1 to 3, the number of experts"):
        experts.route(np.zeros((2, 3)), top_k=4)
    with weft.Context() as context, experts.Mixture(context) as mixture:
        with pytest.raises(weft.BadArgumentError, match="token_routes: token 0 chose expert 1 twice"):
            mixture.routes([[1, 1]], [[0.5, 0.5]], [0, 2])
        with pytest.raises(weft.BadArgumentError, match="kind is 'tanh'"):
            mixture.forward(np.zeros((1, 2)), [0, 1], up=np.zeros((1, 4, 2)), down=np.zeros((1, 2, 4)), kind="tanh")
