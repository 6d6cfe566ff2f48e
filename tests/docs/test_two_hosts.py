"""The commands for two hosts, both on this one, with each attempt's store as in the page on reliability."""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from pages import README, blocks, commands

PAGE, RELIABILITY = "docs/start/hosts.md", "docs/reliability.md"
SECONDS = 300


def program() -> str:
    """Return the README's program, with a separate prefix of the store for each attempt of torchrun."""
    (text,) = (block.text for block in blocks(README) if block.language == "python")
    (store,) = (block.text for block in blocks(RELIABILITY) if "PrefixStore" in block.text)
    simple = 'dist.init_process_group("gloo")\n'
    assert text.count(simple) == 1
    return "import os\n" + text.replace(simple, store)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.mark.slow
def test_both_commands_train_together(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(program())
    found = [
        command for block in blocks(PAGE) for command in commands(block) if command.startswith("torchrun")
    ]
    assert len(found) == 2
    port = free_port()
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *local(command, port)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command in found
    ]
    try:
        edge, cloud = [agent.communicate(timeout=SECONDS)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], edge + cloud
    losses = [float(line.split()[-1]) for line in edge.splitlines() if line.startswith("step")]
    assert losses[-1] < 0.5 * losses[0]
    assert "step" not in cloud  # losses stay on the edge


def local(command: str, port: int) -> list[str]:
    """Return the arguments of ``command`` with this host's address and a free port."""
    assert "10.0.0.1" in command
    assert "29500" in command
    return shlex.split(command.replace("10.0.0.1", "127.0.0.1").replace("29500", str(port)))[1:]
