"""What hangs off the loop of updates in trainer.py: checkpoints, evaluations, the benchmark."""
