"""The targets of `make fuzz` run on their own seeds, without the fuzzer."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TARGETS = Path(__file__).parents[1] / "fuzz/targets.py"


@pytest.fixture(scope="module")
def targets() -> ModuleType:
    spec = importlib.util.spec_from_file_location("targets", TARGETS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_target_takes_its_own_seeds(targets: ModuleType) -> None:
    assert len(targets.TARGETS) == 11  # as many as docs/security.md names
    for target in targets.TARGETS.values():
        seeds = list(target.seeds())
        assert seeds
        for seed in seeds:
            targets.run(target, seed)  # a result or a refusal; anything else raises
