"""The backend on UCX, by our own binding of libucp."""
