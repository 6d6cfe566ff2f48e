"""Compares the fixed schedule with plans optimized for your link and costs, draws them and writes the fastest."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ldt.cli.compressed_costs import SHARES, compressed
from ldt.cli.table import table
from ldt.cli.units import bandwidth, nbytes, one_or_more, seconds
from ldt.errors import LdtError
from ldt.plan import (
    Costs,
    Kind,
    Plan,
    Timeline,
    draw,
    draw_text,
    from_csv,
    lower_bound,
    optimize,
    simulate,
    to_csv,
    ushape,
)
from ldt.plan.schedules.u_shape import has_ushape
from ldt.plan.torch_csv import check_expressible
from ldt.site import parse_sites
from ldt.topology import Topology

_PACK_SECONDS = 3e-4  # 1 MiB, packed and unpacked
_NAMES = ("ushape", "optimize", "optimize, split backward")
_TIMES, _RATES, _SIZES = one_or_more(seconds), one_or_more(bandwidth), one_or_more(nbytes)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = (
        "example: python -m ldt plan --stages 1,2,2 --microbatches 32 --latency 20ms --bandwidth 1Gbit "
        "--bytes 4MiB --forward 3ms,12ms,12ms,3ms"
    )
    _add_topology(parser.add_argument_group("topology"))
    _add_costs(
        parser.add_argument_group(
            "costs: one value for all, or one per chunk (per hop: latency, jitter, bandwidth, bytes)"
        )
    )
    limits = parser.add_argument_group("memory")
    limits.add_argument(
        "--memory-limit", type=int, metavar="N", help="microbatches that a node may keep at once"
    )
    limits.add_argument(
        "--memory-limit-bytes", type=nbytes, metavar="SIZE", help="bytes, needs --activation-bytes"
    )
    _add_files(parser.add_argument_group("files"))
    parser.add_argument("--no-split", action="store_true", help="plan whole backwards only")
    parser.add_argument("--grid", action="store_true", help="print the fastest plan")


def _add_topology(shape: argparse._ArgumentGroup) -> None:
    shape.add_argument(
        "--stages", type=_numbers, required=True, metavar="TP,...", help="TP size of each stage"
    )
    shape.add_argument("--laps", type=int, help="walks through all stages; default: 1")
    shape.add_argument(
        "--placement",
        type=_numbers,
        metavar="STAGE,...",
        help="stage of each chunk, such as 0,1,1,0, in place of --laps",
    )
    shape.add_argument("--dp", type=int, default=1, help="replicas of the cloud stages")
    shape.add_argument("--edge-dp", type=int, help="replicas of the edge, which share them; default: as many")
    shape.add_argument(
        "--sites",
        type=parse_sites,
        metavar="SITE,...",
        help="site of each stage, such as 0,1,1; what crosses between two shares one pipe; default: edge and cloud",
    )
    shape.add_argument("--microbatches", type=int, required=True, help="of each replica of the edge")
    shape.add_argument("--lanes", choices=("dedicated", "paired"), default="dedicated")


def _add_costs(costs: argparse._ArgumentGroup) -> None:
    costs.add_argument(
        "--costs", type=Path, metavar="FILE", help="what pipeline.measure_costs(...).save(FILE) wrote"
    )
    for name, parse, metavar, text in (
        ("--forward", _TIMES, "TIME", "of one microbatch, such as 12ms"),
        ("--backward", _TIMES, "TIME", "default: twice the forward"),
        ("--latency", _TIMES, "TIME", "one way, such as 20ms"),
        ("--jitter", _TIMES, "TIME", "by which messages may come later; plans leave room for it"),
        ("--bandwidth", _RATES, "RATE", "such as 1Gbit or 125MB/s"),
        ("--bytes", _SIZES, "SIZE", "of one message, such as 4MiB"),
        ("--bandwidth-down", _RATES, "RATE", "from the cloud to the edge; default: as --bandwidth"),
        ("--bytes-backward", _SIZES, "SIZE", "of a gradient; default: as --bytes"),
        ("--activation-bytes", _SIZES, "SIZE", "kept of one microbatch by a chunk"),
    ):
        costs.add_argument(name, type=parse, metavar=metavar, help=text)
    costs.add_argument(
        "--compression",
        choices=tuple(SHARES),
        help="plan for connect(compression=...), too: the plan written is for that",
    )
    costs.add_argument(
        "--pack",
        type=seconds,
        metavar="TIME",
        help="that --compression takes to pack and unpack 1 MiB, half at either end; default: 0.3ms",
    )
    costs.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="of the messages that --compression packs; default: float32",
    )


def _add_files(files: argparse._ArgumentGroup) -> None:
    files.add_argument(
        "--plan",
        type=Path,
        default=Path("ldt-plan.txt"),
        metavar="FILE",
        help="where the fastest plan is written; default: ldt-plan.txt",
    )
    files.add_argument(
        "--picture",
        type=Path,
        default=Path("ldt-plan.png"),
        metavar="FILE",
        help="PNG or SVG of the timelines",
    )
    files.add_argument(
        "--from-csv", type=Path, metavar="FILE", help="compare a plan of torch.distributed.pipelining"
    )
    files.add_argument("--to-csv", type=Path, metavar="FILE", help="the fastest plan in that form, too")


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison and write the files. Returns 2 and prints the error if that fails."""
    try:
        _check_files(arguments)
        topology = Topology(
            arguments.stages,
            arguments.dp,
            arguments.edge_dp,
            arguments.laps,
            arguments.sites,
            arguments.placement,
        )
        if arguments.from_csv is not None or arguments.to_csv is not None:
            check_expressible(topology)
        tables = []
        for title, costs in _cases(arguments, topology):
            plans = _plans(arguments, topology, costs)
            timelines = {name: simulate(plan, costs) for name, plan in plans.items()}
            tables.append(title + _table(plans, timelines, costs))
        within = [
            name for name, timeline in timelines.items() if _keeps_to_limits(arguments, timeline, costs)
        ]
        late = costs.with_every_message_late(topology)
        best = min(within, key=lambda name: (_makespan(plans[name], late), timelines[name].makespan))
        written = _write(arguments, plans[best], timelines)
    except (LdtError, OSError) as error:
        print(f"python -m ldt plan: {error}", file=sys.stderr)
        return 2
    print(f"{topology.to_text()}, {arguments.microbatches} microbatches, {arguments.lanes} lanes")
    print("\n\n".join(tables))
    for name in (name for name in timelines if name not in within):
        print(f"{name} does not keep to the memory limit")
    print(f"wrote {_listed(map(str, written))}")
    if arguments.grid:
        print(f"\n{best}\n{draw_text(timelines[best])}")
    return 0


