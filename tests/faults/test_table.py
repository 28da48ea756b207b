"""docs/faults.md names the tests that there are."""

from pathlib import Path

from tests.faults.table import FAULTS, PAGE, named_tests

TESTS = Path(__file__).parents[1]


def test_the_page_names_every_fault_test_and_no_other() -> None:
    assert named_tests(PAGE.read_text(encoding="utf-8")) == [fault.test for fault in FAULTS]


def test_every_fault_test_exists() -> None:
    for fault in FAULTS:
        file, _, name = fault.test.partition("::")
        assert f"def {name}(" in (TESTS / file).read_text(encoding="utf-8"), fault.test


def test_every_test_of_this_folder_is_in_the_table() -> None:
    listed = {fault.test for fault in FAULTS}
    for path in Path(__file__).parent.glob("test_*.py"):
        if path != Path(__file__):
            names = [
                line[4:].partition("(")[0] for line in path.read_text().splitlines() if line.startswith("def test_")
            ]
            assert {f"faults/{path.name}::{name}" for name in names} <= listed
