"""Which completions of a step are measured: some that are trained on, however few there are, on however many processes."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deployed_witness import WILD, Witness, certificates
from test_deployed import let_accelerate_shard_on_cpus
from tiny_models import EOS, make_trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from corral.trl import deployed as deployed_probe
from corral.trl.api import FUSED
from tolerance import assert_close
from two_processes import run_two

pytestmark = pytest.mark.skipif(not FUSED, reason="TRL hands over no hidden states")

MASKED = {
    "mask_truncated_completions": True,
    "rewards": lambda completions, **_: [float(i % 3) for i in range(len(completions))],
}


def rollout(rows: Any, env_mask: Any = None) -> Any:
    """A rollout function whose completion of row i in batch n is `rows(n, i)`; those that do not end with EOS are truncated."""
    batches: list[int] = []

    def draw(prompts: list[str], trainer: Any) -> dict[str, Any]:
        batches.append(len(batches))
        completions = [rows(batches[-1], i) for i in range(len(prompts))]
        ids = [trainer.processing_class(text)["input_ids"] for text in prompts]
        output = {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}
        return output if env_mask is None else output | {"env_mask": [env_mask(i) for i in range(len(prompts))]}

    return draw


def truncated_but_the_last_two(batch: int, row: int) -> list[int]:
    tokens = [3 + (5 * row + 7 * batch + i) % 30 for i in range(4)]
    return [*tokens, EOS] if row >= 6 else tokens


def weights_of(trainer: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.supports("other: deployed network, truncated completions masked", door="TRL")
@pytest.mark.parametrize("updates", [1, 2])
def test_a_step_is_measured_on_completions_that_are_trained_on(tmp_path, monkeypatch, updates):
    monkeypatch.setattr(deployed_probe, "TOKENS", 1)  # of 10 that are trained on, 34 that were drawn
    func = {"rollout_func": rollout(truncated_but_the_last_two)}
    given = {**WILD, **MASKED, "max_steps": 3 * updates, "steps_per_generation": 2, "gradient_accumulation_steps": 2 // updates}
    trainer = make_trainer(tmp_path, deployed_bound=1e-3, trainer_kwargs=func, **given)
    witness = Witness(trainer, updates)
    trainer.train()
    found = certificates(trainer)
    assert len(found) == len(witness.kl) == 3
    for line, kl in zip(found, witness.kl, strict=True):
        assert len(kl) == 10
        assert line["tr/deployed_kl_mean"] <= 1e-3
        assert_close(torch.tensor(line["tr/deployed_kl_mean"]), kl.mean(), rtol=1e-2, atol=1e-6)


@pytest.mark.supports("other: deployed network, turns of tools", door="TRL")
@pytest.mark.parametrize("updates", [1, 2])
def test_tokens_of_tools_are_not_measured_and_choose_no_completion(tmp_path, monkeypatch, updates):
    monkeypatch.setattr(deployed_probe, "TOKENS", 1)
    monkeypatch.setattr(deployed_probe, "COMPLETIONS", 1)
    # All of the first five completions is a tool's, and of the others the second half.
    draw = rollout(lambda n, i: [3 + (5 * i + 7 * n + k) % 30 for k in range(4)], lambda i: [0] * 4 if i < 5 else [1, 1, 0, 0])
    given = {**WILD, "max_steps": updates, "steps_per_generation": 2, "gradient_accumulation_steps": 2 // updates}
    trainer = make_trainer(tmp_path, deployed_bound=1e-3, trainer_kwargs={"rollout_func": draw}, **given)
    probe, live = trainer.deployed.probe, []
    measured = probe.measure
    probe.measure = lambda: (live.extend(some.live for some in probe._rollouts), measured())[1]
    trainer.train()
    assert len(certificates(trainer)) == 1
    assert live[0].tolist() == [[True, True, False, False]]


def probe_of(tmp_path: Path, **given: Any) -> deployed_probe.DeployedProbe:
    return make_trainer(tmp_path, deployed_bound=math.inf, **given).deployed.probe


def test_of_long_completions_eight_are_measured(tmp_path):
    probe = probe_of(tmp_path)
    trained = torch.ones(64, 8192, dtype=torch.bool)
    chosen = probe.choose(trained).nonzero()[:, 0]
    assert len(chosen) == 8
    gaps = chosen.diff(prepend=torch.tensor([-1]), append=torch.tensor([64]))
    assert gaps.max() <= 16  # evenly spread: twice 64 / 8 at most
    trained[::2] = False
    assert (probe.choose(trained).nonzero()[:, 0] % 2 == 1).all()
    assert int(probe.choose(trained).sum()) == 8
    trained[4:] = False
    assert probe.choose(trained).nonzero()[:, 0].tolist() == [1, 3]  # all there are
    trained[:] = False
    assert int(probe.choose(trained).sum()) == 1  # one of nothing: every process takes part in a pass


@pytest.mark.parametrize(
    ("given", "passes", "limit"),
    [
        # 5,000 tokens for 1 % of N (1 + o + 3 p) forward passes.
        ({"steps_per_generation": 2}, 1, 5000 / (0.01 * (1 + 1 + 3))),
        ({"steps_per_generation": 1}, 2, 2 * 5000 / (0.01 * (1 + 0 + 3))),
        ({"steps_per_generation": 2, "num_iterations": 4}, 1, 5000 / (0.01 * (1 + 1 + 12))),
        ({"steps_per_generation": 2, "num_iterations": 4, "reuse": "auto"}, 1, 5000 / (0.01 * (1 + 1 + 3))),
        # The step has two batches: as many tokens again, and half of them measured in each.
        ({"steps_per_generation": 1, "gradient_accumulation_steps": 2}, 2, 5000 / (0.01 * (1 + 0 + 3))),
    ],
    ids=["two updates", "one update", "four passes", "up to four passes", "two batches"],
)
def test_golden_5000_tokens_are_measured_where_that_is_cheap(tmp_path, given, passes, limit):
    probe = probe_of(tmp_path, **given)
    batches = given.get("gradient_accumulation_steps", 1)
    for tokens, measured in ((math.ceil(limit), 5000), (math.floor(0.99 * limit), 3072)):
        trained = torch.ones(math.ceil(tokens / 10), 10, dtype=torch.bool)
        chosen = probe.choose(trained, passes=passes)
        assert int(trained[chosen].sum()) == 10 * math.ceil(measured / batches / 10)


@pytest.mark.parametrize(
    ("processes", "length", "held_out", "draws"),
    [(1, 8192, 100, 8), (4, 8192, 100, 2), (3, 8192, 100, 3), (1, 100, 100, 30), (2, 100, 100, 15), (2, 8192, 6, 3)],
)
def test_golden_held_out_completions_are_about_as_many(processes, length, held_out, draws):
    # 3,072 tokens or eight completions over all processes, and no more than there are.
    trainer = SimpleNamespace(accelerator=SimpleNamespace(num_processes=processes))
    assert deployed_probe.DeployedProbe(trainer).count_held_out(held_out, length) == draws


class Before(TrainerCallback):
    """The weights before every update."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.weights = trainer, []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.weights.append(weights_of(self.trainer))


