"""Answers to questions (SQuAD)."""
