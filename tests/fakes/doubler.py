"""A stage that doubles numbers, and Triton as another way to it, for what carries calls to stages."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from ddtree.errors import InvalidArgument, Unavailable
from ddtree.stages.operations import CallFailed, Operation
from ddtree.stages.server import StageServer
from ddtree.wire import Arrays

NUMBERS = {"numbers": np.arange(5)}


class Doubler:
    """A stage that doubles numbers; in which thread, and whether alone, is noted."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.under_way = self.most = 0
        self.hold = threading.Event()
        self.entered = threading.Event()
        self.hold.set()
        self.says = ""  # instead of its own reason to refuse

    def load(self) -> dict[str, Operation]:
        self.threads.append(threading.get_ident())
        return {"double": self.double, "refuse": self.refuse, "break": self.broken}

    def double(self, arrays: Mapping[str, Any]) -> Arrays:
        self.threads.append(threading.get_ident())
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        self.entered.set()
        self.hold.wait(10)
        self.under_way -= 1
        return {"doubled": arrays["numbers"] * 2}

    def refuse(self, _: Mapping[str, Any]) -> Arrays:
        raise InvalidArgument(self.says or "numbers must be even, got 3; send another")

    def broken(self, _: Mapping[str, Any]) -> Arrays:
        raise ZeroDivisionError("of no use")


class Triton:
    """The other way to the stage: counted, and out of order when it is said so."""

    def __init__(self, server: StageServer | None) -> None:
        self.server = server
        self.calls: list[str] = []
        self.failure: Exception | None = None

    async def __call__(self, _: str, operation: str, arrays: Arrays) -> Mapping[str, Any]:
        self.calls.append(operation)
        if self.failure is not None:
            raise self.failure
        if self.server is None:
            return {"doubled": arrays["numbers"] * 2}
        try:
            return await asyncio.to_thread(self.server.call, operation, arrays)
        except CallFailed as error:
            raise Unavailable(str(error)) from error
