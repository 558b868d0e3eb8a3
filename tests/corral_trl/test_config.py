"""CorralConfig: what it takes, what it refuses and why, and the page that says so."""

import dataclasses
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from tiny_models import RIGHT_REDUCTIONS, FakeVLLM, Spy, fixed_rollout, make_trainer, rollouts, settings, tiny_model
from trl import GRPOConfig, TrlParser

import corral.llm
from corral import make_objective, objective_names
from corral.llm import CorralConfig
from corral.objective import OBJECTIVES
from corral.objective.config import ReinforceConfig
from corral.objective.weights import reinforce
from corral.trl import TRL_RANGE
from corral.trl.api import REDUCTIONS, WRONG_BEFORE, check_trl

ROOT = Path(__file__).parents[2]
PAGE = "".join((ROOT / "docs" / name).read_text() for name in ("trl-details.md", "trl.md"))
OWN_FIELDS = [field.name for field in dataclasses.fields(CorralConfig) if field.name not in GRPOConfig.__dataclass_fields__]


def config(**given: Any) -> CorralConfig:
    return CorralConfig(**settings("out", **given))


def table(first_header: str) -> list[list[str]]:
    """Rows of the table on the page whose first column has this header, cell by cell."""
    lines = PAGE.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_header} |")) + 2
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


class TestDefaults:
    def test_troll_with_its_own_settings(self) -> None:
        args = config()
        assert args.make_objective().name == "troll"
        assert (args.support_size, args.support_mass) == (64, 1 - 1e-5)
        assert args.make_correction() is None

    def test_settings_reach_objective_and_correction(self) -> None:
        args = config(
            objective="dppo", anchor="old", objective_config={"bound": 0.1}, correction="tis", correction_config={"cap": 3.0}
        )
        assert args.make_objective().config.bound == 0.1
        assert args.make_correction().config.cap == 3.0

    @pytest.mark.supports("run: settings through TRL's own parser", door="TRL")
    @pytest.mark.usefixtures("unchecked_shapes")  # TRL's parser passes types that its own annotations do not have
    def test_everything_comes_from_a_command_line(self) -> None:
        line = "--output_dir out --objective dppo --anchor rollout --support_size 16 --support_mass 0.5 --use_cpu --bf16 false"
        line += " --loss_type dr_grpo"
        parsed: CorralConfig
        (parsed,) = TrlParser(CorralConfig).parse_args_and_config(
            [*line.split(), "--objective_config", '{"divergence": "kl", "bound": Infinity}', "--advantage", "rloo"]
        )
        assert parsed.make_objective().config.bound == float("inf")
        assert (parsed.anchor, parsed.support_size, parsed.support_mass, parsed.advantage) == ("rollout", 16, 0.5, "rloo")

    def test_every_field_has_help_that_argparse_can_print(self) -> None:
        for field in dataclasses.fields(CorralConfig):
            if field.name in OWN_FIELDS:
                assert field.metadata["help"] % {}, field.name

    @pytest.mark.parametrize(
        ("objective", "objective_config", "anchor", "expected"),
        [
            ("troll", {}, "auto", "old"),
            ("ppo_clip", {}, "auto", "old"),
            ("dppo", {}, "auto", "rollout"),
            ("dppo", {"estimator": "topk"}, "auto", "old"),
            ("dppo", {}, "old", "old"),
            ("ppo_clip", {}, "rollout", "rollout"),
            ("troll", {}, "rollout", "rollout"),
        ],
    )
    def test_the_anchor_is_resolved(self, objective: str, objective_config: dict[str, Any], anchor: str, expected: str) -> None:
        args = config(objective=objective, objective_config=objective_config, anchor=anchor)
        assert args.resolve_anchor() == expected


VLLM = {"use_vllm": True, "vllm_importance_sampling_correction": False}


REGEX = {"vllm_structured_outputs_regex"} & GRPOConfig.__dataclass_fields__.keys()  # not every release has it
VESPO = {"vespo_k_pos"} & GRPOConfig.__dataclass_fields__.keys()  # likewise


