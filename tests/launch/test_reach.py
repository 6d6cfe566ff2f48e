"""Launchers try the connections that gloo will need, and say on both sites which cannot be opened."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

pytest.importorskip("torch")

from launchers import describe, launch

from ldt.launch.description import read
from ldt.launch.reach import dialling_site, listen, outcome_of

CONNECT = """
import torch.distributed as dist, ldt
dist.init_process_group("gloo")
with ldt.Job.from_env().connect():
    print("connected")
dist.destroy_process_group()
"""


def over_a_link(folder: Path, blocked: int, host: str) -> tuple[list[int], str]:
    """Launch where one direction is blocked, with the store at ``host``. Returns the statuses and what both print."""
    from wan_link import ADDRESSES, DEVICE, Settings, wide_area_link

    file = describe(folder, CONNECT)
    text = file.read_text().replace('"lo"', f'"{DEVICE}"')
    for address in ADDRESSES:
        text = text.replace("127.0.0.1", address, 1)
    if host == "cloud":
        port = next(line for line in text.splitlines() if line.startswith("port"))
        text = text.replace(f"{port}\n", "") + f"{port}\n"
    file.write_text(text)
    with wide_area_link(Settings(12.5e6, 5e-3)) as link:
        link.set(blocked, no_syn=1)
        edge_place, cloud_place = link.places
        with (
            launch(file, "edge", place=edge_place) as edge,
            launch(file, "cloud", place=cloud_place) as cloud,
        ):
            return [edge.status(), cloud.status()], f"{edge.text}\n{cloud.text}"


@pytest.mark.slow
@pytest.mark.usefixtures("wide_area")
def test_a_blocked_direction_is_named_at_both_sites(tmp_path: Path) -> None:
    statuses, text = over_a_link(tmp_path, blocked=1, host="cloud")
    assert statuses == [1, 1], text
    for site in ("edge", "cloud"):
        over = (
            f"[{site}] the job is over: cloud cannot connect to edge at ports that are free there (no answer)"
        )
        assert over in text
    assert "started: stage" not in text


@pytest.mark.slow
@pytest.mark.usefixtures("wide_area")
def test_the_other_direction_is_not_needed(tmp_path: Path) -> None:
    """The larger address dials: that of the cloud."""
    statuses, text = over_a_link(tmp_path, blocked=0, host="edge")
    assert statuses == [0, 0], text
    assert "[edge 0] connected" in text


@pytest.mark.parametrize(
    ("edge", "cloud", "dials"),
    [
        ("10.0.0.9", "10.0.0.10", "cloud"),
        ("10.0.0.10", "10.0.0.9", "edge"),
        ("fd00::1", "fd00::2", "cloud"),
        ("10.0.0.1", "10.0.0.1", None),
        ("edge.example.org", "10.0.0.1", None),
    ],
)
def test_who_dials(tmp_path: Path, edge: str, cloud: str, dials: str | None) -> None:
    file = describe(tmp_path, "")
    text = file.read_text()
    for address in (edge, cloud):
        text = text.replace("127.0.0.1", address, 1)
    file.write_text(text)
    description = read(file)
    assert dialling_site(description, "edge", "cloud") == dials
    assert dialling_site(description, "cloud", "edge") == dials


def test_how_ports_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert outcome_of("127.0.0.1", port) == "connects"
    assert outcome_of("127.0.0.1", port) == "refused"
    assert outcome_of("nowhere.invalid", port) == "no route"


@pytest.mark.parametrize("address", ["127.0.0.1", "192.0.2.1", "nowhere.invalid"])
def test_it_listens_also_if_only_others_know_the_address(address: str) -> None:
    with listen(address, 0) as server:
        assert outcome_of("127.0.0.1", server.getsockname()[1]) == "connects"
