"""What lives how long: memory and handles of calls that Ctrl-C interrupted, and what outlives the interpreter. Each in a process of its own, which must
end by itself: a crash is an exit status of its own."""
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

import weft

PRELUDE = """
import gc, os, signal, sys, threading, time
import numpy as np, weft
def interrupted(call):
    def stop(*_):
        raise KeyboardInterrupt
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        call()
    except KeyboardInterrupt:
        gc.collect()
        return
    raise SystemExit("not interrupted")
"""


def run(program, *arguments):
    """What a program printed that ended well."""
    done = subprocess.run([sys.executable, "-c", PRELUDE + textwrap.dedent(program), *map(str, arguments)], capture_output=True, text=True, timeout=60,
                          check=False, env={**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(weft.__file__))})
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_arrays_of_an_interrupted_min_loc():
    assert "well" in run("""
        context, store, n, go = weft.Context(), weft.Store.local(), 1 << 21, threading.Event()
        def rank(number):
            with context.group_in(store, number, 2, deadline=30) as group:
                go.wait(30)
                least, where = group.min_loc(np.full(n, 3.0), np.arange(n))
                assert (least == 3).all() and (where == np.arange(n)).all()
                time.sleep(1)
        other = threading.Thread(target=rank, args=(1,))
        other.start()
        group = context.group_in(store, 0, 2, deadline=30)
        interrupted(lambda: group.min_loc(np.full(n, 5.0), np.arange(n)))
        go.set()
        other.join()
        print("well")
        """)


@pytest.mark.parametrize("ends", ["s.close()", "del s"])
@pytest.mark.parametrize("kind", ["local", "file"])
def test_store_that_ends_under_an_interrupted_call(kind, ends, tmp_path):
    assert "well" in run(f"""
        s = weft.Store.local() if {kind == "local"} else weft.Store.file(sys.argv[1])
        interrupted(lambda: s.get("k", limit=1.5))
        {ends}
        gc.collect()
        filler = [bytes(200) for _ in range(10000)]
        time.sleep(2)
        print("well")
        """, tmp_path / "table")


def test_store_that_ends_under_another_thread():
    assert "well" in run("""
        s, said = weft.Store.local(), []
        def get():
            try:
                s.get("k", limit=1)
            except weft.TimeoutError as error:
                said.append(error)
        thread = threading.Thread(target=get)
        thread.start()
        time.sleep(0.3)
        s.close()
        filler = [bytes(200) for _ in range(10000)]
        thread.join()
        assert len(said) == 1
        try:
            s.get("k")
        except weft.BadArgumentError as error:
            assert "the Store is closed" in str(error)
            print("well")
        """)


def test_store_and_context_that_end_under_an_interrupted_group():
    assert "well" in run("""
        context, store = weft.Context(), weft.Store.local()
        interrupted(lambda: context.group_in(store, 0, 2, deadline=1.5))
        store.close()
        context.close()
        filler = [bytes(200) for _ in range(10000)]
        time.sleep(2)
        print("well")
        """)


@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("versioned", [True, False])
def test_capsule_that_outlives_the_interpreter(taken, versioned):
    """A capsule, or the tensor that another library made of it, is freed when Python's callbacks can run no more."""
    assert "well" in run(f"""
        import ctypes
        context = weft.Context()
        shared = context.empty(1000, kind="dlpack")
        capsule = shared.__dlpack__(max_version=(1, 0)) if {versioned} else shared.__dlpack__()
        if {taken}:  # as a consumer does
            name = b"used_dltensor_versioned" if {versioned} else b"used_dltensor"
            ctypes.pythonapi.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
            ctypes.pythonapi.PyCapsule_SetName(capsule, name)
        # its type, which weft remembers, holds this module's names, and with them the capsule, until the last garbage collection
        class Holder:
            def __dlpack__(self, **_):
                return capsule
        if {taken}:
            with context.group_in(None, 0, 1) as group:
                try:
                    group.all_reduce(Holder())
                except weft.BadArgumentError as error:
                    assert "used_dltensor" in str(error)
        else:
            weft.arrays.view(Holder(), "x", False)
        del shared
        print("well", flush=True)
        """)


MAKES = {"group": "context.group_in(store, 0, 2, name='pair', deadline=30)", "subgroup": "world.subgroup('pair', [0, 1])",
         "duplicate": "world.duplicate()"}


