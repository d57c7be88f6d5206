"""What we believe TensorRT-LLM's objects look like, and how the installed ones differ from that.

A contract is a JSON file beside this module: every symbol that the adapter touches with its module, its
parameters, which of them we pass, and the commit and path where that was read. What nobody has read is
`null` and counts as unknown: nothing is concluded from it, and what we pass is still checked against the
installed object. This module reads signatures; it imports nothing of TensorRT-LLM itself.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

Importer = Callable[[str], Any]
_KINDS = {
    "positional_or_keyword": inspect.Parameter.POSITIONAL_OR_KEYWORD,
    "keyword_only": inspect.Parameter.KEYWORD_ONLY,
    "var_keyword": inspect.Parameter.VAR_KEYWORD,
}
_PLAIN = (type(None), bool, int, float, str)
TREE, NATIVE = "tree", "native"


@dataclass(frozen=True)
class Unwritten:
    """A default that JSON cannot hold; its text is only for people and never compared."""

    text: str


@dataclass(frozen=True)
class Parameter:
    """One recorded parameter; `default` is `inspect.Parameter.empty` where the caller must pass it."""

    name: str
    kind: str = "positional_or_keyword"
    default: Any = inspect.Parameter.empty


@dataclass(frozen=True)
class Symbol:
    """One object of the library that the adapter touches."""

    key: str  # its name here; a method is `Owner.method`
    module: str
    name: str
    group: str  # TREE or NATIVE: which way of running the engine needs it
    kind: str  # class, function, method, static_method, members
    parameters: tuple[Parameter, ...] | None  # None: unknown
    is_complete: bool  # whether `parameters` are all there are
    used: tuple[str, ...]  # parameters that we pass, always by keyword; of `members`: those we read
    is_optional: bool  # whether the adapter does without it
    source: Mapping[str, Any]

    def signature(self) -> inspect.Signature:
        """The recorded signature without `self`; of an unknown one: what we may pass, by keyword."""
        if self.parameters is None:
            listed = [Parameter(name, "keyword_only", Unwritten("unknown")) for name in self.used]
        else:
            listed = list(self.parameters)
        return inspect.Signature(
            [inspect.Parameter(item.name, _KINDS[item.kind], default=item.default) for item in listed]
        )


@dataclass(frozen=True)
class Contract:
    """All that was recorded of one state of the library."""

    name: str
    version: str | None  # None: unknown
    about: str
    trees_are_read_from: str  # slot_storage or manager
    symbols: Mapping[str, Symbol]


@dataclass(frozen=True)
class Difference:
    """One way in which an installed object is not what was recorded."""

    symbol: str
    what: str
    breaks: bool  # whether a call of ours would fail or mean something else

    def __str__(self) -> str:
        return f"{self.symbol}: {self.what}"


@dataclass(frozen=True)
class Comparison:
    """A contract held against what is installed."""

    contract: Contract
    differences: tuple[Difference, ...] = ()
    unknown: tuple[str, ...] = field(default=())  # symbols that were or are unreadable: not compared

    @property
    def breaking(self) -> tuple[Difference, ...]:
        """The differences that matter."""
        return tuple(difference for difference in self.differences if difference.breaks)

    @property
    def broken_symbols(self) -> int:
        """How many symbols these differences are about."""
        return len({difference.symbol for difference in self.breaking})


def load_contracts() -> tuple[Contract, ...]:
    """All recorded contracts, the newest first."""
    files = resources.files(__package__).joinpath("contracts").iterdir()
    found = [json.loads(file.read_text()) for file in files if file.name.endswith(".json")]
    return tuple(read_contract(values) for values in sorted(found, key=lambda values: -values["order"]))


def read_contract(values: Mapping[str, Any]) -> Contract:
    """Build a contract from its JSON object."""
    symbols = {key: _read_symbol(key, entry) for key, entry in values["symbols"].items()}
    source = values["trees_are_read_from"]
    assert source in ("slot_storage", "manager"), f"{values['name']}: trees_are_read_from {source!r}"
    return Contract(values["name"], values["version"], values["about"], source, symbols)


def _read_symbol(key: str, entry: Mapping[str, Any]) -> Symbol:
    parameters = entry["parameters"]
    return Symbol(
        key=key,
        module=entry["module"],
        name=entry.get("name", key),
        group=entry["group"],
        kind=entry["kind"],
        parameters=None if parameters is None else tuple(_read_parameter(item) for item in parameters),
        is_complete=entry.get("is_complete", True),
        used=tuple(entry["used"]),
        is_optional=entry.get("is_optional", False),
        source=entry["source"],
    )


def _read_parameter(item: Mapping[str, Any]) -> Parameter:
    default = item.get("default", inspect.Parameter.empty)
    if "default_text" in item:
        default = Unwritten(item["default_text"])
    return Parameter(item["name"], item.get("kind", "positional_or_keyword"), default)


def resolve(symbol: Symbol, importer: Importer = importlib.import_module) -> Any:
    """Find the installed object.

    Raises:
        ImportError: its module cannot be imported, for whatever reason.
        AttributeError: its module does not have it.
    """
    found = importer(symbol.module)
    for part in symbol.name.split("."):
        found = getattr(found, part)
    return found


def compare(contract: Contract, group: str, importer: Importer = importlib.import_module) -> Comparison:
    """Hold a contract's symbols of one group against the installed objects."""
    differences: list[Difference] = []
    unknown = []
    for symbol in contract.symbols.values():
        if symbol.group != group:
            continue
        try:
            found = resolve(symbol, importer)
        except (ImportError, AttributeError) as error:
            if not symbol.is_optional:
                place = f"{symbol.module}.{symbol.name}"
                differences.append(Difference(symbol.key, f"no {place} is installed ({error})", True))
            continue
        if symbol.kind == "members":
            gone = [name for name in symbol.used if not hasattr(found, name)]
            differences += [Difference(symbol.key, f"has no member {name}", True) for name in gone]
            continue
        actual = _signature(symbol, found)
        if actual is None or symbol.parameters is None:
            unknown.append(symbol.key)
        if actual is not None:
            differences += _compare_signatures(symbol, actual)
    return Comparison(contract, tuple(differences), tuple(unknown))


