"""The table of tests/README.md: every public bug report has a test or a reason."""

import re

import case_table


def test_every_entry_has_a_test_or_a_reason():
    tests = case_table.tests_by_entry()
    without = [entry for entry in case_table.entries() if entry not in tests and entry not in case_table.NOT_TESTED]
    assert not without


def test_no_test_names_an_entry_that_does_not_exist():
    assert set(case_table.tests_by_entry()) <= set(case_table.entries())


def test_the_table_names_only_tests_that_exist():
    """`python tests/case_table.py` rewrites it."""
    _, inside, _ = case_table.split_readme()
    named = set(re.findall(r"`[\w/]+: \w+`", inside))
    existing = {name for names in case_table.tests_by_entry().values() for name in names}
    assert named
    assert named <= existing
