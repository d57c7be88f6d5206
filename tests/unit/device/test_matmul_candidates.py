"""Ways to cut a product: few, such as a kernel takes, and for large weights enough of it under way."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from ddtree.device.matmul_candidates import BUCKETS, Bucket, Config, ProductKind, bucket_of, candidates

BF16 = torch.bfloat16
SIXTEEN = next(bucket for bucket in BUCKETS if bucket.most == 16)
H200 = 132  # multiprocessors
QWEN3_8B = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096)]
SMOLLM2 = [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)]


def test_buckets_hold_every_small_row_count() -> None:
    for rows in range(1, BUCKETS[-1].most + 1):
        bucket = bucket_of(rows)
        assert bucket is not None
        assert bucket.timed <= bucket.most >= rows
        smaller = [other.most for other in BUCKETS if other.most < bucket.most]
        assert max(smaller, default=0) < min(rows, bucket.timed)
    assert bucket_of(0) is None
    assert bucket_of(BUCKETS[-1].most + 1) is None


@pytest.mark.parametrize(("weight_rows", "size"), QWEN3_8B + SMOLLM2)
@pytest.mark.parametrize("bucket", BUCKETS)
def test_candidates_for_real_weights(weight_rows: int, size: int, bucket: Bucket) -> None:
    """Few, different, within shared memory; and for large weights some keep 40 KiB a processor under way."""
    kind = ProductKind(weight_rows, size, BF16)
    configs = candidates(kind, bucket, H200)
    assert 4 <= len(configs) <= 8
    assert len(set(configs)) == len(configs)
    under_way = []
    for config in configs:
        stage = config.block_k * 2 * (config.block_n + (bucket.most if config.kind == "dot" else 1))
        assert config.stages * stage <= 220 * 1024
        assert config.kind == "dot" or bucket.most == 1
        programs = -(-weight_rows // config.block_n) * config.split_k
        resident = min(programs, H200 * max(1, 220 * 1024 // (config.stages * stage)), H200 * 8)
        flying = max(1, config.stages - 1) * config.block_n * config.block_k * 2
        under_way.append(resident * flying / H200)
    if weight_rows * size >= 4096 * 4096:
        assert max(under_way) >= 40 * 1024


def test_dtypes_without_candidates() -> None:
    assert all(
        config.kind == "gemv" for config in candidates(ProductKind(64, 64, torch.float32), BUCKETS[0], 1)
    )
    assert candidates(ProductKind(64, 64, torch.float32), SIXTEEN, 1) == ()
    assert candidates(ProductKind(64, 64, torch.float64), BUCKETS[0], 1) == ()


@pytest.mark.parametrize(
    ("field_name", "value", "said"),
    [("kind", "mma", "'dot' or 'gemv'"), ("block_n", 8, "block_n must be a power of two from 16"),
     ("block_n", 48, "power of two"), ("block_k", "64", "block_k"), ("warps", 0, "warps"),
     ("warps", True, "warps"), ("split_k", 0, "split_k"), ("split_k", 2.0, "split_k"),
     ("stages", 17, "stages")],
)  # fmt: skip
def test_a_config_refuses_what_no_kernel_takes(field_name: str, value: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Config(**{**asdict(Config("dot", 32, 32, 1, 4, 3)), field_name: value})


def test_without_tensor_cores_k_is_not_split() -> None:
    with pytest.raises(ValueError, match="split_k"):
        Config("gemv", 4, 32, 2, 4, 1)
