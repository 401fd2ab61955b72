"""Arguments of another type, out of range, or closed: each is named, and no call with them waits. On the
main thread, where calls that block go through another one."""
import signal
import threading

import numpy as np
import pytest

import weft

CASES = {  # what is called -> what the error says
    "store.set('k', 'text')": "value is of type str; expected bytes",
    "store.set('k', [1, 2])": "value is of type list; expected bytes",
    "store.set('k', 5)": "value is of type int; expected bytes",
    "store.compare_set('k', None, b'')": "expected is of type NoneType; expected bytes",
    "store.compare_set('k', b'', 'a')": "desired is of type str; expected bytes",
    "context.group_in('tcp://127.0.0.1:1', 0, 1)": "store is of type str; expected a weft.Store, or None",
    "context.group_in(object(), 0, 1)": "store is of type object; expected a weft.Store, or None",
    "context.group_in(group, 0, 1)": "store is of type Group; expected a weft.Store, or None",
    "context.group_over(weft.Transport(), 'store', 0, 1)": "store is of type str; expected a weft.Store, or None",
    "context.group_by_broadcast(None, 0, 1)": "broadcast is None; expected a function of (memoryview)",
    "weft.Context(segment_bytes='x')": "segment_bytes is 'x'; expected a whole number",
    "weft.Context(segment_bytes=-1)": "segment_bytes is -1; expected 0 or more",
    "weft.Context(log=3)": "log is 3; expected a function of (level, line), or None",
    "weft.StoreServer(group)": "context is of type Group; expected a weft.Context",
    "weft.Reduction('r', 5)": "combine is 5; expected a function of (left, right)",
    "weft.Mesh(context, dp=1)": "group is of type Context; expected a weft.Group",
    "weft.Mesh(left, dp=1)": "the Group is closed; expected one that is open",
    "weft.Mesh.arithmetic(group, 0, dp=1)": "context is of type Group; expected a weft.Context",
    "closed.size": "the Mesh is closed; expected one that is open",
    "closed['dp']": "the Mesh is closed; expected one that is open",
    "weft.Layout(group, (4,))": "mesh is of type Group; expected a weft.Mesh",
    "weft.Layout(closed, (4,))": "the Mesh is closed; expected one that is open",
    "weft.Layout(mesh, (4,), dp='shard')": "dp is 'shard'; expected weft.shard(dim), weft.partial(op) or weft.replicate()",
    "weft.Layout(mesh, (-4,))": "shape[0] is -4; expected 0 or more",
    "weft.shard(2**32)": f"dim is {2**32}; expected a number of 32 bits",
    "weft.shard('x')": "dim is 'x'; expected a whole number",
    "rows.with_placement(group, weft.shard(0))": "axes is of type Group; expected a weft.Mesh",
    "rows.with_placement(mesh, 3)": "placement is 3; expected weft.shard(dim), weft.partial(op) or weft.replicate()",
    "rows.segmented(2**32, (4,))": f"dim is {2**32}; expected a number of 32 bits",
    "rows.transposed([2**32])": f"dims[0] is {2**32}; expected a number of 32 bits",
    "rows.local_shape(2**32)": f"rank is {2**32}; expected a number of 32 bits",
    "weft.redistribute(x, 'a', rows)": "source is of type str; expected a weft.Layout",
    "weft.redistribute(x, rows, mesh)": "target is of type Mesh; expected a weft.Layout",
    "weft.reduce_gradients({'w': (x, rows)}, group)": "axes is of type Group; expected a weft.Mesh",
    "weft.reduce_gradients({'w': (x, rows)}, mesh, data_axes='dp')": "data_axes is of type str; expected a weft.Mesh",
    "weft.reduce_gradients({'w': (x, rows)}, mesh, data_axes=closed)": "the Mesh is closed; expected one that is open",
    "weft.reduce_gradients({'w': (x, rows)}, mesh, on_drift='warn')": "on_drift is 'warn'; expected one of 'error', 'average'",
    "weft.average_gradients({'w': (x, rows)}, group)": "axes is of type Group; expected a weft.Mesh",
    "weft.average_gradients({'w': (x, group)}, mesh)": "the layout of 'w' is of type Group; expected a weft.Layout",
    "weft.sync_replicated_gradients({'w': (x, rows)}, None)": "axes is of type NoneType; expected a weft.Mesh",
    "weft.sync_replicated_gradients({'w': (x, rows)}, mesh, tolerance='a')": "tolerance is 'a'; expected a number",
    "weft.sync_replicated_gradients({'w': (x, rows)}, mesh, tolerance=-1)": "tolerance is -1; expected 0 (bits count) or more, or None for the dtype's own",
    "weft.reduce_gradients({'w': (x, rows)}, mesh, tolerance=float('nan'))": "tolerance is nan; expected 0 (bits count) or more, or None for the dtype's own",
    "weft.check_replicas({'w': (x, rows)}, 'mesh')": "axes is of type str; expected a weft.Mesh",
    "weft.clip_grad_norm({'w': (x, rows)}, '1')": "max_norm is '1'; expected a number",
    "weft.clip_grad_norm({'w': (x, rows)}, None)": "max_norm is None; expected a number",
    "weft.grad_norm({'w': (x, rows)}, 'inf')": "p is 'inf'; expected a number",
    "weft.Reducer(group, [('w', 3, 'f32', 'sum')])": "axes is of type Group; expected a weft.Mesh",
    "weft.Reducer(mesh, [('w', 3, 'f32', 'sum')]).slot('a')": "i is 'a'; expected a whole number",
    "weft.Reducer(mesh, [('w', 3, 'f32', 'sum')]).is_ready(2**32)": f"i is {2**32}; expected a number of 32 bits",
    "weft.Reducer(mesh, [('w', 3, 'f32', 'sum'), ('w', 3)])": "entries[1] has 2 parts; expected (name, shape, dtype, op)",
    "weft.Reducer(mesh, ['w'])": "entries[0] is of type str; expected (name, shape, dtype, op)",
    "context.group_in(weft.Store.local(), 0, 1, order='sorted')": "order is 'sorted'; expected one of 'native', 'canonical'",
    "weft.Sampler(group, 10, 2)": "axis is of type Group; expected a weft.Mesh",
    "weft.Sampler(mesh, 2**70, 2)": f"population is {2**70}; expected a number of 64 bits",
    "weft.Sampler(mesh, 10, 2).batch('x')": "step is 'x'; expected a whole number",
    "weft.Halo(mesh, {0: 1})": "layout is of type Mesh; expected a weft.Layout",
    "weft.Window('x', {})": "layout is of type str; expected a weft.Layout",
    "weft.ShardedParameters(group, {'w': rows})": "axes is of type Group; expected a weft.Mesh",
    "weft.ShardedParameters(mesh, {'w': rows}, replicate=closed)": "the Mesh is closed; expected one that is open",
    "weft.checkpoint.save('run', {'w': (x, rows)}, 1, mesh=group)": "mesh is of type Group; expected a weft.Mesh, or None",
    "weft.checkpoint.load('run', {'w': (x, rows)}, mesh=5)": "mesh is of type int; expected a weft.Mesh, or None",
    "weft.checkpoint.save('run', None, 1)": "the tensors are None; expected {name: (array, layout)}, {name: array}, or a list of tuples of these",
    "weft.checkpoint.save('run', 'abc', 1)": "the tensors are 'abc'; expected {name: (array, layout)}, {name: array}, or a list of tuples of these",
    "weft.check_replicas([x], mesh)": "the tensors are [array([1., 1., 1., 1.])]; expected {name: (array, layout)}, {name: array}, or a list of tuples of these",
    "weft.checkpoint.save('run', {'\\ud800': x}, 1)": "name is '\\ud800'; expected a string without surrogates",
    "store.set('a\\0', b'')": "key is 'a\\x00'; expected a string without zeros",
    "reader.read('w', x)": "the Reader is closed; expected one that is open",
    "reader['w']": "the Reader is closed; expected one that is open",
    "weft.checkpoint.Saver(group)": "mesh is of type Group; expected a weft.Mesh, or None",
    "group.all_reduce(Capsule(5))": "in: __dlpack__ gave an object of type int; expected a capsule",
    "group.all_reduce(Capsule(ValueError('none today')))": "in gives no DLPack capsule: none today",
    "group.all_reduce(Capsule(TypeError('of its own')))": "in gives no DLPack capsule: of its own",
}


