"""`python -m ddtree_local.serve`: keeps a Triton server up with a pair of checkpoints until told to stop."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import click

from ddtree_client.control import ServerControl
from ddtree_client.watchdog import Watchdog
from ddtree_local.demo_target import ensure_demo_target
from ddtree_local.errors import LocalTritonError, PortInUseError, ServerStartError
from ddtree_local.ports import Ports
from ddtree_local.prerequisites import port_is_free
from ddtree_local.progress import waiting
from ddtree_local.project import find_project
from ddtree_local.server import LocalTriton
from ddtree_local.serving import (
    ORCHESTRATOR,
    STAGES,
    ServedPair,
    Topology,
    check_prerequisites,
    local_server,
    sigterm_as_interrupt,
)

_LOOK_S = 2.0  # between two looks at the models
_FOLDER = click.Path(path_type=Path)


def _greeting(server: LocalTriton, log: Path) -> str:
    generate = f"http://{server.http_url}/v2/models/{ORCHESTRATOR}/generate"
    return f"""Ready. Listening on
  gRPC    {server.grpc_url}
  HTTP    {server.http_url}
  metrics {server.metrics_url}/metrics
  log     {log}
Try
  {Path(sys.prefix) / "bin" / "ddtree"} generate --url {server.grpc_url} "Why is the sky blue?"
  curl -s {generate} -d '{{"text_input": "The sky is blue because", "max_tokens": 32}}'
Stop with Ctrl-C."""


@contextmanager
def _gateway(server: LocalTriton, host: str, port: int | None) -> Iterator[subprocess.Popen[bytes] | None]:
    """The OpenAI-compatible service in front of the server, when it has a port."""
    if port is None:
        yield None
        return
    command = [sys.executable, "-c", "from ddtree_gateway.cli import main; main()"]
    arguments = [f"--triton={server.grpc_url}", f"--host={host}", f"--port={port}"]
    with subprocess.Popen([*command, *arguments]) as gateway:
        try:
            click.echo(f"OpenAI API on http://{host}:{port}/v1")
            yield gateway
        finally:
            gateway.terminate()


def _check_gateway_port(host: str, port: int, ports: Ports) -> None:
    """Before minutes of loading: the gateway itself would only find out afterwards."""
    if port in (ports.http, ports.grpc, ports.metrics):
        raise PortInUseError(f"gateway port: {port} is Triton's too; give the gateway its own")
    if not port_is_free(host, port):
        raise PortInUseError(
            f"gateway port: {host}:{port} is taken; stop what listens there or give another gateway port"
        )


def _serve(
    server: LocalTriton, log: Path, host: str, gateway_port: int | None, watch: Callable[[], Watchdog]
) -> None:
    gateway_end: int | None = None
    with sigterm_as_interrupt():
        try:
            with waiting("Starting Triton and loading the models"):
                server.start()
            click.echo(_greeting(server, log))
            dog = watch()
            with _gateway(server, host, gateway_port) as gateway:
                while not server.wait(_LOOK_S):
                    if gateway is not None and (gateway_end := gateway.poll()) is not None:
                        break
                    for line in dog.look():
                        click.echo(line, err=True)
        except KeyboardInterrupt:
            with waiting("Stopping Triton"):
                server.stop()
            return
        report = server.stop()
        if gateway_end is not None:
            raise ServerStartError(
                f"the gateway ended by itself (exit code {gateway_end}); it says why above"
            )
        raise ServerStartError(f"the server ended by itself (exit code {report.exit_code}; log: {log})")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", type=_FOLDER, help="Checkpoint folder of the target. Default: the demo target.")
@click.option("--draft", type=_FOLDER, help="Checkpoint folder of the drafter. Default: the demo's.")
@click.option("--topology", type=click.Choice(["bls", "in_process"]), default="bls", show_default=True)
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Default: the checkpoint's."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--http-port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: a free one."
)
@click.option(
    "--grpc-port", type=click.IntRange(0, 65535), default=8001, show_default=True, help="0: a free one."
)
@click.option("--metrics-port", type=click.IntRange(0, 65535), default=8002, show_default=True)
@click.option(
    "--gateway-port",
    type=click.IntRange(1, 65535),
    help="Serve the OpenAI API here too. Default: not at all.",
)
@click.option("--unary", is_flag=True, help="Load the model ddtree_unary too: one request, one response.")
def main(
    *,
    model: Path | None,
    draft: Path | None,
    topology: str,
    dtype: str | None,
    host: str,
    http_port: int,
    grpc_port: int,
    metrics_port: int,
    gateway_port: int | None,
    unary: bool,
) -> None:
    """Keep a Triton server up with a target and its drafter."""
    try:
        check_prerequisites()
        project = find_project()
        ports = Ports(http_port, grpc_port, metrics_port)
        if gateway_port is not None:
            _check_gateway_port(host, gateway_port, ports)
        if draft is None and model is not None:
            raise LocalTritonError(
                "drafter (DRAFT, --draft): not given; a target of your own needs its own drafter"
            )
        pair = ServedPair(
            target=model or ensure_demo_target(project.demo_target_cache),
            draft=draft or project.demo_draft,
            topology=cast(Topology, topology),
            dtype=dtype,
        )
        # Named by the port: two servers of one checkout are drained and read apart.
        log = project.root / ".cache" / f"serve-{grpc_port}.log"
        gate, key = log.with_suffix(".drain"), secrets.token_hex(16)
        if port_is_free(host, grpc_port):  # else this start fails, and who has the port may be draining
            gate.unlink(missing_ok=True)
        server = local_server(
            project, pair, host=host, ports=ports, log_path=log, unary=unary, watch_key=key, drain_file=gate
        )
        models = (ORCHESTRATOR,) if topology == "in_process" else (*STAGES, ORCHESTRATOR)
        _serve(
            server, log, host, gateway_port, lambda: Watchdog(ServerControl(server.http_url, key=key), models)
        )
    except LocalTritonError as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
