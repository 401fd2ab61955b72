"""weft.torch: each operation of torch.distributed against what it should give, on every dtype, and training that equals one process."""
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
    """Wrong arguments are ValueErrors; what goes wrong between ranks is torch's error, with weft's text and fields."""
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
