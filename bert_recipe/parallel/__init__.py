"""Parallel training strategies, applied to a plain model."""
