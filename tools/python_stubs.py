#!/usr/bin/env python3
"""Types of the package weft for type checkers: python/weft/__init__.pyi and checkpoint.pyi, from the
signatures of its functions and the tables of types below; nn.pyi and train.pyi, from types in their source.

    tools/python_stubs.py --write    writes the files; run where the package loads (docs/python.md, in a source tree)
    tools/python_stubs.py --check    says where they differ (python/tests/test_complete.py)

A parameter has one type for its name, or a separate type as "Class.method.parameter". A function without a
type here is an error.
"""
import ast
import inspect
import pathlib
import sys

import weft
from weft import checkpoint

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "python/weft"
HEAD = '''"""{what}. Made by tools/python_stubs.py --write."""
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, ClassVar, Literal, NamedTuple
from types import TracebackType
{more}
Array = Any  # of NumPy, PyTorch, JAX, of DLPack or the buffer protocol, or a number
DType = Any  # "f32", numpy.float32, torch.float32
'''
ALIASES = '''Shape = int | Sequence[int]
ReduceOp = Literal["sum", "avg", "min", "max", "prod", "premul_sum", "bit_and", "bit_or", "bit_xor", "logical_and", "logical_or", "logical_xor"]
Named = Mapping[str, Array | tuple[Array, Layout]] | Iterable[tuple[Any, ...]]
Backend = Literal["shm", "gloo", "mpi-openmpi", "mpi-mpich", "nccl", "auto"] | str
Edge = Literal["none", "zero", "periodic", "reflect", "replicate"] | float | Placement
Edges = Edge | Mapping[int, Edge | tuple[Edge | None, Edge | None]]
Stages = Callable[[str], object] | None

class Placement:
    """What replicate, shard, partial and pole give."""
'''
PARAMS = {
    "alone_bytes": "int", "array": "Array", "axes": "Mesh", "axis": "Mesh", "backend": "Backend | None", "broadcast": "Callable[[memoryview], object]",
    "bucket": "Any", "bucket_bytes": "int", "call": "int | None", "calls": "Iterable[Persistent]", "channel": "Any", "color": "int", "combine": "Callable[[Any, Any], Any]",
    "compression": 'Literal["bf16"] | None', "context": "Context", "coordinates": "int", "counts": "Sequence[int]", "cuts": "Mapping[int, Sequence[int]] | None",
    "data": "memoryview", "data_axes": "Mesh | None", "deadline": "float | None", "delta": "int", "desired": "bytes", "destination": "int", "dim": "int", "dims": "Sequence[int]",
    "directory": "str | bytes | PathLike[str] | PathLike[bytes]", "dtype": "DType", "dy": "Array | list[Array]", "edges": "Edges", "entries": "Iterable[tuple[str, Shape, DType, str]]",
    "expected": "bytes", "extra": "Mapping[str, str] | None", "fields": "Array", "plans": "tuple[Any, ...]", "file": "str | bytes | PathLike[str] | PathLike[bytes]", "ghost": "Mapping[int, int | tuple[int, int]]",
    "function": "Callable[[Error | None], object]", "give": "Mapping[str, Array] | Callable[[str], Array]", "global_batch": "int", "gradient": "DType", "gradients": "Named", "group": "Group",
    "hook": "BucketHook | None", "host": "str | None", "i": "int", "in_counts": "Sequence[int]", "in_offsets": "Sequence[int] | None", "indices": "Array",
    "keep": "int", "key": "int", "kind": 'Literal["numpy", "torch", "dlpack"]', "layout": "Layout", "lengths": "Sequence[int]", "limit": "float | None",
    "linger": "float | None", "log": "Callable[[str, str], object] | None", "log_level": 'Literal["error", "warning", "info", "debug"]', "longitude": "int",
    "max_norm": "float", "may_leave": "Callable[[str], bool] | None", "mesh": "Mesh | None", "name": "str | None", "named": "Named",
    "non_finite": 'Literal["error", "skip"]', "offsets": "Sequence[int] | None", "on_drift": 'Literal["error", "average"]', "on_stage": "Stages",
    "op": "ReduceOp | Reduction", "order": 'Literal["native", "canonical"]', "out": "Array | None", "out_counts": "Sequence[int]",
    "out_offsets": "Sequence[int] | None", "p": "float", "parts": "Any", "path": "str | PathLike[str]", "placement": "Placement", "placements": "Placement",
    "population": "int", "port": "int", "process_rank": "int | None", "progress": 'Literal["caller", "thread"]', "quiesced": "bool", "rank": "int",
    "rank_count": "int | None", "ranks": "Iterable[int]", "reduce": "DType", "refuse": "bool", "rename": "Callable[[str], str | None] | None",
    "replicate": "Mesh | None", "room": "memoryview", "root": "int", "scale": "float | None", "secret": "str | None",
    "see": "Callable[[str, Any], object] | None", "seed": "int", "segment_bytes": "int", "shape": "Shape", "size": "int", "sizes": "int", "source": "int",
    "step": "int", "store": "Store | None", "style": 'Literal["json", "chrome"]', "tag": "int", "target": "Layout",
    "tensors": "Mapping[str, Layout | tuple[Layout, DType]]", "text": "str", "timeout": "float | None", "to": "int", "token": "str", "tolerance": "float | None",
    "transport": "Transport", "transport_ranks": "tuple[int, ...]", "unused": 'Literal["error", "zeros"]', "value": "Any", "values": "Array",
    "wanted": "Mapping[int, Sequence[tuple[int, int]]]", "wholes": "Any", "why": "str", "works": "Iterable[Work]", "x": "Array",
    "Box.__init__.counts": "Sequence[int] | None", "Box.__init__.indices": "Sequence[int] | Array | None", "Box.of.index": "Any", "ExchangePlan.__init__.fields": "DType | Iterable[DType]", "ExchangePlan.__init__.kind": 'Literal["copy", "add"]',
    "Group.exchange.fields": "Array | Sequence[Array | None]", "Group.exchange.out": "Array | Sequence[Array | None] | None", "PersistentExchange.start.fields": "Array | Sequence[Array | None]",
    "PersistentExchange.start.out": "Array | Sequence[Array | None] | None", "Group.exchange.name": "str", "Group.make_exchange.name": "str", "field": "int", "offset": "int", "plan": "ExchangePlan",
    "receives": "Mapping[int, Box | Iterable[Box]] | None", "sends": "Mapping[int, Box | Iterable[Box]] | None", "strides": "Sequence[int] | None", "SharedTensor.__dlpack__.stream": "Any", "SharedTensor.__dlpack__.max_version": "tuple[int, int] | None", "copy": "bool | None",
    "SharedTensor.__dlpack__.dl_device": "tuple[int, int] | None", "Error.__init__.op": "str", "ShardedParameters.__init__.axes": "Mesh", "ShardedParameters.layout.name": "str", "ShardedParameters.part_shape.name": "str",
    "ShardedParameters.ranges.name": "str", "ShardedParameters.reduce_scatter.gradients": "Any", "ShardedParameters.reduce_scatter.op": 'Literal["sum", "avg"]',
    "Layout.__init__.mesh": "Mesh", "Layout.nested.axes": "str", "Mesh.__getitem__.axes": "str | tuple[str, ...]", "Mesh.coordinate.axis": "str",
    "Mesh.unflatten.axis": "str", "Mesh.unflatten.parts": "int", "Mesh.flatten.name": "str", "Reduction.__init__.name": "str", "redistribute.source": "Layout",
    "partial.op": "ReduceOp", "Store.get.key": "str", "Store.set.key": "str", "Store.set.value": "bytes", "Store.try_get.key": "str", "Store.add.key": "str",
    "Store.compare_set.key": "str", "Store.remove.key": "str", "Store.tcp.host": "str", "Context.group_at.host": "str", "Group.subgroup.name": "str",
    "Transport.open.limit": "float", "Transport.open.group": "str", "Context.backend_traits.backend": "str", "Batch.recv.out": "Array", "Group.recv.out": "Array", "Group.make_recv.out": "Array",
    "Group.send_recv.out": "Array", "Window.start.x": "Array | list[Array]", "Reader.read.out": "Array", "Reader.read.name": "str", "Reader.__getitem__.name": "str",
    "gather_full_state.root": "int | None", "set_full_state.root": "int | None", "convert.dtype": "DType | Callable[[str, str], DType] | None", "convert.files": "int", "convert.old_names": "bool",
    "convert.to": "str | bytes | PathLike[str] | PathLike[bytes]", "verify.progress": "Callable[[int, int], object] | None",
}
ATTRIBUTES = {  # of attributes, and results of properties, methods and functions
    "Batch.submit": "Work", "BucketHook.begin": "None", "BucketHook.end": "None", "BucketHook.name": "str", "Context.backend_traits": "Traits", "Context.empty": "Any",
    "Error.code": "str", "Error.text": "str", "Error.op": "str", "Error.call": "int | None", "Error.ranks": "tuple[int, ...]", "Error.rank_count": "int",
    "Error.quiesced": "bool", "ShardedParameters.bytes": "tuple[int, int]", "ShardedParameters.layout": "Layout", "ShardedParameters.names": "list[str]",
    "ShardedParameters.part_shape": "tuple[int, ...]", "ShardedParameters.ranges": "list[tuple[int, int]]", "ShardedParameters.reduce_scatter": "Transfer", "ShardedParameters.reshard": "Any",
    "ShardedParameters.unshard": "Transfer", "Group.abort": "None", "Group.all_gather_object": "list[Any]", "Group.backend": "str", "Group.batch": "Batch",
    "Group.broadcast_object": "Any", "Group.context": "Context", "Group.duplicate": "Group", "Group.leave": "None", "Group.gather_object": "list[Any] | None", "Group.local_rank": "int",
    "Group.local_size": "int", "Group.max_loc": "tuple[Any, Any]", "Group.min_loc": "tuple[Any, Any]", "Group.name": "str", "Group.parent_rank": "int",
    "Group.probe": "Message | None", "Group.quiesce": "bool", "Group.rank": "int", "Group.shrink": "Group", "Group.size": "int", "Group.split": "Group | None",
    "Group.split_by_host": "Group", "Group.subgroup": "Group", "Group.trace": "str", "Group.traits": "Traits", "Group.wait_message": "Message",
    "Halo.exchange": "Exchange", "Group.exchange": "Work", "Group.make_exchange": "PersistentExchange", "PersistentExchange.start": "Work", "Box.of": "Box",
    "Box.counts": "Sequence[int]", "Box.field": "int", "Box.indices": "Sequence[int] | None", "Box.offset": "int", "Box.strides": "Sequence[int] | None", "ExchangePlan.fields": "tuple[int, ...]",
    "ExchangePlan.kind": "str", "ExchangePlan.receives": "dict[int, list[Box]]", "ExchangePlan.sends": "dict[int, list[Box]]", "Halo.inner": "tuple[slice, ...]", "Halo.part": "tuple[slice, ...]", "Halo.shape": "tuple[int, ...]",
    "Layout.local_shape": "tuple[int, ...]", "Layout.mesh": "Mesh", "Layout.on": "str | tuple[str, int] | tuple[str, str]",
    "Layout.parts": "list[tuple[tuple[int, ...], tuple[int, ...]]]", "Layout.shape": "tuple[int, ...]", "Mesh.__getitem__": "Mesh", "Mesh.arithmetic": "Mesh",
    "Mesh.axes": "dict[str, int]", "Mesh.coordinate": "int", "Mesh.coordinates": "tuple[int, ...]", "Mesh.flatten": "Mesh", "Mesh.group": "Group",
    "Mesh.rank": "int", "Mesh.rank_at": "int", "Mesh.ranks": "tuple[int, ...]", "Mesh.root": "Mesh", "Mesh.size": "int", "Mesh.unflatten": "Mesh",
    "Message.count": "int", "Message.dtype": "str", "Message.source": "int", "Message.tag": "int", "Reader.__getitem__": "Any", "Reader.extra": "dict[str, str]",
    "Reader.folder": "str", "Reader.hashed": "bool", "Reader.mesh": "str", "Reader.read": "Any", "Reader.step": "int",
    "Reader.tensors": "dict[str, tuple[tuple[int, ...], str]]", "Reducer.bind": "None", "Reducer.bucket_bytes": "list[int]", "Reducer.finish": "None",
    "Reducer.is_ready": "bool", "Reducer.no_sync": "Any", "Reducer.ready": "None", "Reducer.sent_early": "int", "Reducer.slot": "Any", "Reduction.name": "str",
    "Persistent.start": "Work", "Sampler.batch": "list[int]", "Sampler.count": "int", "Sampler.offset": "int", "Saver.save": "bool", "Saver.wait": "None", "SharedTensor.address": "int",
    "SharedTensor.nbytes": "int", "SharedTensor.__dlpack__": "Any", "SharedTensor.__dlpack_device__": "tuple[int, int]", "SharedTensor.numpy": "Any", "SharedTensor.torch": "Any", "SharedTensor.shape": "tuple[int, ...]", "SharedTensor.dtype": "str",
    "Store.add": "int", "Store.compare_set": "bytes | None", "Store.file": "Store", "Store.get": "bytes", "Store.local": "Store", "Store.remove": "None",
    "Store.set": "None", "Store.tcp": "Store", "Store.try_get": "bytes | None", "StoreServer.address": "str", "StoreServer.port": "int",
    "Transport.close": "None", "Transport.detects_death": "bool", "Transport.name": "str", "Transport.open": "Any", "Transport.read": "int",
    "Transport.write": "int", "Context.group": "Group", "Context.group_at": "Group", "Context.group_by_broadcast": "Group", "Context.group_in": "Group",
    "Context.group_over": "Group", "Layout.nested": "Layout", "Layout.reduced": "Layout", "Layout.reshaped": "Layout", "Layout.segmented": "Layout", "Layout.shard_inside": "Layout", "Layout.transposed": "Layout",
    "Layout.with_placement": "Layout", "Layout.with_shape": "Layout", "Halo.add": "Exchange", "Window.adjoint": "Exchange", "Window.own": "tuple[int, int]", "Window.part_shape": "tuple[int, ...]",
    "Window.shape": "tuple[int, ...]", "Window.start": "Exchange", "Work.source": "int | None", "Work.then": "None", "Work.sources": "tuple[int, ...] | None", "average_gradients": "None", "check_replicas": "None",
    "clip_grad_norm": "float", "grad_norm": "float", "new_secret": "str", "partial": "Placement", "pole": "Placement", "redistribute": "Transfer", "start_together": "Exchange",
    "reduce_gradients": "None", "replicate": "Placement", "secret_from_env": "str", "shard": "Placement", "sync_replicated_gradients": "None", "version": "str", "start_all": "Work", "wait_all": "list[Any]",
    "convert": "int", "export": "int", "gather_full_state": "dict[str, Any]", "latest": "tuple[str, int] | None", "load": "tuple[int, str]", "save": "None",
    "set_full_state": "None", "verify": "list[str]", "close": "None", "done": "bool", "wait": "Any", "__await__": "Generator[Any, None, Any]", "__init__": "None",
}
# No code calls these classes.
GIVEN_BY_CALLS = {"Exchange", "PersistentExchange", "Group", "Message", "Store", "Transfer", "Work", "SharedTensor", "Batch", "Persistent"}
SPECIAL = ("__getitem__", "__await__", "__dlpack__", "__dlpack_device__")
# Set by __init__, no slots.
FURTHER = {"Error": ("text", "op", "call", "ranks", "rank_count", "quiesced"), "SharedTensor": ("shape", "dtype")}


