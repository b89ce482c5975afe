"""The endpoints of a service and of its sessions, with the ways of calling them."""

from __future__ import annotations

from typing import Any, Generic, Literal, ParamSpec, TypeVar

from skipper.control.model.bounds import check_count
from skipper.control.model.endpoint_spec import EndpointSpec, checker
from skipper.control.model.errors import ActorError, ControlError, ReplicaLostError
from skipper.control.model.future import Future, Promise
from skipper.control.model.method_view import MethodView
from skipper.control.model.value_mesh import ValueMesh
from skipper.control.runtime.port import Port, pack_with_ports
from skipper.control.services.request_sequencer import RequestSequencer
from skipper.control.services.requests import ServiceRequest, SessionBinding, SessionRequest, SlotRequest
from skipper.control.services.service_client import Address, ServiceClient
from skipper.control.wire.messages import Payload

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)

_Packed = tuple[EndpointSpec, str, Payload, list[Port[Any]]]
"""The arguments of a `ServiceRequest`."""


class Method(MethodView):
    """An endpoint of a service's replicas."""

    __slots__ = ("_actor_class", "_address", "_check", "_client", "_spec")

    def __init__(self, address: Address, client: ServiceClient, name: str, actor_class: type | None) -> None:
        spec = address.interface.endpoints.get(name)
        if spec is None:
            known = ", ".join(sorted(address.interface.endpoints))
            raise AttributeError(f"{address.interface.class_name} has no endpoint {name!r}; it has: {known or 'none'}")
        self._address = address
        self._client = client
        self._actor_class = actor_class
        self._spec = spec
        self._check = checker(spec)

    def _pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Packed:
        self._check(*args, **kwargs)
        if self._address.procs == 1:
            return self._spec, self._spec.name, *pack_with_ports(args, kwargs)
        return self._spec, RequestSequencer.forward.__name__, *pack_with_ports((self._spec.name, args, kwargs), {})

    def _submit(self, request: ServiceRequest) -> Future[Any]:
        self._client.submit(request)
        return request.future

    def _viewed(self) -> tuple[EndpointSpec, type | None]:
        return self._spec, self._actor_class

    def __repr__(self) -> str:
        return f"<endpoint {self._address.name}.{self._spec.name} of a service>"


class ServiceMethod(Method, Generic[P, R_co]):
    """One endpoint of a service; each adverb below is a way of calling it.

    Adverbs check the arguments against the endpoint's signature and pickle them before anything is sent, like those of
    meshes, and return at once. Their types are in control/api/views.pyi.

    The example of `ServiceTemplate` shows one.
    """

    __slots__ = ()

    def route(self, *args: P.args, **kwargs: P.kwargs) -> Future[R_co]:
        """Call the replica that has the fewest requests of this process outstanding, or wait for one to come up.

        If it dies, the request goes to another one if that is safe: the endpoint is marked `idempotent`, or the
        request was certainly not handled.

        Returns:
            The future of what the endpoint returns; a `ValueMesh` if a replica has several processes.

        Raises:
            TypeError: the arguments do not fit the signature.
            PayloadError: an argument cannot be pickled.
            BackpressureError: the replica has too many unhandled requests, or too many requests wait for a replica.

        Raises (from the future):
            ActorError: the endpoint raised.
            ReplicaLostError: the replica died, and the request may have been handled.
            ServiceEndedError: the service has failed or been stopped.
        """
        return self._submit(ServiceRequest(*self._pack(args, kwargs)))

    def fanout(
        self, *args: Any, rolling: int | None = None, absent: Literal["wait", "skip"] = "wait", **kwargs: Any
    ) -> Future[ValueMesh[Any]]:
        """Call every replica.

        Args:
            *args: arguments of the endpoint.
            rolling: call this many replicas at a time, while the others handle the routed requests; None calls all
                together, each in order with its other requests.
            absent: what to do with replicas that are still starting, or die during the call: ``wait`` calls them, or
                their successors, when they are up, if `route` would send a request again; ``skip`` leaves them out, for
                things that a replica fetches by itself when it starts.
            **kwargs: keyword arguments of the endpoint.

        Returns:
            The future of the results, along the axis ``replicas``; it ends when all have ended, with the error of the
            first replica that had one.

        Raises:
            TypeError: the arguments do not fit the signature.
            ValueError: ``rolling`` is below 1, or ``absent`` is neither of the two.
            PayloadError: an argument cannot be pickled.
        """
        if absent not in ("wait", "skip"):
            raise ValueError(f'absent is "wait" or "skip", not {absent!r}')
        if rolling is not None:
            check_count("rolling", rolling, 1)
            self._check(*args, **kwargs)
            rolled = self._address.controller.roll.call_one(self._spec.name, rolling, absent == "skip", args, kwargs)
            return _from_controller(rolled)
        packed = self._pack(args, kwargs)
        result: Promise[ValueMesh[Any]] = Promise()
        self._client.when_known(lambda numbers: self._spread(numbers, packed, result, is_skipping=absent == "skip"))
        return result

    def _advice(self) -> str:
        name = f"{self._address.name}.{self._spec.name}"
        return (
            f"{name} is an endpoint of a service, and is called by one of its adverbs: {name}.route(...) calls the "
            "replica with the least to do, fanout(...) all"
        )

    def _spread(
        self, numbers: tuple[int, ...], packed: _Packed, result: Promise[ValueMesh[Any]], *, is_skipping: bool
    ) -> None:
        requests = [SlotRequest(number, is_skipping, *packed) for number in numbers]
        missing = set(numbers)

        def has_ended(number: int) -> None:
            missing.discard(number)
            if not missing:
                result.settle_by(lambda: _in_order(_results(requests, is_skipping=is_skipping)))

        for number, request in zip(numbers, requests, strict=True):
            request.future.add_done_callback(lambda _, number=number: has_ended(number))  # type: ignore[misc]
            try:
                self._client.submit(request)
            except ControlError as error:
                request.fail(error)


