"""Around a run: help, config files, output folders, batch arithmetic, launch checks, metrics and curves."""

import itertools
import json
import math
import os
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import yaml
from accelerate.utils import DistributedType
from trl import GRPOConfig

import grpo_tokenclip
import rlvr_launch
import rlvr_report
from ares_dapo import AresDAPOConfig
from dsv32_stable import DSV32Config
from grpo_tokenclip import GRPOTokenClipConfig
from guard_drills import largest_file
from minirl_async_r3 import MiniRLAsyncConfig
from minirl_sync import MiniRLConfig
from rlvr_common import RLVRConfig
from rlvr_launch import (
    COMMON_OPTIONS,
    TINY_CONFIG,
    batch_line,
    check_batch,
    check_config_file,
    check_distributed,
    check_processes,
    derive_accumulation,
    find_model,
    make_parser,
    nearest,
    parse_args,
    requested_processes,
    settle_output_dir,
)
from rlvr_report import (
    MORE_PANELS,
    PANELS,
    RunReport,
    plot_comparison,
    plot_curves,
    read_metrics,
    series,
    smooth,
    table,
    to_json,
)

REPO = Path(__file__).resolve().parents[1]
RECIPE = REPO / "recipes" / "grpo_tokenclip.py"


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """An empty working directory and no launcher in the environment."""
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "RANK", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "FSDP_VERSION"):
        monkeypatch.delenv(name, raising=False)


def parse(*argv):
    return parse_args(GRPOTokenClipConfig, grpo_tokenclip.__doc__, list(argv))


def refusal(*argv):
    with pytest.raises(SystemExit) as end:
        parse(*argv)
    assert str(end.value).startswith("error: ")
    return str(end.value)


def write(path, text):
    path.write_text(text)
    return str(path)


# --- help ------------------------------------------------------------------------------------------------------------


def help_text(capsys, *argv):
    with pytest.raises(SystemExit) as end:
        parse(*argv)
    assert end.value.code == 0
    return capsys.readouterr().out


def offered(text):
    return set(re.findall(r"^  --(\w+)", text, flags=re.M))


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_is_the_recipes_own_options_and_the_common_ones(flag, capsys):
    text = help_text(capsys, flag, "--max_steps", "3")
    own = set(GRPOTokenClipConfig.__dataclass_fields__) - set(GRPOConfig.__dataclass_fields__)
    assert len(COMMON_OPTIONS) == 24 and {"token_clip", "seq_clip_low", "dataset", "rollout_dtype"} <= own
    assert {"top_p", "top_k", "min_p", "save_total_limit", "vllm_server_base_url", "scale_rewards"} <= offered(text)
    assert offered(text) >= own | COMMON_OPTIONS | {"help"}
    assert not offered(text) & {"adam_beta1", "loss_type", "no_remove_unused_columns", "use_vllm"}
    assert len(text.splitlines()) < 150
    assert grpo_tokenclip.__doc__.splitlines()[0] in text and "accelerate launch recipes/grpo_tokenclip.py" in text


def test_help_shows_defaults(capsys):
    text = help_text(capsys, "--help")
    options = re.split(r"^  --", text, flags=re.M)[1:]
    shown = {re.match(r"\w+", o)[0]: " ".join(o.split()) for o in options}
    assert all(re.search(r"\(default: [^)]+\)", o) for name, o in shown.items() if name != "help")
    for name, default in (
        ("token_clip_low", "0.5"),
        ("seq_clip_high", "None"),
        ("aggregation", "seq_mean_token_mean"),
    ):
        assert f"(default: {default})" in shown[name]
    assert "(default: runs/grpo_tokenclip)" in shown["output_dir"]


def test_help_shows_what_the_first_command_uses_instead(capsys):
    text = " ".join(help_text(capsys, "--help").split())
    for values in ("2e-06; tiny.yaml: 0.0001", "8; tiny.yaml: 64", "float32; tiny.yaml: fp8", "-1; tiny.yaml: 150"):
        assert f"(default: {values})" in text
    assert "G. GradLoc blog: 8 (default: 8)" in text  # the same in both
    text = make_parser(MiniRLConfig, "", default=TINY_CONFIG.with_name("tiny_minirl.yaml")).format_help()
    assert "(default: 1; tiny_minirl.yaml: 2)" in " ".join(text.split())


def test_help_shows_what_the_recipe_restates(capsys):
    """The recipe gives epsilon, epsilon_high and beta a default and a sentence of its own, and names them as knobs."""
    assert offered(help_text(capsys, "--help")) >= set(GRPOTokenClipConfig.__annotations__)


def test_help_all_is_everything(capsys):
    short, full = help_text(capsys, "--help"), help_text(capsys, "--help_all")
    assert offered(full) > offered(short)
    assert offered(full) >= set(GRPOTokenClipConfig.__dataclass_fields__) - {"n_gpu"}
    assert len(full.splitlines()) > 4 * len(short.splitlines())
    negations = {name for name in offered(full) if name.startswith("no_")}  # `--x false` says the same
    assert negations == {"no_low_rank"}  # a flag of its own


def test_common_options_exist():
    known = {action.dest for action in make_parser(GRPOTokenClipConfig, "")._actions}
    assert known >= COMMON_OPTIONS


# --- command line and config files -----------------------------------------------------------------------------------


def test_without_any_flag_it_is_the_embedded_default(capsys):
    args, model_args = parse()
    settings = yaml.safe_load(TINY_CONFIG.read_text())
    assert settings.pop("model_name_or_path") == "tiny" and settings
    for name, value in settings.items():
        assert getattr(args, name) == (float(value) if isinstance(value, str) and value[0].isdigit() else value), name
    assert "embedded default: recipes/configs/tiny.yaml" in capsys.readouterr().out
    assert Path(args.output_dir) == Path.cwd() / "runs" / "grpo_tokenclip"
    assert model_args.model_name_or_path in ("tiny", str(REPO / "tiny" / "qwen3"))


def test_the_embedded_default_runs_anywhere():
    args, _ = parse()
    assert args.use_cpu != torch.accelerator.is_available()
    assert args.bf16 is (torch.cuda.is_available() and torch.cuda.is_bf16_supported())
    assert args.gradient_accumulation_steps == 1 and args.generation_batch_size % args.num_generations == 0


