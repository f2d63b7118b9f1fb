"""A run that is stopped and goes on: who writes into its folder, what a checkpoint was made with, how a run ends by a signal.

Nothing here has an equation. It keeps two runs out of one folder, settings that a checkpoint overrides from being taken for
those in force, and Ctrl-C from ending in two stack traces.
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import socket
import sys
import threading
import time
import warnings
from pathlib import Path

from filelock import FileLock, Timeout

from optimizers import OPTIMIZERS
from stability_control import flatten

# --- one run a folder -------------------------------------------------------------------------------------------------

LOCK = "run.lock"  # names its holder; the kernel gives the lock back when that process ends, so it is never stale
HELD = {}  # folder -> the lock of this process


def hold(folder):
    """Be the one run that writes into `folder`, until `let_go`. Raises ValueError naming the process that is it already.

    Where the file system has no locks it warns and goes on.
    """
    if folder in HELD:
        return
    lock = FileLock(folder / LOCK, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        holder = (folder / LOCK).read_text().strip() or "another process"
        pid = holder.removeprefix("pid ").split(" ")[0]
        raise ValueError(
            f"{folder} is being written by a run that goes on ({holder}): end that one there (kill {pid}) and try again, or name "
            "another --output_dir"
        ) from error
    except (OSError, NotImplementedError) as error:
        warnings.warn(
            f"{folder} cannot be locked ({error}): nothing keeps a second run from writing there", stacklevel=2
        )
        return
    HELD[folder] = lock
    (folder / LOCK).write_text(f"pid {os.getpid()} on {socket.gethostname()}\n")


def let_go(folder=None, remove=False):
    """Give back one folder, or all. remove: as if it had never been held."""
    for held in list(HELD) if folder is None else [folder] if folder in HELD else []:
        with contextlib.suppress(OSError):  # the folder is gone, or can be written no more
            (held / LOCK).unlink() if remove else os.truncate(held / LOCK, 0)
        HELD.pop(held).release()


# --- what a checkpoint was made with ------------------------------------------------------------------------------------

# in each checkpoint: {"settings": {flag: value}, "controls": {name: value changed while it ran}}
SETTINGS = "settings.json"

# Sit in the optimizer's param_groups, or choose the optimizer: a checkpoint brings its own.
OPTIMIZER_FLAGS = {
    "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim", "optim_args", "optim_method",
    "optim_target_modules",
}.union(*OPTIMIZERS.values())  # fmt: skip

# May change at any time without a word: they move no weight.
FREE_FLAGS = {
    "output_dir", "resume_from_checkpoint", "overwrite_output_dir", "max_steps", "num_train_epochs", "report_to", "run_name",
    "disable_tqdm", "local_rank", "project", "expect_processes", "expect_distributed", "generation_batch_size",
}  # fmt: skip
FREE_PARTS = (
    "save_",
    "logging_",
    "log_",
    "eval_",
    "hub_",
    "push_to_hub",
    "trackio_",
    "dataloader_",
    "verifier_",
    "vllm_",
)


def settings_of(args):
    """{flag: value} of a recipe's arguments, nested ones under dotted names, as JSON gives them back."""
    values = {f.name: vars(args)[f.name] for f in dataclasses.fields(args) if f.init}
    plain = json.loads(json.dumps(values, default=str))
    plain = {k: v for k, v in plain.items() if k not in FREE_FLAGS and not k.startswith(FREE_PARTS)}
    return flatten(plain) | {"num_train_epochs": args.num_train_epochs}


def write_settings(checkpoint, settings, controls):
    """Beside the other files of a checkpoint. controls: {name: value} changed while the run ran."""
    text = json.dumps({"settings": settings, "controls": controls}, indent=1, default=str)
    (Path(checkpoint) / SETTINGS).write_text(text + "\n")


def read_settings(checkpoint):
    """(settings, controls) of a checkpoint; two empty ones where it has no such file."""
    path = Path(checkpoint) / SETTINGS
    if not path.exists():
        return {}, {}
    try:
        content = json.loads(path.read_text())
        return content["settings"], content["controls"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): resume from another checkpoint") from error


def check_resumed(args):
    """Compare args with what its checkpoint was made with. -> the line that names what differs and takes effect, or None.

    Raises ValueError for a finished run, and for a setting that the checkpoint's state would override. Arguments are compared with
    arguments: a learning rate that a schedule, a guard or control.yaml moved is not another setting.
    """
    checkpoint = args.resume_from_checkpoint
    (made, changed), asked = read_settings(checkpoint), settings_of(args)
    _refuse_finished(args, made)
    differing = {name: value for name, value in made.items() if name in asked and asked[name] != value}
    differing.pop("num_train_epochs", None)
    kept = OPTIMIZER_FLAGS | ({"seed"} if made.get("optim_method") == "ares" else set())  # Ares keeps it in its groups
    name = Path(checkpoint).name
    ignored = [flag for flag in differing if flag in kept]
    if ignored:
        was = ", ".join(f"--{flag} {shown(asked[flag])} (was {shown(made[flag])})" for flag in ignored)
        raise ValueError(
            f"{was} would be ignored, because the optimizer of {name} goes on as it was made: keep "
            f"{', '.join(f'--{flag} {shown(made[flag])}' for flag in ignored)}, or start a new run from its weights with "
            f"--model_name_or_path {checkpoint} and another --output_dir"
        )
    for flag in differing:
        if flag in changed:
            raise ValueError(
                f"--{flag} {shown(asked[flag])} (was {shown(made[flag])}) would be ignored, because {name} keeps {shown(changed[flag])}, "
                f"which control.yaml or the guard set while the run ran: keep --{flag} {shown(made[flag])} and set {flag} in control.yaml"
            )
    if not differing:
        return None
    return "resumed with other settings: " + ", ".join(
        f"{flag} {shown(asked[flag])} (was {shown(value)})" for flag, value in differing.items()
    )


