"""An ablation that is stopped, whose processes work side by side, fail and die; and its report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from ddtree.errors import InvalidArgument, Unavailable
from ddtree.train.ablate import ArmsFailed, run_arms
from ddtree.train.ablation_report import change_of, draw, report, table
from ddtree.train.ablation_results import ERRORS, RESULTS, Results, held
from tests.fakes.ablation import PATIENCE, SETTINGS, MakeFakeBench, begun, make_arm, make_result

ROOT = Path(__file__).parents[3]


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def stored(folder: Path) -> set[str]:
    path = folder / RESULTS
    return set(json.loads(path.read_text())["arms"]) if path.is_file() else set()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.is_file() or stat.read_text().split(")")[1].split()[0] != "Z"


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_killed_ablation_goes_on_with_what_it_had(tmp_path: Path, jobs: str) -> None:
    command = [sys.executable, "-m", "tests.fakes.ablation", str(tmp_path), jobs, "one,slow,three", "slow"]
    process = subprocess.Popen(command, cwd=ROOT)
    expected = {"one"} if jobs == "1" else {"one", "three"}
    try:
        wait_for(lambda: stored(tmp_path) >= expected and "slow" in begun(tmp_path))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_for(lambda: not any(is_alive(pid) for pid in begun(tmp_path).values()))
    for path in tmp_path.glob("begun-*"):
        path.unlink()

    with held(tmp_path):  # the hold ended with its process
        results = Results(tmp_path, SETTINGS)
        arms = [make_arm(name) for name in ("one", "slow", "three")]
        lines = list(run_arms(arms, results, MakeFakeBench(tmp_path), 1))
    assert set(begun(tmp_path)) == {"one", "slow", "three"} - expected, "only what had no result"
    assert stored(tmp_path) == {"one", "slow", "three"}
    assert f"] {len(expected) + 1}/3 slow: " in lines[0]
    assert Results(tmp_path, SETTINGS).arms["one"] == make_result(make_arm("one"), chain=1.3)


def test_processes_work_side_by_side_and_all_results_are_kept(tmp_path: Path) -> None:
    arms = [make_arm(name * count) for count, name in enumerate("abcde", 1)]
    results = Results(tmp_path, SETTINGS)
    lines = list(run_arms(arms, results, MakeFakeBench(tmp_path, together=2), 2))
    assert len(lines) == 5
    assert len(set(begun(tmp_path).values())) == 2
    assert os.getpid() not in begun(tmp_path).values()
    again = Results(tmp_path, SETTINGS).arms
    assert {name: one.held_out_chain for name, one in again.items()} == pytest.approx(
        {arm.name: 1 + len(arm.name) / 10 for arm in arms}
    )


def test_an_arm_that_takes_its_process_with_it_takes_no_other(tmp_path: Path) -> None:
    arms = [make_arm(name) for name in ("dying", "two", "three")]
    results = Results(tmp_path, SETTINGS)
    with pytest.raises(ArmsFailed, match=r"dying \(its process ended with code 3\); run the command again"):
        list(run_arms(arms, results, MakeFakeBench(tmp_path, dying="dying", together=3), 2))
    assert len(set(begun(tmp_path).values())) == 3, "another process took the dead one's place"
    assert stored(tmp_path) == {"two", "three"}
    list(run_arms(arms, results, MakeFakeBench(tmp_path), 2))
    assert stored(tmp_path) == {"dying", "two", "three"}


def test_an_arm_that_does_not_fit_is_named_after_the_others_have_run(tmp_path: Path) -> None:
    arms = [make_arm(name) for name in ("one", "two")]
    lines = run_arms(arms, Results(tmp_path, SETTINGS), MakeFakeBench(tmp_path, failing="one"), 1)
    assert "1/2 one: no result" in next(lines)
    with pytest.raises(ArmsFailed, match=r"one \(RuntimeError: CUDA out of memory\)"):
        list(lines)
    assert stored(tmp_path) == {"two"}


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_ends_an_arm_is_kept_with_its_place_and_ends_no_other(tmp_path: Path, jobs: int) -> None:
    arms = [make_arm(name) for name in ("one", "two", "three")]
    bench = MakeFakeBench(tmp_path, failing="one", broken=True)
    with pytest.raises(ArmsFailed, match=r"one \(KeyError: 'no such weight'\)"):
        list(run_arms(arms, Results(tmp_path, SETTINGS), bench, jobs))
    assert stored(tmp_path) == {"two", "three"}
    errors = (tmp_path / ERRORS).read_text()
    assert errors.count("Traceback") == 1
    assert " one: KeyError: 'no such weight'\nTraceback" in errors
    assert 'raise KeyError("no such weight")' in errors


def test_results_of_other_settings_are_refused_even_before_the_first_arm(tmp_path: Path) -> None:
    Results(tmp_path, {"steps": 7, "seed": 0})
    with pytest.raises(InvalidArgument, match=r"ablation steps must be 7 as in .*, got 8; repeat"):
        Results(tmp_path, {"steps": 8, "seed": 0})


def test_a_folder_is_held_by_one(tmp_path: Path) -> None:
    with held(tmp_path), pytest.raises(Unavailable, match="another ablation is running in"), held(tmp_path):
        pass


def test_a_recorded_arm_keeps_its_drafter_and_not_its_state(tmp_path: Path) -> None:
    arm = make_arm("data-1/2")
    folder = arm.folder_in(tmp_path)
    folder.mkdir(parents=True)
    for name in ("state.pt", "log.jsonl"):
        (folder / name).touch()
    Results(tmp_path, SETTINGS).record(make_result(arm))
    assert [path.name for path in folder.iterdir()] == ["log.jsonl"]
    assert not list(tmp_path.glob("*.partial"))


def test_the_table_has_every_number_and_the_change_against_the_compared_arm() -> None:
    base, half, greedy = make_arm("baseline"), make_arm("half"), make_arm("greedy", reference="half")
    arms = [base, half, make_arm("not-run"), greedy]
    results = {
        "greedy": make_result(greedy, 1.8, 2.7),
        "baseline": make_result(base, 2.0, 3.0),
        "half": make_result(half, 1.5, 3.0),
    }
    assert table(arms, results).splitlines() == [
        (
            "| arm | change | compared with | answer tokens | weights | steps | blocks | seconds "
            "| training loss | held-out loss | held-out chain | easy chain | easy tree64 "
            "| hard chain | hard tree64 | chain, mean change | tree64, mean change |"
        ),
        "| --- | --- | --- |" + " ---: |" * 14,
        (
            "| baseline | change of baseline |  | 2.5 M | 16.0 M | 7 | 1234 | 12 | 2.50 | 2.75 | 2.00 "
            "| 2.00 | 3.00 | 2.00 | 3.00 |  |  |"
        ),
        (
            "| half | change of half | baseline | 2.5 M | 16.0 M | 7 | 1234 | 12 | 2.50 | 2.75 | 1.50 "
            "| 1.50 | 3.00 | 1.50 | 3.00 | -25.0 % | +0.0 % |"
        ),
        (
            "| greedy | change of greedy | half | 2.5 M | 16.0 M | 7 | 1234 | 12 | 2.50 | 2.75 | 1.80 "
            "| 1.80 | 2.70 | 1.80 | 2.70 | +20.0 % | -10.0 % |"
        ),
    ]


def test_the_mean_is_one_of_ratios() -> None:
    base, other = make_arm("baseline"), make_arm("other")
    first = make_result(base)
    first = type(first)(**{**vars(first), "sets": {"easy": {"chain": 4.0}, "hard": {"chain": 1.0}}})
    second = type(first)(
        **{**vars(first), "arm": other, "sets": {"easy": {"chain": 4.4}, "hard": {"chain": 1.5}}}
    )
    assert change_of(second, {"baseline": first, "other": second}, "chain") == pytest.approx(0.3)
    assert change_of(second, {"other": second}, "chain") is None


def test_the_picture_is_drawn_with_and_without_arms_to_compare(tmp_path: Path) -> None:
    base, half = make_arm("baseline"), make_arm("half")
    both = {"baseline": make_result(base), "half": make_result(half, 1.5)}
    for number, results in enumerate(({}, {"baseline": both["baseline"]}, both)):
        picture = tmp_path / f"{number}.png"
        draw([base, half], results, picture)
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert table([base], {}) == "No arm has finished.\n"


def test_the_report_says_its_scale_and_what_another_seed_changed() -> None:
    base, seed = make_arm("baseline"), make_arm("seed")
    results = {"baseline": make_result(base, 2.0, 3.0), "seed": make_result(seed, 2.1, 3.0)}
    settings = {
        "target": "a-target", "steps": 500, "sequences": 32, "anchors": 16, "corpus_answer_tokens": 2_000_000,
        "corpus_sequences": 8000, "prompts": {"easy": "0", "hard": "1"}, "limit": 20, "max_answer": 128,
        "rate": 1e-3, "base": asdict(base.choices),
    }  # fmt: skip
    lines = report([base, seed, make_arm("late")], results, settings).splitlines()
    text = " ".join(lines)
    assert lines[0] == "# Ablation of drafters for a-target"
    assert "500 steps of 32 sequences with 16 blocks each: 0.3 M blocks of 16, 3.8 M draft positions." in text
    assert "2.0 M answer tokens in 8000 sequences" in text
    assert "sees each about 2 times." in text
    assert "4 layers, taps 0 1, decay 7, Muon 0.02 and AdamW 0.001, seed 0." in text
    assert "easy, hard: at most 20 prompts each, greedy answers of at most 128 tokens" in text
    assert "Another seed alone changed chain by +5.0 %, tree64 by +0.0 %: a smaller" in text
    assert lines[-1] == "Without a result in this folder: late."
    assert report([base, seed], results, settings).endswith(table([base, seed], results))
    assert "Another seed" not in report([base], {"baseline": results["baseline"]}, settings)
