"""Models of layers (weft.nn) over a mesh: built, trained, evaluated, saved, loaded on another mesh.

    import weft.nn as nn
    from weft import train

    recipe = train.Recipe(nn.Sequential(...), loss="cross_entropy", blocks=["stages.*"])
    model = train.build_parallel_model(recipe, mesh, data="fsdp", ac="full", seed=3)
    trainer = train.Trainer(model, optimizer={"name": "adamw", "beta2": 0.99}, seed=1)
    rows = model.rows(64)                                # this rank's of 64
    loss = trainer.step(train.Batch(x[rows], y[rows], global_rows=64), rate=1e-3).loss
    trainer.save("run")

The work is the library's: Python only describes it. docs/python.md is the guide. A model and its trainer are
for one thread at a time.
"""
from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

from . import _api, _modules, _train_api, arrays, dtypes, errors, nn
from ._arguments import choice
from ._handle import Handle, Made, blocking
from ._train_library import lib, make
from .checkpoint import _path
from .meshes.mesh import Mesh

__all__ = ["Batch", "Evaluation", "ExpertBalance", "ParallelModel", "Parameter", "Recipe", "Schedule", "StepResult", "Trainer", "TrainingEnd",
           "build_parallel_model", "moe", "transformer", "weather"]

_byref = ctypes.byref
PathName = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]"]


class Recipe:
    """Tells build_parallel_model all that it has to know of a model.

    model: a layer of weft.nn. loss: "cross_entropy" (targets are int64 classes, -100: not counted),
    "mean_squared_error" or "binary_cross_entropy" (targets have the shape of the output); None: none, and no
    Trainer. blocks: patterns of paths of modules, in which * stands for one step: fsdp gathers them one by
    one, and ac="full" runs them again. plan: styles by paths, such as {"up": "column", "act": "fed_column",
    "down": "row"}: how the tensor axis splits layers, in addition to the layers' own plans. name: in
    errors."""

    def __init__(self, model: nn.Layer, *, loss: Optional[str] = None, blocks: Iterable[str] = (), plan: Optional[Mapping[str, str]] = None,
                 name: str = "model") -> None:
        if not isinstance(model, nn.Layer):
            raise errors.BadArgumentError(f"model is of type {type(model).__name__}; expected a layer of weft.nn")
        if isinstance(blocks, str):
            raise errors.BadArgumentError(f"blocks is {blocks!r}; expected a list of patterns")
        description, self._modules = nn.named_modules(model.description())
        self._text = {"name": name, "model": description, "blocks": list(blocks), **({} if loss is None else {"loss": loss}),
                      **({} if plan is None else {"plan": dict(plan)})}

    @classmethod
    def _of(cls, **text: Any) -> Recipe:
        made = cls.__new__(cls)
        made._text, made._modules = text, {}
        return made


def transformer(**sizes: Any) -> Recipe:
    """The library's decoder of tokens: dim, layers, heads, kv_heads, ffn_hidden, vocab, max_seq, head_size,
    rope_theta, norm_eps, init_std, tied. Inputs and targets are int64 (rows, sequence)."""
    return Recipe._of(transformer=sizes)


def moe(**sizes: Any) -> Recipe:
    """The library's decoder of tokens with mixtures of experts: the sizes of transformer, and experts,
    expert_hidden, shared_hidden, kind, every, router (a dictionary, as that of weft.nn.MoE),
    scale_outputs_by_load, float8_dispatch. The option expert_axis of build_parallel_model divides the
    experts over ranks. Inputs and targets are int64 (rows, sequence)."""
    return Recipe._of(moe=sizes)


def weather(**sizes: Any) -> Recipe:
    """The library's stage of a weather model: dim, depth, head_dim, local_window, global_window, mult,
    dropout, init_std, attention_dropout. Inputs and targets are maps (rows, dim, height, width)."""
    return Recipe._of(weather=sizes)


class Parameter(NamedTuple):
    """A parameter as a rank has it."""
    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]  # of this rank's part
    trained: bool


