"""ShardedParameters: wholes from parts and back, gradients, over one axis and with replicas."""
import numpy as np
import pytest

import weft

SHAPES = {"w": (7, 3), "b": (5,), "tiny": (1, 2)}


def whole_of(name, dtype="f4"):
    return np.arange(1, 1 + np.prod(SHAPES[name])).reshape(SHAPES[name]).astype(dtype)


def layouts(mesh):
    return {name: weft.Layout(mesh, shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("alone_bytes", [0, 1])
def test_round_trip(ranks, size, alone_bytes):
    def program(group):
        mesh = weft.Mesh(group, dp=-1)
        with weft.ShardedParameters(mesh, layouts(mesh), alone_bytes=alone_bytes) as shards:
            assert shards.names == list(SHAPES)
            wholes = {name: whole_of(name) for name in SHAPES}
            parts = shards.reshard(wholes)
            for name in SHAPES:
                (offset, count), = shards.ranges(name, group.rank)
                assert parts[name].shape == shards.part_shape(name) == shards.layout(name).local_shape()
                np.testing.assert_array_equal(parts[name].ravel(), wholes[name].ravel()[offset:offset + count])
            gathered = shards.unshard(parts).wait()
            into = {name: np.zeros_like(whole) for name, whole in wholes.items()}
            transfer = shards.unshard(parts, into)
            assert transfer.wait() is not None and transfer.done()
            for name in SHAPES:
                np.testing.assert_array_equal(gathered[name], wholes[name])
                np.testing.assert_array_equal(into[name], wholes[name])
            ones = [np.full(SHAPES[name], group.rank + 1.0, "f4") for name in SHAPES]
            average, total = shards.reduce_scatter(ones).wait(), shards.reduce_scatter(ones, op="sum").wait()
            assert isinstance(average, list)
            for name, mean, added in zip(SHAPES, average, total):
                assert mean.shape == shards.part_shape(name) and (mean == (group.size + 1) / 2).all() and (added == group.size * (group.size + 1) / 2).all()
            assert all(count >= 0 for count in shards.bytes) and (group.size == 1 or min(shards.bytes) > 0)
    ranks(size, program)


def test_dtypes_inside_of_tensor_parallel_and_replicas(ranks):
    """bf16 gradients where ranks combine them; a weight that tp cuts, too; replicas that sum over."""
    def program(group):
        mesh = weft.Mesh(group, dp=2, tp=2)
        layout = weft.Layout(mesh, (4, 6), tp=weft.shard(1))
        with weft.ShardedParameters(mesh["dp"], {"w": (layout, "f64")}, reduce="f64", gradient="f64") as shards:
            parts = shards.reshard([np.full(layout.local_shape(), float(group.rank))])
            assert parts[0].shape == (2, 3) and parts[0].dtype == "f8"
            whole, = shards.unshard(parts).wait()
            tp = group.rank % 2
            np.testing.assert_array_equal(whole, np.repeat([[tp], [2 + tp]], 2, axis=0) * np.ones((4, 3)))
        with weft.ShardedParameters(mesh["tp"], {"b": weft.Layout(mesh, (4,))}, replicate=mesh["dp"]) as shards:
            part, = shards.reduce_scatter([np.full(4, group.rank + 1.0, "f4")], op="sum").wait()
            assert part.tolist() == [10, 10]
    ranks(4, program)


def test_mismatching_lists(ranks):
    def program(group):
        mesh = weft.Mesh(group, dp=-1)
        with weft.ShardedParameters(mesh, {"a" if group.rank else "b": weft.Layout(mesh, (4,))}) as shards:
            with pytest.raises(weft.MismatchError, match='"?[ab]"?'):
                shards.unshard([np.zeros(2, "f4")]).wait()
    ranks(2, program)


def test_what_sharded_parameters_refuse():
    with weft.Context() as context, context.group_in(None, 0, 1) as group:
        mesh = weft.Mesh(group, dp=1)
        shards = weft.ShardedParameters(mesh, layouts(mesh))

        def refused(text, call, kind=weft.BadArgumentError):
            with pytest.raises(kind, match=text):
                call()
        refused(r"^tensors\['a'\] is 3; expected a Layout, or \(a Layout, a dtype\)$", lambda: weft.ShardedParameters(mesh, {"a": 3}))
        refused("i64|gradient", lambda: weft.ShardedParameters(mesh, layouts(mesh), gradient="i64"))
        refused("^dtype is 'f33'", lambda: weft.ShardedParameters(mesh, layouts(mesh), reduce="f33"))
        refused("dimension", lambda: weft.ShardedParameters(mesh, {"a": weft.Layout(mesh, ())}))
        refused("Partial", lambda: weft.ShardedParameters(mesh, {"a": weft.Layout(mesh, (4,), dp=weft.partial())}), weft.LayoutError)
        refused(r"^name is 'x'; expected one of 'w', 'b', 'tiny'$", lambda: shards.layout("x"))
        refused("^rank is 5|rank is 5; expected 0 to 0", lambda: shards.ranges("w", 5))
        refused(r"^parts has 'w'; expected 'w', 'b', 'tiny'$", lambda: shards.unshard({"w": whole_of("w")}))
        refused(r"^parts has 1 arrays; expected 3, as there are tensors$", lambda: shards.unshard([whole_of("w")]))
        refused(r"^parts\['w'\] has the shape \(2,\); expected \(7, 3\)$", lambda: shards.unshard([np.zeros(2, "f4")] * 3))
        refused("f64", lambda: shards.unshard([whole_of(name, "f8") for name in SHAPES]).wait())
        refused("^op is 'mean'", lambda: shards.reduce_scatter([whole_of(name) for name in SHAPES], op="mean"))
        shards.close()
        refused("the ShardedParameters is closed", lambda: shards.bytes)
