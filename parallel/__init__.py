"""Strategies that divide training over processes, applied from outside to a plain model."""
