"""Reads a draft's checkpoint folder and says in one line what is wrong with one.

A folder holds `config.json` and safetensors (sharded or not). Embedding and output head come from the target;
the speculators format may bring a head of its own over fewer tokens, with a map to the target's. This module
knows files and shapes. It does not build the model, nor fetch a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from ddtree.errors import CheckpointError
from ddtree.models.draft_config import DraftConfig
from ddtree.models.weight_files import FLOAT_TYPES, Header, read_headers, weight_files

_NAMES_SHOWN = 3  # of missing or unexpected tensors, in a message
_MAP_TYPES = {"d2t": ("I64", "I32"), "t2d": ("BOOL", "U8")}
_ROWS_COMPARED = 64  # of an embedding that should be the target's
_ROUNDING = 1e-2  # two checkpoints may keep it in different types
_HEAD, _MAP, _MEMBERS, _EMBEDDING = "lm_head.weight", "d2t", "t2d", "embed_tokens.weight"


@dataclass(frozen=True)
class DraftCheckpoint:
    """A folder whose configuration and tensor shapes have been checked."""

    folder: Path
    config: DraftConfig
    files: Mapping[str, Path]  # tensor name: the file that holds it

    def load(self, names: Iterable[str], dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
        """Read tensors by name."""
        by_file: dict[Path, list[str]] = defaultdict(list)
        for name in names:
            by_file[self.files[name]].append(name)
        tensors = {}
        for path, members in by_file.items():
            with safe_open(path, framework="pt") as file:
                for name in members:
                    tensors[name] = file.get_tensor(name).to(device=device, dtype=dtype)
        return tensors

    def headers(self) -> dict[str, Header]:
        """Shape and type of every tensor."""
        found: dict[str, Header] = {}
        for path in sorted(set(self.files.values())):
            found |= read_headers(path)
        return found

    def load_head(self, dtype: torch.dtype, device: torch.device) -> DraftHead | None:
        """Read the draft's own output head; None when it uses the target's.

        Raises:
            CheckpointError: the map to target ids is not one: an id is outside or comes twice.
        """
        if _HEAD not in self.files:
            return None
        weight = self.load((_HEAD,), dtype, device)[_HEAD]
        if _MAP not in self.files:
            return DraftHead(weight, None)
        ids = torch.arange(len(weight)) + self._read(_MAP).long()
        is_inside = bool((ids >= 0).all() and (ids < self.config.vocab_size).all())
        members = self._read(_MEMBERS).bool() if _MEMBERS in self.files else None
        for rule, holds in (
            (f"{_MAP} to lead to ids below {self.config.vocab_size}", is_inside),
            (f"{_MAP} to lead to every id once", len(ids.unique()) == len(ids)),
            (
                f"{_MAP} to lead to the ids that {_MEMBERS} has",
                members is None or not is_inside or bool(members[ids].all()),
            ),
        ):
            if not holds:
                raise CheckpointError(
                    f"{self.files[_MAP]}: expected {rule}, found {ids[:4].tolist()}, … from "
                    f"{self._read(_MAP)[:4].tolist()}, …; an entry is the distance from draft id to target id"
                )
        return DraftHead(weight, ids.to(device))

    def check_embedding(self, embedding: torch.Tensor) -> None:
        """Check that an embedding the folder may hold is the target's, which is the one that is used.

        Args:
            embedding: `[V, H]`, the target's.

        Raises:
            CheckpointError: it is another one.
        """
        if _EMBEDDING not in self.files:
            return
        rows = torch.linspace(0, min(len(embedding), self.config.vocab_size) - 1, _ROWS_COMPARED).long()
        rows = torch.cat((rows, torch.tensor([self.config.mask_token_id]))).unique()
        with safe_open(self.files[_EMBEDDING], framework="pt") as file:
            part = file.get_slice(_EMBEDDING)
            own = torch.cat([part[row : row + 1] for row in rows.tolist()]).to(embedding.dtype)
        off = float((own - embedding[rows.to(embedding.device)].cpu()).abs().max())
        if not off <= _ROUNDING * max(1.0, float(own.abs().max())):
            raise CheckpointError(
                f"{self.files[_EMBEDDING]}: expected {_EMBEDDING} to be the target's embedding, found rows "
                f"that differ by up to {off:.3g}; a draft with an embedding of its own is not served"
            )

    def _read(self, name: str) -> torch.Tensor:
        with safe_open(self.files[name], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor


@dataclass(frozen=True)
class DraftHead:
    """An output head of the draft's own."""

    weight: torch.Tensor  # [draft_vocab_size, H]
    target_ids: (
        torch.Tensor | None
    )  # [draft_vocab_size] int64, the token each row stands for; None: its index


