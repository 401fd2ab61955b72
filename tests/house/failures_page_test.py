#!/usr/bin/env python3
"""Runs each command that docs/failures.md shows and compares what it prints.

    failures_page_test.py PAGE BIN [--write] [--without NAME ...]

A block of the page that begins with "$ " is a command and its output. Numbers of processes, times and the
order of lines are not compared, since ranks print at the same time. The output may have warnings that the
page does not show, because a slow machine waits longer. --write puts the output into the page. Blocks whose
command needs a NAME of --without are left out and listed by name.
"""
import argparse
import os
import pathlib
import re
import subprocess
import sys

BLOCK = re.compile(r"```\n\$ ([^\n]*)\n(.*?)```", re.S)
PAIR = re.compile(r"rank (\d+) called ([^\]]*) \[call (\d+)\], rank (\d+) ([^\]]*) \[call (\d+)\]")
# A rank that is a little later than the others is still in its last call, or has not answered yet.
LAST = re.compile(r"last calls: rank 1 (finished|called) [^;]*\[call 2\]; .*\[call 3\](?= \[group)")


def plain(line):
    """The line without the parts that differ from run to run."""
    def in_order(m):
        a, b = (m[1], m[2], m[3]), (m[4], m[5], m[6])
        return "ranks called " + ", ".join(f"{r}: {what} [{call}]" for r, what, call in sorted([a, b]))

    line = PAIR.sub(in_order, line.rstrip())
    line = re.sub(r"(?i)\b(pid|process) \d+", r"\1 N", line)
    line = re.sub(r"within \d[\d.]* s\b", "within T s", line)
    line = LAST.sub(" LAST CALLS", line)
    return re.sub(r"\b(on node|RUNNING AT) \S+", r"\1 HOST", line)


def run(command, bin_folder):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("WEFT_", "OMPI_", "PMI_", "SLURM_"))}
    environment["PATH"] = f"{bin_folder}:{environment['PATH']}"
    environment["OMPI_ALLOW_RUN_AS_ROOT"] = environment["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    environment["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
    # a pipe's status is that of the job, not that of the program that reads it
    done = subprocess.run(["bash", "-c", command + "\nexit ${PIPESTATUS[0]}"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          stdin=subprocess.DEVNULL, timeout=60, check=False)
    text = done.stdout.decode().replace("\r", "")
    return [line for line in text.splitlines() if line.strip(" =-")], done.returncode


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("page", type=pathlib.Path)
    arguments.add_argument("bin", type=pathlib.Path)
    arguments.add_argument("--write", action="store_true")
    arguments.add_argument("--without", nargs="*", default=[])
    a = arguments.parse_args()
    page = a.page.read_text()
    failed = 0
    blocks = list(BLOCK.finditer(page))
    if not blocks:
        sys.exit("the page shows no command")
    for block in blocks:
        command, shown = block[1], block[2]
        missing = [name for name in a.without if name in command]
        if missing:
            print(f"skipped, without {missing[0]}: {command}")
            continue
        lines, status = run(command, a.bin.resolve())
        lines.append(f"(exit status {status})")
        if a.write:
            page = page.replace(block[0], f"```\n$ {command}\n" + "".join(line + "\n" for line in lines) + "```")
            continue
        expected, printed = ([plain(line) for line in some] for some in (shown.splitlines(), lines))
        absent = [line for line in expected if line not in printed]
        new = [line for line in printed if line not in expected and "weft warning: " not in line]
        print(f"{'FAILED' if absent or new else 'ok'}: {command}")
        for line in absent:
            print(f"  not printed: {line}")
        for line in new:
            print(f"  not on the page: {line}")
        failed += bool(absent or new)
    if a.write:
        a.page.write_text(page)
    sys.exit(1 if failed else 0)


main()
