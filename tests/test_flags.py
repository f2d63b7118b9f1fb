"""No option is silently ignored: what a recipe's loss does not read is refused, by name, before anything is loaded."""

import argparse
import dataclasses
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from transformers import TrainingArguments
from trl import GRPOConfig

import ares_dapo
import dsv32_stable
import grpo_tokenclip
import minirl_async_r3
import minirl_sync
import rlvr_common
import rlvr_launch
from ares_dapo import AresDAPOConfig
from dsv32_stable import DSV32Config
from evaluate import EvaluateConfig
from grpo_tokenclip import GRPOTokenClipConfig
from minirl_async_r3 import MiniRLAsyncConfig
from minirl_sync import MiniRLConfig
from rlvr_common import HINTS, LOSS_FLAGS, SAMPLER_FLAGS, RLVRConfig, refuse_unused
from rlvr_data import load_math_rows
from rlvr_launch import Parser, make_parser

REPO = Path(__file__).resolve().parents[1]

# For every sorted option, a value that is not its default and that TRL itself accepts.
CHANGED = {
    "beta": 0.1,
    "num_iterations": 2,
    "epsilon": 0.3,
    "epsilon_high": 0.28,
    "delta": 2.0,
    "loss_type": "dr_grpo",
    "importance_sampling_level": "sequence",
    "sapo_temperature_neg": 2.0,
    "sapo_temperature_pos": 2.0,
    "vespo_k_pos": 3.0,
    "vespo_lambda_pos": 4.0,
    "vespo_k_neg": 4.0,
    "vespo_lambda_neg": 3.0,
    "multi_objective_aggregation": "normalize_then_sum",
    "scale_rewards": "group",
    "reward_weights": [2.0],
    "mask_truncated_completions": True,
    "sync_ref_model": True,
    "ref_model_mixup_alpha": 0.5,
    "ref_model_sync_steps": 64,
    "top_entropy_quantile": 0.2,
    "entropy_coef": 0.01,
    "use_adaptive_entropy": True,
    "entropy_coef_min": 0.001,
    "entropy_coef_max": 0.5,
    "entropy_coef_delta": 0.001,
    "entropy_target": 0.3,
    "router_aux_loss_coef": 0.01,
    "off_policy_mask_threshold": 0.5,
    "use_bias_correction_kl": False,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_cap": 2.0,
    "vllm_importance_sampling_clip_max": 4.0,
    "vllm_importance_sampling_clip_min": 0.5,
    "label_smoothing_factor": 0.1,
    "generation_kwargs": {"num_beams": 2},
    "repetition_penalty": 1.1,
    "cache_implementation": "static",
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"num_blocks": 64},
    "use_transformers_paged": True,
    "ds3_gather_for_generation": False,
    "top_p": 0.8,
    "top_k": 20,
    "min_p": 0.1,
}
MAY_BE_INFINITE = {"is_cap", "token_clip_high", "seq_clip_high", "layer_clip_alpha", "gradloc_factor"}
TRUNCATION = {
    "top_p",
    "top_k",
    "min_p",
}  # of the sampling distribution: the trainer base replays the support, or warns
HONOURED = {"beta", "num_iterations", "epsilon", "epsilon_high", "scale_rewards", "mask_truncated_completions"}
REFUSED = sorted((LOSS_FLAGS | SAMPLER_FLAGS) - HONOURED)

# Options of GRPOConfig that neither change the loss nor the sampling distribution behind the recipe's back.
NEITHER = {
    "model": {"model_init_kwargs", "trust_remote_code", "disable_dropout", "cast_lm_head_to_fp32"},
    "batch and data": {
        "num_generations",
        "num_generations_eval",
        "max_completion_length",
        "shuffle_dataset",
        "pad_to_multiple_of",
        "generation_batch_size",
        "steps_per_generation",
        "chat_template_kwargs",
        "max_tool_calling_iterations",
    },
    "sampling that training and both engines read": {"temperature"},
    "where vLLM runs": {
        "use_vllm",
        "vllm_mode",
        "vllm_model_impl",
        "vllm_enable_sleep_mode",
        "vllm_structured_outputs_regex",
        "vllm_server_base_url",
        "vllm_server_host",
        "vllm_server_port",
        "vllm_server_timeout",
        "vllm_group_port",
        "vllm_gpu_memory_utilization",
        "vllm_max_model_length",
        "vllm_tensor_parallel_size",
    },
    "logs": {
        "log_completions",
        "log_multimodal",
        "num_completions_to_print",
        "log_unique_prompts",
        "log_completions_hub_repo",
    },
}


