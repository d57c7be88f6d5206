"""What an ablation has found so far: one file, written whole after every arm, that a later run goes on from.

The target's answers, which come before the first arm, have a file of their own that says what they answer.

One process at a time holds the folder and writes the file; others hand their results to it. This module knows
neither how arms are trained nor how results are shown.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddtree.errors import InvalidArgument, Unavailable
from ddtree.train.ablation_arms import Arm, Choices

RESULTS = "ablation.json"
ERRORS = "errors.log"
_ANSWERS = "answers"  # the folder of the target's answers, a corpus for each prompt set
_ANSWERED = "settings.json"  # beside them
_ANSWERS_DEPEND_ON = ("target", "dtype", "limit", "max_answer")


@dataclass(frozen=True)
class ArmResult:
    """One arm, trained and measured."""

    arm: Arm
    answer_tokens: int  # trained on, each seen as often as the steps allow
    parameters: int
    steps: int
    blocks: int
    seconds: float  # of training, compilation included
    wall_seconds: float  # of everything, measuring included
    device: str
    # Both losses are weighted as the baseline's, so that arms compare; blocks of another size do not.
    training_loss: float  # at a few batches of the arm's own sequences, after training
    held_out_loss: float
    held_out_chain: float
    sets: Mapping[str, Mapping[str, float]]  # prompt set to `chain` and `tree64`

    def to_json(self) -> dict[str, Any]:
        """Give the result as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ArmResult:
        """Read what `to_json` gave."""
        arm = dict(values["arm"])
        choices = dict(arm["choices"])
        choices["taps"] = tuple(choices["taps"])
        arm["choices"] = Choices(**choices)
        return cls(**{**values, "arm": Arm(**arm)})


class Results:
    """The results of one folder, in the order they came."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Start with what the folder holds.

        Raises:
            InvalidArgument: it holds results of other settings, which do not compare with new ones.
        """
        self.folder, self.settings = folder, dict(settings)
        self._path = folder / RESULTS
        self.arms: dict[str, ArmResult] = {}
        stored = _read(self._path)
        if stored is None:
            self._write()  # at once: what a killed run leaves beside it belongs to these settings
            return
        _compare("ablation", self._path, stored["settings"], self.settings)
        self.arms = {name: ArmResult.from_json(values) for name, values in stored["arms"].items()}

    def record(self, result: ArmResult) -> None:
        """Add a result; the file is replaced whole or not at all."""
        self.arms[result.arm.name] = result
        self._write()
        # What an arm would go on from is several times its weights, and it does not go on.
        (result.arm.folder_in(self.folder) / "state.pt").unlink(missing_ok=True)

    def _write(self) -> None:
        arms = {name: one.to_json() for name, one in self.arms.items()}
        _replace(self._path, {"settings": self.settings, "arms": arms})


def check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Compare settings with those of the results in a folder; `steps`, which may not be known yet, left out.

    Raises:
        InvalidArgument: it holds results of other settings.
    """
    if stored := _read(folder / RESULTS):
        before, now = ({**values, "steps": None} for values in (stored["settings"], settings))
        _compare("ablation", folder / RESULTS, before, now)


def claim_answers(folder: Path, settings: Mapping[str, Any]) -> None:
    """Note what the answers in a folder, and those to be made, answer; nothing is ever deleted.

    Prompt sets without answers bind nobody: what a run that ended before them said of them is replaced.

    Raises:
        InvalidArgument: there are answers made with other settings, or something that is no ablation's.
    """
    answers = folder / _ANSWERS
    path = answers / _ANSWERED
    made = {shard.parent.name for shard in answers.glob("*/shard-*.npz")}
    now = {name: settings[name] for name in _ANSWERS_DEPEND_ON}
    stored = _read(path)
    if stored is not None and set(stored) != {*now, "prompts"}:
        stored = None  # another program's file has the same name
    # Results that were compared with these settings speak for answers that have no file yet.
    if stored is None and not (folder / RESULTS).is_file() and _is_occupied(answers):
        raise InvalidArgument.of(
            "--output", f"must have no folder {_ANSWERS!r} other than an ablation's", str(answers),
            "give another --output, or move that folder away",
        )  # fmt: skip
    prompts: dict[str, Any] = dict(settings["prompts"])
    if stored is not None and made:
        before = {name: value for name, value in stored["prompts"].items() if name in made}
        shared = {name: prompts[name] for name in sorted(made & prompts.keys())}
        _compare("answers", path, {name: stored[name] for name in now}, now)
        _compare("answers to prompts", path, {name: before.get(name) for name in shared}, shared)
        prompts = before | prompts
    answers.mkdir(parents=True, exist_ok=True)
    _replace(path, {**now, "prompts": prompts})


def stored_setting(folder: Path, name: str) -> Any:
    """Give a setting of the results in a folder; None where there is none."""
    stored = _read(folder / RESULTS)
    return None if stored is None else stored["settings"].get(name)


def note_error(folder: Path, what: str, trace: str) -> None:
    """Append to the folder's errors, so that they outlive the terminal they were shown in."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ERRORS).open("a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {what}\n{trace.rstrip()}\n\n")


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a folder alone; the hold ends with the process, however it ends.

    Raises:
        Unavailable: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Unavailable(
                f"another ablation is running in {folder}; wait for it, or give another --output"
            ) from None
        yield


def _compare(what: str, path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for field in sorted({*before, *now}):
        if before.get(field) != now.get(field):
            raise InvalidArgument.of(
                f"{what} {field}", f"must be {before.get(field)!r} as in {path}", now.get(field),
                "repeat the settings, or give another --output",
            )  # fmt: skip


def _is_occupied(path: Path) -> bool:
    """Whether something is there beside what a claim leaves that was killed."""
    if not path.is_dir():
        return path.exists()
    return any(entry.name != Path(_ANSWERED).with_suffix(".partial").name for entry in path.iterdir())


def _replace(path: Path, values: Mapping[str, Any]) -> None:
    """Write a file whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return stored
