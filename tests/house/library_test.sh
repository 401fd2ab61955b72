#!/usr/bin/env bash
# Checks what libweft or libweft_train needs and exports. It needs the C and C++ libraries and fmt, and no
# transport's library (libweft_train: libweft and OpenMP, too). Its names without C++ mangling are all names
# of its headers of C and no others; its C++ names are names of weft alone.
#
#   library_test.sh LIBRARY.SO HEADERS-OF-C
set -euo pipefail
library=$1; shift
what=$(basename "$library"); what=${what%%.*}
status=0
fail() { echo "FAILED: $*"; status=1; }

needed=$(readelf -d "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
[ -n "$needed" ] || fail "readelf names nothing that $library needs"
for name in $needed; do
  case $name in
    libc.so.* | libm.so.* | libstdc++.so.* | libgcc_s.so.* | libfmt.so.* | ld-linux*) ;;
    libasan.so.* | libubsan.so.* | libtsan.so.*) echo "a sanitizer's build: $name" ;;
    libweft.so.* | libgomp.so.*) [ "$what" = libweft_train ] || fail "$what needs $name" ;;
    *) fail "$what needs $name" ;;
  esac
done
# The same check for the libraries that these libraries need.
if [ "$what" = libweft ] && ! grep -qE 'lib(a|ub|t)san' <<<"$needed"; then
  others=$(ldd "$library" | awk '{ print $1 }' | grep -vE '^(linux-vdso|.*/ld-linux|lib(c|m|stdc\+\+|gcc_s|fmt)\.so)' || true)
  [ -z "$others" ] || fail "libweft brings along $others"
fi
grep -q 'not found' <(ldd "$library") && fail "$what does not find all it needs: $(ldd "$library")"

given=$(nm -D --defined-only "$library" | awk '{ print $3 }' | sed 's/@.*//' | grep -vE '^(_Z|_init$|_fini$|WEFT_)' | sort -u)
# Inline functions, whose closing brace begins a line, belong to each program; comments show calls.
declared=$(sed -e '/^static inline /,/^}/d' -e '/^ \*/d' "$@" | grep -oE '\bweft_[a-z0-9_]+\(' | tr -d '(' | sort -u)
[ -n "$declared" ] || fail "$* declare nothing"
difference=$(diff <(echo "$declared") <(echo "$given") || true)
[ -z "$difference" ] || fail "the headers declare (<) and $what gives (>): $difference"
# The sources instantiate templates of other libraries. These are not exported to programs, which have their
# own.
foreign=$(nm -DC --defined-only "$library" | cut -d ' ' -f 3- | grep -vE '^(WEFT_|((non-virtual thunk to|typeinfo for|typeinfo name for|vtable for) )?weft(::|_))' || true)
[ -z "$foreign" ] || fail "$what gives what is not weft's: $foreign"

[ $status -eq 0 ] && echo "$what needs $(echo $needed), and gives $(wc -l <<<"$given") names to C"
exit $status
