"""What the benchmark programs share.

Keys of the result files: files from before this package say `surroundings` for `machine_info`, `sides` for
`implementations`, `ours` for `this project`, `our settings` for `same settings`, and `ours_is_faster_by` for `speedup`.
In attention's results `by_length` is now `length_bucketed`; in those of startup_and_checkpoints.py (before:
around_the_step), the stages of a start are divided differently.
"""