def refused(given: dict[str, Any], why: str, feature: str) -> Any:
    """A case that is a row of docs/support.md."""
    return pytest.param(given, why, marks=pytest.mark.refuses(feature, door="TRL"))


class TestReduction:
    """`loss_type="auto"` is the objective's own, and TRL never sees anything else."""

    OWN: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("gspo", "gmpo", "sapo"), "grpo"),
        **dict.fromkeys(("reinforce", "ppo_clip", "clip_higher", "dual_clip", "cispo", "drpo", "m2po", "spo", "troll"), "dapo"),
        **dict.fromkeys(("aspo", "bapo", "clip_cov", "cppo", "decoupled_ppo", "distill", "kl_cov", "ripo", "vespo"), "dapo"),
        **dict.fromkeys(("dppo", "topr"), "dr_grpo"),
    }

    @pytest.mark.parametrize(("objective", "own"), OWN.items())
    def test_every_objective_has_its_own(self, monkeypatch: pytest.MonkeyPatch, objective: str, own: str) -> None:
        seen, inner = [], GRPOConfig.__post_init__
        monkeypatch.setattr(GRPOConfig, "__post_init__", lambda self: (seen.append(self.loss_type), inner(self))[1])
        monkeypatch.setattr("trl.__version__", "1.16.0")  # older ones are refused dapo
        args = config(objective=objective, loss_type="auto")
        assert (seen, args.loss_type, args.to_dict()["loss_type"], args.other_reduction) == ([own], own, own, None)
        assert config(objective=objective, loss_type=args.loss_type).loss_type == own

    def test_settings_of_the_objective_decide_too(self) -> None:
        args = config(loss_type="auto", objective_config='{"level": "sequence"}')  # JSON, as on a command line
        assert (args.loss_type, args.objective_config) == ("grpo", {"level": "sequence"})

    @pytest.mark.parametrize("how", RIGHT_REDUCTIONS)
    def test_another_that_is_asked_for_is_kept_and_warned_of_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
    ) -> None:
        for objective in ("gspo", "ppo_clip"):
            trainer = make_trainer(tmp_path, objective, loss_type=how)
            assert (trainer.args.loss_type, trainer.loss_type) == (how, how)
        sentence = f"loss_type='{how}' is {REDUCTIONS[how]}, which gives gspo another gradient than its own."
        assert [record.message[: len(sentence)] for record in caplog.records].count(sentence) == (how != "grpo")
        assert "gives ppo_clip another" not in caplog.text


class TestNumbers:
    @pytest.mark.refuses("other: numbers that no training can use", door="TRL")
    @pytest.mark.usefixtures("unchecked_shapes")  # texts and infinities where TRL's annotations have integers
    @pytest.mark.parametrize(
        ("name", "values", "why"),
        [
            *(
                (name, (0, -1, 1.5, "2", True), rf"`{name}` is a whole number ≥ 1.*; got ")
                for name in (
                    *("num_iterations", "per_device_train_batch_size", "gradient_accumulation_steps"),
                    *("steps_per_generation", "generation_batch_size", "max_completion_length"),
                )
            ),
            ("num_generations", (0, 1, -2), r"`num_generations` is a whole number ≥ 2"),
            (
                "learning_rate",
                (-1, float("nan"), float("inf"), "aut", "1e-4", None),
                r"finite and ≥ 0 \(or 'auto', which finds one\)",
            ),
            ("beta", (-1, float("nan"), float("inf")), r"`beta` is the weight of a KL and must be finite and ≥ 0"),
            ("weight_decay", (-1,), r"must be finite and ≥ 0; got -1"),
            ("adam_beta1", (1.0, -0.1), r"must lie in \[0, 1\)"),
            ("max_grad_norm", (-1,), r"`max_grad_norm` is a norm and must be ≥ 0, or None \(0 clips no gradient\); got -1"),
            ("top_p", (0, 2, -1), r"must lie in \(0, 1\]"),
            ("min_p", (2, -1), r"must lie in \[0, 1\]"),
            ("dataloader_num_workers", (-1,), r"is a whole number ≥ 0; got -1"),
            ("scale_rewards", ("sometimes", 1), r"`scale_rewards` is one of True, False, group, batch, none; got "),
        ],
    )
    def test_each_is_refused_by_name(self, name: str, values: tuple[Any, ...], why: str) -> None:
        for value in values:
            with pytest.raises(ValueError, match=f"^CorralConfig: .*{why}"):
                CorralConfig(**{**settings("out"), name: value})

    def test_what_is_usual_is_taken(self) -> None:
        given = {"learning_rate": 0, "beta": 0.0, "max_grad_norm": 0.0, "top_p": 1, "min_p": None, "scale_rewards": "none"}
        assert config(**given).scale_rewards == "none"


