"""What a step of TROLL costs at 0.5B, 8B, 70B and a 400B mixture of experts, on paper: the tables of docs/scale.md.

    python benchmarks/scale.py            prints the tables
    python benchmarks/scale.py --write    writes them into the page

Arithmetic from the sizes of a model and a cluster. Nothing is measured here, and no run on several GPUs exists.
"""

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
PEAK, BANDWIDTH, MEMORY, NETWORK = 989e12, 4.8e12, 141e9, 50e9
"""An H200: bfloat16 FLOP/s without sparsity, bytes/s and bytes of memory, and bytes/s of its share of the network."""
LAYERS, GEMM, DECODE = 0.35, 0.70, 0.50
"""Shares reached: of the peak by layers (packed and compiled) and by the head's GEMM, of the bandwidth while sampling."""
NODE = 8
"""GPUs of a node: each sends and receives by a network card of its own."""
SEQUENCES, LENGTH, UPDATES, SLOTS = 2048, 1500, 8, 65
"""A step: completions, their tokens, updates among which they are divided, and tokens of a support."""


@dataclass(frozen=True)
class Model:
    """Sizes of a model, and the number of GPUs that train it."""

    name: str
    weights: float
    active: float
    """Number of weights that a token is multiplied with, without embedding and head."""
    hidden: int
    vocabulary: int
    cached: float
    """Bytes of keys and values per token, in bfloat16."""
    gpus: int
    experts: int = 0
    """Number of layers with experts, on which tokens travel to other GPUs; 0 for a dense model, whose weights travel."""


MODELS = (
    Model("0.5B", 0.49e9, 0.36e9, 896, 151_936, 12_288, 1),
    Model("8B", 8.2e9, 6.95e9, 4096, 151_936, 147_456, 16),
    Model("70B", 70.6e9, 68.5e9, 8192, 128_256, 327_680, 128),
    Model("400B mixture, 17B active", 400e9, 15e9, 5120, 202_048, 196_608, 512, experts=24),
)
"""Sizes of Qwen2.5-0.5B, Qwen3-8B, Llama-3.3-70B and Llama 4 Maverick."""


def seconds(model: Model) -> dict[str, float]:
    """Compute the seconds of each part of a step, for one GPU of the cluster."""
    tokens = SEQUENCES * LENGTH / model.gpus
    gemm = 2 * model.hidden * model.vocabulary * tokens / (GEMM * PEAK)
    group = max(1.0, 4 * model.weights / MEMORY)  # GPUs of one sampler: its weights take half of their memory
    each = SEQUENCES * group / model.gpus
    at_once = min(256.0, each)
    read = 2 * model.weights + at_once * LENGTH / 2 * model.cached  # for one token of every sequence
    if model.experts:  # there and back, forward and twice that backward
        moved = 2 * 2 * model.hidden * model.experts * tokens * (1 + 3) / NETWORK
    else:  # a node gathers all weights forward and backward, and spreads the gradient, in each update; and in the old pass
        moved = (1 + 3 * UPDATES) * 2 * model.weights / (NODE * NETWORK)
    several = model.gpus > 1
    return {
        "sampling": LENGTH * each / at_once * read / (group * DECODE * BANDWIDTH),
        "old pass, layers": 2 * model.active * tokens / (LAYERS * PEAK),
        "old pass, head with top 64": gemm,
        "updates, layers": 6 * model.active * tokens / (LAYERS * PEAK),
        "updates, head, peaked policy": gemm,
        "updates, head, flat policy": 3 * gemm,
        "projection": 14e-6 * tokens / 8192,
        "weights or tokens between GPUs": moved * several,
        "supports through a queue": 2 * tokens * (8 * SLOTS + 12) / NETWORK * several,
        "weights to the samplers": 2 * model.weights / group / NETWORK * several,
    }


def first(parts: dict[str, float]) -> str:
    """Name of the part that takes longest."""
    return max(parts, key=lambda name: parts[name])


