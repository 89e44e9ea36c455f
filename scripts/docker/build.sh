#!/usr/bin/env bash
# Builds the container: bash scripts/docker/build.sh [IMAGE]. IMAGE [bert] is its name; FROM_IMAGE_NAME sets another NGC
# PyTorch container to build on, TRANSFORMERS='transformers>=4.51' adds what the benchmarks need.
set -euo pipefail
if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  echo "usage: bash scripts/docker/build.sh [IMAGE]

Builds the container IMAGE [bert]. FROM_IMAGE_NAME sets another NGC PyTorch container to build on;
TRANSFORMERS='transformers>=4.51' adds what the benchmarks need."
  exit
fi
if (($# > 1)) || [[ ${1:-} == -* ]]; then
  echo "error: expected one argument, the name of the image, not '$*': see --help" >&2
  exit 2
fi
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."

build_arguments=()
for name in FROM_IMAGE_NAME TRANSFORMERS; do
  if [[ -n ${!name:-} ]]; then
    build_arguments+=(--build-arg "$name=${!name}")
  fi
done
exec docker build --network host "${build_arguments[@]}" --tag "${1:-bert}" .