class Capsule:
    """Objects that give something else than a capsule, or raise."""

    def __init__(self, what):
        self.what = what

    def __dlpack__(self, **_):
        if isinstance(self.what, Exception):
            raise self.what
        return self.what


@pytest.fixture(name="names", scope="module")
def things(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    weft.checkpoint.save(path, {"w": np.ones(4)}, 1)
    reader = weft.checkpoint.Reader(path)
    reader.close()
    with weft.Context() as context, weft.Store.local() as store, context.group_in(store, 0, 1) as group:
        mesh, closed, left = weft.Mesh(group, dp=1), weft.Mesh(group, dp=1), context.group_in(weft.Store.local(), 0, 1)
        closed.close()
        left.close()
        yield {"weft": weft, "context": context, "store": store, "group": group, "mesh": mesh, "closed": closed, "left": left, "reader": reader, "x": np.ones(4),
               "rows": weft.Layout(mesh, (4,), dp=weft.shard(0)), "Capsule": Capsule}


@pytest.fixture(name="at_once")
def limit():
    def hangs(*_):
        raise AssertionError("the call waits")
    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("call", list(CASES))
@pytest.mark.usefixtures("at_once")
def test_what_is_refused(names, call):
    with pytest.raises(weft.BadArgumentError) as error:
        eval(call, names)  # pylint: disable=eval-used
    assert str(error.value) == CASES[call]


@pytest.mark.usefixtures("at_once")
def test_what_no_check_has_seen(names):
    """An argument that ctypes refuses is an error in the thread that makes the call, too."""
    from weft._handle import blocking
    from weft._library import lib
    with pytest.raises(weft.BadArgumentError, match="^weft_store_remove: argument 2: "):
        blocking(lib.store_remove, names["store"], object(), 0)
    names["store"].set("k", b"still there")
    assert names["store"].get("k") == b"still there"


@pytest.mark.usefixtures("at_once")
def test_bytes_of_any_kind(names):
    store = names["store"]
    for value in (b"ab", bytearray(b"ab"), memoryview(b"ab"), np.frombuffer(b"ab", "u1")):
        store.set("bytes", value)
        assert store.get("bytes") == b"ab"
    assert store.compare_set("bytes", bytearray(b"ab"), memoryview(b"c")) == b"c"


def test_a_shape_of_one_number(names):
    assert weft.Layout(names["mesh"], 4, dp=weft.shard(0)) == names["rows"]


def test_a_work_that_was_closed_has_no_result(ranks):
    """Its call may not have ended: the array that it was to write is not given out."""
    closed = threading.Event()

    def program(group):
        if group.rank == 0:
            work = group.all_reduce(np.ones(2))
            work.close()
            closed.set()
            with pytest.raises(weft.BadArgumentError, match="^the Work was closed before it was waited for; it has no result$"):
                work.wait()
        assert closed.wait(20)  # until then rank 0 is alone in its call, which has not ended
        with pytest.raises(weft.AbortedError):  # as every Work that is dropped
            for _ in range(2):  # rank 0 has done its part of the first call of rank 1, which may end well
                group.all_reduce(np.ones(2)).wait()
    ranks(2, program)


def test_a_transfer_that_was_closed_has_no_result(ranks):
    def program(group):
        mesh = weft.Mesh(group, x=2)
        transfer = weft.redistribute(np.ones(2), weft.Layout(mesh, (4,), x=weft.shard(0)), weft.Layout(mesh, (4,)))
        transfer.close()
        with pytest.raises(weft.BadArgumentError, match="^this Transfer was closed before it was waited for$"):
            transfer.wait()
    ranks(2, program)
