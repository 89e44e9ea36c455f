"""Finds, verifies, reads and writes checkpoint folders, and checks which run they belong to."""
