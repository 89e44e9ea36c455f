#!/usr/bin/env bash
# Runs the linters and the tests, in an environment that it makes if needed:
#
#   bash scripts/run_tests.sh [PYTEST_ARGUMENT...]
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
# shellcheck source=setup_environment.sh
source scripts/setup_environment.sh tests

mapfile -t shell_scripts < <(find scripts data benchmarks .ci run.sub -name '*.sh' -o -name '*.sub' -o -path .ci/run | sort)
for script in "${shell_scripts[@]}"; do
  bash -n "$script"
done
shellcheck "${shell_scripts[@]}"
hadolint Dockerfile
ruff check .
ruff format --check .
workers=4 # many tests wait for others
if [[ " $* " == *' -m fast '* ]]; then
  workers=$(($(nproc) < 4 ? $(nproc) : 4)) # these compute, and each worker imports all libraries
else
  mypy # whose first run takes half a minute
fi
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive} # tests run several programs side by side: see cpu_settings.sh
# Each process takes whole files, so that fixtures are made once, in order of their names: by the number of tests, the
# files with few and long tests would come last.
python3 -m pytest -n "$workers" --dist loadfile --no-loadscope-reorder "$@"
