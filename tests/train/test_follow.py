"""The edge leads and the cloud follows: weights of the unsplit model, and every refusal on every rank."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ldt
from ldt.testing import RankPool, toy_chunks, toy_loss, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 4
TOPOLOGY = Topology([1, 1, 1])
ACCUMULATE = 2


def optimizer_of(parameters: Any) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def unsplit(topology: Topology, steps: int, max_norm: float | None) -> tuple[list[nn.Module], list[float]]:
    """The model after training, with a norm for each update."""
    model = nn.ModuleList(toy_chunks(topology))
    optimizer, scheduler = optimizer_of(model.parameters())
    norms = []
    for step in range(steps):
        for x, target in toy_microbatches(4, seed=step):
            (toy_loss(nn.Sequential(*model)(x), target) / 4).backward()
        if step % ACCUMULATE == ACCUMULATE - 1:
            if max_norm is not None:
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return list(model), norms


def connected(topology: Topology) -> tuple[ldt.Mesh, ldt.Pipeline, list[nn.Module], tuple[Any, Any]]:
    chunks = toy_chunks(topology)
    mesh = ldt.connect(topology, ranks=range(topology.world_size))
    mine = [chunks[index] for index in topology.chunks_of(mesh.stage)]
    pipeline = ldt.Pipeline(mine, mesh, loss_fn=toy_loss if mesh.is_edge else None)
    return mesh, pipeline, chunks, optimizer_of(pipeline.parameters())


def training(topology: Topology, max_norm: float | None) -> None:
    expected, norms = unsplit(topology, 6, max_norm)
    mesh, pipeline, chunks, (optimizer, scheduler) = connected(topology)
    with mesh:
        if not mesh.is_edge:
            ldt.follow(pipeline, optimizer, scheduler)
        else:
            batches = [toy_microbatches(4, seed=step) for step in range(6)]
            found = []
            with ldt.Leader(pipeline, optimizer, scheduler) as leader:
                for step, batch in enumerate(batches):
                    update = step % ACCUMULATE == ACCUMULATE - 1
                    result = leader.step(batch, update=update, max_norm=max_norm if update else None)
                    assert (result.grad_norm is None) == (not update or max_norm is None)
                    if result.grad_norm is not None:
                        found.append(float(result.grad_norm))
            assert found == pytest.approx(norms, rel=1e-6)
        # Gradients of replicas are added to those from before after their reduction, so in another order.
        same = torch.equal if max_norm is None and topology.dp == 1 else torch.allclose
        for index in topology.chunks_of(mesh.stage):
            for got, wanted in zip(chunks[index].parameters(), expected[index].parameters(), strict=True):
                assert same(got, wanted)
                assert got.grad is None


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize(
    "topology",
    [TOPOLOGY, Topology([1, 2]), Topology([2, 1]), Topology([1, 1], dp=2)],
    ids=Topology.to_text,
)
def test_weights_are_those_of_the_unsplit_model(
    pool: RankPool, topology: Topology, max_norm: float | None
) -> None:
    pool.run(training, topology, max_norm, ranks=range(topology.world_size))


# -- other calls -------------------------------------------------------------------------------------------------


def all_calls(folder: str, restart: bool) -> list[Any]:
    """Train two steps and save, or load that; then one more. The cloud's part is one call."""
    mesh, pipeline, _, (optimizer, scheduler) = connected(TOPOLOGY)
    path = Path(folder) / f"stage-{mesh.stage}"
    with mesh:
        if not mesh.is_edge:
            ldt.follow(pipeline, optimizer, scheduler, checkpoints=path)
            return [chunk.training for chunk in pipeline.chunks] + weights(pipeline)
        batches = [toy_microbatches(2, seed=seed) for seed in range(3)]
        with ldt.Leader(pipeline, optimizer, scheduler) as leader:
            if restart:
                loaded = leader.load(path)
                assert loaded is not None
                assert (loaded.step, loaded.position) == (2, [2])
            else:
                assert leader.load(path) is None
                leader.step(batches[0], upcoming=batches[1])
                leader.step(batches[1])
                leader.save(path, step=2, position=[2])
            leader.train(False)
            result = leader.eval(batches[0], keep_outputs=False)
            assert result.outputs is None
            stats = leader.gather_stats(result)
            assert stats is not None
            assert [each.rank for each in stats] == [0, 1, 2]
            leader.train()
            leader.train(False)
            result = leader.step(batches[2], keep_outputs=True)
            assert len(result.outputs or ()) == 2
            leader.close()
            leader.close()
        return [chunk.training for chunk in pipeline.chunks] + weights(pipeline)