class TestRefusals:
    @pytest.mark.parametrize(
        ("given", "why"),
        [
            ({"objectiv": "troll"}, "there is no setting `objectiv`. Did you mean 'objective'? docs/trl-details.md"),
            ({"bound": 0.1}, "there is no setting `bound`. It is one of troll's: objective_config={'bound': 0.1}."),
            ({"objective": "ppo_clip", "clip_low": 0.1}, "It is one of ppo_clip's: objective_config={'clip_low': 0.1}."),
            ({"objective": "trol", "bound": 0.1}, "there is no setting `bound`."),
            ({"xyzzy": 1}, "there is no setting `xyzzy`. docs/trl-details.md has those that corral adds."),
        ],
        ids=str,
    )
    def test_settings_that_do_not_exist(self, given: dict[str, Any], why: str) -> None:
        with pytest.raises(TypeError, match=f"^CorralConfig: .*{re.escape(why)}"):
            config(**given)

    @pytest.mark.parametrize(
        ("given", "why"),
        [
            ({"objective": "trol"}, "Did you mean 'troll'"),
            ({"objective_config": {"bond": 1.0}}, "there is no setting `bond`"),
            ({"objective_config": "bound=1"}, "`objective_config` is a dictionary"),
            ({"objective_config": {"bound": -1.0}}, "must be ≥ 0"),
            ({"generation_kwargs": "max_tokens=3"}, "`generation_kwargs` is a dictionary, or JSON"),
            ({"loss_type": "dr_grpo", "max_completion_length": None}, "divides by `max_completion_length`, which is None"),
            ({"correction": "tiss"}, "Did you mean 'tis'"),
            ({"correction": ""}, "no correction"),
            ({"correction_config": {"cap": 1.0}}, "there is no `correction` to set"),
            ({"anchor": "new"}, "`anchor` is one of auto, old, rollout"),
            refused({"advantage": "gae"}, "needs a critic.*corral.gae", "advantage: gae"),
            ({"advantage": "mean"}, "`advantage` is one of grpo, dr_grpo, rloo, reinforce"),
            refused(
                {"advantage": "rloo", "scale_rewards": "batch"},
                "takes the place of `scale_rewards`",
                "advantage: any, beside TRL's `scale_rewards`",
            ),
            ({"advantage": "rloo", "multi_objective_aggregation": "normalize_then_sum"}, "takes the place of"),
            ({"support_size": 0}, "`support_size` is a whole number ≥ 1; got 0"),
            ({"support_size": True}, "`support_size` is a whole number ≥ 1"),
            ({"support_mass": 0.0}, "`support_mass` must lie in"),
            ({"support_mass": float("nan")}, "`support_mass` must lie in"),
            refused({"loss_type": "cispo"}, "Did you mean objective='cispo'", "other: TRL's `loss_type` cispo"),
            refused({"loss_type": "sapo"}, "Did you mean objective='sapo'", "other: TRL's `loss_type` sapo"),
            refused({"loss_type": "vespo"}, "Did you mean objective='vespo'", "other: TRL's `loss_type` vespo"),
            refused({"epsilon": 0.1}, "objective='ppo_clip'", "other: TRL's `epsilon`"),
            ({"epsilon_high": 0.28}, "objective='ppo_clip'"),
            refused({"delta": 2.0}, "objective='dual_clip'", "other: TRL's `delta`"),
            (
                {"objective": "sapo", "sapo_temperature_pos": 2.0},
                "`sapo_temperature_pos` set.*objective='sapo' with.*tau_positive",
            ),
            *(({"objective": "vespo", name: 1.0}, rf"`{name}` set.*objective='vespo' with.*'k_positive'") for name in VESPO),
            ({"temperature": 0.0}, "`temperature` divides.*must be > 0; got 0.0"),
            refused({"importance_sampling_level": "sequence"}, "objective='gspo'", "other: TRL's `importance_sampling_level`"),
            refused({"off_policy_mask_threshold": 0.5}, "correction='trm'", "other: TRL's `off_policy_mask_threshold`"),
            refused({"use_liger_kernel": True}, "use_liger_kernel", "other: Liger"),
            ({**VLLM, "objective": "dppo", "vllm_importance_sampling_correction": True}, "is in the ratio already"),
            ({**VLLM, "correction": "tis", "vllm_importance_sampling_correction": True}, "would both correct"),
            refused(
                {**VLLM, "correction": "tis", "objective": "dppo"},
                "they are one",
                "correction: any, with the sampler as anchor",
            ),
            refused(
                {**VLLM, "objective": "decoupled_ppo", "vllm_importance_sampling_correction": True},
                "'decoupled_ppo' weighs the old policy against the sampler itself",
                "correction: any, with decoupled_ppo",
            ),
            ({**VLLM, "objective": "decoupled_ppo", "correction": "tis"}, "a correction would do it twice"),
            ({**VLLM, "generation_kwargs": {"logprobs": 5}}, "ranks tokens by likelihood"),
            refused({**VLLM, "objective": "dppo", "top_p": 0.9}, "renormalise", "anchor: `rollout` with top_p, top_k or min_p"),
            ({**VLLM, "objective": "dppo", "top_k": 10}, "renormalise"),
            ({**VLLM, "objective": "dppo", "min_p": 0.1}, "renormalise"),
            ({**VLLM, "objective": "dppo", "generation_kwargs": {"top_p": 0.9}}, "renormalise"),
            *(({**VLLM, "objective": "dppo", name: "[0-9]+"}, "renormalise") for name in REGEX),
            refused(
                {**VLLM, "anchor": "rollout", "support_size": 20, "support": "union"},
                "support='union' needs the old policy's log-probs of any token",
                "anchor: `rollout` with a union, or with DPPO on the full vocabulary, and vLLM or a rollout function",
            ),
            (
                {**VLLM, "anchor": "rollout", "objective": "dppo", "objective_config": {"estimator": "full"}},
                "estimator='full' reads every token",
            ),
            ({**VLLM, "vllm_mode": "colocate", "anchor": "rollout"}, "it reports 20 at most; got 64. Use support_size=20"),
            ({**VLLM, "anchor": "rollout", "support_size": 20, "top_p": 0.9}, "renormalise"),
        ],
        ids=str,
    )
    @pytest.mark.usefixtures("unchecked_shapes")
    def test_each_with_a_sentence(self, given: dict[str, Any], why: str) -> None:
        with pytest.raises(ValueError, match=why):
            config(**given)

    @pytest.mark.parametrize(
        "given",
        [
            {**VLLM, "objective": "dppo"},
            {**VLLM, "objective": "dppo", "generation_kwargs": {"top_p": 1.0}},
            {**VLLM, "objective": "dppo", "anchor": "old", "top_p": 0.9},
            {**VLLM, "objective": "decoupled_ppo", "top_p": 0.9},
            {**VLLM, "objective": "troll", "top_p": 0.9},
            {**VLLM, "objective": "dppo", "objective_config": {"estimator": "topk"}, "anchor": "rollout", "support_size": 20},
            {**VLLM, "vllm_mode": "server", "anchor": "rollout"},
            {**VLLM, "objective": "troll", "vllm_importance_sampling_correction": True},
            {**VLLM, "objective": "troll", "correction": "icepop"},
            {"objective": "dppo", "top_p": 0.9},
            *({"loss_type": how} for how in RIGHT_REDUCTIONS),
        ],
        ids=str,
    )
    def test_what_is_not_refused(self, given: dict[str, Any]) -> None:
        config(**given)

    def test_what_an_objective_needs_and_no_door_has(self, monkeypatch: pytest.MonkeyPatch) -> None:
        @dataclasses.dataclass(frozen=True, kw_only=True)
        class Needy(ReinforceConfig):
            needs: ClassVar[frozenset[str]] = frozenset({"logp_new", "mask", "dist_old", "logp_rollout"})

        monkeypatch.setitem(OBJECTIVES, "needy", (reinforce, Needy))
        args = config(objective="needy")
        assert args.needs_support, "a support is of both policies, or of none"
        for sampler in ("vllm", "rollout_func", "transformers"):
            args.check_sampler(sampler)
        assert args.records_logps
        if "use_transformers_continuous_batching" in GRPOConfig.__dataclass_fields__:
            args.use_transformers_continuous_batching = True
            with pytest.raises(ValueError, match="transformers' continuous batching reports none"):
                args.check_sampler("transformers")

    @pytest.mark.usefixtures("unchecked_shapes")
    @pytest.mark.parametrize("given", [{"support_size": 8.5}, {"support_mass": "0.9"}], ids=str)
    def test_other_types(self, given: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=r"`support_(size` is a whole number ≥ 1|mass` must lie in \(0, 1\])"):
            config(**given)

    SAMPLING: ClassVar[list[tuple[dict[str, Any], str]]] = [
        ({"repetition_penalty": 1.2}, r"`repetition_penalty` is 1.2: completions must be drawn from .* Leave it at 1"),
        ({"generation_kwargs": {"repetition_penalty": 1.2}}, "generation_kwargs has `repetition_penalty`, not known to leave"),
        ({"generation_kwargs": {"temperature": 0.5}}, r"has temperature 0.5, and the trained policy 0.9: .* Use `temperature`"),
        *(
            ({"generation_kwargs": {"max_tokens": 3, **given}}, f"has `{next(iter(given))}`, not known .* Leave that out")
            for given in (
                {"logit_bias": {3: 1.0}}, {"frequency_penalty": 0.1}, {"presence_penalty": -0.1}, {"bad_words": ["w1"]},
                {"min_tokens": 2}, {"min_new_tokens": 2}, {"allowed_token_ids": [3, 4]}, {"no_repeat_ngram_size": 2},
                {"typical_p": 0.9}, {"do_sample": False}, {"num_beams": 2}, {"ignore_eos": True}, {"max_new_token": 3},
            )
        ),
    ]  # fmt: skip

    @pytest.mark.refuses("anchor: any, with penalties, biases or another temperature of the sampler", door="TRL")
    @pytest.mark.parametrize(("given", "why"), SAMPLING, ids=[str(given) for given, _ in SAMPLING])
    def test_samplers_that_draw_from_another_policy(self, given: dict[str, Any], why: str) -> None:
        for more in ({}, VLLM, {"objective": "dppo"}, {"objective": "dppo", "anchor": "old"}, {"objective": "dppo", **VLLM}):
            with pytest.raises(ValueError, match=why):
                config(**more, **given)

    @pytest.mark.parametrize(
        "given",
        [
            {"max_new_tokens": 3, "cache_implementation": "static", "stop_strings": ["w1"], "seed": 1},
            {"temperature": 0.9, "repetition_penalty": 1.0, "presence_penalty": 0.0, "do_sample": True, "num_beams": 1},
            {"top_p": 0.9, "top_k": 4, "min_p": 0.01},
        ],
        ids=str,
    )
    def test_samplers_that_do_not(self, given: dict[str, Any]) -> None:
        config(generation_kwargs=given).check_sampler("transformers")
        config(generation_kwargs=given, **VLLM)

    @pytest.mark.refuses("anchor: any, with a model whose own generation_config changes probabilities", door="TRL")
    def test_a_model_that_would_be_sampled_otherwise(self, tmp_path: Path) -> None:
        model = tiny_model()
        model.generation_config.repetition_penalty = 1.3  # TRL overrides it
        model.generation_config.typical_p = 1.0
        make_trainer(tmp_path, "ppo_clip", model=model)
        model.generation_config.no_repeat_ngram_size = 2
        with pytest.raises(ValueError, match=r"generation_config has no_repeat_ngram_size=2: .*generation_config.no_repeat"):
            make_trainer(tmp_path, "ppo_clip", model=model)
        config().check_sampler("vllm", model.generation_config)  # vLLM is told everything by TRL

    @pytest.mark.refuses("other: Unsloth", door="TRL")
    def test_unsloth_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "unsloth", ModuleType("unsloth"))
        with pytest.raises(ValueError, match="Unsloth rewrites GRPOTrainer's methods"):
            config()

    def test_releases_of_trl(self, caplog: pytest.LogCaptureFixture) -> None:
        low, high = TRL_RANGE
        for version in (low, f"{low}.1", "1.16.0", "1.16.5"):
            check_trl(version)
        assert not caplog.records
        for version in ("0.29.1", "1.6.0"):
            with pytest.raises(ImportError, match=rf"found {version}.*pip install 'trl>={low},<{high}'"):
                check_trl(version)

    @pytest.mark.refuses("other: `loss_type` dapo and luspo with TRL before 1.10", door="TRL")
    @pytest.mark.parametrize("how", REDUCTIONS)
    def test_what_older_releases_average_wrongly(self, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
        monkeypatch.setattr("trl.__version__", "1.9.2")
        if how not in WRONG_BEFORE:
            config(loss_type=how)
            return
        with pytest.raises(ValueError, match=rf"'{how}' is averaged over the wrong count by TRL 1.9.2. Install TRL 1.10"):
            config(loss_type=how)


SAMPLERS = ("transformers", "vLLM", "rollout_func")
ANCHORED: list[tuple[str, dict[str, Any]]] = [
    (name, {}) for name in objective_names() if make_objective(name).config.anchor == "rollout"
]
CELLS = [(row[0], row[1], sampler, cell) for row in table("anchor") for sampler, cell in zip(SAMPLERS, row[2:], strict=True)]


class TestAnchorTable:
    """Every cell of the page's table is made and looked at."""

    def test_the_table_is_whole(self) -> None:
        assert len(CELLS) == 21
        assert {cell.partition(":")[0] for *_, cell in CELLS} == {"old pass", "sampler", "refused"}

    @pytest.mark.parametrize(("anchor", "reads", "sampler", "cell"), CELLS, ids=[" · ".join(cell[:3]) for cell in CELLS])
    def test_a_cell(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anchor: str, reads: str, sampler: str, cell: str
    ) -> None:
        monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", FakeVLLM)
        objectives = {
            "the sampled token": [("ppo_clip", {}), ("dppo", {})],
            "the sampled token, by an objective whose own anchor is `rollout`": ANCHORED,
            "a support": [("troll", {}), ("dppo", {"estimator": "topk"})],
        }[reads]
        given: dict[str, Any] = {"anchor": anchor.split("`")[1]}
        if "top_p" in anchor:
            given["top_p"] = 0.9
        if sampler == "vLLM":
            given |= VLLM
        elif sampler == "rollout_func":
            alone = fixed_rollout([-0.5, -1.0, -1.5])
            ranked = fixed_rollout([[-0.5, -1.1], [-1.0], [-1.5]], [[3, 7], [4], [5]])
            given["trainer_kwargs"] = {"rollout_func": ranked if cell.startswith("sampler: its likeliest") else alone}
        for objective, objective_config in objectives:
            if cell.startswith("refused"):
                with pytest.raises(ValueError, match="renormalise"):
                    make_trainer(tmp_path, objective, objective_config=objective_config, **given)
                continue
            trainer = make_trainer(tmp_path, objective, objective_config=objective_config, **given)
            spy = Spy.on(trainer)
            inputs = rollouts(trainer)[0]
            trainer.compute_loss(trainer.model, inputs)
            (batch,) = spy.batches
            source = "old_per_token_logps" if cell.startswith("old pass") else "sampling_per_token_logps"
            torch.testing.assert_close(batch.logp_old[batch.mask], inputs[source][batch.mask])
            assert (batch.dist_old is not None) == (reads == "a support")
            if "sampling_per_token_logps" in inputs:
                gap = (inputs["old_per_token_logps"] - inputs["sampling_per_token_logps"])[batch.mask]
                assert gap.abs().max() > (0 if sampler == "transformers" else 0.01), (
                    "the two sources must differ, or nothing was told apart"
                )


class TestPage:
    def test_every_setting_is_there_with_its_default(self) -> None:
        rows = {row[0].strip("`"): row[1] for row in table("setting")}
        assert list(rows) == OWN_FIELDS
        defaults = {field.name: field.default for field in dataclasses.fields(CorralConfig)}
        for name, shown in rows.items():
            assert eval(shown.strip("`")) == pytest.approx(defaults[name], abs=1e-12), name

    def test_reductions_and_releases(self) -> None:
        assert all(f"`{how}` (" in PAGE for how in REDUCTIONS)
        low, high = TRL_RANGE
        last = f"1.{int(high.split('.')[1]) - 1}"
        assert f"TRL {low} – {last}" in PAGE
        assert f"| TRL before {low} |" in PAGE
        for how, release in WRONG_BEFORE.items():
            assert f"`loss_type` `{how}` with TRL before {release}" in PAGE
        assert f"| TRL {high} and later |" in PAGE

    def test_links_lead_somewhere(self) -> None:
        for target in re.findall(r"\]\(([^)#]+)", PAGE):
            assert (ROOT / "docs" / target).exists(), target


@pytest.mark.refuses("other: other releases of TRL", door="TRL")
def test_the_door_opens_when_it_is_used_and_to_no_other_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    light = "import sys, corral.llm; sys.exit(bool({'trl', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", light], timeout=120, check=False).returncode == 0, "it is to be light"
    assert corral.llm.CorralTrainer.__mro__[1].__name__ == "GRPOTrainer"
    with pytest.raises(AttributeError, match="Nothing"):
        corral.llm.Nothing  # noqa: B018
    for module in ("corral.trl.trainer", "corral.trl.config", "corral.trl.api"):  # to be imported again
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr("trl.__version__", "1.6.0")
    with pytest.raises(ImportError, match=r"found 1\.6\.0"):
        corral.llm.CorralTrainer  # noqa: B018


