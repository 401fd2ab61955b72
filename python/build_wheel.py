"""Builds the wheel of the package: `pip install ./python`, `pip wheel ./python`, tools/wheel.sh. It is a
PEP 517 backend that needs nothing but CMake.

One wheel for every Python of the platform: the package is ctypes over libweft and libweft_train, and has one
module for all CPythons from 3.11 on. It carries the libraries, plug-ins, the launcher and the libraries that
these need beyond those of the system (libfmt, libgomp, libgloo; an MPI stays the host's)."""
import base64
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import platform_tag  # noqa: E402  # pylint: disable=wrong-import-position

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
PROJECT = (HERE / "pyproject.toml").read_text(encoding="utf-8")
VERSION = ".".join(re.findall(r"^#define WEFT_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)$", (ROOT / "include/weft/c/version.h").read_text(encoding="utf-8"), re.M))
# Libraries of the system, of its compiler, or of an MPI: never carried.
OF_THE_HOST = re.compile(r"^(ld-linux.*|lib(c|m|dl|rt|pthread|util|resolv|gcc_s|stdc\+\+|mpi|mpich|open-pal|open-rte|hwloc|ucp|ucs|uct|ucm|event.*|numa|udev|z"
                         r"|weft|weft_train))\.so.*$")


# Libraries that plug-ins take from the host: an MPI, whose plug-in is loaded if a program asks for it.
MPI = {"libmpi.so.40", "libmpich.so.12"}


def get_requires_for_build_wheel(config_settings=None):
    return []


def build_sdist(sdist_directory, config_settings=None):
    raise NotImplementedError("weft has no sdist; expected a wheel, from a source tree: tools/wheel.sh")


def run(*command):
    subprocess.run(list(map(str, command)), check=True, cwd=ROOT, stdout=sys.stderr)


def needed(file, found):
    """The libraries that a file needs and the host does not have, with all that they need: name -> path."""
    said = subprocess.run(["ldd", str(file)], capture_output=True, text=True, check=True).stdout
    for name, path in re.findall(r"^\s*(\S+) => (/\S+)", said, re.M):
        if not OF_THE_HOST.match(name):
            found[name] = os.path.realpath(path)
    return found


def stage(prefix, package):
    """The installed files that the package carries: lib, lib/weft (plug-ins), bin/weft."""
    (package / "lib/weft").mkdir(parents=True)
    (package / "bin").mkdir()
    carried = {}
    for name in ("libweft", "libweft_train"):
        library = next((prefix / "lib").glob(f"{name}.so.*.*.*")).resolve()
        short = re.search(r"SONAME\s+(\S+)", subprocess.run(["objdump", "-p", str(library)], capture_output=True, text=True, check=True).stdout)[1]
        shutil.copy(library, package / "lib" / short)
        needed(library, carried)
    shutil.copy(prefix / "bin/weft", package / "bin/weft")
    needed(prefix / "bin/weft", carried)
    for plugin in sorted((prefix / "lib/weft").glob("*.so")):
        shutil.copy(plugin, package / "lib/weft" / plugin.name)
        if "mpi" not in plugin.name:
            needed(plugin, carried)
    for name, path in carried.items():
        shutil.copy(path, package / "lib" / name)


def binaries(package):
    """{name: path} of all that the package carries of machine code."""
    return {path.name: path for path in sorted(package.rglob("*")) if path.is_file() and path.read_bytes()[:4] == b"\x7fELF"}


def tag(package):
    """py3-none-manylinux_..., or of this machine's Linux alone, which is said with its reason."""
    try:
        platform = platform_tag.manylinux(binaries(package), MPI)
    except platform_tag.NoTag as why:
        print(f"no manylinux tag: {why}", file=sys.stderr)
        platform = "linux"
    return f"py3-none-{platform}_{platform_tag.machine()}"


def metadata():
    field = lambda name: re.search(rf'^{name} = "(.*)"$', PROJECT, re.M)[1]  # noqa: E731
    lines = ["Metadata-Version: 2.1", f"Name: {field('name')}", f"Version: {VERSION}", f"Summary: {field('description')}",
             f"Requires-Python: {field('requires-python')}"]
    for extra, wanted in re.findall(r'^(\w+) = \["(.*)"\]$', PROJECT, re.M):
        lines += [f"Provides-Extra: {extra}", f'Requires-Dist: {wanted}; extra == "{extra}"']
    return "\n".join(lines) + "\n"


def entry_points():
    points = re.findall(r'^\[project\.(scripts|entry-points\."(?:.*)")\]\n(\w+) = "(.*)"$', PROJECT, re.M)
    group = lambda name: "console_scripts" if name == "scripts" else name.split('"')[1]  # noqa: E731
    return "\n".join(f"[{group(name)}]\n{left} = {right}\n" for name, left, right in points)


def write(folder, wheel):
    """A wheel of all files below `folder`."""
    record = f"weft-{VERSION}.dist-info/RECORD"
    lines = []
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            name, data = path.relative_to(folder).as_posix(), path.read_bytes()
            info = zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0))
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = (0o100755 if "/bin/" in name or ".so" in name else 0o100644) << 16
            archive.writestr(info, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(data)}")
        archive.writestr(record, "\n".join(lines + [f"{record},,"]) + "\n")


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """WEFT_BUILD_FOLDER: where to build; by default build/wheel of the tree."""
    build = pathlib.Path(os.environ.get("WEFT_BUILD_FOLDER", ROOT / "build/wheel"))
    with tempfile.TemporaryDirectory() as work:
        prefix, folder = pathlib.Path(work, "prefix"), pathlib.Path(work, "wheel")
        run("cmake", "--preset", "wheel", "-S", ROOT, "-B", build)
        run("cmake", "--build", build, "-j", os.cpu_count() or 1)
        run("cmake", "--install", build, "--prefix", prefix)
        # The compiled calls, if this host has Python.h.
        run("cmake", "--install", build, "--prefix", prefix, "--component", "python")
        shutil.copytree(HERE / "weft", folder / "weft", ignore=shutil.ignore_patterns("__pycache__", "lib", "bin"))
        stage(prefix, folder / "weft")
        made_for = tag(folder / "weft")
        info = folder / f"weft-{VERSION}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(metadata(), encoding="utf-8")
        (info / "WHEEL").write_text(f"Wheel-Version: 1.0\nGenerator: weft\nRoot-Is-Purelib: false\nTag: {made_for}\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(entry_points(), encoding="utf-8")
        shutil.copy(ROOT / "LICENSE", info / "LICENSE")
        name = f"weft-{VERSION}-{made_for}.whl"
        write(folder, pathlib.Path(wheel_directory) / name)
    return name


if __name__ == "__main__":
    target = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else HERE / "dist")
    target.mkdir(parents=True, exist_ok=True)
    print(target / build_wheel(target))
