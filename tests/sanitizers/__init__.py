"""The compiled modules of dataplane under AddressSanitizer and UndefinedBehaviorSanitizer: `make test-asan`."""
