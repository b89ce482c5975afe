"""Torch's tensors as the store sees them: described, laid out, summed, quantized, and copied by plans."""
