"""weft.torch: each operation of torch.distributed against what it should give, on every dtype, and
training that equals one process."""
import pytest

pytest.importorskip("torch")
from torch_ranks import run  # noqa: E402  pylint: disable=wrong-import-position

OPERATIONS = """
    begin()
    import weft.torch
    pg = dist.group.WORLD
    assert dist.get_backend() == "weft"
    def mine(r, n=12, dtype=torch.float32):
        return (torch.arange(n) % 5 + r).to(dtype)
    total = lambda n=12, dtype=torch.float32: sum(mine(r, n).long() for r in range(size)).to(dtype)
    same = lambda a, b: torch.equal(a.to(torch.complex128), b.to(torch.complex128))
    numbers = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.complex64,
               torch.complex128]
    for dtype in numbers + [torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]:
        x = mine(rank, 12, dtype)
        every = [mine(r, 12, dtype) for r in range(size)]
        outs = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(outs, x)
        assert all(map(same, outs, every)), dtype
        out = torch.empty(size * 12, dtype=dtype)
        dist.all_gather_into_tensor(out, x)
        assert same(out, torch.cat(every)), dtype
        dist.broadcast(x, size - 1)
        assert same(x, every[-1]), dtype
        if dtype in numbers:
            x = mine(rank, 12, dtype)
            dist.all_reduce(x)
            assert same(x, total(12, dtype)), dtype
            inp = torch.cat([mine(rank, 6, dtype) + i for i in range(size)])
            out = torch.empty(6, dtype=dtype)
            dist.reduce_scatter_tensor(out, inp)
            assert same(out, (total(6) + size * rank).to(dtype)), dtype
    for op, value in [(dist.ReduceOp.MIN, mine(0)), (dist.ReduceOp.MAX, mine(size - 1)), (dist.ReduceOp.AVG, total() / size),
                      (dist.ReduceOp.PRODUCT, torch.stack([mine(r) for r in range(size)]).prod(0))]:
        x = mine(rank)
        dist.all_reduce(x, op)
        assert torch.equal(x, value), op
        out = torch.empty(12)
        dist.reduce_scatter(out, [mine(rank) for _ in range(size)], op)
        assert torch.equal(out, value), op
    x = torch.tensor([rank == 0, True, False])
    dist.all_reduce(x)
    assert x.tolist() == [True, True, False]
    x = torch.tensor([1 << rank, 7, rank])
    dist.all_reduce(x, dist.ReduceOp.BOR)
    assert x.tolist()[0] == (1 << size) - 1
    x = mine(rank)
    dist.reduce(x, 0)
    assert rank != 0 or torch.equal(x, total())
    outs = [torch.empty(12) for _ in range(size)] if rank == 1 else None
    dist.gather(mine(rank), outs, dst=1)
    assert rank != 1 or all(map(torch.equal, outs, [mine(r) for r in range(size)]))
    out = torch.empty(12)
    dist.scatter(out, [mine(r) for r in range(size)] if rank == 1 else None, src=1)
    assert torch.equal(out, mine(rank))
    outs = [torch.empty(r + 1) for r in range(size)]
    dist.all_to_all(outs, [torch.full((rank + 1,), 10. * rank + r) for r in range(size)])
    assert all(torch.equal(outs[r], torch.full((r + 1,), 10. * r + rank)) for r in range(size))
    out = torch.empty(size, 3)
    dist.all_to_all_single(out, torch.stack([mine(rank, 3) + r for r in range(size)]))
    assert torch.equal(out, torch.stack([mine(r, 3) + rank for r in range(size)]))
    out = torch.empty(sum(r + 1 for r in range(size)), 2)
    dist.all_to_all_single(out, torch.full((size * (rank + 1), 2), float(rank)), [r + 1 for r in range(size)], [rank + 1] * size)
    assert torch.equal(out, torch.cat([torch.full((r + 1, 2), float(r)) for r in range(size)]))
    outs = torch.empty(rank + 1)
    dist.reduce_scatter(outs, [torch.full((r + 1,), 1. + r) for r in range(size)])     # uneven
    assert torch.equal(outs, torch.full((rank + 1,), size * (1. + rank)))
    # messages
    if rank == 0:
        for _ in range(1, size):
            got = torch.empty(3)
            source = dist.recv(got)
            assert torch.equal(got, torch.full((3,), float(source)))
    else:
        dist.send(torch.full((3,), float(rank)), 0)
    dist.barrier()
    inbox = torch.empty(3)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.full((3,), float(rank)), (rank + 1) % size),
                                    dist.P2POp(dist.irecv, inbox, (rank - 1) % size)])
    for work in works:
        work.wait()
    assert inbox[0] == (rank - 1) % size
    work = dist.isend(mine(rank), (rank + 1) % size)
    got = torch.empty(12)
    other = dist.irecv(got, (rank - 1) % size)
    work.wait(), other.wait()
    assert work.is_completed() and work.is_success() and work.exception() is None and torch.equal(got, mine((rank - 1) % size))
    # asynchronous, with futures
    xs = [mine(rank) + i for i in range(5)]
    futures = [dist.all_reduce(x, async_op=True).get_future().then(lambda f: f.value()[0] * 2) for x in xs]
    for i, future in enumerate(futures):
        assert torch.equal(future.wait(), (total() + i * size) * 2)
    assert dist.all_reduce(mine(rank), async_op=True).get_future_result().wait() == 0
    # coalesced
    xs = [mine(rank), mine(rank, 3)]
    dist.all_reduce_coalesced(xs)
    assert torch.equal(xs[0], total()) and torch.equal(xs[1], total(3))
    with dist._coalescing_manager(async_ops=True) as manager:
        outs = [torch.empty(2 * size) for _ in range(3)]
        for i, o in enumerate(outs):
            dist.all_gather_into_tensor(o, torch.full((2,), float(rank + i)))
    manager.wait()
    assert all(o.tolist() == [float(r + i) for r in range(size) for _ in range(2)] for i, o in enumerate(outs))
    lists = [[torch.empty(2), torch.empty(3)] for _ in range(size)]
    dist.all_gather_coalesced(lists, [torch.full((2,), float(rank)), torch.full((3,), 10. + rank)])
    assert all(lists[r][0][0] == r and lists[r][1][2] == 10 + r for r in range(size))
    # sparse
    x = torch.sparse_coo_tensor([[rank, 0]], [1.0, 2.0], (size + 1,))
    dist.all_reduce(x)
    expected = torch.zeros(size + 1)
    for r in range(size):
        expected[r] += 1
        expected[0] += 2
    assert torch.equal(x.to_dense(), expected)
    # objects, groups, barriers
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(size)]
    objects = [rank, "x"]
    dist.broadcast_object_list(objects, 1)
    assert objects == [1, "x"]
    objects = [None] * size if rank == 0 else None
    dist.gather_object((rank,), objects)
    assert rank != 0 or objects == [(r,) for r in range(size)]
    out = [None]
    dist.scatter_object_list(out, [f"to {r}" for r in range(size)])
    assert out == [f"to {rank}"]
    even = dist.new_group([r for r in range(size) if r % 2 == 0])
    odd = dist.new_group([r for r in range(size) if r % 2])
    part = odd if rank % 2 else even
    x = torch.ones(1)
    dist.all_reduce(x, group=part)
    assert x[0] == dist.get_world_size(part) and dist.get_backend(part) == "weft"
    dist.destroy_process_group(part)
    parts, _ = dist.new_subgroups(size // 2 if size > 2 else 1)
    x = torch.ones(1)
    dist.all_reduce(x, group=parts)
    dist.barrier()
    dist.monitored_barrier()
    shared = weft.torch.empty(1000, dtype=torch.float64)
    shared[:] = rank
    dist.all_reduce(shared)
    assert shared[999] == size * (size - 1) / 2 and shared.dtype == torch.float64
    assert weft.torch.empty((2, 3)).shape == (2, 3) and weft.torch.empty(3, requires_grad=True).requires_grad
    last = torch.tensor(float(rank)).expand(1).clone()
    dist.all_reduce(last.t())
    x = torch.arange(24.).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last) + rank
    dist.all_reduce(x)
    assert torch.equal(x, size * torch.arange(24.).reshape(1, 2, 3, 4) + sum(range(size)))
    dist.destroy_process_group()
    print("all well")
"""


