"""slime adapter, `--loss-type custom_loss --custom-loss-function-path corral.engines.slime.policy_loss_function`.

Which objective, and its settings, come from the file of `--custom-config-path`:

    corral_objective: dppo
    corral_settings: {bound: 0.2}
"""

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from corral.engines.adapter import EngineObjective, warn_once
from corral.tensors import TokenBatch

LOSS = "slime.backends.megatron_utils.loss"


def policy_loss_function(args: Any, batch: Any, logits: Tensor, sum_of_sample_mean: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the reduced policy loss for slime, from slime's vocabulary-parallel log-probs.

    Only the policy term is computed: entropy bonus, KL to a reference, TIS and OPSM are slime's own loss, and refused.
    """
    wanted = _objective(args)
    try:
        slime: Any = importlib.import_module(LOSS)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"corral for slime: {LOSS} cannot be imported ({error}). This adapter is for slime; corral has none for miles."
        ) from error
    _, found = slime.get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=False,
        **slime.get_rollout_top_p_logprob_kwargs(args, batch),
    )
    new, rollout = found["log_probs"], batch.get("rollout_log_probs") or None
    # slime recomputes no old policy with --use-rollout-logprobs, nor for a batch's only update, where it is the new one.
    recomputed = batch.get("log_probs")
    skipped = vars(args).get("use_rollout_logprobs") and not recomputed
    centre = None if skipped else recomputed or [x.detach() for x in new]
    old = wanted.anchor_logp({"old": centre, "rollout": rollout})
    lengths = [len(x) for x in new]
    if not wanted.objective.config.tokenwise and lengths != list(batch["response_lengths"]):
        raise ValueError(
            f"corral for slime: {wanted.name} looks at whole sequences, and context parallelism has split them. Use another "
            f"objective, or context-parallel size 1."
        )
    for mask, length in zip(batch["loss_masks"], lengths, strict=True):
        if len(mask) != length:  # slime cuts masks for context parallelism itself, and then they would be longer
            raise ValueError(
                f"corral for slime: {length} log-probs and a mask of {len(mask)}. Context parallelism is not supported; use "
                f"size 1."
            )
    mask = pad_sequence([x.bool() for x in batch["loss_masks"]], batch_first=True)
    sampler = None if rollout is None else _padded(rollout)
    token_batch = TokenBatch(_padded(new), _padded(old), _padded(batch["advantages"]), mask, logp_rollout=sampler)
    loss, metrics = wanted.token_loss(token_batch)
    rows = torch.cat([row[:length] for row, length in zip(loss, lengths, strict=True)])
    reduced = sum_of_sample_mean(rows)
    if not rows.numel():
        reduced = reduced + 0 * logits.sum()
    # What slime reports is divided by the number of samples, or of tokens, as the loss is.
    shown = {name: sum_of_sample_mean(torch.full_like(rows, float(value))).detach() for name, value in metrics.items()}
    return reduced, {"loss": reduced.detach().clone(), **shown}


def _objective(args: Any) -> EngineObjective:
    """Build the objective from slime's custom configuration. Raises ValueError if a term of slime's own loss is switched on."""
    settings = vars(args)
    if "corral_objective" not in settings:
        raise ValueError("corral for slime: set corral_objective in the file of --custom-config-path.")
    wanted = EngineObjective.of(
        "corral for slime", settings["corral_objective"], settings.get("corral_settings") or {},
        anchor=settings.get("corral_anchor", "auto"),
    )  # fmt: skip
    for key in ("entropy_coef", "use_kl_loss", "use_tis", "use_opsm"):
        if settings.get(key):
            raise ValueError(f"corral for slime: {key} is a term of slime's own loss, which this one replaces. Leave it out.")
    warn_once(
        "corral for slime", wanted.other_reduction("token-mean" if args.calculate_per_token_loss else "seq-mean-token-mean")
    )
    return wanted


def _padded(rows: list[Tensor]) -> Tensor:
    return pad_sequence([row.float() for row in rows], batch_first=True)
