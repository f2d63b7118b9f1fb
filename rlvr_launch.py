"""From a command line to settled arguments: help, config files, device and precision, batch arithmetic, launch checks.

Nothing here has an equation. Every check turns a silent degradation (one process instead of two, FSDP that is plain
DDP, a batch that does not hold whole groups) into one sentence at start.
"""

import argparse
import atexit
import contextlib
import difflib
import math
import os
import re
import sys
import warnings
from pathlib import Path
from typing import get_args, get_type_hints

import psutil
import torch
import yaml
from accelerate import PartialState
from accelerate.commands.config import config_args
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import broadcast_object_list
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig, ModelConfig, TrlParser
from trl.import_utils import is_vllm_available

from rlvr_resume import Stopped, check_resumed, complete_checkpoints, end_with_parent, hold, let_go, stoppable
from stability_control import read_yaml

REPO = Path(__file__).resolve().parent
# Models that ship with the project, under tiny/: --model_name_or_path takes the short name.
TINY = {
    "tiny": "qwen3",
    "tiny-moe": "qwen3_moe",
    "tiny-moe-split": "qwen3_moe_split",
    "tiny-moe-words": "qwen3_moe_words",
}
MODEL_NAMES = f"{', '.join(TINY)}, a folder, a .gguf file, or a hub id like org/name"
TINY_CONFIG = REPO / "recipes" / "configs" / "tiny.yaml"

# The inherited options that matter; the rest is behind --help_all.
COMMON_OPTIONS = {
    "model_name_or_path", "use_peft", "lora_r", "output_dir", "resume_from_checkpoint", "seed", "max_steps",
    "num_train_epochs", "learning_rate", "lr_scheduler_type", "warmup_steps", "max_grad_norm", "num_generations",
    "per_device_train_batch_size", "gradient_accumulation_steps", "max_completion_length", "temperature", "top_p", "top_k",
    "min_p", "save_steps", "save_total_limit", "report_to", "vllm_server_base_url",
}  # fmt: skip

SHORT_HELP = {  # of inherited options whose own help runs over several lines
    "per_device_train_batch_size": "completions (not prompts) of one forward on one device",
    "num_train_epochs": "passes over the dataset; --max_steps overrides it",
    "max_steps": "optimizer steps; -1 = by --num_train_epochs",
    "lr_scheduler_type": "linear, cosine, constant, constant_with_warmup, ...",
    "warmup_steps": "steps of linear warm-up; below 1: a share of all steps",
    "gradient_accumulation_steps": "forwards of one optimizer step on one device",
    "max_grad_norm": "global gradient clipping; 0 = off",
    "report_to": "trackio, wandb, tensorboard, none",
    "save_steps": "optimizer steps between checkpoints",
    "seed": "of data order, rollouts and adapters",
    "resume_from_checkpoint": "a checkpoint folder, or `last` for the newest of --output_dir",
    "max_completion_length": "tokens sampled at most",
    "temperature": "of sampling; the training log-probs use the same",
    "top_p": "of sampling: the smallest set of tokens with this mass; 1 = all",
    "top_k": "of sampling: the k likeliest tokens; 0 = all",
    "min_p": "of sampling: drop tokens below this share of the likeliest one's probability; unset = none",
    "save_total_limit": "checkpoints kept; unset = all",
    "vllm_server_base_url": "address of the server of --engine vllm; unset = http://127.0.0.1:8000",
    "model_name_or_path": MODEL_NAMES,
    "use_peft": "train LoRA adapters",
    "lora_r": "rank of the adapters",
}

# --- command line -----------------------------------------------------------------------------------------------------


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The recipe's docstring as written; every option under one name, with its default, on few lines."""

    def __init__(self, prog):
        super().__init__(prog, max_help_position=34, width=119)

    def _format_usage(self, usage, actions, groups, prefix):
        return f"usage: accelerate launch {Path(self._prog).name} [--config FILE.yaml] [options]\n\n"

    def _format_action_invocation(self, action):
        return ", ".join(action.option_strings if action.dest == "help" else action.option_strings[:1])


