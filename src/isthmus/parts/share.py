"""Which names leave, and which names train: the same small choices serve both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..core.tensors import matches
from ..core.types import Inbox, Share


@dataclass(frozen=True)
class ByName:
    """Names that match any pattern and no ``but`` pattern; the rest stay."""

    patterns: tuple[str, ...] = ("*",)
    but: tuple[str, ...] = ()

    def scope(self, names: Sequence[str]) -> list[str]:
        """The same in every round."""
        return [n for n in names if matches(n, self.patterns) and not matches(n, self.but)]

    def __call__(self, names: Sequence[str], inbox: Inbox) -> list[str]:
        """The scope, in every round."""
        return self.scope(names)


@dataclass(frozen=True)
class Rotating:
    """Sets of patterns that take turns, one a round: ``Rotating((("*.lora_b",), ("*.lora_a",)))``; names in no set go every round."""

    turns: tuple[tuple[str, ...], ...]

    def scope(self, names: Sequence[str]) -> list[str]:
        """Everything."""
        return list(names)

    def __call__(self, names: Sequence[str], inbox: Inbox) -> list[str]:
        """The names whose turn the round is, and those that take no turns."""
        turn = self.turns[inbox.round % len(self.turns)]
        waiting = [p for t in self.turns for p in t]
        return [n for n in names if matches(n, turn) or not matches(n, waiting)]


@dataclass(frozen=True)
class Directed:
    """Of the patterns ``among``, the one that the server's directive ``word`` names; names that fit none go every round."""

    word: str
    among: tuple[str, ...]

    def scope(self, names: Sequence[str]) -> list[str]:
        """Everything."""
        return list(names)

    def __call__(self, names: Sequence[str], inbox: Inbox) -> list[str]:
        """What the server asks for this round, and what it never has to ask for."""
        return [n for n in names if matches(n, (inbox.directive[self.word],)) or not matches(n, self.among)]


@dataclass(frozen=True)
class Both:
    """What two choices have in common."""

    first: Share
    second: Share

    def scope(self, names: Sequence[str]) -> list[str]:
        """Names in both."""
        return self.second.scope(self.first.scope(names))

    def __call__(self, names: Sequence[str], inbox: Inbox) -> list[str]:
        """Names in both, this round."""
        return self.second(self.first(names, inbox), inbox)


@dataclass(frozen=True)
class Held:
    """Another choice, of which some patterns never leave though the server holds them too: it can make them itself."""

    base: Share
    patterns: tuple[str, ...]

    def scope(self, names: Sequence[str]) -> list[str]:
        """That of the base."""
        return self.base.scope(names)

    def __call__(self, names: Sequence[str], inbox: Inbox) -> list[str]:
        """The base's choice without the patterns."""
        return [n for n in self.base(names, inbox) if not matches(n, self.patterns)]


@dataclass(frozen=True)
class Except:
    """Another choice without some patterns, which become private for good, save those that match ``but``."""

    base: Share
    patterns: tuple[str, ...]
    but: tuple[str, ...] = ()

    def _without(self, names: Sequence[str]) -> list[str]:
        return [n for n in names if not matches(n, self.patterns) or matches(n, self.but)]

    def scope(self, names: Sequence[str]) -> list[str]:
        """The base's scope without the patterns."""
        return self._without(self.base.scope(names))

    def __call__(self, names: Sequence[str], inbox: Inbox) -> list[str]:
        """The base's choice without the patterns."""
        return self._without(self.base(names, inbox))
