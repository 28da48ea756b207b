"""The table of faults in docs/faults.md, written by the tests that make them.

    OMP_NUM_THREADS=1 python -m tests.faults.table

runs every test below and writes, for each, how many cases were tried and how many were survived.
"""

import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

HEAD = """# Faults tried and survived

Written by `OMP_NUM_THREADS=1 python -m tests.faults.table`, which runs these tests. A fault is survived if the run goes
on from a whole checkpoint bit for bit, or if every rank refuses in one sentence and nothing has changed.
"""
PAGE = Path(__file__).parents[2] / "docs" / "faults.md"


class Fault(NamedTuple):
    """What is done, and the test that does it, below tests/."""

    what: str
    test: str


FAULTS = (
    Fault(
        "a rank killed at each of seven points of a save",
        "faults/test_crash_while_saving.py::test_a_kill_at_every_point",
    ),
    Fault("`LATEST` lost, or naming what is gone", "faults/test_crash_while_saving.py::test_a_lost_pointer_is_no_loss"),
    Fault("a flipped bit in any file", "unit/test_checkpoint.py::test_every_flipped_bit_is_noticed"),
    Fault("truncated, empty, missing, swapped files", "unit/test_checkpoint.py::test_other_damage_is_noticed"),
    Fault("damage that one rank meets", "distributed/test_checkpoint.py::test_damage_is_told_by_all_ranks_alike"),
    Fault("a pickle in the place of a file", "faults/test_hostile.py::test_a_pickle_is_not_executed"),
    Fault("a header that lies about its length", "faults/test_hostile.py::test_a_header_that_lies_about_its_length"),
    Fault("fewer elements than the manifest promises", "faults/test_hostile.py::test_fewer_elements_than_promised"),
    Fault(
        "a manifest that names files outside", "unit/test_checkpoint.py::test_a_hostile_manifest_names_no_file_outside"
    ),
    Fault("a step saved twice, old ones removed", "unit/test_checkpoint.py::test_old_ones_go_and_the_newest_stays"),
    Fault(
        "files of a larger world left in the folder",
        "faults/test_hostile.py::test_files_of_a_larger_world_are_not_mixed_in",
    ),
    Fault("a rank that dies, stops or lags in backward", "faults/test_lost_ranks.py::test_the_others_name_it"),
    Fault(
        "a node lost: its launcher killed, torchrun and DeepSpeed",
        "integration/test_launchers.py::test_a_killed_node_is_named",
    ),
    Fault(
        "ranks lost in a step and in saves, one that hangs, restarted by torchrun and DeepSpeed",
        "faults/test_restart.py::test_a_restarted_run_ends_with_the_same_weights",
    ),
    Fault(
        "NaN or infinity in one element on one rank",
        "distributed/test_agreement.py::test_all_ranks_skip_together_bit_exactly",
    ),
    Fault("a learning rate of zero", "distributed/test_agreement.py::test_zero_learning_rate_changes_nothing"),
    Fault("a tiny learning rate", "unit/test_optim_guards.py::test_a_tiny_learning_rate_stays_finite"),
    Fault("all-zero rows", "unit/test_optim_guards.py::test_zero_rows_step_without_complaint"),
    Fault(
        "another number of ranks, prime sizes",
        "distributed/test_checkpoint.py::test_every_world_size_loads_every_other",
    ),
    Fault(
        "another engine: single, FSDP2, ZeRO 1, 2, 3",
        "distributed/test_checkpoint_engines.py::test_every_engine_loads_every_other",
    ),
    Fault(
        "another expert parallelism: 1, 2, 4",
        "distributed/test_checkpoint_experts.py::test_every_expert_parallelism_loads_every_other",
    ),
    Fault(
        "the same gradients on other numbers of ranks",
        "distributed/test_fsdp2_step.py::test_same_gradients_give_the_same_bits",
    ),
    Fault("ranks with different configurations", "unit/test_training_preflight.py::test_the_odd_one_is_named"),
    Fault(
        "a full disk on one rank",
        "distributed/test_checkpoint.py::test_a_full_disk_on_one_rank_leaves_the_checkpoint_before",
    ),
    Fault("a file that cannot grow (RLIMIT_FSIZE)", "faults/test_full_disk.py::test_a_file_that_cannot_grow"),
    Fault("two saves at once", "faults/test_full_disk.py::test_two_saves_at_once"),
    Fault(
        "training on while a save is written",
        "distributed/test_checkpoint.py::test_a_background_save_holds_what_was_there_when_it_began",
    ),
    Fault(
        "a run that fails while a save is written",
        "unit/test_training_loop.py::test_a_run_that_broke_off_goes_on_to_the_same_end",
    ),
    Fault("another recipe", "unit/test_checkpoint.py::test_another_recipe_is_refused"),
    Fault("missing scales or moments, fp32 for FP8", "faults/test_hostile.py::test_the_wrong_kind_is_refused"),
    Fault("a newer format", "unit/test_checkpoint.py::test_a_newer_format_is_refused"),
    Fault(
        "200 steps with faults from a seeded schedule",
        "faults/test_soak.py::test_a_run_with_faults_ends_as_one_without",
    ),
)


def render(cases: dict[str, list[bool]]) -> str:
    """The page, from the outcomes of every test's cases."""
    lines = [HEAD, "| fault | cases | survived | test |", "|---|---|---|---|"]
    for fault in FAULTS:
        outcomes = cases[fault.test]
        lines.append(f"| {fault.what} | {len(outcomes)} | {sum(outcomes)} | `tests/{fault.test}` |")
    total = [outcome for outcomes in cases.values() for outcome in outcomes]
    return "\n".join([*lines, f"| **all** | {len(total)} | {sum(total)} | |"]) + "\n"


def named_tests(page: str) -> list[str]:
    """Tests that a page names."""
    return re.findall(r"`tests/([^`]*::[^`]*)` \|", page)


class Recorder:
    """A pytest plugin that keeps the outcomes."""

    def __init__(self) -> None:
        self.cases: dict[str, list[bool]] = {fault.test: [] for fault in FAULTS}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid.partition("[")[0].removeprefix("tests/")
        if test in self.cases and (report.when == "call" or report.failed):
            self.cases[test].append(report.passed)


def main() -> int:
    """Run them all and write the page."""
    recorder = Recorder()
    tests = [f"tests/{fault.test}" for fault in FAULTS]
    code = pytest.main(["-q", "-m", "slow or not slow", *tests], plugins=[recorder])
    PAGE.write_text(render(recorder.cases), encoding="utf-8")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
