"""The benchmark of a GPU rehearsed on tiny shapes: the same code as there, seconds instead of minutes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from benchmarks.gpu import picture, report, stages
from benchmarks.gpu.eager import EagerRound
from benchmarks.gpu.exact import WAYS as ENGINE_WAYS
from benchmarks.gpu.figures import FIGURES, summarise, table
from benchmarks.gpu.limits import MemoryLimits
from benchmarks.gpu.on_device import DeviceRound
from benchmarks.gpu.opened import ROOT
from benchmarks.gpu.placement import Placement
from benchmarks.gpu.read_kernel import programs_for, sum_all
from benchmarks.gpu.run import main
from benchmarks.gpu.seam import WAYS
from benchmarks.gpu.shapes import make_pair, qwen3_8b, qwen36_27b, tiny_hybrid, tiny_qwen3
from benchmarks.gpu.stages import SHORT, Rows, measure_way
from benchmarks.gpu.timing import Timing, time_parts
from ddtree.draft import Drafter
from tests.fakes.device import DEVICE
from tests.fakes.plain_kernels import in_place_of_kernels
from tests.fakes.scripted_draft import Script, ScriptedDrafter
from tests.fakes.tiny_models import make_draft, make_target

KEYS = {
    "qwen3_8b_plain_ms", "qwen3_8b_verify65_ms", "qwen3_8b_draft_ms", "qwen3_8b_round64_ms",
    "demo_tree_over_plain", "demo_tree_over_dflash", "context16k_verify65_over_plain",
    "worst_batch_tree_over_plain", "bls_minus_in_process_ms",
}  # fmt: skip
NOT_HERE = {"demo_tree_over_dflash", "bls_minus_in_process_ms"}  # need a package and a server


def rehearse(out: Path, *arguments: str) -> Result:
    options = ["--device", "cpu", "--tiny", "--seconds", "0.1", "--out", str(out), *arguments]
    return CliRunner().invoke(main, options)


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu")
    target, draft = make_target(folder / "target"), make_draft(folder / "draft")
    out = folder / "results" / "gpu.json"
    outcome = rehearse(out, "--demo-target", str(target), "--demo-draft", str(draft))
    assert outcome.exit_code == 0, outcome.output
    return out


def test_every_figure_that_applies_is_there(rehearsed: Path) -> None:
    result = json.loads(rehearsed.read_text())
    assert set(result["summary"]) == KEYS == {figure.key for figure in FIGURES}
    assert {key for key, value in result["summary"].items() if value is None} == NOT_HERE
    assert all(value > 0 for value in result["summary"].values() if value is not None)
    assert result["settings"]["is_tiny"]
    assert {row["key"] for row in result["table"]} == KEYS | {"qwen36_27b_verify65_over_plain"}
    assert sorted(file.name for file in rehearsed.parent.iterdir()) == ["gpu.json", "gpu.png"]


def test_no_section_failed_and_who_did_not_run_says_why(rehearsed: Path) -> None:
    sections = json.loads(rehearsed.read_text())["sections"]
    assert set(sections) == {"limits", "stages", "demo", "hybrid", "topologies", "exact"}
    assert [name for name, facts in sections.items() if "error" in facts] == []
    assert sections["topologies"]["skipped"] == "needs Triton; ask for it with --triton"
    assert "--dflash" in sections["demo"]["absent"]["dflash"]
    assert sections["limits"]["read_gb_s"] > 0
    assert all(
        context["ways"]["eager"]["same_tokens"] == 1 for context in sections["stages"]["contexts"].values()
    )


def test_a_round_is_its_parts_and_the_hosts_share(rehearsed: Path) -> None:
    contexts = json.loads(rehearsed.read_text())["sections"]["stages"]["contexts"]
    assert {label: facts["tokens"] for label, facts in contexts.items()} == {"1k": 96, "16k": 192}
    for facts in contexts.values():
        way = facts["ways"]["eager"]
        assert set(way["verify"]) == {"17", "65"}
        assert sum(way["parts"].values()) == pytest.approx(way["round"]["ms"], abs=1e-3)
        assert 0 < facts["limit_ms"]["draft"] < way["draft"]["ms"]
        assert set(way["parts"]) == {"draft", "build", "verify", "settle", "host"}
        for name in ("plain", "plain_with_host", "draft", "build", "round"):
            assert 0 < way[name]["p10"] <= way[name]["ms"] <= way[name]["p90"]


def test_batches_and_the_worst_of_them(rehearsed: Path) -> None:
    demo = json.loads(rehearsed.read_text())["sections"]["demo"]
    assert [row["batch"] for row in demo["batches"]] == [1, 2]
    assert demo["worst_batch_tree_over_plain"] == min(row["tree_over_plain"] for row in demo["batches"])
    assert demo["alone"]["in-process/plain"]["acceptance_length"]["median"] == 1
    assert demo["alone"]["in-process/tree-64"]["nodes_per_round"]["median"] > 16
    assert demo["same_as_plain"] == {"prompts": 1, "of": 1}


def test_a_later_run_of_a_part_keeps_the_others(rehearsed: Path, tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    out.write_text(rehearsed.read_text())
    before = json.loads(out.read_text())
    assert rehearse(out, "--only", "hybrid").exit_code == 0
    after = json.loads(out.read_text())
    assert after["sections"]["stages"] == before["sections"]["stages"]
    assert after["sections"]["hybrid"]["at"] >= before["sections"]["hybrid"]["at"]
    assert after["sections"]["hybrid"] != before["sections"]["hybrid"]


def test_another_cards_results_are_not_mixed_in(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    here: dict[str, Any] = {"card": "one", "driver": "1", "torch": "2", "triton": None, "transformers": "5"}
    report.Results(out, here, {"is_tiny": False}).add("limits", {"read_gb_s": 1.0})
    assert report.Results(out, here, {"is_tiny": False}).sections == {"limits": {"read_gb_s": 1.0}}
    assert report.Results(out, {**here, "card": "two"}, {"is_tiny": False}).sections == {}
    assert report.Results(out, here, {"is_tiny": True}).sections == {}


def test_what_a_section_has_so_far_outlives_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is taken back between two of a section's measurements leaves the first."""

    def taken(_: torch.device) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stages, "free", taken)
    out = tmp_path / "gpu.json"
    assert rehearse(out, "--only", "stages").exit_code == 1
    facts = json.loads(out.read_text())["sections"]["stages"]
    assert facts["is_whole"] is False
    assert facts["contexts"]["1k"]["ways"]["eager"]["plain"]["ms"] > 0
    assert facts["contexts"]["16k"]["ways"] == {}


