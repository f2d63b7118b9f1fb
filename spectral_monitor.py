"""How concentrated the gradient is, matrix by matrix, over a run: a callback for any recipe, spectral.jsonl and spectral.png.

Every n-th optimizer step, on the gradient accumulated over the whole step and before any clipping: share of the energy in the top
singular directions, ranks that hold 50, 70 and 90 % of it, entropy rank (`ares.spectral_stats`), for every matrix of the
decoder layers; an expert stack counts as the mean over its experts.

Source: the article behind ares.py shows these two curves for Qwen3-1.7B: the top-32 share rises from about 8 to 18 % over RLVR, and the
ranks fall; with random rewards the trend is gone. paper: over which matrices and how they are averaged is not stated; we: the
seven linear maps of every layer, unweighted, because a weight by size would show the MLP alone.
"""

import json
import math
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display on a training machine
import matplotlib.pyplot as plt  # noqa: E402
import torch  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from ares import spectral_stats  # noqa: E402
from layer_clip import layer_of  # noqa: E402
from rlvr_report import JsonLines, unless_full  # noqa: E402

LEVELS = (0.5, 0.7, 0.9)


def matrix_type(name):
    """Last word of the module: q_proj, down_proj; of an expert stack the parameter itself. Adapters keep theirs: q_proj.lora_A."""
    parts = [
        part for part in name.split(".") if part not in ("weight", "default", "base_layer", "module", "_orig_mod")
    ]
    return ".".join(parts[-2:]) if parts[-1].startswith("lora_") else parts[-1]


def watched(model):
    """{name: parameter} of the matrices and expert stacks of the decoder layers."""
    return {
        name: p
        for name, p in model.named_parameters()
        if p.requires_grad and p.dim() in (2, 3) and layer_of(name).startswith("layer ") and "norm" not in name
    }


