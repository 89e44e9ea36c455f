"""Readers of other projects' BERT checkpoints, one file per format.

Each reader returns `SourceWeights`: tensors under Hugging Face's names. `conversion.py` checks them against the config.
"""
