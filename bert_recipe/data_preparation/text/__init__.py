"""Turns documents into text shards: sentences, duplicates, mixing, the split, and a vocabulary
trained on them.
"""