@pytest.mark.parametrize("size", [2, 4])
def test_operations(size):
    assert run(size, OPERATIONS.replace("\n    ", "\n")) == ["all well\n"] * size


def test_operations_with_a_helper_thread():
    program = OPERATIONS.replace("\n    ", "\n").replace("begin()", 'import weft.torch\nbegin(pg_options=weft.torch.BackendOptions(progress="thread"))')
    assert run(2, program) == ["all well\n"] * 2


def test_errors():
    """Wrong arguments are ValueErrors; what goes wrong between ranks is torch's error, with weft's text
    and fields."""
    run(2, """
        from datetime import timedelta
        begin()
        import weft
        def refused(kind, text, call):
            try:
                call()
            except kind as error:
                assert text in str(error), error
            else:
                raise AssertionError(f"not refused: {text}")
        refused(ValueError, "tensor is not contiguous; tensors must be contiguous", lambda: dist.all_reduce(torch.ones(4, 4)[:, ::2]))
        refused(ValueError, "output has 3 elements; expected 6: elements of input x ranks",
                lambda: dist.group.WORLD._allgather_base(torch.empty(3), torch.empty(3)))
        refused(RuntimeError, "sum of", lambda: dist.all_reduce(torch.ones(3).to(torch.float8_e4m3fn)))
        refused(ValueError, "output_tensors has 1 tensors; expected 2, one for each rank", lambda: dist.all_gather([torch.empty(2)], torch.empty(2)))
        # a time-out of one call
        lonely = dist.new_group([0, 1], timeout=timedelta(seconds=0.5))
        if rank == 0:
            try:
                dist.all_reduce(torch.ones(3), group=lonely)
                raise SystemExit("no time-out")
            except dist.DistBackendError as error:
                assert isinstance(error, weft.TimeoutError) and error.ranks == (1,) and "rank 1" in str(error) and error.code == "timeout"
        dist.barrier()
        # wait() has a time-out of its own
        if rank == 0:
            work = dist.irecv(torch.empty(1), 1)
            try:
                work.wait(timedelta(seconds=0.2))
                raise SystemExit("no time-out")
            except dist.DistBackendError as error:
                assert "still pending after 0.2 s" in str(error)
        else:
            import time
            time.sleep(0.5)
            dist.send(torch.ones(1), 0)
        if rank == 0:
            work.wait()
        dist.barrier()
        # monitored_barrier names who did not come
        late = dist.new_group([0, 1])
        if rank == 0:
            try:
                dist.monitored_barrier(late, timeout=timedelta(seconds=0.5))
                raise SystemExit("no time-out")
            except RuntimeError as error:
                assert "rank 1" in str(error)
        dist.barrier()
        # abort
        third = dist.new_group([0, 1])
        if rank == 0:
            third._get_backend(torch.device("cpu")).abort()
        try:
            for _ in range(3):
                dist.all_reduce(torch.ones(3), group=third)
            raise SystemExit("not aborted")
        except dist.DistBackendError as error:
            assert isinstance(error, weft.AbortedError) and "rank 0 called abort()" in str(error)
        dist.barrier()
        # ranks that call different things
        fourth = dist.new_group([0, 1])
        try:
            for _ in range(2):
                dist.all_reduce(torch.ones(3), group=fourth) if rank == 0 else dist.broadcast(torch.ones(3), 0, group=fourth)
            raise SystemExit("no mismatch")
        except dist.DistBackendError as error:
            assert error.code == "mismatch"
        # a future of a call that fails
        fifth = dist.new_group([0, 1], timeout=timedelta(seconds=0.5))
        if rank == 0:
            work = dist.all_reduce(torch.ones(3), group=fifth, async_op=True)
            try:
                work.get_future().wait()
                raise SystemExit("no error")
            except RuntimeError as error:
                assert "rank 1" in str(error)
            assert work.get_future_result().wait() == 1
        dist.barrier()
        """)