def cost_table() -> str:
    """Build the table of a step's cost for each model."""
    found = [seconds(model) for model in MODELS]
    rows = [["", *(f"{model.name}, {model.gpus} GPU{'s' * (model.gpus > 1)}" for model in MODELS)], ["---"] * (len(MODELS) + 1)]
    rows += [[name, *(f"{parts[name]:.2g} s" for parts in found)] for name in found[0]]
    rows.append(["longest", *map(first, found)])
    tokens = [SEQUENCES * LENGTH / model.gpus for model in MODELS]
    whole = [sum(parts.values()) - parts["updates, head, peaked policy"] for parts in found]  # of a flat policy
    support = [0.07 * x["old pass, head with top 64"] + x["projection"] + x["supports through a queue"] for x in found]
    old = [x["old pass, layers"] + x["old pass, head with top 64"] for x in found]
    for what, extra in (
        ("TROLL beyond a clip that recomputes its old policy", support),
        ("TROLL beyond a loss on the sampler's log-probs", [a + b for a, b in zip(support, old, strict=True)]),
    ):
        rows.append([what, *(f"{100 * x / total:.2g} % of the step" for x, total in zip(extra, whole, strict=True))])
    flops = [(8 * m.active + 4 * m.hidden * m.vocabulary) * n for m, n in zip(MODELS, tokens, strict=True)]
    rows.append(["FLOPs a GPU", *(f"{x:.1e}" for x in flops)])
    rows.append(["weights, gradients, AdamW in float32, a GPU", *(f"{16 * m.weights / m.gpus / 1e9:.3g} GB" for m in MODELS)])
    rows.append(["supports of a step, a GPU", *(f"{n * (8 * SLOTS + 12) / 1e9:.2g} GB" for n in tokens)])
    logits = [f"{12288 * 4 * model.vocabulary / 1e9:.2g} GB" for model in MODELS]
    rows.append(["full logits of 12,288 tokens, float32: never stored", *logits])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def check_table() -> str:
    """Build the table that compares the same arithmetic with what was measured on one H200."""
    small, large = MODELS[:2]

    def head(model: Model) -> float:
        return 1e3 * 2 * model.hidden * model.vocabulary * 8192 / (GEMM * PEAK)

    read, layers = 2 * small.weights + 256 * LENGTH / 2 * small.cached, 1e3 * 6 * small.active * 25575 / (LAYERS * PEAK)
    rows = (
        ("layers, forward and backward of 25,575 tokens, 0.5B, packed and compiled", layers, 161.0, "ms"),
        ("the same, packed", layers, 230.0, "ms"),
        ("the same, as TRL does it: padded, 16 at a time, checkpointed", layers, 596.0, "ms"),
        ("old pass's head with top 64, 8,192 tokens, 0.5B", head(small), 3.68, "ms"),
        ("update's head, peaked, 0.5B", head(small), 4.68, "ms"),
        ("update's head, flat, 0.5B", 3 * head(small), 11.2, "ms"),
        ("old pass's head with top 64, 8,192 tokens, 8B", head(large), 13.5, "ms"),
        ("update's head, peaked, 8B", head(large), 14.2, "ms"),
        ("update's head, flat, 8B", 3 * head(large), 41.0, "ms"),
        ("sampling with vLLM, 0.5B", 256 * DECODE * BANDWIDTH / read, 52_000.0, "tokens/s"),
    )  # fmt: skip
    lines = ["| | on paper | measured | measured / paper |", "| --- | --- | --- | --- |"]
    for what, paper, there, unit in rows:
        shown = [f"{x:,.0f}" if x > 1000 else f"{x:.3g}" for x in (paper, there)]
        lines.append(f"| {what} | {shown[0]} {unit} | {shown[1]} {unit} | {there / paper:.2f} |")
    return "\n".join(lines)


TABLES = {"cost": cost_table, "check": check_table}


def page(text: str) -> str:
    """Return the page with its tables computed anew."""
    for name, table in TABLES.items():
        found = rf"(?<=<!-- {name} -->\n\n).*?(?=\n\n<!-- /{name} -->)"
        text, count = re.subn(found, lambda _, table=table: table(), text, flags=re.DOTALL)
        assert count == 1, name
    return text


def main() -> None:
    """Print the tables, or write them into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the tables into docs/scale.md")
    if parser.parse_args().write:
        PAGE.write_text(page(PAGE.read_text()))
    else:
        print("\n\n".join(table() for table in TABLES.values()))


if __name__ == "__main__":
    main()
