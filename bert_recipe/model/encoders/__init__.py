"""Encoders, one per file: embeddings, layers, and their floating-point operations and memory."""