class ExpertBalance(NamedTuple):
    """The choices of the router of one mixture of experts in its last forward pass, over all data ranks.
    Losses are without their factors."""
    path: str
    counts: tuple[int, ...]  # assignments of each expert, before capacity
    tokens: int
    assignments: int
    dropped: int
    aux_loss: float
    z_loss: float


class ParallelModel(Handle):
    """This rank's part of a model. build_parallel_model makes it."""
    __slots__ = ("_mesh", "_data", "_failures")
    _destroy = lib.model_destroy

    def __init__(self) -> None:
        raise TypeError("weft.train.build_parallel_model makes a ParallelModel")

    @property
    def mesh(self) -> Mesh:
        """The mesh that it was built over."""
        return self._mesh

    def _passes(self, function: Any, *args: Any, keep: Any = None) -> None:
        """A call that runs passes: it raises the exception of a Module if one has raised."""
        self._failures.clear()
        try:
            blocking(function, *args, keep=keep)
        except errors.Error:
            if not self._failures:
                raise
        if self._failures:
            try:
                raise self._failures[0]
            finally:
                self._failures.clear()  # whose frames refer to this one

    def rows(self, count: int) -> slice:
        """This rank's rows of a batch of `count` rows in all."""
        begin, size = 0, errors.integer(count, "count", 64)
        for axis in self._data:
            part = self._mesh[axis]
            each, more = divmod(size, part.size)
            begin, size = begin + part.rank * each + min(part.rank, more), each + (part.rank < more)
        return slice(begin, begin + size)

    def expert_balance(self) -> list[ExpertBalance]:
        """The reports of the routers of all mixtures of experts; empty for a model without. In a pipeline
        collective over the stages, and every rank has the reports of all; otherwise no communication."""
        count, reports = ctypes.c_int32(), []
        blocking(lib.model_expert_balance, self, _byref(count))
        for index in range(count.value):
            of = make(_train_api.weft_expert_balance)
            errors.call(lib.model_get_expert_balance, self._open(), index, _byref(of))
            reports.append(ExpertBalance(of.path.decode(), tuple(of.counts[:of.expert_count]), of.tokens, of.assignments, of.dropped, of.aux_loss, of.z_loss))
        return reports

    def forward(self, batch: Batch) -> list[Any]:
        """The outputs of the model for this rank's rows of a batch, whose targets are not read, as arrays of
        NumPy: passes that keep nothing. Collective over the tensor axis."""
        numpy, count = _numpy(), ctypes.c_int32()
        owners: list[Any] = []
        if not isinstance(batch, Batch):
            raise errors.BadArgumentError(f"batch is of type {type(batch).__name__}; expected a weft.train.Batch")
        self._passes(lib.model_forward, self, _byref(batch._struct(owners)), _byref(count), keep=owners)
        made = []
        for index in range(count.value):
            of = _api.weft_tensor()
            errors.call(lib.model_get_output, self._open(), index, _byref(of))
            array = numpy.empty(tuple(of.extents[:of.dim_count]), next(name for name, of_weft in dtypes.OTHER.items() if dtypes.NAMES[of_weft] == of.data.dtype))
            if array.size:
                ctypes.memmove(array.ctypes.data, of.data.data, array.nbytes)
            made.append(array)
        return made

    def generate(self, prompts: Sequence[Sequence[int]], *, new_tokens: int = 128, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
                 stops: Sequence[Sequence[int]] = (), seed: int = 0, cache: bool = True) -> list[list[int]]:
        """Continues prompts of tokens, which may have different lengths: the tokens behind each, at most
        new_tokens. bytes are tokens, too.

        temperature divides the logits; 0: always the most probable token. top_k: only the k most probable
        tokens; 0: all. top_p: only the most probable tokens that have this probability together. A
        continuation ends behind the first of the `stops` that it makes, or at max_seq. The same seed gives
        the same tokens. cache: keeps keys and values; without it each token is a pass over the whole, with
        the same tokens. All ranks give the same arguments, and get all continuations. Collective: data ranks
        share the prompts, tensor ranks each pass."""
        count = errors.integer(new_tokens, "new_tokens", 64)
        owners: list[Any] = []
        options = make(_train_api.weft_generate_options)
        options.new_tokens, options.no_cache, options.top_k = count, not cache, errors.integer(top_k, "top_k", 64)
        options.temperature, options.top_p = errors.number(temperature, "temperature"), errors.number(top_p, "top_p")
        options.stops, options.stop_count = _tokens(stops, "stops", owners)
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 64:
            raise errors.BadArgumentError(f"seed is {seed!r}; expected an integer from 0 to 2^64 - 1")
        options.seed = seed
        given, rows = _tokens(prompts, "prompts", owners)
        tokens, counts = (ctypes.c_int64 * max(1, rows * count))(), (ctypes.c_int64 * max(1, rows))()
        blocking(lib.model_generate, self, given, rows, _byref(options), tokens, counts, keep=(owners, tokens, counts))
        return [tokens[row * count:row * count + counts[row]] for row in range(rows)]

    @property
    def parameters(self) -> list[Parameter]:
        """All parameters, in the same order on all ranks; in a pipeline those of this rank's stages."""
        count = ctypes.c_int32()
        errors.call(lib.model_parameter_count, self._open(), _byref(count))
        return [self._parameter(i)[0] for i in range(count.value)]

    def _parameter(self, index: int) -> tuple[Parameter, Any]:
        of = make(_train_api.weft_parameter)
        errors.call(lib.model_get_parameter, self._open(), index, _byref(of))
        dims = slice(of.dim_count)
        return Parameter(of.name.decode(), tuple(of.extents[dims]), tuple(of.local_extents[dims]), of.trained), of

    def _index(self, name: str) -> int:
        index = ctypes.c_int32()
        errors.call(lib.model_find_parameter, self._open(), name.encode() if isinstance(name, str) else b"", _byref(index))
        if index.value < 0:
            raise errors.BadArgumentError(f"name is {name!r}; expected the name of one of the model's parameters")
        return index.value

    def value(self, name: str) -> Any:
        """A copy of this rank's part of a parameter, as an array of NumPy."""
        numpy = _numpy()
        parameter, of = self._parameter(self._index(name))
        made = numpy.empty(parameter.local_shape, numpy.float32)
        if made.size:
            ctypes.memmove(made.ctypes.data, of.value.data, made.nbytes)
        return made

    def set_value(self, name: str, value: Any) -> None:
        """Writes this rank's part of a parameter: float32, with its local shape."""
        index = self._index(name)
        expected = self._parameter(index)[0].local_shape
        buffer, owner = arrays.view(value, "value", False)
        if tuple(arrays.shape_of(value)) != expected:
            raise errors.BadArgumentError(f"value has the shape {tuple(arrays.shape_of(value))}; expected {expected}, this rank's part of {name}")
        errors.call(lib.model_set_parameter, self._open(), index, _byref(buffer))
        del owner

    def save(self, directory: PathName, step: int = 0) -> None:
        """Writes a checkpoint of the parameters alone: directory/step-N. Collective."""
        blocking(lib.model_save, self, _path(directory, "directory"), errors.integer(step, "step", 64))

    def load(self, directory: PathName) -> int:
        """Reads the parameters from a checkpoint of a model or a trainer, of any mesh; its step.
        Collective."""
        step = ctypes.c_int64()
        blocking(lib.model_load, self, _path(directory, "directory"), _byref(step))
        return step.value

    def init_from(self, directory: PathName, *, excepted: Iterable[str] = (), left_out: Iterable[str] = ()) -> int:
        """Begins a fine-tuning: reads the parameters of another run's checkpoint, before the Trainer is made;
        the checkpoint's step. excepted: patterns of paths of what keeps its values, for a new head; left_out:
        of what only the checkpoint has. Collective."""
        step = ctypes.c_int64()
        first, second = _patterns(excepted, "excepted"), _patterns(left_out, "left_out")
        blocking(lib.model_init_from, self, _path(directory, "directory"), first, len(first), second, len(second), _byref(step), keep=(first, second))
        return step.value


