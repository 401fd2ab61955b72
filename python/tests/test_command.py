"""The program `weft`, by `python -m weft` and by the command of the wheel, and `python -m weft.run`."""
import os
import subprocess
import sys

import pytest

import weft
from weft import run


def weft_command(*arguments, path=None):
    """`python -m weft`, finished."""
    package = os.path.dirname(os.path.dirname(weft.__file__))
    environment = {**os.environ, "PYTHONPATH": package} | ({} if path is None else {"PATH": path})
    return subprocess.run([sys.executable, "-m", "weft", *map(str, arguments)], capture_output=True, text=True, timeout=60, env=environment, check=False)


def test_words_of_the_launcher():
    assert run.command(["-n", "2", "a.py", "-x"], "py") == ["-n", "2", "--", "py", "a.py", "-x"]
    assert run.command(["-n", "2", "--no-tag-output", "-m", "module"], "py") == ["-n", "2", "--no-tag-output", "--", "py", "-m", "module"]
    assert run.command(["-n", "2", "--", "./program", "a"], "py") == ["-n", "2", "--", "./program", "a"]
    assert run.command(["--help"], "py") == ["--help"]


def test_a_program_of_python(tmp_path):
    (tmp_path / "rank.py").write_text("import weft\ng = weft.Context().group(deadline=30)\nprint('rank', g.rank, 'of', g.size, flush=True)\n")
    done = weft_command("run", "-n", 2, "--no-tag-output", tmp_path / "rank.py")
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"], done


def test_all_of_the_program():
    assert weft.version() in weft_command("--version").stdout
    said = weft_command("--help")
    assert said.returncode == 0 and "doctor" in said.stdout and "run" in said.stdout
    said = weft_command("no_such_thing")
    assert said.returncode != 0 and "no_such_thing" in said.stderr
    said = weft_command("run", "-n", "2", "--", "sh", "-c", "exit 5")
    assert said.returncode == 5 and "first to fail" in said.stderr


@pytest.mark.skipif((run.FOLDER / "bin/weft").exists(), reason="the package carries the program")
def test_where_it_is_looked_for(tmp_path):
    """A script of that name is no program: it would call itself."""
    (tmp_path / "weft").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "weft").chmod(0o755)
    found = run.of_path(os.environ["PATH"].split(os.pathsep))
    assert run.of_path([str(tmp_path), "", os.path.dirname(found)]) == found
    assert run.of_path([str(tmp_path), str(tmp_path / "absent")]) is None
    said = weft_command("--version", path=str(tmp_path))
    assert said.returncode == 1 and "weft: there is no program weft; expected it in" in said.stderr and "or in PATH" in said.stderr


ELASTIC = """
import os, sys
from weft.run import report_step
path, done = sys.argv[1], 0
if os.path.exists(path):
    done = int(open(path).read())
for step in range(done, 8):
    open(path, "w").write(str(step + 1))
    report_step(step + 1)
    if step % 2:
        os.kill(os.getpid(), 9)
"""


def test_steps_of_a_program_are_reported(processes, tmp_path):
    """Four starts die, but each gets further; afterwards three do not, and the launcher names the step."""
    done = processes(1, ELASTIC, tmp_path / "step", launch=["--elastic", "1:1"])
    assert "start 4 of the job" in done.stderr and "the job ends" not in done.stderr, done.stderr
    at_last = "from weft.run import report_step\nreport_step(7)\nexit('bad luck')"
    done = processes(1, at_last, launch=["--elastic", "1:1"], check=False)
    assert done.returncode == 1
    assert "the job ends: 3 starts in a row" in done.stderr and "; 7 steps were done" in done.stderr and "rank 0 said: bad luck" in done.stderr, done.stderr
    processes(1, "from weft.run import report_step\nreport_step(7)")  # nobody listens
