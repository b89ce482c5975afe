"""Processes: how they are launched, what they inherit, and how they end."""
