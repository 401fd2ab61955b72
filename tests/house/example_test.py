#!/usr/bin/env python3
"""Runs the command of an example's README and compares what it prints with what the README shows.

    example_test.py README.md FOLDER_OF_PROGRAMS

The first block of code is the command, the second what it prints; the prefix that `weft run` puts before each line is left out.
"""
import pathlib
import re
import subprocess
import sys

readme, programs = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
blocks = re.findall(r"^```\n(.*?)^```", readme.read_text(), re.MULTILINE | re.DOTALL)
if len(blocks) < 2:
    sys.exit(f"{readme}: {len(blocks)} blocks of code; expected the command and what it prints")
words = blocks[0].split()
command = [str(programs / w.removeprefix("./")) if w == "weft" or w.startswith("./") else w for w in words]
done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=50)
printed = re.sub(r"^\[?\d+\]?[:|]? ?", "", done.stdout, flags=re.MULTILINE)
if done.returncode != 0 or printed != blocks[1]:
    sys.exit(f"{' '.join(words)}: status {done.returncode}, printed\n{done.stdout}\n{readme} shows\n{blocks[1]}")
