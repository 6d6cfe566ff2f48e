"""The guide on two sites: all its commands between two namespaces, with the link pulled and the job stopped."""

from __future__ import annotations

import re
import runpy
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from pages import ROOT, blocks, commands
from tunnels import check_wireguard

from ldt.integrations import hf
from ldt.testing import allowed

PAGE = "docs/guides/two_sites.md"
FOLDER = "build/two_sites"
SITES = "python benchmarks/two_sites.py"
SECONDS = 60.0
LONGEST = 240.0  # of a process


def test_the_description_is_that_of_the_example() -> None:
    (shown,) = (block.text for block in blocks(PAGE) if block.language == "toml")
    assert shown == (ROOT / "examples/two_sites/job.toml").read_text()


def test_the_sites_name_the_package_that_is_missing() -> None:
    script = str(ROOT / "benchmarks/two_sites.py")
    program = (
        f"import runpy, sys; sys.modules['pyroute2'] = None; sys.argv = [{script!r}, 'enter', 'edge', 'true']; "
        f"sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); runpy.run_path({script!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=allowed(SECONDS),
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.endswith(": pip install pyroute2\n"), done.stderr


class Reader:
    """Runs commands of the page in ``folder`` in place of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.left = [
            command for block in blocks(PAGE) if block.language == "sh" for command in commands(block)
        ]

    def run(self, command: str, site: str = "", key: str = "") -> str:
        """What it prints. It must succeed."""
        with self.start(command, site, key) as process:
            printed, _ = process.communicate(timeout=allowed(SECONDS))
        assert process.returncode == 0, f"{command}: {printed}"
        return printed

    @contextmanager
    def start(self, command: str, site: str = "", key: str = "") -> Iterator[subprocess.Popen[str]]:
        """Start it, at a site if one is given. It is killed at the end, if it has not ended."""
        if command in self.left:
            self.left.remove(command)
        else:
            assert any(command == one for block in blocks(PAGE) for one in commands(block)), command
        words = shlex.split(command.replace(FOLDER, str(self.folder)).replace("KEY", key))
        if site:
            words = [*shlex.split(f"{SITES} enter {site}"), *words]
        words = [sys.executable if word == "python" else word for word in words]
        words = [
            str(ROOT / word) if word.startswith(("benchmarks/", "examples/", "docs/")) else word
            for word in words
        ]
        with subprocess.Popen(
            words,
            cwd=self.folder if site else ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if "tunnel" not in words else None,
            text=True,
        ) as process:
            timer = threading.Timer(allowed(LONGEST), process.kill)
            timer.start()
            try:
                yield process
            finally:
                timer.cancel()
                process.kill()


def stop(process: subprocess.Popen[str]) -> None:
    """Press Ctrl-C, and wait until it has cleaned up."""
    process.send_signal(signal.SIGINT)
    process.wait(allowed(SECONDS))


class Site:
    """A launcher at a site, whose lines are kept."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process, self._log = process, log
        assert process.stdout is not None
        self._lines = process.stdout
        self.text = ""

    def read_until(self, text: str) -> None:
        """Read lines until one has this text."""
        while text not in self.text.rpartition("\n")[2]:
            line = self._lines.readline()
            assert line, f"expected {text}, got\n{self.text}"
            self.text += f"\n{line.rstrip()}"

    def end(self) -> int:
        self.text += self._lines.read()
        return self.process.wait(allowed(SECONDS))


@pytest.mark.slow
@pytest.mark.usefixtures("wide_area")
def test_a_reader_trains_over_the_guides_link(tmp_path: Path) -> None:
    check_wireguard()
    reader = Reader(tmp_path / "two_sites")
    reader.run("cp -r examples/two_sites build/two_sites")
    reader.run("cp docs/design.md build/two_sites/text.txt")
    reader.run("python build/two_sites/make_model.py build/two_sites/model")
    with ExitStack() as stack:
        sites = stack.enter_context(reader.start(SITES))
        assert sites.stdout is not None
        for line in ("edge: 10.88.0.1\n", "cloud: 10.88.0.2\n"):
            printed = sites.stdout.readline()
            assert printed == line, printed + sites.communicate()[0]
        stack.callback(stop, sites)
        connect(reader, stack)
        train(reader)
        reader.run("python -m ldt merge checkpoints/edge checkpoints/cloud tuned.safetensors", "edge")
    check_weights(tmp_path / "two_sites")
    assert reader.left == [f"{SITES} enter edge", f"{SITES} enter cloud", f"cd {FOLDER}"], "which start does"


def connect(reader: Reader, stack: ExitStack) -> None:
    edge = reader.run("python -m ldt tunnel job.toml --site edge", "edge").strip()
    cloud = reader.run("python -m ldt tunnel job.toml --site cloud --peer KEY", "cloud", edge).strip()
    reader.run("python -m ldt tunnel job.toml --site edge --peer KEY", "edge", cloud)
    for site in ("edge", "cloud"):
        reader.run(f"wg-quick up ./wg-{site}.conf", site)
        enter = [sys.executable, str(ROOT / "benchmarks/two_sites.py"), "enter", site]
        stack.callback(subprocess.run, [*enter, "ip", "link", "delete", f"wg-{site}"], check=False)
    with (
        reader.start("python -m ldt doctor --link job.toml --site edge", "edge") as first,
        reader.start("python -m ldt doctor --link job.toml --site cloud", "cloud") as second,
    ):
        reports = [process.communicate(timeout=allowed(SECONDS))[0] for process in (first, second)]
    assert reports[0] == reports[1]
    assert reports[0].endswith("The link has what a job needs.\n"), reports[0]
    assert "MTU            edge 1420; cloud 1420\n" in reports[0]


def train(reader: Reader) -> None:
    with launched(reader) as (edge, cloud):
        edge.read_until("step 25 loss")
        reader.run(f"{SITES} pull 20")
        edge.read_until("step 55 loss")
        edge.process.send_signal(signal.SIGINT)
        assert [edge.end(), cloud.end()] == [130, 1], edge.text + cloud.text
    (seconds,) = re.findall(r"site edge was down, or a rank was stopped, for ([0-9.]+) s", cloud.text)
    assert 19 < float(seconds) < 60, "to notice that the link is back takes as long again, at most"
    assert "[cloud] the job is over: SIGINT at edge" in cloud.text
    first = losses(edge.text)
    with launched(reader) as (edge, cloud):
        assert [edge.end(), cloud.end()] == [0, 0], edge.text + cloud.text
    second = losses(edge.text)
    assert [*first] == list(range(1, len(first) + 1)), "no step is lost in the outage"
    assert [*second] == list(range(51, 101)), "from the newest save to the end"
    assert all(second[step] == first[step] for step in first.keys() & second.keys())
    assert second[100] < 0.8 * first[1]


@contextmanager
def launched(reader: Reader) -> Iterator[tuple[Site, Site]]:
    command = "python -m ldt launch job.toml --site {} --max-restarts 3"
    with (
        reader.start(command.format("edge"), "edge") as edge,
        reader.start(command.format("cloud"), "cloud") as cloud,
    ):
        yield Site(edge, reader.folder), Site(cloud, reader.folder)


def losses(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss ([0-9.]+)", text)}


def check_weights(folder: Path) -> None:
    """They are those of the unsplit model, trained without a break, bit for bit."""
    from safetensors.torch import load_file
    from transformers import LlamaForCausalLM

    microbatches = runpy.run_path(str(folder / "finetune.py"))["microbatches"]
    model = LlamaForCausalLM.from_pretrained(folder / "model")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = (folder / "text.txt").read_bytes()
    for step in range(100):
        tokens = 0
        for inputs, labels in microbatches(text, step, 4):
            loss, count = hf.token_loss(model(**inputs).logits, labels)
            loss.backward()
            tokens += int(count)
        for parameter in model.parameters():
            parameter.grad.div_(tokens)
        optimizer.step()
        optimizer.zero_grad()
    found, expected = load_file(folder / "tuned.safetensors"), model.state_dict()
    assert found.keys() == expected.keys()
    assert not [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
