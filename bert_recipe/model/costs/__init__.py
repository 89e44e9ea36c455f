"""What a training step costs: FLOPs and memory, by the formulas of each encoder.

Formulas, because neither torch's FlopCounterMode nor a pass on meta tensors gives these numbers:
the counter does not know attention windows (18% too many FLOPs for ModernBERT-base at 1,024 tokens,
twice as many at 8,192), and meta tensors know neither autocast nor a CPU's attention, which reads
lengths and draws masks on the host.
"""
