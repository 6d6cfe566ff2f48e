"""python -m ldt doctor --link: what both sites print over emulated links, and of another site that makes no sense."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from launchers import Command, two_free_ports

import ldt
from ldt.cli import main
from ldt.cli.link_check import check_link
from ldt.cli.link_check.conversation import Conversation
from ldt.cli.link_check.facts import Arrived, Block, Chosen, Door, HostFacts, Ping, Pong, Reached, RoundTrip
from ldt.cli.link_check.host import facts_of
from ldt.cli.link_check.report import Findings, Report
from ldt.launch.description import read
from ldt.runtime.comm.socket_choice import TcpPath

SECONDS = 60.0
TUNNEL = '[tunnel]\nendpoint = "127.0.0.3:51820"'


def describe(
    folder: Path,
    addresses: tuple[str, str] = ("127.0.0.1", "127.0.0.2"),
    interface: str = "lo",
    more: str = "",
) -> Path:
    file = folder / "job.toml"
    file.write_text(
        f"""
script = "train.py"
[topology]
tp = [1, 1]
[sites.edge]
address = "{addresses[0]}"
interface = "{interface}"
port = {two_free_ports()}
[sites.cloud]
address = "{addresses[1]}"
interface = "{interface}"
{more}
"""
    )
    return file


# -- over a link -------------------------------------------------------------------------------------------------------


def both_sites(folder: Path, set_link: Callable[[Any], None] = id, **options: float) -> tuple[str, list[int]]:
    """What both sites print, which is the same, and their statuses."""
    from wan_link import ADDRESSES, DEVICE, Settings, wide_area_link

    file = describe(folder, ADDRESSES, DEVICE)
    with wide_area_link(Settings(12.5e6, 5e-3, **options)) as link:
        set_link(link)
        commands = [
            Command(["doctor", "--link", str(file), "--site", site, "--timeout", "30"], folder / site, place)
            for site, place in zip(("edge", "cloud"), link.places, strict=True)
        ]
        statuses = [command.status() for command in commands]
    edge, cloud = (command.text for command in commands)
    assert edge == cloud
    return edge, statuses


def rate(report: str, way: str) -> float:
    return float(re.findall(rf"^{way} +([0-9]+) Mb/s$", report, re.MULTILINE)[0])


@pytest.mark.usefixtures("wide_area")
def test_a_healthy_link(tmp_path: Path) -> None:
    report, statuses = both_sites(tmp_path)
    assert statuses == [0, 0], report
    lines = report.splitlines()
    port = read(tmp_path / "job.toml").store[1]
    assert "edge to cloud  other ports: connects" in lines
    assert f"cloud to edge  port {port}: connects; port {port + 1}: connects; other ports: connects" in lines
    assert "loss           none seen" in lines
    assert "MTU            edge 1500; cloud 1500" in lines
    assert 10 <= float(re.findall(r"^round trip +([0-9.]+) ms", report, re.MULTILINE)[0]) < 100
    assert all(50 < rate(report, way) < 200 for way in ("edge to cloud", "cloud to edge"))
    assert lines[-1] == "The link has what a job needs."


@pytest.mark.usefixtures("wide_area")
def test_a_blocked_direction_and_losses(tmp_path: Path) -> None:
    report, statuses = both_sites(tmp_path, lambda link: link.set(1, no_syn=1), loss=0.01)
    assert statuses == [1, 1], report
    port = read(tmp_path / "job.toml").store[1]
    assert (
        f"cloud to edge  port {port}: no answer; port {port + 1}: no answer; other ports: no answer" in report
    )
    assert (
        f"problem: cloud cannot connect to edge at ports {port} and {port + 1} (no answer), where" in report
    )
    assert "admit cloud to ports" in report
    assert ", give [sites.cloud] the port instead of [sites.edge], as edge reaches cloud" in report
    assert "problem: cloud cannot connect to edge at the ports that are free there (no answer)." in report
    assert 0.1 < float(re.findall(r"^loss +([0-9.]+)% of packets", report, re.MULTILINE)[0]) < 4
    assert (
        'faster: connections = "auto" in [connect], on CPUs: the link loses packets, and it takes' in report
    )


@pytest.mark.slow
@pytest.mark.usefixtures("wide_area")
def test_packets_of_full_size_that_vanish(tmp_path: Path) -> None:
    report, statuses = both_sites(tmp_path, lambda link: link.set(0, queue=1300))
    assert statuses == [1, 1], report
    assert "problem: packets of full size from edge do not arrive, small ones do." in report


# -- without one -------------------------------------------------------------------------------------------------------


def test_a_site_that_does_not_come(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor do those who have nothing to say, or who are no site, keep the command."""
    file = describe(tmp_path)
    port = read(file).store[1] + 1
    with ThreadPoolExecutor(1) as thread:
        command = ["doctor", "--link", str(file), "--site", "edge", "--timeout", "1.5"]
        status = thread.submit(main, command)
        deadline = time.monotonic() + SECONDS
        for said in (b"", b"{}\n", b"GET / HTTP/1.1\r\n\r\n", b"[" * 10_000 + b"\n"):
            with _connected(port, deadline) as caller:
                caller.sendall(said)
        assert status.result(SECONDS) == 1
    said = capsys.readouterr().out
    assert f"problem: cloud did not come within 1.5 s, and 127.0.0.2 port {port} could not be reached" in said
    assert "start the same command there, with --site cloud" in said
    assert "firewalls let neither site in" in said


