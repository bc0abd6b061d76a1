#!/usr/bin/env bash
# NVIDIA's own libraries against the ladder: `bash tests/real_libraries.sh [--all]`.
#
# Fetches them into a temporary folder, runs the ignored tests of tests/real_libraries.rs on them, and deletes
# them. pip gives the runtime of CUDA 12 and 13 (6 MB), apt the driver library libcuda1 (3 MB), which Debian has in
# `non-free`: the configured Debian sources are read with that component added, without changing the system. The
# toolkit's stub comes in a package of 770 MB, so it is fetched with --all only. What cannot be fetched is said
# and counted as skipped. Exit code: that of the tests.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fetch_all=0
[ "${1:-}" = --all ] && fetch_all=1
real=$(mktemp -d)
had_node=0
[ -e /dev/nvidiactl ] && had_node=1
clean_up() {
  rm -rf "$real"
  # libcuda run by root makes this node even without a kernel module.
  [ $had_node = 1 ] || [ ! -c /dev/nvidiactl ] || rm -f /dev/nvidiactl
}
trap clean_up EXIT

missing() { # missing PART WHY
  echo "not fetched: $1: $2"
}

fetch_runtime() { # fetch_runtime FOLDER PACKAGE
  local packages="$real/$1/lib/python3/site-packages"
  mkdir -p "$packages"
  if timeout 300 python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
    --no-deps --target "$packages" "$2" >"$real/log" 2>&1; then
    echo "fetched: $1: $(cd "$packages" && echo "${2//-/_}"-*.dist-info) $(cd "$packages" && find nvidia -name 'libcudart.so*')"
  else
    rm -rf "${real:?}/$1"
    missing "$1" "pip cannot install $2: $(tail -1 "$real/log")"
  fi
}

sources=
apt_get() {
  timeout 900 apt-get -q -o "Dir::State=$real/apt/state" -o "Dir::State::status=/var/lib/dpkg/status" \
    -o "Dir::Cache=$real/apt/cache" -o "Dir::Etc::sourcelist=$sources" -o "Dir::Etc::sourceparts=-" \
    -o APT::Sandbox::User=root -o Acquire::Languages=none "$@"
}

prepare_apt() {
  command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || { echo "no apt-get"; return 1; }
  mkdir -p "$real/apt/state/lists/partial" "$real/apt/cache/archives/partial"
  local debian=/etc/apt/sources.list.d/debian.sources
  # apt tells the two formats apart by the ending.
  if [ -f $debian ]; then
    sources=$real/apt/list.sources
    sed 's/^Components:.*/Components: main contrib non-free non-free-firmware/' $debian >"$sources"
  elif grep -q '^deb .* main' /etc/apt/sources.list 2>/dev/null; then
    sources=$real/apt/list.list
    sed -n 's/^\(deb .* main\).*/\1 contrib non-free/p' /etc/apt/sources.list >"$sources"
  else
    echo "no Debian sources are configured"
    return 1
  fi
  apt_get update >"$real/log" 2>&1 || { echo "apt-get update failed"; return 1; }
}

# download PACKAGE: prints the path of the package file.
download() {
  (cd "$real/apt" && apt_get download "$1" >"$real/log" 2>&1 && ls "$PWD/$1"_*.deb)
}

fetch_driver() {
  local deb library
  deb=$(download libcuda1) || { missing driver "the configured sources have no libcuda1"; return; }
  mkdir -p "$real/unpacked" "$real/driver"
  dpkg-deb -x "$deb" "$real/unpacked"
  library=$(find "$real/unpacked" -name 'libcuda.so.*.*' -type f | head -1)
  cp "$library" "$real/driver/libcuda.so.1" && echo "fetched: driver: $(basename "$deb")"
}

fetch_stub() {
  [ $fetch_all = 1 ] || { missing stub "770 MB; run with --all"; return; }
  local deb library
  deb=$(download nvidia-cuda-dev) || { missing stub "the configured sources have no nvidia-cuda-dev"; return; }
  mkdir -p "$real/toolkit"
  # The one file of it, without unpacking 2 GB.
  dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$real/toolkit" --wildcards './usr/lib/*/stubs/libcuda.so'
  rm -f "$deb"
  library=$(find "$real/toolkit" -name libcuda.so | head -1)
  [ -n "$library" ] || { missing stub "it is not in $(basename "$deb")"; return; }
  mkdir -p "$real/stub"
  cp "$library" "$real/stub/libcuda.so" && echo "fetched: stub: $(basename "$deb")"
}

echo "fetching"
fetch_runtime cu12 nvidia-cuda-runtime-cu12
fetch_runtime cu13 nvidia-cuda-runtime
# Not in a subshell: it says which sources are used.
if prepare_apt >"$real/why"; then
  fetch_driver
  fetch_stub
else
  missing driver "$(cat "$real/why")"
  missing stub "$(cat "$real/why")"
fi

echo "testing"
PINPOOL_REAL_LIBRARIES="$real" cargo test --locked --quiet --test real_libraries -- \
  --ignored --nocapture --test-threads=1 >"$real/output" 2>&1
code=$?
if [ $code -ne 0 ]; then
  cat "$real/output"
else
  grep -E 'cudaError|CUDA_ERROR' "$real/output" | sed "s#$real#...#g" | sort -u
fi
run=$(grep -c '#\[ignore = "run by tests/real_libraries.sh"\]' tests/real_libraries.rs)
skipped=$(grep -c 'skipped: ' "$real/output")
echo "real libraries: $((run - skipped)) run, $skipped skipped, exit code $code"
exit $code