def _check_files(arguments: argparse.Namespace) -> None:
    """Check before any work that inputs can be read and outputs can be written."""
    if arguments.picture.suffix not in (".png", ".svg"):
        raise LdtError(f"--picture needs a name that ends in .png or .svg, got {arguments.picture}")
    named = [arguments.plan, arguments.picture, arguments.to_csv, arguments.costs, arguments.from_csv]
    paths = [path.absolute() for path in named if path is not None]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise LdtError(f"{twice} is named twice: every file needs a different name")
    for path in filter(None, (arguments.plan, arguments.picture, arguments.to_csv)):
        if not path.absolute().parent.is_dir():
            raise LdtError(f"there is no folder {path.parent} to write {path.name} to")
    for path in filter(None, (arguments.costs, arguments.from_csv)):
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise LdtError(f"{path} is not a text file: {error}") from error


def _cases(arguments: argparse.Namespace, topology: Topology) -> list[tuple[str, Costs]]:
    """The costs to plan for, each with a title: as given and, if asked for, compressed."""
    costs = _costs(arguments)
    if arguments.compression is None:
        if arguments.pack is not None:
            raise LdtError("--pack needs --compression")
        return [("", costs)]
    pack = _PACK_SECONDS if arguments.pack is None else arguments.pack
    packed = compressed(costs, topology, arguments.compression, arguments.dtype, pack / 2**20)
    return [("", costs), (f'with compression="{arguments.compression}"\n', packed)]


def _costs(arguments: argparse.Namespace) -> Costs:
    """Costs from the file, the options, or both. An option overrides the file's figure."""
    names = ("forward", "backward", "latency", "jitter", "bandwidth", "bytes", "activation_bytes")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    if arguments.costs is not None:
        return _by_direction(replace(Costs.load(arguments.costs), **given), arguments)
    if "forward" not in given:
        raise LdtError("give --forward, for example --forward 12ms, or a file of measured costs with --costs")
    given.setdefault("backward", _twice(given["forward"]))
    if ("bandwidth" in given) != ("bytes" in given):
        raise LdtError(
            "--bandwidth and --bytes go together: a message takes its bytes divided by the link's bandwidth"
        )
    return _by_direction(Costs(**given), arguments)


