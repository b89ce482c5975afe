"""The backend on RDMA verbs, by pyverbs."""
