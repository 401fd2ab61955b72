# Functions that the scripts of this folder share. For use by `source` in bash. It defines only functions and
# `weft_root`.

weft_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# say TEXT...: prints a heading.
say() { printf '\n== %s\n' "$*"; }

# packages_for GROUP: the packages of tools/packages.txt that `build`, `test` or `full` needs, including the
# packages of the groups before it.
packages_for() {
  awk -v group="$1" 'BEGIN { rank["build"] = 1; rank["test"] = 2; rank["full"] = 3 }
    { sub(/#.*/, "") } NF == 2 && rank[$2] <= rank[group] { print $1 }' "$weft_root/tools/packages.txt"
}

# missing_packages GROUP: the packages of the group that are not installed.
missing_packages() {
  local package
  for package in $(packages_for "$1"); do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || echo "$package"
  done
}

# install_missing GROUP: installs these packages as root. Otherwise it prints the command that would install
# them, and exits with 1.
install_missing() {
  local missing
  if ! command -v dpkg-query >/dev/null; then
    echo "This is no Debian system; wanted are the likes of: $(packages_for "$1" | tr '\n' ' ')" >&2
    return 0
  fi
  missing=$(missing_packages "$1" | tr '\n' ' ')
  [ -n "$missing" ] || return 0
  if [ "$(id -u)" -ne 0 ]; then
    echo "Some packages are missing. Install them, then run this again:" >&2
    echo "  sudo apt-get install -y --no-install-recommends $missing" >&2
    exit 1
  fi
  say "Installing $missing"
  local log
  log=$(mktemp)
  if ! { apt_get update && apt_get install $missing; } >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    rm -f "$log"
    exit 1
  fi
  rm -f "$log"
}

# apt_get update | install PACKAGES: asks no questions, and waits for other users of the package database.
apt_get() {
  local command=$1
  shift
  DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 -o Acquire::Retries=3 -qq -y \
    --no-install-recommends "$command" "$@" </dev/null
}

# build PRESET [TARGET...]: configures and builds the preset. On a terminal it shows its progress. Otherwise
# it prints output only if something fails.
build() {
  # With names relative to the tree, ccache finds results of another clone of this tree.
  export CCACHE_BASEDIR=$weft_root CCACHE_NOHASHDIR=1
  local preset=$1 target status=0 started=$SECONDS
  shift
  local targets=() log=$weft_root/build/$preset.output
  mkdir -p "$weft_root/build"
  for target in "$@"; do targets+=(--target "$target"); done
  cmake --preset "$preset" -S "$weft_root" >"$log" 2>&1 || status=1
  if [ "$status" -eq 0 ]; then
    echo "building $preset ..."
    local command=(cmake --build "$weft_root/build/$preset" -j "$(nproc)" "${targets[@]}")
    if [ -t 1 ]; then
      "${command[@]}" && echo "built $preset in $((SECONDS - started)) s"
      return
    fi
    "${command[@]}" >"$log" 2>&1 || status=1
  fi
  if [ "$status" -ne 0 ]; then grep -v '^\[[0-9]*/[0-9]*\] \(Building\|Linking\)' "$log" | tail -n 80 >&2; else
    echo "built $preset in $((SECONDS - started)) s"
  fi
  return "$status"
}
