"""An OpenAI-compatible HTTP service in front of the model `ddtree`: stateless, over the gRPC contract.

It knows neither models nor tokenizers: templates, sampling and grammars are the server's.
"""

from ddtree_gateway.app import create_app
from ddtree_gateway.settings import Settings

__all__ = ["Settings", "create_app"]
