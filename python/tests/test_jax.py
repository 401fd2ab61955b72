"""JAX: its arrays are read where they lie, never written, and results of its kind are new arrays over
memory that was written in place."""
import gc
import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

import weft
from weft import arrays, dtypes

jax = pytest.importorskip("jax")
jnp = jax.numpy
jax.config.update("jax_enable_x64", True)

DTYPES = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
          "bool", "complex64", "complex128"]


@pytest.fixture(name="group")
def alone():
    with weft.Context() as context, context.group_in(None, 0, 1) as group:
        yield group


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(ranks, dtype):
    """Read where they lie; moved; summed where weft sums them; a result is a JAX array over the memory
    that the call wrote."""
    def program(group):
        x = jnp.array([1, 0, group.rank]).astype(dtype)
        buffer, _ = arrays.view(x, "in", False)
        assert buffer.data == x.unsafe_buffer_pointer() and dtypes.name_of(buffer.dtype) == dtypes.OTHER[dtype]
        work = group.all_gather(x)
        written = work._result.shared.address
        out = work.wait()
        assert isinstance(out, jax.Array) and out.dtype == x.dtype and out.unsafe_buffer_pointer() == written
        assert np.asarray(out.astype(float) if "complex" not in dtype else out.real).tolist() == [1, 0, 0, 1, 0, 1]
        if "float8" in dtype:
            with pytest.raises(weft.UnsupportedError, match="sum of f8e.m. is not defined"):
                group.all_reduce(x)
        else:
            out = group.all_reduce(x, op="logical_or" if dtype == "bool" else "sum").wait()
            assert out.dtype == x.dtype and np.asarray(out.real.astype(float)).tolist() == ([1, 0, 1] if dtype == "bool" else [2, 0, 1])
        assert np.asarray(x.real.astype(float)).tolist() == [1, 0, group.rank]  # as before
    ranks(2, program)


def test_shapes(group):
    for shape in ((0,), (3, 0), (), (2, 3)):
        out = group.all_reduce(jnp.ones(shape, "f4")).wait()
        assert isinstance(out, jax.Array) and out.shape == shape and (out == 1).all()
    turned = jnp.arange(6.0).reshape(2, 3).T  # JAX makes views of nothing: its arrays lie in a row
    np.testing.assert_array_equal(group.all_reduce(turned).wait(), np.arange(6.0).reshape(2, 3).T)


def test_every_operation_gives_new_arrays(ranks):
    def program(group):
        x = jnp.arange(4.0) + group.rank
        assert group.broadcast(x, 1).wait().tolist() == [1, 2, 3, 4]
        assert group.reduce_scatter(x).wait().tolist() == ([1, 3] if group.rank == 0 else [5, 7])
        assert group.all_to_all(x).wait().tolist() == ([0, 1, 1, 2] if group.rank == 0 else [2, 3, 3, 4])
        assert group.scan(x).wait().tolist() == (x if group.rank == 0 else x + x - 1).tolist()
        assert group.all_gather_v(x, [4, 4]).wait().shape == (8,)
        mine = group.gather(x).wait()
        assert mine is None if group.rank else mine.shape == (8,)
        into = np.empty(4)
        # Memory of another library that may be written.
        assert group.all_reduce(x, out=into).wait() is into and into.tolist() == [1, 3, 5, 7]
        group.send(x, 1 - group.rank)
        assert group.recv(into, 1 - group.rank).wait() is into and into[0] == 1 - group.rank
        assert (group.all_reduce(jnp.float32(2)).wait() == 4).all()
    ranks(2, program)


def test_the_other_parts_of_the_package(ranks, tmp_path):
    whole = jnp.arange(24.0).reshape(6, 4)

    def program(group):
        mesh = weft.Mesh(group, x=2)
        rows, columns = weft.Layout(mesh, whole.shape, x=weft.shard(0)), weft.Layout(mesh, whole.shape, x=weft.shard(1))
        part = whole[3 * group.rank:3 * group.rank + 3]
        other = weft.redistribute(part, rows, columns).wait()
        assert isinstance(other, jax.Array) and (other == whole[:, 2 * group.rank:2 * group.rank + 2]).all()
        seen = weft.Window(rows, {0: [(-1, 4), (2, 7)]}, edges="zero").start(part).wait()
        assert isinstance(seen, jax.Array) and (seen == jnp.pad(whole, ((1, 1), (0, 0)))[3 * group.rank:3 * group.rank + 5]).all()
        with weft.ShardedParameters(mesh, {"w": (weft.Layout(mesh, whole.shape), "f64")}, reduce="f64", gradient="f64") as shards:
            again, = shards.unshard([part]).wait()
            assert isinstance(again, jax.Array) and (again == whole).all()
            mean, = shards.reduce_scatter([whole * (group.rank + 1)]).wait()
            assert isinstance(mean, jax.Array) and (mean == 1.5 * part).all()
        assert weft.grad_norm({"w": (part, rows)}) == pytest.approx(float(jnp.linalg.norm(whole)))
        weft.check_replicas({"w": (whole, weft.Layout(mesh, whole.shape))}, mesh)
        weft.checkpoint.save(tmp_path, {"w": (part, rows)}, 1, mesh=mesh)
        got = group.all_gather_object({"rank": jnp.full(2, group.rank)})
        assert [int(each["rank"][0]) for each in got] == [0, 1]
        for name, write in {"out": lambda: group.all_reduce(part, out=part), "out ": lambda: group.recv(part, 0),
                            "fields": lambda: weft.Halo(rows, {0: 0}).exchange(part), "tensor 'w'": lambda: weft.clip_grad_norm({"w": (part, rows)}, 1.0),
                            "tensor 'v'": lambda: weft.checkpoint.load(tmp_path, {"v": (part, rows)}, mesh=mesh)}.items():
            name = name.strip()
            with pytest.raises(weft.BadArgumentError, match=f"^{name} is a JAX array, which never changes; expected memory that may be written, or no {name}: a "
                                                            "result of JAX's kind is a new array$"):
                write()
    ranks(2, program)


