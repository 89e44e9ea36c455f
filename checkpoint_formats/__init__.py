"""Readers of other projects' BERT checkpoints, one file per format, and checks of what they return."""