def test_a_site_that_does_not_come_through_a_tunnel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = describe(tmp_path, more=TUNNEL)
    assert main(["doctor", "--link", str(file), "--site", "edge", "--timeout", "1.5"]) == 1
    assert "the tunnel is not up at both sites with the other's key" in capsys.readouterr().out


def test_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = describe(tmp_path)
    for arguments, error in (
        ([], "--site must be one of edge, cloud, got None"),
        (["--site", "west"], "--site must be one of edge, cloud, got 'west'"),
    ):
        assert main(["doctor", "--link", str(file), *arguments]) == 2
        assert error in capsys.readouterr().err
    port = read(file).store[1]
    with socket.create_server(("127.0.0.1", port)):
        assert main(["doctor", "--link", str(file), "--site", "edge"]) == 1
    assert f"problem: cannot listen at port {port} (Address already in use" in capsys.readouterr().out
    for more in ("", TUNNEL):
        file = describe(tmp_path, interface="nowhere0", more=more)
        assert main(["doctor", "--link", str(file), "--site", "edge"]) == 1
        said = capsys.readouterr().out
        assert "[sites.edge] interface must be one of lo" in said
        assert ("bring the tunnel up first, with wg-quick up" in said) == bool(more)
    assert main(["doctor", "--site", "edge"]) == 2
    assert "--site is for --link" in capsys.readouterr().err


def _connected(port: int, deadline: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=5)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def talk_to_the_edge(file: Path, cloud: Callable[[Conversation], None], **different: Any) -> str:
    """What the edge raises if the cloud speaks as ``cloud`` does, after a HostFacts that is ``different``."""
    description = read(file)
    with ThreadPoolExecutor(1) as thread:
        checked = thread.submit(check_link, description, "edge", SECONDS)
        with _connected(description.store[1] + 1, time.monotonic() + SECONDS) as caller:
            talk = Conversation(caller, "edge")
            talk.say(replace(facts_of(description, "cloud"), **different))
            talk.hear(HostFacts)
            cloud(talk)
            with pytest.raises(ldt.LdtError) as raised:
                checked.result(SECONDS)
    return str(raised.value)


def _open(talk: Conversation) -> None:
    talk.hear(Chosen)
    talk.hear(Door)


def _say_no_port(talk: Conversation) -> None:
    _open(talk)
    talk.connection.sendall(b'{"port": 70000, "token": "00000000000000000000000000000000"}\n')


def _say_other_ports(talk: Conversation) -> None:
    _open(talk)
    talk.say(Door(1, "0" * 32))
    talk.hear(Reached)
    talk.say(Reached({"22": "connects"}))


def _leave(talk: Conversation) -> None:
    talk.hear(Chosen)
    talk.connection.close()


def _say_too_much(talk: Conversation) -> None:
    _open(talk)
    with suppress(OSError):  # it does not read all of that
        talk.connection.sendall(b"0" * (2 << 20))


def _send_no_rates(talk: Conversation) -> None:
    _open(talk)
    talk.say(Door(1, "0" * 32))
    talk.hear(Reached)
    talk.say(Reached({str(port): "no answer" for port in _ports(talk)} | {"other ports": "no answer"}))
    for _ in range(10):
        talk.hear(Ping)
        talk.say(Pong(float("1e308")))
    talk.hear(RoundTrip)
    talk.hear(Block)
    talk.say(Arrived(True))
    talk.connection.sendall(b'{"zeros": [1]}\n')