def open_checkpoint(folder: Path) -> DraftCheckpoint:
    """Read a checkpoint's configuration and compare the tensors' names and shapes with it; loads no weights.

    Raises:
        CheckpointError: one line with the file, what was expected and what was found.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: expected a draft checkpoint's configuration, found no such file")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: expected a readable JSON file, found {error}") from error
    try:
        config = DraftConfig.from_values(values)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error.args[0]}") from error
    mask_file = folder / "mask_embedding.pt"
    if mask_file.exists():
        raise CheckpointError(
            f"{mask_file}: expected the mask's embedding to be the target's row {config.mask_token_id}, "
            "found a file with another one, which is not served; without it drafts would only be rejected"
        )
    return DraftCheckpoint(folder, config, _check_tensors(folder, config))


def draft_hash(folder: Path) -> str:
    """Hash the configuration and the projection's weights: equal hashes mean interchangeable features.

    Cheap enough for every load: the layers' weights are not read.

    Raises:
        CheckpointError: as `open_checkpoint`.
    """
    checkpoint = open_checkpoint(folder)
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
    for name in ("fc.weight", "hidden_norm.weight"):
        with safe_open(checkpoint.files[name], framework="pt") as file:
            tensor = file.get_tensor(name)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def tensor_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Name every tensor of a checkpoint with its shape."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * head_dim, config.num_kv_heads * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    for name, rows, columns in (
        ("q", queries, hidden),
        ("k", keys, hidden),
        ("v", keys, hidden),
        ("o", hidden, queries),
    ):
        layer[f"self_attn.{name}_proj.weight"] = (rows, columns)
        if config.attention_bias:
            layer[f"self_attn.{name}_proj.bias"] = (rows,)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, config.feature_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    if config.dflash2 is not None:
        rank, kernel = config.dflash2.selector_rank, config.dflash2.conv_kernel_size
        groups = hidden // config.dflash2.conv_group_size
        for name in ("attention_conv", "mlp_conv"):
            layer[f"{name}.base_kernel"] = (2, kernel, hidden)
            layer[f"{name}.kernel_projection.weight"] = (2 * kernel * groups, hidden)
        shapes["candidate_selector.hidden_projection.weight"] = (rank, hidden)
        for name in ("predecessor_codebook", "successor_codebook"):
            shapes[f"candidate_selector.{name}"] = (config.vocab_size, rank)
    for index in range(len(config.layers)):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    if config.draft_vocab_size != config.vocab_size:
        shapes |= {_HEAD: (config.draft_vocab_size, hidden), _MAP: (config.draft_vocab_size,)}
    return shapes


def _optional_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Name what a folder of the speculators format may hold besides."""
    if not config.is_from_speculators:
        return {}
    vocabulary, drafted = config.vocab_size, config.draft_vocab_size
    return {
        _HEAD: (drafted, config.hidden_size),
        _MAP: (drafted,),
        _MEMBERS: (vocabulary,),
        _EMBEDDING: (vocabulary, config.hidden_size),
        # Only for training: the target's own, with which drafts were scored.
        "verifier_norm.weight": (config.hidden_size,),
        "verifier_lm_head.weight": (drafted, config.hidden_size),
    }


def _check_tensors(folder: Path, config: DraftConfig) -> dict[str, Path]:
    """Find every tensor's file from the files' headers and compare names, shapes and types."""
    listed, files = weight_files(folder)
    shapes = tensor_shapes(config)
    allowed = shapes | _optional_shapes(config)
    found: dict[str, Path] = {}
    for path in files:
        for name, header in read_headers(path).items():
            found[name] = path
            _check_header(path, name, header, allowed)
    missing = sorted(shapes.keys() - found.keys())
    if missing:
        described = ", ".join(f"{name} {list(shapes[name])}" for name in missing[:_NAMES_SHOWN])
        raise CheckpointError(
            f"{listed}: expected {len(shapes)} tensors, found {len(missing)} of them missing: {described}"
            + (", …" if len(missing) > _NAMES_SHOWN else "")
        )
    return found


def _check_header(path: Path, name: str, header: Header, shapes: Mapping[str, tuple[int, ...]]) -> None:
    if name not in shapes:
        raise CheckpointError(
            f"{path}: expected only a DFlash draft's tensors, found {name} {list(header.shape)} as well"
        )
    if header.shape != shapes[name]:
        raise CheckpointError(
            f"{path}: expected {name} of shape {list(shapes[name])}, found {list(header.shape)}"
        )
    types = _MAP_TYPES.get(name, FLOAT_TYPES)
    if header.dtype not in types:
        raise CheckpointError(f"{path}: expected {name} as one of {types}, found {header.dtype}")