def truncated_in_the_second_batch(batch: int, row: int) -> list[int]:
    tokens = [3 + (5 * row + 7 * batch + i) % 30 for i in range(4)]
    return tokens if batch == 1 else [*tokens, EOS]


@pytest.mark.parametrize("reuse", ["fixed", "auto"])
def test_a_step_without_any_token_to_measure_is_undone(tmp_path, caplog, reuse):
    func = {"rollout_func": rollout(truncated_in_the_second_batch)}
    given = {**WILD, **MASKED, "learning_rate": 0.01, "max_steps": 12, "num_iterations": 2, "steps_per_generation": 2}
    trainer = make_trainer(tmp_path, deployed_bound=0.05, trainer_kwargs=func, reuse=reuse, lr_scheduler_type="linear", **given)
    before = Before(trainer)
    trainer.add_callback(before)
    trainer.train()
    # Updates 5 to 8 have gradients of zero, and the moments of the first step move the weights.
    second, third = before.weights[4], before.weights[8]
    assert all(torch.equal(x, third[name]) for name, x in second.items())
    if reuse == "fixed":
        assert not all(torch.equal(x, before.weights[5][name]) for name, x in second.items())
    assert "no completion of the step has a token that is trained on. The weights from before the step are back." in caplog.text
    assert len(certificates(trainer)) == 2
    shares = [line["tr/step_share"] for line in trainer.state.log_history if "tr/step_share" in line]
    assert len(shares) == 3
    assert shares[1] == 0.0
    # The schedule and the moments have gone on.
    scale = trainer.deployed.controller.scale
    assert trainer.lr_scheduler.base_lrs[0] == pytest.approx(0.01 * scale)
    assert trainer.lr_scheduler.last_epoch == 12
    assert trainer.optimizer.optimizer.state


