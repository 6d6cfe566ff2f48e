"""python -m ldt tunnel: the files, where the keys go, and a job through the tunnel that they make."""

from __future__ import annotations

import base64
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from launchers import launch
from tunnels import PORT, check_wireguard, tunnel, write_files

from ldt.cli import main
from ldt.testing.models import unsplit_training
from ldt.topology import Topology

STEPS, MICROBATCHES = 4, 3
INTERFACES = {
    site: f"wg{site[0]}{os.getpid()}" for site in ("edge", "cloud")
}  # wg-quick knows them by their names
EXAMPLE = Path(__file__).parents[2] / "examples" / "two_sites" / "job.toml"
TRAIN = f"""
from pathlib import Path
import torch, torch.distributed as dist
import ldt
from ldt.testing import toy_chunks, toy_loss, toy_microbatches

torch.set_num_threads(1)
dist.init_process_group("gloo")
job = ldt.Job.from_env()
with job.connect() as mesh:
    chunks = toy_chunks(job.topology)
    mine = {{index: chunks[index] for index in job.topology.chunks_of(mesh.stage)}}
    pipeline = ldt.Pipeline(list(mine.values()), mesh, loss_fn=toy_loss if mesh.is_edge else None)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
    for step in range({STEPS}):
        pipeline.step(toy_microbatches({MICROBATCHES}, seed=step) if mesh.is_edge else None)
        optimizer.step()
        optimizer.zero_grad()
    for index, chunk in mine.items():
        torch.save(chunk.state_dict(), Path(__file__).parent / f"chunk-{{index}}.pt")
dist.destroy_process_group()
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    file = tmp_path / "job.toml"
    text = EXAMPLE.read_text().replace("finetune.py", "train.py")
    for site, name in INTERFACES.items():
        text = text.replace(f"wg-{site}", name)
    file.write_text(text)
    return file


def run(job: Path, *arguments: str) -> int:
    return main(["tunnel", str(job), "--folder", str(job.parent), *arguments])


def test_each_private_key_stays_in_its_file(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    check_wireguard()
    edge_key, cloud_key = write_files(job)
    assert not capfd.readouterr().err, "the commands have their own output"
    edge, cloud = ((job.parent / f"{name}.conf") for name in INTERFACES.values())
    for file in (edge, cloud):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    lines = {file: file.read_text().splitlines() for file in (edge, cloud)}
    for file, own, peer, key in ((edge, 1, 2, cloud_key), (cloud, 2, 1, edge_key)):
        assert {"MTU = 1420", f"Address = 10.0.0.{own}/32", f"AllowedIPs = 10.0.0.{peer}/32"} < {*lines[file]}
        assert f"PublicKey = {key}" in lines[file]
    dials = ["Endpoint = 10.88.0.2:51820", "PersistentKeepalive = 25"]
    assert [line for line in lines[edge] if line in dials] == dials
    assert f"ListenPort = {PORT}" in lines[cloud]
    assert not any(line.startswith("ListenPort") for line in lines[edge])
    assert not any(line.startswith(("Endpoint", "Persistent")) for line in lines[cloud])
    private = next(line for line in lines[edge] if line.startswith("PrivateKey"))
    assert run(job, "--site", "edge") == 0
    shown = capfd.readouterr()
    assert shown.out == f"{edge_key}\n"
    assert private.partition(" = ")[2] not in shown.out + shown.err + cloud.read_text()
    assert edge.read_text().splitlines() == lines[edge]  # with the key that it had, and the other site's
    edge.unlink()
    assert run(job, "--site", "edge") == 0
    assert private not in edge.read_text()


def test_lines_that_the_user_added_stay(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In their sections, also keys that the command writes once itself. What it wrote is replaced, and shown."""
    check_wireguard()
    file = job.parent / f"{INTERFACES['edge']}.conf"
    keys = [base64.b64encode(bytes([number] * 32)).decode() for number in range(3)]
    assert run(job, "--site", "edge") == 0
    own = file.read_text()
    added = "# of ours\nPostUp = iptables -A INPUT\naddress = 10.9.0.1/24\nListenPort = 7\n"
    others = f"\n[Peer]\nPublicKey = {keys[0]}\nAllowedIPs = 10.9.0.7/32\n"
    file.write_text(own + added + others)
    assert run(job, "--site", "edge", "--peer", keys[1]) == 0
    text = file.read_text()
    assert text.startswith(own + added + others)
    peer = text.removeprefix(own + added + others)
    assert peer.splitlines()[:4] == ["", "# cloud", "[Peer]", f"PublicKey = {keys[1]}"]
    assert "replaced" not in capsys.readouterr().err
    file.write_text(text.replace("PersistentKeepalive = 25", "PersistentKeepalive = 9\nPresharedKey = x"))
    job.write_text(job.read_text().replace("mtu = 1420 ", "mtu = 1400 "))
    assert run(job, "--site", "edge", "--peer", keys[2]) == 0
    wanted = text.replace("MTU = 1420", "MTU = 1400").replace(keys[1], keys[2]) + "PresharedKey = x\n"
    assert file.read_text() == wanted
    shown = capsys.readouterr().err
    for line in ("MTU = 1420", f"PublicKey = {keys[1]}", "PersistentKeepalive = 9"):
        assert f"replaced in {file}: {line}\n" in shown
    assert shown.count("replaced") == 3


