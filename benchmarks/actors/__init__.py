"""The control plane's speed: calls, casts, bulk arguments and spawning, and raw gRPC and memcpy to compare."""
