"""What runs in the process of who puts and gets."""
