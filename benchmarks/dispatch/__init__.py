"""The tensor engine's speed: issuing operations, running and fetching them, beside raw gRPC, torch and memcpy."""
