"""What a run shows and leaves behind: progress bar, metrics.jsonl, curve.png, the closing table; and runs side by side.

python rlvr_report.py compare RUN_DIR RUN_DIR [...] [--output compare.png]
"""

import contextlib
import errno
import json
import math
import os
import statistics
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display on a training machine
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402
from tqdm.auto import tqdm  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from transformers.trainer_callback import PrinterCallback, ProgressCallback  # noqa: E402

from rlvr_resume import set_aside  # noqa: E402

# panel title -> metrics drawn in it, names or patterns; a metric that a run does not write is left out
PANELS = {
    "reward and held-out accuracy": ("reward", "eval/accuracy"),
    "entropy (nats a token)": ("entropy",),
    "gradient norm (before clipping)": ("grad_norm",),
    "mismatch of engine and training": ("mismatch/k1", "mismatch/k3", "mismatch/extreme_frac"),
    "masked fraction": ("*/masked_frac", "ppo_clip/frac"),
    "completion length (tokens)": ("completions/mean_length", "completions/max_length"),
}
# the same, for what only some runs have: without any of its metrics there is no panel
MORE_PANELS = {
    "routing and support agreement": ("routing/rollout_agreement", "routing/old_agreement", "support/agreement"),
    "staleness (weight versions)": ("async/staleness/p50", "async/staleness/max"),
    "KL to the initial model": ("kl",),
}
NOTES = {  # panel title -> what it shows and which way is good, as in the README's glossary
    "reward and held-out accuracy": "Mean reward; share of held-out answers right, +- 1 standard error. Up is good.",
    "entropy (nats a token)": "How open the choice of a token still is. Slowly down is good, near 0 is not.",
    "gradient norm (before clipping)": "Size of a step's gradient. Within 3x of its running median is good.",
    "mismatch of engine and training": "Same weights, two engines: KL, and share of tokens over 2x apart. Low is good.",
    "masked fraction": "What clips and masks take out of the loss. Low is good.",
    "completion length (tokens)": "Sampled tokens. Neither way is good; at the limit, answers are cut off.",
    "routing and support agreement": "Training's own experts and token sets against the engine's. Near 1 is good.",
    "staleness (weight versions)": "Updates from a token's sampling to its use. Near the samplings ahead is good.",
    "KL to the initial model": "How far the policy is from where it began. Slowly up is good.",
}
LABELS = {"eval/accuracy": "held-out accuracy"}  # where the legend does not have the metric's own name
HEALTHY = {  # metric -> (from, to): its range in the README's glossary, None where open
    "mismatch/k1": (None, 1e-2),
    "mismatch/k3": (1e-4, 1e-2),
    "mismatch/extreme_frac": (None, 1e-3),
    "token_clip/masked_frac": (None, 0.05),
    "seq_clip/masked_frac": (None, 0.5),
    "minirl/masked_frac": (None, 0.1),
    "off_policy_mask/masked_frac": (None, 0.3),
    "ppo_clip/frac": (None, 0.2),
    "routing/rollout_agreement": (0.9, None),
    "routing/old_agreement": (0.95, None),
    "support/agreement": (0.95, None),
}
SPIKE_FACTOR, MEDIAN_STEPS = 3, 64  # of grad_norm, whose range moves with its median
FROM_ZERO = {"masked fraction"}
NO_REWARD_STEPS, NO_REWARD = 10, 0.005  # steps, and the mean reward over them below which it counts as 0
LOG_SCALE = {"gradient norm (before clipping)"}
MARKED = {"gradient norm (before clipping)"}  # with the steps that GradLoc looked into
LINES = ("-", "--", ":", "-.")  # of the metrics of one panel where the colours tell runs apart
SHOWN = {  # metric -> short name in the progress line; of a pattern the largest metric that a run writes
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


FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class JsonLines:
    """A file of one JSON record a line, which a training run appends to. While the disk is full the lines wait in memory."""

    def __init__(self, path):
        self.path, self.waiting = Path(path), []

    def write(self, record):
        """Append {name: value}. Raises OSError where it is not for want of space."""
        first = not self.waiting
        self.waiting.append(record)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            size = self.path.stat().st_size if self.path.exists() else 0
            try:
                with self.path.open("a") as file:
                    file.write("".join(to_json(line) + "\n" for line in self.waiting))
            except OSError:
                if self.path.exists():  # half a line would end up in the middle of the file
                    os.truncate(self.path, size)
                raise
        except OSError as error:
            if error.errno not in FULL_DISK:
                self.waiting.clear()
                raise
            if first:
                tqdm.write(f"{self.path} cannot be written ({error}): its lines wait in memory; free disk space")
            return
        self.waiting.clear()

    def cut(self, step):
        """Drop what was written after `step`, and half a line at the end: those steps are about to be done again. Needs no space."""
        self.waiting = [record for record in self.waiting if record["step"] <= step]
        if self.path.exists():
            size = 0
            for line in self.path.read_bytes().splitlines(keepends=True):
                if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                    break
                size += len(line)
            os.truncate(self.path, size)


@contextlib.contextmanager
def unless_full(path):
    """A picture is not worth a run: where the disk is full it is left out, with a line."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        tqdm.write(f"{path} cannot be written ({error}): free disk space")


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
    _draw({title: records}, path, title)


def plot_comparison(runs, path):
    """The same panels with one colour a run. runs: {name for the legend: metrics records}."""
    _draw(runs, path, "")


def _draw(runs, path, title):
    everything = [record for records in runs.values() for record in records]
    more = {panel: names for panel, names in MORE_PANELS.items() if matching(everything, names)}
    panels = {panel: matching(everything, names) for panel, names in (PANELS | more).items()}
    rows = math.ceil(len(panels) / 3)
    figure, axes = plt.subplots(rows, 3, figsize=(15, 4 * rows), constrained_layout=True)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    smoothed = banded = False
    for axis, (panel, names) in zip(axes.flat, panels.items(), strict=False):
        values = [value for name in names for value in series(everything, name)[1]]
        if panel in LOG_SCALE and any(value > 0 for value in values):
            axis.set_yscale("log")
        for place, name in enumerate(names):
            for number, records in enumerate(runs.values()):
                color, line = (f"C{place}", "-") if len(runs) == 1 else (f"C{number}", LINES[place % len(LINES)])
                smoothed |= _draw_metric(axis, records, name, color, line)
        if panel in FROM_ZERO:
            axis.set_ylim(bottom=0)
        if len(runs) == 1:
            if panel in MARKED:
                _mark_explained(axis, everything)
            for place, name in enumerate(names):  # once the curves have set the axis
                banded |= _draw_band(axis, everything, name, f"C{place}")
        axis.set_title(panel, pad=20)
        axis.annotate(
            NOTES[panel],
            (0.5, 1),
            (0, 6),
            xycoords="axes fraction",
            textcoords="offset points",
            ha="center",
            fontsize=7.5,
        )
        axis.set_xlabel("optimizer step")
        axis.xaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
        axis.grid(alpha=0.3)
        _legend(axis, names if len(runs) > 1 else ())
    if len(runs) > 1:
        handles = [Line2D([], [], color=f"C{number}", label=run) for number, run in enumerate(runs)]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(runs)))
    said = [title] if title else []
    if smoothed:
        said.append("(pale: every step, bold: trailing mean)")
    if banded:
        said.append("(shaded: healthy range of the curve of that colour)")
    figure.suptitle("     ".join(said))
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _draw_metric(axis, records, name, color, line):
    """Draw one metric of one run. -> are there both a pale line and a bold one?"""
    steps, values = series(records, name)
    if not steps:
        return False
    look = {"color": color, "label": LABELS.get(name, name)}
    if name == "eval/accuracy":  # a few measured points: nothing is known of what lies between
        error = dict(zip(*series(records, "eval/stderr"), strict=True))
        bars = [error.get(step, 0.0) for step in steps]
        axis.errorbar(steps, values, bars, fmt="o--", linewidth=0.8, markersize=5, capsize=3, **look)
        return False
    log = axis.get_yscale() == "log"
    if log:  # a line to 0 has no end there: it is broken, and a mark at the foot says where
        _mark(axis, steps, [value == 0 for value in values], 0.02, color, "0")
    _mark(axis, steps, [not math.isfinite(value) for value in values], 0.98, color, "not finite")
    span = max(1, len(values) // 15)
    for width, faint in ((1, True), (span, False)) if span > 1 else ((1, False),):
        drawn = smooth(values, width)
        drawn = [value if value > 0 else math.nan for value in drawn] if log else drawn
        alone = "." if width == 1 and (log or len(steps) == 1) else None  # one point, or one between gaps, is no line
        alpha, label = (0.25, {"label": None}) if faint else (1, {})
        axis.plot(steps, drawn, line, marker=alone, markersize=3, alpha=alpha, **look | label)
    return span > 1


def _mark(axis, steps, where, height, color, label):
    """A cross at each step `where` something is that has no place on the axis, at a height in axis units."""
    steps = [step for step, here in zip(steps, where, strict=True) if here]
    if steps:
        look = {"color": color, "markersize": 4, "transform": axis.get_xaxis_transform()}
        axis.plot(steps, [height] * len(steps), "x" if height < 0.5 else "1", label=label, **look)


def _draw_band(axis, records, name, color):
    """Shade a metric's healthy range behind its curve, as far as the axis reaches. -> is there one?"""
    steps, values = series(records, name)
    if not steps or not (name in HEALTHY or name == "grad_norm"):
        return False
    edges = axis.get_xlim(), axis.get_ylim()
    look = {"color": color, "alpha": 0.08, "linewidth": 0, "zorder": 0}
    if name == "grad_norm":
        medians = running_median(values, MEDIAN_STEPS)
        low = [median / SPIKE_FACTOR for median in medians]
        axis.fill_between(steps, low, [median * SPIKE_FACTOR for median in medians], **look)
    else:
        low, high = HEALTHY[name]
        axis.axhspan(edges[1][0] if low is None else low, edges[1][1] if high is None else high, **look)
        for edge in HEALTHY[name]:
            if edge is not None:
                axis.axhline(edge, color=color, linestyle=":", linewidth=0.8, alpha=0.6, zorder=0)
    axis.set_xlim(*edges[0])
    axis.set_ylim(*edges[1])
    return True


def _mark_explained(axis, records):
    looked, _ = series(records, "gradloc/top1_share")
    at = dict(zip(*series(records, "grad_norm"), strict=True))
    looked = [step for step in looked if at.get(step, 0) > 0]
    if looked:
        axis.plot(looked, [at[step] for step in looked], "v", color="C3", label="explained by GradLoc")


def _legend(axis, names):
    """The labels of what is drawn; where colours tell runs apart, the line of each of several metrics."""
    handles = [
        Line2D([], [], color="0.3", linestyle=LINES[i % len(LINES)], label=LABELS.get(name, name))
        for i, name in enumerate(names)
    ]
    if handles:
        axis.legend(handles=handles, fontsize=8)
    elif axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8)


