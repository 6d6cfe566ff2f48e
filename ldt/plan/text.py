"""Reads and writes the text format of plans: a header, then one line of comma-separated actions per node.

# ldt plan 1
# topology: tp=1,1,1 dp=1 edge_dp=1 laps=1
# microbatches=4 lanes=dedicated mode=train
0.0,0F0,0SEND_F0,0F1,...
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import cast

from ldt.errors import LdtError, PlanError
from ldt.plan.action import Action
from ldt.plan.counts import check_num_microbatches
from ldt.plan.files import check_size, check_text
from ldt.topology import LanePolicy, Node, Topology
from ldt.untrusted import quoted

__all__ = ["from_text", "to_text"]

_MAGIC = "# ldt plan 1"
_TOPOLOGY = "# topology: "
_MODES = {"train": True, "eval": False}
_SETTINGS = re.compile("# +microbatches=([0-9]{1,9}) +lanes=([a-z]+) +mode=(train|eval)")


def to_text(
    topology: Topology,
    num_microbatches: int,
    rows: Mapping[Node, Sequence[Action]],
    lanes: LanePolicy | None,
    training: bool,
) -> str:
    """Return the text of a plan with these fields. See Plan.to_text."""
    mode = "train" if training else "eval"
    lines = [
        _MAGIC,
        _TOPOLOGY + topology.to_text(),
        f"# microbatches={num_microbatches} lanes={lanes or 'none'} mode={mode}",
    ]
    lines += [",".join([str(node), *map(str, row)]) for node, row in rows.items()]
    return "\n".join(lines) + "\n"


def from_text(text: str) -> tuple[Topology, int, dict[Node, list[Action]], LanePolicy | None, bool]:
    """Return the fields of a plan, in the order of ``to_text``. See Plan.from_text."""
    check_text(text)
    lines = text.splitlines()
    if len(lines) < 3 or lines[0].strip() != _MAGIC or not lines[1].startswith(_TOPOLOGY):
        raise PlanError(
            f"expected a plan that starts with {_MAGIC!r} and a topology line, got {quoted(text)}"
        )
    try:
        topology = Topology.from_text(lines[1][len(_TOPOLOGY) :])
        num_microbatches, lanes, training = _settings(lines[2])
        check_num_microbatches(num_microbatches)
        check_size(topology, num_microbatches, len(text))
    except LdtError as error:
        raise PlanError(f"header of the plan: {error}") from error
    rows: dict[Node, list[Action]] = {}
    for number, line in enumerate(lines[3:], start=4):
        if not line.strip():
            continue
        try:
            label, *cells = line.split(",")
            node = Node.parse(label)
            row = [Action.parse(cell) for cell in cells]
        except LdtError as error:
            raise PlanError(f"line {number} of the plan: {error}") from error
        if node in rows:
            raise PlanError(f"line {number} of the plan: node {node} already has a row")
        rows[node] = row
    return topology, num_microbatches, rows, lanes, training


def _settings(line: str) -> tuple[int, LanePolicy | None, bool]:
    match = _SETTINGS.fullmatch(line.strip())
    if match is None:
        raise PlanError(f"expected '# microbatches=4 lanes=dedicated mode=train', got {quoted(line)}")
    lanes = None if match[2] == "none" else cast("LanePolicy", match[2])
    return int(match[1]), lanes, _MODES[match[3]]
