"""A bench that trains nothing, for tests of what stands around it; without torch, so processes start fast.

As a program it runs arms into a folder until it is killed:
`python -m tests.fakes.ablation FOLDER JOBS NAME,NAME SLOW`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddtree.train.ablation_arms import Arm, Choices
from ddtree.train.ablation_results import ArmResult, Results, held
from ddtree.train.ablation_workers import outcomes

SETTINGS = {"steps": 7}
PATIENCE = 30.0


@dataclass(frozen=True)
class FakeBench:
    """Notes who ran which arm; the arms named misbehave."""

    folder: Path
    number: int
    slow: str = ""  # never ends
    failing: str = ""  # raises
    dying: str = ""  # takes its process with it
    together: int = 1  # arms that wait until so many have begun
    broken: bool = False  # what fails raises an error of a fault of our own

    def run(self, arm: Arm) -> ArmResult:
        """Give a result that depends on the arm's name alone."""
        (self.folder / f"begun-{arm.name}-{os.getpid()}").touch()
        if arm.name == self.dying:
            os._exit(3)
        deadline = time.monotonic() + PATIENCE
        while len(begun(self.folder)) < self.together and time.monotonic() < deadline:
            time.sleep(0.01)
        if arm.name == self.slow:
            time.sleep(PATIENCE)
        if arm.name == self.failing and self.broken:
            raise KeyError("no such weight")
        if arm.name == self.failing:
            raise RuntimeError("CUDA out of memory")
        return make_result(arm, chain=1 + len(arm.name) / 10)


@dataclass(frozen=True)
class MakeFakeBench:
    """What crosses to a process to make its bench."""

    folder: Path
    slow: str = ""
    failing: str = ""
    dying: str = ""
    together: int = 1
    broken: bool = False

    def __call__(self, number: int) -> FakeBench:
        """Make the bench of process `number`."""
        return FakeBench(self.folder, number, self.slow, self.failing, self.dying, self.together, self.broken)


def begun(folder: Path) -> dict[str, int]:
    """Which arms were begun in a folder, with the process that did it last."""
    names = [path.name.split("-") for path in sorted(folder.glob("begun-*"))]
    return {name: int(pid) for _, name, pid in names}


def make_arm(name: str, reference: str = "baseline") -> Arm:
    """Make an arm that is nothing but its name."""
    return Arm(name, "question", f"change of {name}", Choices(taps=(0, 1)), reference)


def make_result(
    arm: Arm, chain: float = 2.0, tree: float = 3.0, sets: Sequence[str] = ("easy", "hard")
) -> ArmResult:
    """Make a result with these acceptance lengths in every set."""
    return ArmResult(
        arm, answer_tokens=2_500_000, parameters=16_000_000, steps=7, blocks=1234, seconds=12.3,
        wall_seconds=15.0, device="cpu", training_loss=2.5, held_out_loss=2.75, held_out_chain=chain,
        sets={name: {"chain": chain, "tree64": tree} for name in sets},
    )  # fmt: skip


def run_until_killed(arguments: Sequence[str]) -> None:
    """Run arms as the command does."""
    folder, jobs, names, slow = Path(arguments[0]), int(arguments[1]), arguments[2].split(","), arguments[3]
    with held(folder):
        results = Results(folder, SETTINGS)
        for outcome in outcomes([make_arm(name) for name in names], MakeFakeBench(folder, slow), jobs):
            assert outcome.result is not None
            results.record(outcome.result)


if __name__ == "__main__":
    run_until_killed(sys.argv[1:])
