"""Groups of ranks and the operations that they perform together."""
import ctypes
import traceback

from . import _api, arrays, errors
from ._api import weft_call, weft_call_options
from ._handle import Handle, Made, blocking
from ._library import lib, per_thread
from .context import choice, text
from .work import Work

__all__ = ["Group", "Batch", "Message", "Reduction", "ANY_SOURCE"]

ANY_SOURCE = _api.ANY_SOURCE
REDUCE_OPS = {"sum": _api.SUM, "avg": _api.AVG, "min": _api.MIN, "max": _api.MAX, "prod": _api.PROD, "premul_sum": _api.PREMUL_SUM,
              "bit_and": _api.BIT_AND, "bit_or": _api.BIT_OR, "bit_xor": _api.BIT_XOR, "logical_and": _api.LOGICAL_AND, "logical_or": _api.LOGICAL_OR,
              "logical_xor": _api.LOGICAL_XOR}
ORDERS = {"native": _api.ORDER_NATIVE, "canonical": _api.ORDER_CANONICAL}
_NO_INPUT = (_api.OP_BARRIER, _api.OP_RECV)
_BLANK = bytes(_api.make(weft_call))
_submit, _byref = lib.submit, ctypes.byref


class Reduction(Handle):
    """A reduction of the program's own: `combine(left, right)` gives, of two numpy arrays, the combined one. It must be associative; left comes from
    lower ranks. `name` is compared between ranks. What it raises fails the call on this rank with SystemError and aborts the group: ranks that have a
    result already, which is of no use, hear of it in their next call."""
    __slots__ = ("name", "_function", "_error")
    _destroy = lib.reduction_destroy

    def __init__(self, name, combine):
        from . import dtypes
        import numpy

        def run(data, left, right, out, count, dtype):
            size = count * dtypes.SIZES[dtype]
            a, b, c = (numpy.frombuffer((ctypes.c_char * size).from_address(p), dtypes.to_numpy(dtype)) for p in (left, right, out))
            try:
                made = numpy.asarray(combine(a, b))
                if made.shape != a.shape:
                    raise ValueError(f"combine gave an array of shape {made.shape}; expected {a.shape}, that of left and right")
                c[...] = made
            except BaseException as error:  # pylint: disable=broad-except
                self._error = self._error or error
                a = b = c = made = None  # frames of the traceback would show memory that is gone when somebody looks
                traceback.clear_frames(error.__traceback__)
        self.name, self._error = name, None
        self._function = _api.weft_combine(run)
        handle = ctypes.c_void_p()
        errors.call(lib.reduction_create, text(name, "name"), self._function, None, _NO_RELEASE, _byref(handle))
        super().__init__(handle.value)

    def _failed(self, group, failure):
        """The error of a call with this reduction that has ended: what `combine` raised, else `failure`."""
        error, self._error = self._error, None
        if error is None:
            return failure
        why = f"the reduction {self.name!r} raised {type(error).__name__}: {error}"
        if group._handle is not None:
            lib.group_abort(group._handle, why.encode().replace(b"\0", b" ")[:500], None)
        failure = errors.SystemError(why)
        failure.__cause__ = error
        return failure


_NO_RELEASE = _api.FUNCTIONS["weft_reduction_create"][1][3]()


class Message:
    """A message that has come and that no recv has taken yet: source, tag, count (elements), dtype ("f32")."""
    __slots__ = ("source", "tag", "count", "dtype")

    def __init__(self, raw):
        from . import dtypes
        self.source, self.tag, self.count, self.dtype = raw.source, raw.tag, raw.count, dtypes.name_of(raw.dtype)

    def __repr__(self):
        return f"Message(source={self.source}, tag={self.tag}, count={self.count}, dtype={self.dtype!r})"


_by_op = {}  # options of a reduce op and nothing else


def _options(op, order, scale, deadline, tag):
    """A weft_call_options, or None for the defaults."""
    if order == "native" and scale == 0 and deadline is None and tag == 0 and type(op) is str:
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
    options.order, options.scale = choice(order, ORDERS, "order"), scale
    options.deadline_ns, options.tag = errors.nanoseconds(deadline, "deadline"), errors.integer(tag, "tag")
    if order == "native" and scale == 0 and deadline is None and tag == 0 and type(op) is str:
        _by_op[op] = options
    return options


