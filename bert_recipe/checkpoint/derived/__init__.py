"""Model folders made from others: an average, more positions, a larger model, other tokens."""