def _ports(talk: Conversation) -> list[int]:
    port = talk.connection.getpeername()[1]
    return [port - 1, port]


@pytest.mark.parametrize(
    ("cloud", "error"),
    [
        (_leave, "cloud has closed the connection"),
        (_say_no_port, "cloud sent another message than expected, a Door: it has no port"),
        (_say_other_ports, "cloud has tried other ports than expected"),
        (_say_too_much, "cloud sent a line of more than 1048576 bytes"),
        (
            _send_no_rates,
            "cloud sent another message than expected, a Block: zeros is a list, expected a text",
        ),
    ],
)
def test_a_site_that_makes_no_sense(
    tmp_path: Path, cloud: Callable[[Conversation], None], error: str
) -> None:
    assert error in talk_to_the_edge(describe(tmp_path), cloud)


@pytest.mark.parametrize(
    ("different", "error"),
    [
        (
            {"digests": {}},
            "job.toml: script, sites, topology must be the same on all sites, but differs at cloud",
        ),
        ({"site": "edge"}, "the command has --site 'edge', expected 'cloud'"),
    ],
)
def test_another_description(tmp_path: Path, different: dict[str, Any], error: str) -> None:
    assert error in talk_to_the_edge(describe(tmp_path), lambda talk: None, **different)


# -- the report --------------------------------------------------------------------------------------------------------


def report_of(folder: Path, *, more: str = "", theirs: dict[str, Any] | None = None, **found: Any) -> Report:
    description = read(describe(folder, ("10.0.0.9", "10.0.0.10"), more=more))
    store = description.store[1]
    reached = {
        "edge": {"other ports": "connects"},
        "cloud": dict.fromkeys((str(store), str(store + 1)), "connects"),
    }
    reached["cloud"]["other ports"] = "connects"
    for site, outcome in found.pop("blocked", {}).items():
        reached[site]["other ports"] = outcome
    hosts = {site: replace(facts_of(description, "edge"), site=site) for site in ("edge", "cloud")}
    hosts["cloud"] = replace(hosts["cloud"], **(theirs or {}))
    findings = Findings(reached, found.pop("round_trip", RoundTrip(0.02, 0.5)), **found)
    return Report(description, hosts, findings)


def test_what_a_job_needs(tmp_path: Path) -> None:
    assert not list(report_of(tmp_path).problems())
    assert not list(report_of(tmp_path, blocked={"edge": "no answer"}).problems()), "the larger address dials"
    needed = report_of(tmp_path, blocked={"edge": "no answer"}, more="[connect]\nconnections = 4")
    assert [one.problem for one in needed.problems()] == [
        "edge cannot connect to cloud at the ports that are free there (no answer), which connections in [connect] "
        "needs."
    ]
    (problem,) = report_of(tmp_path, blocked={"cloud": "refused"}).problems()
    assert problem.problem.startswith(
        "cloud cannot connect to edge at the ports that are free there (refused)."
    )
    (problem,) = report_of(tmp_path, round_trip=RoundTrip(0.02, -3.0)).problems()
    assert problem.problem == "the clocks differ by 3.0 s."
    own = report_of(tmp_path).hosts["edge"].versions
    for_cuda = {name: f"{own[name].partition('+')[0]}+cu130" for name in ("ldt", "torch")}
    assert not list(report_of(tmp_path, theirs={"versions": for_cuda}).problems())
    (problem,) = report_of(
        tmp_path, theirs={"versions": {"ldt": ldt.__version__, "torch": "1\n\x1b"}}
    ).problems()
    assert problem.problem.startswith("the versions of torch differ: ")
    assert problem.problem.endswith("1 \N{REPLACEMENT CHARACTER} at cloud.")


def test_what_would_make_it_faster(tmp_path: Path) -> None:
    path = TcpPath(0.1, (125e6, 125e6), 0.0, 2e6, False, True)
    advice = {"edge": ["sysctl -w one"], "cloud": []}
    assert list(report_of(tmp_path, path=path, advice=advice).advice()) == [
        'connections = "auto" in [connect], on CPUs: one connection does not fill the link, and it takes 7.',
        "at edge, as root: sysctl -w one",
    ]
    assert not list(report_of(tmp_path, path=replace(path, round_trip=0.0)).advice())