def _listed(values, name, size):
    """One number for each rank as a list; None stays."""
    if values is None:
        return None
    made = [errors.integer(value, f"{name}[{i}]", 64) for i, value in enumerate(values)]
    if len(made) != size:
        raise errors.BadArgumentError(f"{name} has {len(made)} {name.rpartition('_')[2]}; expected {size}, one for each rank")
    return made


def _blocks(counts, offsets, size):
    """A weft_blocks, and what it points to."""
    first = (ctypes.c_int64 * len(counts))(*counts)
    second = None if offsets is None else (ctypes.c_int64 * len(counts))(*offsets)
    return _api.weft_blocks(ctypes.cast(first, ctypes.POINTER(ctypes.c_int64)),
                            None if second is None else ctypes.cast(second, ctypes.POINTER(ctypes.c_int64)), size), (first, second)


class Operations:
    """The operations of a Group, begun one by one, and of a Batch, begun together. Each gives a Work.

    Arrays are NumPy's, PyTorch's, JAX's, anything that speaks DLPack or the buffer protocol, or numbers; of one call all are of one dtype. Elements lie
    in a row. Memory is used where it lies: it must live (the Work sees to that) and not be touched until the call is done. `out` None: a new array of the
    kind of `x`; `out=x` is in place. Results are `Work.wait()`'s.

    op: "sum", "avg", "min", "max", "prod", "premul_sum" (with scale), "bit_and", "bit_or", "bit_xor", "logical_and", "logical_or", "logical_xor" or a
    Reduction; order: "canonical" for one tree over the ranks, the same on every transport; deadline: seconds, None: the group's.
    """

    def all_reduce(self, x, out=None, op="sum", *, order="native", scale=0, deadline=None):
        """out[i] = the combination over ranks of x[i]."""
        return self._call(_api.OP_ALL_REDUCE, x, out, arrays.shape_of, _options(op, order, scale, deadline, 0))

    def reduce(self, x, root=0, out=None, op="sum", *, order="native", scale=0, deadline=None):
        """The same at rank `root` alone; elsewhere the result is None."""
        return self._call(_api.OP_REDUCE, x, out, arrays.shape_of if self._is(root) else None, _options(op, order, scale, deadline, 0), root)

    def broadcast(self, x, root=0, out=None, *, deadline=None):
        """out = x of rank `root`. Elsewhere x only says what is to come: shape and dtype."""
        return self._call(_api.OP_BROADCAST, x, out, arrays.shape_of, _options("sum", "native", 0, deadline, 0), root, in_counts=self._is(root))

    def all_gather(self, x, out=None, *, deadline=None):
        """out = x of rank 0, x of rank 1, ..., joined along the first dimension."""
        return self._call(_api.OP_ALL_GATHER, x, out, self._joined, _options("sum", "native", 0, deadline, 0))

    def all_gather_v(self, x, counts, out=None, *, offsets=None, deadline=None):
        """Block r of out = x of rank r, which has counts[r] elements. All ranks give the same counts. `out` None: one dimension."""
        counts, offsets = _listed(counts, "counts", self.size), _listed(offsets, "offsets", self.size)
        return self._call(_api.OP_ALL_GATHER_V, x, out, _total(counts, offsets), _options("sum", "native", 0, deadline, 0), out_blocks=(counts, offsets))

    def reduce_scatter(self, x, out=None, op="sum", *, order="native", scale=0, deadline=None):
        """out = block `rank` of the combination of all x, cut along the first dimension."""
        return self._call(_api.OP_REDUCE_SCATTER, x, out, self._cut, _options(op, order, scale, deadline, 0))

    def reduce_scatter_v(self, x, counts, out=None, op="sum", *, offsets=None, order="native", scale=0, deadline=None):
        """The same with blocks of any size. All ranks give the same counts; offsets are their own."""
        counts, offsets = _listed(counts, "counts", self.size), _listed(offsets, "offsets", self.size)
        return self._call(_api.OP_REDUCE_SCATTER_V, x, out, lambda _: (counts[self.rank],), _options(op, order, scale, deadline, 0),
                          in_blocks=(counts, offsets))

    def gather(self, x, root=0, out=None, *, deadline=None):
        """At rank `root` as all_gather; elsewhere the result is None."""
        return self._call(_api.OP_GATHER, x, out, self._joined if self._is(root) else None, _options("sum", "native", 0, deadline, 0), root)

    def scatter(self, x, root=0, out=None, *, deadline=None):
        """out = block `rank` of x of rank `root`, cut along the first dimension. Elsewhere x is None and `out` is given."""
        if x is None and out is None:
            raise errors.BadArgumentError(f"scatter: out is None on a rank that is not root {root}; expected the array to write to")
        if x is None:
            return self._call(_api.OP_SCATTER, out, out, arrays.shape_of, _options("sum", "native", 0, deadline, 0), root, in_counts=False)
        return self._call(_api.OP_SCATTER, x, out, self._cut, _options("sum", "native", 0, deadline, 0), root)

    def all_to_all(self, x, out=None, *, deadline=None):
        """Block r of out = block `rank` of x of rank r, equal blocks along the first dimension. Never in place."""
        return self._call(_api.OP_ALL_TO_ALL, x, out, arrays.shape_of, _options("sum", "native", 0, deadline, 0))

    def all_to_all_v(self, x, in_counts, out_counts, out=None, *, in_offsets=None, out_offsets=None, deadline=None):
        """The same with blocks of any size: in_counts[r] here is out_counts[rank] on rank r. `out` None: one dimension."""
        in_counts, in_offsets = _listed(in_counts, "in_counts", self.size), _listed(in_offsets, "in_offsets", self.size)
        out_counts, out_offsets = _listed(out_counts, "out_counts", self.size), _listed(out_offsets, "out_offsets", self.size)
        return self._call(_api.OP_ALL_TO_ALL_V, x, out, _total(out_counts, out_offsets), _options("sum", "native", 0, deadline, 0),
                          in_blocks=(in_counts, in_offsets), out_blocks=(out_counts, out_offsets))

    def scan(self, x, out=None, op="sum", *, order="native", scale=0, deadline=None):
        """out[i] = the combination over ranks 0 to `rank` of x[i]."""
        return self._call(_api.OP_SCAN, x, out, arrays.shape_of, _options(op, order, scale, deadline, 0))

    def exscan(self, x, out=None, op="sum", *, order="native", scale=0, deadline=None):
        """The same over ranks 0 to rank - 1. On rank 0: the identity of the op; "avg" and a Reduction have none, there `out` stays as it is."""
        return self._call(_api.OP_EXSCAN, x, out, arrays.shape_of, _options(op, order, scale, deadline, 0))

    def barrier(self, *, deadline=None):
        """Done when all ranks have called it."""
        return self._call(_api.OP_BARRIER, None, None, None, _options("sum", "native", 0, deadline, 0))

    def send(self, x, destination, tag=0, *, deadline=None):
        """To rank `destination`, matched by its recv of the same tag. Done when x may be reused."""
        return self._call(_api.OP_SEND, x, None, None, _options("sum", "native", 0, deadline, tag), peer=destination)

    def recv(self, out, source=ANY_SOURCE, tag=0, *, deadline=None):
        """From rank `source`, or from whoever sends next: Work.source says who did. A message of another dtype or count is MismatchError."""
        if out is None:
            raise errors.BadArgumentError("recv: out is None; expected the array to write to")
        return self._call(_api.OP_RECV, None, out, arrays.shape_of, _options("sum", "native", 0, deadline, tag), peer=source)

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
        elif x is None and in_counts and op not in _NO_INPUT:
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


