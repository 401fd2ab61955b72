"""Meshes, layouts, redistribution, gradients and checkpoints."""
import numpy as np
import pytest

import weft


def test_mesh(ranks):
    def program(group):
        mesh = weft.Mesh(group, dp=2, tp=-1)
        assert mesh.axes == {"dp": 2, "tp": 2} and (mesh.size, mesh.rank) == (4, group.rank) and mesh.ranks == (0, 1, 2, 3)
        assert mesh.coordinate("dp") == group.rank // 2 and mesh.coordinates(3) == (1, 1) and mesh.rank_at(1, 0) == 2
        tp = mesh["tp"]
        assert tp.ranks == ((0, 1) if group.rank < 2 else (2, 3)) and tp.root == mesh and tp != mesh
        assert tp.group.all_reduce(group.rank).wait() == (1 if group.rank < 2 else 5)
        assert mesh.flatten("all").axes == {"all": 4}
        assert mesh.unflatten("tp", outer=1, inner=2).axes == {"dp": 2, "outer": 1, "inner": 2}
        assert repr(mesh) == f"<weft.Mesh dp=2 x tp=2, rank {group.rank}>"
        with pytest.raises(weft.BadArgumentError):
            weft.Mesh(group, dp=3)
    ranks(4, program)


def test_layouts_without_ranks():
    with weft.Context() as context:
        mesh = weft.Mesh.arithmetic(context, 1, dp=2, tp=3)
        layout = weft.Layout(mesh, (7, 4), tp=weft.shard(0))
        assert str(layout) == "(7, 4) as [dp: Replicate, tp: Shard(0)]"
        assert repr([weft.shard(1), weft.replicate(), weft.partial("avg")]) == "[Shard(1), Replicate, Partial(avg)]"
        assert layout.shape == (7, 4) and [layout.local_shape(r) for r in range(3)] == [(3, 4), (2, 4), (2, 4)]
        assert layout.parts(2) == [((5, 0), (2, 4))]
        assert layout.on(mesh["tp"]) == ("shard", 0) and layout.on(mesh["dp"]) == "replicate"
        changed = layout.with_placement(mesh["dp"], weft.partial("avg"))
        assert changed.on(mesh["dp"]) == ("partial", "avg") and changed != layout and changed.reduced(mesh["dp"]) == layout
        assert layout.with_shape((9, 4)).local_shape(0) == (3, 4)
        assert layout.segmented(0, (3, 4)).parts(0) == [((0, 0), (1, 4)), ((3, 0), (2, 4))]
        assert layout.shard_inside(mesh["dp"], 0).local_shape(0) == (2, 4)
        features = weft.Layout(mesh, (5, 24), tp=weft.shard(1))
        assert features.reshaped((5, 6, 4)) == weft.Layout(mesh, (5, 6, 4), tp=weft.shard(1))
        assert features.reshaped((5, 6, 4)).transposed((1, 0, 2)) == weft.Layout(mesh, (6, 5, 4), tp=weft.shard(0))
        with pytest.raises(weft.LayoutError, match="becomes .5, 4, 6., of which no dimension is cut on tp=3"):
            features.reshaped((5, 4, 6))
        assert layout.mesh == mesh
        with pytest.raises(weft.Error):
            weft.Layout(mesh, (7, 4), tp=weft.shard(2))


def test_redistribute_says_true_shapes(ranks):
    def program(group):
        mesh = weft.Mesh(group, x=-1)
        rows, whole = weft.Layout(mesh, (4, 6), x=weft.shard(0)), weft.Layout(mesh, (4, 6))
        for x, out, text in ((np.ones((3, 6)), None, f"redistribute: in is of shape (3, 6); rank {group.rank} of "),
                             (np.ones((6, 2)), None, "in is of shape (6, 2); "), (np.ones((2, 6)), np.empty((6, 4)), "out is of shape (6, 4); "),
                             (np.ones(11), None, "in is of shape (11,); ")):
            with pytest.raises(weft.LayoutError) as error:
                weft.redistribute(x, rows, whole, out)
            assert text in str(error.value) and f"holds {(4, 6) if out is not None else (2, 6)}" in str(error.value), error.value
        np.testing.assert_array_equal(weft.redistribute(np.arange(12.0) + 12 * group.rank, rows, whole, np.empty((4, 6))).wait(), np.arange(24.0).reshape(4, 6))
    ranks(2, program)


