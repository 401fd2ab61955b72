#!/usr/bin/env python3
"""torch.distributed over weft beside Gloo, in one run of two or more ranks: python bench/torch/backends.py
[-n RANKS] [--json FILE] [--write PAGE] PART...

    collectives   all_reduce of 8 bytes to 128 MiB, all_gather and reduce_scatter; weft also on tensors of weft.torch.empty
    overhead      all_reduce of 8 bytes over weft, alone on one rank, compared with a Backend in Python that does nothing
    ddp           a step of DDP on 24 x Linear(512), 64 rows, also over a backend that does nothing
    fsdp          a step of fully_shard on the model of ddp, also without torch.distributed and over a backend that does nothing
    tp            an MLP 1024-4096-1024 of two ranks, tensor parallel, 512 rows

Each result is checked before it is timed. Backends take turns; times are medians over repetitions, and the
time of a repetition is that of its slowest rank. OMP_NUM_THREADS is 1. --json stores the results: a part that
runs again replaces its former results, so that parts may run at different times. --write puts the file's
results as a table into a page, between its marker lines; without a part the program only does that.
"""
import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time

BACKENDS = ("weft", "gloo")
LOAD = round(os.getloadavg()[0], 1)  # of the machine before it measures


def nothing_backend():
    """A Backend in Python whose operations do nothing."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import Backend

    class Done(dist._Work):
        def __init__(self, result):
            super().__init__()
            self._result = result

        def wait(self, timeout=None):
            return True

        def get_future(self):
            future = torch.futures.Future()
            future.set_result(self._result)
            return future

    class Nothing(Backend):
        def __init__(self, rank, size):
            super().__init__(rank, size)
            self._options = Backend.Options("nothing")

        @property
        def options(self):
            return self._options

        def getBackendName(self):
            return "nothing"

        def _set_sequence_number_for_group(self):
            pass

        def allreduce(self, tensors, opts):
            return Done(tensors)

        broadcast = allreduce

        def allgather(self, outputs, inputs, opts):
            for output in outputs[0]:
                output.copy_(inputs[0])
            return Done(outputs[0])

        def all_gather_single(self, output, tensor, opts):
            return Done([output])

        reduce_scatter_single = all_gather_single
        if not hasattr(Backend, "all_gather_single"):  # the names of torch 2.14
            _allgather_base = _reduce_scatter_base = all_gather_single

    dist.Backend.register_backend("nothing", lambda opts, options: Nothing(opts.group_rank, opts.group_size), extended_api=True, devices=["cpu"])


class Ranks:
    """This rank, its groups, and how it measures."""

    def __init__(self, rank, size, store):
        import torch
        import torch.distributed as dist
        import weft.torch  # noqa: F401
        torch.set_num_threads(1)
        nothing_backend()
        self.torch, self.dist, self.rank, self.size = torch, dist, rank, size
        dist.init_process_group("weft", init_method="file://" + store, rank=rank, world_size=size)
        self.groups = {name: dist.new_group(backend=name) for name in BACKENDS + ("nothing",)}
        self.groups["weft"] = dist.group.WORLD
        self.rows = []

    def slowest(self, seconds):
        """The slowest rank's time, for a time or each of a list of times. In each repetition a step that
        waits for all ranks takes as long as the slowest rank. Using the slowest time for all steps makes a
        step that waits for nobody comparable."""
        value = self.torch.tensor(seconds, dtype=self.torch.float64)
        self.dist.all_reduce(value, self.dist.ReduceOp.MAX)
        return value.tolist()

    def measure(self, functions, budget=0.6):
        """Returns {name: microseconds}, the median over repetitions; the functions take turns. A repetition
        is as many calls as take a few milliseconds."""
        counts = {}
        for name, function in functions.items():
            function()
            self.dist.barrier()
            began = time.perf_counter()
            function()
            counts[name] = max(1, int(0.004 / self.slowest(time.perf_counter() - began)))
            for _ in range(counts[name]):
                function()
        times = {name: [] for name in functions}
        end = time.perf_counter() + budget * len(functions)
        while True:
            for name, function in functions.items():
                self.dist.barrier()
                began = time.perf_counter()
                for _ in range(counts[name]):
                    function()
                times[name].append((time.perf_counter() - began) / counts[name])
            if self.slowest(time.perf_counter() - end) > 0 and len(times[name]) >= 3:
                break
        return {name: statistics.median(self.slowest(values)) * 1e6 for name, values in times.items()}

    def report(self, case, times, target, columns):
        """target: what the issue asks for, (its words, whether it is reached)."""
        self.rows.append({"case": case, "times": times, "target": target})
        if self.rank == 0:
            print(f"{case:36}" + "".join(f"{name} {times[name]:11.1f} us  " for name in columns), flush=True)


def of_bytes(size):
    return f"{size} bytes" if size < 1024 else f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB"


def ratio(times, least):
    """The times, the factor by which weft is faster, and the target."""
    faster = times["gloo"] / times["weft"]
    return times | {"ratio": faster}, (f"{least} x", faster >= least)


def collectives(r):
    torch, dist = r.torch, r.dist
    import weft.torch
    for size in [8, 64, 512, 2048, 8192, 32768, 131072, 524288, 2097152, 8388608, 33554432, 134217728]:
        count = size // 4
        x = torch.ones(count)
        shared = weft.torch.empty(count)
        shared.fill_(1)
        for name in BACKENDS:
            x.fill_(r.rank + 1)
            dist.all_reduce(x, group=r.groups[name])
            assert (x == r.size * (r.size + 1) / 2).all()
        x.zero_()
        shared.zero_()
        times = r.measure({name: lambda g=r.groups[name]: dist.all_reduce(x, group=g) for name in BACKENDS}
                          | {"shared": lambda: dist.all_reduce(shared, group=r.groups["weft"])}, 0.25 if size > 1 << 24 else 0.4)
        least = 5 if size < 32768 else 2
        r.report(f"all_reduce, {of_bytes(size)}", *ratio(times, least), ("weft", "shared", "gloo", "ratio"))
    for size in [32768, 1 << 20, 1 << 24]:
        count = size // 4
        part, whole = torch.full((count // r.size,), float(r.rank)), torch.empty(count)
        for name in BACKENDS:
            dist.all_gather_into_tensor(whole, part, group=r.groups[name])
            assert whole[-1] == r.size - 1 and whole[0] == 0
        times = r.measure({name: lambda g=r.groups[name]: dist.all_gather_into_tensor(whole, part, group=g) for name in BACKENDS}, 0.4)
        r.report(f"all_gather, {of_bytes(size)} in all", *ratio(times, 2), ("weft", "gloo", "ratio"))
        whole.fill_(1)
        for name in BACKENDS:
            dist.reduce_scatter_tensor(part, whole, group=r.groups[name])
            assert (part == r.size).all()
        whole.zero_()
        times = r.measure({name: lambda g=r.groups[name]: dist.reduce_scatter_tensor(part, whole, group=g) for name in BACKENDS}, 0.4)
        r.report(f"reduce_scatter, {of_bytes(size)} in all", *ratio(times, 2), ("weft", "gloo", "ratio"))


def overhead(r):
    torch, dist = r.torch, r.dist
    x = torch.zeros(2)
    alone = [{name: dist.new_group([rank], backend=name) for name in ("weft", "nothing")} for rank in range(r.size)][r.rank]
    times = r.measure({name: lambda g=group: dist.all_reduce(x, group=g) for name, group in alone.items()})
    times["above"] = times["weft"] - times["nothing"]
    r.report("all_reduce, 8 bytes, one rank", times, ("at most 10 us above", times["above"] <= 10), ("weft", "nothing", "above"))


def layers(torch):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(24)))


def step(model, x):
    def run():
        model.zero_grad()
        model(x).square().mean().backward()
    return run


def ddp(r):
    torch, dist = r.torch, r.dist
    from torch.nn.parallel import DistributedDataParallel
    x = torch.randn(64, 512)
    plain = layers(torch)
    total = sum(p.numel() for p in plain.parameters())
    flat = torch.zeros(total)
    models = {name: DistributedDataParallel(layers(torch), process_group=r.groups[name]) for name in BACKENDS + ("nothing",)}
    for model in models.values():
        step(model, x)()
    first, second = (next(models[name].parameters()).grad for name in BACKENDS)
    assert torch.allclose(first, second, atol=1e-6)
    times = r.measure({name: step(model, x) for name, model in models.items()} | {"local": step(plain, x),
                      "all_reduce": lambda: dist.all_reduce(flat, group=r.groups["weft"])}, 2.5)
    times["allowed"] = times["nothing"] + 1.1 * times["all_reduce"]
    r.report("DDP, 24 x Linear(512), 64 rows", times, ("at most nothing + 1.1 x all_reduce", times["weft"] <= times["allowed"]),
             ("weft", "gloo", "nothing", "all_reduce", "allowed", "local"))


def fsdp(r):
    torch = r.torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    x = torch.randn(64, 512)
    plain, models = layers(torch), {}
    for name in BACKENDS + ("nothing",):
        model = layers(torch)
        mesh = DeviceMesh.from_group(r.groups[name], "cpu")
        for layer in model:
            fully_shard(layer, mesh=mesh)
        models[name] = fully_shard(model, mesh=mesh)
    times = r.measure({name: step(model, x) for name, model in models.items()} | {"local": step(plain, x)}, 2.5)
    r.report("FSDP2, 24 x Linear(512), 64 rows", times, ("at most 2 x local", times["weft"] <= 2 * times["local"]),
             ("weft", "gloo", "nothing", "local"))


def tp(r):
    torch = r.torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    torch.manual_seed(1)
    x = torch.randn(512, 1024)  # the same on all ranks

    def mlp():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024))
    plain, models = mlp(), {}
    for name in BACKENDS:
        mesh = DeviceMesh.from_group(r.groups[name], "cpu")
        models[name] = parallelize_module(mlp(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        assert torch.allclose(models[name](x), plain(x), atol=1e-4)
    times = r.measure({name: step(model, x) for name, model in models.items()} | {"local": step(plain, x)}, 2.5)
    r.report("tensor-parallel MLP, 512 rows", times, None, ("weft", "gloo", "local"))


PARTS = {"collectives": collectives, "overhead": overhead, "ddp": ddp, "fsdp": fsdp, "tp": tp}
BEGIN, END = "<!-- results of bench/torch/backends.py -->\n", "<!-- end of these results -->\n"


def said(*command):
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=os.path.dirname(os.path.abspath(__file__))).stdout.strip()


def circumstances(ranks, part):
    """The machine, the commit and the command of a measured part."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        model = re.search(r"^model name\s*: (.*)$", file.read(), re.M)
    import torch
    return {"commit": said("git", "rev-parse", "--short", "HEAD"), "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__.partition("+")[0],
            "processor": f"{model[1] if model else platform.machine()}, {len(os.sched_getaffinity(0))} cores",
            "command": f"bench/torch/backends.py -n {ranks} {part}", "load": LOAD}


