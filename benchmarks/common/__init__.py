"""What the benchmark programs share.

Result files that have `surroundings` instead of `machine_info` are older. Their keys and names, and those of new files:

    surroundings                         machine_info
    sides                                implementations
    ours; our settings                   this project; same settings
    ours_is_faster_by, ratio             speedup
    floor_gigabytes_per_second           effective_gigabytes_per_second
    floor_bytes_a_parameter              minimum_bytes_per_parameter
    milliseconds_a_batch                 milliseconds_per_batch
    tokens_with_padding_to_the_longest   tokens_per_real_token
    by_length (attention)                length_bucketed
    floor (data_loading)                 copy
    floor: read, floor: write, ...       only read, only write, only tokenize
    around_the_step-*.json               startup_and_checkpoints-*.json, with other stages of a start
"""
