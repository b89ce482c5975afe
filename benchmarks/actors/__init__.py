"""The control plane's speed: calls, casts, bulk arguments and spawning, beside raw gRPC and memcpy in the same run."""