def type_of(table, *names):
    for name in names:
        if name in table:
            return table[name]
    raise SystemExit(f"python_stubs: {names[0]} has no type; add it to the tables of {pathlib.Path(__file__).name}")


def signature(function, owner, name, bound):
    """"(self, x: Array, out: Array | None = None)"."""
    params, parts, named_only = list(inspect.signature(function).parameters.values()), [], False
    for i, p in enumerate(params):
        if i == 0 and bound:
            parts.append(p.name)
            continue
        if p.kind is p.KEYWORD_ONLY and not named_only:
            named_only = True
            parts.append("*")
        base = next((c.__name__ for c in owner.__mro__ if f"{c.__name__}.{name}.{p.name}" in PARAMS), "") if owner else ""
        what = type_of(PARAMS, f"{base}.{name}.{p.name}", f"{name}.{p.name}", p.name)
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        named_only = named_only or star == "*"
        parts.append(f"{star}{p.name}: {what}" + ("" if p.default is p.empty else " = ..."))
        if p.kind is p.POSITIONAL_ONLY and (i + 1 == len(params) or params[i + 1].kind is not p.POSITIONAL_ONLY):
            parts.append("/")
    return f"({', '.join(parts)})"


def members(cls):
    """The lines of a class's body."""
    lines, own = [], [c for c in cls.__mro__ if c.__module__.startswith("weft")]
    names = {name for c in own for name in vars(c) if not name.startswith("_") or name in SPECIAL}
    if "__init__" in {name for c in own for name in vars(c)} and cls.__name__ not in GIVEN_BY_CALLS:
        names.add("__init__")
    for name in (*FURTHER.get(cls.__name__, ()), *sorted(names)):
        value = inspect.getattr_static(cls, name, None)
        key = next((f"{c.__name__}.{name}" for c in own if f"{c.__name__}.{name}" in ATTRIBUTES), name)
        if inspect.isfunction(value) or isinstance(value, classmethod):
            operation = any(name in vars(c) for c in own if c.__name__ == "Operations")
            made = "Persistent" if cls.__name__ == "Group" and name.startswith("make_") and key not in ATTRIBUTES else None
            result = made or ({"Group": "Work", "Batch": "int"}[cls.__name__] if operation or key == "send_recv" else type_of(ATTRIBUTES, key))
            if isinstance(value, classmethod):
                lines.append("@classmethod")
            lines.append(f"def {name}{signature(getattr(value, '__func__', value), cls, name, True)} -> {result}: ...")
        elif isinstance(value, property):
            lines += ["@property", f"def {name}(self) -> {type_of(ATTRIBUTES, key)}: ..."]
        else:
            lines.append(f"{name}: {type_of(ATTRIBUTES, key)}")
    if "__enter__" in {name for c in own for name in vars(c)}:
        lines += [f"def __enter__(self) -> {cls.__name__}: ...",
                  "def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ..."]
    if "__eq__" in vars(cls) and vars(cls).get("__hash__", 0) is None:
        lines.append("__hash__: ClassVar[None]  # type: ignore[assignment]")
    return lines or ["..."]


