"""Does a sampler in lower precision send tokens to other experts than the trainer, and how far apart are their log-probs then?

    python scripts/warm_start.py --family moe --seed 1 --out runs/starts/moe-1
    OMP_NUM_THREADS=1 python -m results.evidence.routing_flips --out runs/evidence/routing.jsonl

A mixture of experts beside the embedded dense model, both on countdown. Completions are drawn with rounded weights, routers'
among them; then the rounded and the exact network read the same tokens, in float32. A line for each model and precision. Two
minutes of one core.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from corral.lab.models.load import load_model
from corral.lab.run.files import append_line
from corral.lab.tasks.procedural import Countdown
from results.evidence.blocked_tokens import roll_out
from results.evidence.coarse_sampler import PRECISIONS, rounded

MODELS = ("tiny", "runs/starts/moe-1")


def experts_of(router_logits: Tensor, count: int) -> Tensor:
    """The set of experts that each token is sent to, as booleans over all of them [… E]."""
    chosen = router_logits.topk(count, -1).indices
    return torch.zeros_like(router_logits, dtype=torch.bool).scatter(-1, chosen, True)


@torch.no_grad()
def read(model: Any, ids: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Log-probs of the completions' tokens [B T], and the experts of the places that predict them [B T L E]; a dense model
    has no layer that routes, so L = 0."""
    config, mask = model.config, (ids != model.config.pad_token_id).long()
    if not (count := getattr(config, "num_experts_per_tok", 0)):  # configs of dense families do not have it
        out = model(input_ids=ids, attention_mask=mask)
        routes = torch.zeros(*ids.shape, 0, 1, dtype=torch.bool)
    else:
        out = model(input_ids=ids, attention_mask=mask, output_router_logits=True)
        routes = torch.stack([experts_of(layer.view(*ids.shape, -1), count) for layer in out.router_logits], 2)
    logp = out.logits[:, start - 1 : -1].float().log_softmax(-1).gather(-1, ids[:, start:, None])[..., 0]
    return logp, routes[:, start - 1 : -1]


def summary(gap: Tensor) -> dict[str, float] | None:
    """Mean, 99.9th percentile and largest of gaps, to four digits; None of none."""
    if not len(gap):
        return None
    found = {"mean": gap.mean(), "p999": gap.quantile(0.999), "max": gap.max()}
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def describe(gap: Tensor, flips: Tensor) -> dict[str, Any]:
    """How often experts differ, and |log-prob gaps| of tokens with and without it.

    Args:
        gap: |log π_trainer − log π_sampler| [N] of the tokens that were sampled.
        flips: whether the set of experts differs, by token and layer [N L].
    """
    flipped = flips.any(-1)
    found: dict[str, Any] = {"tokens": len(gap), "layers": flips.shape[1]}
    if flips.shape[1]:
        shares = {"flipped_places": flips.float().mean(), "flipped_tokens": flipped.float().mean()}
        found |= {name: float(f"{share:.4g}") for name, share in shares.items()}
    return found | {"all": summary(gap), "flipped": summary(gap[flipped]), "same": summary(gap[~flipped])}


def measure(name: str, precision: str, batches: int, seed: int) -> dict[str, Any]:
    """Batches of completions by the rounded network, read by both."""
    (model, tokenizer), task = load_model(name), Countdown()
    model.eval()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    gaps, flips = [], []
    for index in range(batches):
        with rounded(model, precision):
            ids, start, mask, _ = roll_out(model, tokenizer, task, 1000 * seed + index)
            sampled, routes = read(model, ids, start)
        exact, own = read(model, ids, start)
        gaps.append((exact - sampled).abs()[mask])
        flips.append((own != routes).any(-1)[mask])
    about = {"model": Path(name).name, "precision": precision, "batches": batches, "seed": seed}
    return about | describe(torch.cat(gaps), torch.cat(flips))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, help="the embedded one, or folders with a warm start")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["bf16", "fp8"])
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--seed", type=int, default=401)
    parser.add_argument("--out", type=Path, help="file to append a line per model and precision to")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.models:
        for precision in given.precisions:
            line = measure(name, precision, given.batches, given.seed)
            print(line, flush=True)
            if given.out is not None:
                append_line(given.out, line)


if __name__ == "__main__":
    main()
