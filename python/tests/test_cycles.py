"""An error of weft's makes no reference cycle: when it has been handled, what only the function held that
it came out of is gone, as with Python's own errors. Else arrays and groups live until the collector runs,
and a rank that has left a function by an error has not left its group.

Every call of the package stands in CALLS; each is made to fail at each step at which it asks the library."""
import copy
import gc
import inspect
import pickle
import threading
import time
import types
import weakref

import numpy as np
import pytest

import weft
from conftest import on_threads
from weft import checkpoint, errors

F4 = np.float32


class Alone:
    """A group of one rank, and what is made of it."""

    def __init__(self, folder):
        self.folder = str(folder)
        self.context, self.store = weft.Context(), weft.Store.local()
        self.group = self.context.group_in(self.store, 0, 1, name="alone", deadline=20)
        self.mesh = weft.Mesh(self.group, dp=1)
        self.rows = weft.Layout(self.mesh, (4,), dp=weft.shard(0))
        self.whole = weft.Layout(self.mesh, (4,))
        self.x, self.named = np.ones(4, F4), {"w": (np.ones(4, F4), self.rows)}
        self.store.set("k", b"v")
        self.halo, self.window = weft.Halo(self.rows, {0: 1}), weft.Window(self.rows, {0: [(0, 4)]})
        self.flat = weft.ShardedParameters(self.mesh, {"w": self.whole})
        self.saver = checkpoint.Saver(self.mesh)
        checkpoint.save(f"{folder}/saved", self.named, 1, mesh=self.mesh)
        self.reader = checkpoint.Reader(f"{folder}/saved")
        self.sampler = weft.Sampler(self.mesh, 10, 2)
        self.count = 0

    def reducer(self):
        return weft.Reducer(self.mesh, [("w", (4,), "f32", "sum")])

    def reduced(self):
        with self.reducer() as reducer, reducer.no_sync():
            reducer.bind(0, self.x)
            reducer.slot(0)
            reducer.ready(0)
        with self.reducer() as reducer:
            reducer.ready(0)
            assert reducer.is_ready(0) and reducer.bucket_bytes and reducer.sent_early >= 0
            reducer.finish()

    def sent(self):
        self.group.send(self.x, 0)
        return self.group.wait_message(0), self.group.probe(0), self.group.recv(self.x, 0).wait()

    def served(self):
        with weft.StoreServer(self.context, host="127.0.0.1") as server:
            weft.Store.tcp("127.0.0.1", server.port, limit=10)

    def next(self):
        self.count += 1
        return self.count

    def sent_by_persistent(self):
        send, recv = self.group.make_send(self.x, 0), self.group.make_recv(np.ones(4, F4), 0)
        weft.wait_all([send.start(), recv.start()])

    def batch(self):
        batch = self.group.batch()
        batch.all_reduce(self.x)
        return batch.submit().wait()


PLAN = weft.ExchangePlan("f32", {0: weft.Box((4,))}, {0: weft.Box((4,), offset=4)})

