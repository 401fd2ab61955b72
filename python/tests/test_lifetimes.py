"""Lifetimes: memory and handles of calls that Ctrl-C interrupted, and objects that outlive the
interpreter. Each in a process of its own, which must end by itself: a crash is an exit status of its own."""
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
    """The output of a program that ended well."""
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
    """A capsule, or the tensor that another library made of it, is freed when Python's callbacks can run
    no more."""
    assert "well" in run(f"""
        import ctypes
        context = weft.Context()
        shared = context.empty(1000, kind="dlpack")
        capsule = shared.__dlpack__(max_version=(1, 0)) if {versioned} else shared.__dlpack__()
        if {taken}:  # as a consumer does
            name = b"used_dltensor_versioned" if {versioned} else b"used_dltensor"
            ctypes.pythonapi.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
            ctypes.pythonapi.PyCapsule_SetName(capsule, name)
        # its type, which weft remembers, holds this module's names, and with them the capsule, until the last
        # garbage collection
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
    """The other rank, which comes later, hears who was interrupted; no thread stays, and a second attempt
    makes the group."""
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