def _patterns(patterns: Iterable[str], name: str) -> Any:
    """An array of strings of C."""
    listed = None if isinstance(patterns, (str, bytes)) else list(patterns)
    if listed is None or not all(isinstance(p, str) for p in listed):
        raise errors.BadArgumentError(f"{name} is {patterns!r}; expected a list of patterns")
    return (ctypes.c_char_p * len(listed))(*(p.encode() for p in listed))


def _numpy() -> Any:
    """NumPy, or an error that says what needs it."""
    try:
        import numpy
    except ImportError:
        raise ImportError("weft.train: the value of a parameter is an array of numpy, which is not installed") from None
    return numpy


def _tokens(listed: Sequence[Sequence[int]], name: str, owners: list[Any]) -> tuple[Any, int]:
    """Lists of tokens as C has them; `owners` keeps their memory."""
    if isinstance(listed, (str, bytes)):
        raise errors.BadArgumentError(f"{name} is of type {type(listed).__name__}; expected a list of lists of tokens")
    structs = (_train_api.weft_tokens * max(1, len(listed)))()
    for at, one in enumerate(listed):
        if isinstance(one, str):
            raise errors.BadArgumentError(f"{name}[{at}] is a str; expected tokens: a list of integers, or bytes")
        ids = [errors.integer(token, f"{name}[{at}]", 64) for token in one]
        array = (ctypes.c_int64 * max(1, len(ids)))(*ids)
        structs[at] = _train_api.weft_tokens(array, len(ids))
        owners.append(array)
    owners.append(structs)
    return structs, len(listed)


