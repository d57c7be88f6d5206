"""What the hops of the `bls` topology cost: its round minus that of `in_process`, all through real Triton.

Served is a pair of Qwen3-8B's widths with few layers: what crosses a hop is the same, and it loads in
seconds. Needs the server's wheel, numpy 1.26 and the packages of this project in the interpreter that runs
this, so it takes part only when asked for.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

from benchmarks.gpu.checkpoints import SavedPair, save_pair
from benchmarks.gpu.demo import demo_folders
from benchmarks.gpu.setting import Facts, Setting, Skipped, free, one_line
from benchmarks.gpu.shapes import thin_qwen3_8b, tiny_qwen3
from benchmarks.measurement import Answer, Job

if TYPE_CHECKING:
    from ddtree_local.serving import Topology

_LAYERS = 6
_DEMO_TOKENS = 49_152  # ids of the demo's tokenizer, which is served with
_NEEDED = ("pytriton", "tritonclient", "grpc", "ddtree_client", "ddtree_local")
_NODES = 64
_PROMPT_TOKENS, _REPEATS = 256, 9
_OWN_TREES: Final = {"DDTREE_TREES_BUILT_BY": "orchestrator"}
# What is served: a name for the result, its topology, and variables beside it.
_SERVERS: Final[Mapping[str, tuple[Topology, Mapping[str, str]]]] = {
    "bls": ("bls", {}),
    "bls_own_trees": ("bls", _OWN_TREES),
    "bls_through_triton": ("bls", {"DDTREE_STAGE_CALLS": "triton"}),
    "in_process": ("in_process", {}),
}


def measure_topologies(setting: Setting) -> Facts:
    """Medians of a round's milliseconds in both topologies.

    Raises:
        Skipped: not asked for, or the server is not here.
    """
    if not setting.wants_triton:
        raise Skipped("needs Triton; ask for it with --triton")
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise Skipped(f"needs {', '.join(missing)} in this interpreter; see requirements/")
    tokenizer, _ = demo_folders(setting)
    shape = tiny_qwen3(_DEMO_TOKENS) if setting.is_tiny else thin_qwen3_8b(_LAYERS)
    setting.note(f"topologies: writing {shape.name}")
    with tempfile.TemporaryDirectory() as folder:
        saved = save_pair(
            shape, Path(folder), tokenizer=tokenizer, device=setting.device, dtype=setting.dtype
        )
        free(setting.device)
        try:
            return {"shape": shape.name, "nodes": _NODES, **_compare(setting, saved)}
        except Exception as error:  # noqa: BLE001 - a server can fail in many ways, and none is this run's end
            raise Skipped(f"Triton did not serve the pair ({one_line(error)})") from None


def _compare(setting: Setting, saved: SavedPair) -> Facts:
    # Only here: the client and the launcher come with the server.
    from benchmarks.players import Player, ServedModel
    from ddtree_local.project import find_project
    from ddtree_local.serving import ServedPair

    project = find_project(Path(__file__).parent)
    job = Job(
        input_ids=tuple(at % 200 + 2 for at in range(16 if setting.is_tiny else _PROMPT_TOKENS)),
        stop_ids=(),
        max_tokens=12 if setting.is_tiny else 65,
        draft_mode="tree",
        tree_budget=_NODES,
    )
    answers: dict[str, list[Answer]] = {name: [] for name in _SERVERS}
    with ExitStack() as stack:
        players: dict[str, Player] = {}
        for name, (topology, variables) in _SERVERS.items():  # in turn: each measures its costs at load
            setting.note(f"topologies: loading {name}")
            pair = ServedPair(
                saved.target,
                saved.draft,
                topology=topology,
                dtype=str(setting.dtype).removeprefix("torch."),
                prefix_cache=False,
            )
            players[name] = ServedModel(project, pair, threads=2, env=variables)
            stack.callback(players[name].close)
        for repeat in range(_REPEATS + 1):
            setting.note(f"topologies: repeat {repeat}")
            for name, player in players.items():
                answer = player.decode(job)
                if repeat:  # the first is a warm-up
                    answers[name].append(answer)
    facts: Facts = {name: _rounds(given) for name, given in answers.items()}
    for name in _SERVERS:
        if name != "in_process":
            beyond = facts[name]["round_ms"] - facts["in_process"]["round_ms"]
            facts[f"{name}_minus_in_process_ms"] = beyond
    return facts


def _rounds(given: list[Answer]) -> Facts:
    return {
        "round_ms": median(answer.round_ms or 0.0 for answer in given),
        "rounds": median(answer.rounds for answer in given),
        "nodes": median(answer.nodes or 0.0 for answer in given),
    }
