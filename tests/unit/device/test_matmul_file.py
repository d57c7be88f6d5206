"""The file of choices, which several processes of a server may write at a time."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from ddtree.device.matmul_candidates import Config
from ddtree.device.matmul_file import Choice, ChoiceFile

CPU = torch.device("cpu")


def test_other_versions_have_other_files(tmp_path: Path) -> None:
    choice = {"1x1 float32": {16: Choice(None, 1.0, 1.0)}}
    ChoiceFile.of(tmp_path, CPU).write(choice)
    (path,) = tmp_path.iterdir()
    key = json.loads(path.read_text())["key"]
    assert set(key) == {"device", "torch", "triton", "kernels"}
    assert ChoiceFile(path, key).read() == choice
    for name in key:
        assert ChoiceFile(path, {**key, name: "other"}).read() == {}


def test_what_others_stored_meanwhile_is_kept(tmp_path: Path) -> None:
    kernel = Choice(Config("dot", 64, 64, 2, 4, 6), 8.0, 12.0)
    library = Choice(None, 9.0, 9.0)
    mine, theirs = (ChoiceFile.of(tmp_path, CPU) for _ in range(2))
    assert mine.read() == theirs.read() == {}
    theirs.write({"8x8 bfloat16": {16: kernel}, "4x4 bfloat16": {1: library}})
    mine.write({"8x8 bfloat16": {32: library}, "6x6 bfloat16": {1: kernel}})
    assert theirs.read() == {
        "4x4 bfloat16": {1: library},
        "6x6 bfloat16": {1: kernel},
        "8x8 bfloat16": {16: kernel, 32: library},
    }