# "what it calls, also of a class": a program that makes these calls and ends well.
CALLS = {
    "Context": lambda a: weft.Context(),
    "Context.empty": lambda a: a.context.empty(3),
    "Context.group": lambda a: a.context.group(name=f"env {a.next()}"),
    "Context.group_in": lambda a: a.context.group_in(weft.Store.local(), 0, 1),
    "Context.group_at": lambda a: a.context.group_at("127.0.0.1", 0, 0, 1),
    "Context.group_by_broadcast": lambda a: a.context.group_by_broadcast(lambda data: None, 0, 1),
    "Context.group_over": lambda a: a.context.group_over(weft.Transport(), weft.Store.local(), 0, 1),
    "Context.backend_traits": lambda a: a.context.backend_traits("shm"),
    "Store Store.local": lambda a: weft.Store.local(),
    "Store.file": lambda a: weft.Store.file(f"{a.folder}/table"),
    "Store.tcp StoreServer": lambda a: a.served(),
    "Store.set": lambda a: a.store.set("s", b"v"),
    "Store.get": lambda a: a.store.get("k"),
    "Store.try_get": lambda a: a.store.try_get("k"),
    "Store.add": lambda a: a.store.add("n"),
    "Store.compare_set": lambda a: a.store.compare_set("c", b"", b""),
    "Store.remove": lambda a: a.store.remove("s"),
    "new_secret": lambda a: weft.new_secret(),
    "secret_from_env": lambda a: weft.secret_from_env(),
    "Batch Batch.submit Group.batch Work Work.wait": lambda a: a.batch(),
    "Work.done": lambda a: a.group.barrier().done(),
    "Work.then Work.close": lambda a: a.group.barrier().then(lambda error: None),
    "wait_all": lambda a: weft.wait_all([a.group.barrier(), a.group.barrier()]),
    "Group.send Group.recv Group.probe Group.wait_message Message": lambda a: a.sent(),
    "Group.send_recv": lambda a: a.group.send_recv(a.x, 0, np.ones(4, F4), 0).wait(),
    "Group.min_loc": lambda a: a.group.min_loc(a.x, np.arange(4)),
    "Group.max_loc": lambda a: a.group.max_loc(a.x, np.arange(4)),
    "Group Group.subgroup": lambda a: a.group.subgroup(f"sub {a.next()}", [0]),
    "Group.split": lambda a: a.group.split(0),
    "Group.split_by_host": lambda a: a.group.split_by_host(),
    "Group.duplicate": lambda a: a.group.duplicate(),
    "Group.shrink Group.abort Group.quiesce": lambda a: failed_and_shrunk(a.group.duplicate()),
    "Group.traits": lambda a: a.group.traits,
    "Group.parent_rank": lambda a: a.group.parent_rank(0),
    "Group.local_rank Group.local_size": lambda a: a.group.local_rank + a.group.local_size,
    "Group.trace": lambda a: a.group.trace(),
    "Group.broadcast_object": lambda a: a.group.broadcast_object(1),
    "Group.all_gather_object": lambda a: a.group.all_gather_object(1),
    "Group.gather_object": lambda a: a.group.gather_object(1),
    "Reduction": lambda a: a.group.all_reduce(a.x, op=weft.Reduction("own", np.add)).wait(),
    "Mesh Mesh.axes Mesh.size Mesh.rank": lambda a: repr(weft.Mesh(a.group, dp=1)),
    "Mesh.arithmetic": lambda a: weft.Mesh.arithmetic(a.context, 0, dp=4),
    "Mesh.flatten Mesh.root": lambda a: a.mesh["dp"].root.flatten("all"),
    "Mesh.unflatten": lambda a: a.mesh.unflatten("dp", a=1, b=1),
    "Mesh.coordinate Mesh.coordinates Mesh.rank_at Mesh.ranks": lambda a: (a.mesh.coordinate("dp"), a.mesh.coordinates(0), a.mesh.rank_at(0), a.mesh.ranks),
    "Mesh.group": lambda a: a.mesh.group,
    "Layout Layout.with_placement": lambda a: weft.Layout(a.mesh, (4,)).with_placement(a.mesh, weft.shard(0)),
    "Layout.with_shape Layout.shape": lambda a: a.rows.with_shape((5,)).shape,
    "Layout.shard_inside Layout.nested": lambda a: a.whole.shard_inside(a.mesh, 0).nested("dp"),
    "Layout.segmented Layout.parts": lambda a: a.rows.segmented(0, (2, 2)).parts(),
    "Layout.reshaped Layout.transposed": lambda a: a.rows.reshaped((2, 2)).transposed((1, 0)),
    "Layout.reduced Layout.on Layout.mesh": lambda a: (a.rows.reduced(a.mesh).on(a.mesh), a.rows.mesh, str(a.rows), a.rows == a.whole),
    "Layout.local_shape": lambda a: a.rows.local_shape(),
    "redistribute Transfer Transfer.wait": lambda a: weft.redistribute(a.x, a.rows, a.whole).wait(),
    "Transfer.done Transfer.close": lambda a: weft.redistribute(a.x, a.rows, a.whole).done(),
    "check_replicas": lambda a: weft.check_replicas(a.named, a.mesh),
    "reduce_gradients": lambda a: weft.reduce_gradients(a.named, a.mesh, data_axes=None),
    "average_gradients": lambda a: weft.average_gradients(a.named, a.mesh),
    "sync_replicated_gradients": lambda a: weft.sync_replicated_gradients(a.named, a.mesh),
    "grad_norm": lambda a: weft.grad_norm(a.named),
    "clip_grad_norm": lambda a: weft.clip_grad_norm(a.named, 1.0),
    "Reducer Reducer.bind Reducer.slot Reducer.ready Reducer.is_ready Reducer.finish Reducer.no_sync Reducer.bucket_bytes Reducer.sent_early Reducer.close":
        lambda a: a.reduced(),
    "Sampler Sampler.batch": lambda a: (weft.Sampler(a.mesh, 10, 2), a.sampler.batch(0)),
    "Halo Halo.exchange Exchange Exchange.wait": lambda a: weft.Halo(a.rows, {0: 1}).exchange(np.ones(6, F4)).wait(),
    "Halo.add": lambda a: a.halo.add(np.ones(6, F4)).wait(),
    "start_together": lambda a: weft.start_together((a.halo, np.ones(6, F4)), (weft.Halo(a.rows, {0: 1}), np.ones(6, F4))).wait(),
    "Exchange.done Exchange.close": lambda a: a.halo.exchange(np.ones(6, F4)).done(),
    "Window Window.own": lambda a: weft.Window(a.rows, {0: [(0, 4)]}).own(0),
    "Window.start": lambda a: a.window.start(a.x).wait(),
    "Window.adjoint": lambda a: a.window.adjoint(a.x).wait(),
    "ShardedParameters ShardedParameters.layout": lambda a: weft.ShardedParameters(a.mesh, {"w": a.whole}).layout("w"),
    "ShardedParameters.ranges ShardedParameters.bytes": lambda a: (a.flat.ranges("w", 0), a.flat.bytes),
    "ShardedParameters.unshard": lambda a: a.flat.unshard([a.x]).wait(),
    "ShardedParameters.reshard": lambda a: a.flat.reshard([a.x]),
    "ShardedParameters.reduce_scatter": lambda a: a.flat.reduce_scatter([a.x]).wait(),
    "checkpoint.save": lambda a: checkpoint.save(f"{a.folder}/new", a.named, a.next(), mesh=a.mesh, on_stage=lambda stage: None),
    "checkpoint.Saver Saver.save Saver.wait": lambda a: (checkpoint.Saver(a.mesh), a.saver.save(f"{a.folder}/own", a.named, a.next(), on_stage=lambda s: None),
                                                         a.saver.wait()),
    "checkpoint.load": lambda a: checkpoint.load(f"{a.folder}/saved", a.named, mesh=a.mesh, may_leave=lambda name: True),
    "checkpoint.latest": lambda a: checkpoint.latest(f"{a.folder}/saved"),
    "checkpoint.verify": lambda a: checkpoint.verify(f"{a.folder}/saved", lambda read, of: None),
    "checkpoint.export": lambda a: checkpoint.export(f"{a.folder}/saved", f"{a.folder}/file", rename=lambda name: name),
    "checkpoint.convert": lambda a: checkpoint.convert(f"{a.folder}/saved", f"{a.folder}/to {a.next()}", dtype="bf16"),
    "checkpoint.gather_full_state": lambda a: checkpoint.gather_full_state(a.named, mesh=a.mesh),
    "checkpoint.set_full_state": lambda a: checkpoint.set_full_state(a.named, {"w": np.ones(4, F4)}, mesh=a.mesh),
    "checkpoint.Reader Reader.read": lambda a: (checkpoint.Reader(f"{a.folder}/saved"), a.reader["w"]),
}
for _op, _more in {"all_reduce": (), "reduce": (), "broadcast": (), "all_gather": (), "reduce_scatter": (), "gather": (), "scatter": (), "all_to_all": (),
                   "scan": (), "exscan": (), "all_gather_v": ([4],), "reduce_scatter_v": ([4],), "all_to_all_v": ([4], [4])}.items():
    CALLS[f"Group.{_op}"] = lambda a, op=_op, more=_more: getattr(a.group, op)(a.x, *more).wait()
    CALLS[f"Group.make_{_op} Persistent Persistent.start"] = lambda a, op=_op, more=_more: getattr(a.group, f"make_{op}")(a.x, *more).start().wait()