@pytest.mark.parametrize("what", list(MAKES))
def test_a_group_that_was_interrupted_while_it_was_made(what):
    """The other rank, which comes later, hears who was interrupted; no thread stays, and a second attempt makes the group."""
    other = MAKES[what].replace("0, 2", "1, 2").replace("world", "mine")
    assert "well" in run(f"""
        context, store, go = weft.Context(), weft.Store.local(), threading.Event()
        ended = []
        def rank():
            with context.group_in(store, 1, 2, name="all", deadline=30) as mine:
                mine.barrier().wait()
                go.wait(30)
                began = time.monotonic()
                try:
                    {other}
                except weft.AbortedError as error:
                    ended.append((error.ranks, "rank 0 was interrupted" in str(error), time.monotonic() - began < 10))
                {other}.barrier().wait()
        thread = threading.Thread(target=rank)
        thread.start()
        world = context.group_in(store, 0, 2, name="all", deadline=30)
        world.barrier().wait()
        interrupted(lambda: {MAKES[what]})
        go.set()
        {MAKES[what]}.barrier().wait()
        thread.join()
        assert ended == [((0,), True, True)], ended
        blocking = lambda: sum(t.name == "weft-blocking" for t in threading.enumerate())
        from weft import _handle
        until = time.monotonic() + 5
        while blocking() > len(_handle._idle) and time.monotonic() < until:
            time.sleep(0.01)
        assert blocking() == len(_handle._idle), (blocking(), _handle._idle)
        print("well")
        """)


def test_ctrl_c_ends_a_program_that_waits_for_its_group():
    """By KeyboardInterrupt, long before the deadline, though the call goes on in another thread."""
    program = PRELUDE + textwrap.dedent("""
        began = []
        threading.Timer(0.5, lambda: (began.append(time.monotonic()), os.kill(os.getpid(), signal.SIGINT))).start()
        try:
            weft.Context().group_in(weft.Store.local(), 0, 2, deadline=60)
        except KeyboardInterrupt:
            print(f"interrupted after {time.monotonic() - began[0]:.3f}", flush=True)
            raise
        """)
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False,
                          env={**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(weft.__file__))})
    assert done.returncode == -signal.SIGINT and done.stdout.startswith("interrupted after") and "KeyboardInterrupt" in done.stderr, done
    assert time.monotonic() - began < 30


# ---- ends of processes ----

# What a thread of weft's would call, or go on with in Python, while the interpreter ends. Rank 0 of two; rank 1 acts once rank 0's interpreter is ending.
AT_THE_END = {
    "then": "work = group.recv(x, 1); work.then(lambda error: None)",
    "log": "work = group.recv(x, 1)",
    "a reduction": "work = group.all_reduce(x, op=weft.Reduction('own', lambda a, b: a + b))",
    "then in a thread": "work = group.recv(x, 1); work.then(lambda error: None); threading.Thread(target=work.wait, daemon=True).start(); time.sleep(0.1)",
    "a wait in a thread": "work = group.recv(x, 1); threading.Thread(target=work.wait, daemon=True).start(); time.sleep(0.1)",
    "await": "import asyncio; work = group.recv(x, 1)\nasync def short():\n    task = asyncio.ensure_future(wrap(work)); await asyncio.sleep(0.1); task.cancel()\n"
             "async def wrap(work):\n    return await work\nasyncio.run(short())",
    "a Saver": "saver = weft.checkpoint.Saver(); saver.save(place + '-run', {'w': x}, 1, on_stage=lambda stage: time.sleep(0.05))",
    "a Saver that fails": "mesh = weft.Mesh(group, dp=2); layout = weft.Layout(mesh, (2000,), dp=weft.shard(0)); saver = weft.checkpoint.Saver(mesh)\n"
                          "saver.save('/dev/null/x', {'w': (x, layout)}, 1); cycle = [saver, mesh, layout, group, context]; cycle.append(cycle)\n"
                          "del saver, mesh, layout, group, context",
    "nothing": "pass",
}
OTHER = {"a reduction": "group.all_reduce(x, op=weft.Reduction('own', lambda a, b: a + b)).wait()", "a Saver": "pass",
         "a Saver that fails": "mesh = weft.Mesh(group, dp=2); layout = weft.Layout(mesh, (2000,), dp=weft.shard(0)); saver = weft.checkpoint.Saver(mesh)\n"
                               "saver.save('/dev/null/x', {'w': (x, layout)}, 1); ending.read(1)"}


@pytest.mark.parametrize("what", list(AT_THE_END))
def test_a_process_ends_while(what, tmp_path):
    """CPython ends a thread that asks for the GIL of an interpreter that ends (to 3.13), or it waits for ever (from 3.14 on): in C++ that aborts the process."""
    program = PRELUDE + textwrap.dedent("""
        import types
        rank, place, pipe = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
        class Ending:  # what the interpreter ends with: long after weft's own end, and for a while
            def __del__(self, write=os.write, sleep=time.sleep):
                write(pipe, b"x")
                sleep(1)
        context = weft.Context(log=(lambda level, line: None) if sys.argv[4] == "log" else None, log_level="debug" if sys.argv[4] == "log" else "error")
        group = context.group_in(weft.Store.file(place), rank, 2, backend="shm", deadline=20, progress="thread", process_rank=0)
        x = np.zeros(1000, np.float32)
        group.barrier().wait()
        if rank == 0:
            sys.modules["other"] = types.ModuleType("other")
            sys.modules["other"].ending = Ending()
            del Ending
        """)
    other = OTHER.get(what, "group.send(x, 0).wait()")
    read, write = os.pipe()
    try:
        first = subprocess.Popen([sys.executable, "-c", program + AT_THE_END[what], "0", str(tmp_path / "table"), str(write), what], pass_fds=[write],
                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment())
        before = "" if what == "a Saver that fails" else "os.read(pipe, 1)\n"
        second = subprocess.Popen([sys.executable, "-c", program + "ending = os.fdopen(pipe, 'rb')\n" + before + other + "\ntime.sleep(0.5); os._exit(0)", "1",
                                   str(tmp_path / "table"), str(read), what], pass_fds=[read], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                  env=environment())
        said = first.communicate(timeout=60)[0]
        second.wait(60)
    finally:
        os.close(read)
        os.close(write)
    assert first.returncode == 0, f"exit {first.returncode}\n{said}"