def test_the_embedded_default_says_nothing_on_other_ranks(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    parse()
    assert capsys.readouterr().out == ""


def test_another_model_does_not_inherit_the_tiny_settings(capsys):
    for argv in (["--model_name_or_path", "org/model"], ["--model_name_or_path=org/model"]):
        args, model_args = parse(*argv, "--num_generations", "8")
        assert (args.max_steps, args.learning_rate, args.exact_answers) == (-1, 2e-6, False)
        assert model_args.model_name_or_path == "org/model"
        said = capsys.readouterr().out
        assert (
            "the paper's defaults are in force, not the tiny ones (those: --config recipes/configs/tiny.yaml)" in said
        )
        assert "embedded default" not in said


def test_command_line_over_config_file_over_dataclass(tmp_path, capsys):
    file = write(tmp_path / "run.yaml", "model_name_or_path: org/model\nmax_steps: 7\nlearning_rate: 1e-3\nseed: 5\n")
    for form in (["--config", file], [f"--config={file}"]):
        args, model_args = parse(*form, "--max_steps", "9", "--seed=6")
        assert (args.max_steps, args.learning_rate, args.seed, args.epsilon) == (9, 1e-3, 6, 0.2)
        assert model_args.model_name_or_path == "org/model"
        args, _ = parse("--max_steps=9", *form)
        assert args.max_steps == 9
    assert "embedded default" not in capsys.readouterr().out


def test_the_tiny_settings_can_be_overridden():
    args, _ = parse("--max_steps", "1", "--rollout_dtype", "bfloat16", "--exact_answers", "false")
    assert (args.max_steps, args.rollout_dtype, args.exact_answers) == (1, "bfloat16", False)
    assert args.per_device_train_batch_size == yaml.safe_load(TINY_CONFIG.read_text())["per_device_train_batch_size"]


@pytest.mark.parametrize("file", sorted(TINY_CONFIG.parent.glob("*.yaml")), ids=lambda f: f.stem)
def test_every_config_of_the_repository_has_only_known_keys(file):
    recipes = {
        "ares": AresDAPOConfig,
        "async": MiniRLAsyncConfig,
        "minirl": MiniRLConfig,
        "dsv32": DSV32Config,
    }
    check_config_file([str(file)], next((c for word, c in recipes.items() if word in file.stem), GRPOTokenClipConfig))


def test_both_spellings_of_an_option_mean_the_same(capsys, tmp_path):
    """The parser takes --output-dir for --output_dir; so must the checks."""
    args, _ = parse("--model-name-or-path", "org/model", "--num_generations", "8")
    assert (args.max_steps, args.exact_answers) == (-1, False)
    make_run(tmp_path / "mine")
    assert "already holds a run" in refusal("--output-dir", "mine")


def test_broken_config_files(tmp_path):
    assert refusal("--config") == "error: --config needs a file: --config recipes/configs/tiny.yaml"
    missing = refusal("--config", "nowhere.yaml")
    assert missing.startswith("error: --config nowhere.yaml ") and "tiny.yaml" in missing
    for text, found in (("- a\n- b\n", "list"), ("", "NoneType"), ("just words", "str")):
        file = write(tmp_path / "run.yaml", text)
        message = f"error: --config {file} must hold `option: value` lines, found {found}"
        assert refusal("--config", file) == refusal(f"--config={file}") == message
    file = write(tmp_path / "run.yaml", "model_name_or_path: x\nlearning_rat: 1\nmax_step: 2\n")
    assert f"--config {file}: nobody reads learning_rat, max_step" in refusal("--config", file)
    file = write(tmp_path / "run.yaml", "max_steps: 2\n")
    assert refusal("--config", file) == "error: no model: give --model_name_or_path, or a --config that names one"


@pytest.mark.parametrize(
    "text", ["a: [1\nb: 2\n", None, "a: 2026-13-45\n", "1: 2\nb: 3\n"], ids=["malformed", "folder", "date", "number"]
)
def test_unreadable_config_files_end_with_one_sentence(text, tmp_path):
    file = str(tmp_path) if text is None else write(tmp_path / "run.yaml", text)
    assert file in refusal("--config", file)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--learning_rate", "abc"], "--learning_rate abc must be a number"),
        (["--max-steps", "1.5"], "--max_steps 1.5 must be a whole number"),
        (["--learning_rate"], "--learning_rate: expected one argument"),
        (["--use_peft", "perhaps"], "--use_peft: Truthy value expected"),
        (["--lora_r", "8"], "--lora_r 8 is read with --use_peft only: add --use_peft, or remove it"),
        (["--lora_target_modules", "q_proj"], "--lora_target_modules q_proj is read with --use_peft only"),
        (["--use_dora"], "--use_dora True is read with --use_peft only"),
        (["--use_peft", "--lora_r", "0"], "--lora_r 0 must be a whole number from 1 up"),
        (
            ["--report_to", "wandb"],
            "--report_to wandb: wandb is not installed here: pip install wandb, or --report_to none",
        ),
        (["--report_to", "trakio"], "--report_to trakio is unknown: did you mean trackio?"),
        (["--use_vllm"], "--use_vllm needs vllm in this environment, which has none: use --engine vllm"),
        (
            ["--model_name_or_path", "nothere"],
            "--model_name_or_path nothere: there is no such folder, and it is no hub id",
        ),
        (
            ["--resume_from_checkpoint", "runs/nothere"],
            "runs/nothere does not exist; give RUN/checkpoint-N, or `last`",
        ),
        (["--max_completion_length", "0"], "--max_completion_length 0 must be a whole number from 1 up"),
        (["--num_generations", "7"], "(per_device_train_batch_size: set by "),
        (["--engine", "vllm"], "(rollout_dtype: set by "),
    ],
)
def test_wrong_input_ends_with_a_sentence_that_names_it(argv, sentence, monkeypatch, tmp_path):
    monkeypatch.setattr(rlvr_launch, "get_available_reporting_integrations", lambda: ["trackio"])
    monkeypatch.setattr(rlvr_launch, "is_vllm_available", lambda: False)
    if "--model_name_or_path" in argv:
        argv = [*argv, "--num_generations", "8"]
    message = refusal(*argv)
    assert sentence in message and "\n" not in message and list(tmp_path.iterdir()) == []


def test_values_of_the_command_line_are_not_blamed_on_the_file():
    message = refusal("--engine", "vllm", "--rollout_dtype", "fp8")
    assert "--rollout_dtype fp8" in message and "set by" not in message
    assert parse("--use_peft", "--lora_r", "8")[1].lora_r == 8


def test_a_model_that_no_hub_has_ends_with_a_sentence(capsys):
    with pytest.raises(SystemExit) as end, rlvr_launch.one_sentence():
        rlvr_launch.AutoTokenizer.from_pretrained("org/nothere")
    assert str(end.value).startswith("error: ") and "--model_name_or_path takes tiny, " in str(end.value)
    with pytest.raises(PermissionError), rlvr_launch.one_sentence():
        raise PermissionError(13, "an error of the system keeps its traceback")


# --- the model -------------------------------------------------------------------------------------------------------


def test_find_model(monkeypatch, tmp_path):
    repo, work = tmp_path / "repo", tmp_path / "work"
    (repo / "tiny" / "qwen3").mkdir(parents=True)
    (repo / "runs" / "a" / "final").mkdir(parents=True)
    work.mkdir()
    monkeypatch.setattr(rlvr_launch, "REPO", repo)
    monkeypatch.chdir(work)
    assert find_model("tiny") == str(repo / "tiny" / "qwen3")
    assert find_model("tiny-moe") == str(repo / "tiny" / "qwen3_moe")
    assert find_model("runs/a/final") == str(repo / "runs" / "a" / "final")
    assert find_model("Qwen/Qwen3-4B") == "Qwen/Qwen3-4B"
    for name in ("/nowhere/model", "nothere", "runs/b/final", "./b", "~/b"):  # no hub is asked for these
        with pytest.raises(
            FileNotFoundError, match=f"^--model {name}: .* give tiny, .* a folder, a .gguf file, or a hub id"
        ):
            find_model(name, flag="--model")
    with pytest.raises(ValueError, match="^--model x.gguf: only training takes a .gguf"):
        find_model("x.gguf", flag="--model")
    (work / "runs" / "a" / "final").mkdir(parents=True)
    assert find_model("runs/a/final") == "runs/a/final"  # what lies here comes before the repository's
    with pytest.raises(ValueError, match="no model: give --model_name_or_path"):
        find_model(None)
    with pytest.raises(FileNotFoundError, match="--model_name_or_path nowhere.gguf does not exist"):
        find_model("nowhere.gguf", str(work))