CALLS["Group.leave"] = lambda a: a.group.duplicate().leave()
CALLS["Group.make_barrier"] = lambda a: a.group.make_barrier().start().wait()
CALLS["Group.make_send Group.make_recv"] = lambda a: a.sent_by_persistent()
CALLS["Group.make_exchange PersistentExchange PersistentExchange.start"] = lambda a: a.group.make_exchange(PLAN).start(np.ones(8, F4)).wait()
CALLS["Group.exchange"] = lambda a: a.group.exchange(PLAN, np.ones(8, F4)).wait()
CALLS["start_all"] = lambda a: weft.start_all([a.group.make_barrier(), a.group.make_all_reduce(a.x)]).wait()
CALLS["Group.barrier"] = lambda a: a.group.barrier().wait()
# These ask nothing of the library.
ASK_NOTHING = {"Box", "Box.of", "ExchangePlan", "Group.context", "SharedTensor", "SharedTensor.address", "SharedTensor.nbytes", "SharedTensor.numpy", "SharedTensor.torch", "ShardedParameters.part_shape",
               "BucketHook", "BucketHook.begin", "BucketHook.end", "Traits", "Transport", "Transport.open", "Transport.write", "Transport.read",
               "Transport.close", "partial", "pole", "replicate", "shard", "version"}