class SessionMethod(Method, Generic[P, R_co]):
    """One endpoint of the replica of a session.

    The example of `Session` shows one.
    """

    __slots__ = ("_binding",)

    def __init__(
        self, address: Address, client: ServiceClient, name: str, actor_class: type | None, binding: SessionBinding
    ) -> None:
        super().__init__(address, client, name, actor_class)
        self._binding = binding

    def route(self, *args: P.args, **kwargs: P.kwargs) -> Future[R_co]:
        """Call the session's replica; calls of one thread arrive there in order.

        Raises:
            ValueError: the session is closed.
            TypeError: the arguments do not fit the signature.
            PayloadError: an argument cannot be pickled.
            BackpressureError: the replica has too many unhandled requests.

        Raises (from the future):
            ActorError: the endpoint raised.
            SessionLostError: the replica is gone; no request is sent again, also not to `idempotent` endpoints.
            ServiceEndedError: the service has failed or been stopped.
        """
        if self._binding.is_closed:
            raise ValueError("the session is closed")
        return self._submit(SessionRequest(self._binding, *self._pack(args, kwargs)))

    def _advice(self) -> str:
        name = f"{self._address.name}.{self._spec.name}"
        return f"{name} is an endpoint of a service, and is called by session.{self._spec.name}.route(...)"


def _results(requests: list[SlotRequest], *, is_skipping: bool) -> list[Any]:
    results = []
    absent: ReplicaLostError | None = None
    for request in requests:
        try:
            results.append(request.future.get(0))
        except ReplicaLostError as error:
            if not (is_skipping or request.is_void):
                raise
            absent = error
    if absent is not None and not results:
        raise absent
    return results


def _in_order(results: list[Any]) -> ValueMesh[Any]:
    return ValueMesh({"replicas": len(results)}, results)


def _from_controller(rolled: Future[list[Any]]) -> Future[ValueMesh[Any]]:
    """The error of a replica, as it would have come from the replica itself."""
    result: Promise[ValueMesh[Any]] = Promise()

    def open_result() -> ValueMesh[Any]:
        try:
            return _in_order(rolled.get(0))
        except ActorError as error:
            if isinstance(error.cause, ControlError):
                raise error.cause from None
            raise

    rolled.add_done_callback(lambda _: result.settle_by(open_result))
    return result
