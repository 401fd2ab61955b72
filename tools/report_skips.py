#!/usr/bin/env python3
"""Prints which tests were skipped and why, from ctest logs: `report_skips.py NAME=LOG...`, one line per
reason.

LOG is a build's Testing/Temporary/LastTest.log, which holds the whole output of each test. GoogleTest
prints a skip as "file:line: Skipped", the reason, "[ SKIPPED ] Suite.Name (0 ms)".
"""
import collections
import re
import sys

START = re.compile(r"^\d+/\d+ Test: (.*)$")
SKIPPED = re.compile(r"^\[  SKIPPED \] (\S+) \(\d+ ms\)$")


def skips(lines):
    """(ctest's name, GoogleTest's name, reason) of each skip."""
    test, reason, in_reason = "", [], False
    for line in lines:
        line = line.rstrip("\n")
        if match := START.match(line):
            test, in_reason = match.group(1), False
        elif re.search(r":\d+: Skipped$", line):
            reason, in_reason = [], True
        elif match := SKIPPED.match(line):
            yield test, match.group(1), " ".join(reason) or "no reason given"
            in_reason = False
        elif in_reason and line.strip():
            reason.append(line.strip())


def in_logs(find):
    """(build, list(find(lines))) of each NAME=LOG of the command line whose log exists."""
    for argument in sys.argv[1:]:
        build, path = argument.split("=", 1)
        try:
            with open(path, encoding="utf-8", errors="replace") as log:
                found = list(find(log))
        except FileNotFoundError:
            continue
        yield build, found


def main():
    for build, found in in_logs(skips):
        by_reason = collections.defaultdict(list)
        for test, name, reason in found:
            by_reason[(test, reason)].append(name)
        for (test, reason), names in by_reason.items():
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            print(f"  {build}: {test}: {shown}: {reason}")


if __name__ == "__main__":
    main()