class Parser(TrlParser):
    """TrlParser that raises ValueError, one sentence, where argparse prints its usage and ends the program."""

    def error(self, message):
        """Raises ValueError that names flag, value and what it must be."""
        found = re.fullmatch(r"argument (--\w+)\S*: (?:invalid (\w+) value: '(.*)'|(.*))", message, re.DOTALL)
        if found is None:
            raise ValueError(message)
        flag, kind, value, other = found.groups()
        kinds = {"int": "a whole number", "float": "a number"}
        raise ValueError(
            f"{flag}: {other}" if other else f"{flag} {value} must be {kinds.get(kind, f'of type {kind}')}"
        )


def make_parser(config_class, doc, show_all=False, default=TINY_CONFIG):
    """Parser over (config_class, ModelConfig); unless show_all, help hides what a reader of this recipe can leave alone."""
    doc += f"\nWithout --config and --model_name_or_path, recipes/configs/{default.name} replaces the defaults, as shown here.\n"
    parser = Parser(
        (config_class, ModelConfig), description=doc, formatter_class=HelpFormatter, add_help=False, allow_abbrev=False
    )
    parser.add_argument(
        "--help", "-h", "--help_all", action="store_true", help="this text; --help_all: every option of TRL"
    )
    own = set(config_class.__dataclass_fields__) - set(GRPOConfig.__dataclass_fields__) | set(
        config_class.__annotations__
    )
    hide_options(parser, None if show_all else own | COMMON_OPTIONS)
    replaced = yaml.safe_load(default.read_text())
    for action in parser._actions:
        if action.dest in SHORT_HELP and not show_all and action.help != argparse.SUPPRESS:
            action.help = SHORT_HELP[action.dest]
        if replaced.get(action.dest, action.default) != action.default and action.help != argparse.SUPPRESS:
            action.help = f"{action.help} (default: %(default)s; {default.name}: {replaced[action.dest]})"
    return parser


def hide_options(parser, shown):
    """Leave out of the help what is not in `shown` (None: nothing), and `--no_x` of a flag x, for which `--x false` stands."""
    for action in parser._actions:
        negation = action.option_strings[0] == f"--no_{action.dest}"  # --no_is is a flag of its own
        if negation or shown is not None and action.dest not in shown | {"help"}:
            action.help = argparse.SUPPRESS


def make_small_parser(config_class, doc, show_all=False):
    """Parser over config_class alone, for a script without a policy to train; help shows the options that the class itself names.

    Its `--help` ends the program. Unknown words come back with return_remaining_strings: see `refuse_unknown`.
    """
    parser = Parser(config_class, description=doc, formatter_class=HelpFormatter, add_help=False, allow_abbrev=False)
    parser.add_argument(
        "--help", "-h", "--help_all", action="help", help="this text; --help_all: inherited options too"
    )
    hide_options(parser, None if show_all else set(config_class.__annotations__))
    return parser


def parse_args(config_class, doc, argv=None, default=TINY_CONFIG, amend=None):
    """Parse the command line into (config_class, ModelConfig); input errors end the program with one sentence.

    The run folder is this process's from here on, see `settle_output_dir`. amend(args): what a recipe still has to set.

    Authority: command line, then `--config file.yaml`, then the dataclass. With neither --config nor
    --model_name_or_path the embedded default (recipes/configs/tiny.yaml, or `default`) is used. Unknown flags and keys are
    errors.
    """
    embedded = default.relative_to(REPO)
    quiet_libraries()
    argv = list(sys.argv[1:] if argv is None else argv)
    argv = [
        part
        for arg in map(one_spelling, argv)
        for part in (arg.split("=", 1) if arg.startswith("--config=") else [arg])
    ]
    given = {arg.split("=")[0] for arg in argv}
    if given & {"--help", "-h", "--help_all"}:
        print(make_parser(config_class, doc, "--help_all" in given, default).format_help())
        sys.exit(0)
    with one_sentence():
        file = None
        if "--config" in given:
            file = argv[argv.index("--config") + 1 : argv.index("--config") + 2]
            check_config_file(file, config_class)
        elif "--model_name_or_path" not in given:
            file = [str(default)]
            argv = ["--config", *file, *argv]
            say(f"embedded default: {embedded} (another model: --config or --model_name_or_path)")
        else:
            say(f"no --config: the paper's defaults are in force, not the tiny ones (those: --config {embedded})")
        try:
            args, model_args, _, unknown = make_parser(config_class, doc, default=default).parse_args_and_config(
                argv, return_remaining_strings=True
            )
            refuse_unknown(unknown, config_class, ModelConfig)
            check_lora(model_args)
            check_installed(args)
        except ValueError as error:
            raise ValueError(f"{error}{set_by_file(str(error), file, given)}") from error
        if amend is not None:
            amend(args)
        check_processes(args)
        if launch_command() is not None or "TORCHELASTIC_RUN_ID" in os.environ:  # set by torchrun
            end_with_parent()
        settle_output_dir(args, explicit="--output_dir" in given)
        model_args.model_name_or_path = find_model(model_args.model_name_or_path, args.output_dir)
        args.model_init_kwargs = model_options(args, model_args)
        if args.resume_from_checkpoint is not None:
            line = decided_by_main(lambda: check_resumed(args))
            if line is not None:
                say(line)
    return args, model_args


