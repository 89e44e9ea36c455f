#!/usr/bin/env bash
# Builds the container: bash scripts/docker/build.sh [IMAGE]. IMAGE [bert] is its name; FROM_IMAGE_NAME sets another NGC
# PyTorch container to build on.
set -euo pipefail
if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  echo "usage: bash scripts/docker/build.sh [IMAGE]

Builds the container IMAGE [bert]. FROM_IMAGE_NAME sets another NGC PyTorch container to build on."
  exit
fi
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

build_arguments=()
if [[ -n ${FROM_IMAGE_NAME:-} ]]; then
  build_arguments+=(--build-arg "FROM_IMAGE_NAME=$FROM_IMAGE_NAME")
fi
exec docker build --network host "${build_arguments[@]}" --tag "${1:-bert}" .
