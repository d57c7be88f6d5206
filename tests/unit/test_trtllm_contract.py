"""Contracts, and what is said of an installed version that is not the recorded one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from ddtree.trtllm.contract import NATIVE, TREE, Contract, compare, load_contracts
from ddtree.trtllm.library import EngineUnfit, installed_version, open_library
from tests.fakes.trtllm_library import VERSION, FakeLibrary, nothing_installed

CONTRACTS = {contract.name: contract for contract in load_contracts()}
NEWEST = load_contracts()[0]


@pytest.fixture(params=[*CONTRACTS.values()], ids=[*CONTRACTS])
def contract(request: pytest.FixtureRequest) -> Contract:
    found: Contract = request.param
    return found


def test_there_are_several_and_they_differ() -> None:
    assert len(CONTRACTS) >= 2
    places = {contract.symbols["TrtllmAttentionMetadata"].module for contract in CONTRACTS.values()}
    kinds = {contract.symbols["relocate"].kind for contract in CONTRACTS.values()}
    assert len(places) == len(kinds) == 2
    assert {contract.trees_are_read_from for contract in CONTRACTS.values()} == {"slot_storage", "manager"}


def test_every_symbol_says_where_it_was_read(contract: Contract) -> None:
    for symbol in contract.symbols.values():
        commit, path = symbol.source["commit"], symbol.source["path"]
        assert path, symbol.key
        if symbol.group == TREE:
            assert len(commit) == 40, f"{symbol.key}: private API is recorded at a commit"
        else:
            assert commit or path.startswith("nvidia.github.io"), symbol.key


def test_what_we_pass_is_part_of_what_was_recorded(contract: Contract) -> None:
    for symbol in contract.symbols.values():
        if symbol.kind != "members":
            symbol.signature().bind(**dict.fromkeys(symbol.used))


@pytest.mark.parametrize("group", [TREE, NATIVE])
def test_a_library_made_of_a_contract_fits_it(contract: Contract, group: str) -> None:
    comparison = compare(contract, group, FakeLibrary(contract))
    assert comparison.differences == ()
    unread = {key for key, symbol in contract.symbols.items() if symbol.parameters is None}
    assert set(comparison.unknown) <= unread


def test_the_fitting_contract_is_chosen_among_all(contract: Contract) -> None:
    library = open_library(TREE, FakeLibrary(contract))
    assert (library.contract, library.version) == (contract, VERSION)


def without(key: str, name: str) -> Callable[[FakeLibrary], None]:
    """Another version whose function no longer has one parameter."""

    def change(library: FakeLibrary) -> None:
        symbol = NEWEST.symbols[key]
        signature = symbol.signature()
        kept = [item for item in signature.parameters.values() if item.name != name]
        library.replace(key, _with(signature.replace(parameters=[_SELF, *kept])))

    return change


def demanding(key: str, name: str) -> Callable[[FakeLibrary], None]:
    def change(library: FakeLibrary) -> None:
        parameters = [*NEWEST.symbols[key].signature().parameters.values()]
        new = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
        library.replace(key, _with(inspect.Signature([_SELF, *parameters, new])))

    return change


def defaulting(key: str, name: str, value: Any) -> Callable[[FakeLibrary], None]:
    def change(library: FakeLibrary) -> None:
        parameters = NEWEST.symbols[key].signature().parameters
        changed = [item.replace(default=value) if item.name == name else item for item in parameters.values()]
        library.replace(key, _with(inspect.Signature([_SELF, *changed])))

    return change


_SELF = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)


def _with(signature: inspect.Signature) -> Callable[..., None]:
    def call(*_: Any, **__: Any) -> None:
        raise AssertionError("only its signature is looked at")

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


UPDATE = "TrtllmAttentionMetadata.update_spec_dec_param"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without(UPDATE, "spec_tree_manager"), f"{UPDATE}: does not take spec_tree_manager, which we pass"),
        (demanding(UPDATE, "mask_layout"), f"{UPDATE}: demands mask_layout, which we do not pass"),
        (defaulting(UPDATE, "num_contexts", 1), "num_contexts is 1 when left out, recorded is 0"),
        (
            defaulting("KVCacheManager.add_dummy_requests", "prepare_resource", False),
            "prepare_resource is False when left out, recorded is True",
        ),
        (lambda library: library.remove("SpecTreeManager"), "SpecTreeManager: no tensorrt_llm._torch"),
        (lambda library: library.modules.pop(NEWEST.symbols["relocate"].module), "relocate: no tensorrt_llm"),
        (lambda library: library.remove("LlmRequestState"), "LlmRequestState: no tensorrt_llm"),
    ],
)
def test_a_difference_that_matters_is_named(change: Callable[[FakeLibrary], None], says: str) -> None:
    library = FakeLibrary(NEWEST)
    change(library)
    breaking = [str(difference) for difference in compare(NEWEST, TREE, library).breaking]
    assert len(breaking) == 1
    assert says in breaking[0]
    with pytest.raises(EngineUnfit, match="fits no recorded contract; the nearest is") as error:
        open_library(TREE, library)
    assert says in str(error.value)


def test_a_new_optional_parameter_is_told_and_harmless() -> None:
    library = FakeLibrary(NEWEST)
    parameters = [*NEWEST.symbols[UPDATE].signature().parameters.values()]
    new = inspect.Parameter("mask_layout", inspect.Parameter.KEYWORD_ONLY, default=None)
    library.replace(UPDATE, _with(inspect.Signature([_SELF, *parameters, new])))
    comparison = compare(NEWEST, TREE, library)
    assert [str(item) for item in comparison.differences] == [f"{UPDATE}: also takes mask_layout=None"]
    assert open_library(TREE, library).contract == NEWEST


def test_an_object_without_a_signature_counts_as_unknown() -> None:
    library = FakeLibrary(NEWEST)
    library.replace("Mapping", map)  # as a class of a C++ binding, it does not tell
    comparison = compare(NEWEST, TREE, library)
    assert "Mapping" in comparison.unknown
    assert comparison.breaking == ()


def test_nothing_installed_is_said_plainly() -> None:
    with pytest.raises(EngineUnfit, match="the package tensorrt_llm is not installed here"):
        open_library(TREE, nothing_installed)
    with pytest.raises(EngineUnfit, match="is not installed here"):
        installed_version()


def test_an_import_that_breaks_is_not_called_missing() -> None:
    def broken(module: str) -> Any:
        raise ImportError(f"libcuda.so.1: cannot open shared object file ({module})")

    with pytest.raises(EngineUnfit, match=r"cannot be imported \(libcuda"):
        installed_version(broken)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"use_cache": True}, "num_cached_tokens_per_seq"),
        ({"use_cache": True, "num_cached_tokens_per_seq": [], "num_extra_tokens": 0}, "num_extra_tokens"),
    ],
)
def test_the_stub_refuses_what_the_contract_does_not_know(arguments: dict[str, Any], says: str) -> None:
    params = open_library(TREE, FakeLibrary(NEWEST))["KVCacheParams"]
    with pytest.raises(TypeError, match=says):
        params(**arguments)