def environment():
    return {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(weft.__file__))}


def test_a_save_that_was_interrupted_and_goes_on_when_the_process_ends(tmp_path):
    """In a thread of weft's, which calls on_stage: longer than the end waits for it."""
    program = PRELUDE + textwrap.dedent("""
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        weft.checkpoint.save(sys.argv[1], {"w": np.zeros(100, "f4")}, 1, on_stage=lambda stage: time.sleep(0.7))
        """)
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "run")], capture_output=True, text=True, timeout=60, check=False, env=environment())
    assert done.returncode == -signal.SIGINT and "KeyboardInterrupt" in done.stderr, done


HANDLES = """
    context = weft.Context()
    held = {"context": context, "store": weft.Store.local(), "server": weft.StoreServer(context, host="127.0.0.1", linger=0.001)}
    group = held["group"] = context.group_in(store, rank, 2, name=f"order {last}", deadline=20, process_rank=0, progress="thread" if rank else "caller")
    mesh = held["mesh"] = weft.Mesh(group, dp=2)
    held["sub-mesh"], held["group of the mesh"] = mesh["dp"], mesh.group
    rows, whole = weft.Layout(mesh, (4,), dp=weft.shard(0)), weft.Layout(mesh, (4,))
    held["layout"], held["whole"] = rows, whole
    halo = held["halo"] = weft.Halo(rows, {0: 1}, edges="periodic")
    held["window"] = weft.Window(rows, {0: [(0, 2), (2, 4)]})
    shards = held["shards"] = weft.FlatShards(mesh, {"w": whole})
    held["sampler"] = weft.Sampler(mesh, 10, 2)
    reducer = held["reducer"] = weft.Reducer(mesh, [("w", (4,), "f32", "sum")])
    saver = held["saver"] = weft.checkpoint.Saver(mesh)
    reduction = held["reduction"] = weft.Reduction("own", lambda a, b: a + b)
    held["shared"], held["array"], held["view"] = context.empty(4, kind="dlpack"), context.empty(4), context.empty(4)[1:]
    held["copy"] = group.duplicate()
    reducer.ready(0)
    held["slot"] = reducer.slot(0)
    saver.save(f"{place}/{'run' if last % 2 else 'file/x'}", {"w": (np.ones(2, "f4"), rows)}, 1, on_stage=lambda stage: None)
    held["transfer"] = weft.redistribute(np.ones(2, "f4"), rows, whole)
    held["unshard"] = shards.unshard([np.ones(2, "f4")])
    held["exchange"] = halo.exchange(np.ones(4, "f4"))
    held["reduce"] = group.all_reduce(np.ones(4, "f4"), op=reduction)
    held["batch"] = group.batch()
    held["work"] = group.recv(np.empty(4, "f4"), 1 - rank)
    held["work of the array"] = held["copy"].recv(held["array"], 1 - rank)
"""


def test_objects_go_in_any_order(tmp_path):
    """Each one last, with work in flight: the others in the order in which they were made, and the other way round."""
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    assert "well" in run("""
        place, store = sys.argv[1], weft.Store.local()
        def make(rank, last):
        """ + textwrap.indent(HANDLES, " " * 8) + """
            return held
        def rank(number):
            names, at = [], 0
            while at < 2 * max(1, len(names)):
                held = make(number, at)
                names = list(held)
                last = names.pop(at // 2)
                for name in names if at % 2 else reversed(names):
                    getattr(held.pop(name), "close", int)()
                held.pop(last)
                at += 1
                names.append(last)
            counts.append(at)
        counts = []
        gc.disable()  # nothing waits for the collector
        threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert counts[0] == counts[1] > 40, counts
        print("well")
        """, tmp_path)


def test_without_proc():
    """As in some containers and chroots: the package finds its library and its compiled calls all the same."""
    hidden = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"]
    if subprocess.run([*hidden, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not hide /proc (unshare)")
    program = "import weft, numpy\nfrom weft import _calls\nprint(weft.Context().group_in(None, 0, 1).all_reduce(numpy.ones(3)).wait(), _calls.begin is not None)"
    done = subprocess.run([*hidden, sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False, env=environment())
    from weft import _calls
    assert done.returncode == 0 and done.stdout == f"[1. 1. 1.] {_calls.begin is not None}\n", done
