"""job.toml: what is read from it, and that each error names the file, the table, the key, and what came."""

from __future__ import annotations

import inspect
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import ldt
from ldt.cli import main
from ldt.launch.description import ConnectOptions, TunnelTable, read
from ldt.launch.job import _arguments

JOB = """
script = "train.py"
arguments = ["--steps", "5"]
[topology]
tp = [1, 2, 2]
sites = ["office", "cloud", "cloud"]
[sites.cloud]
address = "10.0.0.2"
interface = "wg0"
device = "cuda"
[sites.office]
address = "10.0.0.1"
interface = "wg1"
port = 29500
"""


def described(folder: Path, text: str) -> Any:
    (folder / "job.toml").write_text(text)
    return read(folder / "job.toml")


def test_what_it_says(tmp_path: Path) -> None:
    job = described(tmp_path, JOB)
    assert job.topology == ldt.Topology([1, 2, 2], sites=["office", "cloud", "cloud"])
    assert job.script == tmp_path / "train.py"
    assert (job.host, job.store) == ("office", ("10.0.0.1", 29500))
    assert {site: job.ranks_of(site) for site in job.sites} == {"office": [0], "cloud": [1, 2, 3, 4]}


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    assert described(tmp_path, f"\N{BYTE ORDER MARK}{JOB}").host == "office"


def test_stages_are_at_the_edge_and_the_cloud_by_default(tmp_path: Path) -> None:
    text = JOB.replace('sites = ["office", "cloud", "cloud"]', "").replace("sites.office", "sites.edge")
    assert described(tmp_path, text).topology.sites == ("edge", "cloud", "cloud")


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        (
            "script",
            "scrip",
            "the file lacks 'script' and has a field 'scrip' (did you mean 'script'?): expected an object with the "
            "fields script",
        ),
        ('"train.py"', "3", "script is another number, expected a text"),
        ('"train.py"', "1979-05-27", "script is a date, expected a text"),
        ("[1, 2, 2]", '"1,2,2"', "[topology] tp is a text, expected a list"),
        ("[1, 2, 2]", "[1, 0, 2]", "[topology] tp[1] must be a whole number of at least 1, got 0"),
        ("tp", "ranks", "[topology] it lacks 'tp'"),
        ('"office"', '"of fice"', "[topology] sites[0] must be"),
        (
            "[sites.office]",
            "[sites.edge]",
            "[sites.edge] is the site of no stage: the stages are at office, cloud",
        ),
        (
            '"10.0.0.1"',
            '"10.0.0.1; reboot"',
            "[sites.office] address must be a host name or an IP address, got '10.0",
        ),
        ('"wg1"', '""', "[sites.office] interface must be the name of a network interface, got ''"),
        ("29500", "70000", "[sites.office] port must be from 1 to 65534, got 70000"),
        ("29500", '"29500"', "[sites.office] port is a text, expected a whole number"),
        ("port = 29500", "", "[sites]: one site keeps the store and has a port, got none"),
        (
            '"wg0"',
            '"wg0"\ncommand = [""]',
            "[sites.cloud] command must be a list of texts that are not empty",
        ),
        ('"wg0"', '"wg0"\ncommand = "-m ldt"', "[sites.cloud] command is a text, expected a list"),
        ('"cuda"', '"gpu"', "[sites.cloud] device is a text, expected 'cpu' or 'cuda' or 'npu'"),
        (
            '"wg0"',
            '"wg0"\nport = 29500',
            "[sites]: one site keeps the store and has a port, got cloud and office",
        ),
        ('"wg0"', '"wg0"\nname = 1', "[sites.cloud] it has a field 'name'"),
        (
            "[topology]",
            "[connect]\ntimeout = '60'\n[topology]",
            "[connect] timeout is a text, expected a finite number",
        ),
        (
            "[topology]",
            "[connect]\noutage = -1\n[topology]",
            "[connect] outage must be in seconds, at least 0, got -1",
        ),
        (
            "[topology]",
            "[connect]\nconections = 4\n[topology]",
            "[connect] it has a field 'conections' (did you",
        ),
        ("[topology]", "[topology", "line 4"),
    ],
)
def test_errors(tmp_path: Path, old: str, new: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert old in JOB
    with pytest.raises(ldt.LdtError) as raised:
        described(tmp_path, JOB.replace(old, new, 1))
    assert str(raised.value).startswith(f"{tmp_path}/job.toml: ")
    assert error in str(raised.value)
    assert main(["launch", f"{tmp_path}/job.toml", "--site", "cloud"]) == 2
    assert error in capsys.readouterr().err


TUNNEL = 'endpoint = "cloud.example.org:51820"'


def test_a_tunnel(tmp_path: Path) -> None:
    assert described(tmp_path, JOB).tunnel is None
    assert described(tmp_path, f"{JOB}[tunnel]\n{TUNNEL}").tunnel == TunnelTable(
        "cloud.example.org:51820", 1420
    )
    six = JOB.replace("10.0.0.", "fd00::") + '[tunnel]\nmtu = 1280\nendpoint = "[2001:db8::7]:51820"'
    assert described(tmp_path, six).tunnel == TunnelTable("[2001:db8::7]:51820", 1280)


@pytest.mark.parametrize(
    ("old", "new", "tunnel", "error"),
    [
        ("", "", "", "[tunnel] it lacks 'endpoint'"),
        ("", "", "endpoint = 51820", "[tunnel] endpoint is another number, expected a text"),
        ("", "", f"{TUNNEL}\nmtu = 1000", "[tunnel] mtu must be from 1280 to 65455, got 1000"),
        ("", "", f"{TUNNEL}\nkey = 'x'", "[tunnel] it has a field 'key'"),
        *(
            ("", "", f"endpoint = {endpoint!r}", "[tunnel] endpoint must be a host and a port, such as ")
            for endpoint in ("cloud", "cloud:0", "cloud:70000", "a\tb:1", "2001:db8::7:51820", "a:51820 ")
        ),
        (
            '"wg0"',
            '"a-very-long-name"',
            TUNNEL,
            "[sites.cloud] interface must be a name that WireGuard can have",
        ),
        (
            "10.0.0.1",
            "edge.example.org",
            TUNNEL,
            "[sites.office] address must be an IP address where there is",
        ),
        (
            "10.0.0.1",
            "10.0.0.2",
            TUNNEL,
            "[sites]: in a tunnel the sites have different addresses, both IPv4 or",
        ),
        (
            "10.0.0.1",
            "fd00::1",
            TUNNEL,
            "[sites]: in a tunnel the sites have different addresses, both IPv4 or",
        ),
        (
            '"cloud", "cloud"]',
            '"cloud", "west"]\n[sites.west]\naddress = "10.0.0.3"\ninterface = "wg0"',
            TUNNEL,
            "[tunnel] joins two sites, got cloud, office, west",
        ),
    ],
)
def test_errors_of_a_tunnel(tmp_path: Path, old: str, new: str, tunnel: str, error: str) -> None:
    assert old in JOB
    with pytest.raises(ldt.LdtError) as raised:
        described(tmp_path, f"{JOB.replace(old, new, 1)}[tunnel]\n{tunnel}")
    assert str(raised.value).startswith(f"{tmp_path}/job.toml: ")
    assert error in str(raised.value)


def test_a_large_file_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ldt.LdtError, match="at most 1048576 bytes"):
        described(tmp_path, JOB + "#" * (1 << 20))
    with pytest.raises(ldt.LdtError, match=r"nowhere\.toml cannot be read: No such file"):
        read(tmp_path / "nowhere.toml")
    with pytest.raises(ldt.LdtError, match="nested too deeply"):
        described(tmp_path, f"a = {'[' * 100_000}")


