"""Layerwise disaggregated training on PyTorch.

Names are loaded on first use, so topologies and plans work without torch and without the compiled module. The first
use of a name that needs torch checks that ldt was built for the installed torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ldt._cuda import prepare
from ldt._logging import configure
from ldt._torch_abi import guard_core, require_torch

if TYPE_CHECKING:
    from ldt import plan as plan
    from ldt._C import LaneError as LaneError
    from ldt.errors import CheckpointError as CheckpointError
    from ldt.errors import LdtError as LdtError
    from ldt.errors import MetadataError as MetadataError
    from ldt.errors import NonFiniteError as NonFiniteError
    from ldt.errors import PlanError as PlanError
    from ldt.errors import RemoteStageError as RemoteStageError
    from ldt.errors import TopologyError as TopologyError
    from ldt.errors import TransferError as TransferError
    from ldt.launch import Job as Job
    from ldt.runtime import Mesh as Mesh
    from ldt.runtime import Observer as Observer
    from ldt.runtime import Pipeline as Pipeline
    from ldt.runtime import Profile as Profile
    from ldt.runtime import StepResult as StepResult
    from ldt.runtime import add_loss as add_loss
    from ldt.runtime import connect as connect
    from ldt.runtime import keep as keep
    from ldt.runtime import scalars as scalars
    from ldt.runtime.comm.compression import Compression as Compression
    from ldt.topology import Node as Node
    from ldt.topology import Topology as Topology
    from ldt.train import GradScaler as GradScaler
    from ldt.train import Leader as Leader
    from ldt.train import LiveView as LiveView
    from ldt.train import LoadedCheckpoint as LoadedCheckpoint
    from ldt.train import clip_grad_norm_ as clip_grad_norm_
    from ldt.train import follow as follow
    from ldt.train import load_checkpoint as load_checkpoint
    from ldt.train import merge_checkpoint as merge_checkpoint
    from ldt.train import save_checkpoint as save_checkpoint

    __version__: str

_PURE = {
    "CheckpointError": "ldt.errors",
    "Job": "ldt.launch",
    "LdtError": "ldt.errors",
    "MetadataError": "ldt.errors",
    "NonFiniteError": "ldt.errors",
    "PlanError": "ldt.errors",
    "RemoteStageError": "ldt.errors",
    "TopologyError": "ldt.errors",
    "TransferError": "ldt.errors",
    "Node": "ldt.topology",
    "Topology": "ldt.topology",
}
_NEEDS_TORCH = {
    "Compression": "ldt.runtime.comm.compression",
    "GradScaler": "ldt.train",
    "LaneError": "ldt._C",
    "Leader": "ldt.train",
    "LiveView": "ldt.train",
    "LoadedCheckpoint": "ldt.train",
    "Mesh": "ldt.runtime",
    "Observer": "ldt.runtime",
    "Pipeline": "ldt.runtime",
    "Profile": "ldt.runtime",
    "StepResult": "ldt.runtime",
    "add_loss": "ldt.runtime",
    "connect": "ldt.runtime",
    "clip_grad_norm_": "ldt.train",
    "follow": "ldt.train",
    "keep": "ldt.runtime",
    "load_checkpoint": "ldt.train",
    "merge_checkpoint": "ldt.train",
    "save_checkpoint": "ldt.train",
    "scalars": "ldt.runtime",
}

__all__ = ["__version__", "plan", *_PURE, *_NEEDS_TORCH]  # noqa: PLE0604 (all are strings)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name == "plan":
        value = importlib.import_module("ldt.plan")
    elif name == "runtime":
        require_torch()
        value = importlib.import_module("ldt.runtime")
    elif name in _PURE:
        value = getattr(importlib.import_module(_PURE[name]), name)
    elif name in _NEEDS_TORCH:
        require_torch()
        value = getattr(importlib.import_module(_NEEDS_TORCH[name]), name)
    else:
        raise AttributeError(f"module 'ldt' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))


def _version() -> str:
    """The installed version, from the metadata of the distribution."""
    metadata = importlib.import_module("importlib.metadata")
    try:
        version: str = metadata.version("ldt-torch")
    except metadata.PackageNotFoundError:
        return "0+not.installed"
    return version


guard_core()
configure()
prepare()
