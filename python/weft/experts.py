"""The parts of a mixture of experts on arrays: a router, the way of tokens to the experts of other ranks and
back, and the experts.

    from weft import experts

    with weft.Context() as context, experts.Mixture(context) as mixture:
        chosen, weights = experts.route(logits, top_k=2)              # (tokens, 2) each
        with mixture.routes(chosen, weights, first_experts, group) as routes:
            rows = routes.dispatch(x)                                 # by expert: routes.offsets
            y_rows, kept = mixture.forward(rows, routes.offsets, up=up, down=down, gate=gate)
            y = routes.weighted_sum(routes.combine(y_rows), weights)

Rank r of the group holds the experts first_experts[r] to first_experts[r + 1]. All ranks make the calls of a
TokenRoutes that say so, whatever is routed. Arrays are of NumPy, on the host; x, rows and results are of
float32. Gradients: route_backward, Mixture.backward and Mixture.weight_gradients; the backward of a dispatch
is a combine, and the backward of a combine is a dispatch.
"""
from __future__ import annotations

import ctypes
from typing import Any, Optional

from . import _api, _train_api, arrays, errors
from ._arguments import choice
from ._compute import Compute
from ._handle import Handle, Made, blocking
from ._train_library import lib, make
from .group import Group

__all__ = ["Mixture", "TokenRoutes", "route", "route_backward"]

SCORES = {"softmax": _train_api.ROUTER_SOFTMAX, "sigmoid": _train_api.ROUTER_SIGMOID}
BIASES = {"selects": _train_api.ROUTER_BIAS_SELECTS, "weighs": _train_api.ROUTER_BIAS_WEIGHS}
KINDS = {"swiglu": _train_api.EXPERT_SWIGLU, "silu": _train_api.EXPERT_SILU, "gelu": _train_api.EXPERT_GELU, "relu": _train_api.EXPERT_RELU}
_byref = ctypes.byref


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        raise ImportError("weft.experts: results are arrays of numpy, which is not installed") from None
    return numpy


def _array(x: Any, dtype: str, name: str, rank: int = 2) -> Any:
    array = _numpy().ascontiguousarray(x, dtype)
    if array.ndim != rank:
        raise errors.BadArgumentError(f"{name} is {array.shape}; expected {rank} dimensions")
    return array


def _matrix(array: Any, name: str) -> Any:
    """The array as rows of its last dimension."""
    buffer = arrays.view(array, name, False)[0]
    columns = array.shape[-1]
    rows = 1
    for extent in array.shape[:-1]:
        rows *= extent
    return _train_api.weft_matrix(buffer.data, rows, columns, buffer.dtype, buffer.device)


def _list(array: Any, name: str) -> Any:
    return arrays.view(array, name, False)[0]


def _router_options(top_k: int, scores: str, normalise: bool, bias: Any, bias_use: str) -> Any:
    options = make(_train_api.weft_router_options)
    options.top_k = errors.integer(top_k, "top_k")
    options.scores = choice(scores, SCORES, "scores")
    use = choice(bias_use, BIASES, "bias_use")
    options.bias = _train_api.ROUTER_BIAS_NONE if bias is None else use
    options.normalise = bool(normalise)
    return options


def _bias(bias: Any) -> Any:
    if bias is None:
        return None, None
    array = _array(bias, "f4", "bias", 1)
    return array, _byref(_list(array, "bias"))


def route(logits: Any, *, top_k: int = 2, scores: str = "softmax", normalise: bool = True, bias: Any = None, bias_use: str = "selects") -> tuple[Any, Any]:
    """The experts of each token, int32 (tokens, top_k), by falling score, and their weights, float32. logits:
    (tokens, experts). bias: one number for each expert, which "selects" alone, or "weighs", too."""
    numpy = _numpy()
    of = _array(logits, "f4", "logits")
    options = _router_options(top_k, scores, normalise, bias, bias_use)
    shape = (of.shape[0], max(options.top_k, 0))
    chosen, weights = numpy.empty(shape, "i4"), numpy.empty(shape, "f4")
    keeps, of_bias = _bias(bias)
    errors.call(lib.route_tokens, _byref(_matrix(of, "logits")), of_bias, _byref(options), _byref(_matrix(chosen, "experts")), _byref(_matrix(weights, "weights")))
    del keeps
    return chosen, weights


