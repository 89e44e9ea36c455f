# Settings for training on a CPU, to be sourced; what is set already stays. The launch scripts source it.
# shellcheck shell=bash

# A thread that waits for the others spins about 50 us and then sleeps. Spinning on, as is the default, makes steps many
# times slower as soon as anything else runs on the machine; sleeping at once makes them a tenth slower when nothing does.
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-10000}
