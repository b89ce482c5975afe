"""What every folder of tests has: how faults are recorded, and that examples may take their time."""

from hypothesis import settings

from tests.conformance.records import provoke, pytest_addoption

__all__ = ["provoke", "pytest_addoption"]

settings.register_profile("skipper", deadline=None)  # a busy machine is no failure
settings.load_profile("skipper")