def stub(names, module, what, more):
    lines = [HEAD.format(what=what, more=more)]
    for name in names:
        thing = getattr(module, name)
        if inspect.ismodule(thing):
            continue
        if isinstance(thing, type) and issubclass(thing, tuple):
            fields = "\n".join(f"    {field}: {kind if hasattr(kind, '__args__') else kind.__name__}" for field, kind in thing.__annotations__.items())
            lines.append(f"class {name}(NamedTuple):\n{fields}\n")
        elif isinstance(thing, type) and issubclass(thing, weft.Error) and thing is not weft.Error:
            bases = ", ".join(b.__name__ if b is not weft.errors.builtins.TimeoutError else "builtins.TimeoutError" for b in thing.__bases__)
            lines.append(f"class {name}({bases}): ...\n")
        elif isinstance(thing, type):
            base = "(RuntimeError)" if thing is weft.Error else ""
            lines.append(f"class {name}{base}:\n    " + "\n    ".join(members(thing)) + "\n")
        elif inspect.isfunction(thing):
            lines.append(f"def {name}{signature(thing, None, name, False)} -> {type_of(ATTRIBUTES, name)}: ...\n")
        else:
            lines.append(f"{name}: int\n")
    return "\n".join(lines)


def texts():
    """{file: its text}."""
    errors = [name for name in weft.__all__ if isinstance(getattr(weft, name), type) and issubclass(getattr(weft, name), weft.Error)]
    names = ["Error", *(name for name in errors if name != "Error"), *(name for name in weft.__all__ if name not in errors)]
    main = stub(names, weft, "Types of what `weft` gives", "import builtins\n\nfrom . import checkpoint as checkpoint\n")
    main = main.replace("\nclass Error(", f"\n{ALIASES}\nclass Error(", 1) + f"\n__version__: str\n__all__: list[str]\n"
    return {FOLDER / "__init__.pyi": main,
            FOLDER / "checkpoint.pyi": stub(checkpoint.__all__, checkpoint, "Types of `weft.checkpoint`", "\nfrom . import Layout, Mesh, Named, Stages\n"),
            FOLDER / "nn.pyi": stub_of_source("nn", []), FOLDER / "train.pyi": stub_of_source("train", ["from . import Mesh, nn"])}


