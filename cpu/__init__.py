"""CPU-specific kernels: length-bucketed attention, dropout masks, packed linear layers; and rotary positions."""
