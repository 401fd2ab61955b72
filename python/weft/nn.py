"""Layers, as descriptions: names, sizes and initial values, without memory. weft.train builds a model of them
over a mesh.

    import weft.nn as nn

    model = nn.Sequential(
        embed=nn.Conv2d(1, 8, kernel=3, padding=1, init=0.3),
        act=nn.GELU(),
        stages=nn.Sequential(nn.Residual(nn.ChannelFeedForward(8, 16))),
        head=nn.Conv2d(8, 2))

Each layer is a class of the library with the same name (include/weft/nn), which says what it computes. An
extent is a number, or (height, width). Initial values are the standard deviation of a normal distribution,
or Constant. Sizes that do not fit are errors of weft.train.build_parallel_model. docs/python.md is the guide.
"""
from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Optional, Union

from . import errors

__all__ = ["AdaptiveAvgPool2d", "AvgPool2d", "BatchNorm", "ChannelFeedForward", "ChannelNorm", "Constant", "Conv2d", "ConvTranspose2d", "Dropout", "Embedding", "GELU",
           "GroupNorm", "Layer", "LayerNorm", "Linear", "MaxPool2d", "MoE", "MoEBlock", "Module", "Pad2d", "Parameter", "PixelShuffle", "RMSNorm", "ReLU", "Residual", "Resize2d",
           "Sequential", "SwiGLU", "TransformerBlock"]


class Constant:
    """Initial values that are all `value`."""

    def __init__(self, value: float) -> None:
        self.value = errors.number(value, "value")

    def __repr__(self) -> str:
        return f"Constant({self.value})"


Extent = Union[int, Sequence[int]]
Init = Union[float, Constant]


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, Constant):
        return {"constant": value.value}
    if isinstance(value, Layer):
        return value.description()
    return list(value) if isinstance(value, (tuple, set)) else value


class Layer:
    """The base of all layers. A value: it does not change, and may stand in several places. A class of the
    program may be derived from a layer, if it only calls its constructor:

        class Bottleneck(nn.Residual):
            def __init__(self, channels):
                super().__init__(nn.ChannelFeedForward(channels, channels // 2))
    """
    __slots__ = ("_fields",)

    def __init__(self, **fields: Any) -> None:
        self._fields = {name: value for name, value in fields.items() if value is not None}

    def description(self) -> dict[str, Any]:
        """The layer as the library reads it, in values of JSON."""
        return {"layer": self._kind(), **{name: _plain(value) for name, value in self._fields.items()}}

    def _kind(self) -> str:
        """The name of the layer of the library that this is."""
        kind = next(c for c in type(self).__mro__ if c.__module__ == __name__)
        own = type(self)
        if kind is Layer or hasattr(own, "forward") or hasattr(own, "backward"):
            raise errors.BadArgumentError(
                f"{own.__name__} has passes of its own, and is derived from {kind.__name__}; expected a class derived from weft.nn.Module, or one derived "
                "from a layer that only calls its constructor. weft.torch trains models of PyTorch")
        return kind.__name__

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._fields.items())})"


class Parameter:
    """A parameter of a Module. shape: of the global tensor. init: the standard deviation of normally
    distributed initial values, or Constant. split_dim: the dimension that the tensor axis cuts if a plan
    splits the module ("fed_column" and other styles by columns); None: each rank has the whole parameter."""

    def __init__(self, *shape: int, init: Init = 0.02, split_dim: Optional[int] = None) -> None:
        self.shape = tuple(errors.integer(extent, "shape", 64) for extent in shape)
        self.init = init if isinstance(init, Constant) else errors.number(init, "init")
        self.split_dim = None if split_dim is None else errors.integer(split_dim, "split_dim")
        self._value: Any = None
        self._gradient: Any = None

    @property
    def value(self) -> Any:
        """In a pass: the values, float32, as a view of weft's memory that must not be written. It is valid
        until the pass returns."""
        if self._value is None:
            raise errors.BadArgumentError("a Parameter has a value only while forward or backward of its module runs; ParallelModel.value reads it outside")
        return self._value

    @property
    def gradient(self) -> Any:
        """In backward: the gradient, zeros to which the pass adds, as a view of weft's memory; None if the
        parameter is not trained. weft sums it over ranks."""
        if self._value is None:
            raise errors.BadArgumentError("a Parameter has a gradient only while backward of its module runs; Trainer.gradients reads it outside")
        return self._gradient