def quiet_libraries():
    """Keep the screen for what a run says: no bars for loading a file, no notices about names that TRL itself still uses."""
    disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")


def refuse_unknown(words, *config_classes):
    """Raise ValueError naming what the parser could not read, with the option that comes nearest."""
    if words:
        fields = [f for config_class in config_classes for f in config_class.__dataclass_fields__.values()]
        # a config file takes no aliases
        known = {alias.removeprefix("--"): f.name for f in fields for alias in f.metadata.get("aliases", ())}
        known |= {f.name: f.name for f in fields}
        near = difflib.get_close_matches(words[0].removeprefix("--").split("=")[0], known, 1)
        hint = f"did you mean --{known[near[0]]}?" if near else "--help_all lists the options"
        raise ValueError(f"{' '.join(words)} is no option of this recipe: {hint}")


def set_by_file(message, file, given):
    """Which values that the message names come from the config file and not from the command line, as a clause; "" for none."""
    content = yaml.safe_load(Path(file[0]).read_text()) if file else {}
    names = [
        name
        for name, value in content.items()
        if f"--{name}" not in given and re.search(rf"\b{name} {re.escape(str(value))}(?!\w)", message)
    ]
    return f" ({', '.join(names)}: set by {os.path.relpath(file[0])})" if names else ""


def check_ranges(config, ranges):
    """Raise ValueError for the first number outside its range. ranges: {words: (test, names)}; None passes where it is the
    default or part of the option's type."""
    known = {f.name: f for f in config.__dataclass_fields__.values()}
    for words, (test, names) in ranges.items():
        for name in names.split():
            value, optional = vars(config)[name], known[name].default is None
            if value is None and (optional or type(None) in get_args(get_type_hints(type(config))[name])):
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or not test(value):
                raise ValueError(f"--{name} {value} must be {words}" + (", or unset" if optional else ""))


def check_lora(model_args):
    """Raise ValueError for adapter options without adapters, and for an adapter that cannot be."""
    for f in ModelConfig.__dataclass_fields__.values():
        value = vars(model_args)[f.name]
        if f.name.startswith(("lora_", "use_rslora", "use_dora")) and not model_args.use_peft and value != f.default:
            raise ValueError(f"--{f.name} {value} is read with --use_peft only: add --use_peft, or remove it")
    check_ranges(
        model_args,
        {
            "a whole number from 1 up": (lambda x: x >= 1 and x == int(x), "lora_r lora_alpha"),
            "in [0, 1)": (lambda x: 0 <= x < 1, "lora_dropout"),
        },
    )


def check_installed(args):
    """Raise ValueError for a tracker or an engine whose package is missing or unknown, before anything is loaded."""
    for name in [args.report_to] if isinstance(args.report_to, str) else args.report_to:
        known = ["none", "all", *INTEGRATION_TO_CALLBACK]
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"
            raise ValueError(f"--report_to {name} is unknown: {hint}")
        if name in INTEGRATION_TO_CALLBACK and name not in [*get_available_reporting_integrations(), "flyte"]:
            raise ValueError(
                f"--report_to {name}: {name} is not installed here: pip install {name}, or --report_to none"
            )
    if args.use_vllm and not is_vllm_available():
        raise ValueError(
            "--use_vllm needs vllm in this environment, which has none: use --engine vllm, a server of its own"
        )