def _by_direction(costs: Costs, arguments: argparse.Namespace) -> Costs:
    """``costs`` with the options for the other direction."""
    for name, one, other in (("bandwidth", "up", "down"), ("bytes", "forward", "backward")):
        figure, given = getattr(costs, name), getattr(arguments, f"{name}_{other}")
        if given is None:
            continue
        if getattr(arguments, name) is None and not figure:  # bytes are 0 by default
            raise LdtError(f"--{name}-{other} needs --{name}, or a file with --costs that has it")
        first = figure[one] if isinstance(figure, Mapping) else figure
        figures: dict[str, Any] = {name: {one: first, other: given}}
        costs = replace(costs, **figures)
    return costs


def _plans(arguments: argparse.Namespace, topology: Topology, costs: Costs) -> dict[str, Plan]:
    number, lanes = arguments.microbatches, arguments.lanes
    limits = {"memory_limit": arguments.memory_limit, "memory_limit_bytes": arguments.memory_limit_bytes}
    plans = {}
    if has_ushape(topology):
        plans[_NAMES[0]] = ushape(topology, number, lanes=lanes)
    if arguments.from_csv is not None:
        read = from_csv(arguments.from_csv.read_text(encoding="utf-8"), topology, lanes=lanes)
        if (read.num_microbatches, read.training) != (number, True):
            raise LdtError(
                f"{arguments.from_csv} has {read.num_microbatches} microbatches, expected {number} to train"
            )
        plans[f"from {arguments.from_csv}"] = read
    splits = (False,) if arguments.no_split else (False, True)
    for name, split in zip(_NAMES[1:], splits):  # noqa: B905 (the last may be left out)
        plans[name] = optimize(topology, number, costs, split_backward=split, lanes=lanes, **limits)
    return plans


def _table(plans: dict[str, Plan], timelines: dict[str, Timeline], costs: Costs) -> str:
    bounds = {
        name: lower_bound(plan.topology, plan.num_microbatches, costs, split_backward=_splits(plan))
        for name, plan in plans.items()
    }
    late = costs.with_every_message_late(next(iter(plans.values())).topology)
    has_jitter = late != costs
    head = [
        "plan",
        "makespan",
        "bubble",
        "kept at most",
        "lower bound",
        "over it",
        *["all late"] * has_jitter,
    ]
    rows = [
        [
            name,
            _duration(timeline.makespan),
            f"{timeline.bubble:.1%}",
            _kept(timeline, costs),
            _duration(bounds[name]),
            f"{timeline.makespan / bounds[name]:.3f}" if bounds[name] else "-",
            *([_duration(_makespan(plans[name], late))] if has_jitter else []),
        ]
        for name, timeline in timelines.items()
    ]
    return table([head, *rows])


def _keeps_to_limits(arguments: argparse.Namespace, timeline: Timeline, costs: Costs) -> bool:
    live, kept = max(timeline.peak_live.values()), max(timeline.peak_bytes(costs).values())
    limits = ((arguments.memory_limit, live), (arguments.memory_limit_bytes, kept))
    return all(limit is None or used <= limit for limit, used in limits)


def _makespan(plan: Plan, costs: Costs) -> float:
    return simulate(plan, costs).makespan


def _splits(plan: Plan) -> bool:
    return any(action.kind is Kind.W for row in plan.rows.values() for action in row)


def _kept(timeline: Timeline, costs: Costs) -> str:
    """The maximum that a node keeps: microbatches, and bytes if the costs have them."""
    text = str(max(timeline.peak_live.values()))
    peak = max(timeline.peak_bytes(costs).values())
    return f"{text} ({peak / 2**20:.0f} MiB)" if peak else text


def _write(arguments: argparse.Namespace, best: Plan, timelines: dict[str, Timeline]) -> list[Path]:
    """Write the files and return their paths."""
    arguments.plan.write_text(best.to_text(), encoding="utf-8")
    written = [arguments.plan]
    if arguments.to_csv is not None:
        arguments.to_csv.write_text(to_csv(best), encoding="utf-8")
        written.append(arguments.to_csv)
    try:
        written.append(draw(timelines, arguments.picture))
    except ImportError as error:
        print(f"no picture: {error}", file=sys.stderr)
    return written


def _listed(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def _duration(value: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if value >= factor:
            return f"{value / factor:.4g} {unit}"
    return f"{value / 1e-6:.4g} µs"


def _twice(forward: float | Sequence[float]) -> float | list[float]:
    return [2 * value for value in forward] if isinstance(forward, Sequence) else 2 * forward


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected TP sizes such as 1,2,2, got {text!r}") from None
