"""What a run shows and leaves behind: progress bar, metrics.jsonl, curve.png, the closing table."""

import json
import math
import time
from fnmatch import fnmatch
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display on a training machine
import matplotlib.pyplot as plt  # noqa: E402
from tqdm.auto import tqdm  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from transformers.trainer_callback import PrinterCallback, ProgressCallback  # noqa: E402

# panel title -> metrics drawn in it, names or patterns; a metric that a run does not write is left out
PANELS = {
    "reward and held-out accuracy": ("reward", "eval/accuracy"),
    "entropy (nats a token)": ("entropy",),
    "gradient norm (before clipping)": ("grad_norm",),
    "mismatch KL(mu || pi_old)": ("mismatch/k1", "mismatch/k3"),
    "masked fraction": ("*/masked_frac", "ppo_clip/frac", "mismatch/extreme_frac"),
    "completion length (tokens)": ("completions/mean_length", "completions/max_length"),
}
# the same, for what only some runs have: without any of its metrics there is no panel
MORE_PANELS = {
    "routing and support agreement": ("routing/rollout_agreement", "routing/old_agreement", "support/agreement"),
    "staleness (weight versions)": ("async/staleness/p50", "async/staleness/max"),
    "KL to the initial model": ("kl",),
}
NO_REWARD_STEPS, NO_REWARD = 10, 0.005  # steps, and the mean reward over them below which it counts as 0
LOG_SCALE = {"gradient norm (before clipping)"}
MARKED = {"gradient norm (before clipping)"}  # with the steps that GradLoc looked into
SHOWN = {  # metric -> short name in the progress line; of a pattern the first metric that a run writes
    "reward": "reward",
    "eval/accuracy": "held-out",
    "entropy": "entropy",
    "grad_norm": "grad",
    "mismatch/k3": "mismatch",
    "*/masked_frac": "masked",
    "completions/mean_length": "length",
}


def to_json(record):
    """One JSON line. Non-finite numbers become the strings "nan", "inf", "-inf": valid JSON that still shows them."""
    safe = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(safe, allow_nan=False)


def read_metrics(path):
    """metrics.jsonl -> list of dicts, non-finite numbers restored."""
    records = []
    for line in Path(path).read_text().splitlines(keepends=True):
        if not line.endswith("\n"):
            continue  # the last line of a killed run: its step is done again
        record = json.loads(line)
        records.append({k: float(v) if v in ("nan", "inf", "-inf") else v for k, v in record.items()})
    return records


def series(records, name):
    """The (step, value) pairs of one metric, as two lists."""
    pairs = [(r["step"], r[name]) for r in records if isinstance(r.get(name), (int, float))]
    return [p[0] for p in pairs], [p[1] for p in pairs]


def matching(records, patterns):
    """Names of the metrics in `records` that one of the patterns takes: in the patterns' order, then in that of their first record."""
    logged = list(dict.fromkeys(name for r in records for name in r))
    return list(dict.fromkeys(name for pattern in patterns for name in logged if fnmatch(name, pattern)))


def smooth(values, span):
    """Trailing mean over `span` values: the curve one reads through the noise."""
    return [sum(values[max(0, i + 1 - span) : i + 1]) / min(i + 1, span) for i in range(len(values))]


