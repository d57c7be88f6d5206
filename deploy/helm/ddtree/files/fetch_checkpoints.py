"""Brings checkpoints into a volume, or waits until somebody else has brought them.

A folder counts as brought once its marker file is there, which is written last: a download that broke off is
begun again, and nobody ever loads half a checkpoint. Weights are taken as safetensors only, because the other
formats run code when they are read. It does not know what the weights are for.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

MARKER = ".complete"
# What a checkpoint in transformers' layout needs, tokenizer and chat template included.
WANTED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
_POLL_S = 5.0


class FetchError(Exception):
    """A checkpoint cannot be brought; the message says why and what to change."""


def fetch(folder: Path, uri: str) -> str:
    """Bring one checkpoint.

    Args:
        folder: where it goes.
        uri: `hf://owner/name@revision` or `s3://bucket/prefix`.

    Raises:
        FetchError: what came is no checkpoint, or the address has another form.
    """
    if (folder / MARKER).is_file():
        return f"{folder} is there"
    started = time.monotonic()
    partial = folder.with_name(f"{folder.name}.partial")
    if uri.startswith("hf://"):
        _from_hugging_face(partial, uri.removeprefix("hf://"))
    elif uri.startswith("s3://"):
        _from_s3(partial, uri.removeprefix("s3://"))
    else:
        raise FetchError(f"{uri} starts with neither hf:// nor s3://; give one of these")
    _check(partial, uri)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    (folder / MARKER).write_text(f"{uri}\n")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return f"{folder}: {size / 1e9:.2f} GB of {uri} in {time.monotonic() - started:.0f} s"


def wait(folders: Sequence[Path], timeout_s: float) -> Iterator[str]:
    """Yield a line for each folder that has come.

    Raises:
        FetchError: one did not come in time.
    """
    deadline = time.monotonic() + timeout_s
    for folder in folders:
        while not (folder / MARKER).is_file():
            if time.monotonic() >= deadline:
                raise FetchError(
                    f"{folder} did not come within {timeout_s:g} s; look at the log of the fetching job"
                )
            time.sleep(_POLL_S)
        yield f"{folder} is there"


def _from_hugging_face(folder: Path, name: str) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    repository, _, revision = name.partition("@")
    try:
        # An interrupted download goes on where it stopped.
        snapshot_download(
            repository, revision=revision or None, local_dir=folder, allow_patterns=list(WANTED)
        )
    except HfHubHTTPError as error:
        raise FetchError(
            f"hf://{name}: {error}; check the name, the revision and the token secret"
        ) from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)


def _from_s3(folder: Path, place: str) -> None:
    # The image has it; what checks these types need not.
    import boto3  # type: ignore[import-not-found]
    from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-not-found]

    bucket, _, prefix = place.partition("/")
    prefix = f"{prefix.rstrip('/')}/" if prefix else ""
    try:
        client = boto3.client("s3")
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            for entry in page.get("Contents", ()):
                name = entry["Key"].removeprefix(prefix)
                path = folder / name
                if ".." in path.parts:
                    raise FetchError(
                        f"s3://{place}: the object name {name!r} leads out of the folder; rename it"
                    )
                if not any(path.match(pattern) for pattern in WANTED):
                    continue
                if path.is_file() and path.stat().st_size == entry["Size"]:
                    continue
                path.parent.mkdir(parents=True, exist_ok=True)
                client.download_file(bucket, entry["Key"], str(path))
    except (BotoCoreError, ClientError) as error:
        raise FetchError(f"s3://{place}: {error}; check region, endpoint and credentials secret") from error


def _check(folder: Path, uri: str) -> None:
    for needed in ("config.json", "*.safetensors"):
        if not any(folder.glob(needed)):
            raise FetchError(f"{uri} has no {needed}; give a checkpoint in transformers' layout")


def main(arguments: Sequence[str]) -> int:
    """Run; one line per checkpoint on stderr."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fetching = commands.add_parser("fetch")
    fetching.add_argument("checkpoints", nargs="+", metavar="FOLDER=URI")
    waiting = commands.add_parser("wait")
    waiting.add_argument("folders", nargs="+", type=Path)
    waiting.add_argument("--timeout-seconds", type=float, default=7200.0)
    options = parser.parse_args(arguments)
    try:
        if options.command == "wait":
            for line in wait(options.folders, options.timeout_seconds):
                sys.stderr.write(f"{line}\n")
        else:
            for folder, _, uri in (checkpoint.partition("=") for checkpoint in options.checkpoints):
                sys.stderr.write(f"{fetch(Path(folder), uri)}\n")
    except FetchError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