class PastTheGuard(Exception):
    """Raised in place of the first thing that main() loads after its flags were accepted."""


@pytest.fixture
def main_with(monkeypatch, tmp_path):
    """Run the recipe's own main() on a config made of keyword arguments, up to where it would load the tokenizer."""

    def run(**changes):
        args = GRPOTokenClipConfig(output_dir=str(tmp_path), **changes)
        model_args = type("ModelArgs", (), {"model_name_or_path": "nowhere"})
        monkeypatch.setattr(grpo_tokenclip, "parse_args", lambda *_: (args, model_args))

        def stop(*args, **kwargs):
            raise PastTheGuard

        monkeypatch.setattr(grpo_tokenclip.AutoTokenizer, "from_pretrained", stop)
        grpo_tokenclip.main()

    return run


def defaults(config_class):
    return {f.name: f.default for f in dataclasses.fields(config_class)}


def test_every_sorted_option_has_a_changed_value_here():
    assert set(CHANGED) == LOSS_FLAGS | SAMPLER_FLAGS | TRUNCATION
    unchanged = [name for name, value in CHANGED.items() if value == defaults(RLVRConfig)[name]]
    assert not unchanged


def test_every_option_of_trl_is_sorted():
    """A TRL release with a new option fails here: decide whether our losses read it, then name it in one list."""
    neither = [name for names in NEITHER.values() for name in names]
    assert len(neither) == len(set(neither))
    assert not set(neither) & (LOSS_FLAGS | SAMPLER_FLAGS) and not LOSS_FLAGS & SAMPLER_FLAGS
    own = set(defaults(GRPOConfig)) - set(defaults(TrainingArguments))
    assert len(own) > 50  # the comparison compares something
    assert own - LOSS_FLAGS - SAMPLER_FLAGS - TRUNCATION - set(neither) == set(), "unsorted options"
    assert (LOSS_FLAGS | SAMPLER_FLAGS | set(neither)) - set(defaults(GRPOConfig)) == set(), (
        "options TRL no longer has"
    )
    assert set(HINTS) <= LOSS_FLAGS | SAMPLER_FLAGS


def test_no_option_of_ours_takes_a_name_of_trls_by_accident():
    """Ours may restate TRL's default on purpose; a name that a later TRL adds would silently be another option."""
    base = {"bf16", "scale_rewards", "vllm_importance_sampling_correction", "logging_steps", "loss_type"}
    base |= {"logging_nan_inf_filter", "disable_dropout"}
    recipes = {"output_dir", "learning_rate", "num_generations", "epsilon", "epsilon_high", "beta", "scale_rewards"}
    for config_class, restated in ((RLVRConfig, base), (GRPOTokenClipConfig, recipes)):
        assert set(config_class.__annotations__) & set(defaults(GRPOConfig)) == restated


@pytest.mark.parametrize("name", REFUSED)
def test_the_recipe_refuses_what_its_loss_does_not_read(name, main_with):
    alias = {"use_transformers_paged": "use_transformers_continuous_batching"}  # TRL turns the one into the other
    with pytest.raises(
        (ValueError, SystemExit), match=rf"--{alias.get(name, name)} .* is set, but this recipe never reads it"
    ):
        main_with(**{name: CHANGED[name]})


@pytest.mark.parametrize("name", sorted(HONOURED))
def test_the_recipe_takes_what_its_loss_reads(name, main_with):
    with pytest.raises(PastTheGuard):
        main_with(token_clip="none", **{name: CHANGED[name]})


