"""A real server over the small target and an oracle drafter, in either topology, and what its stages hold.

The `ddtree`, `tree_builder` and `target_verifier` models are the product's; the drafter (topology `bls`), or
the composition of the stages (`in_process`), comes from tests/triton/repositories.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc
from safetensors.torch import load_file, save_file
from tritonclient.utils import np_to_triton_dtype

from ddtree.text import TextCodec
from ddtree_client import Client
from ddtree_local.server import LocalTriton
from tests.fakes.pipeline import GreedyReference
from tests.fakes.tiny_models import make_draft, make_target

# After SPARK the small target says these bytes, one token each, whatever came before.
SPARK = 1
SPOKEN = "😀é世"
REPOSITORIES = Path(__file__).parent / "repositories"
ORACLE = Path(__file__).parents[1] / "fakes" / "oracle_drafter.py"
STAGES = ("target_verifier", "drafter")
_EXTRA_DRAFTER_INPUT = 'input [ { name: "noise" data_type: TYPE_FP32 dims: [ 1 ] optional: true } ]\n'
_QUIET_S = 30.0
_TRIES = 4


@dataclass(frozen=True)
class TinyPair:
    """Checkpoint folders of the small target and of a draft for it."""

    target: Path
    draft: Path

    @classmethod
    def make(cls, folder: Path) -> TinyPair:
        target = make_target(folder / "target")
        _teach_spoken(target)
        return cls(target, make_draft(folder / "draft"))

    def environment(self, topology: str) -> dict[str, str]:
        return {
            "DDTREE_TARGET": str(self.target),
            "DDTREE_DRAFT": str(self.draft),
            "DDTREE_TOPOLOGY": topology,
            "DDTREE_TEST_ORACLE": str(ORACLE),
            "DDTREE_DTYPE": "float32",
            "DDTREE_THREADS": "1",  # more would only spin: the model is tiny
            "OMP_NUM_THREADS": "1",
            "DDTREE_KV_CACHE_MIB": "4",
            "DDTREE_PREFILL_CHUNK": "32",
            # Of topology bls; by value, as a CPU's stages do by themselves, the other servers' do.
            "DDTREE_FEATURES_BY_REFERENCE": "always",
        }


def _teach_spoken(target: Path) -> None:
    """Let each byte of SPOKEN follow the one before it; what comes after the last one is random again.

    Such a token's embedding is a direction of its own, too long for the layers to turn, and the head's row of
    the next token points the same way.
    """
    codec = TextCodec.from_folder(target)
    spoken = codec.encode(SPOKEN)
    weights = load_file(target / "model.safetensors")
    for direction, (token, following) in enumerate(zip([SPARK, *spoken[:-1]], spoken, strict=True)):
        weights["model.embed_tokens.weight"][token] = 0
        weights["model.embed_tokens.weight"][token, direction] = 300
        weights["lm_head.weight"][:, direction] = 0
        weights["lm_head.weight"][following, direction] = 2
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def make_repository(folder: Path, product: Path, topology: str) -> Path:
    """The product's models with the oracle in place of the drafter."""
    ignored = shutil.ignore_patterns("__pycache__")
    models = (
        ("ddtree",) if topology == "in_process" else ("ddtree", "tree_builder", "target_verifier", "drafter")
    )
    for model in models:
        shutil.copytree(product / model, folder / model, ignore=ignored)
    shutil.copytree(REPOSITORIES / topology, folder, ignore=ignored, dirs_exist_ok=True)
    if topology == "bls":
        with (folder / "drafter" / "config.pbtxt").open("a") as config:
            config.write(_EXTRA_DRAFTER_INPUT)
    return folder


@dataclass(frozen=True)
class Held:
    """What the stages hold."""

    sessions: int
    pages: int


