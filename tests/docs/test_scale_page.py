"""docs/scale.md holds what benchmarks/scale.py computes."""

import importlib.util
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def scale() -> Any:
    spec = importlib.util.spec_from_file_location("scale", ROOT / "benchmarks" / "scale.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_tables_that_are_computed() -> None:
    text = (ROOT / "docs" / "scale.md").read_text()
    assert scale().page(text) == text, "python benchmarks/scale.py --write"


def test_golden_layers_of_the_half_billion() -> None:
    # 3,072,000 tokens × 6 × 0.36e9 FLOPs at .35 of 989e12 a second.
    parts = scale().seconds(scale().MODELS[0])
    assert abs(parts["updates, layers"] - 3_072_000 * 6 * 0.36e9 / (0.35 * 989e12)) < 1e-9
    assert parts["supports through a queue"] == 0, "one GPU has no queue"


def test_what_the_page_says_of_the_first_bottleneck() -> None:
    module = scale()
    for model in module.MODELS:
        assert module.first(module.seconds(model)) in ("sampling", "updates, layers")
