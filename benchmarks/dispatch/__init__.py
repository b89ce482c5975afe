"""The tensor engine's speed: issuing operations, running and fetching them; raw gRPC, torch and memcpy to compare."""