def _signature(symbol: Symbol, found: Any) -> Mapping[str, inspect.Parameter] | None:
    """The installed parameters without `self`; None where the object does not tell (a C++ binding)."""
    try:
        parameters = dict(inspect.signature(found).parameters)
    except (TypeError, ValueError):
        return None
    if symbol.kind == "method":
        parameters.pop(next(iter(parameters), ""), None)
    return parameters


def _compare_signatures(symbol: Symbol, actual: Mapping[str, inspect.Parameter]) -> Iterable[Difference]:
    takes_any = any(parameter.kind == parameter.VAR_KEYWORD for parameter in actual.values())
    for name in symbol.used:
        installed = actual.get(name)
        if installed is None and not takes_any:
            yield Difference(symbol.key, f"does not take {name}, which we pass; {_takes(actual)}", True)
        elif installed is not None and installed.kind == installed.POSITIONAL_ONLY:
            yield Difference(symbol.key, f"takes {name} by position only, we pass it by keyword", True)
    recorded = {parameter.name: parameter for parameter in symbol.parameters or ()}
    for name, installed in actual.items():
        is_variable = installed.kind in (installed.VAR_KEYWORD, installed.VAR_POSITIONAL)
        if not is_variable and installed.default is installed.empty and name not in symbol.used:
            yield Difference(symbol.key, f"demands {name}, which we do not pass", True)
        elif name in recorded:
            yield from _compare_defaults(symbol.key, recorded[name], installed, is_passed=name in symbol.used)
        elif symbol.parameters is not None and symbol.is_complete and not is_variable:
            yield Difference(symbol.key, f"also takes {name}={installed.default!r}", False)
    for name in recorded.keys() - actual.keys() - set(symbol.used):
        if recorded[name].kind != "var_keyword":
            yield Difference(symbol.key, f"no longer takes {name}, which we leave out", False)


def _compare_defaults(
    key: str, recorded: Parameter, installed: inspect.Parameter, *, is_passed: bool
) -> Iterable[Difference]:
    """A default that we rely on must be the recorded one; one that we pass over is only told."""
    empty = inspect.Parameter.empty
    if recorded.default is empty or installed.default is empty:
        return
    is_plain = isinstance(recorded.default, _PLAIN) and isinstance(installed.default, _PLAIN)
    if is_plain and recorded.default != installed.default:
        what = f"{recorded.name} is {installed.default!r} when left out, recorded is {recorded.default!r}"
        yield Difference(key, what, not is_passed)


def _takes(actual: Mapping[str, inspect.Parameter]) -> str:
    return f"it takes {', '.join(actual) or 'nothing'}"