def build_parallel_model(recipe: Recipe, mesh: Mesh, *, threads: int = 1, **options: Any) -> ParallelModel:
    """Builds a model over a mesh that has the axes "dp" and "tp", or those that `data_axis` and `tensor_axis`
    name: split over the tensor axis, with data parallel over the other, with memory for this rank's part
    alone, and with the same values on every mesh. No communication; all ranks give the same arguments.

    threads: with which this rank computes. options: data ("ddp", "fsdp"), seed, ac ("none", "full",
    "selective"), ac_modules, ac_every, frozen, dtype, activations, reduce, reshard_after_forward, float8,
    float8_scales, replicate_axis, expert_axis (a data axis, too, the last of them), uneven_experts,
    domain_axes, sequence_parallel, split_vocab, loss_chunk, pipeline_axis, pipeline ("gpipe", "1f1b",
    "interleaved", "zero-bubble"), stages_per_rank, exact, data_axis, tensor_axis.
    An unknown one is refused with the nearest known."""
    if not isinstance(recipe, Recipe):
        raise errors.BadArgumentError(f"recipe is of type {type(recipe).__name__}; expected a weft.train.Recipe")
    errors.instance(mesh, Mesh, "mesh")
    compute_options = make(_train_api.weft_compute_options)
    compute_options.threads = errors.integer(threads, "threads")
    compute, model = Made(lib.compute_destroy), Made(lib.model_destroy)
    errors.call(lib.compute_create, mesh._context._open(), _byref(compute_options), _byref(compute))
    texts = nn.to_json(recipe._text, "recipe"), nn.to_json(options, "options")
    failures: list[BaseException] = []
    if recipe._modules:
        array, owners = _modules.structs(recipe._modules, failures)
        errors.call(lib.model_create_with_modules, mesh._open(), compute, *texts, array, len(array), _byref(model))
        del owners
    else:
        errors.call(lib.model_create, mesh._open(), compute, *texts, _byref(model))
    made = ParallelModel.__new__(ParallelModel)
    Handle.__init__(made, model)
    made._mesh, made._failures = mesh, failures
    made._data = [axis for axis in (options.get("replicate_axis"), options.get("data_axis", "dp"), options.get("expert_axis")) if axis]
    return made


