"""Each operation of weft.torch is an event of torch's profiler, as those of torch's own backends are; and
there is none where no profiler runs."""
import json

import pytest

pytest.importorskip("torch")
from torch_ranks import run  # noqa: E402  pylint: disable=wrong-import-position

# (name of the event, its shapes on rank 0, the call)
OPERATIONS = """
    x, parts = torch.arange(4.0).reshape(2, 2), lambda: [torch.zeros(2, 2) for _ in range(size)]
    one = torch.ones(3)
    operations = {
        "all_reduce": ([[2, 2]], lambda: dist.all_reduce(x)),
        "broadcast": ([[2, 2]], lambda: dist.broadcast(x, 0)),
        "reduce": ([[2, 2]], lambda: dist.reduce(x, 0)),
        "all_gather": ([[2, 2]], lambda: dist.all_gather(parts(), x)),
        "gather": ([[2, 2]], lambda: dist.gather(x, parts() if rank == 0 else None)),
        "scatter": ([[2, 2]] * size, lambda: dist.scatter(x, parts() if rank == 0 else None)),
        "reduce_scatter": ([[2, 2]] * size, lambda: dist.reduce_scatter(torch.zeros(2, 2), parts())),
        "all_to_all": ([[2, 2]] * size, lambda: dist.all_to_all(parts(), parts())),
        "barrier": ([], dist.barrier),
        "send": ([[3]], lambda: dist.send(one, 1) if rank == 0 else dist.recv(one, 0)),
        "recv": ([[3]], lambda: dist.recv(one, 1) if rank == 0 else dist.send(one, 0)),
        "recvAnySource": ([[3]], lambda: dist.recv(one) if rank == 0 else dist.send(one, 0)),
    }
    flat = {
        "all_gather": ([[2, 2]], lambda: dist.all_gather_into_tensor(torch.zeros(2 * size, 2), x)),
        "reduce_scatter": ([[4, 2]], lambda: dist.reduce_scatter_tensor(torch.zeros(4 // size, 2), torch.zeros(4, 2))),
        "all_to_all": ([[2, 2]], lambda: dist.all_to_all_single(torch.zeros(2, 2), x)),
    }
"""


@pytest.mark.parametrize("progress", ["caller", "thread"])
def test_each_operation_is_an_event(progress, tmp_path):
    said = run(2, f"""
    import json, weft.torch
    begin(pg_options=weft.torch.BackendOptions(progress={progress!r}))
    {OPERATIONS}
    trace = {str(tmp_path)!r} + f"/trace {{rank}}"
    for name, (shapes, call) in [*operations.items(), *flat.items()]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
            call()
        found = [event for event in profile.events() if event.name.startswith("weft:")]
        if rank == 0:
            assert [event.name for event in found] == ["weft:" + name], (name, found)
            assert found[0].input_shapes == shapes, (name, found[0].input_shapes)
        assert all(event.is_async and event.count == 1 and event.cpu_time >= 0 for event in found), found
    # Several calls, an asynchronous one, and the trace for Chrome.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        works = [dist.all_reduce(x, async_op=True) for _ in range(5)]
        for work in works:
            work.wait()
        torch.distributed.distributed_c10d.all_reduce_coalesced([x, one])
    names = [event.name for event in profile.events()]
    assert names.count("weft:all_reduce") == 6, names
    assert [e.input_shapes for e in profile.events() if e.name == "weft:all_reduce"][-1] == [[2, 2], [3]]
    profile.export_chrome_trace(trace)
    with open(trace) as file:
        found = [event for event in json.load(file)["traceEvents"] if event.get("name") == "weft:all_reduce"]
    assert len(found) == 6 and found[0]["args"]["Input Dims"] == [[2, 2]] and not any("finished" in event["args"] for event in found), found
    with torch.autograd.profiler.profile(record_shapes=True) as profile:  # torch's former profiler
        dist.all_reduce(x)
    assert [event.is_async for event in profile.function_events if event.name == "weft:all_reduce"] == [True]
    print(json.dumps(len(names)))
    """)
    assert len(said) == 2 and all(json.loads(line) >= 6 for line in said)


def test_without_a_profiler_nothing_is_recorded():
    run(2, """
    begin()
    from weft.torch import profiler
    def never(*_):
        raise AssertionError("a record")
    profiler.Record = never
    x = torch.ones(4)
    dist.all_reduce(x)
    dist.all_gather([torch.ones(4) for _ in range(size)], x)
    assert not profiler._in_flight
    """)


def test_a_refused_call_ends_its_event():
    run(1, """
    begin()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        try:
            dist.all_reduce(torch.ones(4, 4)[:, ::2])
        except ValueError as error:
            assert "not contiguous" in str(error)
        else:
            raise AssertionError
        dist.barrier()
    assert [event.name for event in profile.events() if event.name.startswith("weft:")] == ["weft:all_reduce", "weft:barrier"]
    """)


def test_gradients_in_a_thread_of_torchs():
    """DDP begins its calls in backward(), in C++."""
    run(2, """
    begin()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
    found = [event for event in profile.events() if event.name == "weft:all_reduce"]
    assert len(found) == 3 and all(event.is_async for event in found), found
    """)