def without_what_was_dropped() -> None:
    """A step whose gradients are dropped, then one that updates: as if only that one had been."""
    expected, _ = unsplit(TOPOLOGY, 2, None)
    mesh, pipeline, chunks, (optimizer, scheduler) = connected(TOPOLOGY)
    with mesh:
        if not mesh.is_edge:
            ldt.follow(pipeline, optimizer, scheduler)
        else:
            with ldt.Leader(pipeline, optimizer, scheduler) as leader:
                with pytest.raises(ValueError, match="run one first"):
                    leader.gather_stats(ldt.StepResult(None))  # type: ignore[arg-type]
                leader.step(toy_microbatches(4, seed=7), update=False)
                leader.zero_grad()
                leader.step(toy_microbatches(4, seed=0), update=False)
                leader.step(toy_microbatches(4, seed=1))
        for index in TOPOLOGY.chunks_of(mesh.stage):
            for got, wanted in zip(chunks[index].parameters(), expected[index].parameters(), strict=True):
                assert torch.equal(got, wanted)


def test_gradients_can_be_dropped(pool: RankPool) -> None:
    pool.run(without_what_was_dropped, ranks=range(3))


def weights(pipeline: ldt.Pipeline) -> list[Any]:
    return [parameter.detach().clone() for parameter in pipeline.parameters()]


def test_save_load_modes_and_statistics(pool: RankPool, tmp_path: Path) -> None:
    first = pool.run(all_calls, str(tmp_path), False, ranks=range(3))
    again = pool.run(all_calls, str(tmp_path), True, ranks=range(3))
    for one, other in zip(first, again, strict=True):
        assert one[:1] == other[:1] == [False]
        pairs = zip(one, other, strict=True)
        assert all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor))


def messages(follows: bool) -> list[tuple[int, int]]:
    """The number and bytes of the edge's messages in the third of three equal steps."""
    mesh, pipeline, _, (optimizer, _) = connected(TOPOLOGY)
    batch = toy_microbatches(2)
    sent: list[int] = []
    with mesh:
        if mesh.is_edge:
            outbox = mesh.edge_broadcast._outbox
            assert outbox is not None
            send = outbox.send
            outbox.send = lambda message: (sent.append(message.nbytes), send(message))[1]  # type: ignore[method-assign, func-returns-value]
        if not follows:
            for _ in range(3):
                pipeline.step(batch if mesh.is_edge else None)
        elif not mesh.is_edge:
            ldt.follow(pipeline, optimizer)
        else:
            leader = ldt.Leader(pipeline, optimizer)
            for _ in range(3):
                leader.step(batch)
            number = len(sent)
            leader.close()
            assert len(sent) == number + 1
            del sent[-1]
    return [(len(sent), sent[-1])] if sent else []


def test_a_step_has_no_message_of_its_own_for_followers(pool: RankPool) -> None:
    (plain, *_), (followed, *_) = (pool.run(messages, follows, ranks=range(3)) for follows in (False, True))
    ((number, nbytes),) = plain
    assert nbytes == 24
    assert followed[0][0] == number
    assert followed[0][1] < 24 + 200


# -- refusals ----------------------------------------------------------------------------------------------------


MISTAKES: dict[str, Any] = {
    "a step beside the leader": lambda leader: leader.pipeline.step(toy_microbatches(2)),
    "a save beside the leader": lambda leader: ldt.save_checkpoint("unused", leader.pipeline, step=1),
    "another leader": lambda leader: ldt.Leader(leader.pipeline),
    "an announced step that is not made": lambda leader: leader.step(
        toy_microbatches(2), upcoming=toy_microbatches(2)
    ),
    "a mesh closed early": lambda leader: leader.pipeline.mesh.close(),
}


