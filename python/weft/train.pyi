"""Types of `weft.train`. Made by tools/python_stubs.py --write."""
import os
from . import Mesh, nn
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union
PathName = Union[str, bytes, 'os.PathLike[str]', 'os.PathLike[bytes]']

class Recipe:

    def __init__(self, model: nn.Layer, *, loss: Optional[str]=None, blocks: Iterable[str]=(), plan: Optional[Mapping[str, str]]=None, name: str='model') -> None:
        ...

def transformer(**sizes: Any) -> Recipe:
    ...

def moe(**sizes: Any) -> Recipe:
    ...

def weather(**sizes: Any) -> Recipe:
    ...

class Parameter(NamedTuple):
    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    trained: bool

class ExpertBalance(NamedTuple):
    path: str
    counts: tuple[int, ...]
    tokens: int
    assignments: int
    dropped: int
    aux_loss: float
    z_loss: float

class ParallelModel:

    def __init__(self) -> None:
        ...

    @property
    def mesh(self) -> Mesh:
        ...

    def rows(self, count: int) -> slice:
        ...

    def expert_balance(self) -> list[ExpertBalance]:
        ...

    def forward(self, batch: Batch) -> list[Any]:
        ...

    def generate(self, prompts: Sequence[Sequence[int]], *, new_tokens: int=128, temperature: float=1.0, top_k: int=0, top_p: float=1.0, stops: Sequence[Sequence[int]]=(), seed: int=0, cache: bool=True) -> list[list[int]]:
        ...

    @property
    def parameters(self) -> list[Parameter]:
        ...

    def value(self, name: str) -> Any:
        ...

    def set_value(self, name: str, value: Any) -> None:
        ...

    def save(self, directory: PathName, step: int=0) -> None:
        ...

    def load(self, directory: PathName) -> int:
        ...

    def init_from(self, directory: PathName, *, excepted: Iterable[str]=(), left_out: Iterable[str]=()) -> int:
        ...

    def close(self) -> None:
        ...

    def __enter__(self) -> ParallelModel:
        ...

    def __exit__(self, *exception: object) -> None:
        ...

def build_parallel_model(recipe: Recipe, mesh: Mesh, *, threads: int=1, **options: Any) -> ParallelModel:
    ...

class Batch:

    def __init__(self, inputs: Any, targets: Any=(), *, global_rows: int=0) -> None:
        ...

class StepResult(NamedTuple):
    step: int
    count: int
    loss: float
    grad_norm: float
    skipped: bool
    loss_scale: float

class Evaluation(NamedTuple):
    count: int
    loss: float
    perplexity: float

class TrainingEnd(NamedTuple):
    why: str
    steps: int
    reason: int
    best_loss: Optional[float]

class Trainer:

    def __init__(self, model: ParallelModel, **options: Any) -> None:
        ...

    def step(self, batches: Union[Batch, Sequence[Batch]], rate: float) -> StepResult:
        ...

    def backward(self, batches: Union[Batch, Sequence[Batch]]) -> StepResult:
        ...

    def gradients(self) -> dict[str, Any]:
        ...

    def set_gradients(self, values: Mapping[str, Any]) -> None:
        ...

    def update(self, rate: float) -> StepResult:
        ...

    def discard(self) -> None:
        ...

    def train(self, steps: int, step: Callable[[int], StepResult], *, evaluate_every: int=0, evaluate: Optional[Callable[[], Evaluation]]=None, patience: int=0, least_gain: float=0, stop: Optional[Callable[[], int]]=None, folder: Optional[PathName]=None, save_every: int=0, save_minutes: float=0, keep: int=0, at_end: bool=True, background: bool=True, check_replicas: bool=True, on_begin: Optional[Callable[[], object]]=None, on_step: Optional[Callable[[StepResult], object]]=None, on_evaluation: Optional[Callable[[Evaluation], object]]=None, on_checkpoint: Optional[Callable[[int], object]]=None, on_end: Optional[Callable[[TrainingEnd], object]]=None) -> TrainingEnd:
        ...

    def evaluate(self, batches: Union[Batch, Sequence[Batch]]) -> Evaluation:
        ...

    @property
    def steps(self) -> int:
        ...

    def swap_averages(self, averages_in: bool) -> None:
        ...

    def swap_evaluation(self, evaluation_in: bool) -> None:
        ...

    def save(self, directory: PathName) -> None:
        ...

    def load(self, directory: PathName) -> None:
        ...

    def close(self) -> None:
        ...

    def __enter__(self) -> Trainer:
        ...

    def __exit__(self, *exception: object) -> None:
        ...

class Schedule:

    def __init__(self, form: str, peak: float, *, floor: float=0, warmup: int=0, total: int=1, decay: int=0, shape: str='linear') -> None:
        ...

    def __call__(self, step: int) -> float:
        ...
