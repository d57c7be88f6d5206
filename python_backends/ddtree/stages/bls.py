"""The stages as Triton models of their own: topology `bls`, of business logic scripting.

Each stage is called by model name with an operation and named arrays; how the call is made is handed in, so
this module runs without Triton. Context features cross by reference where both stages have shown that they
share memory; what a reference is, the stages alone know.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final, TypeVar

import numpy as np
import torch

from ddtree.errors import Unavailable
from ddtree.events import Observe, StageCalled, ignore, watch_call
from ddtree.stages.base import DRAFTER, TARGET_VERIFIER, TREE_BUILDER, StageInfo
from ddtree.tree import build_trees
from ddtree.tree_check import check_trees
from ddtree.types import (
    DrafterInfo,
    DraftRequest,
    DraftResult,
    FeatureProbe,
    FeatureRequest,
    FeatureResult,
    PrefillRequest,
    PrefillResult,
    TreeBatch,
    TreeRequest,
    Usage,
    VerifierInfo,
    VerifyRequest,
    VerifyResult,
)
from ddtree.wire import Arrays, decode, encode, names

_LOG = logging.getLogger(__name__)
# (model, operation, inputs) to outputs; raises Unavailable when the stage cannot answer.
StageCall = Callable[[str, str, Arrays], Awaitable[Mapping[str, Any]]]
_Message = TypeVar("_Message")
_BY_REFERENCE: Final[Arrays] = {"by_reference": np.array([True])}
# A try fails also where a stage is only busy, or its rows are written meanwhile: counted in descriptions.
_TRIED_AGAIN_AT: Final = frozenset({2, 4, 8, 16, 32})
_ANSWERS: Final[Mapping[str, type]] = {
    "prefill": PrefillResult,
    "draft": DraftResult,
    "build_tree": TreeBatch,
    "verify": VerifyResult,
    "read_features": FeatureResult,
}
# By operation, what to ask a stage for: Triton sends only outputs that were named.
OUTPUTS: Final[Mapping[str, tuple[str, ...]]] = {
    "channel": ("info", "stage_ms"),
    "describe": ("info", "stage_ms"),
    "release": ("status", "stage_ms"),
    "probe": (*names(FeatureProbe), "stage_ms"),
    **{operation: (*names(answer), "stage_ms") for operation, answer in _ANSWERS.items()},
}


class BlsStages:
    """Stages behind BLS; see `Stages`."""

    def __init__(
        self,
        call: StageCall,
        observe: Observe = ignore,
        end: Callable[[], Awaitable[None]] | None = None,
        *,
        builds_trees: bool = False,
    ) -> None:
        """Take how stages are called, and how the calls under way are waited for at the end.

        With `builds_trees` the model `tree_builder` is not called: trees are built here, one hop fewer.
        """
        self._send = call
        self._builds_trees = builds_trees
        self._end = end
        self._observe = observe
        self._feature_dtype: torch.dtype | None = None
        self._shares: tuple[str, str] = ("", "")  # what the stages said when it was last tried
        self._descriptions = 0  # that said so
        self._wishes: Arrays = {}  # what the verifier is sent beside a message

    async def describe(self) -> StageInfo:
        """What is loaded, and what the stages hold now."""
        torch.set_num_threads(1)  # this process must not spin beside the stages' threads
        verifier, drafter = await asyncio.gather(self._describe(TARGET_VERIFIER), self._describe(DRAFTER))
        info = StageInfo(read_info(VerifierInfo, verifier), read_info(DrafterInfo, drafter))
        self._feature_dtype = getattr(torch, info.verifier.feature_dtype)
        shares = (info.verifier.shares, info.drafter.shares)
        is_new = shares != self._shares
        self._descriptions = 1 if is_new else self._descriptions + 1
        if is_new or (not self._wishes and self._descriptions in _TRIED_AGAIN_AT):
            self._wishes = _BY_REFERENCE if await self._can_refer(*shares) else {}
            self._shares = shares
        return info

    async def prefill(self, request: PrefillRequest) -> PrefillResult:
        """Let the target read chunks of committed ids."""
        return await self._exchange(TARGET_VERIFIER, "prefill", request, PrefillResult)

    async def draft(self, request: DraftRequest) -> DraftResult:
        """Give the drafter new context and take its candidates."""
        return await self._exchange(DRAFTER, "draft", request, DraftResult)

    async def build_tree(self, request: TreeRequest) -> TreeBatch:
        """Make draft trees of candidates."""
        if self._builds_trees:
            started = time.perf_counter()
            trees = build_trees(request)
            seconds = time.perf_counter() - started
            self._observe(StageCalled(TREE_BUILDER, "build_tree", seconds, seconds))
            return trees
        trees = await self._exchange(TREE_BUILDER, "build_tree", request, TreeBatch)
        check_trees(trees, *request.top_ids.shape[:2])
        return trees

    async def verify(self, request: VerifyRequest) -> VerifyResult:
        """Check trees against the target; the accepted paths are committed in its cache."""
        return await self._exchange(TARGET_VERIFIER, "verify", request, VerifyResult)

    async def read_features(self, request: FeatureRequest) -> FeatureResult:
        """Read stored context features back."""
        return await self._exchange(TARGET_VERIFIER, "read_features", request, FeatureResult)

    async def release(self, session_ids: Sequence[int]) -> None:
        """Drop sessions in both stages; both are asked even when one does not answer."""
        arrays = {"session_ids": np.asarray(session_ids, dtype=np.int64)}
        calls = (self._call(model, "release", arrays) for model in (TARGET_VERIFIER, DRAFTER))
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def close(self) -> None:
        """Nothing is held here but calls that nobody waits for any more."""
        if self._end is not None:
            await self._end()

    async def _call(self, model: str, operation: str, arrays: Arrays) -> Mapping[str, Any]:
        answer = self._send(model, operation, arrays)
        return await watch_call(self._observe, model, operation, answer, _work_seconds)

    async def _exchange(self, model: str, operation: str, request: Any, result: type[_Message]) -> _Message:
        assert self._feature_dtype is not None, "describe comes before the first call"
        wishes = self._wishes if model == TARGET_VERIFIER else {}
        outputs = await self._call(model, operation, encode(request) | wishes)
        try:
            return decode(result, outputs, self._feature_dtype)
        except KeyError as error:
            raise Unavailable(
                f"stage {model} answered {operation} without {error}; are the versions equal?"
            ) from None

    async def _can_refer(self, verifier: str, drafter: str) -> bool:
        """Whether the drafter reads by reference what the verifier says is there."""
        if not verifier or verifier != drafter:
            return False
        try:
            (rows,) = names(FeatureProbe)
            told = await self._call(TARGET_VERIFIER, "probe", {})
            there = await self._call(TARGET_VERIFIER, "probe", _BY_REFERENCE)
            read = await self._call(DRAFTER, "probe", {rows: np.array(there[rows])})
            can = np.array_equal(told[rows], read[rows])
        except (Unavailable, KeyError) as error:
            _LOG.warning("context features are not read by reference: %s", error)
            return False
        _LOG.log(
            logging.INFO if can else logging.WARNING,
            "context features cross %s (%s)",
            "by reference" if can else "by value: the drafter reads other numbers than the verifier keeps",
            verifier,
        )
        return can

    async def _describe(self, model: str) -> dict[str, Any]:
        outputs = await self._call(model, "describe", {})
        info: dict[str, Any] = json.loads(bytes(outputs["info"][0]))
        return info


def _work_seconds(outputs: Mapping[str, Any]) -> float:
    return float(outputs["stage_ms"][0]) / 1e3 if "stage_ms" in outputs else 0.0


def read_info(info_type: type[_Message], values: Mapping[str, Any]) -> _Message:
    """Build stage information from its JSON form."""
    names = [field.name for field in fields(info_type)]  # type: ignore[arg-type]
    arguments = {name: values[name] for name in names if name in values}  # the others have defaults
    arguments["usage"] = Usage(**arguments["usage"])
    for name, value in arguments.items():
        if isinstance(value, list):
            arguments[name] = tuple(value)
    return info_type(**arguments)
