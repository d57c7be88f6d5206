"""Fused decoder layers inside whole models: the logits of every node, the weights, and the launches."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from ddtree.device import fused_layers
from ddtree.device.fused_layers import PlainLinear, fuse
from ddtree.device.kernels import layer
from ddtree.device.matmul_choice import MatmulChooser
from ddtree.device.plan import DevicePlan
from ddtree.device.rows import DeviceRows
from ddtree.models.target import TargetModel
from tests.fakes.device import DEVICE
from tests.fakes.device_step import (
    EMPTY,
    LAYERS,
    PAGE,
    ROWS,
    config_of,
    fused_of,
    load,
    new_pool,
    plainly,
    prefill_logits,
    prefilled,
    random_place,
    reference,
    run,
)
from tests.fakes.kept_weights import assert_fused_in_place

FAMILY_NAMES = ("llama, tied and biased", "qwen2, sliding", "qwen3, sliding", "mistral")


@pytest.fixture(autouse=True)
def no_gradients(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if DEVICE.type == "cpu":  # the interpreter takes its time per program, however much each does
        monkeypatch.setattr(layer, "_MANY_PROGRAMS", 0)
    with torch.inference_mode():
        yield


def assert_alike(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.fixture
def llama(tmp_path: Path) -> TargetModel:
    return load(tmp_path, config_of("llama, tied and biased"))


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_node_has_the_logits_of_its_path(tmp_path: Path, family: str) -> None:
    """Three places of one step: beyond a window, empty, and short with padding."""
    source = random.Random(family)
    places = [random_place(source, 11, ROWS - 1), EMPTY, random_place(source, 3, 2)]
    target = load(tmp_path, config_of(family))
    assert fuse(target.model) == LAYERS == len(fused_of(target.model))
    logits = run(target, places)
    assert logits.isfinite().all()
    plain = reference(tmp_path)
    for place, found in zip(places, logits, strict=True):
        if place is not EMPTY:
            assert_alike(found[: len(place.tokens)], plainly(plain, place))


def test_half_precision_over_measured_products_stays_close_to_float32(tmp_path: Path) -> None:
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter cuts bfloat16 off
    target = load(tmp_path, config_of("qwen3"), str(dtype).removeprefix("torch."))
    assert fuse(target.model, MatmulChooser(DEVICE, None).linear) == LAYERS
    place = random_place(random.Random(4), 9, ROWS - 1)
    found = run(target, [place])[0].float()
    likeness = torch.nn.functional.cosine_similarity(found, plainly(reference(tmp_path), place), dim=-1)
    assert likeness.min() > 0.998


def test_weights_keep_their_names_and_values_and_are_in_memory_once(llama: TargetModel) -> None:
    assert_fused_in_place(llama.model, LAYERS)
    first: Any = llama.model.model.layers[0]
    attention, mlp = first.self_attn, first.mlp
    for merged, parts in (
        (first.forward._products.inputs, (attention.q_proj, attention.k_proj, attention.v_proj)),
        (first.forward._products.gate_up, (mlp.gate_proj, mlp.up_proj)),
        (first.forward._products.output, (attention.o_proj,)),
        (first.forward._products.down, (mlp.down_proj,)),
    ):
        for name in ("weight", "bias"):
            whole = getattr(merged, f"_{name}")
            at = [getattr(part, name).data_ptr() - whole.data_ptr() for part in parts]
            sizes = [getattr(part, name).nbytes for part in parts]
            assert at == [sum(sizes[:index]) for index in range(len(parts))]
            assert whole.untyped_storage().nbytes() == sum(sizes)


def test_other_forwards_are_the_models_own(llama: TargetModel, tmp_path: Path) -> None:
    place = random_place(random.Random(1), 6, 3)
    ids = torch.tensor([place.prompt], device=DEVICE)
    pool, stored = new_pool(llama), []
    for is_fused in (False, True):
        if is_fused:
            assert fuse(llama.model) == LAYERS
        pages = prefilled(llama, pool, place.prompt)
        stored.append(pool.keys_values[:, :, pages.slots[: len(place.prompt)]])
    assert torch.equal(stored[0], stored[1]), "the same matrix products, bit for bit"
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").to(DEVICE)
    expected = plain(ids).logits
    assert fuse(plain) == LAYERS
    assert plain.config._attn_implementation == "eager"
    assert torch.equal(plain(ids).logits, expected)


def test_taps_are_the_layers_outputs(llama: TargetModel, tmp_path: Path) -> None:
    fuse(llama.model)
    place = random_place(random.Random(2), 5, 0)
    run(llama, [place])
    hidden = reference(tmp_path)(
        torch.tensor([[*place.prompt, *place.tokens]], device=DEVICE), output_hidden_states=True
    ).hidden_states
    assert_alike(llama._captured[0][0, 0], hidden[1][0, -1])


def test_a_norm_worked_out_ahead_is_used_for_nothing_else(llama: TargetModel, tmp_path: Path) -> None:
    """A hook gives the second layer other rows than the first one left, then that layer is left out."""
    fuse(llama.model)
    place = random_place(random.Random(8), 4, 0)
    plain = reference(tmp_path)
    hooks = [
        model.model.layers[0].register_forward_hook(lambda _, __, output: output.flip(-1))
        for model in (llama.model, plain)
    ]
    assert_alike(run(llama, [place])[0, :1], plainly(plain, place))
    relay = llama.model.model.layers[0].forward._relay
    assert (relay._norm, relay._hidden, relay._normed) == (None, None, None), "held longer than needed"
    for hook in hooks:
        hook.remove()
    for model in (llama.model, plain):
        model.config.num_hidden_layers = 1
    assert_alike(run(llama, [place])[0, :1], plainly(plain, place))


def test_a_copy_runs_on_its_own_weights(llama: TargetModel) -> None:
    place = random_place(random.Random(3), 4, 1)
    fuse(llama.model)
    twin = TargetModel(copy.deepcopy(llama.model), ())
    expected = run(twin, [place])
    for parameter in llama.model.parameters():
        parameter.zero_()
    assert torch.equal(run(twin, [place]), expected)


def test_the_given_linear_multiplies_every_weight_of_a_layer(llama: TargetModel) -> None:
    made: list[tuple[tuple[int, ...], bool, bool]] = []

    def make(weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool = False) -> nn.Module:
        made.append((tuple(weight.shape), bias is not None, gated))
        return PlainLinear(weight, bias, gated=gated)

    fuse(llama.model, make)
    shapes = [((64, 32), False), ((32, 32), False), ((96, 32), True), ((32, 48), False)]
    assert made == [(shape, True, gated) for shape, gated in shapes] * LAYERS


class _Recorded(TorchDispatchMode):
    """Notes what PyTorch computes; fails where a value would be carried to the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.computed: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero"), name
        output = func(*args, **(kwargs or {}))
        if not func.is_view and not name.startswith(("empty", "new_empty", "_unsafe_view")):
            self.computed.append(name)
        return output


