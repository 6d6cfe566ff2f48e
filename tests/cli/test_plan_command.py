"""``python -m ldt plan``: the comparison it prints, the files it writes, one sentence per error."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ldt.cli import main
from ldt.cli.compressed_costs import compressed
from ldt.plan import Costs, Plan, from_csv, simulate, verify
from ldt.topology import Topology

ARGUMENTS = ["plan", "--stages", "1,1,1", "--microbatches", "8", "--forward", "10ms", "--latency", "20ms"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows(output: str) -> dict[str, list[str]]:
    """The table, by the name of the plan."""
    lines = [line.split("  ") for line in output.splitlines() if "  " in line]
    return {line[0].strip(): [cell.strip() for cell in line[1:] if cell.strip()] for line in lines}


def test_the_comparison(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--activation-bytes", "1MiB", "--to-csv", "best.csv"]) == 0
    table = rows(capsys.readouterr().out)
    assert list(table) == ["plan", "ushape", "optimize", "optimize, split backward"]
    assert table["plan"] == ["makespan", "bubble", "kept at most", "lower bound", "over it"]
    ratios = {name: float(row[4]) for name, row in table.items() if name != "plan"}
    assert ratios["ushape"] > 1.2
    assert ratios["optimize"] == 1.0
    plan = Plan.from_text((folder / "ldt-plan.txt").read_text())
    verify(plan)
    costs = Costs(0.01, 0.02, latency=0.02)
    best = min(float(row[0].split()[0]) for name, row in table.items() if name != "plan")
    assert simulate(plan, costs).makespan * 1e3 == pytest.approx(best, rel=1e-3)
    assert "MiB)" in table["optimize"][2]
    assert from_csv((folder / "best.csv").read_text(), Topology([1, 1, 1])).num_microbatches == 8
    assert (folder / "ldt-plan.png").stat().st_size > 10_000


def test_what_compression_gains(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [*ARGUMENTS, "--no-split", "--bandwidth", "1Gbit", "--bytes", "4MiB", "--compression", "8bit"]
    assert main(given) == 0
    before, after = capsys.readouterr().out.split('with compression="8bit"\n')
    times = [float(rows(part)["optimize"][0].split()[0]) for part in (before, after)]
    plan = Plan.from_text((folder / "ldt-plan.txt").read_text())
    size = 4 * 2**20
    # Each chunk is at one end of 4 MiB that are packed at 0.15 ms a MiB, in either direction.
    edge = size * 130 / 512
    costs = Costs(0.01 + 6e-4, 0.02 + 6e-4, latency=0.02, bandwidth=1.25e8, bytes=[edge, size, edge])
    assert simulate(plan, costs).makespan * 1e3 == pytest.approx(times[1], rel=1e-3)
    assert times[1] < 0.9 * times[0]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--compression", "8bit"], "--compression needs --bandwidth and --bytes"),
        (
            ["--compression", "bf16", "--dtype", "float16"],
            "--compression bf16 packs float32, got --dtype float16",
        ),
        (["--pack", "1ms"], "--pack needs --compression"),
        *(
            (["--bandwidth", "1Gbit", "--compression", "8bit", *wrong], sentence)
            for wrong, sentence in (
                (["--bytes", "4MiB,4MiB"], "bytes needs one number for each of the 3 hops, got 2"),
                (
                    ["--bytes", "4MiB", "--forward", "1s,1s"],
                    "forward needs one number for each of the 4 chunks",
                ),
            )
        ),
    ],
)
def test_compression_that_changes_nothing_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], given: list[str], sentence: str
) -> None:
    assert main([*ARGUMENTS, *given]) == 2
    assert sentence in capsys.readouterr().err


def test_the_best_plan_keeps_to_the_limit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["plan", "--stages", "1,1", "--microbatches", "8", "--forward", "1ms", "--latency", "10ms"]
    assert main([*given, "--memory-limit", "2"]) == 0
    assert "ushape does not keep to the memory limit" in capsys.readouterr().out
    plan = Plan.from_text((folder / "ldt-plan.txt").read_text())
    assert max(simulate(plan, Costs(0.001, 0.002, latency=0.01)).peak_live.values()) == 2


def test_an_edge_that_is_shared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--forward", "2ms,10ms,10ms,2ms", "--dp", "4", "--edge-dp", "2"]) == 0
    output = capsys.readouterr().out
    assert "tp=1,1,1 dp=4 edge_dp=2 laps=1, 8 microbatches" in output
    assert float(rows(output)["optimize"][4]) < float(rows(output)["ushape"][4])
    plan = Plan.from_text((folder / "ldt-plan.txt").read_text())
    verify(plan)
    assert plan.topology == Topology([1, 1, 1], dp=4, edge_dp=2)


def test_a_pipe_that_is_shared_and_one_for_each_site(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    linked = [*ARGUMENTS, "--bandwidth", "200Mbit", "--bytes", "1MiB", "--no-split"]
    times = []
    for more in (
        [],
        ["--sites", "office,east,west"],
        ["--bandwidth-down", "1Gbit"],
        ["--bytes-backward", "4MiB"],
    ):
        assert main([*linked, *more]) == 0
        output = capsys.readouterr().out
        assert ("sites=office,east,west, 8 microbatches" in output) == ("--sites" in more)
        times.append(rows(output)["optimize"][0])
        plan = Plan.load(folder / "ldt-plan.txt")
        assert plan.topology == Topology(
            [1, 1, 1], sites=["office", "east", "west"] if "--sites" in more else None
        )
    assert len(set(times)) == 4


def test_the_other_direction_of_measured_costs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Costs(0.01, 0.02, bandwidth={"up": 25e6, "down": 1}, bytes={"forward": 1 << 20, "backward": 0}).save(
        "costs.json"
    )
    given = ["plan", "--stages", "1,1", "--microbatches", "4", "--no-split"]
    assert (
        main([*given, "--costs", "costs.json", "--bandwidth-down", "1Gbit", "--bytes-backward", "1MiB"]) == 0
    )
    from_file = rows(capsys.readouterr().out)
    both = ["--bandwidth", "200Mbit", "--bandwidth-down", "1Gbit", "--bytes", "1MiB"]
    assert main([*given, "--forward", "10ms", *both]) == 0
    assert rows(capsys.readouterr().out) == from_file


def test_a_plan_of_another_engine_is_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([*ARGUMENTS, "--to-csv", "best.csv"])
    before = rows(capsys.readouterr().out)["optimize"]
    assert (
        main([*ARGUMENTS, "--from-csv", "best.csv", "--grid", "--plan", "other.txt", "--picture", "p.svg"])
        == 0
    )
    output = capsys.readouterr().out
    assert rows(output)["from best.csv"][0] == before[0]
    assert "0.0 | " in output
    assert (folder / "p.svg").read_text().startswith("<?xml")
    assert (folder / "other.txt").exists()


def test_measured_costs_and_what_overrides_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Costs(0.01, 0.02, latency=0.02).save("costs.json")
    given = ["plan", "--stages", "1,1", "--microbatches", "4", "--costs", "costs.json"]
    times = []
    for more in ([], ["--latency", "0"], ["--bandwidth", "1Gbit", "--bytes", "4MiB"], ["--laps", "3"]):
        assert main([*given, *more]) == 0
        times.append(rows(capsys.readouterr().out)["optimize"][0])
    assert len(set(times)) == 4


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--forward 1ms,2ms", "forward needs one number for each of the 4 chunks, got 2"),
        ("--microbatches 0", "num_microbatches must be an int of at least 1, got 0"),
        ("--stages 1,0", "tp[1] must be"),
        ("--plan nowhere/plan.txt", "there is no folder nowhere to write plan.txt to"),
        ("--picture nowhere/a.png", "there is no folder nowhere to write a.png to"),
        ("--picture a.txt", "--picture needs a name that ends in .png or .svg, got a.txt"),
        (f"--costs {sys.executable}", f"{sys.executable} is not a text file"),
        (f"--from-csv {sys.executable}", f"{sys.executable} is not a text file"),
        ("--plan a.png --picture a.png", "a.png is named twice"),
        ("--bandwidth 1Gbit", "--bandwidth and --bytes go together"),
        ("--bytes 1MiB", "--bandwidth and --bytes go together"),
        ("--bandwidth-down 1Gbit", "--bandwidth-down needs --bandwidth, or a file with --costs that has it"),
        ("--bytes-backward 1MiB", "--bytes-backward needs --bytes, or a file with --costs that has it"),
        ("--sites 0,1", "sites needs the site of each of the 3 stages"),
        ("--sites 0,1,0", "sites[2] is that of stage 0, 0: the edge needs a site of its own"),
        ("--sites 0,,1", "sites[1] must be a number from 0 to 999999 or a name"),
        ("--sites 0,\u0661,1", "sites[1] must be a number from 0 to 999999 or a name"),
        ("--memory-limit 1", "the smallest that works is 2"),
        ("--dp 3 --edge-dp 2", "edge_dp=2 does not divide dp=3"),
        ("--dp 2 --edge-dp 1 --to-csv a.csv", "torch's CSV has one row for all replicas of a stage"),
        ("--from-csv nowhere.csv", "nowhere.csv"),
        ("--costs nowhere.json", "nowhere.json"),
        ("--memory-limit-bytes 1MiB", "activation"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: str, sentence: str
) -> None:
    assert main([*ARGUMENTS, *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert len(captured.err.splitlines()) == 1
    assert not any(folder.iterdir())


def test_costs_are_needed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--stages", "1,1", "--microbatches", "2"]) == 2
    assert "--forward 12ms" in capsys.readouterr().err


def test_whole_backwards_only(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--no-split"]) == 0
    assert list(rows(capsys.readouterr().out)) == ["plan", "ushape", "optimize"]
    assert "1W0" not in (folder / "ldt-plan.txt").read_text()


def test_no_picture_without_matplotlib(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(ARGUMENTS) == 0
    captured = capsys.readouterr()
    assert "pip install 'ldt-torch[plot]'" in captured.err
    assert "wrote ldt-plan.txt\n" in captured.out


def test_a_plan_with_room_for_late_messages_is_preferred(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On time the whole backward is faster, with late messages the split one."""
    given = [
        "plan",
        "--stages",
        "1,1",
        "--microbatches",
        "16",
        "--forward",
        "3ms,12ms,12ms",
        "--latency",
        "20ms",
    ]
    given += ["--bandwidth", "1Gbit", "--bytes", "1MiB"]
    assert main(given) == 0
    assert "all late" not in capsys.readouterr().out
    assert main([*given, "--jitter", "10ms,50ms"]) == 0
    table = rows(capsys.readouterr().out)
    assert table["plan"][5] == "all late"
    on_time, late = (
        {name: float(table[name][column].split()[0]) for name in ("optimize", "optimize, split backward")}
        for column in (0, 5)
    )
    assert min(on_time, key=on_time.__getitem__) == "optimize"
    assert min(late, key=late.__getitem__) == "optimize, split backward"
    plan = Plan.from_text((folder / "ldt-plan.txt").read_text())
    forward = [0.003, 0.012, 0.012]
    costs = Costs(forward, [2 * f for f in forward], latency=[0.03, 0.07], bandwidth=125e6, bytes=1 << 20)
    assert simulate(plan, costs).makespan * 1e3 == pytest.approx(min(late.values()), rel=1e-3)


def test_one_stage_has_nothing_to_pack() -> None:
    costs = Costs(1, 2, bandwidth=1, bytes=8)
    assert compressed(costs, Topology([1]), "8bit", "float32", pack=1.0) == replace(
        costs, forward=(1, 1), backward=(2, 2), weight=(1, 1), bytes=(8,)
    )


def test_packing_takes_time_at_both_ends() -> None:
    """Of the parts of a split backward, the one that passes gradients on."""
    topology = Topology([1, 1, 1])
    costs = Costs(
        1, 4, bandwidth=1, bytes={"forward": [512, 9, 1024], "backward": [1024, 9, 512]}, input=[3] * 4
    )
    packed = compressed(costs, topology, "8bit", "float32", pack=2 / 512)
    assert packed.bytes == {"forward": (130, 9, 260), "backward": (260, 9, 130)}
    assert packed.forward == (2, 2, 3, 3)
    assert packed.backward == (6, 6, 5, 5)
    assert packed.input == (5, 5, 4, 4)
    assert packed.weight == (2, 2, 2, 2)