def test_large_shapes_are_not_tried_on_a_cpu(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(main, ["--device", "cpu", "--out", str(tmp_path / "gpu.json")])
    assert outcome.exit_code == 2
    assert "the shapes of hybrid and stages need a GPU; give --tiny" in outcome.output


def test_a_result_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcome = rehearse(tmp_path / "file" / "gpu.json")
    assert outcome.exit_code == 2
    assert "cannot be written" in outcome.output


def test_an_unknown_section_is_one_line(tmp_path: Path) -> None:
    outcome = rehearse(tmp_path / "gpu.json", "--only", "stages,nonsense")
    assert outcome.exit_code == 2
    assert "no nonsense among stages, demo, hybrid, topologies, exact" in outcome.output


def test_a_verdict_knows_which_way_is_better() -> None:
    figures = {figure.key: figure for figure in FIGURES}
    plain, tree = figures["qwen3_8b_plain_ms"], figures["demo_tree_over_plain"]
    assert [plain.verdict(value) for value in (None, 4.4, 5.2, 5.3)] == ["", "aim", "must", "missed"]
    assert [tree.verdict(value) for value in (None, 3.0, 2.2, 2.1)] == ["", "aim", "must", "missed"]


def test_the_summary_is_of_the_last_way_that_ran() -> None:
    def way(ms: float) -> dict[str, Any]:
        return {"plain": {"ms": ms}, "verify": {"65": {"ms": 2 * ms}}}

    ways = {"eager": way(10.0), "device": way(4.0), "broken": {"error": "no such kernel"}}
    sections = {"stages": {"contexts": {"1k": {"ways": ways}, "16k": {"ways": {"eager": way(3.0)}}}}}
    summary = summarise(sections)
    assert (summary["qwen3_8b_plain_ms"], summary["qwen3_8b_verify65_ms"]) == (4.0, 8.0)
    assert summary["context16k_verify65_over_plain"] == 2.0
    assert summary["demo_tree_over_plain"] is None
    assert table({})[0]["value"] is None


@pytest.mark.parametrize("shape", [tiny_qwen3(), tiny_hybrid()], ids=["attention", "hybrid"])
def test_a_bench_can_be_replayed(shape: Any) -> None:
    pair = make_pair(shape, torch.device("cpu"), torch.float32)
    bench = EagerRound(pair, Placement(context=70, batch=2, most_nodes=16))
    tokens = bench.verify(16)
    for _ in range(3):
        assert set(bench.plain()) == {"verify"}
        assert set(bench.round(16)) == {"draft", "build", "verify"}
        if shape.target.model_type == "qwen3":  # a recurrent state has moved on, as it should
            assert torch.equal(bench.verify(16), tokens)


@pytest.mark.parametrize(
    "name", [name for name, way in WAYS.items() if DEVICE.type == "cuda" or not way.needs_gpu]
)
def test_every_way_gives_every_number(name: str) -> None:
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    pair, rows = make_pair(tiny_qwen3(), DEVICE, dtype), Rows({SHORT: 70}, verified=(17, 65))
    if (prepare := WAYS[name].prepare) is not None:
        prepare(pair)
    facts = measure_way(WAYS[name], pair, Placement(70, most_nodes=64), rows, DEVICE, seconds=0.01)
    assert set(facts["verify"]) == {"17", "65"}
    assert facts["parts"]["verify"] == facts["verify"]["65"]["ms"]
    assert facts["round"]["ms"] == pytest.approx(sum(facts["parts"].values()))


@pytest.mark.parametrize("is_fused", [False, True])
def test_rounds_on_the_device_are_replayed_and_choose_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, is_fused: bool
) -> None:
    monkeypatch.setattr(Drafter, "on_device", ScriptedDrafter.on_device)
    monkeypatch.setattr(Drafter, "script", Script([ROOT] * 200), raising=False)
    pair, place = make_pair(tiny_qwen3(), torch.device("cpu"), torch.float32), Placement(70, most_nodes=20)
    tokens = {nodes: EagerRound(pair, place).verify(nodes) for nodes in (20, 5)}
    with in_place_of_kernels():
        bench = DeviceRound(pair, place, is_fused=is_fused)
        for _ in range(2):
            assert all(torch.equal(bench.verify(nodes), tokens[nodes]) for nodes in tokens)
            assert set(bench.plain()) == {"verify"}
            assert set(bench.round(20)) == {"draft", "build", "verify"}
    assert bool(pair.chooser.choices()) is is_fused