OF_HANDLE = """
def close(self) -> None: ...
def __enter__(self) -> {name}: ...
def __exit__(self, *exception: object) -> None: ...
"""


class Bodiless(ast.NodeTransformer):
    """Leaves the signatures of functions that programs call, and the types of attributes."""

    def visit_FunctionDef(self, node):
        if node.name.startswith("_") and not node.name.startswith("__"):
            return None
        node.body = [ast.Expr(ast.Constant(...))]
        return node

    def visit_ClassDef(self, node):
        self.generic_visit(node)
        node.body = [part for part in node.body if isinstance(part, (ast.FunctionDef, ast.AnnAssign))] or [ast.Expr(ast.Constant(...))]
        bases = [base for base in node.bases if getattr(base, "id", "") != "Handle"]
        if len(bases) < len(node.bases):
            node.body += ast.parse(OF_HANDLE.format(name=node.name)).body
        node.bases = bases
        return node


def stub_of_source(name, classes):
    """The types of a module that has them in its source. classes: those of the package that it takes."""
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    # Types are names of a capital letter, such as Extent; what else is assigned serves the functions.
    kept = [part for part in tree.body if isinstance(part, (ast.FunctionDef, ast.ClassDef)) or isinstance(part, ast.ImportFrom) and not part.level and part.module != "__future__"
            or isinstance(part, ast.Assign) and part.targets[0].id[0].isupper()]
    body = ast.unparse(Bodiless().visit(ast.Module(kept, [])))
    return f'"""Types of `weft.{name}`. Made by tools/python_stubs.py --write."""\nimport os\n' + "".join(f"{line}\n" for line in classes) + body + "\n"


def main():
    if sys.argv[1:] not in (["--write"], ["--check"]):
        sys.exit(__doc__)
    for path, text in texts().items():
        if sys.argv[1] == "--write":
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path.name} differs; tools/python_stubs.py --write")


if __name__ == "__main__":
    main()
