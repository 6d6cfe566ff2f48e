"""``--print-env``: what it prints, and ranks that a shell starts from it, as the pages on clusters do."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from launchers import describe

from ldt.cli import main
from ldt.testing import allowed

PAGE = Path(__file__).parents[2] / "docs" / "start" / "clusters.md"
SECONDS = 60.0
RANK = """
import os
import torch, torch.distributed as dist
import ldt

dist.init_process_group("gloo")
job = ldt.Job.from_env()
with job.connect() as mesh:
    print("rank", mesh.rank, "of", job.topology, "is local rank", os.environ["LOCAL_RANK"], flush=True)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
dist.destroy_process_group()
"""


def printed(capsys: pytest.CaptureFixture[str], file: Path, site: str, *index: str) -> str:
    assert main(["launch", str(file), "--site", site, "--print-env", *index]) == 0
    return capsys.readouterr().out


def test_what_each_rank_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = describe(tmp_path, "", [1, 2, 1], 'arguments = ["--text", "a b"]')
    text = printed(capsys, file, "cloud")
    assert re.findall(r"export RANK=(\d)\nexport LOCAL_RANK=(\d)", text) == [
        ("1", "0"),
        ("2", "1"),
        ("3", "2"),
    ]
    (port,) = re.findall(r"port = (\d+)", file.read_text())
    for line in ("WORLD_SIZE=4", "MASTER_ADDR=127.0.0.1", f"MASTER_PORT={port}", "GLOO_SOCKET_IFNAME=lo"):
        assert text.count(f"export {line}\n") == 3, line
    assert text.count(f"# python {tmp_path}/train.py --text 'a b'\n") == 3
    assert "CUDA" not in text
    assert "AGENT_STORE" not in text  # rank 0 keeps the store
    assert printed(capsys, file, "cloud", "1") == "# rank 2" + text.split("# rank 2")[1].split("# rank 3")[0]
    assert re.findall(r"export RANK=(\d)", printed(capsys, file, "edge")) == ["0"]


def test_a_gpu_site_gets_what_import_ldt_would_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_NCCL_RETHROW_CUDA_ERRORS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "16")
    file = describe(tmp_path, "")
    file.write_text(file.read_text() + 'device = "cuda"\n')
    text = printed(capsys, file, "cloud")
    for line in ("CUDA_MODULE_LOADING=EAGER", "CUDA_DEVICE_MAX_CONNECTIONS=16", "NCCL_SOCKET_IFNAME=lo"):
        assert f"export {line}\n" in text


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = describe(tmp_path, "")
    assert main(["launch", str(file), "--site", "cloud", "--print-env", "1"]) == 2
    assert "cloud has the ranks 0 to 0, counted there, got 1" in capsys.readouterr().err
    port = re.findall(r"port = \d+\n", file.read_text())[0]
    file.write_text(file.read_text().replace(port, "") + port)
    assert main(["launch", str(file), "--site", "cloud", "--print-env"]) == 2
    assert "the port belongs into [sites.edge], got it in [sites.cloud]" in capsys.readouterr().err


def slurm() -> str:
    (script,) = re.findall(r'```sh title="cloud.sbatch"\n(.*?)```', PAGE.read_text(), re.DOTALL)
    return str(script)


def manifest() -> str:
    (text,) = re.findall(r'```yaml title="cloud.yaml"\n(.*?)```', PAGE.read_text(), re.DOTALL)
    return str(text)


def test_the_batch_script_is_one_for_bash() -> None:
    checked = subprocess.run(["bash", "-n"], input=slurm(), capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    first, *others = slurm().splitlines()
    assert first == "#!/bin/bash"
    options = [line for line in others if line.startswith("#SBATCH")]
    assert options
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", line) for line in options)


def test_ranks_that_the_pages_commands_start(tmp_path: Path) -> None:
    """The edge's by the command of the batch script, the cloud's by that of the manifest, each as one rank."""
    pytest.importorskip("torch")
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load(manifest())
    assert (job["kind"], job["apiVersion"]) == ("Job", "batch/v1")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    in_slurm = slurm().split("srun ")[1].replace("--site cloud", "--site edge")
    srun = [word for word in shlex.split(in_slurm) if not word.startswith("--")]
    describe(tmp_path, RANK)
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o700)
    environment = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"}
    ranks = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env={**environment, **index},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, index in (
            (srun, {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}),
            (container["command"], {"JOB_COMPLETION_INDEX": "0"}),
        )
    ]
    try:
        texts = [rank.communicate(timeout=allowed(SECONDS))[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], texts
    for number, text in enumerate(texts):
        assert f"rank {number} of Topology" in text
        assert text.endswith("is local rank 0\n")
