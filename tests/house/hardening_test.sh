#!/usr/bin/env bash
# Checks that files linked with hardening have these properties (docs/decisions/2026-11-27-hardening.md):
# tables of addresses are read-only while the program runs, all functions are bound before it runs, stacks are
# not executable, there are canaries, and the sizes of copies are checked. Programs are loaded at random
# addresses.
#
#   hardening_test.sh FILE...     shared libraries, plug-ins, programs and archives
set -euo pipefail
status=0
fail() { echo "FAILED: $*"; status=1; }
checked=0
for file in "$@"; do
  [ -e "$file" ] || { fail "$file is not there"; continue; }
  checked=$((checked + 1))
  name=$(basename "$file")
  symbols=$(nm "$file" 2>/dev/null || true; nm -D "$file" 2>/dev/null || true)
  # A file without arrays on its stack, for example a small plug-in, has no canary.
  case $name in
    libweft.* | libweft_train.* | weft)
      grep -q '__stack_chk_fail' <<<"$symbols" || fail "$name has no canaries (-fstack-protector-strong)"
      grep -qE '__[a-z]+_chk(@|$)' <<<"$(grep -v stack_chk <<<"$symbols")" || fail "$name has no checked copies (_FORTIFY_SOURCE)"
      ;;
  esac
  case $name in
    *.a) continue ;;
  esac
  segments=$(readelf -lW "$file")
  grep -q 'GNU_RELRO' <<<"$segments" || fail "$name has no GNU_RELRO (-z relro)"
  grep -E 'GNU_STACK' <<<"$segments" | grep -q 'RWE' && fail "$name has an executable stack"
  grep -qE 'BIND_NOW|FLAGS_1.*\bNOW\b' <<<"$(readelf -dW "$file")" || fail "$name is bound late (-z now)"
  readelf -hW "$file" | grep -q 'Type:.*DYN' || fail "$name is not position-independent"
done
[ "$checked" -gt 0 ] || fail "no file was given"
[ $status -eq 0 ] && echo "$checked files are hardened"
exit $status