def directions(model):
    """32, as in the article, or a 32nd of the smallest side in a layer: 32 of 64 hold nearly all energy, whatever a run does."""
    smallest = min((min(p.shape[-2:]) for p in watched(model).values()), default=1024)
    return min(32, max(1, smallest // 32))


@torch.no_grad()
def gradient_spectra(model, top=32):
    """{name: statistics} of every watched gradient that is not zero; None in the place of one that is not finite.

    The statistics of `spectral_stats`, whose rank@0.5 is called rank_0.5 here, in spectral.jsonl and among the metrics: not every tracker
    takes an @ in a name.
    Sharded gradients are gathered one at a time: all ranks call it, and all get the result. ValueError without any gradient.
    """
    out = {}
    parameters = {name: p for name, p in watched(model).items() if p.grad is not None}
    if not parameters:
        raise ValueError(
            "the spectral monitor found no gradient of a matrix in a decoder layer: call it between backward and the optimizer step"
        )
    for name, p in parameters.items():
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        matrices = grad.unsqueeze(0) if grad.dim() == 2 else grad
        if not matrices.isfinite().all():
            out[name] = None
            continue
        # of a stack without the experts that no token chose
        parts = [spectral_stats(matrix, top, LEVELS) for matrix in matrices if matrix.any()]
        if parts:
            out[name] = {key.replace("@", "_"): sum(part[key] for part in parts) / len(parts) for key in parts[0]}
    return out


def summary(spectra):
    """Unweighted mean over matrices: {"spectral/top_share": ..., "spectral/rank_0.5": ..., "spectral/entropy_rank": ...}.

    Without a statistic that one of them lacks: `spectral_stats` cannot give every one of a matrix too large for it to be exact.
    """
    finite = [stats for stats in spectra.values() if stats is not None]
    if not finite:
        return {}
    names = ("top_share", "entropy_rank", *(f"rank_{q:g}" for q in LEVELS))
    means = {f"spectral/{name}": sum(stats[name] for stats in finite) / len(finite) for name in names}
    return {name: value for name, value in means.items() if math.isfinite(value)}


class SpectralMonitor(TrainerCallback):
    """`SpectralMonitor(trainer, every)` attaches itself. Writes trainer.args.output_dir/spectral.jsonl, one line a look, and spectral.png.

    top: directions of the top share; None = `directions(model)`.

    It wraps `accelerator.clip_grad_norm_`, the one moment between backward and clipping, outside of whatever wrapped it before, so
    that LayerClip and GradLoc come after it. Gradients are read only. ValueError under DeepSpeed, which keeps gradients to itself, and fp16
    loss scaling, whose scale is still in them.
    """

    def __init__(self, trainer, every, top=None):
        if every < 1:
            raise ValueError(f"--spectral_every {every}: use a number of steps, 1 or more")
        if trainer.is_deepspeed_enabled or trainer.accelerator.scaler is not None:
            raise ValueError(
                "--spectral_every reads .grad, which DeepSpeed keeps to itself and fp16 loss scaling multiplies: use DDP or FSDP2 with "
                "--bf16, or leave the flag out"
            )
        self.trainer, self.every = trainer, every
        self.top = directions(trainer.model) if top is None else top
        self.path = Path(trainer.args.output_dir) / "spectral.jsonl"
        self.lines, self.figure = JsonLines(self.path), self.path.with_suffix(".png")
        self.looked = False
        self._clip = trainer.accelerator.clip_grad_norm_
        trainer.accelerator.clip_grad_norm_ = self._look_and_clip
        trainer.callback_handler.callbacks.insert(0, self)  # before the callbacks that write the log down

    def _look_and_clip(self, parameters, max_norm, *args, **kwargs):
        self._look()
        return self._clip(parameters, max_norm, *args, **kwargs)

    def _look(self):
        step = self.trainer.state.global_step + 1
        if self.looked or (step - 1) % self.every:
            return
        self.looked = True
        spectra = gradient_spectra(self.trainer.model, self.top)
        for name, value in summary(spectra).items():
            self.trainer._metrics["train"][name].append(value)
        if spectra and self.trainer.accelerator.is_main_process:  # a step without any advantage has no spectrum
            self.lines.write({"step": step, "top": self.top, "matrices": {k: _line(v) for k, v in spectra.items()}})

    def on_train_begin(self, args, state, control, **kwargs):
        """After a resume, or a rollback, drops the lines of steps that are about to be done again."""
        self.looked = False  # a rollback leaves its step between the look and the update
        if state.is_world_process_zero:
            self.lines.cut(state.global_step)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        """Looks, where clipping has not: a step without it is looked at all the same."""
        self._look()  # a trainer that did not ask accelerate for the norm
        self.looked = False

    def on_train_end(self, args, state, control, **kwargs):
        """Draws spectral.png."""
        if state.is_world_process_zero and self.path.exists():
            with unless_full(self.figure):
                plot_spectra({self.path.parent.name: [read_spectra(self.path)]}, self.figure)


def _line(stats):
    return None if stats is None else {k: round(v, 6) if math.isfinite(v) else None for k, v in stats.items()}


def read_spectra(path):
    """spectral.jsonl -> list of {"step", "top", "matrices": {name: statistics}}."""
    return [json.loads(line) for line in Path(path).read_text().splitlines(keepends=True) if line.endswith("\n")]


def mean_over(record, key, chosen=lambda name: True):
    """Mean of one statistic over the matrices of one look that `chosen(name)` takes; None where none has it."""
    values = [
        s[key] for name, s in record["matrices"].items() if chosen(name) and s is not None and s.get(key) is not None
    ]
    return sum(values) / len(values) if values else None


def plot_spectra(runs, path):
    """Figure of one run or of several arms. runs: {arm: [records of each seed]}; the line is the mean over seeds, the band min to max.

    Left: energy share of the top directions. Middle: ranks for 90, 70, 50 % of the energy (solid, dashed, dotted). Right, for one arm: the
    share by type of matrix; for several: the entropy rank.
    """
    figure, axes = plt.subplots(1, 3, figsize=(18, 5), constrained_layout=True)
    top = next(iter(runs.values()))[0][0]["top"]
    axes[0].set_title(f"energy in the top {top} directions of a gradient matrix")
    axes[1].set_title("rank that holds 90 % (solid), 70 %, 50 % (dotted) of the energy")
    for color, (arm, seeds) in enumerate(runs.items()):
        _line_over_seeds(axes[0], seeds, "top_share", f"C{color}", "-", arm)
        for level, style in zip(sorted(LEVELS, reverse=True), ("-", "--", ":"), strict=True):
            _line_over_seeds(axes[1], seeds, f"rank_{level:g}", f"C{color}", style, arm if style == "-" else None)
        if len(runs) > 1:
            _line_over_seeds(axes[2], seeds, "entropy_rank", f"C{color}", "-", arm)
    if len(runs) == 1:
        (seeds,) = runs.values()
        axes[2].set_title("the same share, by type of matrix")
        for color, kind in enumerate(sorted({matrix_type(name) for name in seeds[0][0]["matrices"]})):
            _line_over_seeds(
                axes[2],
                seeds,
                "top_share",
                f"C{color % 10}",
                "-",
                kind,
                lambda name, kind=kind: matrix_type(name) == kind,
            )
    else:
        axes[2].set_title("entropy rank")
    for axis in axes:
        axis.set_xlabel("optimizer step")
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _line_over_seeds(axis, seeds, key, color, style, label, chosen=lambda name: True):
    at = defaultdict(list)
    for records in seeds:
        for record in records:
            value = mean_over(record, key, chosen)
            if value is not None:
                at[record["step"]].append(value)
    steps = sorted(at)
    if not steps:
        return
    axis.plot(steps, [sum(at[s]) / len(at[s]) for s in steps], style, color=color, label=label)
    if len(seeds) > 1:
        axis.fill_between(steps, [min(at[s]) for s in steps], [max(at[s]) for s in steps], color=color, alpha=0.12)
