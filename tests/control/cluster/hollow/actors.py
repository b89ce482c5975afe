"""What the tests of hosts spawn."""

from skipper.control import Actor, ActorMesh, current_rank, endpoint


class Plain(Actor):
    """Answers, and waits for nothing."""

    def __init__(self, bad_rank: int | None = None) -> None:
        if current_rank().rank == bad_rank:
            raise LookupError(f"rank {bad_rank} is not to be")
        self._noted: list[int] = []

    @endpoint
    def rank(self) -> int:
        """Where it is."""
        return current_rank().rank

    @endpoint
    def echo(self, value: bytes) -> bytes:
        """Give it back."""
        return value

    @endpoint
    def refuse(self) -> None:
        """Fail."""
        raise KeyError("no such thing")

    @endpoint
    def note(self, number: int) -> None:
        """Remember it; a negative one is a mistake."""
        if number < 0:
            raise ValueError("a negative number")
        self._noted.append(number)

    @endpoint
    def noted(self) -> list[int]:
        """What was noted, in the order in which it came."""
        return self._noted

    @endpoint
    def ask(self, other: "ActorMesh[Plain]") -> list[int]:
        """Ask other actors."""
        return list(other.rank.call().get(10))


class Waiting(Actor):
    """Has an async endpoint."""

    @endpoint
    async def rank(self) -> int:
        """Where it is."""
        return current_rank().rank
