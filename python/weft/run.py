"""`python -m weft.run -n 4 program.py`: starts ranks as `weft run` does. A program whose name ends in .py,
or an option (-m module, -c code) in its place, is run with this Python.

`python -m weft`, and the command `weft` of the wheel, are the program `weft` itself: run, train, bench,
check, doctor, ... with the same rule for `weft run`."""
import os
import socket
import sys

from ._library import FOLDER

def report_step(steps):
    """Notifies `weft run --elastic` that the program has taken so many steps, counted from the begin of the
    run, as report_step does in C++ (docs/elastic.md). One rank calls it, after each step. Never blocks, and
    does nothing without --elastic."""
    steps = int(steps)
    if "WEFT_RESTART_COUNT" not in os.environ:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices:
            text = f"{os.environ['WEFT_JOB']} {os.environ['WEFT_RANK']} step {steps}"
            notices.sendto(text.encode(), socket.MSG_DONTWAIT, b"\0" + os.environ["WEFT_LAUNCHER"].encode())
    except (OSError, KeyError):  # the next notice says more
        pass


WITH_VALUE = ("-n", "-np", "--ranks", "--bind", "--timeout", "--backend", "--elastic")


def command(arguments, python=sys.executable):
    """The arguments of `weft run`: the launcher's own options as they are, and the program with its
    interpreter."""
    at = 0
    while at < len(arguments) and arguments[at].startswith("-") and arguments[at] not in ("--", "-m", "-c"):
        at += 2 if arguments[at] in WITH_VALUE else 1
    own, program = arguments[:at], arguments[at:]
    if program[:1] == ["--"]:
        program = program[1:]
    if program and (program[0].endswith(".py") or program[0] in ("-m", "-c")):
        program = [python, *program]
    return own + (["--", *program] if program else [])


def of_path(folders):
    """The first program `weft` of machine code in these folders; a script of that name is the wheel's own."""
    for folder in folders:
        path = os.path.join(folder or ".", "weft")
        try:
            with open(path, "rb") as file:
                if file.read(4) == b"\x7fELF" and os.access(path, os.X_OK):
                    return path
        except OSError:
            pass
    return None


def launcher(who="weft.run"):
    """The program `weft`: the wheel's own, else the one in PATH."""
    own = FOLDER / "bin" / "weft"
    found = str(own) if own.exists() else of_path(os.environ.get("PATH", os.defpath).split(os.pathsep))
    if found is None:
        sys.exit(f"{who}: there is no program weft; expected it in {own.parent} (as the wheel has it) or in PATH")
    return found


def main():
    program = launcher()
    os.execv(program, [program, "run", *command(sys.argv[1:])])


def weft():
    """The command `weft`."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["run"]:
        arguments = ["run", *command(arguments[1:])]
    program = launcher("weft")
    os.execv(program, [program, *arguments])


if __name__ == "__main__":
    main()
