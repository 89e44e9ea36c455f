"""Checks of a run before it starts, and estimates of its memory and time."""
