"""The operations of a group, their options and their arguments."""
import ctypes

from . import _api, arrays, errors
from ._api import weft_call_options
from ._arguments import choice
from .reduction import Reduction

__all__ = ["Operations", "options_of", "ANY_SOURCE", "REDUCE_OPS"]

ANY_SOURCE = _api.ANY_SOURCE
REDUCE_OPS = {"sum": _api.SUM, "avg": _api.AVG, "min": _api.MIN, "max": _api.MAX, "prod": _api.PROD, "premul_sum": _api.PREMUL_SUM,
              "bit_and": _api.BIT_AND, "bit_or": _api.BIT_OR, "bit_xor": _api.BIT_XOR, "logical_and": _api.LOGICAL_AND, "logical_or": _api.LOGICAL_OR,
              "logical_xor": _api.LOGICAL_XOR}
ORDERS = {"native": _api.ORDER_NATIVE, "canonical": _api.ORDER_CANONICAL}
NO_INPUT = (_api.OP_BARRIER, _api.OP_RECV)

_by_op = {}  # options of a reduce op and nothing else


def options_of(op, order, scale, deadline, tag):
    """A weft_call_options, or None for the defaults."""
    if order == "native" and scale is None and deadline is None and tag == 0 and type(op) is str:
        if op == "sum":
            return None
        if op in _by_op:
            return _by_op[op]
    options = _api.make(weft_call_options)
    if isinstance(op, Reduction):
        options.reduce_op, options.reduction = _api.USER, op._handle
        options.own = op  # lives as long as the call
    else:
        options.reduce_op = choice(op, REDUCE_OPS, "op")
    options.order, options.scale = choice(order, ORDERS, "order"), _factor(op, scale)
    options.deadline_ns, options.tag = errors.nanoseconds(deadline, "deadline"), errors.integer(tag, "tag")
    if order == "native" and scale is None and deadline is None and tag == 0 and type(op) is str:
        _by_op[op] = options
    return options


def _factor(op, scale):
    """The scale of premul_sum; no other op has one."""
    if op != "premul_sum":
        if scale is not None:
            raise errors.BadArgumentError(f"scale is {scale!r} where op is {op!r}; expected None, or op \"premul_sum\"")
        return 0.0
    try:
        return float(scale)
    except (TypeError, ValueError):
        raise errors.BadArgumentError(f"scale is {scale!r}; expected a number, by which premul_sum multiplies") from None


def _listed(values, name, size):
    """One number for each rank as a list; None stays."""
    if values is None:
        return None
    made = [errors.integer(value, f"{name}[{i}]", 64) for i, value in enumerate(values)]
    if len(made) != size:
        raise errors.BadArgumentError(f"{name} has {len(made)} {name.rpartition('_')[2]}; expected {size}, one for each rank")
    return made


def _blocks(counts, offsets, size):
    """A weft_blocks, and what it points to. (ctypes.cast would make a reference cycle.)"""
    first = (ctypes.c_int64 * len(counts))(*counts)
    second = None if offsets is None else (ctypes.c_int64 * len(counts))(*offsets)
    return _api.weft_blocks(first, second, size), (first, second)


