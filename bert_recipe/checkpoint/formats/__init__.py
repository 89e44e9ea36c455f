"""Readers of other projects' BERT checkpoints, one file per format, and checks of the results."""
