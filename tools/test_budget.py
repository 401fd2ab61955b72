#!/usr/bin/env python3
"""Says which tests took longest, and which tests exceeded their budget.

    tools/test_budget.py [--strict] PRESET=LOG ...     LOG: a LastTest.log of ctest
    tools/test_budget.py --steps [--limit S] "SECONDS NAME" ...
    tools/test_budget.py --self-test

The second form prints the steps of a run with their sum, and a warning if the sum is above the limit: it
depends on the machine.

A test may take BUDGET_S, or its value in OWN_BUDGET_S. With --strict (tools/test.sh --full) a test that takes
more than twice its budget is an error. The machine may be busy, but not forever. Exit status 1 if there is
any such test.
"""
import pathlib
import re
import sys
import tempfile

SHOWN = 5       # the longest of each preset
BUDGET_S = 30.  # of one test
SANITIZED = 3.  # so many times as long under a sanitizer
# Tests that do much, or that wait for many deadlines one after the other.
OWN_BUDGET_S = {
    "tools/check": 150, "backends/conformance": 60, "backends/conformance_gloo": 60, "backends/hostile": 200, "backends/nccl_gpu": 200,
    "house/install": 60, "group/watch": 45, "models/parallel_golden": 60, "nn/kernels": 60,
    "tools/elastic": 60,
    "python/ends": 60, "python/jax": 60, "python/torch": 100, "python/torch_examples": 150, "python/torch_training": 100, "python/wheel": 400,
}
VERSION = re.compile(r"_\d+\.\d+$")  # the version of a package with which a test runs
TEST = re.compile(r"^\d+/\d+ Test: (\S+)$")
TIME = re.compile(r"^Test time = +([\d.]+) sec")


def times(log):
    """(seconds, test) of each test of a LastTest.log."""
    name, found = None, []
    for line in pathlib.Path(log).read_text(encoding="utf-8", errors="replace").splitlines():
        if match := TEST.match(line):
            name = match.group(1)
        elif (match := TIME.match(line)) and name:
            found.append((float(match.group(1)), name))
            name = None
    return found


def report(preset, found):
    """The lines to print, and the tests that took more than twice their budget."""
    factor = 1. if preset == "release" else SANITIZED
    lines = [f"  {preset}: {len(found)} tests, {sum(s for s, _ in found):.0f} s one after the other; the longest:"]
    late = []
    for seconds, name in sorted(found, reverse=True):
        budget = OWN_BUDGET_S.get(VERSION.sub("", name), BUDGET_S) * factor
        over = "" if seconds <= budget else f", of {budget:.0f} s that it may take"
        if len(lines) <= SHOWN or over:
            lines.append(f"    {seconds:6.1f} s  {name}{over}")
        if seconds > 2 * budget:
            late.append(name)
    return lines, late


def step_table(steps, limit):
    """The lines to print for ["seconds name"], longest first, and for their sum."""
    rows = sorted(((int(seconds), name) for seconds, _, name in (step.partition(" ") for step in steps)), key=lambda row: -row[0])
    total = sum(seconds for seconds, _ in rows)
    lines = [f"  {seconds:6d}  {name}" for seconds, name in rows] + [f"  {total:6d}  in all" + (f", of {limit} s" if limit else "")]
    if limit and total > limit:
        lines.append(f"  WARNING: {total - limit} s above what this tier may take on two cores (nothing fails for it)")
    return lines


def self_test():
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "LastTest.log"
        log.write_text("1/3 Test: a/fast\nTest time =   0.25 sec\n2/3 Test: a/slow\noutput\nTest time =  61.00 sec\n"
                       "3/3 Test: tools/check\nTest time =  79.00 sec\n")
        found = times(log)
    assert found == [(0.25, "a/fast"), (61., "a/slow"), (79., "tools/check")], found
    lines, late = report("release", found)
    assert late == ["a/slow"] and lines[0].startswith("  release: 3 tests, 140 s"), (lines, late)
    assert lines[1] == "      79.0 s  tools/check" and lines[2] == "      61.0 s  a/slow, of 30 s that it may take", lines
    assert report("asan", found)[1] == []
    assert step_table(["20 layers", "300 release (build 200 s, then 100 s)"], 0) == [
        "     300  release (build 200 s, then 100 s)", "      20  layers", "     320  in all"]
    assert step_table(["20 layers"], 20)[-1] == "      20  in all, of 20 s"
    assert step_table(["21 layers"], 20)[-1] == "  WARNING: 1 s above what this tier may take on two cores (nothing fails for it)"
    print("test_budget: reads ctest's log, finds what is slow, adds up steps")


def main():
    arguments = sys.argv[1:]
    if arguments == ["--self-test"]:
        self_test()
        return 0
    if arguments[:1] == ["--steps"]:
        limited = arguments[1:2] == ["--limit"]
        print("\n".join(step_table(arguments[3 if limited else 1:], int(arguments[2]) if limited else 0)))
        return 0
    strict = "--strict" in arguments
    wrong = False
    for argument in arguments:
        preset, _, log = argument.partition("=")
        if not log or not pathlib.Path(log).exists():
            continue
        lines, late = report(preset, times(log))
        print("\n".join(lines))
        if strict and late:
            wrong = True
            print(f"  FAILED: more than twice its time: {', '.join(late)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
