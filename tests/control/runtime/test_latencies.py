"""How long endpoints took: nearest-rank percentiles of the latest calls, by endpoint, bounded."""

from skipper.control.model.endpoint_spec import WRAPPED
from skipper.control.runtime.latencies import KEPT_CALLS, KEPT_ENDPOINTS, EndpointLatency, Latencies


def test_percentiles_are_those_of_the_latest_calls() -> None:
    latencies = Latencies()
    for milliseconds in range(100, 0, -1):
        latencies.took("step", milliseconds / 1000)
    latencies.took("load", 2.0)
    assert latencies.summary() == [
        EndpointLatency("load", 1, 2.0, 2.0, 2.0),
        EndpointLatency("step", 100, 0.05, 0.099, 0.1),
    ]
    for _ in range(KEPT_CALLS):
        latencies.took("step", 3.0)
    assert latencies.summary()[1] == EndpointLatency("step", KEPT_CALLS, 3.0, 3.0, 3.0)


def test_an_endpoint_that_is_handed_a_function_is_the_same_endpoint() -> None:
    latencies = Latencies()
    latencies.took(f"run{WRAPPED}", 1.0)
    latencies.took("run", 3.0)
    latencies.took(f"run{WRAPPED}", 2.0)
    assert latencies.summary() == [EndpointLatency("run", 3, 2.0, 3.0, 3.0)]


def test_names_that_callers_make_up_do_not_pile_up() -> None:
    latencies = Latencies()
    for number in range(10 * KEPT_ENDPOINTS):
        latencies.took(f"no_such_{number}", 1.0)
    assert len(latencies.summary()) <= 2 * KEPT_ENDPOINTS