def route_backward(logits: Any, chosen: Any, weights: Any, dweights: Any, *, scores: str = "softmax", normalise: bool = True, bias: Any = None,
                   bias_use: str = "selects") -> Any:
    """The gradient of the logits from that of the weights. logits, chosen, weights: of route()."""
    of, experts = _array(logits, "f4", "logits"), _array(chosen, "i4", "chosen")
    used, gradients = _array(weights, "f4", "weights"), _array(dweights, "f4", "dweights")
    options = _router_options(experts.shape[1], scores, normalise, bias, bias_use)
    dlogits = _numpy().empty(of.shape, "f4")
    keeps, of_bias = _bias(bias)
    errors.call(lib.route_tokens_backward, _byref(_matrix(of, "logits")), of_bias, _byref(_matrix(experts, "chosen")), _byref(_matrix(used, "weights")),
                _byref(_matrix(gradients, "dweights")), _byref(options), None, 0.0, 0.0, _byref(_matrix(dlogits, "dlogits")), None)
    del keeps
    return dlogits


class Mixture(Compute):
    """Computes experts, with so many threads. One thread at a time uses it."""
    __slots__ = ()

    def routes(self, chosen: Any, weights: Any, first_experts: Any, group: Optional[Group] = None) -> TokenRoutes:
        """TokenRoutes from the choices of this rank's tokens: of route(), where ~e is a choice of expert e
        that was dropped. group: None: one rank."""
        return TokenRoutes(self, chosen, weights, first_experts, group)

    def forward(self, rows: Any, offsets: Any, *, up: Any, down: Any, gate: Any = None, kind: str = "swiglu") -> tuple[Any, Any]:
        """The experts of rows, and what backward() needs. rows: (rows, dim), those of expert i are offsets[i]
        to offsets[i + 1]; up, gate: (experts, hidden, dim); down: (experts, dim, hidden); gate only for
        "swiglu"."""
        numpy = _numpy()
        x, ends = _array(rows, "f4", "rows"), _array(offsets, "i8", "offsets", 1)
        weights = _Weights(kind, _array(up, "f4", "up", 3), _array(down, "f4", "down", 3), None if gate is None else _array(gate, "f4", "gate", 3))
        shape = (x.shape[0], weights.up.shape[1])
        kept = _Kept(x, ends, weights, numpy.empty(shape, "f4"), numpy.empty(shape, "f4"), None if gate is None else numpy.empty(shape, "f4"))
        y = numpy.empty(x.shape, "f4")
        errors.call(lib.experts_forward, self._open(), _byref(_matrix(x, "rows")), _byref(_list(ends, "offsets")), _byref(weights.matrices()),
                    _byref(kept.activations()), _byref(_matrix(y, "y")))
        return y, kept

    def backward(self, dy: Any, kept: Any) -> Any:
        """The gradient of rows from that of y. kept: of forward(), for one backward(). After it
        weight_gradients(dy, kept) gives the other gradients."""
        gradients, dx = _array(dy, "f4", "dy"), _numpy().empty(kept.x.shape, "f4")
        errors.call(lib.experts_backward, self._open(), _byref(_matrix(gradients, "dy")), _byref(_matrix(kept.x, "rows")), _byref(_list(kept.offsets, "offsets")),
                    _byref(kept.weights.matrices()), _byref(kept.activations()), _byref(_matrix(dx, "dx")))
        return dx

    def weight_gradients(self, dy: Any, kept: Any) -> tuple[Any, Any, Any]:
        """The gradients of up, down and gate (None: there is no gate), after backward(dy, kept)."""
        numpy, of = _numpy(), kept.weights
        to = _Weights(of.kind, numpy.empty(of.up.shape, "f4"), numpy.empty(of.down.shape, "f4"), None if of.gate is None else numpy.empty(of.gate.shape, "f4"))
        gradients = _array(dy, "f4", "dy")
        errors.call(lib.experts_weight_gradients, self._open(), _byref(_matrix(gradients, "dy")), _byref(_matrix(kept.x, "rows")),
                    _byref(_list(kept.offsets, "offsets")), _api.F32, _byref(kept.activations()), _byref(to.matrices()), False)
        return to.up, to.down, to.gate


class _Weights:
    """Matrices of experts, as C takes them."""

    def __init__(self, kind: str, up: Any, down: Any, gate: Any) -> None:
        choice(kind, KINDS, "kind")
        self.kind, self.up, self.down, self.gate = kind, up, down, gate

    def matrices(self) -> Any:
        made = make(_train_api.weft_expert_matrices)
        made.kind, made.experts = KINDS[self.kind], self.up.shape[0]
        made.up, made.down = ctypes.pointer(_matrix(self.up, "up")), ctypes.pointer(_matrix(self.down, "down"))
        if self.gate is not None:
            made.gate = ctypes.pointer(_matrix(self.gate, "gate"))
        return made


