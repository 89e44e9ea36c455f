#!/usr/bin/env bash
# Builds the container: bash scripts/docker/build.sh [IMAGE]. FROM_IMAGE_NAME names another NGC PyTorch container.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

build_arguments=()
if [[ -n ${FROM_IMAGE_NAME:-} ]]; then
  build_arguments+=(--build-arg "FROM_IMAGE_NAME=$FROM_IMAGE_NAME")
fi
docker build --network=host "${build_arguments[@]}" --tag "${1:-bert}" .