def cell(microseconds):
    return f"{microseconds:.1f}" if microseconds < 100 else f"{microseconds:,.0f}".replace(",", " ")


def table(results):
    """The results of a --json file as Markdown."""
    lines = ["| microseconds | weft | Gloo | | asked for |", "|---|---|---|---|---|"]
    for part in filter(results.get, PARTS):
        for row in results[part]["rows"]:
            times, asked = row["times"], row["target"]
            more = ", ".join(f"{name} {cell(value)}" for name, value in times.items() if name not in ("weft", "gloo", "ratio"))
            if "ratio" in times:
                more = f"{times['ratio']:.1f} x" + (f", {more}" if more else "")
            lines.append(f"| {row['case']} | {cell(times['weft'])} | {cell(times['gloo']) if 'gloo' in times else ''} | {more} | "
                         f"{'' if asked is None else asked[0] + (': reached' if asked[1] else ': **missed**')} |")
    lines.append("")
    for part in filter(results.get, PARTS):
        about = results[part]["measured"]
        lines.append(f"- `{about['command']}`: commit {about['commit']}, {about['date']}, torch {about['torch']}, {about['processor']}"
                     + (f", load before {about['load']}" if "load" in about else ""))
    return "\n".join(lines) + "\n"


def write(results, page):
    with open(page, encoding="utf-8") as file:
        text = file.read()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"{page} has no lines {BEGIN.strip()} and {END.strip()}; expected them around the table")
    with open(page, "w", encoding="utf-8") as file:
        file.write(before + begin + "\n" + table(results) + "\n" + end + after)


def kept(path):
    if path is None or not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument("--json", help="file of results, to which these are added")
    parser.add_argument("--write", metavar="PAGE", help="page into which the table of --json goes")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []])
    given = parser.parse_args()
    if not given.parts and not given.write or given.write and not given.json:
        parser.error("expected parts to run, or --write with --json")
    if given.rank is None:
        if given.parts:
            with tempfile.TemporaryDirectory() as folder:
                ranks = [subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--rank", str(rank), "--store", folder + "/store"],
                                          env={**os.environ, "OMP_NUM_THREADS": "1"}) for rank in range(given.ranks)]
                if failed := max(process.wait() for process in ranks):
                    sys.exit(failed)
        if given.write:
            write(kept(given.json), given.write)
        return
    ranks = Ranks(given.rank, given.ranks, given.store)
    for part in given.parts:
        ranks.rows = []
        PARTS[part](ranks)
        if given.json and given.rank == 0:
            results = kept(given.json) | {part: {"measured": circumstances(given.ranks, part), "rows": ranks.rows}}
            with open(given.json, "w", encoding="utf-8") as file:
                json.dump(results, file, indent=1)
    ranks.dist.barrier()
    ranks.dist.destroy_process_group()


if __name__ == "__main__":
    main()
