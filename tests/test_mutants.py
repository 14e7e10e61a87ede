"""The table of tests/mutants.py against the current files. The faults themselves run by hand."""

import mutants


def test_every_fault_applies_to_one_place_and_names_test_files():
    assert mutants.problems() == []


def test_a_table_holds_the_faults_of_a_file_with_their_tests():
    table = "== a.py: a b\none\n- x\n+ y\ntwo: c\n- x\n-     z\n+ y\n"
    both, other = ("tests/test_a.py", "tests/test_b.py"), ("tests/test_c.py",)
    assert [*mutants.parse(table)] == [
        mutants.Fault("one", "a.py", "x", "y", both),
        mutants.Fault("two", "a.py", "x\n    z", "y", other),
    ]
