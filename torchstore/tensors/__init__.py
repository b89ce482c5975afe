"""Torch's tensors in the store: description, layout, checksums, quantization, and copies by plans."""
