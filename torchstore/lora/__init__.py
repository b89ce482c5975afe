"""LoRA adapters as versions of their own: they travel, the base stays."""
