"""The drafter in training equals the drafter that is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from ddtree.errors import CheckpointError, InvalidArgument
from ddtree.models.dflash import DFlashDraft, FeatureProjection
from ddtree.models.draft_checkpoint import open_checkpoint
from ddtree.train.checkpoints import DraftShape, new_draft, read_draft, write_draft
from ddtree.train.draft_model import BlockBatch
from ddtree.train.targets import TapReader
from tests.fakes.random_draft import write_draft as write_random_draft
from tests.fakes.tiny_models import EOS_ID, LAYERS, MASK_ID

CPU = torch.device("cpu")


def test_every_block_equals_what_the_served_drafter_computes_alone(tmp_path: Path) -> None:
    folder = write_random_draft(tmp_path)
    trained, _ = read_draft(folder)
    checkpoint = open_checkpoint(folder)
    projection = FeatureProjection.load(checkpoint, torch.float32, CPU)
    served = DFlashDraft.load(checkpoint, torch.float32, CPU)
    config = checkpoint.config
    taps = torch.randn(2, 30, config.feature_size)
    anchors = torch.tensor([[3, 11, 12], [29, 0, 7]])
    embeds = torch.randn(2, 3, config.block_size, config.hidden_size)
    with torch.no_grad():
        together = trained(BlockBatch(taps, embeds, anchors))
        for row in range(2):
            keys, values = served.context_kv(projection(taps[row]), torch.arange(30))
            for block, anchor in enumerate(anchors[row].tolist()):
                positions = anchor + torch.arange(config.block_size)[None]
                alone = served(
                    embeds[row, block][None],
                    positions,
                    lambda layer, _, k=keys, v=values, n=anchor: (k[layer, :n], v[layer, :n]),
                )
                torch.testing.assert_close(together[row, block], alone[0], rtol=0, atol=2e-5)


def test_taps_are_the_layers_outputs_and_padding_changes_nothing(target: PreTrainedModel) -> None:
    ids = torch.randint(0, 250, (2, 9))
    with torch.no_grad():
        plain = target(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    reader = TapReader(target, (1, 0))
    padded = torch.cat((ids, torch.zeros(2, 5, dtype=torch.int64)), 1)
    taps = reader.read(padded)[:, :9]
    torch.testing.assert_close(taps, torch.cat((plain[2], plain[1]), -1), rtol=1e-4, atol=1e-3)
    assert len(target.get_decoder().layers) == LAYERS, "the target is whole again"


def test_a_layers_own_forward_outlives_a_reading(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three layers the first has a function of its own, and the last is not read."""
    layers, ids = target.get_decoder().layers, torch.randint(0, 250, (1, 5))
    plain = TapReader(target, (0, 1)).read(ids)
    calls, of_class = [], layers[0].forward

    def own(*args: Any, **options: Any) -> Any:
        calls.append("own")
        return of_class(*args, **options)

    for layer in (layers[0], layers[2]):
        monkeypatch.setitem(vars(layer), "forward", own)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    for compiled in (False, True):
        assert torch.equal(TapReader(target, (0, 1), compiled=compiled).read(ids), plain)
        assert [vars(layer).get("forward") for layer in layers] == [own, None, own]
    assert calls == ["own"] * 2


def test_taps_outside_the_target_are_refused(target: PreTrainedModel) -> None:
    with pytest.raises(InvalidArgument, match=r"taps must be layers 0\.\.2"):
        TapReader(target, (0, LAYERS))


def test_a_new_drafter_is_a_checkpoint_for_its_target(target: PreTrainedModel, tmp_path: Path) -> None:
    shape = DraftShape(layers=2, block_size=6, mask_token_id=MASK_ID, taps=(0, 2))
    draft, values = new_draft(target.config, shape)
    write_draft(tmp_path, draft, values)
    again, read_values = read_draft(tmp_path, target.config)
    assert read_values["dflash_config"] == {"mask_token_id": MASK_ID, "target_layer_ids": [0, 2]}
    assert again.config == draft.config
    for name, weight in again.state_dict().items():
        torch.testing.assert_close(weight, draft.state_dict()[name].bfloat16().float())


@pytest.mark.parametrize(
    ("shape", "rule"),
    [
        (DraftShape(mask_token_id=EOS_ID), "other than the target's padding and end tokens"),
        (DraftShape(mask_token_id=5000), "below the target's vocabulary"),
        (DraftShape(mask_token_id=MASK_ID, taps=(0, 3)), "target_layer_ids between"),
    ],
)
def test_a_shape_that_does_not_fit_the_target_is_refused(
    target: PreTrainedModel, shape: DraftShape, rule: str
) -> None:
    with pytest.raises(CheckpointError, match=rule):
        new_draft(target.config, shape)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"is_causal": True}, "causal or sliding layers"),
        ({"attention_bias": True}, "biases"),
        ({"final_logit_softcapping": 3.0}, "changed logits"),
    ],
)
def test_only_plain_drafters_are_trained(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(CheckpointError, match=what):
        read_draft(write_random_draft(tmp_path, **changes))
