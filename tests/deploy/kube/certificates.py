"""An authority and the certificates it signs, by the openssl command. For tests alone: no pass phrases."""

from __future__ import annotations

import subprocess
from pathlib import Path

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def make_certificates(folder: Path, *, other_authority: bool = False) -> Path:
    """A folder like a mounted secret: ca.crt, tls.crt, tls.key, and client.crt, client.key.

    Args:
        folder: a new folder.
        other_authority: gives the authority another name, to be told apart in messages.
    """
    folder.mkdir()
    name = "other" if other_authority else "authority"
    _openssl(folder, "req", "-x509", *_NEW_KEY, "-keyout", "ca.key", "-out", "ca.crt", "-days", "2",
             "-subj", f"/CN=ddtree test {name}")  # fmt: skip
    for who, file in (("localhost", "tls"), ("client", "client")):
        key, request, certificate = f"{file}.key", f"{file}.csr", f"{file}.crt"
        extensions = folder / f"{file}.ext"
        extensions.write_text(f"subjectAltName=DNS:{who}\nbasicConstraints=CA:FALSE\n")
        _openssl(folder, "req", *_NEW_KEY, "-keyout", key, "-out", request, "-subj", f"/CN={who}")
        authority = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", extensions.name)
        _openssl(folder, "x509", "-req", "-in", request, "-out", certificate, "-days", "2", *authority)
    return folder


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)