class Module(Layer):
    """The base of layers whose passes are functions in Python, on arrays of NumPy:

        class Scale(nn.Module):
            def __init__(self, features):
                super().__init__()
                self.factor = nn.Parameter(features, init=nn.Constant(1))

            def forward(self, x):
                return x * self.factor.value

            def backward(self, dy):
                x, = self.inputs
                if self.factor.gradient is not None:
                    self.factor.gradient[...] += (dy * x).sum(axis=0)
                return dy * self.factor.value

    forward gets this rank's part of each input (its rows; with a plan its features, too), and returns one
    array or a tuple. backward gets the gradients of the outputs, and returns those of the inputs, except of
    inputs that are integers; None: zeros. All numbers are float32. Arrays that a pass gets are views of
    weft's memory, which must not be written or kept: they end with the pass.

    Passes may run again for the same batch (activation checkpointing), and several forwards may come before
    their backwards (micro-batches). So backward reads only `inputs`, `saved` and parameters, and not what
    forward left in the object. Passes must not call weft. They run with the GIL, in the thread that the call
    of the Trainer blocks, or in a helper thread of weft while the main thread waits for signals. Threads that
    share one object take turns. If a pass raises an exception, the call raises it on this rank, and the other
    ranks raise a weft.Error that says so."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.RLock()
        self._pass: Any = None

    def forward(self, *inputs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def backward(self, *gradients: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no backward")

    def save_for_backward(self, *arrays: Any) -> None:
        """In forward: copies arrays, as float32, for `saved` of the backward pass of the same batch."""
        for array in arrays:
            self._running().keep(array)

    @property
    def inputs(self) -> Sequence[Any]:
        """In a pass: the inputs of forward."""
        return self._running().inputs

    @property
    def saved(self) -> Sequence[Any]:
        """In backward: what forward gave to save_for_backward, in that order."""
        return self._running().saved

    @property
    def training(self) -> bool:
        """In a pass: whether it is one of a training step."""
        return bool(self._running().of.training)

    @property
    def pass_id(self) -> tuple[int, int, int]:
        """In a pass: the seed, the step and the micro-batch. Random numbers depend on nothing else but the
        row, so that a pass that runs again draws the same."""
        of = self._running().of
        return of.seed, of.step, of.micro_batch

    def parameters(self) -> dict[str, Parameter]:
        """The attributes that are a Parameter, by name, in the order in which they were set."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Parameter)}

    def description(self) -> dict[str, Any]:
        return {"layer": self}

    def _running(self) -> Any:
        if self._pass is None:
            raise errors.BadArgumentError(f"no pass of {type(self).__name__} runs; expected a use inside of forward or backward")
        return self._pass


def named_modules(description: Any) -> tuple[Any, dict[str, Module]]:
    """A description, with names in the place of Modules, and the Modules by these names."""
    found: dict[str, Module] = {}

    def named(module: Module) -> str:
        kind = type(module).__name__
        for name, other in found.items():
            if other is module:
                return name
        name = kind
        while name in found or name in __all__:
            name = f"{kind} {len(found) + 1}" if name == kind else name + "'"
        found[name] = module
        return name

    def walk(value: Any) -> Any:
        if isinstance(value, Module):
            return named(value)
        if isinstance(value, dict):
            return {key: walk(of) for key, of in value.items()}
        return [walk(of) for of in value] if isinstance(value, (list, tuple)) else value
    return walk(description), found


