"""The programs of the tutorials, as their pages show them."""
