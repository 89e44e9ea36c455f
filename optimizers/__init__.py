"""Optimizers, one per file, and what they share; optimizer.py has the protocol and the registry."""
