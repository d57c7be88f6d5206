"""Compares captured steps, calls and rounds with the general way, on the device they will serve on.

Kernels are compiled where they run, so what can go wrong shows at load: no compiler, a card or a driver they
do not fit. Then stages go on without them, more slowly and as right. One session reads a made-up prompt; the
step over a small tree must say what the packed forward says, a prompt that a step has read must be the prompt
that the packed forward reads, and after some rounds or calls the next step must say what it says behind the
same tokens read at once. This module knows what right is, not how steps work.
"""

from __future__ import annotations

import torch

from ddtree.device.messages import RoundRequest
from ddtree.device.rounds import DeviceRounds
from ddtree.device.steps import TargetSteps
from ddtree.device.verify_calls import VerifyCalls
from ddtree.draft import Drafter
from ddtree.staging import read_prepared, stage
from ddtree.types import DraftRequest, PrefillRequest, PrefillResult, SessionBatch, TreeBatch
from ddtree.verify import TargetVerifier

_PROMPT = 70  # tokens: with the usual pages, more than one
_ROUNDS = 3
_NODES = 31  # most nodes of a tried tree
_SESSION, _AT_ONCE = 0, 1
# Share of the logits' own size that may differ; half precision adds up in another order.
_ROUNDING = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}


class Misfit(Exception):
    """Kernels do not compute here what they should; the message says what is off."""


@torch.inference_mode()
def check_steps(verifier: TargetVerifier, steps: TargetSteps) -> None:
    """Hold the captured steps of one sequence to the packed forward: each size has kernels of its own.

    Raises:
        Misfit: logits are off.
    """
    ids = _prompt(verifier)
    read, room = _open(verifier, _SESSION, ids), _slots(verifier) - len(ids) - 1
    counts = sorted({min(size.nodes, room) for size in steps.sizes if size.places == 1})
    try:
        for count in counts:
            what = f"a captured step of {count} nodes"
            _compare(verifier, steps, _tree(verifier, count), int(read.next_tokens[0]), what)
        if verifier.pool.states is None:
            _check_reading(verifier, steps, ids, read)
    finally:
        verifier.release([_SESSION, _AT_ONCE])


@torch.inference_mode()
def check_rounds(
    verifier: TargetVerifier, drafter: Drafter, steps: TargetSteps, rounds: DeviceRounds
) -> None:
    """Do a few rounds, then hold the next step to the same step of a session that read everything at once.

    Raises:
        Misfit: a round lost a session, or left something else in the cache than reading its tokens leaves.
    """
    ids = _prompt(verifier)
    read = _open(verifier, _SESSION, ids)
    count = torch.tensor([len(ids)], dtype=torch.int32)
    reserve = torch.tensor([_slots(verifier)], dtype=torch.int32)
    context = DraftRequest(_batch(_SESSION, 0), ids, read.features, count, ids[:1], reserve, depth=0, width=0)
    drafter.draft(context)
    nodes = max((size.nodes for size in steps.sizes if size.places == 1 and size.nodes <= _NODES), default=0)
    root = int(read.next_tokens[0])
    try:
        for _ in range(_ROUNDS):
            result = rounds.run(_request(drafter, root, len(ids), nodes))
            if int(result.status[0]) or int(result.draft_status[0]):
                raise Misfit("a round lost its session")
            path = result.accepted_tokens[0, : int(result.accepted_counts[0])]
            ids = torch.cat((ids, torch.tensor([root], dtype=torch.int32), path))
            root = int(result.bonus_tokens[0])
        _compare_next(verifier, steps, ids, root, "the step after some rounds")
    finally:
        verifier.release([_SESSION, _AT_ONCE])
        drafter.release([_SESSION])


@torch.inference_mode()
def check_calls(verifier: TargetVerifier, steps: TargetSteps, calls: VerifyCalls) -> None:
    """Answer a few calls, each with the target's own token as second child, then hold the next step likewise.

    Raises:
        Misfit: the calls left something else in the cache than reading their tokens leaves.
    """
    ids = _prompt(verifier)
    root = int(_open(verifier, _SESSION, ids).next_tokens[0])
    try:
        for _ in range(_ROUNDS):
            session = verifier.sessions.find(_SESSION, 0, len(ids))
            assert session is not None, "nobody else is here"
            alone = steps.stage([session], TreeBatch.empty(1), [root])
            if alone is None:
                return
            paths = calls.run([session], _two(verifier, int(alone.step.logits[0].argmax())), [root])
            if paths is None:
                return
            told = [root, *paths.lists()[0]]
            verifier.sessions.commit(session, told)
            ids = torch.cat((ids, torch.tensor(told, dtype=torch.int32)))
            root = int(paths.bonus_tokens[0])
        _compare_next(verifier, steps, ids, root, "the step after some verify calls")
    finally:
        verifier.release([_SESSION, _AT_ONCE])