class Sequential(Layer):
    """Children, each of which gets the output of the one before it. They are called "0", "1", ... or by
    names: Sequential(a, b), Sequential(embed=a, head=b)."""
    __slots__ = ()

    def __init__(self, *layers: Layer, **named: Layer) -> None:
        children = [*((str(number), layer) for number, layer in enumerate(layers)), *named.items()]
        for name, layer in children:
            if not isinstance(layer, Layer):
                raise errors.BadArgumentError(f"the child {name} is of type {type(layer).__name__}; expected a layer of weft.nn")
        super().__init__(children=tuple(children))

    def __iter__(self) -> Iterator[tuple[str, Layer]]:
        return iter(self._fields["children"])

    def __len__(self) -> int:
        return len(self._fields["children"])

    def description(self) -> dict[str, Any]:
        return {"layer": self._kind(), "children": [[name, layer.description()] for name, layer in self]}


class Residual(Layer):
    """x + branch(x)."""
    __slots__ = ()

    def __init__(self, branch: Layer) -> None:
        if not isinstance(branch, Layer):
            raise errors.BadArgumentError(f"branch is of type {type(branch).__name__}; expected a layer of weft.nn")
        super().__init__(branch=branch)


class Linear(Layer):
    """(..., inputs) -> (..., outputs): a product with a weight (outputs, inputs)."""
    __slots__ = ()

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, init: Init = 0.02) -> None:
        super().__init__(**{"in": inputs}, out=outputs, bias=bias, init=init)


class Conv2d(Layer):
    """(batch, inputs, height, width) -> (batch, outputs, ...). padding_mode: zeros, reflect, replicate or
    circular."""
    __slots__ = ()

    def __init__(self, inputs: int, outputs: int, kernel: Extent = 1, *, stride: Extent = 1, padding: Extent = 0, dilation: Extent = 1, groups: int = 1,
                 padding_mode: str = "zeros", bias: bool = True, init: Init = 0.02) -> None:
        super().__init__(**{"in": inputs}, out=outputs, kernel=kernel, stride=stride, padding=padding, dilation=dilation, groups=groups,
                         padding_mode=padding_mode, bias=bias, init=init)


class ConvTranspose2d(Layer):
    """The adjoint of a Conv2d from outputs to inputs."""
    __slots__ = ()

    def __init__(self, inputs: int, outputs: int, kernel: Extent = 1, *, stride: Extent = 1, padding: Extent = 0, output_padding: Extent = 0,
                 dilation: Extent = 1, groups: int = 1, bias: bool = True, init: Init = 0.02) -> None:
        super().__init__(**{"in": inputs}, out=outputs, kernel=kernel, stride=stride, padding=padding, output_padding=output_padding, dilation=dilation,
                         groups=groups, bias=bias, init=init)


class Embedding(Layer):
    """Tokens, int64 (...) from 0 to count - 1, -> (..., dim)."""
    __slots__ = ()

    def __init__(self, count: int, dim: int, *, init: Init = 0.02) -> None:
        super().__init__(count=count, dim=dim, init=init)


class RMSNorm(Layer):
    """Root mean square norm over the last dimension."""
    __slots__ = ()

    def __init__(self, dim: int, *, eps: float = 1e-5) -> None:
        super().__init__(dim=dim, eps=eps)


class LayerNorm(Layer):
    """Layer norm over the last dimension, or over the last dimensions, which have the sizes `dim`."""
    __slots__ = ()

    def __init__(self, dim: Extent, *, eps: float = 1e-5) -> None:
        super().__init__(dim=dim, eps=eps)


class ChannelNorm(Layer):
    """Layer norm of each pixel over its channels."""
    __slots__ = ()

    def __init__(self, channels: int, *, eps: float = 1e-5) -> None:
        super().__init__(channels=channels, eps=eps)


class GroupNorm(Layer):
    """Norm over groups of channels of a sample."""
    __slots__ = ()

    def __init__(self, groups: int, channels: int, *, eps: float = 1e-5) -> None:
        super().__init__(groups=groups, channels=channels, eps=eps)


