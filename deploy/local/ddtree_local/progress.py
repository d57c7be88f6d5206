"""A spinner on standard error while something takes long; one plain line where nobody watches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show that `text` is going on until the block ends."""
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"{text} …")
        yield
        return
    with console.status(f"{text} …"):
        yield