def model_options(args, model_args):
    """How TRL loads the policy and the reference: weights in float32 (bf16 is autocast), unless --dtype says otherwise."""
    if model_args.load_in_8bit or model_args.load_in_4bit:
        raise ValueError(
            "--load_in_8bit / --load_in_4bit: quantised training weights are not supported, drop the flag"
        )
    options = {"dtype": model_args.dtype or "float32", "revision": model_args.model_revision}
    if model_args.attn_implementation:
        options["attn_implementation"] = model_args.attn_implementation
    return options | (args.model_init_kwargs or {})


@contextlib.contextmanager
def one_sentence():
    """Around everything that reads a user's input: a ValueError or missing file ends the program with its sentence, a signal with
    its line, and what was claimed of the output folder is given back."""
    try:
        with stoppable():
            yield
    except Stopped as stop:
        unclaim()
        say("stopped before it began")
        sys.exit(stop.code)
    except (ValueError, FileNotFoundError) as error:
        unclaim()
        sys.exit(f"error: {error}")
    except OSError as error:
        if error.errno is not None:
            raise
        unclaim()  # transformers: a model that is neither here nor on a hub that can be reached; several lines
        what = str(error).strip().splitlines()[0]
        sys.exit(
            f"error: {what} (--model_name_or_path takes {MODEL_NAMES}; without a network only what is on this disk)"
        )


def one_spelling(arg):
    """--output-dir=x -> --output_dir=x: the parser takes both, and the checks here look for one."""
    name, equals, value = arg.partition("=")
    return name.replace("-", "_").replace("__", "--", 1) + equals + value if arg.startswith("--") else arg


