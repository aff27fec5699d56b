#!/usr/bin/env bash
# get_dependencies.sh FOLDER PYTHON: get what building the C++ library needs, changing the system as little as possible.
#
# FOLDER/include, FOLDER/lib   ONNX Runtime: the headers of Debian trixie's libonnxruntime-dev (unpacked, not installed; newer
#                              libraries keep its C API) and the library of the Python wheel, which compiles the engines.
#                              ONNXRUNTIME_ROOT (a folder with include/ and lib/) replaces both.
# FOLDER/lib                   ONNX Runtime GenAI's library, for its tokenizers, from the wheel of the pinned version.
# Debian packages              compiler, CMake, Ninja, pkg-config, nlohmann-json, cpp-httplib, Catch2; installed if they are
#                              missing and this runs as root.
set -euo pipefail
folder=$1 python=$2
packages=(g++ cmake ninja-build pkg-config nlohmann-json3-dev libcpp-httplib-dev catch2)
mkdir -p "$folder"

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
# a compiler, CMake or Ninja from elsewhere serves as well
command -v g++ >/dev/null && missing=("${missing[@]/g++/}")
command -v cmake >/dev/null && missing=("${missing[@]/cmake/}")
command -v ninja >/dev/null && missing=("${missing[@]/ninja-build/}")
read -ra missing <<<"${missing[*]}"
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "building the C++ library needs ${missing[*]}: install them and run this again" >&2
    exit 2
  fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

# FOLDER itself is what CMake is given as ONNXRUNTIME_ROOT
if [ -n "${ONNXRUNTIME_ROOT:-}" ] && [ ! "$ONNXRUNTIME_ROOT" -ef "$folder" ]; then
  mkdir -p "$folder/lib"
  headers=$(realpath "$ONNXRUNTIME_ROOT/include")
  rm -rf "$folder/include"  # a folder, if an earlier run got Debian's headers: the link would be put into it
  ln -s "$headers" "$folder/include"
  # an earlier run left links here, through which a copy would overwrite the wheel's library
  cp -a --remove-destination "$ONNXRUNTIME_ROOT"/lib/libonnxruntime.so* "$folder/lib/"
else
  wheel=$("$python" -c 'import importlib.util, pathlib; print(pathlib.Path(importlib.util.find_spec("onnxruntime").origin).parent / "capi")')
  library=$(find "$wheel" -name 'libonnxruntime.so.*' | head -1)
  mkdir -p "$folder/lib"
  ln -sf "$library" "$folder/lib/$(basename "$library")"
  ln -sf "$(basename "$library")" "$folder/lib/libonnxruntime.so.1"
  ln -sf libonnxruntime.so.1 "$folder/lib/libonnxruntime.so"
  if [ ! -e "$folder/include/onnxruntime/onnxruntime_c_api.h" ] && [ ! -e "$folder/include/onnxruntime_c_api.h" ]; then
    mirror=$({ cat /etc/apt/sources.list /etc/apt/sources.list.d/*.sources 2>/dev/null || true; } |
      awk '$1 == "deb" || $1 == "URIs:" {
        for (i = 2; i <= NF; i++) if ($i ~ /^[a-z+]+:.*debian/ && $i !~ /security/) {print $i; exit}
      }')
    state=$(mktemp -d)
    trap 'rm -rf "$state"' EXIT
    mkdir -p "$state/lists/partial" "$state/archives/partial"
    echo "deb ${mirror:?no Debian mirror is configured: set ONNXRUNTIME_ROOT} trixie main" >"$state/sources.list"
    chmod -R a+rwX "$state"
    options=(-qq -o "Dir::Etc::sourcelist=$state/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$state/lists"
      -o "Dir::Cache::pkgcache=$state/pkg.bin" -o "Dir::Cache::srcpkgcache=$state/src.bin")
    apt-get "${options[@]}" update
    (cd "$state" && apt-get "${options[@]}" download libonnxruntime-dev && dpkg-deb -x libonnxruntime-dev_*.deb unpacked)
    cp -r "$(dirname "$(find "$state/unpacked" -name onnxruntime_c_api.h)")" "$folder/include"
  fi
fi

genai=$(sed -n 's/^onnxruntime-genai==//p' "$(dirname "$0")/../../constraints.txt")
if [ ! -e "$folder/lib/libonnxruntime-genai.so.$genai" ]; then
  wheels=$(mktemp -d)
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$wheels" "onnxruntime-genai==$genai"
  "$python" -m zipfile -e "$wheels"/*.whl "$wheels/unpacked"
  cp "$wheels/unpacked/onnxruntime_genai/libonnxruntime-genai.so" "$folder/lib/libonnxruntime-genai.so.$genai"
  ln -sf "libonnxruntime-genai.so.$genai" "$folder/lib/libonnxruntime-genai.so"
  rm -rf "$wheels"
fi