def test_tiny_is_found_from_the_root_of_the_repository(monkeypatch, tmp_path):
    (tmp_path / "tiny" / "qwen3").mkdir(parents=True)
    monkeypatch.setattr(rlvr_launch, "REPO", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert find_model("tiny") == str(tmp_path / "tiny" / "qwen3")


# --- output folder and resume ----------------------------------------------------------------------------------------


def settle(folder, explicit=True, resume=None):
    args = SimpleNamespace(output_dir=str(folder), resume_from_checkpoint=resume, save_steps=75)
    settle_output_dir(args, explicit)
    resumed = args.resume_from_checkpoint
    return Path(args.output_dir), resumed and Path(resumed)


def make_run(folder, *steps, broken=()):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").touch()
    for step in (*steps, *broken):
        (folder / f"checkpoint-{step}").mkdir()
        write(folder / f"checkpoint-{step}" / "trainer_state.json", '{"global_step": 1, "max_steps": 9}')
        if step not in broken:
            (folder / f"checkpoint-{step}" / "rollout_state_0.pt").touch()
    return folder


def test_a_fresh_folder_is_taken_as_it_is(tmp_path):
    (tmp_path / "runs" / "b").mkdir(parents=True)  # an empty folder holds no run
    for name, explicit in itertools.product("ab", (True, False)):
        assert settle(f"runs/{name}", explicit) == (tmp_path / "runs" / name, None)
        rlvr_launch.unclaim()


def test_runs_that_start_at_the_same_time_do_not_share_a_folder(tmp_path):
    """None has written anything yet."""
    assert [settle("runs/a", explicit=False)[0].name for _ in range(3)] == ["a", "a-2", "a-3"]
    settle("mine", explicit=True)
    with pytest.raises(ValueError, match="already holds a run"):
        settle("mine", explicit=True)


def test_a_claim_is_won_once(monkeypatch, tmp_path):
    """Both looked before either wrote."""
    monkeypatch.setattr(rlvr_launch, "holds_a_run", lambda folder: False)
    assert [settle("a", explicit=False)[0].name for _ in range(2)] == ["a", "a-2"]


def test_a_start_that_input_errors_ended_leaves_nothing_and_another_run_alone(tmp_path):
    settle("runs/a", explicit=False)
    settle("runs/a", explicit=False)
    (tmp_path / "runs" / "a-2" / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(SystemExit), rlvr_launch.one_sentence():
        raise ValueError("no")
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["a-2"]
    assert "org/model" in refusal("--model_name_or_path", "org/model/x")
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["a-2"]


def test_a_second_default_run_gets_the_next_free_number(tmp_path):
    for name in ("a", "a-2", "a-3"):
        assert settle("runs/a", explicit=False)[0] == tmp_path / "runs" / name
        make_run(tmp_path / "runs" / name)
    make_run(tmp_path / "runs" / "a-5", 10)  # the next one comes after it, so that `last` is the newest
    assert settle("runs/a", explicit=False, resume="last")[0] == tmp_path / "runs" / "a-5"
    assert settle("runs/a", explicit=False)[0] == tmp_path / "runs" / "a-6"


def test_a_second_run_of_the_embedded_default_moves_on(tmp_path):
    make_run(tmp_path / "runs" / "grpo_tokenclip")
    assert parse()[0].output_dir == str(tmp_path / "runs" / "grpo_tokenclip-2")


def test_a_named_folder_with_a_run_is_refused(tmp_path):
    make_run(tmp_path / "mine")
    with pytest.raises(ValueError, match=f"--output_dir {tmp_path / 'mine'} already holds a run"):
        settle("mine", explicit=True)
    assert "already holds a run" in refusal("--output_dir", "mine")
    assert "already holds a run" in refusal("--output_dir=mine")


def test_resume_last_is_the_newest_complete_checkpoint_by_number(tmp_path):
    run = make_run(tmp_path / "a", 5, 10, 100, 20, broken=(200,))
    for explicit in (True, False):
        assert settle("a", explicit, "last") == (run, run / "checkpoint-100")
    args, _ = parse("--output_dir", "a", "--resume_from_checkpoint", "last")
    assert args.resume_from_checkpoint == str(run / "checkpoint-100") and args.output_dir == str(run)


def test_resume_last_without_a_complete_checkpoint(tmp_path):
    make_run(tmp_path / "a", broken=(5,))
    with pytest.raises(
        FileNotFoundError, match=f"--output_dir {tmp_path / 'nowhere'} does not exist: name the folder"
    ):
        settle("nowhere", True, "last")
    with pytest.raises(FileNotFoundError, match="a has no complete checkpoint .*--save_steps 75.* start anew without"):
        settle("a", True, "last")


def test_a_run_killed_before_its_first_checkpoint_is_no_dead_end(tmp_path):
    for run in (make_run(tmp_path / "a"), make_run(tmp_path / "b", broken=(75,))):
        with pytest.raises(ValueError) as error:
            settle(run, explicit=True)
        assert "without a complete checkpoint" in str(error.value) and "--save_steps 75" in str(error.value)
        assert "delete the folder" in str(error.value) and "--resume_from_checkpoint" not in str(error.value)


def test_resume_from_a_path(tmp_path):
    run = make_run(tmp_path / "a", 5, 10)
    make_run(tmp_path / "default")
    assert settle("default", False, "a/checkpoint-5") == (run, run / "checkpoint-5")  # goes on in its own folder
    assert settle("a", True, "a/checkpoint-5") == (run, run / "checkpoint-5")
    assert settle("new", True, "a/checkpoint-5") == (tmp_path / "new", run / "checkpoint-5")
    for path, what in (("a", "is no checkpoint: it has no trainer_state.json"), ("a/checkpoint-6", "does not exist")):
        with pytest.raises(FileNotFoundError, match=f"{tmp_path / path} {what}; give RUN/checkpoint-N, or `last`"):
            settle("new", True, path)


def test_resume_last_of_the_default_folder_is_the_last_run(tmp_path):
    """The second default run went to <folder>-2, so that is where the newest checkpoint is."""
    make_run(tmp_path / "a", 60, 120)
    second = make_run(tmp_path / "a-2", 60)
    assert settle("a", explicit=False, resume="last") == (second, second / "checkpoint-60")


def test_resume_into_the_folder_of_another_run_is_refused(tmp_path):
    make_run(tmp_path / "a", 5)
    make_run(tmp_path / "b", 3)
    with pytest.raises(ValueError, match=f"{tmp_path / 'b'} already holds a run"):
        settle("b", True, "a/checkpoint-5")


def test_a_folder_with_checkpoints_holds_a_run(tmp_path):
    """Killed before its first line of metrics: `last` would later pick its checkpoint for the new run."""
    make_run(tmp_path / "a", 7)
    (tmp_path / "a" / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match="already holds a run"):
        settle("a", explicit=True)


def test_resume_last_skips_folders_that_are_no_checkpoints(tmp_path):
    run = make_run(tmp_path / "a", 60, "60.bak", "best")
    assert settle("a", True, "last") == (run, run / "checkpoint-60")


# --- batch arithmetic ------------------------------------------------------------------------------------------------


def config(per_device=4, generations=4, accumulation=1, prompts=None, chunks=None, batch=None, minibatches=None):
    return SimpleNamespace(
        num_minibatches=minibatches,
        per_device_train_batch_size=per_device,
        num_generations=generations,
        gradient_accumulation_steps=accumulation,
        prompts_per_step=prompts,
        steps_per_generation=chunks,
        generation_batch_size=batch,
    )


def suggestions(message, flag):
    """The numbers that a message offers for a flag."""
    match = re.search(rf"--{flag} (\d+)(?: or (\d+))?", message)
    return [int(x) for x in match.groups() if x]


def expected_suggestions(value, valid, limit=400):
    """Brute force: the nearest valid value below and above."""
    below = [v for v in range(1, value) if valid(v)][-1:]
    above = [v for v in range(value + 1, limit) if valid(v)][:1]
    return below + above


def test_nearest():
    assert nearest(5, [1, 4, 8, 12]) == "4 or 8"
    assert nearest(5, range(6, 9)) == "6"
    assert nearest(5, [2, 3]) == "3"


def test_num_minibatches_sets_steps_per_generation():
    settings = config(prompts=4, minibatches=8)
    derive_accumulation(settings)
    assert (settings.gradient_accumulation_steps, settings.steps_per_generation) == (4, 32)
    derive_accumulation(settings)  # transformers builds its arguments twice: same result
    assert settings.steps_per_generation == 32
    with pytest.raises(ValueError, match="^--num_minibatches 2 sets steps_per_generation to 2: remove"):
        derive_accumulation(config(minibatches=2, chunks=4))
    with pytest.raises(ValueError, match="^--num_minibatches 0 must be at least 1"):
        derive_accumulation(config(minibatches=0))


def test_prompts_per_step_sets_the_accumulation(monkeypatch):
    for world, per_device, generations, prompts in itertools.product((1, 2, 3), (1, 2, 3, 8), (2, 4, 6), (1, 3, 4, 8)):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        at_once = world * per_device
        c = config(per_device, generations, prompts=prompts)
        if prompts * generations % at_once == 0:
            derive_accumulation(c)
            assert c.gradient_accumulation_steps * at_once == prompts * generations
            continue
        with pytest.raises(ValueError) as error:
            derive_accumulation(c)
        message = str(error.value)
        assert f"= {prompts * generations} sequences" in message and f"{world} process(es)" in message
        offered = expected_suggestions(prompts, lambda p, g=generations, a=at_once: p * g % a == 0)
        assert offered and suggestions(message, "prompts_per_step") == offered
        for p in offered:
            derive_accumulation(config(per_device, generations, prompts=p))


def test_prompts_per_step_and_an_accumulation_that_disagree():
    derive_accumulation(config(per_device=4, generations=4, accumulation=8, prompts=8))
    with pytest.raises(ValueError, match="needs gradient_accumulation_steps 8 on 1 process.es., but 4 is set"):
        derive_accumulation(config(per_device=4, generations=4, accumulation=4, prompts=8))
    untouched = config(accumulation=3)
    derive_accumulation(untouched)
    assert untouched.gradient_accumulation_steps == 3


def test_whole_groups_or_the_nearest_valid_values(monkeypatch):
    wrong = 0
    for world, per_device, generations, chunks in itertools.product((1, 2, 3), range(1, 9), range(2, 9), (1, 2, 3)):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        sequences = world * per_device * chunks
        for how in ("accumulation", "steps", "batch"):
            steps = {"accumulation": None, "steps": chunks, "batch": None}[how]
            accumulation = chunks if how == "accumulation" else 1
            batch = sequences if how == "batch" else None
            c = config(per_device, generations, accumulation, chunks=steps, batch=batch)
            if sequences % generations == 0:
                check_batch(c)
                continue
            if how == "batch":
                with pytest.raises(ValueError, match=f"num_generations {generations}"):
                    check_batch(c)
                continue
            wrong += 1
            with pytest.raises(ValueError) as error:
                check_batch(c)
            message = str(error.value)
            assert f"= {sequences} sequences are no whole groups of num_generations {generations}" in message
            devices = expected_suggestions(per_device, lambda b, k=world * chunks, g=generations: b * k % g == 0)
            groups = expected_suggestions(generations, lambda d, s=sequences: d > 1 and s % d == 0, sequences + 1)
            assert suggestions(message, "per_device_train_batch_size") == devices
            if groups:
                assert suggestions(message, "num_generations") == groups
    assert wrong > 300


def test_a_sampled_batch_of_the_user_gets_its_own_nearest_values(monkeypatch):
    wrong = 0
    for world, per_device, generations in itertools.product((1, 2), (1, 2, 3, 4), (2, 3, 4, 8)):
        monkeypatch.setenv("WORLD_SIZE", str(world))

        def valid(batch, unit=world * per_device, group=generations):
            return batch % unit == 0 and batch % group == 0

        for batch in range(1, 40):
            c = config(per_device, generations, batch=batch)
            if valid(batch):
                check_batch(c)
                continue
            wrong += 1
            with pytest.raises(ValueError) as error:
                check_batch(c)
            assert suggestions(str(error.value), "generation_batch_size") == expected_suggestions(batch, valid)
    assert wrong > 500


def test_an_optimizer_step_does_not_mix_two_samplings():
    check_batch(config(per_device=4, generations=4, accumulation=3, chunks=6))
    with pytest.raises(ValueError, match="steps_per_generation 5 is no multiple of .*_steps 3: .*: use 3 or 6$"):
        check_batch(config(per_device=4, generations=4, accumulation=3, chunks=5))
    with pytest.raises(ValueError, match="steps_per_generation 2 .*: use 3$"):
        check_batch(config(per_device=4, generations=4, accumulation=3, chunks=2))


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="num_generations 1: a group advantage needs at least 2"):
        check_batch(config(generations=1))


def test_the_real_config_settles_its_batch(monkeypatch, tmp_path):
    args = RLVRConfig(str(tmp_path), prompts_per_step=16, num_generations=8, per_device_train_batch_size=32)
    assert (args.gradient_accumulation_steps, args.steps_per_generation, args.generation_batch_size) == (4, 4, 128)
    with pytest.raises(ValueError, match="use --prompts_per_step 4 or 8, or"):
        RLVRConfig(str(tmp_path), prompts_per_step=5, num_generations=8, per_device_train_batch_size=32)
    with pytest.raises(ValueError, match="steps_per_generation 3 is no multiple of gradient_accumulation_steps 2"):
        RLVRConfig(str(tmp_path), gradient_accumulation_steps=2, steps_per_generation=3)


def test_the_real_config_names_the_nearest_valid_values(tmp_path):
    with pytest.raises(ValueError, match="use --per_device_train_batch_size 8, or --num_generations 3"):
        RLVRConfig(str(tmp_path), num_generations=8, per_device_train_batch_size=3)
    with pytest.raises(ValueError, match="num_generations 1: a group advantage needs at least 2"):
        RLVRConfig(str(tmp_path), num_generations=1)


@pytest.mark.parametrize("name", ["prompts_per_step", "per_device_train_batch_size", "num_generations"])
@pytest.mark.parametrize("value", [0, -2])
def test_a_batch_of_nothing_is_refused(name, value, tmp_path):
    with pytest.raises(ValueError, match=f"{name} {value}"):
        RLVRConfig(str(tmp_path), **{name: value})


def test_batch_line_counts_every_update_of_a_sampling(tmp_path):
    assert batch_line(RLVRConfig(str(tmp_path), num_iterations=4)).endswith("; 4 update(s) a sampling")


def test_batch_line(monkeypatch, tmp_path):
    args = RLVRConfig(
        str(tmp_path),
        num_generations=8,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=2,
        steps_per_generation=6,
    )
    assert batch_line(args) == (
        "batch: 8 prompts x 8 generations = 64 sequences = 1 process(es) x 32 per device x 2 accumulation; "
        "3 update(s) a sampling"
    )
    monkeypatch.setenv("WORLD_SIZE", "4")
    text = batch_line(args)
    assert "32 prompts x 8 generations = 256 sequences = 4 process(es) x 32 per device x 2 accumulation" in text


# --- processes and distributed type ----------------------------------------------------------------------------------


@pytest.fixture
def parent(monkeypatch, tmp_path):
    """Pretend that our parent process runs this command line."""
    nowhere = str(tmp_path / "no_default_config.yaml")
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", nowhere)

    def set_command(*command):
        monkeypatch.setattr(psutil, "Process", lambda pid: SimpleNamespace(cmdline=lambda: list(command)))

    return set_command


PYTHON = "/venv/bin/python3"
ACCELERATE = (PYTHON, "/venv/bin/accelerate", "launch")


@pytest.mark.parametrize(
    ("command", "asked"),
    [
        ((*ACCELERATE, "recipes/x.py"), None),
        ((*ACCELERATE, "--cpu", "--num_processes", "2", "recipes/x.py"), 2),
        ((*ACCELERATE, "--cpu", "--num_processes=2", "recipes/x.py", "--max_steps", "1"), 2),
        ((*ACCELERATE, "--num-processes", "3", "recipes/x.py"), 3),
        (
            (
                *ACCELERATE,
                "--multi_gpu",
                "--num_machines",
                "1",
                "--num_processes",
                "4",
                "x.py",
                "--num_processes",
                "9",
            ),
            4,
        ),
        ((*ACCELERATE, "recipes/x.py", "--num_processes", "9"), None),  # the recipe's argument, not the launcher's
        ((PYTHON, "/venv/bin/accelerate-launch", "--num_processes", "2", "recipes/x.py"), 2),
        (("accelerate", "launch", "--num_processes", "2", "-m", "recipes.x"), 2),
        (("/bin/bash", "-c", "accelerate launch --num_processes 2 x.py"), None),
        ((PYTHON, "/venv/bin/torchrun", "--nproc_per_node", "2", "x.py"), None),
        ((PYTHON, "-m", "pytest"), None),
        ((PYTHON, "jobs.py", "launch", "--num_processes", "2", "x.py"), None),
        ((), None),
    ],
)
def test_requested_processes(command, asked, parent):
    parent(*command)
    assert requested_processes() == asked


def test_requested_processes_of_a_config_file(parent, tmp_path):
    text = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_processes: 5\nuse_cpu: true\n"
    file = write(tmp_path / "accelerate.yaml", text)
    parent(*ACCELERATE, "--config_file", file, "recipes/x.py")
    assert requested_processes() == 5
    parent(*ACCELERATE, "--config_file", file, "--num_processes", "3", "recipes/x.py")
    assert requested_processes() == 3


def test_requested_processes_of_the_launch_module(parent):
    parent(PYTHON, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "recipes/x.py")
    assert requested_processes() == 2


def test_requested_processes_of_accelerates_default_file(parent, monkeypatch, tmp_path):
    """`accelerate config` writes this file and `accelerate launch` reads it when nothing else is given."""
    text = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_processes: 5\nuse_cpu: true\n"
    file = write(tmp_path / "default_config.yaml", text)
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", file)
    parent(*ACCELERATE, "recipes/x.py")
    assert requested_processes() == 5


@pytest.mark.parametrize("error", [psutil.NoSuchProcess(1), psutil.AccessDenied(1), psutil.ZombieProcess(1)])
def test_a_parent_that_cannot_be_read_asks_for_nothing(error, monkeypatch):
    def gone(pid):
        raise error

    monkeypatch.setattr(psutil, "Process", gone)
    assert requested_processes() is None


def test_check_processes(parent):
    parent(PYTHON, "x.py")
    check_processes(SimpleNamespace(expect_processes=None))
    check_processes(SimpleNamespace(expect_processes=1))
    with pytest.raises(ValueError, match="^--expect_processes asks for 2 .* but this run has 1: .*--nproc_per_node 2"):
        check_processes(SimpleNamespace(expect_processes=2))
    parent(*ACCELERATE, "--cpu", "--num_processes", "1", "x.py")
    check_processes(SimpleNamespace(expect_processes=None))
    parent(*ACCELERATE, "--cpu", "--num_processes", "2", "x.py")
    with pytest.raises(ValueError, match="^accelerate launch asks for 2 .* but this run has 1: .*--num_processes 2"):
        check_processes(SimpleNamespace(expect_processes=1))
    assert "accelerate launch asks for 2 process(es) but this run has 1" in refusal("--max_steps", "1")


def accelerator(kind, fsdp2=False):
    return SimpleNamespace(distributed_type=DistributedType[kind], is_fsdp2=fsdp2, num_processes=2)


KINDS = {
    "no": accelerator("NO"),
    "ddp": accelerator("MULTI_CPU"),
    "fsdp": accelerator("FSDP"),
    "fsdp2": accelerator("FSDP", True),
    "deepspeed": accelerator("DEEPSPEED"),
}


def test_check_distributed():
    for (asked, _), (actual, running) in itertools.product(KINDS.items(), repeat=2):
        if asked == actual:
            check_distributed(running, asked)
            continue
        with pytest.raises(
            ValueError, match=f"asked for distributed type {asked}, running as {actual} with 2 process"
        ):
            check_distributed(running, asked)
    check_distributed(accelerator("MULTI_GPU"), "ddp")
    for running in KINDS.values():
        check_distributed(running)  # nothing was asked


@pytest.mark.parametrize(
    ("environment", "asked"),
    [
        ({"ACCELERATE_USE_FSDP": "true"}, "fsdp"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "fsdp2"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "deepspeed"),
        ({"ACCELERATE_USE_FSDP": "false", "FSDP_VERSION": "2"}, None),
    ],
)
def test_check_distributed_by_the_launchers_environment(environment, asked, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for actual, running in KINDS.items():
        if asked in (None, actual):
            check_distributed(running)
            continue
        with pytest.raises(ValueError, match=f"asked for distributed type {asked}, running as {actual}"):
            check_distributed(running)
        check_distributed(running, actual)  # --expect_distributed is the last word


# --- what a run shows and leaves behind ------------------------------------------------------------------------------


def state(step, most=24, main=True):
    return SimpleNamespace(global_step=step, max_steps=most, is_world_process_zero=main)


def log(report, step, **values):
    report.on_log(None, state(step), None, logs=values)
    report.on_step_end(None, state(step), None)


def test_metrics_survive_json_with_their_non_finite_numbers(tmp_path):
    record = {"step": 3, "reward": 0.1, "a": math.nan, "b": math.inf, "c": -math.inf, "ok": True, "text": "nan or so"}
    line = to_json(record)
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    file = tmp_path / "metrics.jsonl"
    file.write_text(line + "\n" + to_json({"step": 4}) + "\n")
    first, second = read_metrics(file)
    assert math.isnan(first.pop("a")) and first == {k: v for k, v in record.items() if k != "a"}
    assert second == {"step": 4}


def test_series_and_smooth():
    records = [{"step": 1, "x": 1.0}, {"step": 2, "y": 5.0}, {"step": 3, "x": 4}, {"step": 4, "x": "text"}]
    assert series(records, "x") == ([1, 3], [1.0, 4])
    values = [1.0, 2.0, 6.0, 3.0, 0.0]
    for span in (1, 2, 3, 9):
        expected = []
        for i in range(len(values)):
            seen = values[max(0, i - span + 1) : i + 1]
            expected.append(math.fsum(seen) / len(seen))
        assert smooth(values, span) == pytest.approx(expected)


def test_table_is_aligned():
    lines = table([("a", "1"), ("longer name", "2")]).splitlines()
    assert [line.index(x) for line, x in zip(lines, "12", strict=True)] == [15, 15]


def test_a_run_leaves_metrics_and_curves(tmp_path, capsys):
    report = RunReport(tmp_path / "run")
    report.on_train_begin(None, state(0), None)
    for step in range(1, 25):
        log(report, step, reward=step / 24, entropy=1.0, grad_norm=math.nan, total_flos=1e9, verifier=0.5)
    report.on_log(None, state(24), None, logs={"train_runtime": 5.0, "train_loss": 0.1})  # transformers' summary
    report.on_train_end(None, state(24), None)
    records = read_metrics(report.metrics_path)
    assert [r["step"] for r in records] == list(range(1, 25))
    assert set(records[0]) == {"step", "reward", "entropy", "grad_norm", "verifier"}
    assert report.curve_path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and report.curve_path.stat().st_size > 10_000
    shown = re.findall(r"^step +(\d+)  reward (\S+)", capsys.readouterr().out, flags=re.M)
    assert [int(step) for step, _ in shown] == [1, *range(2, 25, 2)]
    assert [shown[i][1] for i in (0, 1, -1)] == ["0.0417", "0.0833", "0.979"]  # means since the line before


def test_a_resumed_run_does_its_last_steps_again(tmp_path):
    first = RunReport(tmp_path / "run")
    first.on_train_begin(None, state(0), None)
    for step in range(1, 8):
        log(first, step, reward=0.0)
    again = RunReport(tmp_path / "run")
    again.on_train_begin(None, state(5), None)
    assert [r["step"] for r in read_metrics(again.metrics_path)] == [1, 2, 3, 4, 5]
    log(again, 6, reward=1.0)
    again.on_train_end(None, state(6), None)
    assert [(r["step"], r["reward"]) for r in read_metrics(again.metrics_path)][-2:] == [(5, 0.0), (6, 1.0)]


def test_lines_wait_for_space_on_a_full_disk(tmp_path, capsys):
    report = RunReport(tmp_path / "run")
    report.on_train_begin(None, state(0), None)
    log(report, 1, reward=0.1)
    whole = report.metrics_path.read_bytes()
    with largest_file(len(whole) + 9):  # room for a part of a line
        log(report, 2, reward=0.2)
        log(report, 3, reward=0.3)
        report.draw()
        assert report.metrics_path.read_bytes() == whole
    assert report.curve_path.stat().st_size < 100  # torn, and drawn again below
    report.on_train_begin(None, state(2), None)  # a rollback: step 3 is done again
    log(report, 3, reward=0.4)
    report.on_train_end(None, state(3), None)
    assert [(r["step"], r["reward"]) for r in read_metrics(report.metrics_path)] == [(1, 0.1), (2, 0.2), (3, 0.4)]
    assert report.curve_path.stat().st_size > 10_000
    assert capsys.readouterr().out.count("cannot be written") == 2  # the first line, and the curve


def test_half_a_line_of_a_killed_run_is_cut_off(tmp_path):
    report = RunReport(tmp_path)
    report.metrics_path.write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "rew')
    report.on_train_begin(None, state(1), None)
    log(report, 2, reward=1.0)
    assert [(r["step"], r["reward"]) for r in read_metrics(report.metrics_path)] == [(1, 0.5), (2, 1.0)]


def test_only_the_main_process_writes(tmp_path):
    report = RunReport(tmp_path / "run")
    report.on_train_begin(None, state(0, main=False), None)
    log(report, 1, reward=0.0)
    report.on_train_end(None, state(1), None)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """plot(records or runs) -> ({panel title: axis}, title of the figure), of the figure that would be written."""
    figures = []
    monkeypatch.setattr(rlvr_report.plt, "close", figures.append)
    monkeypatch.setattr(rlvr_report.plt.Figure, "savefig", lambda self, path, dpi: None)  # which takes a second

    def plot(records):
        if isinstance(records, dict):
            plot_comparison(records, tmp_path / "curve.png")
        else:
            plot_curves(records, tmp_path / "curve.png", "title")
        figure = figures[-1]
        return {axis.get_title(): axis for axis in figure.axes if axis.get_title()}, figure.get_suptitle()

    yield plot
    monkeypatch.undo()
    for figure in figures:
        rlvr_report.plt.close(figure)


def labels(axis):
    return set(axis.get_legend_handles_labels()[1])


def line(axis, label):
    """The x and y of the curve with a label."""
    (found,) = (x for x in axis.lines if x.get_label() == label)
    return found.get_xdata().tolist(), list(found.get_ydata())


def test_every_metric_of_a_panel_is_drawn_and_no_other(drawn):
    known = list(itertools.chain(*PANELS.values(), *MORE_PANELS.values()))
    masked = [f"{clip}/masked_frac" for clip in ("token_clip", "seq_clip", "minirl", "off_policy_mask", "mine")]
    known = [name for name in known if name != "*/masked_frac"] + masked
    for names in (known, known[:3], ["other"]):
        panels, _ = drawn([{"step": i, **dict.fromkeys(names, i + 1.0)} for i in range(3)])
        written = {rlvr_report.LABELS.get(name, name) for name in set(names) & set(known)}
        assert set().union(*map(labels, panels.values())) == written
        assert list(panels) == [*PANELS, *(MORE_PANELS if names is known else [])]
    assert set(rlvr_report.NOTES) == {*PANELS, *MORE_PANELS}


def test_held_out_accuracy_is_points_with_their_errors(drawn):
    records = [{"step": 0, "eval/accuracy": 0.25, "eval/stderr": 0.125}, {"step": 3, "eval/accuracy": 0.5}]
    records += [{"step": step, "reward": 0.1} for step in range(1, 40)]
    axis = drawn(records)[0]["reward and held-out accuracy"]
    (points,) = (c for c in axis.containers if c.get_label() == "held-out accuracy")
    curve, _, (bars,) = points
    assert (curve.get_marker(), curve.get_linestyle()) == ("o", "--") and curve.get_linewidth() < 1
    assert (list(curve.get_xdata()), list(curve.get_ydata())) == ([0, 3], [0.25, 0.5])
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [[0.125, 0.375], [0.5, 0.5]]


@pytest.mark.parametrize(("steps", "both"), [(29, False), (30, True)])
def test_the_title_explains_only_what_is_drawn(drawn, steps, both):
    panels, title = drawn([{"step": i + 1, "entropy": float(i % 2)} for i in range(steps)])
    assert len(panels["entropy (nats a token)"].lines) == 1 + both
    assert ("bold: trailing mean" in title) == both and "shaded" not in title
    _, title = drawn([{"step": i, "minirl/masked_frac": 0.1} for i in range(1, 4)])
    assert "shaded" in title and "bold" not in title


def test_a_line_is_broken_where_a_logarithmic_axis_has_no_place(drawn):
    norms = [1.0, 0.0, 2.0, 0.0, 0.0, math.inf, 4.0, 5.0]
    records = [{"step": i, "grad_norm": norm, "gradloc/top1_share": 0.5} for i, norm in enumerate(norms)]
    axis = drawn(records)[0]["gradient norm (before clipping)"]
    assert axis.get_yscale() == "log" and axis.get_ylim()[0] > 0.3
    steps, values = line(axis, "grad_norm")
    assert steps == list(range(8)) and [math.isfinite(v) for v in values] == [1, 0, 1, 0, 0, 0, 1, 1]
    assert next(x for x in axis.lines if x.get_label() == "grad_norm").get_marker() == ".", "step 2 stands alone"
    assert line(axis, "0")[0] == [1, 3, 4] and line(axis, "not finite")[0] == [5]
    assert line(axis, "explained by GradLoc") == ([0, 2, 5, 6, 7], [1.0, 2.0, math.inf, 4.0, 5.0])
    assert "0" not in labels(drawn([{"step": i, "entropy": 0.0} for i in range(3)])[0]["entropy (nats a token)"])


def test_steps_have_whole_numbers_and_notes_fit_their_panels(drawn):
    names = [*itertools.chain(*PANELS.values(), *MORE_PANELS.values()), "mine/masked_frac"]
    panels, _ = drawn([{"step": i, **dict.fromkeys(names, 1e-4 * i)} for i in range(1, 4)])
    panels["masked fraction"].figure.draw_without_rendering()
    for panel, axis in panels.items():
        assert all(tick == int(tick) for tick in axis.get_xticks()), panel
        (note,) = (text for text in axis.texts if text.get_text() == rlvr_report.NOTES[panel])
        box, frame = note.get_window_extent(), axis.get_window_extent()
        assert frame.x0 - 5 <= box.x0 and box.x1 <= frame.x1 + 5, panel
        assert box.y0 >= frame.y1, panel


def test_healthy_ranges_are_those_of_the_glossary(drawn):
    rows = (rlvr_launch.REPO / "README.md").read_text().split("## Metrics")[1].split("\n## ")[0].splitlines()
    stated = {}
    for row in rows:
        cells = row.split(" | ")
        for name in re.findall(r"`([\w./]+)`", cells[0]):
            healthy = re.match(
                r"(above|below) ([\d.e-]+)$|([\d.e-]+) to ([\d.e-]+)$", cells[2] if len(cells) > 2 else ""
            )
            if healthy:
                side, bound, low, high = healthy.groups()
                stated[name] = (float(low), float(high)) if low else (None, float(bound))
                stated[name] = stated[name][::-1] if side == "above" else stated[name]
    panels = list(itertools.chain(*PANELS.values(), *MORE_PANELS.values()))
    shown = {n: r for n, r in stated.items() if any(fnmatch(n, p) for p in panels) and not n.startswith("layer_clip")}
    assert shown == rlvr_report.HEALTHY
    axis = drawn([{"step": i, "mismatch/k3": 1e-4 * i, "mismatch/k1": 0.1} for i in range(300)])[0][
        "mismatch of engine and training"
    ]
    assert axis.get_ylim()[1] > 0.1, "a range does not hide a curve"
    k1, k3 = ([p.get_y(), p.get_y() + p.get_height()] for p in axis.patches)
    assert k1 == pytest.approx([axis.get_ylim()[0], 0.01]) and k3 == pytest.approx([1e-4, 1e-2])


def test_the_range_of_the_gradient_norm_moves_with_its_median(drawn):
    norms = [4.0, 2.0, math.nan, 0.0, 6.0, 8.0, 1.0]
    assert rlvr_report.running_median(norms, 3)[1:] == [4.0, 3.0, 3.0, 3.0, 4.0, 6.0]
    assert math.isnan(rlvr_report.running_median(norms, 3)[0])
    records = [{"step": i, "grad_norm": norm} for i, norm in enumerate(norms)]
    axis = drawn(records)[0]["gradient norm (before clipping)"]
    (band,) = axis.collections
    box = band.get_paths()[0].get_extents()
    assert (box.x0, box.x1) == (1, 6) and (box.y0, box.y1) == pytest.approx((1.0, 15.0))


def test_a_line_between_two_samplings_keeps_its_columns(tmp_path, capsys):
    """Four updates a sampling, every step printed."""
    report, bar = RunReport(tmp_path / "run"), []
    report.on_train_begin(None, state(0, 8), None)
    report.bar.set_postfix = lambda values, refresh: bar.append(dict(values))
    for step in range(1, 9):
        sampled = {"reward": 0.5, "completions/mean_length": 20.0} if step % 4 == 1 else {}
        logs = {"entropy": 1.0, "minirl/masked_frac": 0.25} | sampled
        report.on_log(None, state(step, 8), None, logs=logs)
    report.on_train_end(None, state(8, 8), None)
    lines = re.findall(r"^step +\d+  (.*)$", capsys.readouterr().out, flags=re.M)
    assert lines[0] == lines[4] == "reward 0.5  entropy 1  masked 0.25  length 20"
    assert set(lines[1:4] + lines[5:]) == {"reward -  entropy 1  masked 0.25  length -"}
    assert bar == [{"reward": "0.5", "entropy": "1", "masked": "0.25", "length": "20"}] * 8


def test_of_several_masked_fractions_the_largest_is_shown_by_its_name(tmp_path, capsys):
    """By the mean since the line before; the bar by the last step."""
    report, bar = RunReport(tmp_path / "run"), []
    report.draw = lambda: None
    report.on_train_begin(None, state(0), None)
    report.bar.set_postfix = lambda values, refresh: bar.append(dict(values))
    for step, (clip, dropped) in enumerate([(0.5, 0.25), (0.0, 0.25), (0.375, 0.25), (math.nan, 0.25)], 1):
        log(report, step, **{"seq_clip/masked_frac": dropped, "token_clip/masked_frac": clip})
    report.on_train_end(None, state(4), None)
    lines = re.findall(r"^step +\d+  (.*)$", capsys.readouterr().out, flags=re.M)
    assert lines == ["masked token_clip 0.5", "masked seq_clip 0.25", "masked token_clip nan"]
    assert bar == [{f"masked {name}": value} for name, value in
                   [("token_clip", "0.5"), ("seq_clip", "0.25"), ("token_clip", "0.375"), ("token_clip", "nan")]]  # fmt: skip


def test_a_run_shorter_than_logging_steps_ends_well(tmp_path):
    report = RunReport(tmp_path / "run")
    report.on_train_begin(None, state(0, 5), None)
    report.on_step_end(None, state(5, 5), None)
    report.on_train_end(None, state(5, 5), None)
    report.draw()


def test_a_line_torn_by_a_kill_does_not_stop_the_resume(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "rew')
    report = RunReport(folder)
    report.on_train_begin(None, state(1), None)
    log(report, 2, reward=1.0)
    report.on_train_end(None, state(2), None)
    assert [r["step"] for r in read_metrics(report.metrics_path)] == [1, 2]


# --- runs side by side -------------------------------------------------------------------------------------------------


def written_run(folder, *records):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(to_json(record) + "\n" for record in records))
    return folder


@pytest.fixture
def two_runs(tmp_path):
    scored = {"eval/accuracy": 0.25, "eval/stderr": 0.0125}
    steps = [{"step": i, "loss": 0.1, "reward": i / 10, "entropy": 1.0, "step_time": 30.0} for i in range(1, 5)]
    full = written_run(
        tmp_path / "full", {"step": 0, **scored}, *steps, {"step": 4, **scored | {"eval/accuracy": 0.75}}
    )
    young = written_run(
        tmp_path / "young", {"step": 2, "loss": 0.1, "reward": 0.3, "eval/accuracy": 0.5}, {"step": 3, "loss": 0.0}
    )
    return full, young


def test_runs_are_compared_in_one_picture_and_a_table(two_runs, tmp_path, capsys):
    output = tmp_path / "both.png"
    rlvr_report.main(["compare", *map(str, two_runs), "--output", str(output)])
    assert output.read_bytes()[:4] == b"\x89PNG"
    lines = capsys.readouterr().out.splitlines()
    assert [re.split(r"  +", line) for line in lines] == [
        ["run", "steps", "held-out before", "after", "minutes"],
        ["full", "4", "25.0 % +- 1.2", "75.0 % +- 1.2", "2.0"],
        ["young", "3", "-", "50.0 % (step 2)", "-"],
        [f"curves: {output}"],
    ]


def test_each_run_has_one_colour_and_each_metric_its_line(two_runs, drawn):
    runs = {folder.name: rlvr_report.read_run(folder) for folder in two_runs}
    for records in runs.values():
        records += [{"step": 9, "mismatch/k1": 0.1, "mismatch/k3": 0.2}]
    panels, title = drawn(runs)
    assert list(panels) == list(PANELS) and title == ""
    looks = [(x.get_color(), x.get_linestyle()) for x in panels["mismatch of engine and training"].lines]
    assert looks == [("C0", "-"), ("C1", "-"), ("C0", "--"), ("C1", "--")]
    legend = panels["mismatch of engine and training"].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["mismatch/k1", "mismatch/k3"]
    (legend,) = legend.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["full", "young"]
    assert [handle.get_color() for handle in legend.legend_handles] == ["C0", "C1"]


def test_folders_of_one_name_are_told_apart(two_runs, tmp_path, monkeypatch):
    monkeypatch.setattr(rlvr_report, "plot_comparison", lambda runs, path: None)
    written_run(tmp_path / "other" / "full", {"step": 1, "loss": 0.0})
    table = rlvr_report.compare([two_runs[0], tmp_path / "other" / "full"], tmp_path / "c.png").splitlines()
    assert [line.split()[0] for line in table[1:3]] == [str(two_runs[0]), str(tmp_path / "other" / "full")]


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ("gone", "gone is no folder: give the output folder of a run"),
        ("", "holds no metrics.jsonl: give the output folder of a run"),
        ("full", "a folder is given twice"),
        ("empty", "metrics.jsonl holds no step of a training run"),
        ("broken", "metrics.jsonl cannot be read as metrics"),
        ("young --output=x", "usage: python rlvr_report.py compare RUN_DIR RUN_DIR"),
        ("young --output /gone/x.png", "No such file or directory: '/gone/x.png'"),
        ("young --output x.xyz", "Format 'xyz' is not supported"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_ends_with_one_sentence(two_runs, tmp_path, other, sentence, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written_run(tmp_path / "empty", {"step": 0, "eval/accuracy": 0.5})
    written_run(tmp_path / "broken")
    (tmp_path / "broken" / "metrics.jsonl").write_text("[1]\n")
    with pytest.raises(SystemExit) as caught:
        rlvr_report.main(["compare", "full", *(other.split() or ["."])])
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


# --- real launches ---------------------------------------------------------------------------------------------------


def launch(tmp_path, *command, **environment):
    """Run a command in an empty folder without a launcher's variables or the user's accelerate configuration."""
    inherited = {
        k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE", "FSDP", "WORLD_", "RANK", "LOCAL_"))
    }
    return subprocess.run(
        command,
        cwd=tmp_path,
        env={**inherited, "HF_HOME": str(tmp_path / "hf"), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_accelerate_launch_on_cpus_with_two_processes_says_that_it_has_one(tmp_path):
    """accelerate starts one process here without a word; the recipe ends with the command that starts two."""
    accelerate = Path(sys.executable).parent / "accelerate"
    done = launch(
        tmp_path, str(accelerate), "launch", "--cpu", "--num_processes", "2", str(RECIPE), "--max_steps", "1"
    )
    assert done.returncode != 0
    sentence = "error: accelerate launch asks for 2 process(es) but this run has 1: on CPUs launch with"
    assert sentence in done.stderr and "ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2" in done.stderr
    own = done.stderr[: done.stderr.index(sentence)]
    assert "Traceback" not in own  # accelerate's own report of the exit status follows the sentence
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_the_recipe_prints_help_from_any_folder(tmp_path):
    done = launch(tmp_path, sys.executable, str(RECIPE), "--help")
    assert done.returncode == 0 and "--token_clip_low" in done.stdout
    assert done.stdout.startswith("usage: accelerate launch grpo_tokenclip.py")


@pytest.mark.parametrize("name", ["nowhere", "nowhere/run", "itself", "itself/run", "n" * 300])
@pytest.mark.parametrize("resumed", [None, "last"])
def test_an_output_dir_that_is_no_place_is_named(tmp_path, name, resumed):
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "itself").symlink_to(tmp_path / "itself")
    args = SimpleNamespace(output_dir=str(tmp_path / name), resume_from_checkpoint=resumed, save_steps=1)
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(f"--output_dir {tmp_path / name} ")):
        settle_output_dir(args, True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["itself", "nowhere"]


def test_a_run_whose_folder_became_read_only_is_not_resumed(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    for name in ("rollout_state_0.pt", "trainer_state.json"):
        (folder / "checkpoint-3").mkdir(parents=True, exist_ok=True)
        (folder / "checkpoint-3" / name).write_text("{}")
    monkeypatch.setattr(os, "access", lambda path, mode: path != folder)
    for checkpoint in ("last", str(folder / "checkpoint-3")):
        args = SimpleNamespace(output_dir=str(folder), resume_from_checkpoint=checkpoint, save_steps=1)
        with pytest.raises(ValueError, match=re.escape(f"--output_dir {folder} cannot be written")):
            settle_output_dir(args, True)


def test_an_output_dir_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        settle_output_dir(
            SimpleNamespace(output_dir=str(tmp_path / "file" / "run"), resume_from_checkpoint=None), True
        )