def test_a_layer_is_ten_launches_and_no_look_at_the_host(
    llama: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are stood in for by their shapes: in the interpreter they look at everything."""
    fuse(llama.model)
    launches: list[str] = []

    def noted(name: str, result: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*arguments: Any) -> Any:
            launches.append(name)
            return result(*arguments)

        return launch

    stand_ins: dict[str, Callable[..., Any]] = {
        "add_norm": lambda hidden, *_: (torch.empty_like(hidden), torch.empty_like(hidden)),
        "turn": lambda *_: None,
        "gate": lambda rows: rows.new_empty(len(rows), rows.shape[1] // 2),
        "tree_attention": lambda query, *_: torch.empty(query.shape, dtype=query.dtype, device=DEVICE),
    }
    for name, result in stand_ins.items():
        monkeypatch.setattr(fused_layers, name, noted(name, result))
    pool = new_pool(llama)
    plan = DevicePlan(DeviceRows.empty(2, ROWS, 2, PAGE, DEVICE), pool)
    ids = torch.zeros(1, 2 * ROWS, dtype=torch.int64, device=DEVICE)
    with _Recorded() as whole:
        positions = plan.rows.positions.view(1, -1)
        llama.model(input_ids=ids, position_ids=positions, use_cache=False, ddtree_plan=plan)
    one = ["turn", "tree_attention", "add_norm", "gate", "add_norm"]
    assert launches == ["add_norm", *one * LAYERS], "the first norm alone has nothing to be fused with"
    products = [name for name in whole.computed if name == "linear"]
    assert len(products) == 4 * LAYERS + 1, "four of each layer, and the head"
    hidden, angles = torch.randn(1, 2 * ROWS, 32), torch.randn(2 * ROWS, 8)
    with _Recorded() as single:
        llama.model.model.layers[0].forward.fused(hidden.to(DEVICE), angles.to(DEVICE), angles, plan)
    assert single.computed == ["linear"] * 4, "PyTorch itself launches nothing else"


def test_a_kind_that_does_not_come_out_alike_is_left_alone(
    llama: TargetModel, caplog: pytest.LogCaptureFixture
) -> None:
    class Off(PlainLinear):
        """A matrix product of a card that is not well."""

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return super().forward(rows) * 1.01

    place = random_place(random.Random(7), 3, 1)
    expected = prefill_logits(llama, place)
    with caplog.at_level(logging.WARNING):
        assert fuse(llama.model, Off) == 0
    assert len(caplog.records) == 1, "a kind is tried once"
    assert caplog.records[0].getMessage().startswith("LlamaDecoderLayer runs unfused, more slowly: ")
    assert torch.equal(prefill_logits(llama, place), expected)
    assert not fused_of(llama.model)


def test_a_compiler_that_fails_is_a_warning(
    llama: TargetModel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no\n  compiler")

    monkeypatch.setattr(fused_layers, "turn", broken)
    with caplog.at_level(logging.WARNING):
        assert fuse(llama.model) == 0
    assert "more slowly: no compiler" in caplog.text