class Operations:
    """The operations of a Group, begun one by one, and of a Batch, begun together. Each gives a Work.

    Arrays are NumPy's, PyTorch's, JAX's, anything that speaks DLPack or the buffer protocol, or numbers;
    of one call all are of one dtype. Elements lie in a row. Memory is used where it lies: it must live
    (the Work sees to that) and not be touched until the call is done. `out` None: a new array of the kind
    of `x`; `out=x` is in place. An `out` that is given must have the dtype and the number of elements; its
    shape does not matter. Results are `Work.wait()`'s.

    op: "sum", "avg", "min", "max", "prod", "premul_sum" (the sum of x times `scale`), "bit_and", "bit_or",
    "bit_xor", "logical_and", "logical_or", "logical_xor" or a Reduction ("avg" of integers is rounded
    towards zero); order: "canonical" for one tree over the ranks, the same on every transport; deadline:
    seconds, None: the group's.
    """

    def all_reduce(self, x, out=None, op="sum", *, order="native", scale=None, deadline=None):
        """out[i] = the combination over ranks of x[i]."""
        return self._call(_api.OP_ALL_REDUCE, x, out, arrays.shape_of, options_of(op, order, scale, deadline, 0))

    def reduce(self, x, root=0, out=None, op="sum", *, order="native", scale=None, deadline=None):
        """At rank `root`, out[i] = the combination over ranks of x[i]; elsewhere the result is None."""
        return self._call(_api.OP_REDUCE, x, out, arrays.shape_of if self._is(root) else None, options_of(op, order, scale, deadline, 0), root)

    def broadcast(self, x, root=0, out=None, *, deadline=None):
        """out = x of rank `root`. Elsewhere x only says what is to come: shape and dtype."""
        return self._call(_api.OP_BROADCAST, x, out, arrays.shape_of, options_of("sum", "native", None, deadline, 0), root, in_counts=self._is(root))

    def all_gather(self, x, out=None, *, deadline=None):
        """out = x of rank 0, x of rank 1, ..., joined along the first dimension."""
        return self._call(_api.OP_ALL_GATHER, x, out, self._joined, options_of("sum", "native", None, deadline, 0))

    def all_gather_v(self, x, counts, out=None, *, offsets=None, deadline=None):
        """Block r of out = x of rank r, which has counts[r] elements. All ranks give the same counts.
        `out` None: one dimension."""
        counts, offsets = _listed(counts, "counts", self.size), _listed(offsets, "offsets", self.size)
        return self._call(_api.OP_ALL_GATHER_V, x, out, total(counts, offsets), options_of("sum", "native", None, deadline, 0), out_blocks=(counts, offsets))

    def reduce_scatter(self, x, out=None, op="sum", *, order="native", scale=None, deadline=None):
        """out = block `rank` of the combination of all x, cut along the first dimension."""
        return self._call(_api.OP_REDUCE_SCATTER, x, out, self._cut, options_of(op, order, scale, deadline, 0))

    def reduce_scatter_v(self, x, counts, out=None, op="sum", *, offsets=None, order="native", scale=None, deadline=None):
        """out = block `rank`, of counts[rank] elements, of the combination of all x. All ranks give the
        same counts; offsets, of blocks in x, are their own."""
        counts, offsets = _listed(counts, "counts", self.size), _listed(offsets, "offsets", self.size)
        return self._call(_api.OP_REDUCE_SCATTER_V, x, out, lambda _: (counts[self.rank],), options_of(op, order, scale, deadline, 0),
                          in_blocks=(counts, offsets))

    def gather(self, x, root=0, out=None, *, deadline=None):
        """At rank `root` as all_gather; elsewhere the result is None."""
        return self._call(_api.OP_GATHER, x, out, self._joined if self._is(root) else None, options_of("sum", "native", None, deadline, 0), root)

    def scatter(self, x, root=0, out=None, *, deadline=None):
        """out = block `rank` of x of rank `root`, cut along the first dimension. Elsewhere x is None and
        `out` is given."""
        if x is None and out is None:
            raise errors.BadArgumentError(f"scatter: out is None on a rank that is not root {root}; expected the array to write to")
        if x is None:
            return self._call(_api.OP_SCATTER, out, out, arrays.shape_of, options_of("sum", "native", None, deadline, 0), root, in_counts=False)
        return self._call(_api.OP_SCATTER, x, out, self._cut, options_of("sum", "native", None, deadline, 0), root)

    def all_to_all(self, x, out=None, *, deadline=None):
        """Block r of out = block `rank` of x of rank r, equal blocks along the first dimension. Never in
        place."""
        return self._call(_api.OP_ALL_TO_ALL, x, out, arrays.shape_of, options_of("sum", "native", None, deadline, 0))

    def all_to_all_v(self, x, in_counts, out_counts, out=None, *, in_offsets=None, out_offsets=None, deadline=None):
        """Block r of out = block `rank` of x of rank r, of any size: in_counts[r] here is out_counts[rank]
        on rank r. `out` None: one dimension."""
        in_counts, in_offsets = _listed(in_counts, "in_counts", self.size), _listed(in_offsets, "in_offsets", self.size)
        out_counts, out_offsets = _listed(out_counts, "out_counts", self.size), _listed(out_offsets, "out_offsets", self.size)
        return self._call(_api.OP_ALL_TO_ALL_V, x, out, total(out_counts, out_offsets), options_of("sum", "native", None, deadline, 0),
                          in_blocks=(in_counts, in_offsets), out_blocks=(out_counts, out_offsets))

    def scan(self, x, out=None, op="sum", *, order="native", scale=None, deadline=None):
        """out[i] = the combination over ranks 0 to `rank` of x[i]."""
        return self._call(_api.OP_SCAN, x, out, arrays.shape_of, options_of(op, order, scale, deadline, 0))

    def exscan(self, x, out=None, op="sum", *, order="native", scale=None, deadline=None):
        """out[i] = the combination over ranks 0 to rank - 1 of x[i]. On rank 0: the identity of the op;
        "avg" and a Reduction have none, there `out` stays as it is."""
        return self._call(_api.OP_EXSCAN, x, out, arrays.shape_of, options_of(op, order, scale, deadline, 0))

    def barrier(self, *, deadline=None):
        """Done when all ranks have called it."""
        return self._call(_api.OP_BARRIER, None, None, None, options_of("sum", "native", None, deadline, 0))

    def send(self, x, destination, tag=0, *, deadline=None):
        """To rank `destination`, matched by its recv of the same tag. Done when x may be reused."""
        return self._call(_api.OP_SEND, x, None, None, options_of("sum", "native", None, deadline, tag), peer=destination)

    def recv(self, out, source=ANY_SOURCE, tag=0, *, deadline=None):
        """Receives from rank `source`, or from any rank that sends next: Work.source names it. A message
        of another dtype or count is MismatchError."""
        if out is None:
            raise errors.BadArgumentError("recv: out is None; expected the array to write to")
        return self._call(_api.OP_RECV, None, out, arrays.shape_of, options_of("sum", "native", None, deadline, tag), peer=source)

    def _is(self, root):
        return self.rank == root

    def _joined(self, x):
        shape = arrays.shape_of(x)
        return (self.size * shape[0],) + tuple(shape[1:]) if shape else (self.size,)

    def _cut(self, x):
        shape = arrays.shape_of(x)
        if not shape or shape[0] % self.size:
            raise errors.BadArgumentError(f"in has the shape {tuple(shape)}; expected a first dimension that {self.size} (group size) divides, or out")
        return (shape[0] // self.size,) + tuple(shape[1:])

    def _fill(self, call, op, x, out, shape, options, root, peer, in_blocks, out_blocks, in_counts):
        """Writes the call; what must live until it is done, and its result."""
        call.op = op
        keep = []
        if x is not None and in_counts:
            call.in_, owner = arrays.view(x, "in", False)
            keep.append(owner)
        elif x is None and in_counts and op not in NO_INPUT:
            raise errors.BadArgumentError("in is None; expected an array or a number")
        if shape is not None:
            if out is None:
                try:
                    out = arrays.empty_like(x, shape(x), self._context)
                except ModuleNotFoundError as error:
                    raise errors.BadArgumentError(f"out is None, and {error}") from None
            call.out, owner = arrays.view(out, "out", True)
            keep.append(owner)
        else:
            out = None
        if root is not None:
            call.root = errors.integer(root, "root")
        if peer is not None:
            call.peer = errors.integer(peer, "destination" if op == _api.OP_SEND else "source")
        if in_blocks is not None:
            call.in_blocks, owner = _blocks(*in_blocks, self.size)
            keep.append(owner)
        if out_blocks is not None:
            call.out_blocks, owner = _blocks(*out_blocks, self.size)
            keep.append(owner)
        if options is not None:
            call.options = ctypes.pointer(options)
            keep.append(options)
        return keep, out


def total(counts, offsets):
    """The shape of a result of blocks."""
    def shape(_):
        ends = [c + o for c, o in zip(counts, offsets)] if offsets is not None else [sum(counts)]
        return (max(ends, default=0),)
    return shape