@pytest.mark.supports("kept: a stock script with three lines changed", door="TRL")
@pytest.mark.skipif("dapo" not in RIGHT_REDUCTIONS, reason="the example averages as TRL does by default")
def test_the_example_is_stock_but_for_three_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = (ROOT / "examples" / "plug_into_trl.py").read_text().replace("max_steps=80", "max_steps=40")
    changed = re.findall(r"^.*# stock: (.+)$", example, re.MULTILINE)
    assert 0 < len(changed) <= 3
    stock = re.sub(r"^( *).*# stock: (.+)$", r"\1\2", example, flags=re.MULTILINE)
    assert "corral" not in stock.split('"""')[2]
    monkeypatch.chdir(tmp_path)
    for name, script in (("changed", example), ("unchanged", stock)):
        (tmp_path / f"{name}.py").write_text(script)
        runpy.run_path(f"{name}.py", run_name="__main__")
        printed = capsys.readouterr().out
        start, end = (float(x) for x in re.findall(r"reward: ([\d.]+) → ([\d.]+)", printed)[0])
        assert end > start + 0.1, printed


def test_the_support_is_the_published_one():
    # Becker et al. 2025: 64 tokens, and none after 1 − 1e-5 of the mass.
    defaults = {name: field.default for name, field in CorralConfig.__dataclass_fields__.items()}
    assert (defaults["support_size"], defaults["support_mass"]) == (64, 1 - 1e-5)
