"""All of the soak's kinds and a few looks, small enough for every run: see `make soak` for the whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.run import soak
from tests.soak.world import soaked

pytestmark = [pytest.mark.triton, pytest.mark.timeout(240)]

REQUESTS = 500


# Triton 2.51 can crash while it unloads a model whose process has calls of stages open: seen once in some 24
# ends that had, and once in this test's. Once more then; any other end fails.
@pytest.mark.flaky(reruns=1, only_rerun=r"assert \(-11, 0, 0\)")
def test_hundreds_of_requests_of_every_kind(tmp_path: Path, project_root: Path) -> None:
    with soaked(tmp_path, project_root) as world:
        went = soak(world, REQUESTS)
        report = world.triton.stop()
    assert went.complaints == ()
    assert went.leaks == ()
    assert sum(went.ended.values()) == REQUESTS
    kinds = {ended.partition(":")[0] for ended in went.ended}
    assert kinds == {"complete", "leave", "give up", "in time", "bad"}
    assert (report.exit_code, report.orphans_killed, report.regions_removed) == (0, 0, 0)
