#!/usr/bin/env python3
"""Runs the distributed tests that torch's wheel carries
(torch.testing._internal.distributed.distributed_test) over a backend, and writes what became of each.

    torch_suite.py all BACKEND RESULTS.json [--seconds N]     every test; what RESULTS has already is left out; N: for this run (exit 3: there is more)
    torch_suite.py run BACKEND RESULTS.json [--only PATTERN] [--again OUTCOME] [--as NAME] [--ranks N]
    torch_suite.py table WEFT.json GLOO.json                  docs/torch_suite.md, on standard output

The suite asks for backends by name: `if BACKEND != "gloo"`. For weft it gets a name that is weft's to
torch and equal to "gloo" for the suite, and weft stands where gloo does in the suite's own tables
(DistTestCases): so every test that runs over gloo runs over weft. `all` then runs what was skipped for too
few ranks with more of them and, over weft, all_to_all as "mpi", for which alone the suite has these tests
on the CPU. Ranks are forked.
"""
import argparse
import contextlib
import io
import json
import os
import pathlib
import re
import sys
import time
import unittest

RANKS = 4
# "name: why", of tests that pass over gloo and not over weft.
REASONS = pathlib.Path(__file__).with_name("torch_suite_reasons.txt")


class Name(str):
    """"weft", which the suite takes for another backend too."""
    taken_for = "gloo"

    def __eq__(self, other):
        return str.__eq__(self, other) or other == Name.taken_for

    def __ne__(self, other):
        return not self == other

    def __hash__(self):
        return hash(Name.taken_for)


def load(backend, taken_for, ranks):
    """The test case of the suite, over this backend."""
    Name.taken_for = taken_for
    os.environ.update(BACKEND=backend, WORLD_SIZE=str(ranks), OMP_NUM_THREADS="1", DISTRIBUTED_TESTS_DEFAULT_TIMEOUT="90", MASTER_ADDR="127.0.0.1")
    import tempfile
    os.environ["TEMP_DIR"] = tempfile.mkdtemp()
    for folder in ("barrier", "test_dir", "init_dir"):
        os.mkdir(os.path.join(os.environ["TEMP_DIR"], folder))
    import torch
    torch.set_num_threads(1)
    import torch.distributed as dist
    from torch.testing._internal import common_distributed
    if backend != "gloo":
        import weft.torch  # noqa: F401
        for where in (*common_distributed.DistTestCases.skip_collective.values(), *common_distributed.DistTestCases.backend_feature.values()):
            if "gloo" in where:
                where.add(backend)
        common_distributed.DistTestCases.backend_feature["plugin"].add(backend)

        class Environment(dict):
            def __getitem__(self, key):
                return Name(dict.__getitem__(self, key)) if key == "BACKEND" else dict.__getitem__(self, key)
        kept, os.environ = os.environ, Environment(os.environ)
        try:
            from torch.testing._internal.distributed import distributed_test
        finally:
            os.environ = kept
    from torch.testing._internal.distributed import distributed_test
    if backend != "gloo":  # whose events of torch's profiler the tests look for
        distributed_test.PROFILING_SUPPORTED_BACKENDS.append(backend)
        distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append(backend)

    class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)
            torch.backends.cudnn.flags(enabled=True, allow_tf32=False).__enter__()
    Suite.__module__ = __name__
    globals()["Suite"] = Suite
    assert dist.is_gloo_available()
    return Suite


def run_one(case, name):
    """(outcome, why, seconds)."""
    began, said = time.monotonic(), io.StringIO()
    result = unittest.TestResult()
    with contextlib.redirect_stdout(said) if not os.environ.get("SUITE_SAYS") else contextlib.nullcontext():
        unittest.TestSuite([case(name)]).run(result)
    seconds = round(time.monotonic() - began, 1)
    if result.skipped:
        return "skipped", result.skipped[0][1], seconds
    if result.failures or result.errors:
        text = (result.failures + result.errors)[0][1].strip()
        lines = [line for line in text.splitlines() if re.match(r"^(\w+\.)*\w*(Error|Exception|Timeout)\w*: ", line)]
        return "failed", (lines[-1] if lines else text.splitlines()[-1])[:300] + "\n" + text[-3000:], seconds
    return "passed", "", seconds


