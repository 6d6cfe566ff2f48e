"""What chunks are given by name: on the edge any input of a microbatch, on the cloud what metadata rebuild."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ldt._C import METADATA_NAMES
from ldt.runtime.common.redact import InputTypeError, InputValueError

__all__ = ["Keywords", "check_taken", "declares", "keywords_of", "metadata_taken", "read_by_shapes"]


@dataclass(frozen=True)
class Keywords:
    """The arguments that a function takes by name."""

    names: frozenset[str]
    by_place: tuple[str, ...]  # those that it takes by place, in order
    required: frozenset[str]  # those that it takes by name alone, and has no default for
    any_name: bool

    @property
    def metadata(self) -> list[str]:
        """Those that metadata can tell, by their names."""
        return [name for name in METADATA_NAMES if name in self.names]

    def pick(self, offered: Mapping[str, Any], given: int = 0) -> dict[str, Any]:
        """Those of ``offered`` that the function takes when its first ``given`` arguments are given by place."""
        taken = set(self.by_place[:given])
        return {
            name: value
            for name, value in offered.items()
            if name not in taken and (self.any_name or name in self.names)
        }


def keywords_of(function: Callable[..., Any]) -> Keywords:
    """The keywords of a function, or of a module's forward, also of a compiled module's.

    Raises TypeError for what has no signature.
    """
    kind = type(function).__qualname__
    if isinstance(function, nn.Module):
        function = getattr(function, "_orig_mod", function).forward
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # of functions that are not Python's
        raise InputTypeError(
            f"cannot tell which arguments {kind} takes, as torch.jit.trace has left no names of them: call it from "
            "the forward of a module, such as nn.Sequential(traced)"
        ) from None
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    by_place = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
    required = frozenset(p.name for p in named if p.kind is p.KEYWORD_ONLY and p.default is p.empty)
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return Keywords(frozenset(p.name for p in named), by_place, required, any_name)


def metadata_taken(modules: Mapping[int, nn.Module]) -> list[str]:
    """The metadata that cloud chunks take. Raises ValueError for one that must be given what only the edge has."""
    taken: set[str] = set()
    for index, module in modules.items():
        keywords = keywords_of(module)
        for name in sorted(keywords.required - set(METADATA_NAMES)):
            raise InputValueError(
                f"chunk {index} ({type(module).__name__}) must be given {name!r} by name, which only chunks on the "
                f"edge can be: what crosses to the cloud is {', '.join(METADATA_NAMES)}; give it a default, or send "
                "what it stands for as a tensor of the hop"
            )
        taken |= set(METADATA_NAMES if keywords.any_name else keywords.metadata)
    return sorted(taken)


def declares(module: nn.Module) -> bool:
    """Whether it says itself what it returns, by an ``output_spec``."""
    return getattr(module, "output_spec", None) is not None


def read_by_shapes(modules: Mapping[int, nn.Module]) -> dict[str, list[str]]:
    """By chunk the metadata whose values its ``output_spec`` names, so that its answer may depend on them."""
    declared = {index: getattr(module, "output_spec", None) for index, module in modules.items()}
    return {
        str(index): keywords_of(method).metadata for index, method in declared.items() if method is not None
    }


def check_taken(
    kwargs: Iterable[str], microbatch: int, on_edge: Iterable[Keywords], on_cloud: Iterable[str]
) -> None:
    """Raise ValueError naming an input of a microbatch that no chunk takes: it would be forgotten in silence."""
    on_edge = list(on_edge)
    if any(keywords.any_name for keywords in on_edge):
        return
    names = frozenset(on_cloud).union(*(keywords.names for keywords in on_edge))
    for name in kwargs:
        if name not in names:
            raise InputValueError(
                f"microbatch {microbatch} has an input {name!r} that no chunk takes: those on the edge take "
                f"{', '.join(sorted(names)) or 'none by name'}, those on the cloud {', '.join(on_cloud) or 'none'}"
            )
