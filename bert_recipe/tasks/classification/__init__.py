"""Classes, numbers and several labels of texts and pairs (GLUE)."""
