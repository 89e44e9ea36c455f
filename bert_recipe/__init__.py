"""BERT pre-training and fine-tuning on PyTorch."""
