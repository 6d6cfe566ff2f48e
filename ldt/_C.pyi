"""What the compiled module offers. Checked against the module by tests/build."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import DistBackendError, ProcessGroup, Work

class LaneError(DistBackendError):
    """A lane or a work of it failed; the text says which, with both sides' figures."""

class Lane:
    """Carries messages between two nodes, first in first out (design, section 5).

    ``p2p`` connects leaders and is None on a rank that only hears the broadcast; ``stage`` is the
    receiving stage's broadcast group, None for a stage of one rank and on senders; ``stage_root`` is the
    receiving leader's group rank in it. The groups must be the lane's own. ``device`` is the CPU or a
    device with streams, with its index. ``chunk_bytes``: the broadcast of one piece of that size runs while the next
    is received; the same on all ranks. ``timeout``: how long one message may take once it is its turn; a number
    counts seconds, infinity is allowed, and 100 years is the most that is waited.
    ``announce``: compare size, dtype and shape with the other side before each payload (default: on the CPU only).

    ``announce`` and ``chunk_bytes`` must be equal on both ends and on all ranks of the stage. With announcements,
    different ``chunk_bytes``, sizes, dtypes or shapes are an error on every rank concerned, and the lane goes on.
    Without, they are undefined: the caller has agreed on them ahead. If one end announces and the other does not,
    each waits for what the other never sends, until the timeout fails the lane; on the CPU, the error of the end
    that announces then says so.

    ``carrier``: what moves the payload on a device with streams, None for the groups; the same kind on both ends.
    """

    def __init__(
        self,
        name: str,
        *,
        p2p: ProcessGroup | None,
        stage: ProcessGroup | None,
        stage_root: int = 0,
        device: torch.device = ...,
        chunk_bytes: int | None = None,
        timeout: timedelta | float = ...,
        announce: bool | None = None,
        carrier: NcclCommunicators | PeerRoutes | None = None,
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def chunk_bytes(self) -> int: ...
    def send(self, tensors: Sequence[torch.Tensor], peer: int, label: str = "") -> Work:
        """Starts sending to leader ``peer``, a group rank of ``p2p``. Raises LaneError: bad tensors, failed lane."""

    def recv(self, tensors: Sequence[torch.Tensor], peer: int | None = None, label: str = "") -> Work:
        """Starts receiving into ``tensors`` and broadcasting them in the stage: one work. Members ignore ``peer``."""

    def empty(self, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A fresh tensor over the lane's receive pool; the memory goes back when the last reference dies."""

    def buffers(self, sizes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
        """``empty`` for all tensors of a message. Small ones share memory in which they arrive together."""

    def close(self, timeout: timedelta | float = ...) -> None:
        """Waits for what is in flight, at most ``timeout`` (10 s), aborts the rest, stops the threads. Idempotent."""

    def abort(self, reason: str) -> None:
        """Everything pending and everything later fails with ``reason``. Returns at once."""

    def overdue(self) -> str:
        """What has been under way for longer than the timeout, in words; empty where the backend looks after that."""

    def stats(self) -> dict[str, float]:
        """Counts of sent_bytes, sent_messages, received_bytes, received_messages, broadcast_bytes, bounced, and so on.

        ``bounced``: tensors that the copy engine brought in two steps, as the sender's host came first. The others
        are wait_seconds and pool_bytes.
        """

class NcclCommunicators:
    """The payload goes by NCCL's own calls. Addresses of the communicators of the lane's groups, None without one."""

    def __init__(self, *, p2p: int | None, stage: int | None) -> None: ...

def has_nccl() -> bool:
    """Whether torch has loaded a libnccl.so.2 that lanes can call."""

class PeerMemory:
    """Memory of this process that others on the host write to, for one lane. Raises LaneError: not on this device."""

    def __init__(self, device: torch.device) -> None: ...

class PeerReceiver:
    """The receiving end of a route into ``memory``."""

    def __init__(self, memory: PeerMemory) -> None: ...
    def offer(self) -> str:
        """What the PeerSender of the other process needs, in one line."""

class PeerSender:
    """The sending end of a route. Raises LaneError if ``offer`` cannot be used: other host, no access.

    Of what lies in ``memory``, the other end may read by itself.
    """

    def __init__(self, device: torch.device, offer: str, memory: PeerMemory | None = None) -> None: ...

class PeerStream:
    """A stream for a lane, whose waits hold up nothing that this rank computes. Raises LaneError if there is none."""

    def __init__(self, device: torch.device) -> None: ...

class PeerRoutes:
    """The payload goes by the copy engine: a lane's ends of routes on this rank, ``senders`` and ``receivers`` by peer.

    In a stage, what was received goes on along a chain of its ranks: ``from_stage`` is the end before, ``to_stage`` the
    one behind.
    """

    def __init__(
        self,
        *,
        stream: PeerStream,
        memory: PeerMemory | None,
        senders: Mapping[int, PeerSender],
        receivers: Mapping[int, PeerReceiver],
        from_stage: PeerReceiver | None,
        to_stage: PeerSender | None,
    ) -> None: ...

def is_memory_own(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Whether torch has allocated the memory of each, and no other tensor or storage object refers to it.

    False where this cannot be told: of tensors without strides, and of those that wrap others.
    """

class VersionCounters:
    """How often each of ``tensors`` has been written to by now, as torch counts it. Holds no memory of theirs.

    Passed over are None and tensors of inference mode, which have no counter. Writes by ``.data``, or in kernels that
    torch does not know, are not counted.
    """

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None: ...
    def first_changed(self) -> int | None:
        """The place of the first tensor that has been written to since."""

def abort_all(reason: str) -> None:
    """Aborts and stops every lane of this process; runs at exit."""

MAX_METADATA_ELEMENTS: int
METADATA_NAMES: tuple[str, ...]

def pack_step(
    *,
    training: bool,
    plan: str,
    setting: str,
    autocast: str | None,
    microbatches: Sequence[object],
    max_elements: int,
) -> torch.Tensor:
    """The message of one step as bytes. Raises ldt.errors.MetadataError. See ldt.runtime.step.metadata.pack.

    Of each microbatch the attributes id, hops (sequences of TensorSpec) and tensors (by name) are read.
    """

def pack_called_off(*, error_type: str, error_text: str) -> torch.Tensor:
    """The message that a step is called off."""

def unpack_message(
    data: torch.Tensor,
    *,
    device: torch.device,
    max_elements: int,
    spec_type: Callable[..., object],
    microbatch_type: type,
) -> tuple[Any, ...]:
    """Reads either message; raises ldt.errors.MetadataError. See ldt.runtime.step.metadata.unpack.

    Of a step: (mode, plan, setting, autocast, microbatches). Of one that is called off: (None,
    error_type, error_text). ``spec_type`` is called with shape, dtype, requires_grad and order; ``microbatch_type`` is
    a class with the attributes id, hops and tensors, whose ``__init__`` is not called.
    """

def has_metadata_kernels(device: torch.device) -> bool:
    """Whether this build scans and rebuilds masks with kernels on ``device``."""
