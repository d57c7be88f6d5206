"""The command ``ddtree-gateway``: settings from the command line, and a web server around the service."""

from __future__ import annotations

import logging
from pathlib import Path

import click
import uvicorn

from ddtree_client import DDTreeClientError, Tls
from ddtree_gateway.app import create_app
from ddtree_gateway.settings import Settings, SettingsError

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command(
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "DDTREE_GATEWAY"}
)
@click.option(
    "--triton",
    default="localhost:8001",
    show_default=True,
    help="HOST:PORT of Triton's gRPC port, several by commas.",
)
@click.option("--model", default="ddtree", show_default=True, help="Triton's name of the model.")
@click.option(
    "--served-model-name", multiple=True, help="What requests call it; may be repeated. Default: --model."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=9000, show_default=True, help="0: a free one.")
@click.option("--api-keys", type=_FILE, help="File of bearer keys, one a line; read again when it changes.")
@click.option(
    "--default-max-tokens",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Of chats that name no limit.",
)
@click.option("--max-body-bytes", type=click.IntRange(1), default=4 * 1024 * 1024, show_default=True)
@click.option(
    "--request-timeout",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds; also the longest deadline.",
)
@click.option("--tls-root", type=_FILE, help="PEM file: certificates to trust towards Triton.")
@click.option("--tls-key", type=_FILE, help="PEM file: own key, for mutual TLS.")
@click.option("--tls-chain", type=_FILE, help="PEM file: own certificate chain.")
@click.option("--ssl-certfile", type=_FILE, help="PEM file: serve HTTPS with this certificate.")
@click.option("--ssl-keyfile", type=_FILE, help="PEM file: its key.")
def main(
    *,
    triton: str,
    model: str,
    served_model_name: tuple[str, ...],
    host: str,
    port: int,
    api_keys: Path | None,
    default_max_tokens: int,
    max_body_bytes: int,
    request_timeout: float,
    tls_root: Path | None,
    tls_key: Path | None,
    tls_chain: Path | None,
    ssl_certfile: Path | None,
    ssl_keyfile: Path | None,
) -> None:
    """Serve the OpenAI API in front of one or more Triton servers with DDTree."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    has_tls = any((tls_root, tls_key, tls_chain))
    try:
        settings = Settings(
            endpoints=tuple(address.strip() for address in triton.split(",") if address.strip()),
            model=model,
            served_names=served_model_name,
            api_keys=api_keys,
            tls=Tls(tls_root, tls_key, tls_chain) if has_tls else None,
            default_max_tokens=default_max_tokens,
            max_body_bytes=max_body_bytes,
            request_timeout_s=request_timeout,
        )
        app = create_app(settings)
    except (SettingsError, DDTreeClientError) as error:
        raise click.ClickException(str(error)) from None
    uvicorn.run(
        app,
        host=host,
        port=port,
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        access_log=False,  # a line per request tells less than /metrics and costs more
        server_header=False,
        timeout_graceful_shutdown=30,
    )


if __name__ == "__main__":
    main()