class _Kept:
    """A forward pass keeps these."""

    def __init__(self, x: Any, offsets: Any, weights: _Weights, up: Any, hidden: Any, gate: Any) -> None:
        self.x, self.offsets, self.weights, self.up, self.hidden, self.gate = x, offsets, weights, up, hidden, gate

    def activations(self) -> Any:
        made = make(_train_api.weft_expert_activations)
        made.up, made.hidden = ctypes.pointer(_matrix(self.up, "up")), ctypes.pointer(_matrix(self.hidden, "hidden"))
        if self.gate is not None:
            made.gate = ctypes.pointer(_matrix(self.gate, "gate"))
        return made


class TokenRoutes(Handle):
    """Where rows of this rank's tokens travel, and where they come back. Mixture.routes() makes it; all ranks
    of the group call that. offsets: the rows of expert i of this rank are offsets[i] to offsets[i + 1];
    row_weights: the weight with which each row's result is used; results: the choices of this rank's tokens
    that were not dropped."""
    __slots__ = ("offsets", "row_weights", "results", "_tokens", "_top_k")
    _destroy = lib.token_routes_destroy

    def __init__(self, mixture: Mixture, chosen: Any, weights: Any, first_experts: Any, group: Optional[Group]) -> None:
        errors.instance(mixture, Mixture, "mixture")
        if group is not None:
            errors.instance(group, Group, "group")
        numpy = _numpy()
        of, used, first = _array(chosen, "i4", "chosen"), _array(weights, "f4", "weights"), _array(first_experts, "i8", "first_experts", 1)
        made = Made(lib.token_routes_destroy)
        blocking(lib.token_routes_create, mixture, None if group is None else group._open(), _byref(_matrix(of, "chosen")), _byref(_matrix(used, "weights")),
                 _byref(_list(first, "first_experts")), _byref(made), keep=(of, used, first, made))
        super().__init__(made)
        sizes = [ctypes.c_int64() for _ in range(3)]
        errors.call(lib.token_routes_sizes, self._open(), *(_byref(size) for size in sizes))
        experts, rows, self.results = (size.value for size in sizes)
        self.offsets, self.row_weights = numpy.empty(experts + 1, "i8"), numpy.empty(rows, "f4")
        errors.call(lib.token_routes_rows, self._open(), _byref(_list(self.offsets, "offsets")), _byref(_list(self.row_weights, "row_weights")))
        self._tokens, self._top_k = of.shape

    def dispatch(self, x: Any) -> Any:
        """The rows of all ranks' tokens for this rank's experts, by expert. x: (tokens, width).
        Collective."""
        of = _array(x, "f4", "x")
        rows = _numpy().empty((len(self.row_weights), of.shape[1]), "f4")
        blocking(lib.dispatch_rows, self, _byref(_matrix(of, "x")), _byref(_matrix(rows, "rows")), None, keep=(of, rows))
        return rows

    def combine(self, rows: Any) -> Any:
        """The results of this rank's tokens, for weighted_sum() and row_products(). rows: in the order of
        dispatch(). Collective."""
        of = _array(rows, "f4", "rows")
        results = _numpy().empty((self.results, of.shape[1]), "f4")
        blocking(lib.combine_rows, self, _byref(_matrix(of, "rows")), _byref(_matrix(results, "results")), None, keep=(of, results))
        return results

    def weighted_sum(self, results: Any, weights: Any = None) -> Any:
        """For each token the sum of weight * result over its choices; weights: of route(); None: 1 each."""
        of = _array(results, "f4", "results")
        used = None if weights is None else _array(weights, "f4", "weights")
        y = _numpy().empty((self._tokens, of.shape[1]), "f4")
        errors.call(lib.weighted_sum, self._open(), _byref(_matrix(of, "results")), None if used is None else _byref(_matrix(used, "weights")), _byref(_matrix(y, "y")))
        return y

    def row_products(self, results: Any, dy: Any) -> Any:
        """The gradient of the weights: the product of dy with each result, (tokens, top_k)."""
        of, gradients = _array(results, "f4", "results"), _array(dy, "f4", "dy")
        dweights = _numpy().empty((self._tokens, self._top_k), "f4")
        errors.call(lib.row_products, self._open(), _byref(_matrix(of, "results")), _byref(_matrix(gradients, "dy")), _byref(_matrix(dweights, "dweights")))
        return dweights