def failed_and_shrunk(group):
    group.abort("on purpose")
    group.quiesce()
    return group.shrink(1)


def names_of_calls():
    """Functions and properties of the package."""
    found = set()
    for name in [*weft.__all__, *(f"checkpoint.{name}" for name in checkpoint.__all__)]:
        thing = getattr(checkpoint, name.partition(".")[2]) if "." in name else getattr(weft, name)
        if isinstance(thing, (int, types.ModuleType)) or (isinstance(thing, type) and issubclass(thing, Exception)):
            continue
        found.add(name)
        if isinstance(thing, type):
            of = name.rpartition(".")[2]
            for member, value in inspect.getmembers(thing):
                if not member.startswith("_") and (callable(value) or isinstance(value, property)) and not hasattr(tuple, member):
                    found.add(f"{of}.{member}")
    # Says nothing where it fails.
    closes = {name for name in found if name.endswith(".close") and name not in ASK_NOTHING}
    # The same methods.
    batch = {f"Batch.{name.partition('.')[2]}" for name in found if name.startswith("Group.")}
    return found - closes - (batch - {"Batch.submit"})


def test_every_call_is_in_the_table():
    listed = {name for names in CALLS for name in names.split()}
    assert names_of_calls() - listed - ASK_NOTHING == set(), "not listed"
    assert listed - names_of_calls() <= {name for name in listed if name.endswith(".close")}, "listed, but not there"


class Held:
    """Something that the function holds."""


