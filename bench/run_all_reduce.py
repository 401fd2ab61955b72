#!/usr/bin/env python3
"""Runs all_reduce_bench and, where it was built, the raw MPI program beside it, in turns, and prints one table.

A cell is the best of the rounds' medians, with that round's 99th percentile in brackets, in microseconds. Ratios are the
peer's time divided by ours: above 1 we are faster.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys


def run(command, seconds):
    environment = dict(os.environ)
    if os.geteuid() == 0:  # mpirun wants to be told twice
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, timeout=seconds, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: exit code {done.returncode}")
    return done.stdout


def ours(program, ranks, seconds):
    """{(kind, bytes): (median, p99, bus GB/s)}; kind: "shared out_of_place", …, "memcpy" """
    text = run([program, "--ranks", str(ranks), "--benchmark_format=json"], seconds)
    rows = {}
    for b in json.loads(text)["benchmarks"]:
        parts = b["name"].split("/iterations")[0].split("/")
        kind = " ".join(parts[2:4]) if parts[0] == "all_reduce" else parts[0]
        rows[kind, int(parts[-1])] = (b["median_us"], b["p99_us"], b["bus_GBs"])
    return rows


def peer(program, ranks, seconds):
    text = run(["mpirun", "-n", str(ranks), *(["--oversubscribe"] if ranks > (os.cpu_count() or 1) else []), program],
               seconds)
    rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return {("mpi in_place" if r["in_place"] else "mpi out_of_place", r["bytes"]):
            (r["median_us"], r["p99_us"], 2e-3 * (ranks - 1) / ranks * r["bytes"] / r["median_us"]) for r in rows}


def table(best, place):
    def cell(kind, size):
        row = best.get((kind, size))
        return f"{row[0]:.4g} ({row[1]:.4g})" if row else "-"

    def ratio(kind, size):
        mpi = best.get(("mpi " + place, size))
        return f"{mpi[0] / best[kind, size][0]:.2f}" if mpi else "-"

    shared, foreign = "shared " + place, "foreign " + place
    print(f"\n{place.replace('_', ' ')}\n")
    print("| bytes | weft shared, us | bus GB/s | weft foreign, us | bus GB/s | Open MPI, us | MPI / shared | MPI / foreign "
          "| memcpy, us |")
    print("|---|---|---|---|---|---|---|---|---|")
    for size in sorted({size for _, size in best}):
        print(f"| {size} | {cell(shared, size)} | {best[shared, size][2]:.2f} | {cell(foreign, size)} "
              f"| {best[foreign, size][2]:.2f} | {cell('mpi ' + place, size)} | {ratio(shared, size)} "
              f"| {ratio(foreign, size)} | {cell('memcpy', size)} |")


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--bin", type=pathlib.Path, default=pathlib.Path("build/release/bin"))
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--seconds", type=int, default=300, help="limit of each program")
    a = arguments.parse_args()
    mpi = a.bin / "mpi_all_reduce"
    best = {}
    for _ in range(a.rounds):
        rows = ours(a.bin / "all_reduce_bench", a.ranks, a.seconds)
        if mpi.exists():
            rows |= peer(mpi, a.ranks, a.seconds)
        for key, row in rows.items():
            if key not in best or row[0] < best[key][0]:
                best[key] = row
    if not mpi.exists():
        print("no Open MPI program (libopenmpi-dev was not found when this was configured): ours alone")
    table(best, "out_of_place")
    table(best, "in_place")


main()
