"""Old pass and updates on a batch of rollouts: stock TRL, and corral with padded, packed and compiled batches.

All in one process, in turns, on the same tokens; nothing is sampled while they are timed, and no optimizer steps. Weights are
random in float32, under bfloat16 autocast on a GPU; a folder gives the model's configuration. Lengths are those of
mathematics problems, or given. Stock TRL has its own loss and its own defaults: micro-batches of eight, checkpointed.
"""

import argparse
import gc
import math
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from timing import free_memory, in_turns, peak_mebibytes
from update_phase import MODELS

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from trl import GRPOTrainer

Rollouts = list[tuple[list[int], list[int]]]
"""Token ids of prompts and completions."""
TRL = "TRL, its defaults"
WAYS: dict[str, dict[str, Any] | None] = {
    TRL: None,
    "corral, padded, checkpointed": {"packed_batches": "off", "gradient_checkpointing": True},
    "corral, padded": {"packed_batches": "off"},
    "corral, packed": {},
    "corral, packed, compiled": {"compile_layers": True},
}
"""Each way and its settings; None is TRL's own trainer."""
TFLOPS = 989.0
"""Dense bfloat16 limit of an H100 or H200, in TFLOP/s."""
GROUP = 8
"""Completions per prompt."""


def main(words: list[str] | None = None) -> int:
    """Measure the ways that are asked for, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], prog="update.py")
    parser.add_argument(
        "--model", default="Qwen2.5-0.5B", help=f"a folder with a config.json, or of random weights: {', '.join(MODELS)}"
    )
    parser.add_argument("--layers", type=int, help="number of layers, if not the model's own")
    parser.add_argument("--completions", type=int, default=64, help=f"a multiple of {GROUP}; 64 by default")
    parser.add_argument("--prompt", type=int, nargs=2, default=(70, 160), metavar=("LOW", "HIGH"), help="tokens of a prompt")
    parser.add_argument(
        "--tokens", type=int, nargs=3, default=(280, 90, 400), metavar=("MEAN", "SPREAD", "MOST"), help="of a completion"
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[16, 64], help="micro-batches to try with corral, in completions"
    )
    parser.add_argument("--objective", default="troll")
    parser.add_argument("--iterations", type=int, default=1, help="passes over the batch in updates")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=range(len(WAYS)), type=int, default=list(range(len(WAYS))),
                        help="; ".join(f"{i}: {name}" for i, name in enumerate(WAYS)))  # fmt: skip
    parser.add_argument("--tflops", type=float, default=TFLOPS, help="limit of the device, for the model FLOP utilisation")
    about = parser.parse_args(words)
    if about.completions % GROUP or about.completions < GROUP or any(about.completions % rows for rows in about.rows):
        parser.error(
            f"--completions is a multiple of {GROUP} and of every one of --rows; got {about.completions} and {about.rows}."
        )
    if about.model not in MODELS and not (Path(about.model) / "config.json").exists():
        parser.error(f"--model is a folder with a config.json, or one of {', '.join(MODELS)}; got {about.model!r}.")
    device = "cuda" if torch.cuda.is_available() else "cpu"

    rollouts = make_rollouts(about)
    runs, memory, trainer = dict[str, Callable[[], None]](), dict[str, float](), None
    for i in about.ways:
        name = list(WAYS)[i]
        for rows in about.rows if WAYS[name] is not None else [GROUP]:
            label = f"{name}, {rows} at a time"
            try:
                trainer = make_trainer(WAYS[name], rows, rollouts, about, device)
                run = Updates(trainer, about)
                run()
                memory[label] = peak_mebibytes(run, device) / 1024 if device == "cuda" else math.nan
                runs[label] = run
            except torch.OutOfMemoryError:
                print(f"{label}: does not fit into memory", file=sys.stderr)
            gc.collect()
            free_memory()
    times = in_turns(runs, about.rounds, device)
    assert trainer is not None
    print_table(about, rollouts, times, memory, work(trainer.model, rollouts, about.iterations), device)
    return 0


def make_rollouts(about: argparse.Namespace) -> Rollouts:
    """Random prompts, one for each group, and random completions."""
    draw, (low, high), (mean, spread, most) = random.Random(0), about.prompt, about.tokens
    found = []
    for _ in range(about.completions // GROUP):
        prompt = [draw.randrange(2, 64) for _ in range(draw.randint(low, high))]
        for _ in range(GROUP):
            length = round(min(max(draw.gauss(mean, spread), 1), most))
            found.append((prompt, [draw.randrange(2, 64) for _ in range(length)]))
    return found


def make_trainer(
    settings: dict[str, Any] | None, rows: int, rollouts: Rollouts, about: argparse.Namespace, device: str
) -> "GRPOTrainer":  # fmt: skip
    """Trainer whose sampler returns the rollouts."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    from corral.llm import CorralConfig, CorralTrainer

    def sample(prompts: list[str], trainer: "GRPOTrainer") -> dict[str, Any]:
        return {"prompt_ids": [a for a, _ in rollouts], "completion_ids": [b for _, b in rollouts], "logprobs": None}

    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "x": 2}, unk_token="<pad>"))
    given: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(), "report_to": "none", "use_cpu": device == "cpu", "bf16": device == "cuda",
        "per_device_train_batch_size": rows, "steps_per_generation": len(rollouts) // rows, "num_generations": GROUP,
        # One micro-batch for each update: the old pass is then made, as in training with several updates.
        "gradient_accumulation_steps": 1, "num_iterations": max(2, about.iterations),
        "max_completion_length": about.tokens[2],
        "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    if settings is not None:
        given |= {"gradient_checkpointing": False, "objective": about.objective, "loss_type": "dapo", **settings}
    trainer = (GRPOTrainer if settings is None else CorralTrainer)(
        model=make_model(about, device), args=(GRPOConfig if settings is None else CorralConfig)(**given),
        train_dataset=Dataset.from_dict({"prompt": ["x"] * len(rollouts)}), rollout_func=sample,
        reward_funcs=lambda completions, **_: [float(i % GROUP) for i in range(len(completions))],
        processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.current_gradient_accumulation_steps = 1
    if trainer.args.gradient_checkpointing:  # as `train` would
        trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trainer.model.train()
    return trainer


def make_model(about: argparse.Namespace, device: str) -> "PreTrainedModel":
    """Model of random float32 weights."""
    import transformers

    if about.model in MODELS:
        kind, sizes = MODELS[about.model]
        config = getattr(transformers, f"{kind}Config")(**sizes)
    else:
        config = transformers.AutoConfig.from_pretrained(about.model)
    if about.layers:
        config.num_hidden_layers = about.layers
        if getattr(config, "layer_types", None):  # not every family has them
            config.layer_types = config.layer_types[: about.layers]
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


class Updates:
    """Callable that scores the rollouts with the old policy, and takes all micro-batches forward and backward."""

    def __init__(self, trainer: "GRPOTrainer", about: argparse.Namespace) -> None:
        self.trainer, self.batch = trainer, [{"prompt": "x"}] * about.completions
        self.steps = about.iterations * trainer.args.steps_per_generation

    def __call__(self) -> None:
        self.trainer._step, self.trainer._buffered_inputs = 0, None
        for _ in range(self.steps):
            self.trainer.training_step(self.trainer.model, self.batch, None)
        self.trainer.model.zero_grad(set_to_none=True)


def work(model: "PreTrainedModel", rollouts: Rollouts, iterations: int) -> float:
    """Floating-point operations of the GEMMs on real tokens: 2 for each weight and token in a forward pass, 4 in a backward."""
    head = model.get_output_embeddings().weight.numel()
    embeddings = {
        id(weight): weight.numel() for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    }
    backbone = sum(weight.numel() for weight in model.parameters()) - sum(embeddings.values())
    tokens, scored = sum(len(a) + len(b) for a, b in rollouts), sum(len(b) for _, b in rollouts)
    return (2.0 + 6.0 * iterations) * (backbone * tokens + head * scored)


def print_table(
    about: argparse.Namespace, rollouts: Rollouts, times: dict[str, float], memory: dict[str, float],
    flops: float, device: str,
) -> None:  # fmt: skip
    """Print a line for each way, as ratios to the first one."""
    real = sum(len(a) + len(b) for a, b in rollouts)
    padded = len(rollouts) * (max(len(a) for a, _ in rollouts) + max(len(b) for _, b in rollouts))
    anchor, first = next(iter(times.items()))
    print(f"{about.model}, {len(rollouts)} completions, {real} tokens, {padded} with padding; {about.objective}; on {device}")
    print(f"{'old pass and updates':48} {'ms':>9} {'ratio':>6} {'tokens/s':>9} {'MFU':>6} {'GiB':>6}")
    for name, spent in times.items():
        use = f"{flops / spent / 1e9 / about.tflops:6.3f}" if device == "cuda" else f"{'-':>6}"
        rate = 1e3 * (1 + about.iterations) * real / spent
        print(f"{name:48} {spent:9.1f} {spent / first:6.3f} {rate:9.0f} {use} {memory[name]:6.1f}", flush=True)
    print(f"Ratios are to {anchor}. Tokens are real ones, of the old pass and of updates. GiB are beyond what was held before.")


if __name__ == "__main__":
    sys.exit(main())
