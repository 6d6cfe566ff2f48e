"""Selects the keyword arguments of chunks: any input of a microbatch on the edge, metadata on the cloud."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ldt._C import METADATA_NAMES
from ldt.runtime.common.redact import InputTypeError, InputValueError

__all__ = [
    "Keywords",
    "check_accepted",
    "declares",
    "keywords_of",
    "metadata_accepted",
    "metadata_read_by_output_spec",
    "output_spec_of",
]

# What wrappers call the module that they pass all to. That of peft has a second one in it.
_INNER = ("_orig_mod", "module", "base_model.model", "base_model")


@dataclass(frozen=True)
class Keywords:
    """The arguments that a function takes by name."""

    names: frozenset[str]
    positional: tuple[str, ...]  # that can be passed by position, in order
    required: frozenset[str]  # keyword-only, without default
    any_name: bool  # it has **kwargs

    @property
    def metadata(self) -> list[str]:
        """The arguments whose names are names of metadata."""
        return [name for name in METADATA_NAMES if name in self.names]

    def pick(self, offered: Mapping[str, Any], num_positional: int = 0) -> dict[str, Any]:
        """Return those of ``offered`` that the function accepts after ``num_positional`` positional arguments."""
        taken = set(self.positional[:num_positional])
        return {
            name: value
            for name, value in offered.items()
            if name not in taken and (self.any_name or name in self.names)
        }


def keywords_of(function: Callable[..., Any]) -> Keywords:
    """Return the keywords of a function or of a module's forward: that of the module which wrappers pass all to.

    Raises TypeError for a function without a signature.
    """
    kind = type(function).__qualname__
    if isinstance(function, nn.Module):
        function = _wrapped(function).forward
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # not a Python function
        raise InputTypeError(
            f"cannot tell which arguments {kind} takes, as torch.jit.trace does not keep their names: call it from "
            "the forward of a module, such as nn.Sequential(traced)"
        ) from None
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    positional = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
    required = frozenset(p.name for p in named if p.kind is p.KEYWORD_ONLY and p.default is p.empty)
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return Keywords(frozenset(p.name for p in named), positional, required, any_name)


def output_spec_of(module: nn.Module) -> Callable[..., Any] | None:
    """Return the ``output_spec`` of a module, also of one in wrappers that pass all to it; None if it has none."""
    found: Callable[..., Any] | None = getattr(_wrapped(module), "output_spec", None)
    return found


def _wrapped(module: nn.Module) -> nn.Module:
    """The module in wrappers whose forward takes anything: compiled, averaged, of peft, or a user's own."""
    for name in _INNER:
        inner = _attribute(module, name)
        if isinstance(inner, nn.Module) and (name == "_orig_mod" or _takes_anything(module.forward)):
            return _wrapped(inner)
    return module


def _attribute(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part, None)
    return module


def _takes_anything(forward: Callable[..., Any]) -> bool:
    try:
        kinds = {parameter.kind for parameter in inspect.signature(forward).parameters.values()}
    except ValueError:
        return False
    return kinds == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def metadata_accepted(modules: Mapping[int, nn.Module]) -> list[str]:
    """Return the metadata that cloud chunks accept.

    Raises ValueError for a chunk with a required keyword argument that is no metadata.
    """
    taken: set[str] = set()
    for index, module in modules.items():
        keywords = keywords_of(module)
        for name in sorted(keywords.required - set(METADATA_NAMES)):
            raise InputValueError(
                f"chunk {index} ({type(module).__name__}) requires the keyword argument {name!r}, which is available "
                f"on the edge only: the metadata that cross to the cloud are {', '.join(METADATA_NAMES)}; give it a "
                "default, or send it as a tensor of the hop"
            )
        taken |= set(METADATA_NAMES if keywords.any_name else keywords.metadata)
    return sorted(taken)


def declares(module: nn.Module) -> bool:
    """Whether ``module`` declares its outputs with an ``output_spec``."""
    return output_spec_of(module) is not None


def metadata_read_by_output_spec(modules: Mapping[int, nn.Module]) -> dict[str, list[str]]:
    """Return by chunk the metadata that its ``output_spec`` takes, on whose values the output specs may depend."""
    declared = {index: output_spec_of(module) for index, module in modules.items()}
    return {str(index): keywords_of(spec).metadata for index, spec in declared.items() if spec is not None}


def check_accepted(
    kwargs: Iterable[str], microbatch: int, on_edge: Iterable[Keywords], on_cloud: Iterable[str]
) -> None:
    """Raise ValueError for an input of a microbatch that no chunk takes: it would be dropped silently."""
    on_edge = list(on_edge)
    if any(keywords.any_name for keywords in on_edge):
        return
    names = frozenset(on_cloud).union(*(keywords.names for keywords in on_edge))
    for name in kwargs:
        if name not in names:
            raise InputValueError(
                f"microbatch {microbatch} has an input {name!r} that no chunk takes: chunks on the edge take "
                f"{', '.join(sorted(names)) or 'no keywords'}, chunks on the cloud {', '.join(on_cloud) or 'none'}"
            )
