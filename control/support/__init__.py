"""What the layers above use and what knows none of them: files, pages over HTTP, command lines, limits of the host."""
