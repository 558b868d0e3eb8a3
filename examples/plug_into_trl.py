"""A stock GRPO script of TRL's, and the three lines that give it a trust region. Ten seconds on one CPU core.

    python examples/plug_into_trl.py        needs: pip install 'corral[llm]'
    torchrun --nproc-per-node 2 examples/plug_into_trl.py

What stock TRL would have in a line's place stands behind it. The model is a random one, built here: it learns even numbers.
"""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback

from corral.llm import CorralConfig, CorralTrainer  # stock: from trl import GRPOConfig, GRPOTrainer

WORDS = ["<pad>", "<eos>", *(str(number) for number in range(62))]

torch.manual_seed(0)
backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", padding_side="left")
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )
)  # fmt: skip
dataset = Dataset.from_dict({"prompt": [f"{i % 62} {i * 7 % 62}" for i in range(256)]})


def share_of_even_numbers(completions: list[str], **_: object) -> list[float]:
    return [sum(int(word) % 2 == 0 for word in text.split()) / 8 for text in completions]


args = CorralConfig(  # stock: args = GRPOConfig(
    output_dir="runs/plug_into_trl",
    per_device_train_batch_size=64,
    num_generations=8,
    num_iterations=4,  # updates per batch of rollouts: with one alone, no trust region ever acts
    max_completion_length=8,
    max_steps=80,
    learning_rate=3e-3,
    logging_steps=4,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
    use_cpu=True,
    bf16=False,
)
trainer = CorralTrainer(  # stock: trainer = GRPOTrainer(
    model=model, reward_funcs=share_of_even_numbers, args=args, train_dataset=dataset, processing_class=tokenizer
)
trainer.remove_callback(PrinterCallback)  # it prints thirty numbers a line; here are four
trainer.train()

SHOWN = ("reward", "tr/active_frac", "tr/kl_before", "tr/kl_after")
history = trainer.state.log_history[:-1]  # the last line is about time
if trainer.accelerator.is_main_process:
    for row in history:
        print(f"step {row['step']:>2}", *(f"{name} {row[name]:.4f}" for name in SHOWN if name in row), sep="  ")
    print(f"reward: {history[0]['reward']:.2f} → {history[-1]['reward']:.2f}")
