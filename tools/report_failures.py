#!/usr/bin/env python3
"""Prints what failed tests printed, from ctest logs: `report_failures.py NAME=LOG...`.

It prints at most 24 lines a test: those near a failed check, if there are any. The report has to be short,
because often only the end of a run's log is kept.

LOG is a build's Testing/Temporary/LastTest.log, which holds the whole output of each test.
"""
import re

from report_skips import START, in_logs

KEPT = 24
NOISE = re.compile(
    r"^\[( RUN  |       OK |-+|=+)|^-+$|^Test time =|^\".*\" (start|end) time:|^\".*\" time elapsed:|^<end of"
)
TELLING = re.compile(r"Failure$|FAILED|ERROR|WARNING: ThreadSanitizer|rror:|xpected|ctual|Which is|Value of")


def failed(lines):
    """(ctest's name, its lines) of each test whose log ends in "Test Failed."."""
    test, output = "", []
    for line in lines:
        line = line.rstrip("\n")
        if match := START.match(line):
            test, output = match.group(1), []
        elif line.startswith("Test Failed.") or line.startswith("Test timed out"):
            yield test, output
        else:
            output.append(line)


def shortened(output):
    """The lines near those that say what failed. All lines, if no line says so. At most the first KEPT."""
    lines = [line for line in output if line.strip() and not NOISE.match(line)]
    telling = [i for i, line in enumerate(lines) if TELLING.search(line)]
    near = sorted({j for i in telling for j in range(i - 1, i + 6) if 0 <= j < len(lines)})
    chosen = [lines[i] for i in near] if near else lines
    more = [f"... and {len(lines) - KEPT} lines more"] if len(chosen) > KEPT else []
    return chosen[:KEPT] + more


def main():
    for build, found in in_logs(failed):
        for test, output in found:
            print(f"  {build}: {test} failed:")
            for line in shortened(output):
                print(f"    {line[:400]}")


if __name__ == "__main__":
    main()
