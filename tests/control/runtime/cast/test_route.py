"""What a caster knows of the nodes of a tree."""

from skipper.control.runtime.cast.route import Route
from skipper.control.wire.messages import Call
from skipper.control.wire.process_ref import ProcessRef

ROOT = ProcessRef("job-1", "ipv4:10.0.0.1:1", "script")


def test_what_is_sent_again_to_the_children_of_a_node_that_has_ended_may_have_come_before() -> None:
    members = tuple(ProcessRef(f"job-{n}", f"ipv4:10.0.0.{n}:1", f"p[{n}]", ROOT) for n in range(2, 6))
    route = Route(1, ROOT, members, tuple(enumerate(members)), [(0, True)] * 4, 2, ())
    call = Call(7, method="run", payload=(b"",))
    for _ in range(2):
        route.cast(call, (), 1, lambda port: False)
    first, second = members[:2]
    assert route.tree.parent_of[1] == 0
    assert not route.may_have_come(second.id, 1)

    _, (span,) = route.bury(first.id)
    assert [cast.number for cast in route.unfinished(span)] == [1, 2]
    route.cast(call, (), 1, lambda port: False)
    assert [route.may_have_come(second.id, number) for number in (1, 2, 3)] == [True, True, False]
    assert not route.may_have_come(first.id, 1)
    assert not route.may_have_come("job-of-others", 1)