class Batch:
    """This rank's rows of a batch: arrays (rows, ...) on the host, all with as many rows, whose memory is
    read when a step takes the batch. inputs: of the model; targets: of the loss; one array each, or a list.
    A transformer takes tokens, int64 (rows, sequence), and, if given, the number of each token's document:
    attention stays inside of documents. global_rows: the rows of all ranks together, of which this rank has
    ParallelModel.rows; 0: every rank has as many rows as this one. Ranks of the tensor axis have the same
    rows."""
    __slots__ = ("_inputs", "_targets", "_global_rows")

    def __init__(self, inputs: Any, targets: Any = (), *, global_rows: int = 0) -> None:
        self._inputs = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
        self._targets = list(targets) if isinstance(targets, (list, tuple)) else [targets]
        self._global_rows = errors.integer(global_rows, "global_rows", 64)

    def _struct(self, owners: list[Any]) -> Any:
        of = _train_api.weft_batch(global_rows=self._global_rows)
        for which, values in (("inputs", self._inputs), ("targets", self._targets)):
            tensors = (_api.weft_tensor * max(1, len(values)))()
            for at, x in enumerate(values):
                name = f"{which}[{at}]"
                buffer, owner = arrays.view(x, name, False)
                shape = tuple(arrays.shape_of(x))
                extents = (ctypes.c_int64 * max(1, len(shape)))(*shape)
                tensors[at] = _api.weft_tensor(name.encode(), buffer, None, extents, len(shape))
                owners += [owner, extents]
            owners.append(tensors)
            setattr(of, which, tensors)
            setattr(of, f"{which[:-1]}_count", len(values))
        return of


class StepResult(NamedTuple):
    """A step of training."""
    step: int  # its number, from 0
    count: int  # the elements over which the loss is a mean, over all ranks
    loss: float
    grad_norm: float  # before clipping
    skipped: bool  # gradients were not finite, and the options said to skip the step
    loss_scale: float


class Evaluation(NamedTuple):
    """The loss of held-out batches."""
    count: int
    loss: float
    perplexity: float  # e^loss


class TrainingEnd(NamedTuple):
    """Why and where a training has ended."""
    why: str  # "steps", "stop" or "patience"
    steps: int  # Trainer.steps
    reason: int  # the largest number that `stop` gave on any rank; 0: none
    best_loss: Optional[float]  # the lowest of all evaluations


_ENDED = {_train_api.ENDED_STEPS: "steps", _train_api.ENDED_STOP: "stop", _train_api.ENDED_PATIENCE: "patience"}


def _result(of: Any) -> StepResult:
    return StepResult(of.step, of.tokens, of.loss, of.grad_norm, of.skipped, of.loss_scale)


def _evaluation(of: Any) -> Evaluation:
    return Evaluation(of.tokens, of.loss, of.perplexity)


def _end(of: Any) -> TrainingEnd:
    return TrainingEnd(_ENDED[of.why], of.steps, of.reason, of.best_loss if of.evaluated else None)