def kept_after(call, *arguments):
    """(whether what a function held is still there after an error that came out of call(*arguments) there
    has been handled, the error's type)."""
    references = []

    def program():
        held = Held()
        references.append(weakref.ref(held))
        call(*arguments)

    def outer():
        try:
            program()
        except Exception as error:  # pylint: disable=broad-except
            return type(error)
        return None
    gc.disable()
    try:
        kind = outer()
        return references[0]() is not None, kind
    finally:
        gc.enable()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return Alone(tmp_path_factory.mktemp("cycles"))


@pytest.mark.parametrize("thread", ["main", "other"])
@pytest.mark.parametrize("names", list(CALLS))
def test_an_error_holds_nothing(names, thread, alone, monkeypatch):
    """The library refuses the first step, the second, ...: on the main thread calls that block go through
    another one."""
    real, left = errors.call, []

    def failing(function, *args):
        if left:
            left[0] -= 1
            if not left[0]:
                raise weft.SystemError("on purpose")
        real(function, *args)
    monkeypatch.setattr(errors, "call", failing)
    kept, steps = [], 0

    def all_steps():
        nonlocal steps
        for step in range(1, 60):
            left[:] = [step]
            is_kept, kind = kept_after(CALLS[names], alone)
            left.clear()
            if kind is None:
                return
            steps = step
            if is_kept:
                kept.append((step, kind.__name__))
    if thread == "main":
        all_steps()
    else:
        on_threads(1, lambda _: all_steps())
    assert not kept, f"{names}: what the function held is kept by a cycle after errors of steps {kept}"


def raises(error=ZeroDivisionError):
    raise error


def aborted(group):
    copy = group.duplicate()
    copy.abort("on purpose")
    return copy


def ended(work):
    """wait() raises the exception of a function of then()."""
    work.then(lambda _: raises())
    work.wait()


class Unpickled:
    def __reduce__(self):
        raises(ValueError)


class Odd(Exception):
    """An error whose arguments are not its `args`."""

    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


class Hook(weft.BucketHook):
    def begin(self, bucket):
        raises()


# Failures of calls in flight, of functions of the program's, and of the program's own errors.
FAILURES = {
    "a call that was aborted": (weft.AbortedError, lambda a: aborted(a.group).all_reduce(np.ones(100_000)).wait()),
    "done() of it": (weft.AbortedError, lambda a: aborted(a.group).barrier().done()),
    "several": (weft.AbortedError, lambda a: weft.wait_all([aborted(a.group).barrier(), a.group.barrier()])),
    "a batch": (weft.AbortedError, lambda a: aborted(a.group).send_recv(a.x, 0, np.ones(4, F4), 0).wait()),
    "a closed work": (weft.BadArgumentError, lambda a: closed(a.group.barrier()).wait()),
    "a wait that ends": (TimeoutError, lambda a: a.group.duplicate().recv(np.ones(1), 0).wait(0.01)),
    "a deadline": (weft.TimeoutError, lambda a: a.group.duplicate().wait_message(deadline=0.05)),
    "a store": (weft.TimeoutError, lambda a: weft.Store.local().get("k", 0.02)),
    "a group that nobody joins": (weft.TimeoutError, lambda a: a.context.group_in(weft.Store.local(), 0, 2, deadline=0.05)),
    "objects": (ValueError, lambda a: a.group.all_gather_object(Unpickled())),
    "a reduction": (weft.SystemError, lambda a: raising_reduction(a.group.duplicate())),
    "then": (ZeroDivisionError, lambda a: ended(a.group.barrier())),
    "then, again": (ZeroDivisionError, lambda a: ended_twice(a.group.barrier())),
    "then, an odd error": (Odd, lambda a: odd(a.group.barrier())),
    "a broadcast of the program's": (weft.SystemError, lambda a: a.context.group_by_broadcast(lambda data: raises(), 0, 2)),
    "a hook": (weft.Error, lambda a: weft.Reducer(a.mesh, [("w", (4,), "f32", "sum")], hook=Hook()).ready(0)),
    "a closed transfer": (weft.BadArgumentError, lambda a: closed(weft.redistribute(a.x, a.rows, a.whole)).wait()),
    "on_stage": (ZeroDivisionError, lambda a: checkpoint.save(f"{a.folder}/stage", a.named, 1, mesh=a.mesh, on_stage=lambda s: raises())),
    "rename": (ZeroDivisionError, lambda a: checkpoint.export(f"{a.folder}/saved", f"{a.folder}/never", rename=lambda name: raises())),
    "see": (ZeroDivisionError, lambda a: checkpoint.gather_full_state(a.named, mesh=a.mesh, see=lambda name, array: raises())),
    "load": (weft.Error, lambda a: checkpoint.load("/nowhere", a.named, mesh=a.mesh)),
    "Saver.wait": (weft.Error, lambda a: (a.saver.save("/dev/null/x", a.named, 1), a.saver.wait())),
}