def test_groups_one_after_another():
    """A store that outlives a group, as torchrun's does: what earlier groups left in it misleads nobody."""
    run(2, """
        from datetime import timedelta
        import time
        import weft.torch
        store = dist.FileStore(sys.argv[3], size)
        for i in range(3):
            if rank == 0 and i:
                time.sleep(0.5)  # the others look first
            dist.init_process_group("weft", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=10))
            x = torch.ones(3)
            dist.all_reduce(x)
            assert x.tolist() == [2, 2, 2]
            dist.destroy_process_group()
        """)


def test_reductions():
    """Each of ReduceOp's, of numbers and of truth values."""
    run(3, """
        begin()
        op = dist.ReduceOp
        def reduced(x, op):
            dist.all_reduce(x, op)
            return x.tolist()
        assert reduced(torch.full((2,), rank + 1.), dist._make_nccl_premul_sum(0.5)) == [3, 3]
        assert reduced(torch.full((2,), rank + 1.), dist._make_nccl_premul_sum(torch.tensor(2.))) == [12, 12]
        numbers = [1, 3, 7][rank]
        assert [reduced(torch.tensor([numbers, 4]), o) for o in (op.BAND, op.BOR, op.BXOR)] == [[1, 4], [7, 4], [5, 4]]
        for o, expected in [(op.SUM, [1, 1, 0]), (op.MAX, [1, 1, 0]), (op.BOR, [1, 1, 0]), (op.PRODUCT, [1, 0, 0]), (op.MIN, [1, 0, 0]), (op.BAND, [1, 0, 0]),
                            (op.BXOR, [1, 1, 0])]:
            assert reduced(torch.tensor([True, rank == 1, False]), o) == list(map(bool, expected)), o
        assert reduced(torch.tensor([3, rank]), op.AVG) == [3, 1]  # of integers: towards zero
        try:
            dist.all_reduce(torch.tensor([True]), op.AVG)
            raise SystemExit("an average of truth values")
        except NotImplementedError as error:
            assert "avg of bool is not defined" in str(error)
        dist.destroy_process_group()
        """)


