"""Independent helpers for the layers above: files, pages over HTTP, command lines, limits of the host."""
