#!/usr/bin/env python3
"""Measures the tables of bench/results, one `weft bench` after the other, and writes them into a page there.

    bench/tables.py --out FOLDER                   everything: FOLDER/<name>.md, .json, .svg
    bench/tables.py --out FOLDER --only facade,p2p some of it
    bench/tables.py --out FOLDER --only layers     a table in pieces; layers.mlp selects the pieces that begin so
    bench/tables.py --out FOLDER --paste PAGE      writes the tables of FOLDER into PAGE, such as
                                                   bench/results/2026-11-30-epyc-zen5.md; makes it if it is absent
    bench/tables.py --list                         the commands

If the user may (root), each command runs under a real-time policy, `chrt -f 10`, which keeps other programs
off the cores. With more ranks than cores, or with helper threads, it runs at a high niceness instead: under
a real-time policy spinning ranks would keep the cores from the ranks that they wait for.
"""
import argparse
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
MPI = "openmpi,mpich,intelmpi"
ALL = MPI + ",gloo,torch,deepspeed"
SIZES = "8,128,2048,8192,32768,131072,524288,2097152,8388608,33554432"
CROWDED = "8,2048,32768,524288,8388608,67108864"


def runs(a):
    """name: (arguments of weft bench, more threads than cores?)"""
    memory = ["--memory", a.memory]
    fast = ["--seconds", str(a.seconds), "--rounds", str(a.rounds)]
    table = {"all_reduce": (["all_reduce", "--against", ALL, *memory, *fast], False)}
    fast += ["--bytes", SIZES]
    for op in ("all_gather", "reduce_scatter", "broadcast", "all_to_all", "reduce"):
        table[op] = ([op, "--against", MPI, *memory, *fast], False)
    table["all_reduce_out"] = (["all_reduce", "--place", "out", "--against", MPI, *memory, *fast], False)
    table["all_reduce_rotating"] = (["all_reduce", "--buffers", "rotating", "--against", MPI, *memory, *fast], False)
    table["bf16"] = (["all_reduce", "--dtype", "f32,bf16", *fast], False)
    table["all_reduce_bf16"] = (["all_reduce", "--dtype", "bf16", "--against", MPI + ",torch,deepspeed", *memory, *fast], False)
    table["p2p"] = (["p2p", "--against", MPI + ",gloo,torch", *fast], False)
    for op in ("rows", "columns", "four_columns", "3d", "fields", "3d_fields"):
        table["halo_" + op] = (["halo_" + op, "--against", "openmpi,mpich", "--memory", "shared,foreign", "--seconds", str(a.seconds),
                                "--rounds", str(a.rounds)], False)
    table["facade"] = (["facade", "--seconds", "0.5", "--rounds", "3"], False)
    table["overlap"] = (["overlap", "--bytes", "262144,1048576,4194304", "--seconds", "1", "--rounds", "2"], True)
    table |= layers()
    table["data"] = (["data", "--against", "torch", "--seconds", "0.5", "--rounds", "2"], False)
    table["all_reduce_4"] = (["all_reduce", "--ranks", "4", "--against", ALL, "--bytes", CROWDED, *memory,
                              "--seconds", str(a.seconds), "--rounds", "1"], True)
    for op in ("all_gather", "reduce_scatter", "broadcast", "all_to_all"):
        table[op + "_4"] = ([op, "--ranks", "4", "--against", MPI, "--bytes", CROWDED, *memory,
                             "--seconds", str(a.seconds), "--rounds", "1"], True)
    return table


def layers():
    """Pieces that take at most 100 s each on two cores with 100 GFLOP/s each, so that each piece can wait
    for a quiet machine."""
    common = ["--against", "torch", "--seconds", "0.12"]
    pieces = {f"{layer}.{dtype}": (layer, dtype, "8,128,512,2048", "forward,both", 3) for layer in ("mlp", "attention", "conv") for dtype in ("f32", "bf16")}
    pieces["head.f32.512"] = ("head", "f32", "8,128,512", "forward,both", 3)
    pieces["head.f32.2048.forward"] = ("head", "f32", "2048", "forward", 3)
    pieces["head.f32.2048.both"] = ("head", "f32", "2048", "both", 1)
    pieces["head.bf16.512"] = ("head", "bf16", "8,128,512", "forward,both", 3)
    pieces["head.bf16.2048"] = ("head", "bf16", "2048", "forward,both", 2)
    table = {}
    for name, (layer, dtype, tokens, passes, rounds) in pieces.items():
        what = ["layers", "--layers", layer, "--dtype", dtype, "--tokens", tokens, "--passes", passes, "--rounds", str(rounds)]
        table[f"layers.{name}"] = ([*what, "--tp", "1,2", *common], False)
    for dtype in ("f32", "bf16"):
        what = ["layers", "--layers", "mlp,attention,conv,head", "--dtype", dtype, "--tokens", "8,128,512,2048", "--passes", "both", "--rounds", "1"]
        table[f"layers_4.{dtype}"] = ([*what, "--tp", "1,4", *common], True)
    return table


def policy(oversubscribed):
    if os.geteuid() != 0:
        return []
    return ["nice", "-n", "-15"] if oversubscribed else ["chrt", "-f", "10"]