def test_dtypes_that_weft_does_not_know_move():
    """As over Gloo, whose messages are bytes; nothing is computed with them."""
    run(2, """
        begin()
        for name in ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "complex32"):
            dtype = getattr(torch, name, None)
            if dtype is None:
                continue
            mine = (torch.arange(8, dtype=torch.uint8) + 16 * rank).view(dtype)
            bits = lambda *tensors: [tensor.view(torch.uint8).tolist() for tensor in tensors]
            each = [list(range(16 * r, 16 * r + 8)) for r in range(2)]
            got = torch.empty_like(mine)
            work = dist.isend(mine, 1 - rank)
            dist.recv(got, 1 - rank)
            work.wait()
            assert bits(got) == [each[1 - rank]], name
            whole = torch.empty(2 * mine.numel(), dtype=dtype)
            dist.all_gather_into_tensor(whole, mine)
            assert bits(whole) == [each[0] + each[1]], name
            parts = [torch.empty_like(mine) for _ in range(2)]
            dist.all_gather(parts, mine)
            assert bits(*parts) == each, name
            dist.broadcast(mine, 1)
            assert bits(mine) == [each[1]], name
            if name != "complex32":  # to torch, two halves
                try:
                    dist.all_reduce(mine)
                    raise SystemExit("a sum of " + name)
                except NotImplementedError as error:
                    assert f"tensor is of dtype torch.{name}; expected one of f64, f32" in str(error)
        dist.destroy_process_group()
        """)


def test_a_refused_operation_ends_its_coalescing():
    """torch leaves it open: later operations would be kept for an end that never comes, and do nothing."""
    run(2, """
        begin()
        good, turned = torch.ones(4), torch.ones(4, 4)[:, ::2]
        for _ in range(2):
            try:
                dist.batch_isend_irecv([dist.P2POp(dist.isend, good, 1 - rank), dist.P2POp(dist.irecv, turned, 1 - rank)])
                raise SystemExit("not refused")
            except ValueError as error:
                assert "tensor is not contiguous" in str(error)
            x, y = torch.ones(3), torch.full((3,), float(rank))
            dist.all_reduce(x)
            dist.broadcast(y, 1)
            assert x.tolist() == [2, 2, 2] and y.tolist() == [1, 1, 1]
            for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, good[:3] + rank, 1 - rank), dist.P2POp(dist.irecv, x, 1 - rank)]):
                work.wait()
            assert x.tolist() == [2 - rank] * 3
        # A message is the elements as they lie: those of a transposed tensor would arrive in another order.
        for call in (lambda: dist.send(torch.ones(2, 3).t(), 1 - rank), lambda: dist.recv(torch.ones(2, 3).t(), 1 - rank)):
            try:
                call()
                raise SystemExit("not refused")
            except ValueError as error:
                assert "tensor is not contiguous" in str(error)
        dist.barrier()
        dist.destroy_process_group()
        """)


