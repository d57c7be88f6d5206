"""A Dockerfile as instructions, and the files that a build of it would see. Builds nothing."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class Instruction:
    """One instruction, continuation lines joined."""

    name: str
    text: str

    def words(self) -> list[str]:
        """The arguments as a shell splits them, without options such as --chmod."""
        return [word for word in shlex.split(self.text) if not word.startswith("--")]


def read_dockerfile(path: Path) -> list[Instruction]:
    """All instructions in order; comments are passed over."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [Instruction(*line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def shell_commands(instructions: Sequence[Instruction]) -> list[list[str]]:
    """Every command of every RUN, in order."""
    return [
        shlex.split(command)
        for each in instructions
        if each.name == "RUN"
        for command in each.text.split("&&")
    ]


def build_context(root: Path, ignore_file: Path) -> list[PurePosixPath]:
    """The files of the repository that reach the builder; what git ignores is not looked at."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=root, capture_output=True, text=True, check=True,
    )  # fmt: skip
    paths = sorted({PurePosixPath(line) for line in listed.stdout.splitlines()})
    return [path for path in paths if reaches_builder(path, ignore_file) and (root / path).is_file()]


def reaches_builder(path: PurePosixPath, ignore_file: Path) -> bool:
    """Whether a .dockerignore lets a file through: the last pattern that matches decides."""
    is_kept = True
    for pattern in _patterns(ignore_file):
        if any(_matches(candidate, pattern.lstrip("!")) for candidate in (path, *path.parents)):
            is_kept = pattern.startswith("!")
    return is_kept


def _patterns(ignore_file: Path) -> list[str]:
    lines = ignore_file.read_text().splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def _matches(path: PurePosixPath, pattern: str) -> bool:
    if pattern == "**":
        return True
    parts = ["(?:[^/]+/)*" if part == "**" else re.escape(part).replace(r"\*", "[^/]*") + "/"
             for part in pattern.split("/")]  # fmt: skip
    return re.fullmatch("".join(parts).rstrip("/"), str(path)) is not None


def copy_files(instructions: Sequence[Instruction], context: Sequence[PurePosixPath], root: Path,
               image: Path) -> None:  # fmt: skip
    """Do what the COPY instructions do, into the folder `image`.

    Raises:
        FileNotFoundError: a source is not in the context, which would end a build.
    """
    for each in instructions:
        if each.name != "COPY":
            continue
        *sources, target = each.words()
        for source in sources:
            files = [path for path in context if PurePosixPath(source) in (path, *path.parents)]
            if not files:
                raise FileNotFoundError(f"COPY {source}: nothing of that name reaches the builder")
            for path in files:
                inside = path.name if str(path) == source else path.relative_to(source)
                place = image / target.lstrip("/") / inside
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(root / path, place)
