#!/usr/bin/env python3
"""Measures torch.distributed over Gloo with the flags, checks, samples and rows of collectives_bench
(bench/cases.hpp, bench/measure.hpp). With --library deepspeed it measures the shared-memory all_reduce of
DeepSpeed's CPU inference, which torch builds from the installed package's sources.

    torch_collectives.py --ranks 2 --op all_reduce --rows
"""
import argparse
import glob
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import socket
import sys
import time

OPS = ["all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "ping_pong", "one_way"]
WINDOW = 16
BLOCKS = ("all_gather", "reduce_scatter", "all_to_all")


def words(text):
    return text.split(",")


def rank_flags(doc):
    """A parser with the flags that all programs of ranks here have."""
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--bind", choices=["cores", "none"], default="cores")
    p.add_argument("--seconds", type=float, default=0.25)
    p.add_argument("--turns", default="")
    p.add_argument("--rows", action="store_true")
    return p


def parse_flags(p, known):
    """Parses the flags; ends the program if a list has a word that the flag does not know."""
    a = p.parse_args()
    for flag, expected in known.items():
        for word in getattr(a, flag):
            if word not in expected:
                p.error(f"--{flag} \"{word}\"; expected one of {', '.join(expected)}")
    return a


def flags():
    p = rank_flags(__doc__)
    p.add_argument("--library", choices=["gloo", "deepspeed"], default="gloo")
    p.add_argument("--op", type=words, default=["all_reduce"])
    p.add_argument("--dtype", type=words, default=["f32"])
    p.add_argument("--bytes", type=lambda t: [int(w) for w in t.split(",")], default=[8 * 4**k for k in range(13)])
    p.add_argument("--place", type=words, default=None)
    p.add_argument("--buffers", type=words, default=["hot"])
    p.add_argument("--memory", type=words, default=["foreign"])
    return parse_flags(p, {"op": OPS})


class DeepSpeed:
    """DeepSpeed's shared-memory all_reduce: `build` once, before the ranks start; then `start` in each."""

    DTYPES = ("f32", "f16", "bf16")

    @staticmethod
    def build(ranks, port):
        from torch.utils import cpp_extension

        package = importlib.util.find_spec("deepspeed")
        if package is None:
            sys.exit("Error: no deepspeed; pip install deepspeed, and name its python by --python")
        comm = package.submodule_search_locations[0] + "/ops/csrc/cpu/comm/"
        os.environ.update(LOCAL_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        return cpp_extension.load(name="deepspeed_shm_comm", sources=[comm + "shm_interface.cpp", comm + "shm.cpp"],
                                  extra_cflags=["-O2", "-fopenmp"])

    @staticmethod
    def start(library, dist, rank, ranks):
        library.initialize(ranks, rank)
        dist.barrier()
        if rank == 0:  # all ranks have mapped the files; DeepSpeed would leave them behind
            for segment in glob.glob(f"/dev/shm/deepspeed_allreduce_buffer_*_{os.environ['MASTER_PORT']}_*"):
                os.unlink(segment)


class Case:
    """One rank's tensors of a case, in and out, with the call and the expected result."""

    def __init__(self, torch, dist, all_reduce, op, dtype, place, size, rank, ranks):
        self.torch, self.dist, self.op, self.rank, self.n = torch, dist, op, rank, ranks
        self.all_reduce = all_reduce
        self.type = dtype
        item = torch.empty(0, dtype=dtype).element_size()
        parts = ranks if op in BLOCKS else 1
        self.block = max(1, -(-size // (item * parts)))
        self.ins = self.block * (ranks if op in ("reduce_scatter", "all_to_all") else 1)
        self.outs = self.block * (ranks if op in ("all_gather", "all_to_all") else 1)
        self.moved = max(self.ins, self.outs) * item
        self.x = torch.empty(self.ins, dtype=dtype)
        self.y = self.x if op in ("all_reduce", "reduce", "broadcast") else torch.empty(self.outs, dtype=dtype)
        self.small = torch.zeros(1, dtype=torch.int32)

    def value(self, rank, first, count):
        i = self.torch.arange(first, first + count, dtype=self.torch.int32)
        return (i * 7 + (i >> 6) + rank * 5).bitwise_and_(15)

    def reset(self):
        who = self.rank + 1 if self.op == "broadcast" and self.rank else self.rank
        if self.y is not self.x:
            self.y.fill_(99)
        self.x.copy_(self.value(who, 0, self.ins))

    def wrong(self):
        r, b, n = self.rank, self.block, self.n
        if (self.op == "reduce" and r) or (self.op == "one_way" and r != 1):
            return ""
        if self.op in ("all_reduce", "reduce"):
            want = sum(self.value(k, 0, b) for k in range(n))
        elif self.op == "reduce_scatter":
            want = sum(self.value(k, r * b, b) for k in range(n))
        elif self.op == "all_gather":
            want = self.torch.cat([self.value(k, 0, b) for k in range(n)])
        elif self.op == "all_to_all":
            want = self.torch.cat([self.value(k, r * b, b) for k in range(n)])
        else:
            want = self.value(1 - r if self.op == "ping_pong" else 0, 0, b)
        bad = (self.y != want.to(self.type)).nonzero()
        if len(bad) == 0:
            return ""
        j = int(bad[0])
        return f"rank {r}: element {j} is {float(self.y[j])}; expected {int(want[j])}"

    def run(self):
        d, r = self.dist, self.rank
        if self.op == "all_reduce":
            self.all_reduce(self.x)
        elif self.op == "reduce":
            d.reduce(self.x, 0)
        elif self.op == "broadcast":
            d.broadcast(self.x, 0)
        elif self.op == "all_gather":
            d.all_gather_into_tensor(self.y, self.x)
        elif self.op == "reduce_scatter":
            d.reduce_scatter_tensor(self.y, self.x)
        elif self.op == "all_to_all":
            d.all_to_all_single(self.y, self.x)
        elif self.op == "ping_pong":
            if r == 0:
                d.send(self.x, 1)
                d.recv(self.y, 1)
            elif r == 1:
                d.recv(self.y, 0)
                d.send(self.x, 0)
        elif r == 0:
            for w in [d.isend(self.x, 1) for _ in range(WINDOW)]:
                w.wait()
            d.recv(self.small, 1)
        elif r == 1:
            for w in [d.irecv(self.y, 0) for _ in range(WINDOW)]:
                w.wait()
            d.send(self.small, 0)


def check(case):
    case.reset()
    case.run()
    problem = case.wrong()
    if problem:
        sys.exit(f"torch: {case.op} of {case.moved} bytes: {problem}")


def measure(case, agree, seconds):
    """(median, 99th percentile, samples) in us: bench/measure.cpp in Python."""
    check(case)
    block = 1
    while block:
        start = time.perf_counter()
        for _ in range(block):
            case.run()
        took = time.perf_counter() - start
        us = took * 1e6 / block
        block = agree(0 if took >= seconds / 5 else 2 * block)
    runs = agree(int(min(max(10 / us, 1), 20)))
    batch = agree(int(min(max(seconds * 1e6 / 4 / (us * runs), 4), 16)))
    samples = []
    begin = time.perf_counter()
    more = 1
    while more:
        case.run()
        for _ in range(batch):
            start = time.perf_counter()
            for _ in range(runs):
                case.run()
            samples.append((time.perf_counter() - start) * 1e6 / runs)
        more = agree(int(time.perf_counter() - begin < seconds or len(samples) < 8))
    check(case)
    samples.sort()
    return samples[len(samples) // 2], samples[len(samples) * 99 // 100], len(samples)


def print_row(row):
    print(json.dumps(row), flush=True)


def body(rank, a, port, library):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=a.ranks)
    dist.barrier()
    who, settings, all_reduce = "torch", f"torch {torch.__version__}", dist.all_reduce
    if library:
        who, settings = "deepspeed", f"DeepSpeed {importlib.metadata.version('deepspeed')}, {settings}"
        DeepSpeed.start(library, dist, rank, a.ranks)
        all_reduce = torch.ops.deepspeed.inference_all_reduce_
    if rank == 0:
        print_row({"who": who, "settings": settings})
    types = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i8": torch.int8,
             "i16": torch.int16, "i32": torch.int32, "i64": torch.int64, "u8": torch.uint8}
    word = torch.zeros(1, dtype=torch.int64)

    def agree(mine):
        word[0] = mine
        dist.broadcast(word, 0)
        return int(word[0])

    turns = open(a.turns, "rb", buffering=0) if a.turns else None
    take = lambda: turns is None or len(turns.read(1)) == 1
    cases = [(op, dtype, buffers, size) for op in a.op for dtype in a.dtype for buffers in a.buffers for size in a.bytes]
    for op, dtype, buffers, size in cases:
        if not take():
            break
        usual = "in" if op in ("all_reduce", "reduce", "broadcast") else "out"
        row = {"op": op, "dtype": dtype, "memory": "foreign", "place": usual, "buffers": buffers, "ranks": a.ranks, "bytes": size}
        why = ""
        if library and op != "all_reduce":
            why = f"DeepSpeed has no {op} in shared memory"
        elif library and dtype not in DeepSpeed.DTYPES:
            why = f"DeepSpeed has no {dtype} in shared memory"
        elif dtype not in types:
            why = f"torch over Gloo has no {dtype}"
        elif buffers != "hot":
            why = "rotating buffers are not measured"
        elif a.place and a.place != [usual]:
            why = f"{op} is {usual} place only"
        if why:
            if rank == 0:
                print_row({**row, "unsupported": why})
            continue
        case = Case(torch, dist, all_reduce, op, types[dtype], usual, size, rank, a.ranks)
        median, p99, samples = measure(case, agree, a.seconds)
        part = 2 if op == "ping_pong" else WINDOW if op == "one_way" else 1
        median, p99 = median / part, p99 / part
        n = a.ranks
        factor = 2 * (n - 1) / n if op == "all_reduce" else (n - 1) / n if op in BLOCKS else 1
        rate = case.moved / median * 1e-3
        if rank == 0:
            print_row({**row, "median_us": median, "p99_us": p99, "alg_GBs": rate, "bus_GBs": rate * factor, "samples": samples})
    else:
        take()
    dist.destroy_process_group()


def die_with(parent):
    """Makes ranks end when the process that started them ends."""
    import ctypes
    import signal

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def rank_main(rank, a, port, parent, library):
    die_with(parent)
    cores = sorted(os.sched_getaffinity(0))
    if a.bind == "cores" and len(cores) >= a.ranks:
        os.sched_setaffinity(0, {cores[rank]})
    body(rank, a, port, library)


def main():
    a = flags()
    try:
        import torch.distributed  # noqa: F401  for a clear error before anything is started
    except ImportError as e:
        sys.exit(f"Error: {e}; pip install torch, and name its python by --python")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    library = DeepSpeed.build(a.ranks, port) if a.library == "deepspeed" else None
    start = multiprocessing.get_context("fork")
    ranks = [start.Process(target=rank_main, args=(r, a, port, os.getpid(), library)) for r in range(a.ranks)]
    for r in ranks:
        r.start()
    for r in ranks:
        r.join()
    sys.exit(max(abs(r.exitcode) for r in ranks))


if __name__ == "__main__":
    main()
