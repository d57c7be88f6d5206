"""What the hops of the `bls` topology cost: its round minus that of `in_process`, both through real Triton.

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

from benchmarks.contenders import PlayerName
from benchmarks.gpu.checkpoints import SavedPair, save_pair
from benchmarks.gpu.demo import demo_folders
from benchmarks.gpu.setting import Facts, Setting, Skipped, free, one_line
from benchmarks.gpu.shapes import thin_qwen3_8b, tiny_qwen3
from benchmarks.measurement import Answer, Job, Setup

_LAYERS = 6
_NEEDED = ("pytriton", "tritonclient", "grpc", "ddtree_client", "ddtree_local")
_NODES = 64
_PROMPT_TOKENS, _REPEATS = 256, 5


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
    shape = tiny_qwen3() if setting.is_tiny else thin_qwen3_8b(_LAYERS)
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
    from benchmarks.players import Player, start_player
    from ddtree_local.project import find_project

    setup = Setup(str(saved.target), str(saved.draft), str(setting.dtype).removeprefix("torch."), threads=2)
    job = Job(
        input_ids=tuple(at % 200 + 2 for at in range(16 if setting.is_tiny else _PROMPT_TOKENS)),
        stop_ids=(),
        max_tokens=12 if setting.is_tiny else 65,
        draft_mode="tree",
        tree_budget=_NODES,
    )
    names: Mapping[str, PlayerName] = {"bls": "grpc", "in_process": "grpc-in-process"}
    facts: Facts = {}
    with ExitStack() as stack:
        players: dict[str, Player] = {}
        for topology, name in names.items():  # one after another: each measures its costs at load
            setting.note(f"topologies: loading {topology}")
            players[topology] = start_player(name, setup, find_project(Path(__file__).parent))
            stack.callback(players[topology].close)
        answers: dict[str, list[Answer]] = {topology: [] for topology in names}
        for repeat in range(_REPEATS + 1):
            setting.note(f"topologies: repeat {repeat}")
            for topology, player in players.items():
                answer = player.decode(job)
                if repeat:  # the first is a warm-up
                    answers[topology].append(answer)
    for topology, given in answers.items():
        facts[topology] = {
            "round_ms": median(answer.round_ms or 0.0 for answer in given),
            "rounds": median(answer.rounds for answer in given),
            "nodes": median(answer.nodes or 0.0 for answer in given),
        }
    facts["bls_minus_in_process_ms"] = facts["bls"]["round_ms"] - facts["in_process"]["round_ms"]
    return facts
