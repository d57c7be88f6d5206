"""What the engine asks of the stages, whichever way they are reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ddtree.device.messages import RoundRequest, RoundResult, RoundSizes
from ddtree.errors import ConfigError
from ddtree.types import (
    DrafterInfo,
    DraftRequest,
    DraftResult,
    FeatureRequest,
    FeatureResult,
    PrefillRequest,
    PrefillResult,
    TreeBatch,
    TreeRequest,
    VerifierInfo,
    VerifyRequest,
    VerifyResult,
)

# The stages' model names, and what they are called in metrics and logs of either topology.
DRAFTER, TREE_BUILDER, TARGET_VERIFIER = "drafter", "tree_builder", "target_verifier"


class WholeRounds(Protocol):
    """Rounds in one call, of stages that share a device."""

    @property
    def sizes(self) -> RoundSizes:
        """What is prepared, and what it takes."""
        ...

    async def round(self, request: RoundRequest) -> RoundResult:
        """Draft, build trees, verify and commit."""
        ...


@dataclass(frozen=True)
class StageInfo:
    """What the loaded stages are; checked to fit each other where it is built.

    Raises:
        ConfigError: drafter and verifier were loaded with different draft checkpoints.
    """

    verifier: VerifierInfo
    drafter: DrafterInfo
    rounds: WholeRounds | None = None  # where the stages can do a round in one call

    def __post_init__(self) -> None:
        if self.verifier.draft_hash != self.drafter.draft_hash:
            raise ConfigError(
                "drafter and target_verifier must load the same draft checkpoint, got "
                f"{self.drafter.draft_hash} and {self.verifier.draft_hash}; give both the same draft folder"
            )


class Stages(Protocol):
    """The stages of a round. Every call is packed over sequences; errors of a stage are `Unavailable`."""

    async def describe(self) -> StageInfo:
        """What is loaded, and what the stages hold now."""
        ...

    async def prefill(self, request: PrefillRequest) -> PrefillResult:
        """Let the target read chunks of committed ids."""
        ...

    async def draft(self, request: DraftRequest) -> DraftResult:
        """Give the drafter new context and take its candidates."""
        ...

    async def build_tree(self, request: TreeRequest) -> TreeBatch:
        """Make draft trees of candidates."""
        ...

    async def verify(self, request: VerifyRequest) -> VerifyResult:
        """Check trees against the target; the accepted paths are committed in its cache."""
        ...

    async def read_features(self, request: FeatureRequest) -> FeatureResult:
        """Read stored context features back."""
        ...

    async def release(self, session_ids: Sequence[int]) -> None:
        """Drop sessions in all stages."""
        ...

    async def close(self) -> None:
        """Give back what the stages hold; nothing may be called after it."""
        ...


@runtime_checkable
class OwnStages(Protocol):
    """Stages of this process: what they have lost for good comes back when this process is loaded again."""

    async def check(self) -> None:
        """Look whether they can work; waits for nothing while they can.

        Raises:
            Unavailable: they cannot.
        """
        ...