@pytest.mark.parametrize("name", ["epsilon", "epsilon_high"])
def test_the_recipe_refuses_the_ratio_clip_where_icepop_replaces_it(name, main_with):
    with pytest.raises((ValueError, SystemExit), match=f"--{name} .* is set, but this recipe never reads it"):
        main_with(token_clip="icepop", **{name: CHANGED[name]})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"token_clip_low": 6.0}, "token_clip_low"),
        ({"token_clip_high": -1.0}, "token_clip_high"),
        ({"seq_clip_low": 1.1, "seq_clip_high": 0.9}, "seq_clip_low"),
        ({"scale_rewards": "std"}, "scale_rewards std"),
        ({"rollout_dtype": "fp4"}, "rollout_dtype fp4"),
    ],
)
def test_impossible_values_are_refused_before_anything_is_loaded(options, named, tmp_path):
    with pytest.raises((ValueError, SystemExit), match=f"--{named}"):
        GRPOTokenClipConfig(output_dir=str(tmp_path), **options)


def test_defaults_are_never_refused(main_with, tmp_path):
    with pytest.raises(PastTheGuard):
        main_with()
    refuse_unused(RLVRConfig(str(tmp_path)), honoured=set())


@pytest.mark.parametrize("name", sorted(TRUNCATION))
def test_truncated_sampling_is_taken_and_its_replay_needs_it(name, main_with):
    for replay in (False, True):  # without the replay the first sampling warns: tests/test_support.py
        with pytest.raises(PastTheGuard):
            main_with(keep_sampling_mask=replay, **{name: CHANGED[name]})
    with pytest.raises((ValueError, SystemExit), match="--keep_sampling_mask: nothing is truncated"):
        main_with(keep_sampling_mask=True)


@pytest.mark.parametrize("name", sorted(SAMPLER_FLAGS - {"use_transformers_paged"}))
def test_sampler_options_are_trls_business_with_vllm(name, tmp_path):
    refuse_unused(RLVRConfig(str(tmp_path), use_vllm=True, **{name: CHANGED[name]}), honoured=LOSS_FLAGS)
    with pytest.raises((ValueError, SystemExit), match=f"--{name} "):
        refuse_unused(RLVRConfig(str(tmp_path), **{name: CHANGED[name]}), honoured=LOSS_FLAGS)


@pytest.mark.parametrize("name", sorted(LOSS_FLAGS))
def test_a_loss_flag_is_free_exactly_when_it_is_honoured(name, tmp_path):
    args = RLVRConfig(str(tmp_path), use_vllm=True, **{name: CHANGED[name]})
    refuse_unused(args, honoured=LOSS_FLAGS)
    refuse_unused(args, honoured={name, "vllm_importance_sampling_clip_max"})  # the deprecated cap sets this one too
    end = "remove it$" if name == "loss_type" else "remove it, default is"  # its default is no value of TRL's
    with pytest.raises((ValueError, SystemExit), match=f"--{name} .*{end}"):
        refuse_unused(args, honoured=set())


@pytest.mark.parametrize("name", sorted(HINTS))
def test_the_refusal_names_the_flag_to_use_instead(name, tmp_path):
    with pytest.raises((ValueError, SystemExit)) as refusal:
        refuse_unused(RLVRConfig(str(tmp_path), **{name: CHANGED[name]}), honoured=set())
    assert f"({HINTS[name]})" in str(refusal.value) and str(CHANGED[name]) in str(refusal.value)


def test_honouring_a_flag_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises((ValueError, SystemExit), match=r"\['epsilom'\]"):
        refuse_unused(RLVRConfig(str(tmp_path)), honoured={"epsilon", "epsilom"})