def commit():
    done = subprocess.run(["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def take(a, name, arguments, oversubscribed):
    out = a.out / name
    files = ["--json", f"{out}.json"] + ([] if arguments[0] in ("facade", "overlap", "layers", "data") else ["--plot", f"{out}.svg"])
    program = [str(a.build / "bin" / "weft"), "bench", *arguments, "--markdown"]
    python = ["--python", a.python] if "torch" in " ".join(arguments) else []
    started = time.monotonic()
    done = subprocess.run([*policy(oversubscribed), *program, *python, *files], stdout=subprocess.PIPE, text=True)
    print(f"{name}: exit code {done.returncode}, {time.monotonic() - started:.0f} s", flush=True)
    if done.returncode == 0:
        shown = shlex.join([*policy(oversubscribed), "weft", "bench", *arguments])
        date = time.strftime("%Y-%m-%d")
        (a.out / f"{name}.md").write_text(f"`{shown}`, {date}, commit {commit()}\n\n{done.stdout.strip()}\n")
    return done.returncode


def folded(name, table):
    """Folds the ratios and settings of all tables except the first ones: there are many."""
    at = table.find("\n**weft ")
    if at < 0 or name in ("all_reduce", "p2p"):
        return table
    return f"{table[:at].strip()}\n\n<details><summary>bandwidth, ratios, settings</summary>\n{table[at:]}\n</details>"


def joined(texts):
    """Joins the texts of a table's pieces: appends the rows of tables with equal heads, and keeps other
    paragraphs once."""
    if len(texts) == 1:
        return texts[0].strip()
    blocks = {}  # maps the first lines of a table, or a whole paragraph, to the lines below it
    for text in texts:
        for block in text.strip().split("\n\n"):
            lines = block.split("\n")
            rows = [re.sub(r" *\| *", " | ", line).strip() for line in lines] if block.startswith("|") else []
            if rows:
                rows[1] = re.sub(r"-+", "-", rows[1])
            head = "\n".join(rows[:2]) or block
            blocks.setdefault(head, []).extend(rows[2:])
    commands = [head for head in blocks if head.startswith("`")]
    rest = ["\n".join([head, *rows]) for head, rows in blocks.items() if head not in commands]
    return "\n\n".join(["\\\n".join(commands), *rest])


def new_page(a):
    """A page with a place for each table that --out holds; the machine's description is added by hand."""
    names = dict.fromkeys(piece.partition(".")[0] for piece in runs(a) if (a.out / f"{piece}.md").exists())
    places = [f"## {name}\n\n<!-- table {name} -->\n<!-- end -->\n" for name in names]
    return "\n".join([f"# {a.paste.stem}\n\nMachine: . Commit {commit()}.\n", *places])


def paste(a):
    text = a.paste.read_text() if a.paste.exists() else new_page(a)
    for name in re.findall(r"<!-- table (\w+) -->", text):
        pieces = [piece for piece in runs(a) if piece == name or piece.startswith(f"{name}.")]
        missing = [piece for piece in pieces if not (a.out / f"{piece}.md").exists()]
        if len(missing) == len(pieces):
            print(f"{name}: {a.out / name}.md is not there, its table stays")
            continue
        if missing:
            print(f"{name}: without {', '.join(missing)}")
        table = joined([(a.out / f"{piece}.md").read_text() for piece in pieces if piece not in missing])
        begin, end = f"<!-- table {name} -->", "<!-- end -->"
        first = text.index(begin) + len(begin)
        text = text[:first] + "\n" + folded(name, table) + "\n" + text[text.index(end, first):]
    a.paste.write_text(text)
    for name in ("all_reduce",):
        if (a.out / f"{name}.svg").exists():
            shutil.copyfile(a.out / f"{name}.svg", HERE / f"{name}.svg")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=pathlib.Path, help="folder for what comes out")
    p.add_argument("--build", type=pathlib.Path, default=HERE.parent / "build" / "release")
    p.add_argument("--memory", default="shared,foreign", help="of ours: shared,foreign,single_copy")
    p.add_argument("--python", default="python3", help="the python that has torch")
    p.add_argument("--seconds", type=float, default=0.1, help="of sampling for each size, program and round")
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--only", default="", help="names, separated by commas")
    p.add_argument("--paste", type=pathlib.Path, metavar="PAGE", help="write the tables of --out into this page")
    p.add_argument("--list", action="store_true")
    a = p.parse_args()
    table = runs(a)
    chosen = []
    for word in [n for n in a.only.split(",") if n]:
        names = [name for name in table if name == word or name.startswith(f"{word}.")]
        if not names:
            p.error(f"--only \"{word}\"; expected {', '.join(table)}")
        chosen += names
    chosen = chosen or list(table)
    if a.list:
        for name in chosen:
            print(f"{name}: {shlex.join([*policy(table[name][1]), 'weft', 'bench', *table[name][0]])}")
        return
    if a.out is None:
        p.error("--out is not given; expected a folder for what comes out")
    a.out.mkdir(parents=True, exist_ok=True)
    if a.paste:
        paste(a)
        return
    started = time.monotonic()
    failed = [name for name in chosen if take(a, name, *table[name]) != 0]
    print(f"{time.monotonic() - started:.0f} s in all")
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


main()
