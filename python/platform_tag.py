"""The platform for which a wheel is good (PEP 600): manylinux_<glibc>_<machine>, computed from what its
shared objects ask of the system's libraries.

A tag says: it runs on every system of this glibc or a later one. So each library that a file needs is in
the wheel or is one that all such systems have, and the versions of symbols that it needs are there:
glibc's own by their numbers, those of gcc's libraries by the table below."""
import re
import subprocess
import sysconfig

# Every system of a manylinux tag has them.
OF_EVERY_SYSTEM = re.compile(r"^(ld-linux.*\.so\.\d+|lib(c|m)\.so\.6|lib(dl|util)\.so\.2|lib(rt|gcc_s|util)\.so\.1|libpthread\.so\.0|libstdc\+\+\.so\.6)$")
# Which glibc the distributions have that were the first with these versions of gcc's libraries: those before
# the first line of each are older than 2.31. From the manylinux policies that auditwheel has (manylinux_2_31
# to manylinux_2_39).
FIRST_WITH = {"GLIBCXX": [((3, 4, 28), (2, 31)), ((3, 4, 29), (2, 34)), ((3, 4, 30), (2, 35)), ((3, 4, 33), (2, 39))],
              "CXXABI": [((1, 3, 12), (2, 31)), ((1, 3, 13), (2, 34)), ((1, 3, 15), (2, 39))],
              "GCC": [((7, 0, 0), (2, 31)), ((12, 0, 0), (2, 35)), ((14, 0, 0), (2, 39))]}
OLDEST = (2, 17)  # of the glibc that a tag names: what pip knows


class NoTag(Exception):
    """Why the files are good for this machine alone."""


def read(text):
    """(libraries that are needed, versions of their symbols as (library, "GLIBC_2.34")) of what
    `objdump -p` says."""
    needed, versions, library = re.findall(r"^\s*NEEDED\s+(\S+)", text, re.M), set(), None
    for line in text.partition("Version References:")[2].splitlines():
        if match := re.match(r"^\s*required from (\S+):", line):
            library = match[1]
        elif match := re.match(r"^\s+0x[0-9a-f]+ 0x[0-9a-f]+ \d+ (\S+)", line):
            versions.add((library, match[1]))
    return needed, versions


def glibc_of(version):
    """The oldest glibc whose systems have a version of a symbol, as (2, 34)."""
    name, _, number = version.rpartition("_")
    parts = tuple(map(int, number.split("."))) if re.fullmatch(r"[\d.]+", number) else ()
    if name == "GLIBC" and parts:
        return parts[:2]
    if version == "GLIBC_ABI_DT_RELR":
        return 2, 36
    if name in FIRST_WITH and parts:
        for newest, glibc in FIRST_WITH[name]:
            if parts <= newest:
                return glibc if newest != FIRST_WITH[name][0][0] or parts == newest else OLDEST
    raise NoTag(f"{version} is in no table of what systems have")


def manylinux(files, host, read_file=None):
    """"manylinux_2_35" for {name: path} of the shared objects and programs of a wheel. host: names of
    libraries that some files need of a system that has them, which all others can do without. NoTag where
    a library is neither carried nor everywhere, or a version is newer than the table."""
    read_file = read_file or (lambda path: subprocess.run(["objdump", "-p", str(path)], capture_output=True, text=True, check=True).stdout)
    newest = OLDEST
    for name, path in files.items():
        needed, versions = read(read_file(path))
        for library in needed:
            if library not in files and library not in host and not OF_EVERY_SYSTEM.match(library):
                raise NoTag(f"{name} needs {library}, which is neither in the wheel nor on every system")
        for library, version in versions:
            if OF_EVERY_SYSTEM.match(library):
                newest = max(newest, glibc_of(version))
    return f"manylinux_{newest[0]}_{newest[1]}"


def machine():
    """"x86_64"."""
    return re.sub(r"[^A-Za-z0-9]", "_", sysconfig.get_platform().partition("-")[2])