def test_memory_that_is_used_twice_is_refused():
    run(2, """
        begin()
        y, other = torch.full((5000,), float(rank)), 1 - rank
        calls = (
            (lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, y, other), dist.P2POp(dist.irecv, y, other)]), "out of call 1 (recv) overlaps in of call 0 (send)"),
            (lambda: dist.all_gather([y, y], torch.ones(5000)), "output_tensors[1] overlaps output_tensors[0]; expected memory of its own"),
            (lambda: dist.all_to_all([y[:3], y[2:5]], [torch.ones(3), torch.ones(3)]), "output_tensors[1] overlaps output_tensors[0]"))
        for call, said in calls:
            try:
                call()
                raise SystemExit("not refused")
            except ValueError as error:
                assert said in str(error), error
        assert y.tolist() == [rank] * 5000
        dist.barrier()
        dist.destroy_process_group()
        """)


def test_coalesced_operations():
    run(2, """
        begin()
        outs = [torch.empty(2) for _ in range(3)]
        with dist._coalescing_manager(async_ops=True) as manager:
            for i, out in enumerate(outs):
                dist.reduce_scatter_tensor(out, torch.tensor([0., 1, 2, 3]) + rank + i)
        manager.wait()
        assert [out.tolist() for out in outs] == [[1. + 4 * rank + 2 * i, 3. + 4 * rank + 2 * i] for i in range(3)]
        with dist._coalescing_manager():
            for out in outs:
                dist.all_reduce(out)
        assert [out.tolist() for out in outs] == [[6. + 4 * i, 10. + 4 * i] for i in range(3)]
        ones, zeros = torch.full((2,), float(rank)), torch.full((3,), -float(rank))
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            dist.broadcast(ones, 1, async_op=True)
            dist.broadcast(zeros, 0, async_op=True)
        manager.wait()
        assert ones.tolist() == [1, 1] and zeros.tolist() == [0, 0, 0]
        dist.destroy_process_group()
        """)


def test_split_and_merged_groups():
    """torch's C++ gets a group of weft's as a group, with its Works."""
    run(4, """
        from datetime import timedelta
        import weft.torch
        begin()
        half = dist.split_group(split_ranks=[[1, 0], [2, 3]])
        assert type(half).__name__ == "WeftProcessGroup" and dist.get_backend(half) == "weft" and half.size() == 2
        assert dist.get_rank(half) == [1, 0, 0, 1][rank]
        x = torch.tensor([float(rank)])
        work = dist.all_reduce(x, group=half, async_op=True)
        work.wait()
        assert x.item() == (1 if rank < 2 else 5)
        assert work.is_completed() and work.is_success() and work.exception() is None and work.result()[0] is x
        own = dist.split_group(half, split_ranks=[[0]])
        if rank in (1, 2):
            y = torch.ones(2)
            dist.all_reduce(y, group=own)
            assert own.size() == 1 and y.tolist() == [1, 1]
        else:
            assert own is dist.GroupMember.NON_GROUP_MEMBER
        store = dist.FileStore(sys.argv[3] + ".merge", 4)
        merged = half.merge_remote_group(store, 4, timedelta(seconds=60), "merged")
        z = torch.tensor([float(rank)])
        work = merged.allreduce([z])
        work.wait()
        assert type(merged).__name__ == "WeftProcessGroup" and merged.size() == 4 and z.item() == 6 and work.is_success()
        merged.shutdown()
        dist.destroy_process_group()
        """)


