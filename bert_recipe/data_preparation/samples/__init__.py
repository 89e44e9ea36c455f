"""Turns text shards into HDF5 shards of masked samples, and verifies and converts such shards."""
