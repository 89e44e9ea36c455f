"""Metrics of a run: throughput, their text on the terminal, and the log sinks."""
