"""Which way of multiplying is taken: the fastest of those that are right, for each weight and device."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from ddtree.device.kernels.matmul import multiply
from ddtree.device.matmul_candidates import BUCKETS, Bucket, Config, ProductKind, bucket_of, candidates
from ddtree.device.matmul_choice import MatmulChooser, SmallLinear
from ddtree.device.matmul_file import ChoiceFile
from tests.fakes.device import DEVICE
from tests.fakes.matmul_bench import BF16, CPU, Bench, weight_of

SIXTEEN = next(bucket for bucket in BUCKETS if bucket.most == 16)


def all_for(weight: torch.Tensor, bucket: Bucket = SIXTEEN) -> tuple[Config, ...]:
    return candidates(ProductKind(weight.shape[0], weight.shape[1], weight.dtype), bucket, 1)


def tuned(bench: Bench, weight: torch.Tensor, folder: Path | None = None) -> SmallLinear:
    chooser = bench.chooser(folder)
    linear = chooser.linear(weight)
    chooser.tune()
    return linear


def test_the_fastest_is_taken_for_each_bucket() -> None:
    weight = weight_of()
    best = {bucket.most: all_for(weight, bucket)[-1] for bucket in BUCKETS}
    fastest = {bucket.timed: best[bucket.most] for bucket in BUCKETS}
    linear = tuned(Bench(lambda config, rows: 5.0 if config and config == fastest[rows] else 10.0), weight)
    for rows in (1, 2, 16, 17, 64, 65, 80):
        bucket = bucket_of(rows)
        assert bucket is not None
        assert linear.config_for(torch.empty(rows, 64)) == best[bucket.most]


@pytest.mark.parametrize(("micros", "wins"), [(9.8, True), (9.95, False), (10.5, False)])
def test_a_kernel_must_be_faster_than_the_library(micros: float, wins: bool) -> None:
    linear = tuned(Bench(lambda config, _: micros if config else 10.0), weight_of())
    assert (linear.config_for(torch.empty(9, 64)) is not None) == wins


def test_a_wrong_or_broken_kernel_never_wins() -> None:
    weight = weight_of()
    wrong, broken, right = all_for(weight)[:3]
    times = {wrong: 1.0, broken: 2.0, right: 3.0}
    bench = Bench(
        lambda config, _: 10.0 if config is None else times.get(config, 9.0), wrong.__eq__, broken.__eq__
    )
    assert tuned(bench, weight).config_for(torch.empty(16, 64)) == right


def test_a_kernel_that_gives_no_numbers_is_wrong() -> None:
    bench = Bench(lambda config, _: 1.0 if config else 10.0)
    honest = bench.multiply
    bench.multiply = lambda *inputs, **named: honest(*inputs, **named) * float("nan")  # type: ignore[method-assign]
    assert tuned(bench, weight_of()).config_for(torch.empty(16, 64)) is None


def test_rows_reach_the_chosen_form() -> None:
    weight, bias = weight_of(48), torch.ones(48, dtype=BF16)
    bench = Bench(lambda config, _: 5.0 if config else 10.0)
    chooser = bench.chooser()
    linear = chooser.linear(weight, bias)
    rows, residual = torch.randn(2, 4, 64).to(BF16), torch.randn(2, 4, 48).to(BF16)
    expected = residual + functional.linear(rows, weight, bias)
    bench.used.clear()
    assert torch.equal(linear(rows, residual), expected)
    assert not bench.used, "before it is tuned, the library computes"
    chooser.tune()
    bench.used.clear()
    assert torch.equal(linear(rows, residual), expected)
    assert [rows for _, rows in bench.used] == [8]
    assert linear(torch.empty(0, 64, dtype=BF16)).shape == (0, 48)
    assert linear(torch.ones(257, 64, dtype=BF16)).shape == (257, 48)
    assert len(bench.used) == 1, "so many rows, or none, are the library's"


def test_a_gated_layer_has_choices_of_its_own() -> None:
    weight = weight_of(64)
    bench = Bench(lambda config, _: 5.0 if config else 10.0)
    chooser = bench.chooser()
    plain, gated = chooser.linear(weight), chooser.linear(weight, gated=True)
    chooser.tune()
    rows = torch.randn(3, 64).to(BF16)
    gate, up = functional.linear(rows, weight).chunk(2, dim=-1)
    assert torch.equal(gated(rows), functional.silu(gate) * up)
    assert plain(rows).shape == (3, 64)
    assert set(chooser.choices()) == {"64x64 bfloat16", "64x64 bfloat16 gated"}


def test_a_slice_of_a_weight_is_the_librarys() -> None:
    bench = Bench(lambda config, _: 5.0 if config else 10.0)
    chooser = bench.chooser()
    weight, rows = weight_of(64, 96), torch.randn(3, 64).to(BF16)
    linear = chooser.linear(weight[:, 16:80])
    chooser.tune()
    assert torch.equal(linear(rows), functional.linear(rows, weight[:, 16:80]))
    assert bench.measured == 0


def test_layers_alike_are_measured_once() -> None:
    bench = Bench(lambda config, _: 5.0 if config else 10.0)
    chooser = bench.chooser()
    layers = [chooser.linear(weight_of()) for _ in range(3)]
    seen: list[tuple[int, int]] = []
    chooser.tune(lambda done, total: seen.append((done, total)))
    assert seen == [(done + 1, len(BUCKETS)) for done in range(len(BUCKETS))]
    assert bench.measured == sum(1 + len(all_for(weight_of(), bucket)) for bucket in BUCKETS)
    assert len({layer.config_for(torch.empty(9, 64)) for layer in layers}) == 1


def test_the_next_start_measures_nothing(tmp_path: Path) -> None:
    first = tuned(
        Bench(lambda config, rows: 3.0 + rows % 7 if config else 10.0), weight_of(), tmp_path / "new"
    )
    again = Bench(lambda *_: 1.0)
    chooser = again.chooser(tmp_path / "new")
    second = chooser.linear(weight_of())
    with ChoiceFile.of(tmp_path / "new", CPU).alone():  # who has nothing to measure waits for nobody
        chooser.tune()
    assert again.measured == 0
    for bucket in BUCKETS:
        rows = torch.empty(bucket.most, 64)
        assert second.config_for(rows) == first.config_for(rows)
    chooser.linear(weight_of(32))
    seen: list[int] = []
    chooser.tune(lambda _, total: seen.append(total))
    assert set(seen) == {len(BUCKETS)}, "only the new weight is measured"
    third = Bench(lambda *_: 1.0).chooser(tmp_path / "new")
    for weight_rows in (64, 32):
        third.linear(weight_of(weight_rows))
    third.tune()
    assert third.choices() == chooser.choices()
    assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".json"]


def _another_device(document: dict[str, object]) -> object:
    return {**document, "key": {"device": "NVIDIA A100"}}


def _no_such_kernel(document: dict[str, object]) -> object:
    config = {**asdict(all_for(weight_of())[0]), "block_n": 7}
    stored = {"config": config, "micros": 1.0, "library_micros": 2.0}
    return {**document, "choices": {"64x64 bfloat16": {"16": stored}}}


@pytest.mark.parametrize(
    "spoil",
    [lambda _: "", lambda _: "[1, 2", lambda found: [found], lambda found: {**found, "choices": 3},
     lambda found: {**found, "choices": {"64x64 bfloat16": {"many": {}}}}, _another_device, _no_such_kernel],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_written_again(tmp_path: Path, spoil: Callable[..., object]) -> None:
    tuned(Bench(lambda config, _: 5.0 if config else 10.0), weight_of(), tmp_path)
    (path,) = tmp_path.iterdir()
    good = json.loads(path.read_text())
    spoiled = spoil(good)
    path.write_text(spoiled if isinstance(spoiled, str) else json.dumps(spoiled))
    bench = Bench(lambda config, _: 5.0 if config else 10.0)
    tuned(bench, weight_of(), tmp_path)
    assert bench.measured > 0
    assert json.loads(path.read_text()) == good


def test_a_folder_that_refuses_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    linear = tuned(Bench(lambda config, _: 5.0 if config else 10.0), weight_of(), tmp_path / "file")
    assert linear.config_for(torch.empty(9, 64)) is not None


def test_what_there_is_no_time_for_stays_with_the_library(tmp_path: Path) -> None:
    chooser = Bench(lambda config, _: 5.0 if config else 10.0).chooser(tmp_path)
    linear = chooser.linear(weight_of())
    chooser.tune(limit_s=0.0)
    assert linear.config_for(torch.empty(9, 64)) is None
    assert list(tmp_path.iterdir()) == []


def test_processes_that_start_together_measure_one_after_the_other(tmp_path: Path) -> None:
    """And the second has nothing left to measure: it takes what the first has found."""
    bench, file = Bench(lambda config, _: 5.0 if config else 10.0), ChoiceFile.of(tmp_path, CPU)
    chooser = bench.chooser(tmp_path)
    linear = chooser.linear(weight_of())
    with ThreadPoolExecutor(1) as pool:
        with file.alone():
            waiting = pool.submit(chooser.tune)
            assert wait([waiting], timeout=0.2).not_done
            first = Bench(lambda config, _: 5.0 if config else 10.0).chooser()
            first.linear(weight_of())
            first.tune()
            file.write(first.choices())
        waiting.result(timeout=60)
    assert bench.measured == 0
    assert linear.config_for(torch.empty(9, 64)) is not None


def test_what_cannot_be_measured_stays_with_the_library(tmp_path: Path) -> None:
    """Memory may run out with many rows; next time may be better, so nothing is stored."""

    def micros(config: Config | None, rows: int) -> float:
        if rows == 65:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 5.0 if config else 10.0

    chooser = Bench(micros).chooser(tmp_path)
    linear = chooser.linear(weight_of())
    seen: list[int] = []
    chooser.tune(lambda done, _: seen.append(done))
    assert linear.config_for(torch.empty(65, 64)) is None
    assert linear.config_for(torch.empty(64, 64)) is not None
    assert seen[-1] == len(BUCKETS)
    (path,) = tmp_path.iterdir()
    (stored,) = json.loads(path.read_text())["choices"].values()
    assert len(stored) == len(BUCKETS) - 1


def test_without_a_device_to_measure_everything_is_the_librarys(tmp_path: Path) -> None:
    chooser = MatmulChooser(CPU, tmp_path)
    weight = torch.nn.Parameter(weight_of(48, dtype=torch.float32))
    linear = chooser.linear(weight)
    chooser.tune(lambda *_: pytest.fail("there is nothing to measure"))
    rows = torch.randn(5, 64)
    assert torch.equal(linear(rows), functional.linear(rows, weight))
    assert list(tmp_path.iterdir()) == []
    assert dict(linear.state_dict()).keys() == {"weight"}
    assert linear.weight is weight, "the weight itself, so that tied ones stay tied"
    assert (linear.in_features, linear.out_features) == (64, 48)


def test_our_kernels_are_right_in_every_bucket(caplog: pytest.LogCaptureFixture) -> None:
    """The real ones, each config of each bucket, gated too; the clock prefers them to the library."""
    caplog.set_level(logging.DEBUG, "ddtree.device.matmul_choice")
    launched: list[Config] = []

    def recorded(*inputs: object, **named: object) -> torch.Tensor:
        launched.append(inputs[2] if len(inputs) > 2 else named["config"])  # type: ignore[arg-type]
        return multiply(*inputs, **named)  # type: ignore[arg-type]

    chooser = MatmulChooser(DEVICE, None, timer=lambda _: 1.0 / (1 + len(launched)), multiply=recorded)
    weight = weight_of(32, 128).to(DEVICE)
    linear, _ = chooser.linear(weight), chooser.linear(weight, gated=True)
    chooser.tune()
    assert not [line for line in caplog.messages if "off by" in line or "cannot run" in line]
    kinds = [ProductKind(32, 128, BF16, gated) for gated in (False, True)]
    forms = [candidates(kind, bucket, chooser._processors) for kind in kinds for bucket in BUCKETS]
    assert len(launched) == sum(map(len, forms))
    for rows in (1, 9, 65):
        inputs = torch.randn(rows, 128).to(DEVICE, BF16)
        assert linear.config_for(inputs) is not None
        # Eight bits, which the interpreter cuts off instead of rounding.
        expected = inputs.double() @ weight.double().T
        torch.testing.assert_close(linear(inputs).double(), expected, rtol=2**-7, atol=2**-7)