def test_redistribute(ranks):
    whole = np.arange(35.0).reshape(7, 5)

    def program(group):
        mesh = weft.Mesh(group, x=3)
        kinds = {"replicate": weft.replicate(), "rows": weft.shard(0), "columns": weft.shard(1)}

        def part(layout):
            (offsets, extents), = layout.parts()
            return np.ascontiguousarray(whole[offsets[0]:offsets[0] + extents[0], offsets[1]:offsets[1] + extents[1]])
        for source in kinds.values():
            for target in kinds.values():
                first, second = weft.Layout(mesh, whole.shape, x=source), weft.Layout(mesh, whole.shape, x=target)
                np.testing.assert_array_equal(weft.redistribute(part(first), first, second).wait(), part(second))
        added = weft.redistribute(whole * (group.rank + 1), weft.Layout(mesh, whole.shape, x=weft.partial()), weft.Layout(mesh, whole.shape)).wait()
        np.testing.assert_array_equal(added, whole * 6)
        weft.check_replicas({"a": (whole, weft.Layout(mesh, whole.shape))}, mesh)
        with pytest.raises(weft.MismatchError, match="'?b'?") as caught:
            weft.check_replicas({"b": (whole + (group.rank == 1), weft.Layout(mesh, whole.shape))}, mesh)
        assert caught.value.ranks == (1,)
    ranks(3, program)


def test_gradients(ranks):
    def program(group):
        mesh = weft.Mesh(group, dp=2)
        summed, mean = (weft.Layout(mesh, (3,), dp=weft.partial(op)) for op in ("sum", "avg"))
        a, b = np.full(3, 1.0 + group.rank), np.full(3, 2.0 + 2 * group.rank)
        weft.average_gradients({"a": (a, summed), "b": (b, mean)}, mesh)
        np.testing.assert_array_equal([a, b], [[3.0] * 3] * 2)
        whole = weft.Layout(mesh, (3,))
        gradients = {"a": (a, whole), "b": (b, whole)}
        assert weft.grad_norm(gradients) == pytest.approx(54**0.5)
        assert weft.clip_grad_norm(gradients, 1.0) == pytest.approx(54**0.5)
        assert weft.grad_norm(gradients) == pytest.approx(1.0, abs=1e-6)
        drifted = np.full(3, 1.0 + group.rank)
        with pytest.raises(weft.MismatchError, match="c"):
            weft.sync_replicated_gradients({"c": (drifted, whole)}, mesh)
        weft.sync_replicated_gradients({"c": (drifted, whole)}, mesh, on_drift="average")
        np.testing.assert_array_equal(drifted, [1.5] * 3)
        rounded = np.full(3, 1.0 + group.rank * 2.0**-50)
        for reduced in (weft.reduce_gradients, weft.sync_replicated_gradients):
            with pytest.raises(weft.MismatchError, match="has other bits, where the tolerance is 0"):
                reduced({"r": (rounded, whole)}, mesh, tolerance=0)
        weft.reduce_gradients({"r": (rounded, whole)}, mesh, tolerance=None)
        assert len(set(rounded)) == 1
        assert np.isnan(weft.clip_grad_norm({"d": (np.array([np.nan, 0, 0]), whole)}, 1.0, non_finite="skip"))
    ranks(2, program)


