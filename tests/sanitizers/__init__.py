"""The compiled modules of dataplane and control under sanitizers: `make test-asan` and `make test-tsan`."""
