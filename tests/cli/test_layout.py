"""Which local node gets which layers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.failures import CommandError
from cli.layout import plan_nodes, threads_each


def test_layers_that_stay_at_home_are_not_given_away() -> None:
    assert [plan.layers for plan in plan_nodes(30, 3, local_layers=(1, 0))] == ["1:11", "11:21", "21:30"]
    assert [plan.layers for plan in plan_nodes(30, 2, local_layers=(2, 4))] == ["2:14", "14:26"]


def test_the_thin_mode_gives_every_layer_away_and_its_ends_to_the_outer_nodes() -> None:
    plans = plan_nodes(30, 3, local_layers=(1, 0), is_thin=True)
    assert [(plan.layers, plan.hold_ends) for plan in plans] == [
        ("0:10", True),
        ("10:20", False),
        ("20:30", True),
    ]


def test_more_nodes_than_layers_is_refused_with_the_numbers() -> None:
    with pytest.raises(CommandError, match="3 of the model's 4 layers are left for 5 nodes"):
        plan_nodes(4, 5, local_layers=(1, 0))


@given(st.integers(1, 200), st.integers(1, 64), st.integers(0, 3), st.integers(0, 3), st.booleans())
def test_slices_are_even_and_leave_no_gap(layers: int, nodes: int, first: int, last: int, thin: bool) -> None:
    try:
        plans = plan_nodes(layers, nodes, local_layers=(first, last), is_thin=thin)
    except CommandError:
        return
    sizes = [plan.end - plan.start for plan in plans]
    assert max(sizes) - min(sizes) <= 1
    assert all(before.end == after.start for before, after in pairwise(plans))
    assert (plans[0].start, plans[-1].end) == ((0, layers) if thin else (first, layers - last))


@pytest.mark.parametrize(("cores", "processes", "threads"), [(2, 4, 1), (8, 4, 2), (15, 4, 3), (1, 1, 1)])
def test_processes_share_the_cores_without_outnumbering_them(
    cores: int, processes: int, threads: int
) -> None:
    assert threads_each(processes, cores) == threads
    assert threads_each(processes) >= 1
