"""Stands in for the package tensorrt_llm: modules made of a contract, over the small engine.

Every symbol of the contract gets exactly its recorded signature, so a call with an unknown keyword or without
a required one fails as it would on the real object. What was passed is kept for tests.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ddtree.trtllm.contract import Contract, Symbol
from tests.fakes import trtllm_engine as engine
from tests.fakes.trtllm_native import NATIVE

VERSION = "0.0.0+stub"


class FakeLibrary:
    """An importer over stub modules, to be handed in where `importlib.import_module` is the default."""

    def __init__(
        self, contract: Contract, *, turns_by_position_ids: bool = False, has_tree_attention: bool = True
    ) -> None:
        self.calls: dict[str, set[str]] = {}  # keywords and number of positional arguments seen, by symbol
        self.modules: dict[str, ModuleType] = {"tensorrt_llm": ModuleType("tensorrt_llm")}
        self.modules["tensorrt_llm"].__version__ = VERSION  # type: ignore[attr-defined]
        self._contract = contract
        self._classes: dict[str, Any] = {}
        self._parts = _engine_parts(contract, turns_by_position_ids, has_tree_attention)
        for symbol in contract.symbols.values():
            if symbol.kind != "method" and symbol.kind != "static_method":
                self._place(symbol, self._make(symbol))
        for symbol in contract.symbols.values():
            if symbol.kind in ("method", "static_method"):
                self._add_method(symbol)
        self._join()

    def __call__(self, module: str) -> Any:
        if module not in self.modules:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
        return self.modules[module]

    def replace(self, key: str, call: Callable[..., Any]) -> None:
        """Put another function in the place of a symbol: the installed version is not the recorded one."""
        symbol = self._contract.symbols[key]
        *owners, name = symbol.name.split(".")
        found: Any = self.modules[symbol.module]
        for owner in owners:
            found = getattr(found, owner)
        setattr(found, name, call)

    def remove(self, key: str) -> None:
        """The installed version does not have a symbol."""
        symbol = self._contract.symbols[key]
        delattr(self.modules[symbol.module], symbol.name)

    def _make(self, symbol: Symbol) -> Any:
        part = self._parts[symbol.name.split(".")[-1] if symbol.kind == "function" else symbol.name]
        if symbol.kind == "members":
            return part
        if symbol.kind == "function":
            return self._checked(symbol, part)
        made = type(symbol.name, (part,), {"__init__": self._checked_method(symbol, part.__init__)})
        self._classes[symbol.name] = made
        return made

    def _place(self, symbol: Symbol, made: Any) -> None:
        module = self.modules.setdefault(symbol.module, ModuleType(symbol.module))
        setattr(module, symbol.name, made)

    def _add_method(self, symbol: Symbol) -> None:
        owner, name = symbol.name.split(".")
        made = self._classes.get(owner)
        if made is None:
            made = self._classes[owner] = type(owner, (self._parts[owner],), {})
        if not hasattr(self.modules.get(symbol.module), owner):
            module = self.modules.setdefault(symbol.module, ModuleType(symbol.module))
            setattr(module, owner, made)
        part = inspect.getattr_static(self._parts[owner], name, None)
        if part is None:
            return  # optional
        if symbol.kind == "static_method":
            setattr(made, name, staticmethod(self._checked(symbol, part.__func__)))
        else:
            setattr(made, name, self._checked_method(symbol, part))

    def _join(self) -> None:
        """The model that `from_config` gives is of the checked class; so is the backend's metadata."""
        model = self._classes["SpecDecOneEngineForCausalLM"]
        self._parts["AutoModelForCausalLM"].made = model
        self._parts["get_attention_backend"].backend.Metadata = self._classes["TrtllmAttentionMetadata"]

    def _checked(self, symbol: Symbol, part: Callable[..., Any]) -> Callable[..., Any]:
        signature = symbol.signature()

        def call(*args: Any, **kwargs: Any) -> Any:
            self._note(symbol, signature, args, kwargs)
            return part(*args, **kwargs)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    def _checked_method(self, symbol: Symbol, part: Callable[..., Any]) -> Callable[..., Any]:
        signature = symbol.signature()

        def call(self_: Any, *args: Any, **kwargs: Any) -> Any:
            self._note(symbol, signature, args, kwargs)
            return part(self_, *args, **kwargs)

        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        call.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[first, *signature.parameters.values()]
        )
        return call

    def _note(
        self, symbol: Symbol, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{symbol.key}{signature}: {error}") from None
        seen = self.calls.setdefault(symbol.key, set())
        seen |= set(kwargs)
        assert not args, f"{symbol.key} was passed {len(args)} arguments by position"


def _engine_parts(contract: Contract, by_ids: bool, has_tree_attention: bool) -> dict[str, Any]:
    """The small engine's classes for one recorded state, by recorded name."""
    reads_slots = contract.trees_are_read_from == "slot_storage"
    metadata = type(
        "Metadata",
        (engine.TrtllmAttentionMetadata,),
        {"reads_slots": reads_slots, "has_tree_attention": has_tree_attention},
    )
    model = type("Model", (engine.FakeModel,), {"turns_by_position_ids": by_ids})
    manager = type(
        "Manager",
        (engine.KVCacheManager,),
        {"update_kv_cache_draft_token_location": engine.relocate},
    )
    if not reads_slots:
        manager_of_trees = type("Trees", (engine.SpecTreeManager,), {"__getattr__": _no_slots})
    else:
        manager_of_trees = engine.SpecTreeManager
    backend = type("Attention", (), {"Metadata": metadata})

    def get_attention_backend(backend_name: str) -> Any:
        assert backend_name == "TRTLLM"
        return backend

    get_attention_backend.backend = backend  # type: ignore[attr-defined]

    class AutoModelForCausalLM:
        made: Any = None

        @staticmethod
        def from_config(config: Any) -> Any:
            assert config.attn_backend == "TRTLLM"
            return AutoModelForCausalLM.made(config.pretrained_config)

    return {
        "ModelConfig": engine.Plain,
        "AutoModelForCausalLM": AutoModelForCausalLM,
        "DecoderModelForCausalLM": model,
        "SpecDecOneEngineForCausalLM": model,
        "KvCacheConfig": engine.Plain,
        "CacheType": engine.CacheType,
        "DataType": engine.DataType,
        "Mapping": engine.Plain,
        "KVCacheParams": engine.Plain,
        "AttentionRuntimeFeatures": engine.Plain,
        "get_attention_backend": get_attention_backend,
        "TrtllmAttentionMetadata": metadata,
        "SpecTreeManager": manager_of_trees,
        "LlmRequestState": engine.LlmRequestState,
        "ScheduledRequests": engine.ScheduledRequests,
        "SpeculativeDecodingMode": engine.SpeculativeDecodingMode,
        "DFlashSpecMetadata": engine.DFlashSpecMetadata,
        "KVCacheManager": manager,
        "_update_kv_cache_draft_token_location": engine.relocate,
        **NATIVE,
    }


def _no_slots(_: Any, name: str) -> Any:
    raise AttributeError(name)


def nothing_installed(module: str) -> Any:
    """An importer where the package is not."""
    if module.startswith("tensorrt_llm"):
        raise ModuleNotFoundError("No module named 'tensorrt_llm'", name="tensorrt_llm")
    return importlib.import_module(module)
