"""The conformance suite, for authors of methods: it checks that a method keeps the contract.

    from coterie.testing import check_method

    def test_my_method():
        check_method("my_package.my_file:MyMethod", rounds=2)

Each of `CHECKS`, a function of a method and a `World`, raises AssertionError. None needs pytest.
"""

from coterie.testing.run import NotApplicable, Run, World
from coterie.testing.suite import CHECKS, Checked, check_method

__all__ = ["CHECKS", "Checked", "NotApplicable", "Run", "World", "check_method"]