def _total(counts, offsets):
    """The shape of a result of blocks."""
    def shape(_):
        ends = [c + o for c, o in zip(counts, offsets)] if offsets is not None else [sum(counts)]
        return (max(ends, default=0),)
    return shape


class Group(Operations, Handle):
    """One rank's membership in a group of ranks. Made by Context.group and its like, and by a group's own `subgroup`, `split`, `duplicate`, `shrink`.

    Closing it (or dropping it) leaves the group: peers that still wait for this rank get PeerLostError. Any thread; the order of collectives is then the
    program's to agree on.
    """
    __slots__ = ("_context", "rank", "size", "name", "backend", "_unquiet")
    _destroy = lib.group_destroy

    def __init__(self, handle, context):
        Handle.__init__(self, handle)
        self._context = context
        self._unquiet = []  # arrays of failed calls that peers may still touch
        number, words = ctypes.c_int32(), ctypes.c_char_p()
        for name in ("rank", "size"):
            errors.call(getattr(lib, f"group_{name}"), handle, _byref(number))
            setattr(self, name, number.value)
        for name in ("name", "backend"):
            errors.call(getattr(lib, f"group_{name}"), handle, _byref(words))
            setattr(self, name, words.value.decode())

    def __repr__(self):
        return f"<weft.Group {self.name!r}: rank {self.rank} of {self.size}, {self.backend}>"

    @property
    def context(self):
        return self._context

    def _call(self, op, x, out, shape, options, root=None, peer=None, in_blocks=None, out_blocks=None, in_counts=True):
        call = weft_call.from_buffer_copy(_BLANK)
        keep, result = self._fill(call, op, x, out, shape, options, root, peer, in_blocks, out_blocks, in_counts)
        work = ctypes.c_void_p()
        if _submit(self._handle, _byref(call), _byref(work), per_thread.ref):
            self._open()
            raise errors.last()
        return Work(work.value, self, keep, result, op == _api.OP_RECV, (options.own,) if hasattr(options, "own") else None)

    def send_recv(self, x, destination, out, source, tag=0, *, deadline=None):
        """A send and a receive at once, with the same tag, so that rings cannot deadlock. The result is `out`."""
        batch = self.batch()
        batch.send(x, destination, tag, deadline=deadline)
        batch.recv(out, source, tag, deadline=deadline)
        work = batch.submit()
        work._result = out
        return work

    def batch(self):
        """Several calls as one: their methods on the Batch, then its `submit()`."""
        return Batch(self)

    def probe(self, source=ANY_SOURCE, tag=0):
        """The Message that a recv of this source and tag would take now; None where none has come. Never waits."""
        raw, found = _api.weft_message(), ctypes.c_bool()
        options = _options("sum", "native", 0, None, tag)
        errors.call(lib.probe, self._open(), errors.integer(source, "source"), options, _byref(found), _byref(raw))
        return Message(raw) if found else None

    def wait_message(self, source=ANY_SOURCE, tag=0, *, deadline=None):
        """The same, but waits until there is one, at most `deadline` seconds: then TimeoutError, and the group fails."""
        raw = _api.weft_message()
        blocking(lib.wait_message, self._open(), errors.integer(source, "source"), _options("sum", "native", 0, deadline, tag), _byref(raw))
        return Message(raw)

    def min_loc(self, values, indices, *, deadline=None):
        """(least, where): for each i the least of values[i] of all ranks, and the index (int64) that came with it. Blocks."""
        return self._located(lib.min_loc, values, indices, deadline)

    def max_loc(self, values, indices, *, deadline=None):
        """The same of the largest values."""
        return self._located(lib.max_loc, values, indices, deadline)

    def _located(self, function, values, indices, deadline):
        best = arrays.empty_like(values, arrays.shape_of(values), self._context)
        where = arrays.empty_like(indices, arrays.shape_of(indices), self._context)
        views = [arrays.view(values, "values", False), arrays.view(indices, "indices", False), arrays.view(best, "least", True),
                 arrays.view(where, "where", True)]
        blocking(function, self._open(), *(v[0] for v in views), _options("sum", "native", 0, deadline, 0), keep=views)
        return arrays.finish(best), arrays.finish(where)

    def subgroup(self, name, ranks):
        """A group of `ranks`, which hold this rank. Only they call it; blocks until they have."""
        ranks = [errors.integer(rank, f"ranks[{i}]") for i, rank in enumerate(ranks)]
        return self._made(lib.group_subgroup, text(name, "name"), (ctypes.c_int32 * max(1, len(ranks)))(*ranks), len(ranks))

    def split(self, color, key=0):
        """The ranks that give the same color, ordered by (key, rank). All ranks call it. Color -1: in no group, and None."""
        return self._made(lib.group_split, errors.integer(color, "color"), errors.integer(key, "key"))

    def split_by_host(self):
        """The ranks on this rank's host, in the same order; all ranks call it."""
        return self._made(lib.group_split_by_host)

    def duplicate(self):
        """A group of the same ranks whose calls are independent of this one's. All ranks call it."""
        return self._made(lib.group_duplicate)

    def shrink(self, limit=None):
        """After a failure: a group of the survivors. All who live call it."""
        return self._made(lib.group_shrink, errors.nanoseconds(limit, "limit"))

    def _made(self, function, *args):
        made = Made(lib.group_destroy)
        blocking(function, self._open(), *args, _byref(made))
        return Group(made.take(), self._context) if made.value else None

    def parent_rank(self, rank):
        """The rank that `rank` has in the group that this one was made from; -1: it was not."""
        return self._number(lib.group_parent_rank, errors.integer(rank, "rank"))

    @property
    def local_rank(self):
        """This rank's place among the ranks of the group that are on its host."""
        return self._number(lib.group_local_rank)

    @property
    def local_size(self):
        """How many ranks of the group are on this rank's host."""
        return self._number(lib.group_local_size)

    def _number(self, function, *args):
        number = ctypes.c_int32()
        blocking(function, self._open(), *args, _byref(number))
        return number.value

    def abort(self, why):
        """Fails every pending and later call of every rank with AbortedError and this text. Does not block."""
        errors.call(lib.group_abort, self._open(), text(why, "why"))

    def quiesce(self, limit=0):
        """After a failure: waits at most `limit` seconds until nobody can touch the memory of failed calls any more; whether that is so."""
        quiet = ctypes.c_bool()
        blocking(lib.group_quiesce, self._open(), errors.nanoseconds(limit, "limit"), _byref(quiet))
        if quiet:
            self._unquiet.clear()
        return quiet.value

    def trace(self, style="json"):
        """The last 1024 calls of this rank: "json", or "chrome" for Perfetto."""
        made = ctypes.c_void_p()
        errors.call({"json": lib.group_trace_json, "chrome": lib.group_trace_chrome}[choice(style, {"json": "json", "chrome": "chrome"}, "style")],
                    self._open(), _byref(made))
        return errors.take_text(made).decode("utf-8", "replace")

    def broadcast_object(self, value, root=0):
        """A Python object of rank `root`, pickled, on all ranks. Elsewhere `value` does not count. Blocks. Use it with ranks that are trusted."""
        from .objects import broadcast_object
        return broadcast_object(self, value, root)

    def all_gather_object(self, value):
        """A list of the objects of all ranks. Blocks."""
        from .objects import all_gather_object
        return all_gather_object(self, value)

    def gather_object(self, value, root=0):
        """The same at rank `root`; elsewhere None. Blocks."""
        from .objects import gather_object
        return gather_object(self, value, root)


class Batch(Operations):
    """Calls that are begun together and done when all of them are. Methods add calls and give the number that each has."""

    def __init__(self, group):
        self.group, self._context, self.rank, self.size = group, group._context, group.rank, group.size
        self._calls, self._keep, self._results, self._reductions = [], [], [], []

    def _call(self, op, x, out, shape, options, root=None, peer=None, in_blocks=None, out_blocks=None, in_counts=True):
        call = weft_call.from_buffer_copy(_BLANK)
        keep, result = self._fill(call, op, x, out, shape, options, root, peer, in_blocks, out_blocks, in_counts)
        if hasattr(options, "own"):
            self._reductions.append(options.own)
        self._calls.append(call)
        self._keep.append(keep)
        self._results.append(result)
        return len(self._calls) - 1

    def submit(self):
        """One Work for all of them; its result is the list of theirs."""
        count = len(self._calls)
        calls = (weft_call * max(1, count))(*self._calls)
        work = ctypes.c_void_p()
        errors.call(lib.coalesced, self.group._open(), calls, count, _byref(work))
        return Work(work.value, self.group, (self._keep, calls), list(self._results), reductions=self._reductions)