def step_of(checkpoint):
    """The optimizer step of .../checkpoint-N."""
    return int(Path(checkpoint).name.split("-")[1])


def on_disk(folder):
    """Checkpoints of a run, oldest step first."""
    found = [p for p in Path(folder).glob("checkpoint-*") if p.name.removeprefix("checkpoint-").isdecimal()]
    return sorted(found, key=step_of)


def complete_checkpoints(folder):
    """Those of them that a run can go on from: the main process's part is written last."""
    return [p for p in on_disk(folder) if (p / "rollout_state_0.pt").exists()]


ASIDE = "set_aside"  # in a run folder: checkpoints of a course that was left


def set_aside(folder, step):
    """A run that goes on from `step` takes another course than the checkpoints after it: `last`, retention and a rollback would
    mix the two. Moves them to set_aside/, set_aside-2/, ... -> the line that says so, or None."""
    later = [p for p in on_disk(folder) if step_of(p) > step]
    if not later:
        return None
    number = 1
    while (place := Path(folder) / (ASIDE if number == 1 else f"{ASIDE}-{number}")).exists():
        number += 1
    place.mkdir()
    for checkpoint in later:
        checkpoint.rename(place / checkpoint.name)
    return f"going on from step {step}: {', '.join(p.name for p in later)} of the course before moved to {place}"


def shown(value):
    """As one would write it: unset for null, true and false in small letters."""
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def nothing_left(checkpoint, step, end):
    """The sentence about a finished run."""
    return (
        f"{checkpoint} is at step {step} and the run ends at step {end}: nothing is left to train; raise --max_steps (or "
        "--num_train_epochs) to go on"
    )


def _refuse_finished(args, made):
    """Before anything is loaded, where steps or epochs tell; the trainer sees every other case."""
    path = Path(args.resume_from_checkpoint) / "trainer_state.json"
    try:
        state = json.loads(path.read_text())
        step, end = state["global_step"], state["max_steps"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): resume from another checkpoint") from error
    if args.max_steps > 0:
        end = args.max_steps
    elif made.get("num_train_epochs", -1) < args.num_train_epochs:
        return
    if step >= end:
        raise ValueError(nothing_left(args.resume_from_checkpoint, step, end))


# --- the end by a signal --------------------------------------------------------------------------------------------------

SIGNALS = (signal.SIGINT, signal.SIGTERM)
REPEAT_S = 3.0  # a launcher passes on what the terminal has sent already


class Stopped(KeyboardInterrupt):
    """Ctrl-C or a SIGTERM reached a recipe. `code`: the exit status that shells expect, 130 or 143."""

    def __init__(self, signum):
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.code = 128 + signum


@contextlib.contextmanager
def stoppable():
    """Within it SIGINT and SIGTERM raise Stopped; after that the process is ending and both are ignored.

    An error that comes after the signal (another rank has left, and a collective broke) counts as the stop.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = []  # (number, time)

    def stop(signum, frame):
        if came and time.monotonic() - came[-1][1] < REPEAT_S:
            return
        came.append((signum, time.monotonic()))
        raise Stopped(signum)

    before = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        yield
    except Stopped:
        before = dict.fromkeys(SIGNALS, signal.SIG_IGN)
        raise
    except Exception as error:
        if not came:
            raise
        before = dict.fromkeys(SIGNALS, signal.SIG_IGN)
        raise Stopped(came[0][0]) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_line(step, end, newest, save_steps):
    """What a stopped run says: where it stands and how it goes on. newest: folder of its newest complete checkpoint, or None."""
    at = f"stopped at step {step}" if step else "stopped before the first step"
    if newest is None:
        return f"{at}; no checkpoint exists yet, the first comes at --save_steps {save_steps:g}"
    if int(newest.name.split("-")[1]) >= end > 0:
        return f"{at}, which was the last; its weights are in {newest}"
    return f"{at}; go on with --resume_from_checkpoint last ({newest.name} in {newest.parent})"


def end_with_parent():
    """Linux: ask for a SIGTERM when the process that started this one ends. A launcher that is killed does not tell its own.

    See prctl(2), PR_SET_PDEATHSIG.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)  # 1 = PR_SET_PDEATHSIG
