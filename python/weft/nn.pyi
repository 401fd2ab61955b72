"""Types of `weft.nn`. Made by tools/python_stubs.py --write."""
import os
from collections.abc import Iterator, Sequence
from typing import Any, Optional, Union

class Constant:

    def __init__(self, value: float) -> None:
        ...

    def __repr__(self) -> str:
        ...
Extent = Union[int, Sequence[int]]
Init = Union[float, Constant]

class Layer:

    def __init__(self, **fields: Any) -> None:
        ...

    def description(self) -> dict[str, Any]:
        ...

    def __repr__(self) -> str:
        ...

class Parameter:

    def __init__(self, *shape: int, init: Init=0.02, split_dim: Optional[int]=None) -> None:
        ...

    @property
    def value(self) -> Any:
        ...

    @property
    def gradient(self) -> Any:
        ...

class Module(Layer):

    def __init__(self) -> None:
        ...

    def forward(self, *inputs: Any) -> Any:
        ...

    def backward(self, *gradients: Any) -> Any:
        ...

    def save_for_backward(self, *arrays: Any) -> None:
        ...

    @property
    def inputs(self) -> Sequence[Any]:
        ...

    @property
    def saved(self) -> Sequence[Any]:
        ...

    @property
    def training(self) -> bool:
        ...

    @property
    def pass_id(self) -> tuple[int, int, int]:
        ...

    def parameters(self) -> dict[str, Parameter]:
        ...

    def description(self) -> dict[str, Any]:
        ...

def named_modules(description: Any) -> tuple[Any, dict[str, Module]]:
    ...

class Sequential(Layer):

    def __init__(self, *layers: Layer, **named: Layer) -> None:
        ...

    def __iter__(self) -> Iterator[tuple[str, Layer]]:
        ...

    def __len__(self) -> int:
        ...

    def description(self) -> dict[str, Any]:
        ...

class Residual(Layer):

    def __init__(self, branch: Layer) -> None:
        ...

class Linear(Layer):

    def __init__(self, inputs: int, outputs: int, *, bias: bool=False, init: Init=0.02) -> None:
        ...

class Conv2d(Layer):

    def __init__(self, inputs: int, outputs: int, kernel: Extent=1, *, stride: Extent=1, padding: Extent=0, dilation: Extent=1, groups: int=1, padding_mode: str='zeros', bias: bool=True, init: Init=0.02) -> None:
        ...

class ConvTranspose2d(Layer):

    def __init__(self, inputs: int, outputs: int, kernel: Extent=1, *, stride: Extent=1, padding: Extent=0, output_padding: Extent=0, dilation: Extent=1, groups: int=1, bias: bool=True, init: Init=0.02) -> None:
        ...

class Embedding(Layer):

    def __init__(self, count: int, dim: int, *, init: Init=0.02) -> None:
        ...

class RMSNorm(Layer):

    def __init__(self, dim: int, *, eps: float=1e-05) -> None:
        ...

class LayerNorm(Layer):

    def __init__(self, dim: Extent, *, eps: float=1e-05) -> None:
        ...

class ChannelNorm(Layer):

    def __init__(self, channels: int, *, eps: float=1e-05) -> None:
        ...

class GroupNorm(Layer):

    def __init__(self, groups: int, channels: int, *, eps: float=1e-05) -> None:
        ...

class BatchNorm(Layer):

    def __init__(self, channels: int, *, eps: float=1e-05, momentum: float=0.1, axes: Optional[Sequence[str]]=None) -> None:
        ...

class GELU(Layer):

    def __init__(self, form: str='erf') -> None:
        ...

class ReLU(Layer):

    def __init__(self) -> None:
        ...

class Dropout(Layer):

    def __init__(self, p: float) -> None:
        ...

class SwiGLU(Layer):

    def __init__(self, dim: int, hidden: int, *, init: Init=0.02, down_init: Init=0.02) -> None:
        ...

class ChannelFeedForward(Layer):

    def __init__(self, dim: int, hidden: int, *, dropout: float=0, init: Init=0.02, down_init: Init=0.02) -> None:
        ...

class TransformerBlock(Layer):

    def __init__(self, dim: int, heads: int, *, max_seq: int, kv_heads: Optional[int]=None, ffn_hidden: Optional[int]=None, head_size: Optional[int]=None, rope_theta: float=10000.0, norm_eps: float=1e-05, init_std: float=0.02, layers: int=1) -> None:
        ...

class MoE(Layer):

    def __init__(self, dim: int, hidden: Optional[int]=None, *, experts: int, kind: Optional[str]=None, router: Optional[dict[str, Any]]=None, shared_hidden: int=0, scale_outputs_by_load: bool=False, float8_dispatch: bool=False, init: Init=0.02, down_init: Optional[Init]=None, expert: Optional[Layer]=None) -> None:
        ...

class MoEBlock(Layer):

    def __init__(self, dim: int, heads: int, *, max_seq: int, experts: int, kv_heads: Optional[int]=None, ffn_hidden: Optional[int]=None, head_size: Optional[int]=None, rope_theta: float=10000.0, norm_eps: float=1e-05, init_std: float=0.02, layers: int=1, expert_hidden: int=0, kind: str='swiglu', router: Optional[dict[str, Any]]=None, shared_hidden: int=0, scale_outputs_by_load: bool=False, float8_dispatch: bool=False) -> None:
        ...

class AvgPool2d(Layer):

    def __init__(self, kernel: Extent, *, stride: Optional[Extent]=None, padding: Extent=0, count_padding: bool=True) -> None:
        ...

class MaxPool2d(Layer):

    def __init__(self, kernel: Extent, *, stride: Optional[Extent]=None, padding: Extent=0, dilation: Extent=1) -> None:
        ...

class AdaptiveAvgPool2d(Layer):

    def __init__(self, out: Extent=1) -> None:
        ...

class Resize2d(Layer):

    def __init__(self, *, out: Optional[Extent]=None, scale: Optional[Extent]=None, mode: str='nearest', align_corners: bool=False) -> None:
        ...

class Pad2d(Layer):

    def __init__(self, *, top: int=0, bottom: int=0, left: int=0, right: int=0, rows: str='zeros', columns: str='zeros') -> None:
        ...

class PixelShuffle(Layer):

    def __init__(self, factor: int) -> None:
        ...

def to_json(value: Any, name: str) -> bytes:
    ...