@dataclass
class OracleServer:
    """A running server and the ways tests talk to it."""

    triton: LocalTriton
    topology: str
    repository: Path
    codec: TextCodec
    reference: GreedyReference
    _asked: Counter[str] = field(default_factory=Counter)  # how often models were asked for their count

    def client(self) -> Client:
        return Client(self.triton.grpc_url, timeout_s=60.0)

    def held(self) -> Held:
        """Sessions and pages of both stages together, from the stages themselves."""
        if self.topology == "in_process":
            usages = self._order("describe")[:2]
        else:
            infos = [self.call(stage, "describe", wanted="info") for stage in STAGES]
            usages = [json.loads(info[0])["usage"] for info in infos]
        return Held(sum(u["sessions"] for u in usages), sum(u["pages_used"] for u in usages))

    def assert_quiet(self) -> None:
        """The server answers rightly, and its stages hold nothing a moment after the last request ended."""
        with self.client() as client:
            prompt = tuple(b"alive?")
            answer = client.generate(input_ids=prompt, max_tokens=9, tree_budget=16)
            assert list(answer.token_ids) == self.reference(prompt, 9)
        self.wait_for_rest()

    def wait_for_rest(self) -> None:
        """Wait until the stages hold nothing: they hear of an end after its caller."""
        deadline = time.monotonic() + _QUIET_S
        while (held := self.held()) != Held(0, 0):
            assert time.monotonic() < deadline, f"the stages still hold {held}"
            time.sleep(0.01)

    def assert_reaches_no_stage(self, act: Callable[[], None]) -> None:
        """`act` is answered by `ddtree` alone; in process its stages' calls cannot be counted from outside.

        The metrics ask the stages what they hold, a moment after earlier requests ended. That is over soon,
        and `act` runs again where a stage was called: what reaches a stage does so every time.
        """
        for _ in range(_TRIES):
            before = self._stage_calls()
            act()
            time.sleep(0.1)  # Triton counts a call after it was answered
            after = self._stage_calls()
            if after == before:
                return
        raise AssertionError(f"calls of {STAGES} went from {before} to {after}")

    def set_noise(self, noise: float) -> None:
        """How often the oracle errs from now on."""
        if self.topology == "in_process":
            self._order(f"noise {noise}")
        else:
            self.call("drafter", "set_noise", noise=np.array([noise], dtype=np.float32))

    def set_pause(self, seconds: float) -> None:
        """How long the oracle waits before each answer from now on: rounds that last, on any machine."""
        if self.topology == "in_process":
            self._order(f"pause {seconds}")
        else:
            self.call("drafter", "set_pause", noise=np.array([seconds], dtype=np.float32))

    def lose(self, stage: str) -> None:
        """Let a stage forget its sessions; only topology in_process can let the verifier do so."""
        if self.topology == "in_process":
            self._order(f"lose {stage}")
        else:
            assert stage == "drafter", "the product's verifier has no such operation"
            self.call("drafter", "lose")

    def rounds(self) -> int:
        """Rounds with drafts so far; each builds its trees in one call."""
        if self.topology == "in_process":
            return self._order("describe")[2]["rounds"]
        return self.executions("tree_builder")

    def executions(self, model: str) -> int:
        """Calls that a model has answered: those that Triton counts, and those that went past it."""
        with grpc.InferenceServerClient(self.triton.grpc_url) as client:
            (stats,) = client.get_inference_statistics(model).model_stats
        told = json.loads(self.call(model, "channel", wanted="info")[0])
        asked = self._asked[model]
        self._asked[model] += 1
        return int(stats.execution_count) - asked + int(told["calls"])

    def _stage_calls(self) -> list[int]:
        return [] if self.topology == "in_process" else [self.executions(stage) for stage in STAGES]

    def call(self, model: str, operation: str, wanted: str = "status", **arrays: np.ndarray[Any, Any]) -> Any:
        """One operation of a stage model; gives the wanted output."""
        op = np.array([operation.encode()], dtype=np.object_)
        inputs = []
        for name, array in {"op": op, **arrays}.items():
            inputs.append(grpc.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
            inputs[-1].set_data_from_numpy(array)
        with grpc.InferenceServerClient(self.triton.grpc_url) as client:
            result = client.infer(model, inputs, outputs=[grpc.InferRequestedOutput(wanted)])
            return result.as_numpy(wanted)

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        """One HTTP request to the model `ddtree`: status and body."""
        with closing(self.connect()) as connection:
            connection.request("POST", f"/v2/models/ddtree/{path}", json.dumps(body))
            response = connection.getresponse()
            return response.status, response.read().decode()

    def connect(self) -> HTTPConnection:
        host, port = self.triton.http_url.split(":")
        return HTTPConnection(host, int(port), timeout=60)

    def _order(self, order: str) -> list[dict[str, int]]:
        status, body = self.post("generate", {"text_input": f"stages:{order}"})
        assert status == 200, body
        usages: list[dict[str, int]] = json.loads(json.loads(body)["text_output"])
        return usages
