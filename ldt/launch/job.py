"""What a rank's script asks of the description that its job was started from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, get_type_hints

from ldt.errors import LdtError
from ldt.launch.description import ConnectOptions, Description, read
from ldt.topology import Topology

if TYPE_CHECKING:
    import torch

    from ldt.runtime import Mesh

__all__ = ["Job"]


class Job:
    """The job that this process is a rank of, as ``job.toml`` describes it."""

    def __init__(self, description: Description) -> None:
        self.description = description

    @classmethod
    def from_env(cls) -> Job:
        """Read the file that ``LDT_JOB`` names; ``python -m ldt launch`` sets it. Raises LdtError for a wrong file."""
        path = os.environ.get("LDT_JOB")
        if not path:
            raise LdtError("LDT_JOB is not set: start this script by python -m ldt launch, or use Job.read")
        return cls.read(path)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Job:
        """Read a file. Raises LdtError that names the file, the table and the key if something in it is wrong."""
        return cls(read(path))

    @property
    def topology(self) -> Topology:
        """The topology, with the names of the sites."""
        return self.description.topology

    @property
    def site(self) -> str:
        """The name of this rank's site."""
        return self.description.site_of(_number("RANK"))

    @property
    def device(self) -> torch.device:
        """This rank's device: the CPU, or the accelerator of its site whose index is ``LOCAL_RANK``."""
        import torch

        kind = self.description.sites[self.site].device
        return torch.device("cpu") if kind == "cpu" else torch.device(kind, _number("LOCAL_RANK"))

    def connect(self, **options: Any) -> Mesh:
        """Call ``ldt.connect`` with the topology and the options of the file; ``options`` replace some of them."""
        from ldt.runtime import connect

        return connect(self.topology, **{**_arguments(self.description), **options})


def _number(variable: str) -> int:
    try:
        return int(os.environ[variable])
    except (KeyError, ValueError):
        raise LdtError(
            f"{variable} must be a number, got {os.environ.get(variable)!r}: a launcher sets it"
        ) from None


def _arguments(description: Description) -> dict[str, Any]:
    """The options of the file as ``connect`` takes them."""
    kinds = get_type_hints(ConnectOptions)
    made: dict[str, Any] = {}
    for name, value in description.connect.items():
        if kinds[name] is float:
            made[name] = timedelta(seconds=value)
        elif isinstance(value, Mapping):
            made[name] = {_link(link): _choice(description, name, choice) for link, choice in value.items()}
        else:
            made[name] = value
    return made


def _link(text: str) -> tuple[int, int]:
    lower, _, upper = text.partition("-")
    return int(lower), int(upper)


def _choice(description: Description, name: str, choice: Any) -> Any:
    """A table is a ``Compression``, as no other option of a link has one."""
    from ldt.runtime.comm.compression import Compression

    if not isinstance(choice, Mapping):
        return choice
    try:
        return Compression(**choice)
    except ValueError as error:
        raise LdtError(f"{description.path}: [connect] {name}: {error}") from error