def closed(work):
    work.close()
    return work


def ended_twice(work):
    try:
        ended(work)
    except ZeroDivisionError as first:
        assert "in raises" in str(first.__cause__)
    work.wait()


def odd(work):
    def function(_):
        raise Odd(1, 2)
    work.then(function)
    try:
        work.wait()
    except Odd as error:
        assert str(error) == "1 2"
    work.wait()


def raising_reduction(group):
    group.all_reduce(np.ones(4), op=weft.Reduction("bad", lambda a, b: raises())).wait()


@pytest.mark.parametrize("name", list(FAILURES))
def test_a_failure_holds_nothing(name, alone):
    expected, call = FAILURES[name]
    if name in ("a reduction", "a hook"):
        pairs = []

        def rank(number):
            with alone.context.group_in(store, number, 2, name="pair", deadline=20) as group:
                pair = types.SimpleNamespace(group=group, mesh=weft.Mesh(group, dp=2))
                found = kept_after(call, pair)
                pairs.append(found)
        store = weft.Store.local()
        on_threads(2, rank)
        assert all(not kept for kept, _ in pairs) and any(issubclass(kind, expected) for _, kind in pairs), pairs
        return
    kept, kind = kept_after(call, alone)
    assert kind is not None and issubclass(kind, expected), kind
    assert not kept


def test_functions_of_the_program_go_with_their_call(alone):
    """Without the collector: a function may hold much."""
    def gone(call):
        held = Held()
        call(lambda *args, held=held: args[0] if args and isinstance(args[0], (str, np.ndarray)) else None)
        return weakref.ref(held)
    calls = {"on_stage": lambda f: checkpoint.save(f"{alone.folder}/held", alone.named, 1, mesh=alone.mesh, on_stage=f),
             "rename": lambda f: checkpoint.export(f"{alone.folder}/saved", f"{alone.folder}/held file", rename=f),
             "see": lambda f: checkpoint.gather_full_state(alone.named, mesh=alone.mesh, see=lambda name, array: f()),
             "then": lambda f: alone.group.barrier().then(f),
             "progress": lambda f: checkpoint.verify(f"{alone.folder}/saved", f),
             "a reduction": lambda f: alone.group.all_reduce(alone.x, op=weft.Reduction("own", f)).wait(),
             "log": lambda f: weft.Context(log=f),
             "a broadcast": lambda f: alone.context.group_by_broadcast(f, 0, 1)}
    gc.disable()
    try:
        assert [name for name, call in calls.items() if gone(call)() is not None] == []
    finally:
        gc.enable()


