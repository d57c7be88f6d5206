"""A toy target for the trainer's tests, and one thread: the arithmetic is tiny, and CI machines are busy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from ddtree.text import TextCodec
from ddtree.train.prompts import ChatFrame
from ddtree.train.targets import load_frozen
from tests.fakes.tiny_models import make_target


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("train") / "target")


@pytest.fixture(scope="module")
def target(target_folder: Path) -> PreTrainedModel:
    return load_frozen(target_folder, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def codec(target_folder: Path) -> TextCodec:
    return TextCodec.from_folder(target_folder)


@pytest.fixture(scope="module")
def frame(codec: TextCodec) -> ChatFrame:
    return ChatFrame.of(codec)
