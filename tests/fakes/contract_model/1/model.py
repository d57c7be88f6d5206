"""A model that keeps the client's contract and follows a script instead of decoding.

The prompt of a row is JSON. An object is a script: ``chunks`` to send, ``delay_s`` before each, ``until``, a
file that must be there before chunk ``until_at`` is sent, ``error`` to fail with before chunk ``error_at``,
``empty_final`` to send the final flag without data, ``truncated`` to leave the finish reason out. A chunk is
one round, of as many tokens as it has characters. The string ``"echo"`` answers with the row's tensors as
JSON, ``"report"`` with how many scripts were begun and how the requests so far ended. It knows no tokens,
drafts or stages.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

_LOOK_S = 0.02  # between two looks whether the caller has gone
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """Plays the script of every row, and counts how the requests ended."""

    def initialize(self, _args: dict[str, str]) -> None:
        self._ended = {"begun": 0, "finished": 0, "cancelled": 0, "failed": 0}

    async def execute(self, requests: list[Any]) -> None:
        await asyncio.gather(*(self._answer(request) for request in requests))

    async def _answer(self, request: Any) -> None:
        sender = request.get_response_sender()
        try:
            ending = await self._play(sender, self._scripts(request))
        except Exception as error:  # noqa: BLE001 - an uncaught one would leave the client waiting for ever
            ending = "failed"
            response = pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
            sender.send(response, flags=FINAL)
        self._ended[ending] += 1

    def _scripts(self, request: Any) -> list[dict[str, Any]]:
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        if "input_ids" in tensors:
            return [_say(tensors["input_ids"].reshape(-1).tolist())]
        is_chat = "messages" in tensors
        scripts = []
        for row, value in enumerate(tensors["messages" if is_chat else "text_input"].reshape(-1)):
            script = json.loads(value)
            if is_chat:
                script = json.loads(script[-1]["content"])
            if script == "echo":
                script = _say({name: _row_values(tensor, row) for name, tensor in tensors.items()})
            elif script == "report":
                script = _say(self._ended)
            else:
                self._ended["begun"] += 1
            scripts.append(script)
        return scripts

    async def _play(self, sender: Any, scripts: list[dict[str, Any]]) -> str:
        """Send the rows' chunks in turns, the first of every row, then the second, and so on."""
        longest = max(len(script["chunks"]) for script in scripts)
        turns = [
            (row, index)
            for index in range(longest)
            for row, script in enumerate(scripts)
            if index < len(script["chunks"])
        ]
        for row, index in turns:
            script = scripts[row]
            await _pause(sender, script, index)
            if sender.is_cancelled():
                sender.send(flags=FINAL)
                return "cancelled"
            if script.get("error_at") == index:
                raise RuntimeError(script["error"])
            is_last, is_empty_final = (row, index) == turns[-1], script.get("empty_final", False)
            response = pb_utils.InferenceResponse(_outputs(script, row, index))
            sender.send(response, flags=FINAL if is_last and not is_empty_final else 0)
            if is_last and is_empty_final:
                sender.send(flags=FINAL)
        return "finished"


async def _pause(sender: Any, script: dict[str, Any], index: int) -> None:
    """What the script waits for before a chunk, or until the caller has gone."""
    await asyncio.sleep(0)
    left_s = script.get("delay_s", 0.0)
    while (left_s > 0 or not _is_open(script, index)) and not sender.is_cancelled():
        pause_s = min(left_s, _LOOK_S) if left_s > 0 else _LOOK_S
        await asyncio.sleep(pause_s)
        left_s -= pause_s


def _is_open(script: dict[str, Any], index: int) -> bool:
    return "until" not in script or index < script.get("until_at", 0) or Path(script["until"]).exists()


def _say(value: Any) -> dict[str, Any]:
    return {"chunks": [json.dumps(value)]}


def _row_values(tensor: Any, row: int) -> list[Any]:
    values = tensor.reshape(len(tensor), -1)[row].tolist()
    return [value.decode() if isinstance(value, bytes) else value for value in values]


def _outputs(script: dict[str, Any], row: int, index: int) -> list[Any]:
    chunks = script["chunks"]
    text = chunks[index]
    is_last = index == len(chunks) - 1 and not script.get("truncated", False)
    outputs = [
        pb_utils.Tensor("text_output", np.array([text.encode()], dtype=np.object_)),
        pb_utils.Tensor("output_ids", np.array([[[ord(letter) for letter in text]]], dtype=np.int32)),
        pb_utils.Tensor("finish_reason", np.array([b"stop" if is_last else b""], dtype=np.object_)),
    ]
    numbers = {"batch_index": row, "num_input_tokens": 7, "num_output_tokens": len(text)}
    if is_last:
        numbers["num_rounds"] = len(chunks) - 1
        numbers["total_draft_tokens"] = 10 * (len(chunks) - 1)
        numbers["total_accepted_draft_tokens"] = sum(len(chunk) - 1 for chunk in chunks[1:])
    outputs += [
        pb_utils.Tensor(name, np.array([[number]], dtype=np.int32)) for name, number in numbers.items()
    ]
    return outputs