def test_every_way_of_decoding_is_compared_with_transformers(rehearsed: Path, tmp_path: Path) -> None:
    exact = json.loads(rehearsed.read_text())["sections"]["exact"]
    assert exact["greedy_same"] == exact["greedy_of"] == 2 * len(ENGINE_WAYS) * exact["prompts"] > 0
    assert exact["greedy_tokens"] > exact["greedy_of"]
    assert 0 < exact["nodes_off_ppm"] < 10
    assert 1 <= exact["float32_per_round"] == pytest.approx(exact["replay_float32_per_round"], rel=0.2)
    assert exact["replay_difference_low"] <= exact["replay_difference"] <= exact["replay_difference_high"]
    assert 1 <= exact["bfloat16_own_replay_per_round"] == pytest.approx(exact["bfloat16_per_round"], rel=0.2)
    assert "a CPU" in exact["steps_skipped"] + exact["rounds_skipped"]
    out = tmp_path / "gpu.json"
    outcome = rehearse(out, "--only", "exact")  # a pair of its own
    assert f"{exact['greedy_of']} the same" in outcome.output
    assert f"{exact['replay_difference_low']:+.3f} to" in outcome.output
    assert [key for key in json.loads(out.read_text())["sections"]["exact"] if "error" in key] == []


def test_the_sizes_are_those_of_the_public_models() -> None:
    qwen3, qwen36 = qwen3_8b(), qwen36_27b()
    kinds = qwen36.target.layer_types
    assert (len(kinds), kinds.count("linear_attention"), kinds.count("full_attention")) == (64, 48, 16)
    assert (qwen3.target.hidden_size, qwen3.target.intermediate_size, qwen3.target.vocab_size) == (
        4096, 12288, 151936
    )  # fmt: skip
    assert qwen3.draft.block_size == qwen36.draft.block_size == 16
    assert [layer.window for layer in qwen36.draft.layers] == [2048] * 4 + [None]


def test_the_weights_that_a_step_reads() -> None:
    pair = make_pair(tiny_qwen3(), torch.device("cpu"), torch.float32)
    attention = 64 * (4 + 2 + 2) * 16 + 4 * 16 * 64 + 2 * 16
    values = 3 * (attention + 3 * 64 * 96 + 2 * 64) + 64 + 512 * 64
    assert pair.plain_bytes == 4 * values
    assert pair.kv_bytes_per_token == 3 * 2 * 2 * 16 * 4


def test_the_read_kernel_reads_everything() -> None:
    source = torch.randint(-(2**31), 2**31 - 1, (7 * 8192,), dtype=torch.int32, device=DEVICE)
    sums = torch.zeros(programs_for(DEVICE), dtype=torch.int32, device=DEVICE)
    sum_all(source, sums)
    difference = int(sums.cpu().long().sum()) - int(source.cpu().long().sum())
    assert difference % 2**32 == 0


def test_parts_are_what_the_call_says_and_the_whole_is_the_clocks() -> None:
    whole, parts = time_parts(lambda: {"draft": 2.0, "verify": 5.0}, torch.device("cpu"), seconds=0.01)
    assert {name: timing.ms for name, timing in parts.items()} == {"draft": 2.0, "verify": 5.0}
    assert whole.runs == parts["draft"].runs >= 5
    assert whole.ms < 1


def test_times_and_limits_in_numbers() -> None:
    timing = Timing.of([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (timing.ms, timing.p10, timing.p90, timing.runs) == (3.0, 1.0, 5.0, 5)
    assert timing.divided(2).ms == 1.5
    limits = MemoryLimits(4000.0, 4300.0, 1, {})
    assert limits.read_ms(16_000_000_000) == pytest.approx(4.0)
    assert MemoryLimits.from_json(limits.to_json()) == limits


def test_an_old_result_is_drawn_again(rehearsed: Path, tmp_path: Path) -> None:
    copy = tmp_path / "gpu.json"
    copy.write_text(rehearsed.read_text())
    assert CliRunner().invoke(picture.main, [str(copy)]).exit_code == 0
    assert copy.with_suffix(".png").stat().st_size > 10_000
    assert not picture.draw({"sections": {}}, tmp_path / "nothing.png")
