"""What "pointwise", "per token", "reduction" mean for ragged tensors, each written once."""
