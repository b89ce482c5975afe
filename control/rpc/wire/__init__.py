"""Actor servers and their clients on gRPC: messages, sessions, listeners and channels."""
