"""All of the soak's kinds and a few looks, small enough for every run: see `make soak` for the whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.run import soak
from tests.soak.world import soaked

pytestmark = [pytest.mark.triton, pytest.mark.timeout(240)]

REQUESTS = 500


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
