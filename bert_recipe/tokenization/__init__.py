"""Tokenizers and their files."""
