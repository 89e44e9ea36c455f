# Settings for training on a CPU, sourced by the launch scripts. Variables that are set keep their value.
# shellcheck shell=bash

# A waiting OpenMP thread spins for about 50 us and then sleeps. Longer spinning, the default, makes steps many times
# slower when something else runs on the machine; sleeping at once makes them 10% slower when nothing does.
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-10000}