def say(text):
    """Print once, whatever the number of processes. Needs no process group."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def check_config_file(paths, config_class):
    """Raise one sentence naming file and key for a config that is missing, no mapping, or has a key nobody reads."""
    if not paths:
        raise ValueError("--config needs a file: --config recipes/configs/tiny.yaml")
    path = Path(paths[0])
    if not path.is_file():
        known = ", ".join(sorted(p.name for p in TINY_CONFIG.parent.glob("*.yaml")))
        raise FileNotFoundError(f"--config {path} is no file; recipes/configs has {known}")
    try:
        content = read_yaml(path.read_text())
    except ValueError as error:
        raise ValueError(f"--config {path} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"--config {path} must hold `option: value` lines, found {type(content).__name__}")
    known = set(config_class.__dataclass_fields__) | set(ModelConfig.__dataclass_fields__) | {"env"}
    unknown = sorted(map(str, set(content) - known))
    if unknown:
        raise ValueError(f"--config {path}: nobody reads {', '.join(unknown)}; --help_all lists the options")


def find_model(name, folder=None, flag="--model_name_or_path"):
    """A name of TINY or a folder relative to the repository -> its absolute path; a .gguf file -> a model folder made from it under
    `folder`; a folder or a hub id (org/name) unchanged. Raises ValueError or FileNotFoundError, naming `flag`, for anything else:
    no hub is asked for what cannot be on one."""
    if name is None:
        raise ValueError(f"no model: give {flag}, or a --config that names one")
    if name in TINY:
        return str(REPO / "tiny" / TINY[name])
    if name.endswith(".gguf"):
        if folder is None:
            raise ValueError(
                f"{flag} {name}: only training takes a .gguf; give the model folder that it unpacked, OUTPUT_DIR/base_model"
            )
        return unpack_gguf(Path(name), Path(folder) / "base_model")
    here = Path(name).expanduser()
    if not here.exists() and (REPO / name).is_dir():
        return str(REPO / name)
    if not here.is_dir() and (name.count("/") != 1 or name[0] in "/.~"):
        raise FileNotFoundError(f"{flag} {name}: there is no such folder, and it is no hub id: give {MODEL_NAMES}")
    return name


def unpack_gguf(path, folder):
    """Dequantise a .gguf language model into a plain float32 model folder (once) and return the folder.

    transformers loads .gguf but refuses to save what it loaded, and TRL loads from a folder; hence this step.
    """
    if not path.is_file():
        raise FileNotFoundError(f"--model_name_or_path {path} does not exist")
    with PartialState().main_process_first():
        if not (folder / "config.json").exists():
            source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
            loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
            settings = {k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"}
            model = type(loaded)(type(loaded.config)(**settings))
            model.load_state_dict(loaded.state_dict())
            tokenizer = AutoTokenizer.from_pretrained(**source)
            model.generation_config.eos_token_id = tokenizer.eos_token_id
            model.generation_config.pad_token_id = tokenizer.pad_token_id
            tokenizer.save_pretrained(folder)
            model.save_pretrained(folder)
    return str(folder)


def holds_a_run(folder):
    """Has a run written into this folder?"""
    return (folder / "metrics.jsonl").exists() or any(folder.glob("checkpoint-*"))


CLAIMED = {}  # folder that this process writes to -> (is the run a new one?, folders that were made for it, innermost first)


def take(folder, new=False):
    """Be the one run that writes into `folder`, made where it does not exist. new: win its metrics.jsonl too, which of two
    processes only one can create. -> success. Raises ValueError as `hold`."""
    made = [p for p in (folder, *folder.parents) if not p.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    if new:
        try:
            (folder / "metrics.jsonl").open("x").close()
        except FileExistsError:
            return False
    if not CLAIMED:
        atexit.register(unclaim)
    CLAIMED[folder] = new, made
    hold(folder)
    return True


def unclaim():
    """Give back what no run has written to: a start that input errors ended leaves nothing behind."""
    while CLAIMED:
        folder, (new, made) = CLAIMED.popitem()
        metrics = folder / "metrics.jsonl"
        if new and metrics.exists() and not metrics.stat().st_size and not (folder / "final").exists():
            metrics.unlink()
        let_go(folder, remove=not holds_a_run(folder))
        with contextlib.suppress(OSError):  # not empty, or gone
            for path in made:
                path.rmdir()


def decided_by_main(decide):
    """What decide() returns on the main process, on all of them. Its refusal is raised there, and ends the others without a word."""
    state, answer = PartialState(), [None]
    if state.is_main_process:
        try:
            answer = [decide()]
        except (ValueError, FileNotFoundError) as error:
            answer = [error]
    if state.num_processes > 1:
        broadcast_object_list(answer)
    if isinstance(answer[0], Exception):
        if not state.is_main_process:
            sys.exit(1)
        raise answer[0]
    return answer[0]


def settle_output_dir(args, explicit):
    """Fix args.output_dir and args.resume_from_checkpoint; never mix two runs in one folder.

    A fresh run whose folder already holds one moves to `<folder>-2`, `-3`, ... when the folder is the recipe's default, and is
    refused when it was named by the user; the folder is its own from here on, also beside a run that starts at the same moment,
    and a folder that a living run writes to is refused whatever is asked (rlvr_resume.hold).
    `--resume_from_checkpoint last` finds the newest complete checkpoint. Rank 0 decides: another looks a moment later.
    """
    folder = Path(args.output_dir).absolute()

    def decide():
        try:
            return _settled(folder, args, explicit)
        except FileNotFoundError:  # which names what is not there
            raise
        except OSError as error:  # a link to nowhere, a name too long
            raise ValueError(f"--output_dir {folder} cannot be used ({error.strerror}): name another") from error

    folder, checkpoint = decided_by_main(decide)
    args.output_dir, args.resume_from_checkpoint = str(folder), checkpoint and str(checkpoint)
    if checkpoint is not None:
        say(f"resuming from {checkpoint}, writing to {folder}")


def _settled(folder, args, explicit):
    """(folder, checkpoint to go on from or None), absolute; a fresh run has claimed its folder."""
    newest = 0 if explicit else _newest(folder)
    if args.resume_from_checkpoint is not None:
        folder, checkpoint = _resumed(_numbered(folder, max(newest, 1)), args, explicit)
        _check_writable(folder)
        take(folder)
        return folder, checkpoint
    _check_writable(folder)
    while holds_a_run(_numbered(folder, newest + 1)) or not take(_numbered(folder, newest + 1), new=True):
        if explicit:
            hold(folder)  # by a living run: another sentence than by one that has ended
            let_go(folder)
        if explicit and complete_checkpoints(folder):
            raise ValueError(
                f"--output_dir {folder} already holds a run: continue it with --resume_from_checkpoint last, or name another"
            )
        if explicit:
            raise ValueError(
                f"--output_dir {folder} already holds a run, without a complete checkpoint to go on from (the first comes at "
                f"--save_steps {args.save_steps:g}): delete the folder if that run has ended, or name another"
            )
        newest += 1
    return _numbered(folder, newest + 1), None


def _check_writable(folder):
    parent = next(p for p in (folder, *folder.parents) if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ValueError(f"--output_dir {folder} cannot be written (see {parent}): name another")


def _numbered(folder, number):
    return folder if number == 1 else folder.with_name(f"{folder.name}-{number}")


def _newest(folder):
    """The number of the newest run of a default folder: its name alone is 1, 0 where there is none. Gaps are not filled again."""
    names = [p.name for p in folder.parent.iterdir()] if folder.parent.is_dir() else []
    suffixes = [name.removeprefix(f"{folder.name}-") for name in names if name.startswith(f"{folder.name}-")]
    numbers = [1, *(int(s) for s in suffixes if s.isdecimal() and s[0] != "0" and s != "1")]
    return max((n for n in numbers if holds_a_run(_numbered(folder, n))), default=0)


def _resumed(folder, args, explicit):
    checkpoint = Path(args.resume_from_checkpoint).absolute()
    if args.resume_from_checkpoint == "last":
        complete = complete_checkpoints(folder)
        if complete:
            return folder, complete[-1]
        if holds_a_run(folder):
            raise FileNotFoundError(
                f"--resume_from_checkpoint last: the run in {folder} has no complete checkpoint (the first comes at --save_steps "
                f"{args.save_steps:g}): name another run with --output_dir, or start anew without --resume_from_checkpoint"
            )
        if not explicit:
            raise FileNotFoundError(
                f"--resume_from_checkpoint last: no run in {folder}; name the run with --output_dir"
            )
        what = "holds no checkpoint" if folder.exists() else "does not exist"
        raise FileNotFoundError(
            f"--resume_from_checkpoint last: --output_dir {folder} {what}: name the folder of the run, or start anew without "
            "--resume_from_checkpoint"
        )
    if not (checkpoint / "trainer_state.json").exists():
        what = "is no checkpoint: it has no trainer_state.json" if checkpoint.is_dir() else "does not exist"
        raise FileNotFoundError(
            f"--resume_from_checkpoint {checkpoint} {what}; give RUN/checkpoint-N, or `last` for the newest of --output_dir"
        )
    if not explicit:
        return checkpoint.parent, checkpoint
    if folder != checkpoint.parent and holds_a_run(folder):
        raise ValueError(
            f"--output_dir {folder} already holds a run, and {checkpoint} is of another: name a new folder"
        )
    return folder, checkpoint


# --- device and precision ---------------------------------------------------------------------------------------------


def pick_device_and_precision(config):
    """Called in the config's __post_init__: without an accelerator run on the CPU in float32, without any flag.

    TRL's default is bfloat16, which stops on a CPU with a message about GPUs. bf16 is taken where the GPU has it.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        config.use_cpu = True
        config.dataloader_pin_memory = False
    if config.bf16 is None:
        on_cuda = accelerator is not None and accelerator.type == "cuda" and not config.use_cpu
        config.bf16 = on_cuda and not config.fp16 and torch.cuda.is_bf16_supported()