def test_a_recipe_that_changes_a_default_must_read_it(tmp_path):
    """A fork that restates a loss flag with another default and forgets it in its loss is caught like a user."""

    @dataclass
    class Fork(RLVRConfig):
        entropy_coef: float = field(default=0.01, metadata={"help": "forgotten"})

    with pytest.raises((ValueError, SystemExit), match="--entropy_coef 0.01 is set"):
        refuse_unused(Fork(str(tmp_path)), honoured={"epsilon"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_clip": "icepops"}, "--token_clip icepops is unknown: use none, tis or icepop"),
        ({"seq_clip_low": 0.995}, "SeqClip needs both bounds"),
        ({"seq_clip_high": 1.005}, "SeqClip needs both bounds"),
        ({"aggregation": "mean"}, "--aggregation mean is unknown: use one of token_mean"),
    ],
)
def test_the_recipes_own_options_are_checked(options, message, tmp_path):
    with pytest.raises((ValueError, SystemExit), match=message):
        GRPOTokenClipConfig(output_dir=str(tmp_path), **options)


def test_a_refused_flag_of_the_command_line_stops_before_anything_is_written(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["grpo_tokenclip.py", "--importance_sampling_level=sequence"])
    with pytest.raises(
        (ValueError, SystemExit), match=r"--importance_sampling_level sequence .*--seq_clip_low / --seq_clip_high"
    ):
        grpo_tokenclip.main()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("file", sorted((REPO / "recipes" / "configs").glob("*.yaml")), ids=lambda f: f.stem)
def test_every_config_of_the_repository_passes_the_guard(file, monkeypatch, tmp_path):
    recipes = {"ares": ares_dapo, "async": minirl_async_r3, "minirl": minirl_sync, "dsv32": dsv32_stable}
    recipe = next((r for word, r in recipes.items() if word in file.stem), grpo_tokenclip)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rlvr_launch, "is_vllm_available", lambda: True)
    monkeypatch.setattr(sys, "argv", [f"{recipe.__name__}.py", "--config", str(file)])

    def stop(*args, **kwargs):
        raise PastTheGuard

    monkeypatch.setattr(recipe.AutoTokenizer, "from_pretrained", stop)
    with pytest.raises(PastTheGuard):
        recipe.main()


RECIPES = [
    AresDAPOConfig,
    DSV32Config,
    GRPOTokenClipConfig,
    MiniRLAsyncConfig,
    MiniRLConfig,
    EvaluateConfig,
]


@pytest.mark.parametrize("config_class", RECIPES)
def test_no_number_of_the_short_help_is_taken_as_it_comes(config_class, tmp_path):
    parser = make_parser(config_class, "") if config_class is not EvaluateConfig else Parser(EvaluateConfig)
    shown = [a for a in parser._actions if a.help != argparse.SUPPRESS and a.dest in config_class.__dataclass_fields__]
    kinds = {a.dest: a.type.__name__ for a in shown}  # `int | None` too
    names = [name for name, kind in kinds.items() if kind in ("int", "float")]
    assert len(names) > (45 if config_class is not EvaluateConfig else 10)
    for name in names:
        finite = [] if name in MAY_BE_INFINITE else [math.inf]
        for value in [-7] if kinds[name] == "int" else [-7.0, math.nan, *finite]:
            with pytest.raises(ValueError, match=name):
                config_class(output_dir=str(tmp_path), **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", 1.1),
        ("max_steps", 0),
        ("max_steps", 1.5),
        ("save_steps", 0),
        ("max_completion_length", 0),
        ("verifier_memory_mb", 100),
        ("rank_ema", 1.0),
        ("prompt_style", "box"),
        ("ares_step", "free"),
        ("rank_mode", "static"),
        ("expect_distributed", "zero3"),
    ],
)
def test_the_edge_of_each_range(name, value, tmp_path):
    with pytest.raises(ValueError, match=f"^--{name} {value} "):
        RLVRConfig(str(tmp_path), **{name: value})


def test_a_prompt_style_that_is_there_is_taken(tmp_path):
    RLVRConfig(str(tmp_path), prompt_style="boxed", top_p=1.0, max_steps=-1, min_p=None, learning_rate=0.0)


