"""Who takes part, and in which order they take turns.

A player is a process (or server) that holds models; a contender is one way of decoding by a player. Pure:
starts nothing and measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from benchmarks.measurement import DraftMode

PlayerName = Literal["in-process", "grpc", "grpc-in-process", "transformers", "dflash"]
PLAYERS: tuple[PlayerName, ...] = get_args(PlayerName)
SERVED: tuple[PlayerName, ...] = ("grpc", "grpc-in-process")
BUDGETS = (8, 16, 32, 64)
AUTO = -1

_TITLES: dict[PlayerName, str] = {
    "in-process": "in process",
    "grpc": "gRPC, bls topology",
    "grpc-in-process": "gRPC, in_process topology",
    "transformers": "transformers generate",
    "dflash": "dflash package",
}


@dataclass(frozen=True)
class Contender:
    """One way of decoding."""

    player: PlayerName
    draft_mode: DraftMode  # with the peers: what theirs comes closest to
    tree_budget: int = AUTO

    @property
    def way(self) -> str:
        """`plain`, `chain`, `tree-16` or `tree-auto`."""
        if self.draft_mode == "off":
            return "plain"
        if self.draft_mode == "chain":
            return "chain"
        return f"tree-{'auto' if self.tree_budget == AUTO else self.tree_budget}"

    @property
    def name(self) -> str:
        """Unique key in the result file: `in-process/tree-16`; a peer's is the player's."""
        return f"{self.player}/{self.way}" if self.is_ours else self.player

    @property
    def title(self) -> str:
        """What people read."""
        return f"{self.way.replace('-', ' ')}, {_TITLES[self.player]}" if self.is_ours else self.name

    @property
    def is_ours(self) -> bool:
        """Whether our engine decodes."""
        return self.player not in ("transformers", "dflash")


def all_contenders(players: Sequence[PlayerName], budgets: Sequence[int]) -> tuple[Contender, ...]:
    """Everybody that the given players bring along.

    The second topology behind the server differs from the first by hops only, so it runs the two smallest
    budgets and the automatic one: time goes to the comparisons that can come out differently.
    """
    contenders: list[Contender] = []
    for player in players:
        if player == "transformers":
            contenders.append(Contender(player, "off"))
        elif player == "dflash":
            contenders.append(Contender(player, "chain"))
        else:
            is_short = player == "grpc-in-process"
            if not is_short:
                contenders += [Contender(player, "off"), Contender(player, "chain")]
            shown = sorted(budgets)[:2] if is_short else budgets
            contenders += [Contender(player, "tree", budget) for budget in (*shown, AUTO)]
    return tuple(contenders)


@dataclass(frozen=True)
class Turn:
    """One run: a contender decodes a prompt."""

    repeat: int
    prompt: int  # index
    contender: Contender


def turns(contenders: Sequence[Contender], prompts: int, repeats: int, served_repeats: int) -> Iterator[Turn]:
    """Every run, in order.

    A slow moment of the machine must fall on everybody alike: for each prompt all contenders run one after
    the other, and the one who begins changes from prompt to prompt. Those behind a server take part in the
    first `served_repeats` repeats.
    """
    for repeat in range(repeats):
        present = [each for each in contenders if each.player not in SERVED or repeat < served_repeats]
        for prompt in range(prompts):
            for contender in rotated(present, repeat * prompts + prompt):
                yield Turn(repeat, prompt, contender)


def rotated(contenders: Sequence[Contender], by: int) -> list[Contender]:
    """The same contenders, beginning `by` places later."""
    start = by % len(contenders) if contenders else 0
    return [*contenders[start:], *contenders[:start]]
