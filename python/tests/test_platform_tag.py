"""python/platform_tag.py: the glibc that a wheel needs, from what objdump says of its files."""
import importlib.util
import pathlib

import pytest

FILE = pathlib.Path(__file__).resolve().parents[1] / "platform_tag.py"
spec = importlib.util.spec_from_file_location("platform_tag", FILE)
platform_tag = importlib.util.module_from_spec(spec)
spec.loader.exec_module(platform_tag)

SAID = """
a.so:     file format elf64-x86-64

Dynamic Section:
  NEEDED               libmine.so.1
  NEEDED               libstdc++.so.6
  NEEDED               libc.so.6
  SONAME               a.so

Version definitions:
1 0x01 0x0bb0ea41 GLIBC_9.99
Version References:
  required from libmine.so.1:
    0x0b792650 0x00 09 MINE_77
  required from libstdc++.so.6:
    0x0297f879 0x00 08 GLIBCXX_3.4.{minor}
    0x0afd17f1 0x00 07 CXXABI_1.3
  required from libc.so.6:
    0x069691b2 0x00 05 GLIBC_2.{glibc}
    0x09691974 0x00 04 GLIBC_2.3.4
"""


def tag(minor=9, glibc=14, files=("a.so", "libmine.so.1"), host=()):
    said = {"a.so": SAID.replace("{minor}", str(minor)).replace("{glibc}", str(glibc)), "libmine.so.1": "Dynamic Section:\n  NEEDED  libc.so.6\n"}
    return platform_tag.manylinux({name: name for name in files}, set(host), said.__getitem__)


@pytest.mark.parametrize("minor, glibc, expected", [(9, 14, "2_17"), (9, 28, "2_28"), (9, 39, "2_39"), (28, 14, "2_31"), (29, 28, "2_34"), (30, 28, "2_35"), (30, 36, "2_36"),
                                                    (31, 28, "2_39"), (33, 28, "2_39")])
def test_the_newest_version_counts(minor, glibc, expected):
    assert tag(minor, glibc) == f"manylinux_{expected}"


def test_libraries_that_are_not_there():
    with pytest.raises(platform_tag.NoTag, match="^a.so needs libmine.so.1, which is neither in the wheel nor on every system$"):
        tag(files=("a.so",))
    assert tag(files=("a.so",), host=("libmine.so.1",)) == "manylinux_2_17"


def test_versions_that_no_table_has():
    with pytest.raises(platform_tag.NoTag, match="^GLIBCXX_3.4.34 is in no table of what systems have$"):
        tag(34)
    for version in ("GLIBC_PRIVATE", "GCC_15.0.0", "CXXABI_FLOAT128"):
        with pytest.raises(platform_tag.NoTag, match=version):
            platform_tag.glibc_of(version)
    assert platform_tag.glibc_of("GLIBC_ABI_DT_RELR") == (2, 36) and platform_tag.glibc_of("GCC_3.0") == (2, 17)


def test_names_of_libraries():
    for name in ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1", "libpthread.so.0"):
        assert platform_tag.OF_EVERY_SYSTEM.match(name), name
    for name in ("libfmt.so.9", "libgloo.so.0", "libmpi.so.40", "libc.so.7", "libcrypt.so.1", "libz.so.1"):
        assert not platform_tag.OF_EVERY_SYSTEM.match(name), name