class BatchNorm(Layer):
    """Norm of each channel over the samples of a batch. axes: the axes of the mesh that share statistics;
    None: all that divide the batch."""
    __slots__ = ()

    def __init__(self, channels: int, *, eps: float = 1e-5, momentum: float = 0.1, axes: Optional[Sequence[str]] = None) -> None:
        super().__init__(channels=channels, eps=eps, momentum=momentum, axes=None if axes is None else tuple(axes))


class GELU(Layer):
    """form: erf, or tanh."""
    __slots__ = ()

    def __init__(self, form: str = "erf") -> None:
        super().__init__(form=form)


class ReLU(Layer):
    """max(x, 0)."""
    __slots__ = ()

    def __init__(self) -> None:
        super().__init__()


class Dropout(Layer):
    """In training, elements are 0 with probability p; the same ones on every mesh."""
    __slots__ = ()

    def __init__(self, p: float) -> None:
        super().__init__(p=p)


class SwiGLU(Layer):
    """down(silu(gate(x)) up(x)) over the last dimension; split over the tensor axis."""
    __slots__ = ()

    def __init__(self, dim: int, hidden: int, *, init: Init = 0.02, down_init: Init = 0.02) -> None:
        super().__init__(dim=dim, hidden=hidden, init=init, down_init=down_init)


class ChannelFeedForward(Layer):
    """down(dropout(gelu(up(norm(x))))) over the channels of each pixel; split over the tensor axis."""
    __slots__ = ()

    def __init__(self, dim: int, hidden: int, *, dropout: float = 0, init: Init = 0.02, down_init: Init = 0.02) -> None:
        super().__init__(dim=dim, hidden=hidden, dropout=dropout, init=init, down_init=down_init)


class TransformerBlock(Layer):
    """A pre-norm block: causal attention with rotary positions, and SwiGLU; (batch, sequence, dim). kv_heads:
    heads if None; ffn_hidden: 8/3 dim if None; layers: the number of blocks of the model, for initial
    values. The whole decoder is weft.train.transformer."""
    __slots__ = ()

    def __init__(self, dim: int, heads: int, *, max_seq: int, kv_heads: Optional[int] = None, ffn_hidden: Optional[int] = None, head_size: Optional[int] = None,
                 rope_theta: float = 10000.0, norm_eps: float = 1e-5, init_std: float = 0.02, layers: int = 1) -> None:
        super().__init__(dim=dim, heads=heads, kv_heads=kv_heads, ffn_hidden=ffn_hidden, max_seq=max_seq, head_size=head_size, rope_theta=rope_theta,
                         norm_eps=norm_eps, init_std=init_std, layers=layers)


class MoE(Layer):
    """A mixture of experts: each token uses some of many feed-forward networks; (batch, ..., dim). kind:
    "swiglu", "silu", "gelu" or "relu". router: a dictionary with the fields of RouterOptions
    (docs/expert_parallel.md): {"top_k": 2, "bias": "selects", "aux_loss": 0.01}. shared_hidden: features of
    a SwiGLU that every token uses, too. expert: a layer (rows, dim), which each expert then is, in the place
    of hidden, kind and down_init. The residual is not added."""
    __slots__ = ()

    def __init__(self, dim: int, hidden: Optional[int] = None, *, experts: int, kind: Optional[str] = None, router: Optional[dict[str, Any]] = None,
                 shared_hidden: int = 0, scale_outputs_by_load: bool = False, float8_dispatch: bool = False, init: Init = 0.02,
                 down_init: Optional[Init] = None, expert: Optional[Layer] = None) -> None:
        super().__init__(dim=dim, hidden=hidden, experts=experts, kind=kind, router=router, shared_hidden=shared_hidden,
                         scale_outputs_by_load=scale_outputs_by_load, float8_dispatch=float8_dispatch, init=init, down_init=down_init, expert=expert)