@pytest.mark.parametrize("flag", ["--dataset", "--eval_source"])
def test_a_data_set_that_is_not_there_is_refused_by_its_flag(flag, monkeypatch, tmp_path):
    monkeypatch.setattr(rlvr_common, "load_math_rows", lambda s, **o: [s] if s == "tiny" else load_math_rows(s, **o))
    monkeypatch.setattr(rlvr_common, "load_math_rows_report", str)
    args = RLVRConfig(str(tmp_path), **{flag[2:]: "nothere.jsonl"})
    sentence = f"^{flag} nothere.jsonl: no file nothere.jsonl.*; give a file, tiny, or a hub id"
    with pytest.raises(ValueError, match=sentence):
        rlvr_common.load_rows(args, None)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (
            ["--rl_stability", "foo"],
            "--rl_stability foo must hold nested keys: unbiased_kl, sequence_masking, consistency",
        ),
        (["--rl_stability", "{a: ["], "--rl_stability {a: [ is not YAML"),
        (["--rl_stability", "[1]"], "--rl_stability [1] must hold nested keys"),
        (["--rl_stability", "{unbiased_kl: 1}"], "--rl_stability.unbiased_kl: nobody reads it as it is"),
        (
            ["--rl_stability.sequence_masking.enable", "false"],
            "nobody reads it; use enabled, divergence_threshold, min_keep_ratio (did you mean enabled?)",
        ),
        (
            ["--rl_stability.sequence_mask.enabled", "false"],
            "use unbiased_kl, sequence_masking, consistency with keys of their own (did you mean",
        ),
        (
            ["--rl_stability.sequence_masking.min_keep_ratio", "2"],
            "--rl_stability.sequence_masking.min_keep_ratio 2 must be a number in [0, 1]",
        ),
        (["--rl_stability.sequence_masking.enabled", "{a"], "--rl_stability.sequence_masking.enabled {a is not YAML"),
    ],
)
def test_a_wrong_block_of_switches_ends_with_one_sentence(argv, sentence, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        dsv32_stable.main(argv)
    assert str(end.value).startswith(f"error: {sentence}") and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("config_class", [MiniRLConfig, MiniRLAsyncConfig])
def test_without_the_clip_only_the_bound_that_was_given_is_named(config_class, tmp_path):
    for name in ("epsilon", "epsilon_high"):
        with pytest.raises(ValueError, match=f"^--no_clip reads no bounds: remove --{name} 0.1$"):
            config_class(str(tmp_path), no_clip=True, **{name: 0.1})


@pytest.mark.parametrize("argv", [["--no_clip"], ["--no_is"], ["--length_norm"], ["--num_minibatches", "8"]])
def test_every_ablation_of_minirl_passes_the_guard(argv, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["minirl_sync.py", *argv])

    def stop(*args, **kwargs):
        raise PastTheGuard

    monkeypatch.setattr(minirl_sync.AutoTokenizer, "from_pretrained", stop)
    with pytest.raises(PastTheGuard):
        minirl_sync.main()


def test_without_the_clip_its_bounds_are_refused(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["minirl_sync.py", "--no_clip", "--epsilon_high", "0.3"])
    with pytest.raises(SystemExit, match=r"--no_clip reads no bounds: .*--epsilon_high 0.3"):
        minirl_sync.main()


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--epsilom", "0.3"], "--epsilom"),
        (["--learning", "0.3"], "--learning"),  # no guessing from a prefix
        (["--model_name_or_path", "x", "0.3"], "0.3"),
    ],
)
def test_unknown_flags_end_the_program_with_one_sentence(argv, named, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        grpo_tokenclip.parse_args(GRPOTokenClipConfig, "", argv)
    assert str(end.value).startswith("error: ") and named in str(end.value)


@pytest.mark.parametrize("key", ["epsilom", "no_shuffle_dataset", "config"])
def test_unknown_keys_of_a_config_file_end_the_program(key, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text(f"model_name_or_path: x\n{key}: 0.3\n")
    with pytest.raises(SystemExit) as end:
        grpo_tokenclip.parse_args(GRPOTokenClipConfig, "", ["--config", str(file)])
    assert str(end.value) == f"error: --config {file}: nobody reads {key}; --help_all lists the options"