def test_hooks_see_each_call():
    """Hooks of the program, and torch's own check for NaN."""
    program = """
        import os
        os.environ["TORCH_DIST_NAN_CHECK"] = "1"
        import weft.torch
        begin()
        world, seen = dist.group.WORLD, []
        x = torch.ones(3)
        if hasattr(world, "register_pre_hook"):
            world.register_pre_hook(1, lambda about: seen.append("before"))
            world.register_post_hook(1, lambda about: seen.append("after"))
            dist.all_reduce(x)
            dist.barrier()
            assert seen == ["before", "after"] * 2, seen
            world.unregister_pre_hook(1)
            world.unregister_post_hook(1)
            dist.all_reduce(x)
            assert len(seen) == 4
        if hasattr(torch._C._distributed_c10d, "NanCheckHook"):
            for group in (world, dist.new_group([0, 1])):
                try:
                    dist.all_reduce(torch.tensor([float("nan")]), group=group)
                    raise SystemExit("no error")
                except RuntimeError as error:
                    assert "NaN" in str(error)
                dist.barrier(group)
        dist.destroy_process_group()
        """
    run(2, program)


def test_time_outs_of_zero_are_none():
    run(2, """
        from datetime import timedelta
        import time
        import weft.torch
        begin(timeout=timedelta(0))
        x, pair = torch.ones(2), dist.new_group([0, 1], timeout=timedelta(0))
        if rank:
            time.sleep(1)
        for group in (None, pair):
            work = dist.all_reduce(x, group=group, async_op=True)
            work.wait(timedelta(0))
        assert x.tolist() == [4, 4]
        dist.barrier()
        # One that is set later holds.
        pair.set_timeout(timedelta(seconds=0.3))
        if rank == 0:
            try:
                dist.all_reduce(x, group=pair)
                raise SystemExit("no time-out")
            except dist.DistBackendError as error:
                assert "within 0.3 s" in str(error), error
        dist.barrier()
        dist.destroy_process_group()
        """)


def test_what_is_left():
    """Works that nobody keeps, a group that was destroyed, tensors without elements or memory."""
    run(2, """
        import gc
        begin()
        import weft
        xs = [torch.full((1000,), float(i)) for i in range(100)]
        for x in xs:
            dist.all_reduce(x, async_op=True)  # the backend keeps the Work, and the tensor
        gc.collect()
        dist.barrier()
        assert [x[999].item() for x in xs] == [2. * i for i in range(100)]
        dist.all_reduce(torch.empty(0))
        work = dist.all_reduce(torch.empty(2, device="meta"), async_op=True)  # torch answers itself
        assert work is None or not isinstance(work, weft.torch.works.WeftWork)
        pair = dist.new_group([0, 1])
        dist.destroy_process_group(pair)
        for call in (lambda: pair.allreduce([torch.ones(1)]), lambda: pair.barrier()):
            try:
                call()
                raise SystemExit("not refused")
            except ValueError as error:
                assert "has been shut down; expected one that runs" in str(error)
        dist.destroy_process_group()
        """)


def test_threads_of_one_group():
    """Messages from several threads: each gets the Work of its own call, and nobody looks at a call for
    which another one waits."""
    run(2, """
        import threading
        begin()
        failures = []
        def talk(tag):
            try:
                for i in range(100):
                    out, got = torch.full((64,), 1000. * tag + i), torch.empty(64)
                    works = [dist.isend(out, 1 - rank, tag=tag), dist.irecv(got, 1 - rank, tag=tag)]
                    for work in works:
                        work.wait()
                    assert (got == out).all(), (tag, i, got[0])
            except BaseException as error:
                failures.append(error)
        threads = [threading.Thread(target=talk, args=(tag,)) for tag in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        dist.destroy_process_group()
        """)


def test_after_fork():
    """Processes that load data are forked. A child may not use the group, and does not end it."""
    run(2, """
        begin()
        import weft
        x = torch.ones(2)
        dist.all_reduce(x, async_op=True).get_future().wait()
        total = 0
        for batch in torch.utils.data.DataLoader(list(range(20)), batch_size=5, num_workers=2, multiprocessing_context="fork"):
            y = batch.sum()
            dist.all_reduce(y)
            total += y.item()
        assert total == 380
        child = os.fork()
        if child == 0:
            code = 1
            try:
                dist.all_reduce(x)
            except weft.UnsupportedError as error:
                code = 0 if "forked" in str(error) else 2
            dist.destroy_process_group()
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        dist.all_reduce(x)
        assert x.tolist() == [4, 4]
        dist.destroy_process_group()
        """)