def lead(leader: ldt.Leader, how: str) -> None:
    batch = toy_microbatches(2)
    if how == "a bad batch":
        with pytest.raises(ValueError, match="the list of microbatches is empty"):
            leader.step([])
    elif how == "a save without a folder":
        with pytest.raises(ldt.RemoteStageError, match="needs checkpoints= on this rank"):
            leader.save("unused", step=1)
    elif how == "wrong numbers":
        for number in (-1, 1.0, True):
            with pytest.raises((ValueError, TypeError), match="step must be"):
                leader.save("unused", step=number)  # type: ignore[arg-type]
        for norms in ({"max_norm": 1.0, "norm_type": -float("inf")}, {"max_norm": float("nan")}):
            with pytest.raises(ValueError, match="must be positive"):
                leader.step(batch, **norms)
        leader.step(batch, update=1, max_norm=torch.tensor(1))  # type: ignore[arg-type]
        leader.step(batch, update=True, max_norm=1.0)
    elif how in MISTAKES:
        MISTAKES[how](leader)
        return
    elif how == "an error of the edge":
        raise RuntimeError("the edge trips")
    leader.step(batch)


def outcome(how: str) -> str:
    mesh, pipeline, _, (optimizer, _) = connected(TOPOLOGY)
    try:
        with mesh:
            if how == "a leader on the cloud":
                ldt.Leader(pipeline, optimizer)
            elif mesh.is_edge and how == "no leader":
                pipeline.step(toy_microbatches(2))
            elif mesh.is_edge:
                with ldt.Leader(pipeline, optimizer) as leader:
                    lead(leader, how)
            elif mesh.stage == 2 and how == "a rank that steps itself":
                pipeline.step()
            else:
                ldt.follow(pipeline, None if how == "no optimizer" else optimizer)
    except (ldt.LdtError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", ["a bad batch", "a save without a folder", "wrong numbers"])
def test_what_is_called_off_ends_nothing(pool: RankPool, how: str) -> None:
    assert pool.run(outcome, how, ranks=range(3)) == [""] * 3


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("no optimizer", "ldt.follow needs an optimizer"),
        ("a leader on the cloud", "ldt.Leader is for the edge"),
        ("a step beside the leader", "it must call those of ldt.Leader"),
        ("a save beside the leader", "called save_checkpoint\\(\\) itself"),
        ("another leader", "called ldt.Leader or ldt.follow itself"),
        ("an announced step that is not made", "a step was announced .*, so 'close' must wait"),
        (
            "a mesh closed early",
            "the mesh was closed before the ldt.Leader",
        ),
        ("an error of the edge", "the edge trips|RuntimeError"),
        ("no leader", "step\\(\\)"),
        ("a rank that steps itself", "step\\(\\)"),
    ],
)
def test_mistakes_are_named_on_all_ranks(pool: RankPool, how: str, expected: str) -> None:
    for text in pool.run(outcome, how, ranks=range(3), timeout=60):
        assert re.search(expected, text), text


def closed() -> None:
    mesh, pipeline, _, (optimizer, _) = connected(TOPOLOGY)
    with mesh:
        if not mesh.is_edge:
            ldt.follow(pipeline, optimizer)
            return
        leader = ldt.Leader(pipeline, optimizer)
        leader.close()
        for call in (leader.train, lambda: leader.step(toy_microbatches(2))):
            with pytest.raises(ldt.LdtError, match="is closed"):
                call()


def test_a_closed_leader_makes_no_calls(pool: RankPool) -> None:
    pool.run(closed, ranks=range(3))


# -- audit -------------------------------------------------------------------------------------------------------


def audited(folder: str) -> None:
    chunks = toy_chunks(TOPOLOGY)
    with ldt.connect(TOPOLOGY, ranks=range(3)) as mesh:
        mine = [chunks[index] for index in TOPOLOGY.chunks_of(mesh.stage)]
        path = Path(folder) / "audit.jsonl" if mesh.is_edge else None
        pipeline = ldt.Pipeline(mine, mesh, loss_fn=toy_loss if mesh.is_edge else None, audit=path)
        optimizer, _ = optimizer_of(pipeline.parameters())
        if not mesh.is_edge:
            ldt.follow(pipeline, optimizer)
            return
        sent: list[int] = []
        outbox = mesh.edge_broadcast._outbox
        assert outbox is not None
        send = outbox.send
        outbox.send = lambda message: (sent.append(len(message.to_bytes())), send(message))[1]  # type: ignore[method-assign, func-returns-value]
        with ldt.Leader(pipeline, optimizer) as leader:
            leader.train()
            leader.step(toy_microbatches(2))
        assert path is not None
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found = [line for line in lines if "channel" not in line]
        assert [line["bytes"] for line in found] == sent
        assert [line["purpose"] for line in found].count("command") == 2


def test_the_audit_has_the_bytes_of_commands(pool: RankPool, tmp_path: Path) -> None:
    pool.run(audited, str(tmp_path), ranks=range(3))
