"""Optimizers, learning-rate schedules and precision."""
