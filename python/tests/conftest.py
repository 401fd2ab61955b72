"""Ranks for tests: threads of this process that share a Context, or processes started by
`python -m weft.run`."""
import os
import subprocess
import sys
import textwrap
import threading

import pytest

import weft


def on_threads(size, rank):
    """rank(number) on a thread for each of `size` ranks, until all have ended."""
    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank did not end"


def run_ranks(size, program, **options):
    """program(group) on `size` threads that are the ranks of a group; what each returned. The first
    exception is raised."""
    context, store = weft.Context(), weft.Store.local()
    results, failures = [None] * size, [None] * size

    def rank(number):
        try:
            with context.group_in(store, number, size, **{"deadline": 20, **options}) as group:
                results[number] = program(group)
        except BaseException as error:  # pylint: disable=broad-except
            failures[number] = error
    on_threads(size, rank)
    for failure in failures:
        if failure is not None:
            raise failure
    return results


def run_processes(size, program, *arguments, launch=(), timeout=100, check=True, python=sys.executable):
    """A Python program, as text, on `size` processes; the finished subprocess."""
    environment = dict(os.environ)
    package = os.path.dirname(os.path.dirname(weft.__file__))
    environment["PYTHONPATH"] = os.pathsep.join(p for p in (package, environment.get("PYTHONPATH")) if p)
    command = [python, "-m", "weft.run", "-n", str(size), "--no-tag-output", *launch, "-c", textwrap.dedent(program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, check=False)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture
def ranks():
    return run_ranks


@pytest.fixture
def processes():
    return run_processes


def pytest_runtest_logreport(report):
    """Skips as tools/report_skips.py reads them in ctest's log."""
    if report.skipped and isinstance(report.longrepr, tuple):
        file, line, reason = report.longrepr
        print(f"\n{file}:{line}: Skipped\n{reason.removeprefix('Skipped: ')}\n[  SKIPPED ] {report.nodeid} (0 ms)")
