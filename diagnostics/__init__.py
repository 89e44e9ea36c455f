"""Pre-run checks, and estimates of memory and time."""
