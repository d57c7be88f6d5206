"""`ddtree-trtllm-check`: everything holds against the stub, and what does not hold is named."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from ddtree.trtllm.check_command import main
from ddtree.trtllm.contract import load_contracts
from ddtree_client.cli import cli
from tests.fakes.tiny_models import make_draft, make_target
from tests.fakes.trtllm_library import FakeLibrary, nothing_installed

CONTRACTS = load_contracts()
NOT_HERE = "the package tensorrt_llm is not installed here; run in NVIDIA's TensorRT-LLM image"


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pair")
    pair = [str(make_target(folder / "target")), str(make_draft(folder / "draft"))]
    return [*pair, "--kv-cache-mib", "4", "--max-tokens", "16", "--dtype", "float32", "--device", "cpu"]


def test_all_parts_hold_against_the_stub(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    contract = CONTRACTS[0]
    assert main(arguments, FakeLibrary(contract)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"contract  {contract.name} fits for tree" in lines
    parts = [line.split()[0] for line in lines]
    assert [parts.count(part) for part in ("trees", "greedy", "paths")] == [3, 3, 1]
    assert "16 tokens equal" in next(line for line in lines if line.startswith("greedy"))
    assert any(line.startswith("greedy") and not line.endswith(" 0 of them from trees") for line in lines)
    assert lines[-1].startswith("All hold. Nobody but you has run this on a real engine yet")


def test_here_it_says_that_nothing_is_installed(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == main(arguments, nothing_installed) == 1
    assert capsys.readouterr().out.count(f"FAILED  engine trtllm: {NOT_HERE}") == 2


def test_another_version_is_told_symbol_by_symbol(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    library = FakeLibrary(CONTRACTS[0])
    library.remove("SpecTreeManager")
    assert main([*arguments, "--contract-only"], library) == 1
    out = capsys.readouterr().out
    assert "contract  BREAKS  SpecTreeManager: no tensorrt_llm._torch.speculative.spec_tree_manager" in out
    assert "FAILED  contract  no recorded one fits for tree; the nearest is main-00679c6" in out


@pytest.mark.parametrize(
    ("place", "fault", "part"),
    [
        ("ddtree.trtllm.pool.EnginePool.move", lambda *_: None, "trees are verified wrongly here"),
        ("tests.fakes.trtllm_native.Result._next", lambda *_: 9, "token 0 is"),
    ],
)
def test_a_part_that_does_not_hold_is_named(
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    fault: Any,
    part: str,
) -> None:
    monkeypatch.setattr(place, fault)
    assert main(arguments, FakeLibrary(CONTRACTS[0])) == 1
    assert part in capsys.readouterr().out


def test_the_clients_command_is_the_librarys(arguments: list[str]) -> None:
    result = CliRunner().invoke(cli, ["trtllm-check", *arguments])
    assert result.exit_code == 1
    assert NOT_HERE in result.output
