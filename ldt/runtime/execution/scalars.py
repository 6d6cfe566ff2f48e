"""A step in a few numbers, for TensorBoard, Weights & Biases or any other log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ldt.runtime.execution.step_result import StepResult, StepStats, Traffic

__all__ = ["scalars"]

_TIMES = ("computing", "waiting", "idle")


def scalars(step: StepResult | StepStats | Sequence[StepStats]) -> dict[str, float]:
    """Return the figures of a step by name. Makes no collective call.

    | Name | Unit | Is |
    |---|---|---|
    | `loss`, `grad_norm`, `metrics/NAME` | | of a `StepResult` on the edge that has them; metrics are means |
    | `auxiliary/NAME` | | likewise, the losses of `ldt.add_loss` |
    | `step/seconds` | s | duration of the step |
    | `step/computing`, `step/waiting`, `step/idle` | s | as in `StepStats` |
    | `step/bubble` | 0 to 1 | share of the step that was not `computing` |
    | `link/A_to_B/bytes` | bytes | what site A sent to site B, on the wire |
    | `link/A_to_B/bytes_per_second` | bytes/s | the same, by the duration of the step |
    | `link/A_to_B/compression` | 1 or more | bytes before compression by bytes on the wire |
    | `link/outages` | | how often a link was down and is back: `StepStats.outages` |
    | `node/S.R/computing` and so on | s | of the node with stage S, replica R |

    Sites are those of ``Topology(sites=)``: by default 0 is the edge, 1 the cloud. The loss of a device is read, which
    waits for it.

    Args:
        step: The result of a step, or its ``stats``: all is as this rank saw it, and a rank of the edge sees only what
            its own replica sent and received. Or the list that ``gather_stats`` returned: then ``step/`` has the means
            over all nodes, links have the bytes of all replicas, and there is ``node/``.
    """
    if isinstance(step, StepResult):
        return _of_result(step) | scalars(step.stats)
    if isinstance(step, StepStats):
        return _of_times([step]) | _of_links([step])
    leaders = [stats for stats in step if stats.topology.leader_of(stats.node) == stats.rank]
    found = _of_times(leaders) | _of_links(leaders)
    for stats in leaders:
        found |= {f"node/{stats.node}/{name}": float(getattr(stats, name)) for name in _TIMES}
    return found


def _of_result(result: StepResult) -> dict[str, float]:
    found = {"loss": result.loss, "grad_norm": result.grad_norm}
    numbers = {name: float(tensor) for name, tensor in found.items() if tensor is not None}
    for name, tensors in result.metrics.items():
        numbers[f"metrics/{name}"] = sum(float(tensor.float().mean()) for tensor in tensors) / len(tensors)
    return numbers | {f"auxiliary/{name}": float(loss) for name, loss in result.auxiliary.items()}


def _of_times(nodes: Sequence[StepStats]) -> dict[str, float]:
    seconds = max(stats.seconds for stats in nodes)
    means = {name: sum(getattr(stats, name) for stats in nodes) / len(nodes) for name in _TIMES}
    bubble = sum(1 - stats.computing / stats.seconds for stats in nodes if stats.seconds > 0) / len(nodes)
    return {
        "step/seconds": seconds,
        **{f"step/{name}": mean for name, mean in means.items()},
        "step/bubble": max(0.0, bubble),
    }


def _of_links(nodes: Sequence[StepStats]) -> dict[str, float]:
    topology = nodes[0].topology
    traffic: dict[str, Traffic] = {}
    uncompressed: dict[str, int] = {}
    for stats in nodes:  # both ends of a channel count the same messages
        traffic |= stats.channels
        uncompressed |= stats.uncompressed
    sent: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for channel in topology.channels:
        if not topology.is_local(channel) and channel.name in traffic:
            source, target = (topology.sites[node.stage] for node in (channel.source, channel.target))
            size = traffic[channel.name].bytes
            link = sent[f"link/{source}_to_{target}"]
            link[0] += size
            link[1] += uncompressed.get(channel.name, size)
    seconds = max(stats.seconds for stats in nodes)
    found = {"link/outages": float(max(stats.outages for stats in nodes))}
    for name, (size, before) in sent.items():
        found[f"{name}/bytes"] = float(size)
        found[f"{name}/bytes_per_second"] = size / seconds if seconds > 0 else 0.0
        found[f"{name}/compression"] = before / size if size else 1.0
    return found