class Trainer(Handle):
    """The optimizer of a model with its state. Only one trainer of a model at a time may take steps.

    options: optimizer, a name ("adamw", "sgd", "lion", "schedule_free_adamw", "muon") or a dictionary with
    "name" and the optimizer's options; groups, a list of {"patterns": [...], "rate": ..., "weight_decay":
    ...}; max_norm (1), to which gradients are clipped, 0: not at all; non_finite ("error", "skip"); seed, of
    the random numbers in a pass; loss_scale; label_smoothing; z_loss; freeze
    ("0:frozen:embed,100:trained:embed"); ema, the decay of averages; ema_warm_up. An unknown one is refused
    with the nearest known."""
    __slots__ = ("model",)
    _destroy = lib.trainer_destroy

    def __init__(self, model: ParallelModel, **options: Any) -> None:
        if not isinstance(model, ParallelModel):
            raise errors.BadArgumentError(f"model is of type {type(model).__name__}; expected a weft.train.ParallelModel")
        made = Made(lib.trainer_destroy)
        errors.call(lib.trainer_create_from_json, model._open(), nn.to_json(options, "options"), _byref(made))
        Handle.__init__(self, made)
        self.model = model

    def _batches(self, batches: Union[Batch, Sequence[Batch]]) -> tuple[Any, int, list[Any]]:
        listed = [batches] if isinstance(batches, Batch) else list(batches)
        for batch in listed:
            if not isinstance(batch, Batch):
                raise errors.BadArgumentError(f"a batch is of type {type(batch).__name__}; expected a weft.train.Batch")
        owners: list[Any] = []
        return (_train_api.weft_batch * max(1, len(listed)))(*(batch._struct(owners) for batch in listed)), len(listed), owners

    def _told(self, arguments: Callable[[], Any]) -> Any:
        """The result of `arguments`. If it raises an exception, the other ranks, which wait in the same call,
        get an error."""
        try:
            return arguments()
        except BaseException:
            try:
                blocking(lib.trainer_step_batches, self, None, -1, 0.0, None)
            except errors.Error:
                pass
            raise

    def step(self, batches: Union[Batch, Sequence[Batch]], rate: float) -> StepResult:
        """A whole step: forward, loss, backward, average, clip, and the optimizer's with learning rate
        `rate`. Several batches are micro-batches, as many on every rank: their gradients add up to that of
        one batch with all their rows. Collective over the mesh; a batch of one rank that does not fit is an
        error of all."""
        (array, count, owners), rate = self._told(lambda: (self._batches(batches), errors.number(rate, "rate")))
        of = make(_train_api.weft_step_result)
        self.model._passes(lib.trainer_step_batches, self, array, count, rate, _byref(of), keep=(array, owners))
        return _result(of)

    def backward(self, batches: Union[Batch, Sequence[Batch]]) -> StepResult:
        """The first half of a step: all except clipping and the optimizer's step. Until `update` or `discard`
        the program may read and change the gradients. grad_norm of the result is 0. Collective."""
        array, count, owners = self._told(lambda: self._batches(batches))
        of = make(_train_api.weft_step_result)
        self.model._passes(lib.trainer_backward_batches, self, array, count, _byref(of), keep=(array, owners))
        return _result(of)

    def _gradients(self) -> dict[str, Any]:
        count = ctypes.c_int32()
        errors.call(lib.trainer_gradients, self._open(), None, 0, _byref(count))
        tensors = (_api.weft_tensor * max(1, count.value))()
        errors.call(lib.trainer_gradients, self._open(), tensors, count.value, _byref(count))
        return {tensor.name.decode(): tensor.data for tensor in tensors[:count.value]}

    def gradients(self) -> dict[str, Any]:
        """Between `backward` and `update`: the gradient of each trained parameter, reduced over all ranks, as
        copies in arrays of NumPy, with the parameter's local shape."""
        numpy, made = _numpy(), {}
        for name, data in self._gradients().items():
            made[name] = array = numpy.empty(self.model._parameter(self.model._index(name))[0].local_shape, numpy.float32)
            if array.size:
                ctypes.memmove(array.ctypes.data, data.data, array.nbytes)
        return made

    def set_gradients(self, values: Mapping[str, Any]) -> None:
        """Writes gradients, which `update` then uses: arrays of float32 by names of parameters,
        of their local shapes. Ranks that hold the same elements write the same values."""
        known = self._gradients()
        for name, value in values.items():
            if name not in known:
                raise errors.BadArgumentError(f"values has {name!r}; expected names of parameters that have a gradient")
            expected = self.model._parameter(self.model._index(name))[0].local_shape
            buffer, owner = arrays.view(value, name, False)
            if tuple(arrays.shape_of(value)) != expected or buffer.dtype != known[name].dtype:
                raise errors.BadArgumentError(f"the gradient of {name} has the shape {tuple(arrays.shape_of(value))} and dtype "
                                              f"{dtypes.name_of(buffer.dtype)}; expected {expected}, this rank's part, and f32")
            ctypes.memmove(known[name].data, buffer.data, 4 * buffer.count)
            del owner

    def update(self, rate: float) -> StepResult:
        """The second half of a step: clips the gradients and takes a step of the optimizer. Collective."""
        of = make(_train_api.weft_step_result)
        blocking(lib.trainer_update, self, errors.number(rate, "rate"), _byref(of))
        return _result(of)

    def discard(self) -> None:
        """Drops the gradients of `backward` without a step: on all ranks, or on none."""
        errors.call(lib.trainer_discard, self._open())

    def train(self, steps: int, step: Callable[[int], StepResult], *, evaluate_every: int = 0, evaluate: Optional[Callable[[], Evaluation]] = None,
              patience: int = 0, least_gain: float = 0, stop: Optional[Callable[[], int]] = None, folder: Optional[PathName] = None, save_every: int = 0,
              save_minutes: float = 0, keep: int = 0, at_end: bool = True, background: bool = True, check_replicas: bool = True,
              on_begin: Optional[Callable[[], object]] = None, on_step: Optional[Callable[[StepResult], object]] = None,
              on_evaluation: Optional[Callable[[Evaluation], object]] = None, on_checkpoint: Optional[Callable[[int], object]] = None,
              on_end: Optional[Callable[[TrainingEnd], object]] = None) -> TrainingEnd:
        """A whole training: takes steps until the trainer has taken `steps`, and evaluates, saves and calls
        the functions on_... in between. All ranks give the same numbers, and end, and save, after the same
        step.

            end = trainer.train(1000, lambda step: trainer.step(batch_of(step), rate(step)), evaluate_every=50,
                                evaluate=lambda: trainer.evaluate(held_out), patience=5, folder="run", save_minutes=10)

        step(number) takes one step, by `step` or by `backward` and `update`, and returns the result.
        evaluate() calls `evaluate` once, and returns the result. patience: ends after so many evaluations
        in a row whose loss was not at least least_gain below the lowest before; checkpoints hold the count,
        and a training goes on with it after `load`. stop(): asked after each step; a number above 0 on any
        rank ends the training on all. folder: of checkpoints, after every save_every steps, when
        save_minutes have passed by the clock of rank 0, and at_end; the newest `keep` stay, 0: all.
        background: training goes on while they are written. check_replicas: compares the replicas of all
        parameters before each.

        If one of the functions raises an exception, `train` raises it on this rank, and the other ranks raise
        a BadArgumentError that says so."""
        plan, end = make(_train_api.weft_training_plan), make(_train_api.weft_training_end)
        plan.steps, plan.evaluate_every = errors.integer(steps, "steps", 64), errors.integer(evaluate_every, "evaluate_every", 64)
        plan.patience, plan.least_gain = errors.integer(patience, "patience", 64), errors.number(least_gain, "least_gain")
        plan.save_every, plan.save_seconds = errors.integer(save_every, "save_every", 64), 60 * errors.number(save_minutes, "save_minutes")
        plan.keep, plan.not_at_end, plan.wait_for_saves, plan.no_replica_check = errors.integer(keep, "keep"), not at_end, not background, not check_replicas
        if folder is not None:
            plan.folder = _path(folder, "folder")
        failures: list[BaseException] = []
        kinds = dict(_train_api.weft_training_plan._fields_)

        def give(name: str, function: Any, call: Callable[..., None]) -> None:
            if function is None:
                return
            if not callable(function):
                raise errors.BadArgumentError(f"{name} is {function!r}; expected a function")

            def called(_: Any, *args: Any) -> int:
                try:
                    call(function, *args[:-1])
                    return 0
                except BaseException as error:  # pylint: disable=broad-except
                    failures.append(error)
                    return _api.SYSTEM
            setattr(plan, name, kinds[name](called))

        def take_step(function: Any, number: int, result: Any) -> None:
            of = function(number)
            if not isinstance(of, StepResult):
                raise errors.BadArgumentError(f"step({number}) returned {of!r}; expected the StepResult of a step")
            to = result.contents
            to.step, to.tokens, to.loss, to.grad_norm, to.skipped, to.loss_scale = of

        def take_evaluation(function: Any, result: Any) -> None:
            of = function()
            if not isinstance(of, Evaluation):
                raise errors.BadArgumentError(f"evaluate() returned {of!r}; expected an Evaluation")
            to = result.contents
            to.tokens, to.loss, to.perplexity = of

        def ask(function: Any, reason: Any) -> None:
            reason.contents.value = errors.integer(function() or 0, "the result of stop()")
        if step is None:
            raise errors.BadArgumentError("step is None; expected a function")
        give("step", step, take_step)
        give("evaluate", evaluate, take_evaluation)
        give("stop", stop, ask)
        give("on_begin", on_begin, lambda function: function())
        give("on_step", on_step, lambda function, of: function(_result(of.contents)))
        give("on_evaluation", on_evaluation, lambda function, of: function(_evaluation(of.contents)))
        give("on_checkpoint", on_checkpoint, lambda function, number: function(number))
        give("on_end", on_end, lambda function, of: function(_end(of.contents)))
        try:
            blocking(lib.trainer_train, self, _byref(plan), _byref(end), keep=(plan, end))
        except errors.Error:
            if not failures:
                raise
        if failures:
            try:
                raise failures[0]
            finally:
                failures.clear()  # whose frames refer to this one
        return _end(end)

    def evaluate(self, batches: Union[Batch, Sequence[Batch]]) -> Evaluation:
        """The loss of batches, by passes that keep nothing; the training stays as it is. Collective."""
        array, count, owners = self._told(lambda: self._batches(batches))
        of = make(_train_api.weft_evaluation)
        self.model._passes(lib.trainer_evaluate, self, array, count, _byref(of), keep=(array, owners))
        return _evaluation(of)

    @property
    def steps(self) -> int:
        """The number of steps taken, which is the number of the next."""
        steps = ctypes.c_int64()
        errors.call(lib.trainer_steps, self._open(), _byref(steps))
        return steps.value

    def swap_averages(self, averages_in: bool) -> None:
        """True: the model computes with the averages (ema); False: with its parameters again."""
        errors.call(lib.trainer_swap_averages, self._open(), bool(averages_in))

    def swap_evaluation(self, evaluation_in: bool) -> None:
        """For schedule_free_adamw. True: the model computes with the values to evaluate; False: with those
        that are trained."""
        errors.call(lib.trainer_swap_evaluation, self._open(), bool(evaluation_in))

    def save(self, directory: PathName) -> None:
        """Writes a checkpoint of the model, the optimizer, the averages and the number of steps.
        Collective."""
        blocking(lib.trainer_save, self, _path(directory, "directory"))

    def load(self, directory: PathName) -> None:
        """Goes on from the newest whole checkpoint of a trainer, of any mesh. Collective."""
        blocking(lib.trainer_load, self, _path(directory, "directory"))