def test_what_is_no_array(group):
    with pytest.raises(weft.UnsupportedError, match="^in is of dtype int4; expected one of f64, f32"):
        group.all_reduce(jnp.ones(2, "int4"))
    with pytest.raises(weft.BadArgumentError, match="^in is of type PRNGKeyArray; expected an array of NumPy, PyTorch or JAX"):
        group.all_reduce(jax.random.key(0))
    with pytest.raises(weft.BadArgumentError, match="^in is traced by a transformation of JAX's .*: call weft outside of it, or by jax.experimental.io_callback"):
        jax.jit(lambda x: group.all_reduce(x).wait())(jnp.ones(3))
    gone = jnp.ones(3)
    gone.delete()
    with pytest.raises(weft.BadArgumentError, match="^in gives no DLPack capsule: .*deleted"):
        group.all_reduce(gone)


def test_computed_just_now(group):
    """A call waits for arrays that are not computed yet."""
    step = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda i, y: jnp.tanh(y @ y), x))
    x = step(jnp.eye(300) * 1.0)
    out = group.all_reduce(x).wait()
    assert (np.asarray(out) == np.asarray(step(jnp.eye(300) * 1.0))).all()


def test_donated_while_a_call_reads_it(ranks):
    """The call holds the memory: XLA computes elsewhere."""
    begun = threading.Barrier(2)

    def program(group):
        x = jnp.full((1 << 16,), group.rank + 1.0)
        if group.rank == 1:
            begun.wait(20)
            return float(group.all_reduce(x).wait()[0])
        work = group.all_reduce(x)
        add = jax.jit(lambda a: a + 100, donate_argnums=0)
        assert float(add(x)[0]) == 101
        begun.wait(20)
        del x
        gc.collect()
        return float(work.wait()[0])
    assert ranks(2, program) == [3, 3]


def test_shared_memory_as_a_jax_array(group):
    """Context.empty: JAX takes it where it lies, and holds it."""
    tensor = group.context.empty((4, 2), "bf16", "dlpack")
    array = jnp.from_dlpack(tensor)
    assert array.unsafe_buffer_pointer() == tensor.address and array.dtype == jnp.bfloat16 and array.shape == (4, 2)
    del tensor
    gc.collect()
    assert array.shape == (4, 2) and array.astype("f4").sum() is not None


def test_results_outlive_the_context():
    with weft.Context() as context, context.group_in(None, 0, 1) as group:
        out = group.all_reduce(jnp.arange(1000.0)).wait()
    gc.collect()
    assert (out == jnp.arange(1000.0)).all()


def run(program):
    return subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=100, check=False,
                          env={**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(weft.__file__))})


@pytest.mark.parametrize("where", ["y", "builtins.y"])
def test_results_outlive_the_interpreter(where):
    done = run(f"""
        import builtins, jax.numpy as jnp, weft
        with weft.Context() as context, context.group_in(None, 0, 1) as group:
            {where} = group.all_reduce(jnp.ones((4, 3))).wait()
        print("well")
        """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "well\n", ""), done


def test_inside_of_jit_by_a_callback(processes):
    """The page's way to call weft in a compiled function."""
    done = processes(2, """
        import jax, jax.numpy as jnp, numpy as np, weft
        from jax.experimental import io_callback
        group = weft.Context().group()

        def all_reduce(x):
            return io_callback(lambda x: group.all_reduce(np.asarray(x)).wait(), jax.ShapeDtypeStruct(x.shape, x.dtype), x, ordered=True)

        @jax.jit
        def step(x):
            return all_reduce(x) / 2
        print(step(jnp.arange(3.0) + group.rank).tolist())
        """)
    assert done.stdout.split("\n")[:2] == ["[0.5, 1.5, 2.5]"] * 2, done
