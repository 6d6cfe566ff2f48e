"""A hook of MkDocs: the page of the command line is the help texts of its parsers."""

from __future__ import annotations

import argparse
import os
from typing import Any

from ldt.cli import COMMANDS, build_parser

PLACEHOLDER = "<!-- commands -->"

os.environ["COLUMNS"] = "96"  # the width of help texts, whatever the terminal's


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put a section for each command where the placeholder is."""
    return markdown.replace(PLACEHOLDER, "\n\n".join(map(_section, COMMANDS)))


def _section(command: str) -> str:
    return f"## {command}\n\n```text\n{_parser(command).format_help()}```"


def _parser(command: str) -> argparse.ArgumentParser:
    """The parser of ``command``, as ``python -m ldt COMMAND --help`` shows it."""
    choices = next(
        action.choices for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)
    )
    return choices[command]
