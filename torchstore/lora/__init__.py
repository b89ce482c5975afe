"""LoRA adapters as versions of their own: only the adapter is sent, the base stays."""
