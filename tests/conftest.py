"""What every folder of tests has: the option and the fixture that record faults."""

from tests.conformance.records import provoke, pytest_addoption

__all__ = ["provoke", "pytest_addoption"]
