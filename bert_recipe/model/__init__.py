"""Encoders, heads, attention and losses; no file, optimizer or process group."""
