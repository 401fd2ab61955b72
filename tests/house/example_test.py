#!/usr/bin/env python3
"""The programs of a page: runs its commands and compares their output with what the page shows.

    example_test.py PAGE.md FOLDER_OF_PROGRAMS
    example_test.py --extract PAGE.md FOLDER     writes the page's programs there and prints their names

A program is a block of code in cpp whose first line is `// name.cpp`. Blocks without a language come in
pairs: a command, and its output. The prefix that `weft run` puts before each line is removed. If several
ranks print, lines may come in any order.
"""
import pathlib
import re
import subprocess
import sys

PROGRAM = re.compile(r"^```cpp\n// (\w+)\.cpp\n(.*?)^```", re.MULTILINE | re.DOTALL)
PREFIX = re.compile(r"^\[?(\d+)\]?[:|]? ?", re.MULTILINE)


def extract(page, folder):
    programs = PROGRAM.findall(page.read_text())
    if not programs:
        sys.exit(f"{page}: no program")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in programs:
        file = folder / f"{name}.cpp"
        if not file.exists() or file.read_text() != text:  # otherwise nothing is compiled again
            file.write_text(text)
    print(";".join(name for name, _ in programs), end="")


def run(page, programs):
    # A block with a language is skipped as a whole, so its end is not taken for the start of a block.
    blocks = [text for language, text in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL) if not language]
    if len(blocks) < 2 or len(blocks) % 2:
        sys.exit(f"{page}: {len(blocks)} blocks of code without a language; expected pairs of a command and what it prints")
    for command, shown in zip(blocks[::2], blocks[1::2]):
        words = command.split()
        words = [str(programs / w.removeprefix("./")) if w == "weft" or w.startswith("./") else w for w in words]
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=50)
        several = len(set(PREFIX.findall(done.stdout))) > 1
        lines, expected = PREFIX.sub("", done.stdout).splitlines(), shown.splitlines()
        if several:
            lines.sort()
            expected.sort()
        if done.returncode != 0 or lines != expected:
            sys.exit(f"{' '.join(words)}: status {done.returncode}, printed\n{done.stdout}\n{page} shows\n{shown}")


if sys.argv[1] == "--extract":
    extract(pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3]))
else:
    run(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
