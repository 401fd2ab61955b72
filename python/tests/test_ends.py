"""Processes that end while threads of weft's have something to do, and objects that end in any order. Each
in a process of its own: a crash is an exit status of its own."""
import os
import signal
import subprocess
import sys
import textwrap

import pytest

import weft
from test_lifetimes import PRELUDE, run

# Functions that a thread of weft's would call, or go on with in Python, while the interpreter ends. Rank 0
# of two; rank 1 acts once rank 0's interpreter is ending.
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
    """CPython ends a thread that asks for the GIL of an interpreter that ends (to 3.13), or the thread waits
    without end (from 3.14 on): in C++ that aborts the process."""
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
    shards = held["shards"] = weft.ShardedParameters(mesh, {"w": whole})
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
    """Each one last, with work in flight: the others in the order in which they were made, and in the
    opposite order."""
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
    """As in some containers and chroots: the package finds its library and its compiled calls all the
    same."""
    hidden = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"]
    if subprocess.run([*hidden, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not hide /proc (unshare)")
    program = "import weft, numpy\nfrom weft import _calls\nprint(weft.Context().group_in(None, 0, 1).all_reduce(numpy.ones(3)).wait(), _calls.begin is not None)"
    done = subprocess.run([*hidden, sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False, env=environment())
    from weft import _calls
    assert done.returncode == 0 and done.stdout == f"[1. 1. 1.] {_calls.begin is not None}\n", done


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_a_store_in_a_forked_child(kind, tmp_path):
    """It is the parent's: a request of the child would go over the parent's connection, or under its lock."""
    assert "well" in run(f"""
        context = weft.Context()
        server = weft.StoreServer(context, host="127.0.0.1", linger=0.001)
        store = weft.Store.tcp("127.0.0.1", server.port) if {kind == "tcp"} else weft.Store.file(sys.argv[1])
        store.set("key", b"parent")
        child = os.fork()
        if child == 0:
            refused = 0
            for request in (lambda: store.set("key", b"child"), lambda: store.get("key", 1), lambda: store.try_get("key"), lambda: store.add("n"),
                            lambda: store.compare_set("key", b"parent", b"child"), lambda: store.remove("key")):
                try:
                    request()
                except weft.UnsupportedError as error:
                    refused += "this process was forked from process" in str(error) and "open a store of its own in the child" in str(error)
            if {kind == "file"}:
                weft.Store.file(sys.argv[1]).set("own", b"child")
            os._exit(0 if refused == 6 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert store.get("key") == b"parent" and ({kind == "tcp"} or store.get("own") == b"child")
        print("well")
        """, tmp_path / "table")