def test_gradients_over_all_axes_at_once(ranks):
    def program(group):
        mesh = weft.Mesh(group, dp=2, tp=2)
        dp, tp = group.rank // 2, group.rank % 2
        summed = weft.partial()
        used, cut, same = np.full(3, 1.0 + group.rank), np.full(2, 1.0 + group.rank, "f4"), np.full(3, 1.0 + dp)
        gradients = {"used": (used, weft.Layout(mesh, (3,), dp=summed, tp=summed)), "cut": (cut, weft.Layout(mesh, (4,), dp=summed, tp=weft.shard(0))),
                     "same": (same, weft.Layout(mesh, (3,), dp=weft.partial("avg")))}
        weft.reduce_gradients(gradients, mesh, data_axes=mesh["dp"])
        np.testing.assert_array_equal(used, [10.0] * 3)
        np.testing.assert_array_equal(cut, [4.0 + 2 * tp] * 2)
        np.testing.assert_array_equal(same, [1.5] * 3)
        whole = weft.Layout(mesh, (3,))
        with pytest.raises(weft.LayoutError, match='^reduce_gradients: the gradient of "w" is Replicate on dp=2; expected Partial'):
            weft.reduce_gradients({"w": (used, whole)}, mesh, data_axes=mesh["dp"])
        with pytest.raises(weft.BadArgumentError, match="options.data_axes has dp=2; expected axes of tp=2"):
            weft.reduce_gradients({"w": (used, whole)}, mesh["tp"], data_axes=mesh["dp"])
        drifted = np.full(3, 1.0 + tp)
        with pytest.raises(weft.MismatchError, match='"w" is Replicate on tp=2') as caught:
            weft.reduce_gradients({"w": (drifted, weft.Layout(mesh, (3,), dp=summed))}, mesh, data_axes=mesh["dp"])
        assert len(caught.value.ranks) > 1 and drifted[0] == 1.0 + tp
        weft.reduce_gradients({"w": (drifted, weft.Layout(mesh, (3,), dp=summed))}, mesh, data_axes=mesh["dp"], on_drift="average")
        np.testing.assert_array_equal(drifted, [3.0] * 3)
        weft.reduce_gradients({}, mesh)
    ranks(4, program)


def test_reducer(ranks):
    def program(group):
        mesh = weft.Mesh(group, dp=2)
        bound = np.zeros((2, 2), np.float32)
        with weft.Reducer(mesh, [("w", (3, 2), "f32", "sum"), ("b", 4, np.float64, "avg"), ("own", (2, 2), "f32", "sum")]) as reducer:
            reducer.bind(2, bound)
            for step in range(3):
                with reducer.no_sync():
                    reducer.ready(0)
                reducer.slot(0)[...] = group.rank + step
                reducer.slot(1)[...] = group.rank
                bound[...] = 1
                for i in range(3):
                    reducer.ready(i)
                    assert reducer.is_ready(i)
                reducer.finish()
                np.testing.assert_array_equal(reducer.slot(0), np.full((3, 2), 1 + 2 * step))
                np.testing.assert_array_equal(reducer.slot(1), [0.5] * 4)
                np.testing.assert_array_equal(bound, [[2, 2], [2, 2]])
            assert sum(reducer.bucket_bytes) > 0 and reducer.sent_early >= 0
    ranks(2, program)


def test_sampler(ranks):
    def program(group):
        with weft.Sampler(weft.Mesh(group, dp=2), 10, 4, seed=3) as sampler:
            assert (sampler.offset, sampler.count) == (2 * group.rank, 2)
            return [sampler.batch(step) for step in range(2)]
    first, second = ranks(2, program)
    seen = sum(first + second, [])
    assert len(set(seen)) == 8 and set(seen) <= set(range(10))


