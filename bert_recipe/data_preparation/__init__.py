"""From any text to verified HDF5 shards. `stages` imports from `samples`, these from `text`,
`sources` and `engine`.
"""
