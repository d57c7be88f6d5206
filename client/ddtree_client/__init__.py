"""Client of DDTree for Triton: `Client` and `AsyncClient` for programs, the command ``ddtree`` for people.

Speaks gRPC to the model ``ddtree``; knows nothing of models, tokenizers or how the server decodes.
"""

from ddtree_client.aio import AsyncClient, AsyncStream
from ddtree_client.client import Client, Stream
from ddtree_client.errors import (
    DDTreeClientError,
    DeadlineExceededError,
    IncompleteAnswerError,
    InternalServerError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    RequestCancelledError,
    ServerUnavailableError,
)
from ddtree_client.health import Health, ModelHealth
from ddtree_client.types import (
    Chunk,
    GenerateOptions,
    Message,
    Result,
    Stats,
    Tls,
    TokenLogProbs,
    TracedRound,
)

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Chunk",
    "Client",
    "DDTreeClientError",
    "DeadlineExceededError",
    "GenerateOptions",
    "Health",
    "IncompleteAnswerError",
    "InternalServerError",
    "InvalidRequestError",
    "Message",
    "ModelHealth",
    "NotFoundError",
    "OverloadedError",
    "RequestCancelledError",
    "Result",
    "ServerUnavailableError",
    "Stats",
    "Stream",
    "Tls",
    "TokenLogProbs",
    "TracedRound",
]