def test_checkpoints(ranks, tmp_path):
    whole = np.arange(30.0).reshape(6, 5)
    folder = tmp_path / "saved"

    def save(group):
        mesh = weft.Mesh(group, x=3)
        layout = weft.Layout(mesh, whole.shape, x=weft.shard(0))
        part = whole[2 * group.rank:2 * group.rank + 2].copy()
        weft.checkpoint.save(folder, {"w": (part, layout), "step": (np.array([7]), weft.Layout(mesh, (1,)))}, 7, mesh=mesh, extra={"sampler": "at 3"})
    ranks(3, save)
    assert weft.checkpoint.latest(folder)[1] == 7 and weft.checkpoint.latest(tmp_path / "none") is None

    def load(group):
        mesh = weft.Mesh(group, x=2)
        part, step = np.empty((6, 3 - group.rank)), np.empty(1, int)
        layout = weft.Layout(mesh, whole.shape, x=weft.shard(1))
        loaded, where = weft.checkpoint.load(folder, {"w": (part, layout), "step": (step, weft.Layout(mesh, (1,)))}, mesh=mesh)
        assert (loaded, step[0]) == (7, 7) and where.endswith("step-00000007")
        np.testing.assert_array_equal(part, whole[:, :3] if group.rank == 0 else whole[:, 3:])
        with pytest.raises(weft.BadArgumentError, match="step"):
            weft.checkpoint.load(folder, {"w": (part, layout)}, mesh=mesh)
        weft.checkpoint.load(folder, {"w": (part, layout)}, mesh=mesh, may_leave=lambda name: name == "step")
    ranks(2, load)
    with weft.checkpoint.Reader(folder) as reader:
        assert (reader.step, reader.mesh, reader.extra) == (7, "x=3", {"sampler": "at 3"})
        assert reader.tensors == {"step": ((1,), "i64"), "w": ((6, 5), "f64")}
        np.testing.assert_array_equal(reader["w"], whole)
        with pytest.raises(weft.BadArgumentError, match="^name is 'v'; expected a tensor of .*: step, w$"):
            reader.read("v", np.empty(1))
    assert weft.checkpoint.export(folder, tmp_path / "one.safetensors") == 2
    assert weft.checkpoint.verify(folder) == []
    data = next((folder / "step-00000007").glob("*.safetensors"))
    raw = bytearray(data.read_bytes())
    raw[-1] ^= 1
    data.write_bytes(raw)
    assert len(weft.checkpoint.verify(folder)) == 1


def reduced(group, steps=2, **options):
    """The gradients of a few steps of a Reducer, whose slots hold the rank's number and the gradient's."""
    mesh = weft.Mesh(group, dp=-1)
    found = []
    with weft.Reducer(mesh, [("a", (4, 2), "f32", "avg"), ("b", 3, "f32", "sum")], bucket_bytes=16, **options) as reducer:
        for _ in range(steps):
            for i in range(2):
                reducer.slot(i)[...] = group.rank + 1.0 + i
                reducer.ready(i)
            reducer.finish()
            found.append([reducer.slot(i).copy() for i in range(2)])
    return found


def test_buckets_with_a_hook(ranks):
    seen = []

    class Doubled(weft.BucketHook):
        """Twice the reduction, by a call of its own."""
        name = "doubled"

        def __init__(self, group):
            self.group, self.works = group, {}

        def begin(self, bucket):
            seen.append((self.group.rank, bucket.number, bucket.members, bucket.op))
            self.works[bucket.number] = self.group.all_reduce(bucket.data, out=bucket.data, op=bucket.op)

        def end(self, bucket):
            self.works.pop(bucket.number).wait()
            bucket.data[...] *= 2

    def program(group):
        own = group.duplicate()
        for a, b in reduced(group, hook=Doubled(own)):
            # 2 x the mean of 1 and 2, 2 x (2 + 3).
            assert (a == 3).all() and (b == 10).all() and a.shape == (4, 2)
        assert {entry[1:] for entry in seen if entry[0] == group.rank} == {(0, (0,), "avg"), (1, (1,), "sum")}
    ranks(2, program)


def test_buckets_with_a_hook_that_fails(ranks):
    class Broken(weft.BucketHook):
        def __init__(self, rank):
            self.rank = rank

        def end(self, bucket):
            if self.rank == 0:
                raise KeyError("no result")

    def program(group):
        with pytest.raises(weft.SystemError if group.rank == 0 else weft.AbortedError, match="KeyError: 'no result'" if group.rank == 0 else "") as caught:
            reduced(group, hook=Broken(group.rank))
        assert group.rank or isinstance(caught.value.__cause__, KeyError)
    ranks(2, program)


def test_compressed_buckets(ranks):
    def program(group):
        for a, _ in reduced(group, compression="bf16"):
            assert (a == 1.5).all()
        with pytest.raises(weft.BadArgumentError, match="^compression is 'f8'; expected one of None, 'bf16'$"):
            reduced(group, compression="f8")
    ranks(2, program)
