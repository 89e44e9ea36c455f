"""What hangs off the loop of updates in training/trainer.py: checkpoints, evaluations, the
benchmark.
"""