def run_all(backend, file, limit):
    """Each part in a process of its own: the suite reads the environment once."""
    until = time.monotonic() + limit
    parts = [[], ["--ranks", "8", "--again", "skipped", "--because", "small world size"]]
    if backend != "gloo":
        parts.append(["--as", "mpi", "--ranks", "8", "--only", "all_to_all", "--again", "skipped", "--because", "Only MPI"])
    for part in parts:
        left = max(1.0, until - time.monotonic())
        status = os.spawnv(os.P_WAIT, sys.executable, [sys.executable, __file__, "run", backend, file, "--seconds", str(left), *part])
        if status:
            return status
    return 0


def run(backend, file, only, again, because, taken_for, ranks, limit):
    path = pathlib.Path(file)
    results = json.loads(path.read_text()) if path.exists() else {}
    case = load(backend, taken_for, ranks)
    until = time.monotonic() + limit
    for name in unittest.TestLoader().getTestCaseNames(case):
        known = results.get(name)
        if not re.search(only, name) or (known and (known[0] != again or because not in known[1])) or (again and not known):
            continue
        if time.monotonic() > until:
            print("more to do")
            return 3
        results[name] = run_one(case, name)
        print(f"{results[name][0]:8}{results[name][2]:6} {name}  {results[name][1].splitlines()[0] if results[name][1] else ''}", flush=True)
        path.write_text(json.dumps(results, indent=1))
    return 0


def table(weft_file, gloo_file):
    weft, gloo = (json.loads(pathlib.Path(f).read_text()) for f in (weft_file, gloo_file))
    reasons = dict(line.split(": ", 1) for line in REASONS.read_text(encoding="utf-8").splitlines() if ": " in line) if REASONS.exists() else {}
    import torch
    count = {outcome: [sum(r[0] == outcome for r in results.values()) for results in (weft, gloo)] for outcome in ("passed", "failed", "skipped")}
    print(f"""# torch's own distributed tests over weft

Every test of `torch.testing._internal.distributed.distributed_test` of torch {torch.__version__.partition('+')[0]} with {RANKS} ranks on the CPU, over weft and over Gloo, as
`tests/python/torch_suite.py` runs them: tests that are for gloo run over weft, too. A skip is the suite's own (most want GPUs). Tests
that look for events of torch's profiler (`gloo:all_reduce`) look for weft's.

| | weft | Gloo |
|---|---|---|""")
    for outcome, (first, second) in count.items():
        print(f"| {outcome} | {first} | {second} |")
    print("\n| test | weft | Gloo | why |\n|---|---|---|---|")
    missing = []
    for name in sorted(set(weft) | set(gloo)):
        mine, other = weft.get(name, ["not run", ""]), gloo.get(name, ["not run", ""])
        why = reasons.get(name, "")
        if not why and mine[0] == "failed":
            if other[0] == "failed":
                why = "fails over both: " + mine[1].splitlines()[0]
            else:
                missing.append(name)
        elif not why and mine[0] == "skipped":
            why = mine[1].splitlines()[0]
        why = why[:160].replace("|", "/").replace("<", "&lt;")
        print(f"| {name} | {mine[0]} | {other[0]} | {why} |")
    if missing:
        print("without a reason: " + ", ".join(missing), file=sys.stderr)
        return 1
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    every = commands.add_parser("all")
    begin = commands.add_parser("run")
    for command in (every, begin):
        command.add_argument("backend")
        command.add_argument("file")
        command.add_argument("--seconds", type=float, default=1e9)
    begin.add_argument("--only", default="")
    begin.add_argument("--again", default=None)
    begin.add_argument("--because", default="")
    begin.add_argument("--as", dest="taken_for", default="gloo")
    begin.add_argument("--ranks", type=int, default=RANKS)
    show = commands.add_parser("table")
    show.add_argument("weft")
    show.add_argument("gloo")
    given = parser.parse_args()
    if given.command == "table":
        return table(given.weft, given.gloo)
    if given.command == "all":
        return run_all(given.backend, given.file, given.seconds)
    return run(given.backend, given.file, given.only, given.again, given.because, given.taken_for, given.ranks, given.seconds)


if __name__ == "__main__":
    sys.exit(main())