@pytest.mark.parametrize(
    ("old", "new", "site", "error"),
    [
        ("", "", "edge", "--site must be one of office, cloud, got 'edge'"),
        ("train.py", "test.py", "office", "script must be a file, got"),
        ("", "", "office", "[sites.office] interface must be one of "),
        ('"wg0"', '"lo"', "cloud", "has 4 ranks on device 'cuda', one for each, but this host has"),
    ],
)
def test_what_this_host_has_not(
    tmp_path: Path, old: str, new: str, site: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    if "cuda" in error and torch.cuda.device_count() > 3:
        pytest.skip("has four GPUs")
    (tmp_path / "train.py").touch()
    (tmp_path / "job.toml").write_text(JOB.replace(old, new))
    assert main(["launch", f"{tmp_path}/job.toml", "--site", site]) == 2
    assert error in capsys.readouterr().err


def test_options_are_those_of_connect(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    parameters = inspect.signature(ldt.connect).parameters
    assert {field.name for field in fields(ConnectOptions)} == set(parameters) - {
        "topology",
        "ranks",
        "device",
    }
    text = (
        JOB
        + """
[connect]
timeout = 5
connections = "auto"
share_edge_errors = true
transfer = {0-1 = "leader", 1-2 = "direct"}
compression.0-1 = {activations = "8bit"}
"""
    )
    assert _arguments(described(tmp_path, text)) == {
        "timeout": timedelta(seconds=5),
        "connections": "auto",
        "share_edge_errors": True,
        "transfer": {(0, 1): "leader", (1, 2): "direct"},
        "compression": {(0, 1): ldt.Compression(activations="8bit")},
    }


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ('transfer = {edge = "leader"}', "[connect] transfer names a link by its stages, '0-1', got 'edge'"),
        (
            'compression.0-1 = {activation = "8bit"}',
            "[connect] compression.0-1 has a field 'activation' (did you mean 'activations'?): expected",
        ),
        ('compression.0-1 = {activations = "8"}', "[connect] compression: "),
    ],
)
def test_links_are_checked(tmp_path: Path, option: str, error: str) -> None:
    pytest.importorskip("torch")
    with pytest.raises(ldt.LdtError) as raised:
        _arguments(described(tmp_path, f"{JOB}\n[connect]\n{option}"))
    assert f"{tmp_path}/job.toml: {error}" in str(raised.value)


def test_a_script_that_nobody_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LDT_JOB", raising=False)
    with pytest.raises(ldt.LdtError, match="LDT_JOB is not set: start this script by python -m ldt launch"):
        ldt.Job.from_env()