class MoEBlock(Layer):
    """A TransformerBlock with a mixture of experts in the place of its SwiGLU; see both. expert_hidden:
    features of each expert, ffn_hidden if 0. The whole decoder is weft.train.moe."""
    __slots__ = ()

    def __init__(self, dim: int, heads: int, *, max_seq: int, experts: int, kv_heads: Optional[int] = None, ffn_hidden: Optional[int] = None,
                 head_size: Optional[int] = None, rope_theta: float = 10000.0, norm_eps: float = 1e-5, init_std: float = 0.02, layers: int = 1,
                 expert_hidden: int = 0, kind: str = "swiglu", router: Optional[dict[str, Any]] = None, shared_hidden: int = 0,
                 scale_outputs_by_load: bool = False, float8_dispatch: bool = False) -> None:
        super().__init__(dim=dim, heads=heads, kv_heads=kv_heads, ffn_hidden=ffn_hidden, max_seq=max_seq, head_size=head_size, rope_theta=rope_theta,
                         norm_eps=norm_eps, init_std=init_std, layers=layers, experts=experts, expert_hidden=expert_hidden, kind=kind, router=router,
                         shared_hidden=shared_hidden, scale_outputs_by_load=scale_outputs_by_load, float8_dispatch=float8_dispatch)


class AvgPool2d(Layer):
    """Means of pixels. stride: the kernel's extent if None."""
    __slots__ = ()

    def __init__(self, kernel: Extent, *, stride: Optional[Extent] = None, padding: Extent = 0, count_padding: bool = True) -> None:
        super().__init__(kernel=kernel, stride=stride, padding=padding, count_padding=count_padding)


class MaxPool2d(Layer):
    """The largest of some pixels. stride: the kernel's extent if None."""
    __slots__ = ()

    def __init__(self, kernel: Extent, *, stride: Optional[Extent] = None, padding: Extent = 0, dilation: Extent = 1) -> None:
        super().__init__(kernel=kernel, stride=stride, padding=padding, dilation=dilation)


class AdaptiveAvgPool2d(Layer):
    """Maps of `out` pixels: the means of parts of about equal size."""
    __slots__ = ()

    def __init__(self, out: Extent = 1) -> None:
        super().__init__(out=out)


class Resize2d(Layer):
    """Maps of the size `out`, or of `scale` times their size. mode: nearest or bilinear."""
    __slots__ = ()

    def __init__(self, *, out: Optional[Extent] = None, scale: Optional[Extent] = None, mode: str = "nearest", align_corners: bool = False) -> None:
        super().__init__(out=out, scale=scale, mode=mode, align_corners=align_corners)


class Pad2d(Layer):
    """More pixels around the border. rows, columns: zeros, reflect, replicate or circular."""
    __slots__ = ()

    def __init__(self, *, top: int = 0, bottom: int = 0, left: int = 0, right: int = 0, rows: str = "zeros", columns: str = "zeros") -> None:
        super().__init__(top=top, bottom=bottom, left=left, right=right, rows=rows, columns=columns)


class PixelShuffle(Layer):
    """factor^2 channels become factor x factor pixels."""
    __slots__ = ()

    def __init__(self, factor: int) -> None:
        super().__init__(factor=factor)


def to_json(value: Any, name: str) -> bytes:
    """A value of JSON as the library reads it. name: what it is, in errors."""
    try:
        return json.dumps(value, default=_number, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise errors.BadArgumentError(f"{name}: {error}; expected numbers, strings, lists and dictionaries") from None


def _number(value: Any) -> Any:
    """Numbers of NumPy, and names of dtypes."""
    if isinstance(value, (tuple, set, frozenset)):
        return sorted(value)
    if hasattr(value, "__index__"):
        return value.__index__()
    if hasattr(value, "__float__"):
        return float(value)
    raise TypeError(f"{value!r} is of type {type(value).__name__}")