_FORMS: Mapping[str, int] = {"none": _train_api.SCHEDULE_NONE, "constant": _train_api.SCHEDULE_CONSTANT, "linear": _train_api.SCHEDULE_LINEAR,
                             "cosine": _train_api.SCHEDULE_COSINE, "wsd": _train_api.SCHEDULE_WSD, "rex": _train_api.SCHEDULE_REX}
_SHAPES: Mapping[str, int] = {"linear": _train_api.DECAY_LINEAR, "cosine": _train_api.DECAY_COSINE, "one_minus_sqrt": _train_api.DECAY_ONE_MINUS_SQRT}


class Schedule:
    """A learning rate by step: Schedule("cosine", 1e-3, total=1000, warmup=50)(step).

    form: none, constant, linear, cosine, wsd or rex; it rises linearly to `peak` over `warmup` steps, and is
    `floor` from the step `total` on. decay, shape (linear, cosine, one_minus_sqrt): of wsd."""
    __slots__ = ("_of",)

    def __init__(self, form: str, peak: float, *, floor: float = 0, warmup: int = 0, total: int = 1, decay: int = 0, shape: str = "linear") -> None:
        of = make(_train_api.weft_schedule)
        of.form, of.shape = choice(form, _FORMS, "form"), choice(shape, _SHAPES, "shape")
        of.peak, of.floor = errors.number(peak, "peak"), errors.number(floor, "floor")
        of.warmup, of.total, of.decay = errors.integer(warmup, "warmup", 64), errors.integer(total, "total", 64), errors.integer(decay, "decay", 64)
        self._of = of
        self(0)

    def __call__(self, step: int) -> float:
        rate = ctypes.c_double()
        errors.call(lib.schedule_rate, _byref(self._of), errors.integer(step, "step", 64), _byref(rate))
        return rate.value
