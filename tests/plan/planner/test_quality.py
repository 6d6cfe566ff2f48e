"""The numbers of docs/planner.md. Simulated times are the same on every machine, so they can be asserted."""

import importlib.util
import statistics
import sys
from pathlib import Path

import pytest

from ldt.plan import optimize, remove_communication, simulate

_FILE = Path(__file__).parents[3] / "benchmarks" / "plan_quality.py"
_SPEC = importlib.util.spec_from_file_location("plan_quality", _FILE)
quality = sys.modules["plan_quality"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(quality)

EXACT = 1 + 1e-9  # for rounding


@pytest.mark.parametrize("microbatches", [8, pytest.param(32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("laps", [1, 2])
def test_every_setting_reaches_the_bound(laps, microbatches):
    """No plan is below the bound, so these are optimal."""
    for setting in quality.settings(laps, microbatches):
        ratio = quality.planned(setting).makespan / quality.bound(setting)
        assert 1 / EXACT <= ratio <= EXACT, setting


@pytest.mark.parametrize(("laps", "most_stages", "most_served"), [(1, 4, 4), (2, 3, 2)])
def test_a_shared_edge_reaches_the_bound(laps, most_stages, most_served):
    """The fixed order is nearly optimal, too, as long as there is no latency to hide."""
    for setting in quality.shared_settings(laps):
        if setting.stages <= most_stages and setting.served <= most_served:
            assert 1 / EXACT <= quality.planned(setting).makespan / quality.bound(setting) <= EXACT, setting
            if setting.latency == 0:
                assert quality.fixed(setting).makespan <= 1.005 * quality.bound(setting)


def test_a_shared_pipe_is_near_its_bound():
    """The bound looks at one pipe or node at a time: it is too low where they have equal work."""
    for setting in quality.pipe_settings(16):
        if setting.stages <= 3 and setting.served == 1:
            ratio = quality.planned(setting).makespan / quality.bound(setting)
            assert 1 / EXACT <= ratio <= (1.02 if setting.pipe == 1 else 1.005), setting


def test_where_flows_meet_the_plan_is_near_the_bound():
    for setting in quality.meeting_settings():
        if setting.latency == 0 and setting.served == 1:
            plan = optimize(setting.topology, setting.microbatches, setting.costs)
            makespan = simulate(plan, setting.costs).makespan
            assert 1 / EXACT <= makespan / quality.bound(setting) <= 1.02, setting
            alone = simulate(remove_communication(plan), setting.costs).makespan
            assert makespan <= EXACT * alone, "messages wait for buffers"


@pytest.mark.parametrize(
    ("sizes", "latency", "optima"),
    [
        ({"stages": 3, "served": 2}, 0, {8: 31, 16: 55}),
        ({"stages": 3, "served": 2}, 2, {8: 40.25, 16: 64.25}),
        ({"stages": 2, "laps": 2}, 0, {4: 32, 8: 56, 16: 104}),
        ({"stages": 2, "laps": 2}, 2, {4: 44.5, 8: 63, 16: 111}),
        ({"stages": 3, "laps": 2}, 0, {4: 35, 8: 59.5}),
        ({"stages": 3, "laps": 2}, 2, {4: 58.5, 8: 70.5, 16: 118.5}),
        ({"stages": 3, "edges": 2}, 0, {4: 20, 8: 32, 16: 56}),
        ({"stages": 3, "edges": 2}, 2, {4: 30.75, 8: 41.25, 16: 65.25}),
        ({"stages": 3, "edges": 2, "served": 2}, 2, {4: 28.125, 8: 39.625}),
    ],
)
def test_where_flows_meet_the_bound_is_near_the_optimum(sizes, latency, optima):
    """Optima that a constraint solver has proven, by microbatches per cloud replica."""
    for microbatches, optimum in optima.items():
        served = sizes.get("served", 1)
        setting = quality.Setting(
            **{"laps": 1} | sizes,
            microbatches=microbatches * served,
            edge=0.5 / served,
            latency=latency,
            pipe=1.0,
        )
        assert quality.bound(setting) <= optimum * EXACT, setting
        assert quality.bound(setting) >= (0.98 if microbatches == 16 else 0.95) * optimum, setting


def test_what_the_fixed_order_loses():
    """The latency is one forward, with three or more stages."""
    for setting in quality.settings(1, 32):
        if setting.latency == 1 and setting.stages > 2:
            assert 1.1 < quality.fixed(setting).makespan / quality.bound(setting) < 1.45


@pytest.mark.parametrize("stages", [4, 8])
@pytest.mark.parametrize("microbatches", [8, 32])
def test_a_split_backward_idles_a_third(stages, microbatches):
    """Idle time per node without latency, edge and cloud with equal work, against the fixed order's."""
    setting = quality.Setting(1, microbatches, stages, 0.5, 0.0)
    fixed, split = quality.fixed(setting), quality.planned(setting, split_backward=True)
    assert split.bubble * split.makespan <= fixed.bubble * fixed.makespan / 3
    assert split.makespan <= EXACT * quality.bound(setting, split_backward=True)


@pytest.mark.parametrize("laps", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_split_backward_is_near_its_bound(laps):
    ratios = [
        quality.planned(setting, split_backward=True).makespan / quality.bound(setting, split_backward=True)
        for setting in quality.settings(laps, 8)
    ]
    assert max(ratios) <= 1.05
    assert statistics.fmean(ratios) <= 1.01


@pytest.mark.parametrize("laps", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_memory_buys_time(laps):
    """With the fixed order's own peak it is no slower, and each additional half of it makes it no slower."""
    for stages in (3, 4):
        setting = quality.Setting(laps, 32, stages, 0.5, 2.0)
        fixed = quality.fixed(setting).makespan / quality.bound(setting)
        ratios = [quality.limited(setting, times) for times in (1, 1.5, 2, 6)]
        assert sorted([fixed, *ratios], reverse=True) == [fixed, *ratios]
        assert ratios[-1] <= EXACT
