"""What this host says of itself."""

from __future__ import annotations

import fcntl
import platform
import socket
import struct
from contextlib import closing

import torch

import ldt
from ldt.cli.link_check.facts import HostFacts
from ldt.errors import LdtError
from ldt.launch.description import Description
from ldt.runtime.comm.socket_choice import TcpLimits, sysctl

__all__ = ["facts_of", "path_mtu"]

_SHOWN = (
    "tcp_congestion_control",
    "tcp_rmem",
    "tcp_wmem",
    "tcp_slow_start_after_idle",
    "tcp_mtu_probing",
)
_SIOCGIFMTU = 0x8921
_IP_MTU, _IPV6_MTU = 14, 24  # of Linux; Python has no names for them


def facts_of(description: Description, site: str) -> HostFacts:
    """Raises LdtError if the host has not the site's interface."""
    return HostFacts(
        site=site,
        digests=description.digests,
        versions={
            "ldt": ldt.__version__,
            "torch": str(torch.__version__),
            "Python": platform.python_version(),
        },
        sysctls={name: " ".join(sysctl(name)) or "unknown" for name in _SHOWN},
        mtu=_mtu(description, site),
        limits=TcpLimits.of_this_host(),
    )


def path_mtu(connection: socket.socket) -> int:
    """What the kernel takes for the path's MTU; 0 if it does not say."""
    is_six = connection.family == socket.AF_INET6
    level, option = (socket.IPPROTO_IPV6, _IPV6_MTU) if is_six else (socket.IPPROTO_IP, _IP_MTU)
    try:
        return connection.getsockopt(level, option)
    except OSError:  # another system
        return 0


def _mtu(description: Description, site: str) -> int:
    interface = description.sites[site].interface
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as asked:
        try:
            found = fcntl.ioctl(asked, _SIOCGIFMTU, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            remedy = ": bring the tunnel up first, with wg-quick up" if description.tunnel else ""
            raise LdtError(
                f"{description.path}: [sites.{site}] interface must be one of {names}, got {interface!r}{remedy}"
            ) from error
    return int(struct.unpack_from("@i", found, 16)[0])
