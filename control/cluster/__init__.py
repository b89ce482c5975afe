"""More than one host: agents, jobs that other engines place, recovery after losses, workspaces."""
