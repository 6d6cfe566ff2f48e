"""The documents as data: their fenced blocks, and which test runs each. Nothing else reads documents."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
README = "README.md"

# The page's `python` blocks run in one namespace, in order: see sessions.py.
SESSIONS = {
    "docs/concepts/plans.md": "plain",
    "docs/concepts/stages.md": "plain",
    "docs/contributing/extend.md": "plain",
    "docs/guides/encoders.md": "encoders",
    "docs/guides/failures.md": "job",
    "docs/guides/follow.md": "job",
    "docs/guides/huggingface.md": "hugging_face",
    "docs/guides/lightning.md": "job",
    "docs/guides/links.md": "job",
    "docs/guides/model.md": "job",
    "docs/guides/privacy.md": "job",
    "docs/guides/profiling.md": "job",
    "docs/guides/trainer.md": "hugging_face",
    "docs/guides/unequal.md": "ranks",
}

# Blocks that other tests read from the page and run: the page, a word in the block, the test.
ELSEWHERE = [
    (README, "init_process_group", "tests/docs/test_readme.py"),
    ("docs/start/gpus.md", "train_gpu", "tests/gpu/test_gpus_page_cuda.py"),
    ("docs/start/hosts.md", "job.toml", "tests/docs/test_two_hosts.py"),
    ("docs/start/hosts.md", "ldt.Job", "tests/docs/test_two_hosts.py"),
    ("docs/start/clusters.md", "cloud.sbatch", "tests/launch/test_print_env.py"),
    ("docs/start/clusters.md", "cloud.yaml", "tests/launch/test_print_env.py"),
    ("docs/guides/finetune.md", "recipe.toml", "tests/examples/test_sft_data.py"),
    ("docs/guides/finetune.md", "ldt merge", "tests/examples/test_finetune_sites.py"),
    ("docs/guides/follow.md", "hf.Settings", "tests/integrations/test_hf_build.py"),
    ("docs/guides/follow.md", "[sites.cloud]", "tests/integrations/test_hf_build.py"),
    ("docs/guides/two_sites.md", "[tunnel]", "tests/docs/test_two_sites.py"),
    ("docs/guides/two_sites.md", "merge checkpoints", "tests/docs/test_two_sites.py"),
    ("docs/reliability.md", "PrefixStore", "tests/docs/test_two_hosts.py"),
    ("docs/security.md", "openssl", "tests/security/test_tls.py"),
    ("docs/security.md", "GLOO_DEVICE_TRANSPORT", "tests/security/test_tls.py"),
]

_FENCE = re.compile(r'```(\w*)(?: title="([^"]+)")?\n(.*?)```\n', re.DOTALL)


class Block(NamedTuple):
    """A fenced block of a page. A `text` block directly after another one shows its output."""

    page: str
    line: int
    language: str
    title: str
    text: str
    shows_output: bool


def pages() -> list[str]:
    """Return every document for readers, by its path from the root."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of ``page`` in order."""
    return list(_blocks(page, read(page)))


def _blocks(page: str, text: str) -> Iterator[Block]:
    end = -1
    for match in _FENCE.finditer(text):
        language, title, body = match.groups(default="")
        line = text.count("\n", 0, match.start()) + 2
        behind = language == "text" and end >= 0 and not text[end : match.start()].strip()
        end = match.end()
        yield Block(page, line, language, title, body, behind)


def is_run_elsewhere(block: Block) -> bool:
    return any(page == block.page and word in block.title + block.text for page, word, _ in ELSEWHERE)


def commands(block: Block) -> list[str]:
    """Return the commands of a `sh` block, one line each."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]
