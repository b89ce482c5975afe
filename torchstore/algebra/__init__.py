"""What is known of tensors without a store: boxes, plans, names, sums. No I/O."""