@pytest.mark.parametrize("first, second", [("cpu:weft", None), ("gloo", "weft"), ("weft", "gloo")])
def test_beside_other_backends(first, second):
    run(2, f"""
        import weft.torch
        begin({first!r})
        pair = dist.new_group([0, 1], backend={second!r})
        for group in (None, pair):
            x = torch.ones(2)
            dist.all_reduce(x, group=group)
            assert x.tolist() == [2, 2]
        assert dist.get_backend(pair) == {second or first!r}
        dist.destroy_process_group()
        """)


def test_a_program_that_leaves_its_group_open():
    said = run(2, """
        begin()
        dist.all_reduce(torch.ones(2), async_op=True)
        print("well")
        """)
    assert said == ["well\n"] * 2


def test_negative_and_conjugate_views_are_refused():
    """Their memory holds other numbers than they show: in every operation, given and written, one by one
    and in a list."""
    run(2, """
    begin()
    def calls(v):
        p, q, wide = torch.zeros_like(v.resolve_conj().resolve_neg()), torch.zeros(4, dtype=v.dtype), torch.zeros(8, dtype=v.dtype)
        return {
            "all_reduce": lambda: dist.all_reduce(v), "reduce": lambda: dist.reduce(v, 0), "broadcast": lambda: dist.broadcast(v, 0),
            "all_gather": lambda: dist.all_gather([p, q], v), "all_gather to": lambda: dist.all_gather([v, p], q),
            "all_gather to the last": lambda: dist.all_gather([p, v], q), "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(wide, v),
            "gather": lambda: dist.gather(v, [p, q] if rank == 0 else None), "scatter to": lambda: dist.scatter(v, [p, q] if rank == 0 else None),
            "reduce_scatter": lambda: dist.reduce_scatter(p, [v, q]), "reduce_scatter to": lambda: dist.reduce_scatter(v, [p, q]),
            "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(q[:2], v), "all_to_all": lambda: dist.all_to_all([p[:2], q[:2]], [v[:2], v[2:]]),
            "all_to_all to": lambda: dist.all_to_all([v[:2], v[2:]], [p[:2], q[:2]]), "all_to_all_single": lambda: dist.all_to_all_single(p, v),
            "all_to_all_single to": lambda: dist.all_to_all_single(v, p), "send": lambda: dist.send(v, 1 - rank), "recv": lambda: dist.recv(v, 1 - rank),
            "coalesced": lambda: dist.distributed_c10d.all_reduce_coalesced([p, v]),
        }
    x = torch.arange(1.0, 5)
    for v in (torch._neg_view(x), torch.complex(x, x).conj().imag, torch.complex(x, x).conj(), torch.complex(x, x).conj()[:]):
        assert v.is_neg() or v.is_conj()
        before = v.clone()
        for name, call in calls(v).items():
            try:
                call()
            except ValueError as error:
                assert "is a conjugate or negative view; expected its values in memory" in str(error), (name, error)
            except RuntimeError as error:  # torch itself makes real numbers of complex ones before
                assert v.is_complex() and "unresolved conjugated" in str(error), (name, error)
            else:
                sys.exit(f"{name} took a view: {v}")
            assert torch.equal(v, before), name
    dist.barrier()
    """)


def test_time_outs_are_checked():
    """Before a field of the C API would wrap."""
    run(1, """
    begin()
    from datetime import timedelta
    import weft
    x, far = torch.ones(3), timedelta(days=365000)
    pg = dist.group.WORLD
    def options(kind):
        made = kind()
        made.timeout = far
        return made
    c10d = dist.distributed_c10d
    for call in (lambda: pg._get_backend(torch.device("cpu")).monitored_barrier(options(c10d.BarrierOptions)), lambda: pg.barrier(options(c10d.BarrierOptions)),
                 lambda: pg.allreduce([x], options(c10d.AllreduceOptions)), lambda: pg._get_backend(torch.device("cpu")).set_timeout(far),
                 lambda: dist.all_reduce(x, async_op=True).wait(far), lambda: pg.broadcast([x], options(c10d.BroadcastOptions))):
        try:
            call()
        except ValueError as error:
            assert str(error).startswith("timeout is 31536000000.0; expected seconds from 0 to 9e9"), error
        else:
            sys.exit("taken")
    dist.barrier()
    """)