def running_median(values, span):
    """Median of the up to `span` finite values above 0 before each one; NaN without any."""
    medians, past = [], []
    for value in values:
        medians.append(statistics.median(past) if past else math.nan)
        if value > 0 and math.isfinite(value):
            past = [*past[-span + 1 :], value]
    return medians


def shown(record, pattern):
    """The metrics of a record that a pattern of SHOWN takes, {name: value}."""
    return {name: record[name] for name in matching([record], (pattern,)) if isinstance(record[name], float)}


def column(short, values):
    """(heading, number) of the largest of `values`, {name: value}, as text; of several it is named. NaN is the largest."""
    name = max(values, key=lambda name: (math.isnan(values[name]), values[name]))
    return (short if len(values) == 1 else f"{short} {name.split('/')[0]}"), f"{values[name]:.3g}"


class RunReport(TrainerCallback):
    """Progress bar with the numbers that matter, metrics.jsonl (one line a logging step), curve.png (kept current)."""

    def __init__(self, folder, lines=12, redraw_every_s=60.0, bar=True):
        self.folder, self.lines, self.redraw_every_s = Path(folder), lines, redraw_every_s
        self.metrics_path, self.curve_path = self.folder / "metrics.jsonl", self.folder / "curve.png"
        self.records = JsonLines(self.metrics_path)
        self.show_bar, self.bar, self.drawn_at = bar, None, time.monotonic()
        self.rewards = []  # of the first steps
        self.unprinted = []  # records since the last printed line, which shows their mean: one step is mostly noise
        self.latest = {}  # short name -> (heading, last value)

    def replace_defaults(self, trainer):
        """Take the place of transformers' printing callbacks, which dump sixty metrics a step."""
        trainer.remove_callback(ProgressCallback)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(self)

    def write(self, record):
        """Appends one line to metrics.jsonl."""
        self.records.write(record)

    def means(self):
        """`reward 0.52`, ...: means over the steps since the last printed line; `reward -` where nothing was sampled since."""
        for pattern, short in SHOWN.items():
            values = {}  # name -> its values
            for record in self.unprinted:
                for name, value in shown(record, pattern).items():
                    values.setdefault(name, []).append(value)
            if values:
                yield " ".join(column(short, {name: sum(v) / len(v) for name, v in values.items()}))
            elif short in self.latest and short != "held-out":  # a column that the lines before have
                yield f"{short} -"

    def draw(self):
        """Draws curve.png anew from metrics.jsonl."""
        if not self.metrics_path.exists():
            return  # fewer steps than --logging_steps
        with unless_full(self.curve_path):
            plot_curves(read_metrics(self.metrics_path), self.curve_path, title=self.folder.name)
        self.drawn_at = time.monotonic()

    def on_train_begin(self, args, state, control, **kwargs):
        """Opens the bar; after a resume, or a rollback, drops the lines of steps that are about to be done again and sets their
        checkpoints aside."""
        if not state.is_world_process_zero:
            return
        self.records.cut(state.global_step)
        if said := set_aside(self.folder, state.global_step):
            tqdm.write(said)
        if state.global_step:
            self.rewards = None
        if self.bar is not None:  # training was left and begins again from a checkpoint
            self.bar.close()
        self.bar = tqdm(
            total=state.max_steps, initial=state.global_step, dynamic_ncols=True, desc="train", unit="step",
            disable=not self.show_bar,
        )  # fmt: skip

    def on_step_end(self, args, state, control, **kwargs):
        """Moves the bar."""
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Writes the record, and a line of means twelve times a run; redraws the curve once a minute."""
        if self.bar is None or "train_runtime" in logs:
            return
        record = {"step": state.global_step, **{k: v for k, v in logs.items() if k != "total_flos"}}
        self.write(record)
        for pattern, short in SHOWN.items():
            if values := shown(record, pattern):
                self.latest[short] = column(short, values)
        self.bar.set_postfix(dict(self.latest.values()), refresh=False)
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
        """See `stop`."""
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


# --- runs side by side ------------------------------------------------------------------------------------------------


def compare(folders, output="compare.png"):
    """Draw the runs of several folders into one PNG; -> a table to print: run, steps, held-out accuracy, minutes.

    Raises ValueError naming the folder that holds no run.
    """
    runs = {_run_name(folder, folders): read_run(folder) for folder in folders}
    if len(runs) < len(folders):
        raise ValueError(f"a folder is given twice: {' '.join(map(str, folders))}")
    plot_comparison(runs, output)
    rows = [("run", "steps", "held-out before", "after", "minutes")]
    rows += [(name, *_summary(records)) for name, records in runs.items()]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, f"curves: {output}"])


def read_run(folder):
    """The metrics records of a run's folder. Raises ValueError, one sentence, where there are none."""
    path = Path(folder) / "metrics.jsonl"
    if not path.is_file():
        state = "holds no metrics.jsonl" if Path(folder).is_dir() else "is no folder"
        raise ValueError(f"{folder} {state}: give the output folder of a run")
    try:
        records = read_metrics(path)
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read as metrics: {error}") from error
    records = [record for record in records if isinstance(record.get("step"), int)]
    if not any(record["step"] for record in records):
        raise ValueError(f"{path} holds no step of a training run: give the output folder of a run")
    return records