def test_measuring_alone_undoes_nothing_where_there_is_no_token(tmp_path, caplog):
    func = {"rollout_func": rollout(truncated_in_the_second_batch)}
    given = {**WILD, **MASKED, "learning_rate": 0.01, "max_steps": 4, "steps_per_generation": 2}
    trainer = make_trainer(tmp_path, deployed_bound=math.inf, trainer_kwargs=func, **given)
    before = Before(trainer)
    trainer.add_callback(before)
    trainer.train()
    assert not all(torch.equal(x, before.weights[2][name]) for name, x in weights_of(trainer).items())
    assert "no completion of the step has a token that is trained on. The step is not measured" in caplog.text
    assert [line.get("tr/step_share") for line in trainer.state.log_history[1:4:2]] == [1.0, None]


def work(rank: int, folder: Path) -> None:
    """One of two processes; only the second has completions to train on, and in the last step neither."""
    found: dict[str, Any] = {}

    def rows(batch: int, row: int) -> list[int]:
        tokens = [3 + (5 * row + 7 * batch + 11 * rank + i) % 30 for i in range(4)]
        return [*tokens, EOS] if rank and row != 1 and batch < 2 else tokens

    deployed_probe.COMPLETIONS = 2
    deployed_probe.TOKENS = 10
    for case, given in {"DDP": {}, "FSDP2": {"fsdp": True, "fsdp_config": {"version": 2}}}.items():
        if given:
            let_accelerate_shard_on_cpus()
        for updates in (1, 2):
            trainer = make_trainer(
                folder, deployed_bound=1e-3, max_steps=3 * updates, use_cpu=True, steps_per_generation=2,
                per_device_train_batch_size=2, num_generations=2, gradient_accumulation_steps=2 // updates,
                trainer_kwargs={"rollout_func": rollout(rows)}, **WILD, **MASKED, **given,
            )  # fmt: skip
            before, rows_measured, choose = Before(trainer), [], trainer.deployed.probe.choose

            def count(*args: Any, choose: Any = choose, counts: list[int] = rows_measured, **named: Any) -> Tensor:
                chosen = choose(*args, **named)
                counts.append(int(chosen.sum()))
                return chosen

            trainer.deployed.probe.choose = count
            trainer.add_callback(before)
            witness = None if given else Witness(trainer, updates)
            trainer.train()
            whole = [
                {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in weights.items()}
                for weights in (before.weights[2 * updates], weights_of(trainer))
            ]
            kl = [] if witness is None else witness.kl
            found[f"{case} {updates}"] = certificates(trainer), whole, kl, rows_measured
    torch.save(found, folder / f"{rank}.pt")


@pytest.mark.supports("other: deployed network, processes without a token to measure", door="TRL")
def test_a_process_without_a_token_takes_part(tmp_path):
    run_two(work, tmp_path)
    two = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for case in two[0]:
        (found, (before, after), kl, rows), (also, (before_also, after_also), kl_also, rows_also) = (one[case] for one in two)
        assert found == also
        assert rows == rows_also == [2, 2, 1], "a sharded network needs as many passes of each"
        assert len(found) == 2, "the third step has no token"
        assert all(line["tr/deployed_kl_mean"] <= 1e-3 for line in found)
        assert all(torch.equal(x, after[name]) for name, x in before.items()), "and is undone"
        assert all(torch.equal(x, after_also[name]) for name, x in before_also.items())
        assert all(torch.equal(x, after_also[name]) for name, x in after.items())
        if case.startswith("DDP"):
            assert [len(x) for x in kl] == [0, 0, 0]
            for line, tokens in zip(found, kl_also, strict=False):
                assert len(tokens) == 15
                assert line["tr/deployed_kl_max"] <= tokens.max() * 1.01 + 1e-6
                assert tokens.mean() <= 3e-3  # 10 of its 15 tokens were measured
