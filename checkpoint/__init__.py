"""Checkpoint folders: found, verified, read and written, and the identity of the run that they belong to."""