def test_what_belongs_to_this_process_is_neither_copied_nor_pickled(alone):
    """A copy would share its handle, its calls or its memory."""
    batch = alone.group.batch()
    batch.all_reduce(alone.x)
    things = {"Batch": batch, "SharedTensor": alone.context.empty(3, kind="dlpack"), "Context": alone.context, "Store": alone.store, "Group": alone.group,
              "Mesh": alone.mesh, "Layout": alone.rows, "Halo": alone.halo, "Window": alone.window, "ShardedParameters": alone.flat, "Saver": alone.saver,
              "Reader": alone.reader, "Sampler": alone.sampler, "Reducer": alone.reducer(), "Reduction": weft.Reduction("own", np.add),
              "Persistent": alone.group.make_barrier(), "PersistentExchange": alone.group.make_exchange(PLAN), "Work": alone.group.barrier(), "Transfer": weft.redistribute(alone.x, alone.rows, alone.whole), "Exchange": alone.halo.exchange(np.ones(6, F4)),
              "StoreServer": weft.StoreServer(alone.context, host="127.0.0.1")}
    assert {name for name in names_of_calls() if "." not in name and isinstance(getattr(weft, name), type)} - set(things) <= {
        "Box", "BucketHook", "ExchangePlan", "Message", "Traits", "Transport"}
    for name, thing in things.items():
        for how in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=f"^weft: a {name} cannot be pickled or copied: "):
                how(thing)
    assert len(batch.submit().wait()) == 1
    for thing in things.values():
        if hasattr(thing, "wait"):
            thing.wait()


DURATIONS = {"deadline", "limit", "linger", "timeout"}


def test_durations_are_checked(alone):
    """Numbers of every call: ctypes would cut one that is too large for its field."""
    make = {"rank": 0, "size": 1, "host": "127.0.0.1", "port": 1, "store": weft.Store.local(), "broadcast": print, "transport": weft.Transport(), "key": "k",
            "value": b"v", "expected": b"", "desired": b"", "path": f"{alone.folder}/durations", "x": alone.x, "out": np.ones(4, F4), "destination": 0,
            "source": 0, "counts": [4], "in_counts": [4], "out_counts": [4], "values": alone.x, "indices": np.arange(4), "context": alone.context,
            "works": [], "plan": PLAN, "fields": np.ones(8, F4)}
    of = {"Context": alone.context, "Group": alone.group, "Batch": alone.group.batch(), "Store": alone.store, "Work": alone.group.barrier(),
          "PersistentExchange": alone.group.make_exchange(PLAN)}
    seen = set()
    for name in sorted({*names_of_calls(), *(f"Batch.{op}" for op in dir(weft.Batch) if not op.startswith("_"))}):
        first, _, member = name.partition(".")
        if first in ("checkpoint", "Traits", "Transport"):  # have none; the program's own
            continue
        owner = of.get(first) or getattr(weft, first, None) or getattr(checkpoint, first)
        function = getattr(owner, member) if member else owner
        if not callable(function):
            continue
        try:
            parameters = inspect.signature(function).parameters
        except ValueError:
            continue
        for duration in DURATIONS & set(parameters):
            arguments = {p: make[p] for p, v in parameters.items() if v.default is inspect.Parameter.empty and p != "options"}
            for wrong in (-1, 9.1e9, float("inf"), float("nan"), 365000 * 86400, "soon", 1e300):
                with pytest.raises(weft.BadArgumentError, match=f"{duration} is .*; expected seconds"):
                    function(**arguments, **{duration: wrong})
            seen.add(name)
    assert len(seen) > 45, sorted(seen)
    of["Work"].wait()


def test_a_rank_that_left_a_function_by_an_error_has_left_its_group():
    """The other one hears of it at once, not at the deadline."""
    store, told, over = weft.Store.local(), [], threading.Event()

    def step(number):
        mine = weft.Context().group_in(store, number, 2, name="mine", deadline=30, process_rank=0)
        if number == 0:
            checkpoint.load("/nowhere", {"w": np.ones(3)})
        mine.barrier().wait()

    def rank(number):
        began = time.monotonic()
        try:
            step(number)
        except weft.Error as error:
            told.append((number, type(error), time.monotonic() - began))
        if number == 0:
            over.wait(30)
        over.set()
    gc.disable()
    try:
        on_threads(2, rank)
    finally:
        gc.enable()
    (first, _, _), (second, kind, seconds) = told
    assert (first, second) == (0, 1) and kind is weft.PeerLostError and seconds < 20, told