# --- batch arithmetic -------------------------------------------------------------------------------------------------


def world_size():
    """Number of processes as the launcher set it; 1 without a launcher. Does not start a process group."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def nearest(value, valid):
    """The valid values next below and above `value`, as text."""
    below, above = [v for v in valid if v < value], [v for v in valid if v > value]
    return " or ".join(str(v) for v in below[-1:] + above[:1])


def derive_accumulation(config):
    """prompts_per_step -> gradient_accumulation_steps, num_minibatches -> steps_per_generation: one config file fits any
    number of devices.

    Raises ValueError with the nearest valid values when it does not divide.
    """
    for name in ("per_device_train_batch_size", "num_generations", "prompts_per_step"):
        value = config.__dict__[name]
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value} must be at least 1")
    if config.prompts_per_step is not None:
        config.gradient_accumulation_steps = _accumulation(config)
    if config.num_minibatches is None:
        return
    if config.num_minibatches < 1:
        raise ValueError(f"--num_minibatches {config.num_minibatches} must be at least 1")
    steps = config.num_minibatches * config.gradient_accumulation_steps
    if config.steps_per_generation not in (None, steps) or config.generation_batch_size is not None:
        raise ValueError(
            f"--num_minibatches {config.num_minibatches} sets steps_per_generation to {steps}: remove --steps_per_generation "
            "and --generation_batch_size"
        )
    config.steps_per_generation = steps


def _accumulation(config):
    """gradient_accumulation_steps of prompts_per_step."""
    sequences = config.prompts_per_step * config.num_generations
    at_once = config.per_device_train_batch_size * world_size()
    if sequences % at_once:
        valid = [
            p for p in range(1, 4 * config.prompts_per_step + at_once) if p * config.num_generations % at_once == 0
        ]
        raise ValueError(
            f"prompts_per_step {config.prompts_per_step} x num_generations {config.num_generations} = {sequences} sequences do "
            f"not divide over {world_size()} process(es) x per_device_train_batch_size {config.per_device_train_batch_size}: "
            f"use --prompts_per_step {nearest(config.prompts_per_step, valid)}, or another per_device_train_batch_size"
        )
    if config.gradient_accumulation_steps not in (1, sequences // at_once):
        raise ValueError(
            f"prompts_per_step {config.prompts_per_step} needs gradient_accumulation_steps {sequences // at_once} on "
            f"{world_size()} process(es), but {config.gradient_accumulation_steps} is set: give one of the two"
        )
    return sequences // at_once


def check_batch(config):
    """Raise ValueError, with the nearest valid values, unless a sampled batch is whole groups and whole optimizer steps."""
    per_device, generations = config.per_device_train_batch_size, config.num_generations
    accumulation = config.gradient_accumulation_steps
    if generations < 2:
        raise ValueError(f"num_generations {generations}: a group advantage needs at least 2 samples a prompt")
    chunks = config.steps_per_generation or accumulation
    if config.generation_batch_size is not None:
        batch, unit = config.generation_batch_size, math.lcm(per_device * world_size(), generations)
        if batch % unit:
            raise ValueError(
                f"generation_batch_size {batch} is not whole groups of num_generations {generations} and whole passes of "
                f"{world_size()} process(es) x per_device_train_batch_size {per_device}: use --generation_batch_size "
                f"{nearest(batch, range(unit, batch + unit + 1, unit))}"
            )
        chunks = batch // (per_device * world_size())
    sequences = per_device * world_size() * chunks
    if sequences % generations:
        valid = [b for b in range(1, 4 * per_device + generations) if b * world_size() * chunks % generations == 0]
        raise ValueError(
            f"{world_size()} process(es) x per_device_train_batch_size {per_device} x {chunks} accumulation steps = "
            f"{sequences} sequences are no whole groups of num_generations {generations} (per_device_train_batch_size "
            f"counts completions, not prompts): use --per_device_train_batch_size {nearest(per_device, valid)}, or "
            f"--num_generations {nearest(generations, [d for d in range(2, sequences + 1) if sequences % d == 0])}"
        )
    if chunks % accumulation:
        valid = nearest(chunks, range(accumulation, 4 * chunks + accumulation, accumulation))
        raise ValueError(
            f"steps_per_generation {chunks} is no multiple of gradient_accumulation_steps {accumulation}: an optimizer step "
            f"would mix two samplings, and its denominator could not be fixed beforehand: use {valid}"
        )


def lowering(config):
    """Which flags make a sampling smaller, as they are set: those above 1."""
    per_step = "prompts_per_step" if config.prompts_per_step is not None else "gradient_accumulation_steps"
    per_sampling = "num_minibatches" if config.num_minibatches is not None else "steps_per_generation"
    names = (
        [per_step, per_sampling]
        if config.prompts_per_step is not None
        else ["per_device_train_batch_size", per_step, per_sampling]
    )
    if per_sampling == "steps_per_generation" and config.steps_per_generation == config.gradient_accumulation_steps:
        names.remove(per_sampling)  # follows
    values = {name: vars(config)[name] for name in names}
    return " or ".join(f"--{name} {value}" for name, value in values.items() if value > 1)


def batch_line(config):
    """The arithmetic of one optimizer step in words, printed at start."""
    sequences = config.per_device_train_batch_size * world_size() * config.gradient_accumulation_steps
    updates = config.num_iterations * config.steps_per_generation // config.gradient_accumulation_steps
    return (
        f"batch: {sequences / config.num_generations:g} prompts x {config.num_generations} generations = {sequences} sequences = "
        f"{world_size()} process(es) x {config.per_device_train_batch_size} per device x "
        f"{config.gradient_accumulation_steps} accumulation; {updates} update(s) a sampling"
    )


def leave(code=0):
    """Last call of a recipe's main, or of a run that was stopped.

    With several processes it ends this one without Python's finalisation: there a communication thread that asks for the
    interpreter aborts the process (seen in one of a dozen two-process runs), and the launcher then calls a finished run
    failed. What is registered to happen at exit (trackers flush there) happens.
    """
    if world_size() > 1:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if code:
        sys.exit(code)


# --- what the launcher was asked for ----------------------------------------------------------------------------------


def launch_command():
    """The words after `accelerate launch` where that is our parent, else None."""
    try:
        command = psutil.Process(os.getppid()).cmdline()
    except psutil.Error:
        return None
    for i, word in enumerate(command):
        module = word == "accelerate.commands.launch" and command[i - 1] == "-m"
        script = (
            Path(word).name == "accelerate-launch" or word == "launch" and Path(command[i - 1]).name == "accelerate"
        )
        if module or script:
            return command[i + 1 :]
    return None


def requested_processes():
    """`num_processes` of the `accelerate launch` that is our parent (flag or config file), else None.

    accelerate does not hand this number down: `accelerate launch --cpu --num_processes 2` starts one process, silently.
    """
    command = launch_command()
    if command is None:
        return None
    request, _ = launch_command_parser().parse_known_args(command)
    by_default = os.path.isfile(config_args.default_config_file) and not request.cpu  # as accelerate decides it
    if request.num_processes is None and (request.config_file is not None or by_default):
        return config_args.load_config_from_file(request.config_file).num_processes
    return request.num_processes


def check_processes(args):
    """Raise ValueError when the run has another number of processes than --expect_processes or the launcher asked for."""
    actual = PartialState().num_processes
    for source, asked in (("--expect_processes", args.expect_processes), ("accelerate launch", requested_processes())):
        if asked is not None and asked != actual:
            raise ValueError(
                f"{source} asks for {asked} process(es) but this run has {actual}: on CPUs launch with "
                f"`ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes {asked} ...` or "
                f"`ACCELERATE_USE_CPU=true torchrun --nproc_per_node {asked} ...`"
            )


def check_distributed(accelerator, expected=None):
    """Raise ValueError unless the run is distributed as asked: no | ddp | fsdp | fsdp2 | deepspeed.

    expected: --expect_distributed; without it, what the launcher's environment asks for (FSDP, DeepSpeed).
    """
    kind = str(accelerator.distributed_type).split(".")[-1]
    actual = {"NO": "no", "FSDP": "fsdp", "DEEPSPEED": "deepspeed"}.get(kind, "ddp")
    if actual == "fsdp" and accelerator.is_fsdp2:
        actual = "fsdp2"
    if expected is None and os.environ.get("ACCELERATE_USE_FSDP", "false") == "true":
        expected = "fsdp2" if os.environ.get("FSDP_VERSION", "1") == "2" else "fsdp"
    if expected is None and os.environ.get("ACCELERATE_USE_DEEPSPEED", "false") == "true":
        expected = "deepspeed"
    if expected is not None and expected != actual:
        raise ValueError(
            f"asked for distributed type {expected}, running as {actual} with {accelerator.num_processes} process(es): check "
            "the file given to `accelerate launch --config_file` (accelerate ignores FSDP and DeepSpeed on CPUs)"
        )