def _run_name(folder, folders):
    """The folder's name; its whole path where another folder of the list has the same name."""
    names = [Path(other).resolve().name for other in folders]
    name = Path(folder).resolve().name
    return str(folder) if names.count(name) > 1 else name


def _summary(records):
    """(steps, held-out accuracy at the start, the last one, minutes) of a run as text; "-" for what was not measured."""
    last = max(record["step"] for record in records)
    scores = [record for record in records if "eval/accuracy" in record]
    before = next((_accuracy(record) for record in scores if record["step"] == 0), "-")
    after = next((_accuracy(record, last) for record in reversed(scores) if record["step"] > 0), "-")
    seconds = series(records, "step_time")[1]
    minutes = f"{statistics.fmean(seconds) * last / 60:.1f}" if seconds else "-"
    return str(last), before, after, minutes


def _accuracy(record, last=0):
    error = f" +- {100 * record['eval/stderr']:.1f}" if "eval/stderr" in record else ""
    place = f" (step {record['step']})" if record["step"] != last else ""
    return f"{100 * record['eval/accuracy']:.1f} %{error}{place}"


def main(argv=None):
    """`python rlvr_report.py compare RUN_DIR RUN_DIR`."""
    argv = list(sys.argv[1:] if argv is None else argv)
    output = "compare.png"
    if "--output" in argv[:-1]:
        at = argv.index("--output")
        output = argv[at + 1]
        del argv[at : at + 2]
    if argv[:1] != ["compare"] or len(argv) < 3 or any(word.startswith("-") for word in argv):
        sys.exit(
            "usage: python rlvr_report.py compare RUN_DIR RUN_DIR [...] [--output compare.png]     draws the curves of several "
            "runs into one picture, lists their held-out accuracies"
        )
    try:
        print(compare(argv[1:], output))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