def _check_reading(
    verifier: TargetVerifier, steps: TargetSteps, ids: torch.Tensor, read: PrefillResult
) -> None:
    """Hold features and cache of a prompt that a captured step reads to the packed forward's."""
    most = max((size.nodes + 1 for size in steps.sizes if size.places == 1), default=0)
    first = max(1, len(ids) - most)
    _open(verifier, _AT_ONCE, ids[:first])
    session = verifier.sessions.find(_AT_ONCE, 0, first)
    assert session is not None, "it was opened just now"
    chunk = ids[first:].tolist()
    captured = read_prepared(steps, [session], [chunk])
    if captured is None:
        return
    taps = torch.cat([tap[captured.rows] for tap in captured.step.taps], dim=-1)
    what = "a prompt that a captured step reads"
    _hold(verifier.projection(taps), read.features[first:], f"features of {what}")
    verifier.sessions.commit(session, chunk)
    _compare(verifier, steps, TreeBatch.empty(1), int(read.next_tokens[0]), what, reference=_AT_ONCE)


def _request(drafter: Drafter, root: int, length: int, nodes: int) -> RoundRequest:
    def one(value: int) -> torch.Tensor:
        return torch.tensor([value], dtype=torch.int32)

    depth = one(drafter.block_size - 1)
    batch = _batch(_SESSION, length)
    return RoundRequest(batch, one(0), one(root), one(nodes), depth, torch.tensor([False]), nodes)


def _compare(
    verifier: TargetVerifier,
    steps: TargetSteps,
    trees: TreeBatch,
    root: int,
    what: str,
    reference: int = _SESSION,
) -> None:
    """Hold a captured step of the session to the packed forward of a reference session of the same tokens."""
    sessions = {session.session_id: session for session in verifier.sessions}
    captured = steps.stage([sessions[_SESSION]], trees, [root])
    if captured is None:
        return
    rows = int(trees.counts[0]) + 1
    found = captured.step.logits[:rows].clone()
    packed = stage(verifier.target, verifier.pool, [sessions[reference]], trees, [root])
    _hold(found, packed.step.logits, f"logits of {what}")


def _compare_next(
    verifier: TargetVerifier, steps: TargetSteps, ids: torch.Tensor, root: int, what: str
) -> None:
    """Hold the session's next step to that of a session which reads all its ids at once."""
    _open(verifier, _AT_ONCE, ids)
    _compare(verifier, steps, TreeBatch.empty(1), root, what, reference=_AT_ONCE)


def _hold(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    off = float((found.float() - expected.float()).norm() / expected.float().norm())
    if not off <= _ROUNDING[expected.dtype]:  # a NaN is no small difference
        raise Misfit(f"{what} are off by {off:.2g}")


def _open(verifier: TargetVerifier, session: int, ids: torch.Tensor) -> PrefillResult:
    count = torch.tensor([len(ids)], dtype=torch.int32)
    reserve = torch.tensor([_slots(verifier)], dtype=torch.int32)
    return verifier.prefill(PrefillRequest(_batch(session, 0), ids, count, reserve))


def _prompt(verifier: TargetVerifier) -> torch.Tensor:
    """Made-up ids, `[n]` int32."""
    generator = torch.Generator().manual_seed(0)
    length = min(_PROMPT, _slots(verifier) // 4)
    return torch.randint(verifier.target.vocab_size, (length,), generator=generator).int()


def _slots(verifier: TargetVerifier) -> int:
    """Slots of each of the two sessions."""
    return min(4 * _PROMPT, verifier.target.context_length, verifier.pool.total_slots // 2)


def _batch(session: int, length: int) -> SessionBatch:
    zero = torch.zeros(1, dtype=torch.int32)
    return SessionBatch(torch.tensor([session]), zero, zero + length)


def _tree(verifier: TargetVerifier, count: int) -> TreeBatch:
    """A tree in which node i is a child of node i // 2, and the root has one."""
    nodes = torch.arange(1, count + 1, dtype=torch.int32)[None]
    depths = torch.tensor([[node.bit_length() for node in range(1, count + 1)]], dtype=torch.int32)
    tokens = nodes % verifier.target.vocab_size
    return TreeBatch(tokens, nodes // 2, depths, torch.tensor([count], dtype=torch.int32))


def _two(verifier: TargetVerifier, token: int) -> TreeBatch:
    """The root's children: another token, and this one."""
    tokens = torch.tensor([[(token + 1) % verifier.target.vocab_size, token]], dtype=torch.int32)
    zeros = torch.zeros_like(tokens)
    return TreeBatch(tokens, zeros, zeros + 1, torch.tensor([2], dtype=torch.int32))