def test_wrong_keys_and_files(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_wireguard()
    for key in ("", "AAAA", "A" * 44, "$(reboot)"):
        assert run(job, "--site", "edge", "--peer", key) == 2
        assert "--peer must be the public key that the other site printed, got" in capsys.readouterr().err
    assert run(job, "--site", "edge") == 0
    own = capsys.readouterr().out.strip()
    assert run(job, "--site", "edge", "--peer", own) == 2
    assert "is the key of edge itself" in capsys.readouterr().err
    other = job.parent / f"{INTERFACES['cloud']}.conf"
    other.write_text("[Interface]\nPrivateKey = mine\n")
    assert run(job, "--site", "cloud") == 2
    assert f"{other} was not written by this command" in capsys.readouterr().err
    assert other.read_text() == "[Interface]\nPrivateKey = mine\n"
    assert run(job, "--site", "edge", "--folder", str(job.parent / "nowhere")) == 2
    assert "cannot be written: No such file" in capsys.readouterr().err


def test_without_wireguard_it_says_what_to_install(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(job.parent))
    assert run(job, "--site", "edge") == 2
    assert "wg is not installed, which makes the keys: apt install wireguard-tools" in capsys.readouterr().err


@pytest.mark.usefixtures("wide_area")
def test_a_job_trains_through_it_and_nothing_else_crosses(job: Path) -> None:
    """The link admits only UDP of one port. The edge's end has no port that the cloud could dial."""
    check_wireguard()
    from wan_link import Settings, wide_area_link

    with wide_area_link(Settings(125e6, 2e-3)) as link:
        for direction in (0, 1):
            link.set(direction, only_udp=PORT)
        with tunnel(job, link.places, (INTERFACES["edge"], INTERFACES["cloud"])):
            with (
                launch(job, "edge", place=link.places[0]) as edge,
                launch(job, "cloud", place=link.places[1]) as cloud,
            ):
                assert [edge.status(), cloud.status()] == [0, 0], edge.text + cloud.text
            both = [link.counters(direction) for direction in (0, 1)]
    assert all(count.packets > 100 for count in both)
    assert [count.refused for count in both] == [0, 0]
    for index, chunk in enumerate(unsplit_training(Topology([1, 1]), STEPS, MICROBATCHES)):
        weights = torch.load(job.parent / f"chunk-{index}.pt")
        for name, tensor in chunk.state_dict().items():
            assert torch.equal(weights[name], tensor), f"chunk {index}, {name}"


@pytest.mark.usefixtures("wide_area")
def test_the_link_that_admits_one_port_refuses_all_else() -> None:
    from wan_link import ADDRESSES, Settings, wide_area_link

    send = "import socket; s = socket.socket(2, 2); [s.sendto(b'x', ({!r}, port)) for port in ({}, 9, 9)]"
    with wide_area_link(Settings(125e6)) as link:
        link.set(0, only_udp=PORT)
        script = send.format(ADDRESSES[1], PORT)
        command = ["ip", "netns", "exec", link.places[0].namespace, sys.executable, "-c", script]
        subprocess.run(command, check=True, timeout=30)
        time.sleep(0.2)
        count = link.counters(0)
    assert (count.packets, count.refused) == (1, 2)
