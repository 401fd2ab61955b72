#!/usr/bin/env python3
"""Prints the output of failed tests from ctest logs: `report_failures.py NAME=LOG...`, at most 60 lines a
test.

LOG is a build's Testing/Temporary/LastTest.log, which holds the whole output of each test.
"""
import re

from report_skips import START, in_logs

KEPT = 60
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
    """The lines that say what failed, if there are more than KEPT lines; then only the first ones."""
    lines = [line for line in output if line.strip() and not re.match(r"^\[( RUN  |       OK |-+|=+)", line)]
    if len(lines) <= KEPT:
        return lines
    telling = [i for i, line in enumerate(lines) if TELLING.search(line)]
    near = sorted({j for i in telling for j in range(i - 1, i + 6) if 0 <= j < len(lines)})
    chosen = [lines[i] for i in near] if near else lines
    return chosen[:KEPT] + [f"... and {len(lines) - KEPT} lines more"]


def main():
    for build, found in in_logs(failed):
        for test, output in found:
            print(f"  {build}: {test} failed:")
            for line in shortened(output):
                print(f"    {line[:400]}")


if __name__ == "__main__":
    main()
