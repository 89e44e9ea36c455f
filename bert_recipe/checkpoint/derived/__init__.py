"""Model folders made from others: an average, other tokens."""
