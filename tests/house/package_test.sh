#!/usr/bin/env bash
# Makes Debian packages of a build, without building anything, and unpacks them. It checks what they need and
# contain, a C program that is compiled and run against them, find_package, and the tool.
#
#   package_test.sh SOURCE BUILD
set -euo pipefail
source_dir=$1 build_dir=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "FAILED: $*"; exit 1; }

for tool in dpkg-deb dpkg-shlibdeps cpack file; do
  if ! command -v $tool >/dev/null; then echo "skipped: $tool is not installed"; exit 77; fi
done

# Uncompressed packages take half the time.
(cd "$work" && cpack -G DEB --config "$build_dir/CPackConfig.cmake" -B "$work" -D CPACK_DEBIAN_COMPRESSION_TYPE=none) >"$work/log" 2>&1 ||
  { cat "$work/log"; fail "cpack -G DEB"; }
packages=$(cd "$work" && ls -- *.deb | sed 's/_.*//')
wanted="libweft[0-9.]* weft weft-dev"
for name in gloo openmpi mpich; do
  if [ -e "$build_dir/lib/weft/libweft_backend_$name.so" ] || [ -e "$build_dir/lib/weft/libweft_backend_mpi-$name.so" ]; then wanted+=" weft-$name"; fi
done
if [ -e "$build_dir/lib/libweft_train.so" ]; then wanted+=" libweft-train[0-9.]*"; fi
for name in $wanted; do grep -qx "$name" <<<"$packages" || fail "there is no package $name, but $packages"; done

# needs PACKAGE: the packages that it depends on, without versions.
needs() { dpkg-deb -f "$work/$1"_*.deb Depends | sed 's/, /\n/g' | sed 's/ .*//'; }
for package in $packages; do
  dpkg-deb -x "$work/$package"_*.deb "$work/root"
  [ -s "$work/root/usr/share/doc/$package/copyright" ] || fail "$package has no copyright"
  ls "$work/root/usr/share/doc/$package"/changelog* >/dev/null || fail "$package has no changelog"
  own="libc6|libgcc-s1|libstdc\+\+6|libfmt[0-9]+|libweft[0-9.]+"
  case $package in
    libweft-train*) own+="|libgomp1" ;;
    weft) own+="|libweft-train[0-9.]+|libbenchmark[0-9]*.*|libtomlplusplus[0-9]+|libpcre2-8-0" ;;
    weft-dev) own+="|libweft-train[0-9.]+" ;;
    weft-gloo) own+="|libgloo[0-9.]+" ;;
    weft-openmpi) own+="|libopenmpi[0-9]+" ;;
    weft-mpich) own+="|libmpich[0-9]+" ;;
  esac
  others=$(needs "$package" | grep -vxE "$own" || true)
  [ -z "$others" ] || fail "$package brings along" $others
done
needs "$(grep -x 'libweft[0-9.]*' <<<"$packages")" | grep -x libc6 >/dev/null || fail "dpkg-shlibdeps found nothing that libweft needs"

# The tool's page; all files agree on the version.
usr=$work/root/usr
zcat "$usr/share/man/man1/weft.1.gz" >"$work/weft.1"
for command in $("$usr/bin/weft" --help | sed -n '/^Subcommands:/,$s/^  \([a-z]*\) .*/\1/p'); do
  grep -qx ".SS weft $command" "$work/weft.1" || fail "weft.1 does not describe weft $command"
done
if command -v man >/dev/null; then
  said=$(MANROFFSEQ='' man --warnings -E UTF-8 -l -Tutf8 "$work/weft.1" 2>&1 >/dev/null)
  [ -z "$said" ] || fail "man says of weft.1: $said"
fi
version=$(sed -n 's/^#define WEFT_VERSION_\(MAJOR\|MINOR\|PATCH\) //p' "$source_dir/include/weft/c/version.h" | paste -sd.)
said=$("$usr/bin/weft" --version)
[ "$said" = "weft $version" ] || fail "weft --version says $said; expected weft $version"
for package in $packages; do
  said=$(dpkg-deb -f "$work/$package"_*.deb Version)
  [ "$said" = "$version" ] || fail "$package has version $said; expected $version"
  dpkg-deb -f "$work/$package"_*.deb >"$work/control"
  ! grep -inE 'invalid|todo|placeholder|unknown|example\.' "$work/control" || fail "$package has a placeholder"
done
said=$(python3 -c 'import sys; sys.path.insert(0, sys.argv[1]); import build_wheel; print(build_wheel.VERSION)' "$source_dir/python")
[ "$said" = "$version" ] || fail "the wheel has version $said; expected $version"

# Two ranks of a C program, built by pkg-config; all files that find_package reads exist.
libraries=$(dirname "$(find "$usr" -name weft.pc)")
export LD_LIBRARY_PATH=${libraries%/pkgconfig}
if command -v pkg-config >/dev/null; then
  flags=$(PKG_CONFIG_PATH=$libraries pkg-config --cflags --libs weft)
  [[ $flags != *rpath* ]] || fail "weft.pc of the system's prefix has a run path: $flags"
  cc -std=c11 -Wall -Wextra -Werror "$usr/share/doc/weft/examples/c/hello.c" -o "$work/hello" $flags
  "$usr/bin/weft" run -n 2 -- "$work/hello" >"$work/log" 2>&1 || { cat "$work/log"; fail "examples/c against the packages"; }
  for rank in 0 1; do grep -q "rank $rank of 2: sum 3\$" "$work/log" || { cat "$work/log"; fail "no sum of rank $rank"; }; done
else
  echo "examples/c: skipped, pkg-config is not installed"
fi
mkdir "$work/finds"
printf 'cmake_minimum_required(VERSION 3.20)\nproject(finds LANGUAGES CXX)\nfind_package(weft REQUIRED)\nget_target_property(at weft::weft LOCATION)\nmessage(STATUS "at ${at}")\n' \
  >"$work/finds/CMakeLists.txt"
cmake -G Ninja -S "$work/finds" -B "$work/finds" -DCMAKE_PREFIX_PATH="$usr" >"$work/log" 2>&1 || { cat "$work/log"; fail "find_package(weft)"; }
grep -qF "at $usr/" "$work/log" || { cat "$work/log"; fail "find_package(weft) finds another weft"; }
"$usr/bin/weft" doctor >"$work/log" || { cat "$work/log"; fail "weft doctor"; }
for plugin in "$LD_LIBRARY_PATH"/weft/libweft_backend_*.so; do
  grep -qF "($plugin" "$work/log" || { cat "$work/log"; fail "weft doctor does not find $plugin"; }
done
echo "Debian packages: ok:" $packages
