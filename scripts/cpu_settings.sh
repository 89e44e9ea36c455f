# Settings for training on a CPU, to be sourced; what is set already stays. The launch scripts source it.
# shellcheck shell=bash

# A thread that waits for the others spins about 50 us and then sleeps. Spinning on, as is the default, makes steps many
# times slower as soon as anything else runs on the machine; sleeping at once makes them a tenth slower when nothing does.
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-10000}

# The C library keeps freed memory for the next step, in place of handing it back to the kernel and having it zeroed again.
export MALLOC_MMAP_THRESHOLD_=${MALLOC_MMAP_THRESHOLD_:-4294967296}
export MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-8589934592}
