"""One file per task: its data set, its forward pass with loss sums, and its metrics (the interface is trainer.Task)."""