def plot_curves(records, path, title=""):
    """Draw PANELS, and those of MORE_PANELS that have something to show, from metrics records into a PNG."""
    more = {panel: names for panel, names in MORE_PANELS.items() if matching(records, names)}
    panels = {panel: matching(records, names) for panel, names in (PANELS | more).items()}
    rows = math.ceil(len(panels) / 3)
    figure, axes = plt.subplots(rows, 3, figsize=(15, 3.75 * rows), constrained_layout=True)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, (panel, names) in zip(axes.flat, panels.items(), strict=False):
        for color, name in enumerate(names):
            steps, values = series(records, name)
            if not steps:
                continue
            if name == "eval/accuracy":
                axis.plot(steps, values, "o-", color=f"C{color}", label=name)
                continue
            axis.plot(steps, values, color=f"C{color}", alpha=0.25)
            axis.plot(steps, smooth(values, max(1, len(values) // 15)), color=f"C{color}", label=name)
        if panel in MARKED:
            looked, _ = series(records, "gradloc/top1_share")
            at = dict(zip(*series(records, "grad_norm"), strict=True))
            looked = [step for step in looked if step in at]
            if looked:
                axis.plot(looked, [at[step] for step in looked], "v", color="C3", label="explained by GradLoc")
        axis.set_title(panel)
        axis.set_xlabel("optimizer step")
        axis.grid(alpha=0.3)
        if panel in LOG_SCALE and any(value > 0 for name in names for value in series(records, name)[1]):
            axis.set_yscale("log")
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    figure.suptitle(f"{title}     (pale: every step, bold: trailing mean)")
    figure.savefig(path, dpi=90)
    plt.close(figure)


def shown(record, pattern):
    """The one metric of a record that a pattern of SHOWN takes, in a list; none in an empty one."""
    return [name for name in matching([record], (pattern,)) if isinstance(record[name], float)][:1]


class RunReport(TrainerCallback):
    """Progress bar with the numbers that matter, metrics.jsonl (one line a logging step), curve.png (kept current)."""

    def __init__(self, folder, lines=12, redraw_every_s=60.0, bar=True):
        self.folder, self.lines, self.redraw_every_s = Path(folder), lines, redraw_every_s
        self.metrics_path, self.curve_path = self.folder / "metrics.jsonl", self.folder / "curve.png"
        self.show_bar, self.bar, self.drawn_at = bar, None, time.monotonic()
        self.rewards = []  # of the first steps
        self.unprinted = []  # records since the last printed line, which shows their mean: one step is mostly noise
        self.latest = {}  # short name -> last value

    def replace_defaults(self, trainer):
        """Take the place of transformers' printing callbacks, which dump sixty metrics a step."""
        trainer.remove_callback(ProgressCallback)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(self)

    def write(self, record):
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.metrics_path.open("a") as file:
            file.write(to_json(record) + "\n")

    def means(self):
        """`reward 0.52`, ...: means over the steps since the last printed line; `reward -` where nothing was sampled since."""
        for pattern, short in SHOWN.items():
            values = [r[name] for r in self.unprinted for name in shown(r, pattern)]
            if values:
                yield f"{short} {sum(values) / len(values):.3g}"
            elif short in self.latest and short != "held-out":  # a column that the lines before have
                yield f"{short} -"

    def draw(self):
        if not self.metrics_path.exists():
            return  # fewer steps than --logging_steps
        plot_curves(read_metrics(self.metrics_path), self.curve_path, title=self.folder.name)
        self.drawn_at = time.monotonic()

    def on_train_begin(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        if self.metrics_path.exists():  # resumed: steps after the checkpoint are about to be done again
            kept = [r for r in read_metrics(self.metrics_path) if r["step"] <= state.global_step]
            self.metrics_path.write_text("".join(to_json(r) + "\n" for r in kept))
        if state.global_step:
            self.rewards = None
        if self.bar is not None:  # training was left and begins again from a checkpoint
            self.bar.close()
        self.bar = tqdm(
            total=state.max_steps, initial=state.global_step, dynamic_ncols=True, desc="train", unit="step",
            disable=not self.show_bar,
        )  # fmt: skip

    def on_step_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.bar is None or "train_runtime" in logs:
            return
        record = {"step": state.global_step, **{k: v for k, v in logs.items() if k != "total_flos"}}
        self.write(record)
        for pattern, short in SHOWN.items():
            for name in shown(record, pattern):
                self.latest[short] = f"{record[name]:.3g}"
        self.bar.set_postfix(self.latest, refresh=False)
        self.unprinted.append(record)
        every = max(1, state.max_steps // self.lines)
        if state.global_step == 1 or state.global_step % every == 0 or "eval/accuracy" in record:
            self.bar.write(f"step {state.global_step:>5}  " + "  ".join(self.means()))
            self.unprinted.clear()
        self._warn_of_no_reward(record)
        if time.monotonic() - self.drawn_at > self.redraw_every_s:
            self.draw()

    def _warn_of_no_reward(self, record):
        """Once, after the first steps of a run: without a single success in a group there is no gradient."""
        if self.rewards is None:
            return
        name = "accuracy" if "accuracy" in record else "reward"  # with punishments a reward of 0 is no lack of success
        self.rewards += [record[name]] if name in record else []
        if record["step"] >= NO_REWARD_STEPS:
            if self.rewards and abs(sum(self.rewards) / len(self.rewards)) < NO_REWARD:
                self.bar.write(
                    f"{name} 0 for {record['step']} steps: nothing can be learnt from groups without a success; see README, "
                    "Troubleshooting"
                )
            self.rewards = None

    def on_train_end(self, args, state, control, **kwargs):
        self.stop()

    def stop(self):
        """The end of training, or of a run that was stopped in it."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None
            self.draw()


def table(rows):
    """Rows of (left, right) text, aligned."""
    width = max(len(left) for left, _ in rows)
    return "\n".join(f"  {left:<{width}}  {right}" for left, right in rows)
