"""More than one host: agents, jobs that other engines place, recovery of what was lost, workspaces."""
