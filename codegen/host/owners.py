"""Whose memory the names of a host program look at, and whose it is."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...ir.graph.graph import TensorType


@dataclass(slots=True)
class Owners:
    """What is known of memory at one place of a program.

    ``of`` gives, for each name that is bound, the name whose object owns the memory that it looks at, and ``shares``
    how many names look at what a name owns. ``ours`` is memory that the program allocated and that nobody else has
    seen; ``products`` are results of products in memory that nothing else shared when they were made.
    """

    of: dict[str, str] = field(default_factory=dict)
    shares: dict[str, int] = field(default_factory=dict)
    ours: dict[str, TensorType] = field(default_factory=dict)
    products: dict[str, TensorType] = field(default_factory=dict)

    def bind(self, name: str, owner: str) -> None:
        """A name looks at the memory of its owner, which may be itself."""
        self.of[name] = owner
        self.shares[owner] = self.shares.get(owner, 0) + 1

    def release(self, name: str) -> str:
        """A name is bound no longer; the owner of what it looked at."""
        owner = self.of.pop(name)
        self.shares[owner] -= 1
        return owner

    def memory(self, name: str) -> str:
        """The owner of what a name looks at: the name itself where it is not known."""
        return self.of.get(name, name)

    def share(self, name: str) -> None:
        """Somebody else may look at the memory of a name from now on."""
        for known in (self.ours, self.products):
            known.pop(self.memory(name), None)

    def is_alone(self, name: str) -> bool:
        """Whether a name looks at memory that was made under it, and that no other looks at."""
        return self.of.get(name) == name and self.shares[name] == 1
