"""The compiled module. tests/build checks this stub against it."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import DistBackendError, ProcessGroup, Work

class LaneError(DistBackendError):
    """A lane or one of its works failed. The text names it."""

class Lane:
    """Carries messages between two nodes first in, first out (design, section 5).

    Args:
        name: Begins every error text.
        p2p: Process group of the leaders; None on a member, which only joins the broadcast.
        stage: Broadcast group of the receiving stage; None for a stage of one rank and on senders. Both groups must be
            the lane's own.
        stage_root: Group rank of the receiving leader in ``stage``.
        device: The CPU, or a device with streams and an index.
        chunk_bytes: Size of a piece: its broadcast overlaps the next receive. Equal on both ends and all ranks.
        timeout: How long one message may take once it is its turn; a number counts seconds. Infinity is allowed and
            means 100 years.
        transport: Moves the payload on a device with streams; None: the groups do. The same kind on both ends.

    All ranks of a lane must agree on ``chunk_bytes`` and on the sizes, dtypes and shapes of each message; otherwise the
    result is undefined.
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
        transport: NcclCommunicators | CopyEngineLinks | SocketLinks | None = None,
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def chunk_bytes(self) -> int: ...
    def send(self, tensors: Sequence[torch.Tensor], peer: int, label: str = "") -> Work:
        """Start sending to leader ``peer``, a group rank of ``p2p``. Raises LaneError: bad tensors, failed lane."""

    def recv(self, tensors: Sequence[torch.Tensor], peer: int | None = None, label: str = "") -> Work:
        """Start receiving into ``tensors`` and broadcasting them in the stage: one work. Members ignore ``peer``."""

    def empty(self, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a new tensor from the receive pool. Its memory returns to the pool with the last reference."""

    def buffers(self, sizes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
        """Call ``empty`` for all tensors of a message. Small ones share a block, in which they arrive together."""

    def close(self, timeout: timedelta | float = ...) -> None:
        """Wait up to ``timeout`` (10 s) for messages in flight, abort the rest, stop the threads. Idempotent."""

    def abort(self, reason: str) -> None:
        """Fail everything pending and everything later with ``reason``. Returns at once."""

    def overdue(self) -> str:
        """Describe a message in flight for longer than the timeout; empty if none, or if the backend has a timeout."""

    def stats(self) -> dict[str, float]:
        """Return the counters: sent_bytes, received_bytes, broadcast_bytes, sent_messages and the like.

        ``bounced``: tensors that the copy engine received with an extra copy, as they were sent before the receive was
        posted. ``wait_seconds``: host time blocked in ``wait``. ``pool_bytes``: memory of the receive pool.
        """

class SocketLink:
    """TCP connections to another process, over which lanes send in the order of their calls.

    Takes over ``sockets``, descriptors of connected sockets in the other end's order. A message of which more than
    ``window`` bytes of its lane are ahead waits until its receive is posted. Raises LaneError if there is no socket.
    """

    def __init__(self, sockets: Sequence[int], *, name: str, window: int = ...) -> None: ...
    def close(self, timeout: timedelta | float) -> None:
        """Send what is pending and wait up to ``timeout`` until the other end closes, too. Idempotent."""

    def abort(self, reason: str) -> None:
        """Fail everything pending and everything later with ``reason``. Returns at once."""

class SocketLinks:
    """A transport for host memory: socket links by the peer's rank in the lane's group, and the lane's number."""

    def __init__(self, *, links: Mapping[int, SocketLink], lane: int) -> None: ...

class NcclCommunicators:
    """A transport that calls NCCL, given the addresses of the communicators of the lane's groups, or None."""

    def __init__(self, *, p2p: int | None, stage: int | None) -> None: ...

def has_nccl() -> bool:
    """Whether torch has loaded a libnccl.so.2 that lanes can call."""

class IpcPool:
    """Memory of one lane that other processes on the host can map. Raises LaneError: no usable copy engine."""

    def __init__(self, device: torch.device) -> None: ...

class ReceivingEnd:
    """What a copy engine lane receives from."""

class SendingEnd:
    """What a copy engine lane sends to."""

class IpcReceiver(ReceivingEnd):
    """The receiving end of an IPC link into ``memory``."""

    def __init__(self, memory: IpcPool) -> None: ...
    def offer(self) -> str:
        """Return the line of text that the IpcSender of the other process connects to."""

class IpcSender(SendingEnd):
    """The sending end of an IPC link. Raises LaneError if ``offer`` cannot be used: other host, no access.

    The other end may read tensors in ``memory`` directly.
    """

    def __init__(self, device: torch.device, offer: str, memory: IpcPool | None = None) -> None: ...

class HostReceiver(ReceivingEnd):
    """The receiving end of a host link: pinned memory and ``link``, where ``lane`` is the lane's number.

    Raises LaneError: no usable copy engine.
    """

    def __init__(self, device: torch.device, link: SocketLink, lane: int) -> None: ...

class HostSender(SendingEnd):
    """The sending end of a host link. See HostReceiver."""

    def __init__(self, device: torch.device, link: SocketLink, lane: int) -> None: ...

class IsolatedStream:
    """A stream for a lane that shares no hardware queue with compute. Raises LaneError if there is none."""

    def __init__(self, device: torch.device) -> None: ...

class CopyEngineLinks:
    """A transport that uses the copy engine: the lane's ends of IPC links and host links on this rank, by peer.

    Inside a stage, its ranks forward what was received along a chain: from ``from_stage`` to ``to_stage``.
    """

    def __init__(
        self,
        *,
        stream: IsolatedStream,
        memory: IpcPool | None,
        senders: Mapping[int, SendingEnd],
        receivers: Mapping[int, ReceivingEnd],
        from_stage: ReceivingEnd | None,
        to_stage: SendingEnd | None,
    ) -> None: ...

def is_memory_own(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Return whether torch allocated the memory of each tensor and nothing else refers to it.

    False where that is unknown: for tensors without strides and for wrappers of other tensors.
    """

class VersionCounters:
    """A snapshot of the version counters of ``tensors`` (``torch.Tensor._version``). Keeps no memory alive.

    Skips None and tensors of inference mode, which have no counter. Writes through ``.data``, and by kernels outside
    torch, are not counted.
    """

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None: ...
    def first_changed(self) -> int | None:
        """Return the index of the first tensor written to since the snapshot; None if there is none."""

def has_8bit_kernels(device: torch.device) -> bool:
    """Whether ``pack_8bit`` works on ``device``: the CPU, and CUDA if this build has kernels."""

def pack_8bit(tensor: torch.Tensor) -> torch.Tensor:
    """Pack a float32, bfloat16 or float16 tensor: uint8 ``[n + 2 * ceil(n / 128)]`` for n elements.

    Blocks of 128 elements, in the order of a contiguous tensor, have one power of two as scale; an element is fp8 e4m3
    (docs/wire_format.md). An element x of a block whose largest finite magnitude is m is off by at most
    ``max(abs(x) / 16, m / 229376)``. NaN and infinities arrive as such, zeros as +0. Equal tensors give equal bytes on
    every device. Raises ValueError for another dtype or device. Does not wait for the device.
    """

def unpack_8bit(packed: torch.Tensor, tensor: torch.Tensor) -> None:
    """Unpack into a contiguous ``tensor`` of the dtype and number of elements that were packed.

    Any bytes of the right number can be unpacked. Raises ValueError if the number, dtype or device is wrong.
    """

def abort_all(reason: str) -> None:
    """Abort and stop every lane of this process; runs at exit."""

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
    """Return the message of one step as bytes. Raises MetadataError. See ldt.runtime.step.metadata.pack.

    Of each microbatch the attributes id, hops (sequences of TensorSpec) and tensors (by name) are read.
    """

def pack_called_off(*, error_type: str, error_text: str) -> torch.Tensor:
    """Return the message that a step is called off."""

def unpack_message(
    data: torch.Tensor,
    *,
    device: torch.device,
    max_elements: int,
    spec_type: Callable[..., object],
    microbatch_type: type,
) -> tuple[Any, ...]:
    """Parse either message. Raises MetadataError. See ldt.runtime.step.metadata.unpack.

    Of a step: (mode, plan, setting, autocast, microbatches). Of one that is called off: (None,
    error_type, error_text). ``spec_type`` is called with shape, dtype, requires_grad and order; ``microbatch_type`` is
    a class with the attributes id, hops and tensors, whose ``__init__`` is not called.
    """

def has_metadata_kernels(device: torch.device) -> bool:
    """Whether this build scans and rebuilds masks with kernels on ``device``."""
