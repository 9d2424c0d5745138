"""The targets of `make fuzz` run on their own seeds, without the fuzzer."""

from types import ModuleType

import pytest
from script_modules import module_at


@pytest.fixture(scope="module")
def targets() -> ModuleType:
    return module_at("fuzz/targets.py")


def test_every_target_takes_its_own_seeds(targets: ModuleType) -> None:
    assert len(targets.TARGETS) == 11  # as many as docs/security.md names
    for target in targets.TARGETS.values():
        seeds = list(target.seeds())
        assert seeds
        for seed in seeds:
            targets.run(target, seed)  # a result or a refusal; anything else raises
