"""Kernels that only CPUs need: length-bucketed attention, dropout masks, packed linear layers."""
