"""A stock GRPO run of TRL's, and the one line that X-rays it. The loss is TRL's own. About a minute on one CPU core.

    python examples/audit_grpo.py        needs: pip install 'corral[llm]'
    corral audit runs/audit_grpo/audit

The model is the embedded one, a million parameters; it learns countdown.
"""

import shutil

from datasets import Dataset
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from corral.lab.models.tiny import load_tiny
from corral.lab.tasks import make_task
from corral.llm import audit

OUT = "runs/audit_grpo"

model, tokenizer = load_tiny()
task = make_task("countdown")
problems = task.train_prompts(12 * 32, seed=0)


def solved(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    return [task.verify(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]


trainer = GRPOTrainer(
    model=model,
    reward_funcs=solved,
    args=GRPOConfig(
        output_dir=OUT,
        per_device_train_batch_size=32,
        num_generations=8,
        steps_per_generation=8,  # updates per batch of rollouts: with one alone, nothing is ever clipped
        max_completion_length=task.max_completion_length + 1,
        max_steps=8 * 12,
        learning_rate=4e-4,
        logging_steps=8,
        loss_type="dr_grpo",
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=Dataset.from_dict({"prompt": problems}),
    processing_class=tokenizer,
)
trainer.remove_callback(PrinterCallback)

shutil.rmtree(f"{OUT}/audit", ignore_errors=True)  # an audit never overwrites another one
audit(trainer, out=f"{OUT}/audit", sequences=64, tokens=2048)  # the one line

trainer.train()

rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
clipped = [row["clip_ratio/region_mean"] for row in trainer.state.log_history if "clip_ratio/region_mean" in row]
print(f"reward: {rewards[0]:.2f} → {rewards[-1]:.2f}; share of clipped tokens, says TRL: {sum(clipped) / len(clipped):.2%}")
print(f"now: corral audit {OUT}/audit")
