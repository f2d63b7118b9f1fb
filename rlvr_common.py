"""What every recipe imports: losses and advantages as pure functions, and the trainer base that feeds them.

Vocabulary and shapes, everywhere (N sequences, T completion tokens, G group size, V vocabulary):

    logps          (N, T)  log pi_theta, training engine, current weights
    old_logps      (N, T)  log pi_old, training engine, the weights that sampled
    rollout_logps  (N, T)  log mu, inference engine, the weights that sampled (behaviour policy)
    ref_logps      (N, T)  log pi_ref
    mask           (N, T)  1 where a completion token counts
    advantages     (N, 1)
    ratio          r     = exp(logps - old_logps)            staleness
    mismatch             = exp(old_logps - rollout_logps)    training-inference discrepancy
    weight         omega = exp(logps - rollout_logps)        = ratio * mismatch
    seq_weight     rho   = exp(mean_t log omega)   (N, 1)    geometric mean over the sequence

Rules kept by every function below: differences and `exp` in float32 or better (inputs may be bfloat16), log-ratios
clamped to +-20 before `exp`, NaN inside the mask stays visible, nothing outside the mask reaches a masked result.
"""

import dataclasses
import hashlib
import json
import math
import os
import pickle
import sys
import warnings
from collections import defaultdict
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import PeftModel
from safetensors import SafetensorError
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import RepeatSampler

import stability
from ares import Ares
from gradloc import GradLoc
from gradloc_methods import replayed_rng, rng_state
from gradloc_trainer import Attachment
from optimizers import OPTIMIZERS, check_options, make_optimizer
from rlvr_data import PROMPT_STYLES, load_math_rows, load_math_rows_report
from rlvr_launch import (
    batch_line,
    check_batch,
    check_distributed,
    check_ranges,
    derive_accumulation,
    leave,
    lowering,
    one_sentence,
    pick_device_and_precision,
    say,
)
from rlvr_report import RunReport, table
from rlvr_resume import (
    Stopped,
    complete_checkpoints,
    let_go,
    nothing_left,
    settings_of,
    stop_line,
    stoppable,
    write_settings,
)
from rollout import ROLLOUT_DTYPES, TransformersEngine
from routing import (  # noqa: F401  (record_routing, replay_routing, routing_agreement: recipes import them from here)
    agreeing_rows,
    place_routes,
    record_routing,
    recorded_rows,
    replay_routing,
    route_bytes_per_token,
    routing_agreement,
    routing_shape,
)
from spectral_monitor import SpectralMonitor
from stability_control import Control, narrowed, number
from support import check_support, drop_rows, replay_support, support_bytes_per_token, support_logps  # noqa: F401
from verifier import MathVerifier
from vllm_engine import VLLMEngine

LOG_RATIO_CLAMP = 20.0  # exp(20) = 4.9e8: far beyond any use, far below float32 overflow (exp(89) = inf)


# --- pure functions: advantages, weights, losses ----------------------------------------------------------------------


def _float(x):
    """float32 or better: bfloat16 log-probs lose 4e-3 in a difference, float64 is kept for exact tests."""
    return x if x.dtype == torch.float64 else x.float()


def _ratio(numerator_logps, denominator_logps):
    """exp(numerator - denominator), clamped to +-20 in log space; NaN passes through, inf * 0 cannot happen."""
    return (_float(numerator_logps) - _float(denominator_logps)).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()


def _column(advantages):
    """(N,) or (N, 1) or (N, T) -> broadcastable against (N, T)."""
    return advantages.unsqueeze(1) if advantages.dim() == 1 else advantages


def masked_mean(x, mask):
    """(N, T), (N, T) -> (N, 1): mean over the tokens that count; 0 for a sequence without any."""
    m = mask.bool()
    return torch.where(m, x, 0.0).sum(1, keepdim=True) / m.sum(1, keepdim=True).clamp(min=1)


def equal_rewards(groups):
    """(P, G) rewards -> (P, 1) bool: True where a group's scored (non-NaN) rewards are all equal, or none or one is scored."""
    scored = ~groups.isnan()
    low = torch.where(scored, groups, math.inf).amin(1, keepdim=True)
    return low >= torch.where(scored, groups, -math.inf).amax(1, keepdim=True)


def group_advantages(rewards, num_generations, scale="none"):
    """Reward minus the mean of its group of `num_generations` consecutive samples. (N,) -> (N,), float32 for integers.

    scale: "none" (Dr. GRPO, MiniRL, DeepSeek-V3.2), "group" (GRPO, arXiv:2402.03300: divide by the group's standard
    deviation), "batch" (divide by the standard deviation over all scored samples). The deviation is the unbiased one
    (n - 1) plus 1e-4, as in TRL. A NaN reward is unscorable: left out of mean and deviation, advantage 0. A group whose
    rewards are all equal has advantage exactly 0: equality is tested, because the float mean of equal values is
    not always that value, and its rounding error divided by a small epsilon is a phantom gradient.

    Raises ValueError for a length that is no multiple of num_generations, an infinite reward or an unknown scale.
    """
    if scale not in ("none", "group", "batch"):
        raise ValueError(f"scale={scale!r} is unknown: use 'none', 'group' or 'batch'")
    n = rewards.numel()
    if rewards.dim() != 1 or num_generations < 1 or n % num_generations:
        raise ValueError(
            f"rewards of shape {tuple(rewards.shape)} do not split into groups of num_generations={num_generations}: "
            "give a 1-D tensor whose length is a multiple of it"
        )
    if torch.isinf(rewards).any():
        raise ValueError(
            f"reward {int(torch.isinf(rewards).nonzero()[0])} is infinite: return a finite reward or None"
        )
    groups = rewards.double().view(-1, num_generations)
    scored = ~groups.isnan()
    count = scored.sum(1, keepdim=True)
    centred = torch.where(scored, groups - groups.nansum(1, keepdim=True) / count.clamp(min=1), 0.0)
    centred = torch.where(equal_rewards(groups), 0.0, centred)
    if scale == "group":
        centred = centred / ((centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt() + 1e-4)
    elif scale == "batch":
        valid = groups[scored]
        centred = centred / ((valid.std() if valid.numel() > 1 else valid.new_zeros(())) + 1e-4)
    return centred.view(-1).to(rewards.dtype if rewards.is_floating_point() else torch.float32)


def token_clip(logps, old_logps, rollout_logps, mode="icepop", low=0.5, high=5.0):
    """TokenClip, the remedy for token-level training-inference mismatch (GradLoc blog, section on type A.1). -> (N, T), detached.

    "tis"     min(mismatch, high), mismatch = pi_old/mu: a factor on `ppo_clip_loss`. Shrinks from above only.
    "icepop"  omega * 1[low <= omega <= high], omega = pi_theta/mu: replaces the ratio, `loss = -weight * A * logps`, no
              r-clip. A token outside the band gets weight exactly 0; a bound is never clamped *up* with its gradient
              kept (that would multiply a vanishing weight by 1e30).

    paper: whether PPO's min stayed in the TIS runs is not stated; we: keep it, because without it a negative advantage
    with a large ratio is clipped in the wrong direction.
    Raises ValueError for an unknown mode or an empty band (tis reads only `high`).
    """
    if mode not in ("tis", "icepop"):
        raise ValueError(f"mode={mode!r} is unknown: use 'tis' or 'icepop'")
    if not 0 <= (0 if mode == "tis" else low) < high:
        raise ValueError(f"token clip band [{low}, {high}] is empty or negative: need 0 <= low < high")
    with torch.no_grad():
        if mode == "tis":
            return _ratio(old_logps, rollout_logps).clamp(max=high)
        omega = _ratio(logps, rollout_logps)
        outside = (omega < low) | (omega > high)  # False for NaN, which stays visible
        return omega.masked_fill(outside, 0.0)


def sequence_weight(logps, rollout_logps, mask):
    """rho = exp(mean_t log omega), (N, 1), detached. GradLoc blog, type A.2; a *geometric mean*, not the product."""
    with torch.no_grad():
        log_rho = masked_mean(_float(logps) - _float(rollout_logps), mask)
        return log_rho.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()


def seq_clip(logps, rollout_logps, mask, low=0.995, high=1.005):
    """SeqClip, the remedy for sequence-level mismatch: keep = 1[low < rho < high], strict, both signs of A. -> (N, 1).

    A dropped sequence stays in the denominators (GradLoc blog: the 1/G is written over all sequences). NaN rho gives
    NaN, so that a broken log-prob is seen and not silently dropped. Raises ValueError unless 0 <= low < high.
    """
    if not 0 <= low < high:
        raise ValueError(f"sequence clip band ({low}, {high}) is empty or negative: need 0 <= low < high")
    rho = sequence_weight(logps, rollout_logps, mask)
    return torch.where(rho.isnan(), rho, ((rho > low) & (rho < high)).to(rho.dtype))


def ppo_clip_loss(logps, old_logps, advantages, eps_low=0.2, eps_high=0.2):
    """-min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), r live. (N, T) per-token loss. PPO, arXiv:1707.06347 eq. 7."""
    ratio, advantages = _ratio(logps, old_logps), _column(advantages)
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages)


def weighted_logp_loss(weight, advantages, logps):
    """-weight * A * log pi_theta, (N, T); the gradient flows through `logps` only. Exactly 0 where weight * A is: no 0 * inf."""
    factor = weight * _column(advantages)
    return -torch.where(factor == 0, 0.0, factor * _float(logps))


def minirl_loss(logps, old_logps, rollout_logps, advantages, eps_low=0.2, eps_high=0.27, cap=5.0):
    """-M sg[min(omega, cap)] A log pi_theta, (N, T) per-token loss. MiniRL, arXiv:2512.01374 eq. 7.

    M = 0 where A > 0 and r > 1 + eps_high, or A < 0 and r < 1 - eps_low, with r = pi_theta/pi_old (decoupled clip).
    Gradient flows through `logps` only.
    """
    advantages = _column(advantages)
    with torch.no_grad():
        ratio = _ratio(logps, old_logps)
        dropped = ((advantages > 0) & (ratio > 1 + eps_high)) | ((advantages < 0) & (ratio < 1 - eps_low))
        weight = _ratio(logps, rollout_logps).clamp(max=cap).masked_fill(dropped, 0.0)
        weight = torch.where(ratio.isnan(), ratio, weight)  # nobody can say whether the clip drops it: stays visible
    return weighted_logp_loss(weight, advantages, logps)


def k3(log_ratio):
    """exp(x) - 1 - x, elementwise and >= 0: the k3 estimator of a KL from x = log(q/p) at samples of p.

    By expm1, because near 0 it is x^2 / 2 and would cancel in float32; the exponent is clamped to +-20.
    """
    return torch.expm1(log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)) - log_ratio


def unbiased_kl(logps, behaviour_logps, ref_logps, ratio_cap=None):
    """(pi_theta/pi_b) * k3, k3 = pi_ref/pi_theta - log(pi_ref/pi_theta) - 1; (N, T). DeepSeek-V3.2 eq. 7.

    The ratio is live: only then is the expected gradient under pi_b that of the reverse KL(pi_theta || pi_ref); with a
    detached ratio it would be that of KL(pi_ref || pi_theta). On-policy the value equals k3, the gradient does not.
    ratio_cap truncates the ratio from above (deployment guide's clip; not in the paper): beyond it the correction's
    own gradient vanishes and the estimate is biased.
    """
    ratio = _ratio(logps, behaviour_logps)
    if ratio_cap is not None:
        ratio = ratio.clamp(max=ratio_cap)
    log_ref = (_float(ref_logps) - _float(logps)).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return ratio * k3(log_ref)


def off_policy_sequence_mask(logps, rollout_logps, advantages, mask, delta, min_keep_ratio=0.0):
    """DeepSeek-V3.2 eq. 9: drop a sequence when A < 0 and mean_t log(mu/pi_theta) > delta. -> (N, 1) keep, detached.

    min_keep_ratio (deployment guide): of the sequences that have tokens at least this share stays, rounded up; the least
    divergent of the dropped ones come back first. It acts on the N sequences given. For one floor over an optimizer step that
    is split, see `sequence_divergence` and `keep_least_divergent`, of which this is the composition.
    Multiply the policy term only; denominators and KL stay untouched.
    Raises ValueError for min_keep_ratio outside [0, 1] or per-token advantages (eq. 9 is per sequence).
    """
    divergence = sequence_divergence(logps, rollout_logps, mask)
    return keep_least_divergent(divergence, advantages, mask.any(1, keepdim=True), delta, min_keep_ratio)


def sequence_divergence(logps, rollout_logps, mask):
    """What eq. 9 compares with delta: mean_t log(mu/pi_theta), (N, T) -> (N, 1), detached; 0 for a sequence without tokens."""
    return masked_mean(_float(rollout_logps).detach() - _float(logps).detach(), mask)


def keep_least_divergent(divergence, advantages, counted, delta, min_keep_ratio=0.0):
    """Eq. 9 on divergences: divergence, advantages, counted (N, 1), counted False for a sequence without tokens -> (N, 1) keep.

    Give it all N sequences of an optimizer step, over micro-batches and processes, and min_keep_ratio is a share of the step.
    A NaN divergence gives NaN, which counts as kept. Raises as `off_policy_sequence_mask`.
    """
    if not 0 <= min_keep_ratio <= 1:
        raise ValueError(f"min_keep_ratio={min_keep_ratio} is not a share: use a value in [0, 1]")
    if _column(advantages).shape[1] != 1:
        raise ValueError(f"advantages of shape {tuple(advantages.shape)}: eq. 9 needs one a sequence, (N,) or (N, 1)")
    keep = ~((_column(advantages) < 0) & (divergence > delta))
    floor = math.ceil(min_keep_ratio * int(counted.sum()) - 1e-9)  # 0.07 * 100 is a little above 7
    missing = floor - int((keep & counted).sum())
    if missing > 0:
        dropped = (~keep).squeeze(1).nonzero().squeeze(1)
        keep[dropped[divergence[dropped, 0].argsort(stable=True)[:missing]]] = True
    return torch.where(divergence.isnan(), divergence, keep.to(divergence.dtype))


AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_sum")


def aggregate(per_token_loss, mask, how, normalizer):
    """Sum this micro-batch's share of the loss: () scalar. Shares of all micro-batches and ranks add up to the loss.

    token_mean           sum over tokens / normalizer              normalizer = tokens of the optimizer step
    seq_mean_token_mean  sum over sequences of their token mean / normalizer      = sequences of the optimizer step
    seq_sum              sum over tokens / normalizer                     = sequences (or any constant)

    `normalizer` is global: fixed once per optimizer step, over all micro-batches and ranks, before anything is masked,
    so that the result depends neither on the micro-batch split, nor on the padding, nor on what a clip rejected.
    A mask without any token gives 0 with a zero gradient. Raises ValueError for an unknown `how` or a normalizer that is not positive.
    """
    if how not in AGGREGATIONS:
        raise ValueError(f"how={how!r} is unknown: use one of {', '.join(AGGREGATIONS)}")
    m = mask.bool()
    if not normalizer > 0:
        if m.any():
            raise ValueError(f"normalizer={normalizer} must be positive: the count over the whole optimizer step")
        normalizer = 1.0  # nothing counts anywhere: 0 / 1, still connected to the graph (FSDP needs the backward)
    kept = torch.where(m, _float(per_token_loss), 0.0)
    if how == "seq_mean_token_mean":
        return (kept.sum(1) / m.sum(1).clamp(min=1)).sum() / normalizer
    return kept.sum() / normalizer


# --- flags: what a loss does not read is refused ----------------------------------------------------------------------

# Every GRPOConfig option that changes the loss, the advantages or the sampling distribution. A recipe names those it reads; each of
# the others must keep its default. tests/test_flags.py fails when a TRL release adds an option that nobody has sorted.
LOSS_FLAGS = {
    "beta", "num_iterations", "epsilon", "epsilon_high", "delta", "loss_type", "importance_sampling_level",
    "sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg",
    "multi_objective_aggregation", "scale_rewards", "reward_weights", "mask_truncated_completions",
    "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps",
    "top_entropy_quantile", "entropy_coef", "use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max",
    "entropy_coef_delta", "entropy_target", "router_aux_loss_coef", "off_policy_mask_threshold", "use_bias_correction_kl",
    "vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_cap",
    "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min", "label_smoothing_factor",
}  # fmt: skip
# Options of samplers that TransformersEngine is not.
SAMPLER_FLAGS = {
    "generation_kwargs", "repetition_penalty", "cache_implementation", "use_transformers_continuous_batching",
    "transformers_continuous_batching_config", "use_transformers_paged", "ds3_gather_for_generation",
}  # fmt: skip
HINTS = {
    "loss_type": "choose with --aggregation",
    "epsilon": "the ratio clip belongs to losses on the ratio; --token_clip icepop has none",
    "epsilon_high": "the ratio clip belongs to losses on the ratio; --token_clip icepop has none",
    "vllm_importance_sampling_correction": "the recipe's own loss corrects the mismatch",
    "importance_sampling_level": "of sequences: --seq_clip_low / --seq_clip_high of grpo_tokenclip.py, rloo of ares_dapo.py",
    "off_policy_mask_threshold": "this mask belongs to the DeepSeek-V3.2 recipe",
}


def refuse_unused(args, honoured):
    """Raise ValueError naming the first loss or sampler flag that was changed but that this recipe never reads.

    args: an RLVRConfig; honoured: the names of LOSS_FLAGS that the recipe's loss does read.
    """
    unknown = set(honoured) - LOSS_FLAGS
    if unknown:
        raise ValueError(f"honoured names {sorted(unknown)} that are no loss flags: correct the recipe")
    defaults = {f.name: f.default for f in dataclasses.fields(RLVRConfig)}
    for name in sorted((LOSS_FLAGS - set(honoured)) | (set() if args.use_vllm else SAMPLER_FLAGS)):
        if getattr(args, name) != defaults[name]:
            hint = f" ({HINTS[name]})" if name in HINTS else ""
            default = "" if name == "loss_type" else f", default is {defaults[name]}"
            raise ValueError(
                f"--{name} {getattr(args, name)} is set, but this recipe never reads it{hint}: remove it{default}"
            )


def truncates(args):
    """Does sampling drop part of the distribution? Then training needs `keep_sampling_mask` or reads the kept mass as mismatch."""
    return args.top_p < 1 or args.top_k > 0 or (args.min_p or 0) > 0


# --- configuration shared by all recipes ------------------------------------------------------------------------------

# What a number may be: {words: (test, options)}. Ranges that depend on another option are in __post_init__.
RANGES = {
    "a whole number from 1 up": (
        lambda x: x >= 1 and x == int(x),
        "gradient_accumulation_steps max_completion_length save_total_limit num_iterations dataset_limit max_prompt_tokens "
        "vllm_concurrency rollout_batch_size verifier_workers guard_k guard_save_every rank_min power_iters galore_gap spectral_top "
        "expect_processes",
    ),
    "a whole number from 0 up": (
        lambda x: x >= 0 and x == int(x),
        "seed top_k eval_every gradloc_every gradloc_cooldown guard_retries spectral_every",
    ),
    "a whole number from 1 up, or -1 for --num_train_epochs": (
        lambda x: x == -1 or x >= 1 and x == int(x),
        "max_steps",
    ),
    "a whole number from 128 up (SymPy alone needs 70)": (lambda x: x >= 128 and x == int(x), "verifier_memory_mb"),
    "above 0": (
        lambda x: x > 0,
        "num_train_epochs save_steps logging_steps vllm_timeout_s verifier_timeout_s guard_max_age_h guard_disk_gb "
        "galore_scale",
    ),
    "0 or more": (
        lambda x: x >= 0,
        "learning_rate warmup_steps max_grad_norm weight_decay beta epsilon epsilon_high vllm_restart_s",
    ),
    "above 0 and at most 1": (lambda x: 0 < x <= 1, "top_p"),
    "in [0, 1]": (lambda x: 0 <= x <= 1, "min_p"),
    "in [0, 1)": (lambda x: 0 <= x < 1, "rank_ema momentum layer_clip_beta"),
}
CHOICES = {
    "prompt_style": (None, *PROMPT_STYLES),
    "ares_step": ("literal", "projected"),
    "rank_mode": ("dynamic", "fixed"),
    "expect_distributed": (None, "no", "ddp", "fsdp", "fsdp2", "deepspeed"),
}


@dataclass
class RLVRConfig(GRPOConfig):
    """GRPOConfig plus what our trainer base reads. Device, precision and batch are settled in __post_init__."""

    # TRL options whose default differs here
    bf16: bool | None = field(default=None, metadata={"help": "bfloat16 autocast; unset = where the GPU has it"})
    scale_rewards: str = field(default="none", metadata={"help": "divide advantages by a deviation: none|group|batch"})
    vllm_importance_sampling_correction: bool = field(default=False, metadata={"help": "refused: our losses do it"})
    loss_type: str = field(default="unused", metadata={"help": "refused: see --aggregation"})
    disable_dropout: bool = field(
        default=True,
        metadata={"help": "False lets dropout (LoRA's too) move each pass: ratios differ at equal weights"},
    )
    logging_steps: float = field(default=1, metadata={"help": "optimizer steps between two lines of metrics.jsonl"})
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "True would hide a NaN loss in the logs"})

    # data
    dataset: str = field(
        default="tiny", metadata={"help": "training rows: tiny, a hub id, or a .jsonl/.json/.parquet/.csv"}
    )
    dataset_limit: int | None = field(default=None, metadata={"help": "use at most this many rows"})
    prompt_style: str | None = field(
        default=None, metadata={"help": "boxed | answer_line | plain | keep; unset = by the dataset's schema"}
    )
    max_prompt_tokens: int | None = field(
        default=None, metadata={"help": "drop rows whose prompt is longer, in tokens"}
    )
    prompts_per_step: int | None = field(
        default=None, metadata={"help": "prompts of one optimizer step; sets gradient_accumulation_steps by itself"}
    )
    # rollouts
    engine: str = field(
        default="transformers",
        metadata={"help": "what samples: transformers (built in) | vllm (a server, see --vllm_server_base_url)"},
    )
    vllm_transfer: str = field(
        default="disk", metadata={"help": "how weights reach the server: disk (a folder both see) | nccl (GPUs)"}
    )
    vllm_concurrency: int = field(default=32, metadata={"help": "requests to the server under way at once"})
    vllm_timeout_s: float = field(default=600.0, metadata={"help": "of one request, its generation included"})
    vllm_restart_s: float = field(
        default=300.0, metadata={"help": "how long a server that died is waited for, seconds"}
    )
    rollout_dtype: str = field(
        default="float32",
        metadata={"help": "precision of the sampling copy: float32 | bfloat16 | fp8 | int8 | int4 (emulated)"},
    )
    rollout_batch_size: int | None = field(default=None, metadata={"help": "sequences sampled at once; unset = all"})
    num_minibatches: int | None = field(
        default=None, metadata={"help": "updates of equal size a sampling, N; sets steps_per_generation by itself"}
    )
    routing_replay: str = field(
        default="none",
        metadata={
            "help": "MoE: use recorded experts in training: none | r2 (training engine's) | r3 (rollout engine's)"
        },
    )
    keep_sampling_mask: bool = field(
        default=False,
        metadata={"help": "normalise training over the tokens that top-k, top-p, min-p left over in sampling"},
    )
    # loss
    aggregation: str = field(default="seq_mean_token_mean", metadata={"help": " | ".join(AGGREGATIONS)})
    # reward
    verifier_workers: int = field(default=2, metadata={"help": "math-verify worker processes of each rank"})
    verifier_timeout_s: float = field(default=3.0, metadata={"help": "wall clock of one verification, seconds"})
    verifier_memory_mb: int = field(default=1024, metadata={"help": "memory limit of one worker, MB"})
    exact_answers: bool = field(
        default=False, metadata={"help": "only a literal number counts, not an expression (generated arithmetic)"}
    )
    # evaluation
    eval_source: str | None = field(
        default=None, metadata={"help": "held-out rows, as --dataset; unset = no evaluation"}
    )
    eval_problems: int = field(default=200, metadata={"help": "held-out problems"})
    eval_samples: int = field(default=4, metadata={"help": "samples a problem (accuracy is avg@k)"})
    eval_every: int = field(default=0, metadata={"help": "steps between evaluations; 0 = only before and after"})
    # gradient spikes
    gradloc: str = field(
        default="off",
        metadata={"help": "explain gradient spikes, into output_dir/gradloc: off | directional | search"},
    )
    gradloc_trigger: str = field(default="adaptive", metadata={"help": "what a spike is: adaptive | paper"})
    gradloc_tau: float | None = field(
        default=None, metadata={"help": "tau_token of --gradloc_trigger paper. GradLoc script: 640"}
    )
    gradloc_factor: float = field(
        default=3.0,
        metadata={"help": "a spike is at least this multiple of the median norm of the last 64 steps (adaptive)"},
    )
    gradloc_every: int = field(default=0, metadata={"help": "also look at every n-th step; 0 = spikes only"})
    gradloc_cooldown: int = field(
        default=10, metadata={"help": "steps after a report in which spikes are only counted"}
    )
    layer_clip: bool = field(
        default=False, metadata={"help": "clip each layer's gradient by its own history, before the global clip"}
    )
    layer_clip_alpha: float = field(default=2.0, metadata={"help": "a layer may reach this multiple of its statistic"})
    layer_clip_beta: float = field(default=0.95, metadata={"help": "decay of the statistic, per step"})
    layer_clip_mode: str = field(default="layer", metadata={"help": "layer | tensor (every parameter by itself)"})
    # the guard
    guard: str = field(
        default="off",
        metadata={
            "help": "watch the run's metrics: off | warn | halt (on a critical alarm) | rollback (to the last good state)"
        },
    )
    guard_bounds: list[str] = field(
        default_factory=list,
        metadata={
            "help": "thresholds on top of stability.py's: metric>bound:level[:steps], e.g. grad_norm>20x:critical kl>0.5:warn"
        },
    )
    guard_k: int = field(default=5, metadata={"help": "a checkpoint is good after this many steps without an alarm"})
    guard_retries: int = field(default=3, metadata={"help": "rollbacks before the run is stopped"})
    guard_on_rollback: list[str] = field(
        default_factory=list, metadata={"help": "changes after a rollback: learning_rate_scale*0.5, beta=0.05, ..."}
    )
    guard_save_every: int | None = field(
        default=None, metadata={"help": "also save a checkpoint every so many steps; unset = --save_steps alone"}
    )
    guard_max_age_h: float | None = field(
        default=None, metadata={"help": "delete checkpoints older than this, hours; never the last good one"}
    )
    guard_disk_gb: float | None = field(
        default=None, metadata={"help": "disk budget for checkpoints, GB; checked at start"}
    )
    guard_hook: str | None = field(
        default=None,
        metadata={"help": "command (event as JSON on stdin) or http address that gets warnings and criticals"},
    )
    guard_stages: str | None = field(
        default=None,
        metadata={
            "help": "staged roll-out, e.g. small:20,medium:50,full; widens after so many steps without an alarm",
            "aliases": ["--stages"],
        },
    )
    # optimizer
    optim_method: str | None = field(
        default=None, metadata={"help": f"{' | '.join(OPTIMIZERS)}; unset = TRL's --optim, AdamW"}
    )
    rank_max: int | None = field(
        default=None,
        metadata={
            "help": "largest rank (ares), the rank (galore); unset = 64, or a quarter of the smallest side in a layer. paper: not stated"
        },
    )
    rank_min: int = field(default=1, metadata={"help": "ares: smallest rank"})
    rank_ema: float = field(default=0.9, metadata={"help": "ares: weight of the past in the rank; 0 = no smoothing"})
    power_iters: int = field(default=1, metadata={"help": "ares: power iterations a step"})
    ares_step: str = field(
        default="projected",
        metadata={"help": "ares: projected (learns at ten times the rate) | literal (the article's words)"},
    )
    rank_mode: str = field(default="dynamic", metadata={"help": "ares: dynamic | fixed (ablation: r = rank_max)"})
    no_low_rank: bool = field(default=False, metadata={"help": "ares, ablation: no truncation"})
    galore_gap: int = field(default=200, metadata={"help": "steps between two projections. GaLore: 200"})
    galore_scale: float = field(default=0.25, metadata={"help": "factor on the update. GaLore: 0.25"})
    momentum: float | None = field(
        default=None, metadata={"help": "muon (0.95), sgd (0.9), rmsprop (0); unset = that"}
    )
    # gradient spectra
    spectral_every: int = field(
        default=0,
        metadata={"help": "spectra of the gradient every n steps, into output_dir/spectral.jsonl and .png; 0 = off"},
    )
    spectral_top: int | None = field(
        default=None,
        metadata={
            "help": "directions of spectral/top_share; unset = 32, or a 32nd of the smallest side in a layer. The article: 32"
        },
    )
    # launch
    expect_processes: int | None = field(
        default=None, metadata={"help": "stop unless the run has this many processes"}
    )
    expect_distributed: str | None = field(
        default=None, metadata={"help": "stop unless distributed as: no | ddp | fsdp | fsdp2 | deepspeed"}
    )

    def __post_init__(self):
        check_ranges(self, RANGES)
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                words = ", ".join(x for x in known if x is not None)
                raise ValueError(f"--{name} {getattr(self, name)} is unknown: use one of {words}")
        if self.aggregation not in AGGREGATIONS:
            raise ValueError(f"--aggregation {self.aggregation} is unknown: use one of {', '.join(AGGREGATIONS)}")
        if self.scale_rewards not in (True, False, "none", "group", "batch"):
            raise ValueError(f"--scale_rewards {self.scale_rewards} is unknown: use none, group or batch")
        if self.engine not in ("transformers", "vllm"):
            raise ValueError(f"--engine {self.engine} is unknown: use transformers or vllm")
        if self.vllm_transfer not in ("disk", "nccl"):
            raise ValueError(f"--vllm_transfer {self.vllm_transfer} is unknown: use disk or nccl")
        if self.engine == "vllm" and self.use_vllm:
            raise ValueError("--engine vllm and --use_vllm are two ways to a vLLM server, ours and TRL's: give one")
        if self.engine == "vllm" and self.rollout_dtype != "float32":
            raise ValueError(
                f"--rollout_dtype {self.rollout_dtype} is the built-in engine's precision, a server has its own: with --engine vllm "
                "give --rollout_dtype float32 and start the server with the --dtype you want"
            )
        if self.rollout_dtype not in ROLLOUT_DTYPES:
            raise ValueError(
                f"--rollout_dtype {self.rollout_dtype} is unknown: use one of {', '.join(ROLLOUT_DTYPES)}"
            )
        if not 0 < self.temperature < math.inf:
            raise ValueError(
                f"--temperature {self.temperature}: training needs a finite value above 0, greedy samples are all equal"
            )
        if self.eval_samples < 1 or self.eval_problems < 1:
            raise ValueError(
                f"--eval_samples {self.eval_samples} --eval_problems {self.eval_problems}: give at least 1, or no --eval_source"
            )
        if self.gradloc not in ("off", "directional", "search"):
            raise ValueError(f"--gradloc {self.gradloc} is unknown: use off, directional or search")
        if self.gradloc_trigger not in ("adaptive", "paper"):
            raise ValueError(f"--gradloc_trigger {self.gradloc_trigger} is unknown: use adaptive or paper")
        if self.gradloc_trigger == "paper" and not (self.gradloc_tau or 0) > 0:
            raise ValueError(
                "--gradloc_trigger paper needs --gradloc_tau, the norm a typical token may reach (GradLoc script: 640)"
            )
        if not self.gradloc_factor > 1:
            raise ValueError(f"--gradloc_factor {self.gradloc_factor} must be above 1")
        if self.layer_clip_mode not in ("layer", "tensor"):
            raise ValueError(f"--layer_clip_mode {self.layer_clip_mode} is unknown: use layer or tensor")
        if self.guard not in stability.MODES:
            raise ValueError(f"--guard {self.guard} is unknown: use off, warn, halt or rollback")
        stability.make_rules(self.guard_bounds)
        for text in self.guard_on_rollback:
            stability.parse_change(text)
        if self.guard_stages is not None:
            stability.parse_stages(self.guard_stages)
        if self.guard_on_rollback and self.guard != "rollback":
            raise ValueError(
                f"--guard_on_rollback {self.guard_on_rollback}: --guard is {self.guard}, add --guard rollback"
            )
        if self.guard == "rollback" and self.save_only_model:
            raise ValueError(
                "--save_only_model leaves nothing to roll back to: remove it, or use --guard halt or --guard warn"
            )
        self._refuse_without("guard", self.guard == "off", "--guard warn")
        self._refuse_without("gradloc", self.gradloc == "off", "--gradloc directional")
        self._refuse_without("layer_clip", not self.layer_clip, "--layer_clip")
        if self.gradloc_tau is not None and self.gradloc_trigger != "paper":
            raise ValueError(
                f"--gradloc_tau {self.gradloc_tau} is read by --gradloc_trigger paper only: add it, or remove the flag"
            )
        if not self.layer_clip_alpha > 1:
            raise ValueError(f"--layer_clip_alpha {self.layer_clip_alpha} must be above 1")
        self._refuse_without("spectral", not self.spectral_every, "--spectral_every 10")
        if self.routing_replay not in ("none", "r2", "r3"):
            raise ValueError(f"--routing_replay {self.routing_replay} is unknown: use none, r2 or r3")
        if self.routing_replay == "r3" and self.use_vllm:
            raise ValueError("--routing_replay r3: rollouts through --use_vllm carry no routes; use r2 or none")
        if self.keep_sampling_mask and self.use_vllm:
            raise ValueError(
                "--keep_sampling_mask: rollouts through --use_vllm carry no sampling mask; drop one of the two"
            )
        if self.keep_sampling_mask and not truncates(self):
            raise ValueError(
                "--keep_sampling_mask: nothing is truncated, there is no mask to keep; set --top_p, --top_k or --min_p, or drop it"
            )
        if self.engine == "vllm" and self.keep_sampling_mask and not self.top_k > 0:
            raise ValueError(
                f"--keep_sampling_mask with --engine vllm and --top_k {self.top_k}: vLLM records sampling masks of requests with a "
                "bounded top_k only; add one, for example --top_k 100"
            )
        check_options(self)
        pick_device_and_precision(self)
        if self.disable_tqdm is None:  # a redirected log would hold a line for each frame of the bar
            self.disable_tqdm = not (sys.stderr and sys.stderr.isatty())
        derive_accumulation(self)
        check_batch(self)  # before TRL's own check, which names no valid value
        super().__post_init__()

    def _refuse_without(self, prefix, off, switch):
        """An option of a part that is off would silently do nothing."""
        for f in dataclasses.fields(RLVRConfig):
            default = f.default_factory() if f.default is dataclasses.MISSING else f.default
            if off and f.name.startswith(f"{prefix}_") and getattr(self, f.name) != default:
                raise ValueError(
                    f"--{f.name} {getattr(self, f.name)} is set, but {prefix} is off: add {switch}, or remove it"
                )


# --- the trainer base -------------------------------------------------------------------------------------------------


class EpochSampler(RepeatSampler):
    """TRL's RepeatSampler with an order that depends on (seed, epoch) alone: a resumed run sees the same order.

    RepeatSampler draws each epoch's permutation from one generator, so a run resumed in epoch 2 replays epoch 1.
    """

    epoch = 0

    def __iter__(self):
        if self.shuffle:  # the factor keeps (seed 0, epoch 1) apart from (seed 1, epoch 0)
            self.generator.manual_seed(self._epoch_seed(self.epoch))
        return super().__iter__()

    def _epoch_seed(self, epoch):
        return self.seed + 1_000_003 * epoch

    def prompts_of(self, sampling):
        """The dataset indices of the sampling-th generation batch of a run, over all processes: (P,) a list."""
        per_epoch = self.num_samples // self.batch_size
        epoch, place = divmod(sampling, per_epoch)
        order = torch.arange(self.num_samples)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self._epoch_seed(epoch))
            order = torch.randperm(self.num_samples, generator=generator)
        return order[place * self.batch_size : (place + 1) * self.batch_size].tolist()


@dataclass
class Scored:
    """One micro-batch as a loss sees it. (N, T) float32 except advantages (N, 1); zero outside the mask."""

    logps: torch.Tensor
    old_logps: torch.Tensor
    rollout_logps: torch.Tensor
    ref_logps: torch.Tensor | None
    entropies: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor


class RLVRTrainer(GRPOTrainer):
    """GRPOTrainer with our rollouts, exact advantages, a global normaliser, honest metrics and bit-exact resume.

    A recipe subclasses it and writes `_compute_loss`: score, pure functions, aggregate, track.
    """

    def __init__(self, model, args, reward_funcs, train_dataset, **kwargs):
        self._asked = settings_of(args)  # before anything changes them
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func is tested here against the pinned TRL
        super().__init__(
            model, reward_funcs, args, train_dataset, rollout_func=None if args.use_vllm else self._rollout, **kwargs
        )
        check_distributed(self.accelerator, args.expect_distributed)
        needed = args.generation_batch_size // args.num_generations
        if len(train_dataset) < needed:
            raise ValueError(
                f"--dataset {args.dataset} gives {len(train_dataset)} rows, but one sampling takes {needed} prompts: use more "
                f"rows, or lower {lowering(args)}"
            )
        self._ares = None
        if args.optim_method is not None:
            if args.optim_method == "ares" and self.is_deepspeed_enabled:
                raise ValueError(
                    "--optim_method ares needs whole gradients, which DeepSpeed flattens and splits: use DDP or FSDP2"
                )
            make_optimizer(self.model, args)  # wrong options stop here, before anything is sampled
        self.routing = self._check_routing()
        self._scoring_old, self._sampled_routes = False, None
        self._support = self._kept_mass = None  # sets that the coming forwards replay; the engine's mass on them
        self._policy_kept = None  # and the policy's, of the last forward
        self.engine = None if args.use_vllm else self._make_engine()
        if truncates(args) and self.engine is None:  # ours tell it where they sample, see _take_support
            warnings.warn(
                f"sampling is truncated (top_p {self.top_p}, top_k {self.top_k}, min_p {self.min_p or 0.0}) and training normalises over "
                "the whole vocabulary: mismatch and omega read the kept probability mass, below 1 at equal weights; sample the whole "
                "distribution, or with --engine vllm or the built-in engine, and --keep_sampling_mask",
                stacklevel=2,
            )
        self._sequences_sampled = 0  # over all processes: the index that seeds each sequence's own random stream
        self._window = defaultdict(list)  # metrics of the micro-batches of the current optimizer step
        self._shares = defaultdict(list)  # and those that are quotients of two counts
        self._broken = set()  # metrics that were NaN since the last log
        self._counts, self.step_inputs = {}, []  # of the current optimizer step; its micro-batches on this process
        self._sampled_with = self._sampled_version = None  # weights of the last sampling: fingerprint and version
        self.compared_versions = None  # of the two samplings that rollout/weights_changed compared last
        self._warned_of_truncation = False
        self._unchanged = 0  # samplings in a row with the same weights
        self._data_digest = None
        self._attachment = self._watch_gradients()
        self._lr_scale, self.changed = 1.0, set()  # controls that were changed in this run
        self.guard = None
        if args.guard != "off":
            self._make_guard()
        if args.spectral_every:  # after GradLoc and LayerClip: what is attached last sees the gradient first
            SpectralMonitor(self, args.spectral_every, args.spectral_top)
        self._routes = self._used_routes = None  # experts that the coming forward replays, that the last one used

    def _check_routing(self):
        """Layers, experts a token and experts of a MoE model; None for a dense one."""
        shape, mode = routing_shape(self.accelerator.unwrap_model(self.model)), self.args.routing_replay
        if mode != "none" and shape is None:
            raise ValueError(f"--routing_replay {mode}: the model is dense, it has no routing to replay; use none")
        if mode == "r2" and not self._old_pass():
            raise ValueError(
                "--routing_replay r2 with one update a sampling replays the routing that the model chooses anyway: use "
                "none, or more updates (--num_minibatches 2)"
            )
        return shape

    def _make_engine(self):
        """The rollout engine that the flags describe, filled with the initial weights."""
        if self.args.engine == "vllm":
            return self._make_vllm_engine("finish")
        return TransformersEngine(
            self.accelerator.unwrap_model(self.model),
            self.eos_token_ids,
            self._tokenizer.pad_token_id,
            rollout_dtype=self.args.rollout_dtype,
            seed=self.args.seed,
            device=self.accelerator.device,
            record_routes=self.routing is not None,
            record_support=truncates(self.args),
        )

    def _make_vllm_engine(self, on_push):
        args = self.args
        if self.is_deepspeed_enabled:
            raise ValueError("--engine vllm under DeepSpeed is not tested: use DDP or FSDP2")
        return VLLMEngine(
            self.model,
            args.vllm_server_base_url or f"http://127.0.0.1:{args.vllm_server_port}",
            self.eos_token_ids,
            Path(args.output_dir) / "pushed",
            transfer=args.vllm_transfer,
            seed=args.seed,
            concurrency=args.vllm_concurrency,
            needs_routes=args.routing_replay == "r3",
            needs_support=args.keep_sampling_mask,
            on_push=on_push,
            pushes=self.accelerator.is_main_process,
            timeout_s=args.vllm_timeout_s,
            restart_s=args.vllm_restart_s,
        )

    def close(self):
        """End what the rollout engine keeps running beside this process, if anything."""
        if self.engine is not None:
            self.engine.close()

    def _old_pass(self):
        """Does TRL compute old log-probs in a pass of their own? Not while each sampling feeds one update."""
        updates = self.args.steps_per_generation * self.num_iterations
        corrected = self.args.use_vllm and self.args.vllm_importance_sampling_correction  # TRL's own condition
        return self.args.gradient_accumulation_steps % updates != 0 or corrected

    def _watch_gradients(self):
        """GradLoc and LayerClip as the flags say, or None."""
        args = self.args
        gradloc = layer_clip = None
        if args.gradloc != "off":
            gradloc = GradLoc(
                Path(args.output_dir) / "gradloc",
                method=args.gradloc,
                tokenizer=self._tokenizer,
                aggregation=args.aggregation,
                trigger=args.gradloc_trigger,
                factor=args.gradloc_factor,
                ceiling=max(5.0, args.gradloc_factor),
                tau=args.gradloc_tau,
                cooldown=args.gradloc_cooldown,
                every_n_steps=args.gradloc_every,
                clips_in="" if "token_clip" in vars(args) else "grpo_tokenclip.py",
            )
        if args.layer_clip:
            layer_clip = {
                "alpha": args.layer_clip_alpha,
                "beta": args.layer_clip_beta,
                "mode": args.layer_clip_mode,
            }
        if gradloc is None and layer_clip is None:
            return None
        return Attachment(self, gradloc, layer_clip, routes=lambda: self._used_routes)

    # the guard, and what may change while a run runs --------------------------------------------------------------------

    def _make_guard(self):
        args = self.args
        stability.StabilityGuard(
            self, args.guard, args.guard_bounds, args.guard_k, args.guard_retries, args.guard_on_rollback,
            args.guard_save_every, args.guard_max_age_h, args.guard_hook, args.guard_disk_gb, args.guard_stages,
        )  # fmt: skip
        unit = math.lcm(self.num_generations, args.steps_per_generation)
        if args.guard_stages is not None and args.generation_batch_size // self.accelerator.num_processes % unit:
            raise ValueError(
                f"--guard_stages: each process needs whole groups of {self.num_generations} samples in each of "
                f"{args.steps_per_generation} parts of a sampling; raise --per_device_train_batch_size"
            )
        unknown = {name for name, _, _ in self.guard.changes} - set(self.controls())
        if unknown:
            raise ValueError(f"--guard_on_rollback: {sorted(unknown)} is none of {', '.join(sorted(self.controls()))}")
        for name, kind, value in self.guard.changes:
            try:
                self.controls()[name].check(value)
            except ValueError as error:
                raise ValueError(f"--guard_on_rollback {name}{kind}{value} {error}") from error

    def controls(self):
        """{name: Control}: what control.yaml and --guard_on_rollback may change. A recipe adds its own."""
        controls = {
            # above 0, which could not be undone
            "learning_rate_scale": Control(lambda: self._lr_scale, self._set_lr_scale, number(1e-6, 100)),
            "max_grad_norm": Control(
                lambda: self.args.max_grad_norm, lambda v: setattr(self.args, "max_grad_norm", v), number(0)
            ),
        }
        if self.beta:
            controls["beta"] = Control(lambda: self.beta, lambda v: setattr(self, "beta", v), number(0))
        return controls

    def settings(self):
        """What a recipe adds to the record of a run (alignment.json)."""
        return {}

    def _set_lr_scale(self, scale):
        factor, self._lr_scale = scale / self._lr_scale, scale
        schedule = self.lr_scheduler.scheduler if hasattr(self.lr_scheduler, "scheduler") else self.lr_scheduler
        schedule.base_lrs = [lr * factor for lr in schedule.base_lrs]
        for group in self.optimizer.param_groups:
            group["lr"], group["initial_lr"] = group["lr"] * factor, group["initial_lr"] * factor
        schedule._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def forget(self):
        """Before a rollback: whatever is half way through a step is dropped, and the engine's weights count as old."""
        self._window.clear()
        self._shares.clear()
        self._scoring_old, self._support, self._routes = False, None, None
        self.model.zero_grad(set_to_none=True)
        if self.engine is not None:
            self.engine.version = -1

    # rollouts ---------------------------------------------------------------------------------------------------------

    def sync_engine(self):
        """Copy the current weights into the engine (all processes call it); once per weight version."""
        if self.engine.version != self.state.global_step:
            self.engine.push_weights(self.model_wrapped, self.state.global_step)

    def _rollout(self, prompts, trainer):
        """TRL's rollout_func: sample with the engine. Sequence i of the global batch owns random stream i."""
        self.sync_engine()
        self._compare_weights(self.state.global_step, self.engine.fingerprint)
        prompt_ids, _, _ = self._tokenize_prompts(prompts)
        staged = self.guard is not None and self.guard.share < 1 and self.model.training
        # what a stage leaves out of a sampling keeps its numbers
        width = self.args.per_device_train_batch_size * self.args.steps_per_generation if staged else len(prompts)
        first = self._sequences_sampled + self.accelerator.process_index * width
        self._sequences_sampled += self.accelerator.num_processes * width
        rollout = self.engine.generate(
            prompt_ids,
            self._completion_limit(),
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p or 0.0,
            batch_size=self.args.rollout_batch_size,
            sequence_ids=range(first, first + len(prompts)),
        )
        return self._hand_over(rollout)

    def _hand_over(self, rollout):
        """What TRL's rollout_func returns of a rollout; what TRL does not carry (routes, sampling masks) is kept for the batch."""
        self._sampled_routes = rollout.routes
        self._take_support(rollout)
        return {
            "prompt_ids": rollout.prompt_ids,
            "completion_ids": rollout.completion_ids,
            "logprobs": rollout.rollout_logps,
        }

    def _compare_weights(self, version, fingerprint):
        """Do the weights of this sampling differ from those of the one before, if that had another version?"""
        before, self._sampled_version = self._sampled_version, version
        changed, self._sampled_with = fingerprint != self._sampled_with, fingerprint
        if before in (None, version):
            return
        self.compared_versions = before, version
        self._metrics["train"]["rollout/weights_changed"].append(float(changed))
        self._unchanged = 0 if changed else self._unchanged + 1
        if self._unchanged == 5:
            warnings.warn(
                f"the last 5 samplings up to step {self.state.global_step} used unchanged weights: the optimizer does "
                "not move them (learning rate 0, no gradient, or no advantage in any group)",
                stacklevel=2,
            )

    def _staged(self, rows):
        """The part of this process's sampling that the guard's stage uses: all of it without stages."""
        if self.guard is None or self.guard.share == 1:
            return rows
        return narrowed(rows, self.guard.share, math.lcm(self.num_generations, self.args.steps_per_generation))

    def _completion_limit(self):
        """Tokens of a completion at most, at the guard's stage."""
        share = 1.0 if self.guard is None else self.guard.share
        return math.ceil(share * self.max_completion_length)

    def _take_support(self, rollout):
        """Check and keep what the filters left over; say once what training without it costs."""
        mean = None
        if rollout.kept_mass is not None:
            kept = [mass for row in rollout.kept_mass for mass in row]
            total = self.accelerator.reduce(
                torch.tensor([math.fsum(kept), float(len(kept))], device=self.accelerator.device), "sum"
            )
            mean = (total[0] / total[1]).item()
            self._metrics["train"]["support/rollout_kept_mass"].append(mean)
        if self.args.keep_sampling_mask:
            if rollout.support is not None:
                check_support(rollout.support, rollout.completion_ids)
            self._support, self._kept_mass = rollout.support, rollout.kept_mass
        elif truncates(self.args) and not self._warned_of_truncation:
            self._warned_of_truncation = True
            keeps, cost = "drops part", "below 1, the mass that was kept, which the server does not tell"
            if mean is not None:
                length = total[1].item() / (len(rollout) * self.accelerator.num_processes)
                keeps, cost = f"keeps {mean:.3f}", f"of {mean:.3f} instead of 1 at every token"
                cost += f", {mean**length:.2g} over a completion of {length:.0f} tokens"
            warnings.warn(
                f"sampling {keeps} of the probability mass on average (top_p {self.top_p}, top_k {self.top_k}, min_p "
                f"{self.min_p or 0.0}) and training normalises over the whole vocabulary: expect a mismatch pi_old/mu {cost}, from "
                "equal weights; add --keep_sampling_mask",
                stacklevel=2,
            )

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        # (N, functions), of all ranks
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        total = (rewards * self.reward_weights.to(rewards.device)).nansum(1)
        self._rewards = total.masked_fill(rewards.isnan().all(1), math.nan)
        return rewards

    def _generate_and_score_completions(self, inputs):
        self._scoring_old = self.model.training and self._old_pass()
        self._old_routes = self._sampled_routes = self._support = self._kept_mass = None
        output = super()._generate_and_score_completions(inputs)
        if self._support is not None:
            self._carry_support(output)
        if self.routing is not None and (self._sampled_routes is not None or self.args.routing_replay == "r3"):
            tokens = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
            output["rollout_routes"] = self._place_sampled_routes(tokens)
        if self._old_routes is not None:
            output["old_routes"] = self._old_routes
        generations = self.num_generations if self.model.training else self.num_generations_eval
        advantages = self.advantages(self._rewards, generations)
        n, rank = len(inputs), self.accelerator.process_index
        output["advantages"] = advantages[rank * n : (rank + 1) * n]
        output["rewards"] = self._rewards[rank * n : (rank + 1) * n]
        output["version"] = torch.full((n,), self.state.global_step, device=advantages.device)
        for _ in advantages:  # the completions table shows the advantages that train
            self._logs["advantages"].pop()
        self._logs["advantages"].extend(advantages.tolist())
        equal = equal_rewards(self._rewards.view(-1, generations))  # TRL tests std == 0, which rounding misses
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["frac_reward_zero_std"][-1] = equal.float().mean().item()
        return output

    def _carry_support(self, output):
        """Lay the sampling's sets beside its sequences: lists ride through TRL's shuffle and split as tensors do."""
        support, mask = self._support, output["completion_mask"]
        if "tool_mask" in output:  # nobody sampled those tokens
            support = [drop_rows(entry, row) for entry, row in zip(support, output["tool_mask"], strict=True)]
        output["support"] = support
        if self._kept_mass is not None:
            mass = torch.zeros(mask.shape, device=mask.device)
            for row, kept in zip(mass, self._kept_mass, strict=True):
                row[: len(kept)] = torch.tensor(kept, device=mask.device)
            output["kept_mass"] = mass
        self._support = self._kept_mass = None

    def advantages(self, rewards, num_generations):
        """Advantages of all ranks' samples from their rewards, (N,) -> (N,). A recipe with another estimator overrides it."""
        return group_advantages(rewards, num_generations, self.args.scale_rewards)

    def _place_sampled_routes(self, tokens):
        """The engine's routes of this sampling under its padded batch. tokens (N, S), 1 at tokens -> (N, S, L, K)."""
        routes = self._sampled_routes
        if routes is None:
            raise RuntimeError(
                "--routing_replay r3 is on but the sampling brought no routes: whatever replaces _rollout must end with "
                "_hand_over"
            )
        if self.mask_truncated_completions:  # TRL hides such a completion even from attention: its prompt's rows stay
            routes = [rows[:count] for rows, count in zip(routes, tokens.sum(1).tolist(), strict=True)]
        return place_routes(routes, tokens)

    # loss plumbing ----------------------------------------------------------------------------------------------------

    @staticmethod
    def _loss_mask(inputs):
        mask = inputs["completion_mask"]
        return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask

    def _prepare_inputs(self, generation_batch):
        if self.model.training:
            generation_batch = self._staged(generation_batch)
        inputs = super()._prepare_inputs(generation_batch)
        accumulation = self.args.gradient_accumulation_steps
        window = None
        if not self.model.training:
            window = [inputs]
        elif self._step % accumulation == 0:
            start = self._step % self.args.steps_per_generation
            window = self._buffered_inputs[start : start + accumulation]
        if window is not None:  # fixed before any clip or rejection, over all micro-batches and ranks
            self.step_inputs = window
            tokens = sum(self._loss_mask(x).sum() for x in window)
            sequences = sum(len(x["advantages"]) for x in window)
            counts = torch.stack([tokens.float(), torch.full_like(tokens, sequences, dtype=torch.float)])
            tokens, sequences = self.accelerator.reduce(counts, "sum").tolist()
            self._counts = {"token_mean": tokens, "seq_mean_token_mean": sequences, "seq_sum": sequences}
        return inputs

    def normalizer(self, how):
        """Denominator of `aggregate` on this rank: the global count over world size, as ranks' gradients are averaged."""
        return self._counts[how] / self.accelerator.num_processes

    def score(self, model, inputs):
        """Run the training engine over one micro-batch -> Scored. Temperature is that of the rollout (TRL's head)."""
        mask = self._loss_mask(inputs)
        completion = inputs["completion_ids"]
        replay = {"none": None, "r2": "old_routes", "r3": "rollout_routes"}[self.args.routing_replay]
        if replay is not None and replay not in inputs and self.model.training:
            raise RuntimeError(
                f"--routing_replay {self.args.routing_replay} is on but the batch carries no {replay}: this version of TRL runs no "
                "pass for old log-probs where the pinned one does"
            )
        self._routes, self._support = inputs.get(replay), inputs.get("support")
        if self.args.keep_sampling_mask and self._support is None:
            raise RuntimeError(
                "--keep_sampling_mask is on but the batch carries no support: whatever replaces _rollout must end with _hand_over"
            )
        logps, entropies, _ = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], completion], 1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
            completion.size(1),
            compute_entropy=True,
        )
        self._routes, support = None, self._support
        self._support = None
        if support is not None and torch.is_grad_enabled():
            self._track_support(inputs, mask)
        if self.routing is not None and torch.is_grad_enabled():  # an evaluation routes natively, unrecorded
            self._track_routing(inputs)

        def clean(x):  # padding may hold anything; cut it here so that neither value nor gradient can leak
            return torch.where(mask.bool(), _float(x), 0.0)

        logps = clean(logps)
        # absent when generation and update are aligned: then pi_old is pi_theta, and r = 1 with a live gradient
        old = clean(inputs["old_per_token_logps"]) if "old_per_token_logps" in inputs else logps.detach()
        ref = clean(inputs["ref_per_token_logps"]) if "ref_per_token_logps" in inputs else None
        rollout_logps = clean(inputs["sampling_per_token_logps"])
        return Scored(logps, old, rollout_logps, ref, clean(entropies), mask, inputs["advantages"].unsqueeze(1))

    def step_divergences(self, model, batch):
        """Divergence, advantage and "has tokens" of every sequence of this optimizer step under the current weights.

        batch: the first micro-batch as scored for its loss -> (M, N, 3) float32, M = micro-batches x processes, the row
        `process_index * micro-batches + i` for this process's micro-batch i. All processes call it, before the first backward of
        the step. With several micro-batches it costs one forward pass over each without a gradient (15 % of a step of the tiny MoE,
        sampling included); with one, nothing but the gather.
        """
        scored = [batch]
        if len(self.step_inputs) > 1:
            used = self._used_routes
            with torch.no_grad(), replayed_rng(rng_state()):
                scored = [self.score(model, inputs) for inputs in self.step_inputs]
            self._used_routes = used  # GradLoc replays those of the pass that has a gradient
        rows = []
        for b in scored:
            divergence = sequence_divergence(b.logps, b.rollout_logps, b.mask)
            rows.append(torch.cat([divergence, b.advantages, b.mask.any(1, keepdim=True)], 1))
        return self.accelerator.gather(torch.stack(rows).float())

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **kwargs
    ):
        """TRL's, on a MoE policy under replay, with what the router itself would choose recorded on the side.

        The pass for old log-probs is the first one after a sampling: R2 takes its routes from there, R3 replays the engine's
        in it. paper: which routing a reference policy (--beta) runs with is not stated; we: its own, as it defines the
        policy to stay close to.
        """
        run = self._logps_over_support
        old_pass, self._scoring_old = self._scoring_old and not torch.is_grad_enabled(), False
        measured = self._routes is not None and self.model.training  # `step_divergences`: as the loss will see it
        if self.routing is None or not (old_pass or measured or torch.is_grad_enabled()):
            return run(model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs)
        support, self._support = self._support, None
        routes = self._routes
        if old_pass and self.args.routing_replay == "r3":
            routes = self._place_sampled_routes(attention_mask)
        outputs, native = [], []
        n, size = len(input_ids), batch_size or len(input_ids)
        for start in range(0, n, size):
            part = slice(start, start + size)
            replay = nullcontext() if routes is None else replay_routing(model, routes[part])
            self._support = None if support is None else support[part]
            with replay, record_routing(model, native=True) as recorder:
                outputs.append(run(model, input_ids[part], attention_mask[part], logits_to_keep, None, **kwargs))
            native.append(recorder.routes)
            if routes is not None and torch.is_grad_enabled():
                self.track("routing/replayed_rows", torch.tensor([float(replay.replayed)]))
        self._support = support
        self._native_routes = self._used_routes = torch.cat(native)
        if routes is not None:
            recorded = recorded_rows(routes).unsqueeze(-1).to(input_ids.device)
            self._used_routes = torch.where(recorded, routes.to(input_ids.device), self._native_routes)
        if old_pass:
            self._old_routes = self._native_routes
        return _joined(outputs)

    def _logps_over_support(self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **kwargs):
        """TRL's, over the recorded sets where a sampling mask is kept: for the policy, for old and for reference log-probs."""
        run, support = super()._get_per_token_logps_and_entropies, self._support
        if support is None:
            return run(model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs)
        outputs, kept = [], []
        n, size, first = len(input_ids), batch_size or len(input_ids), input_ids.shape[1] - 1 - logits_to_keep
        for start in range(0, n, size):
            part = slice(start, start + size)
            mask = attention_mask[part, 1:].bool()
            mask[:, :first] = False
            with replay_support(support[part], mask, first) as replay:
                outputs.append(run(model, input_ids[part], attention_mask[part], logits_to_keep, None, **kwargs))
            kept.append(replay.kept[:, first:])
        self._policy_kept = torch.cat(kept)
        return _joined(outputs)

    def _track_support(self, inputs, mask):
        """Does the policy still put its mass where the engine's filters did? And what carrying the sets costs."""
        support, mine = inputs["support"], self._policy_kept.exp()
        sampled = torch.zeros_like(mask, dtype=torch.bool)
        for row, (_, offsets) in zip(sampled, support, strict=True):
            filled = offsets.diff()[: len(row)] > 0
            row[: len(filled)] = filled.to(row.device)
        sampled &= mask.bool()
        if "kept_mass" in inputs:
            low, high = torch.minimum(mine, inputs["kept_mass"]), torch.maximum(mine, inputs["kept_mass"])
            self.track("support/agreement", low / high.clamp(min=1e-30), sampled)
        self.track("support/kept_mass", mine, sampled)
        tokens = sum(offsets.numel() - 1 for _, offsets in support)
        size = float(sum(ids.numel() for ids, _ in support))
        count = torch.tensor(float(tokens), device=mask.device)
        self.track_share("support/size", count.new_tensor(size), count)
        self.track_share("support/bytes_per_token", count * support_bytes_per_token(support), count)
        self.track_share("support/replayed_frac", sampled.sum(), mask.sum())

    def _track_routing(self, inputs):
        """Share of (token, layer) in which what the router now chooses is what was chosen before: by the engine, by pi_old."""
        tokens = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        for name, key in (("rollout", "rollout_routes"), ("old", "old_routes")):
            if key in inputs:
                equal, counted = agreeing_rows(self._native_routes, inputs[key], tokens)  # (L,) twice
                self.track_share(f"routing/{name}_agreement", equal.sum(), counted.sum())
                for layer in range(len(equal)):
                    self.track_share(f"routing/{name}_agreement/layer_{layer}", equal[layer], counted[layer])
        if "rollout_routes" in inputs:
            self.track(
                "routing/bytes_per_token", torch.tensor([float(route_bytes_per_token(inputs["rollout_routes"]))])
            )

    # metrics ----------------------------------------------------------------------------------------------------------

    def track(self, name, values, mask=None, quantiles=False):
        """Collect a metric of this micro-batch; reduced once per optimizer step over micro-batches and ranks.

        Mean over `values` where mask is 1. With quantiles: name/p01, p50, p99, min, max instead of the mean.
        """
        values = values.detach().float()
        values = values[mask.bool()] if mask is not None else values.reshape(-1)
        self._window[(name, quantiles)].append(values)

    def track_share(self, name, hits, count):
        """hits / count over the optimizer step, where keeping every value as `track` does would cost too much memory."""
        self._shares[name].append(torch.stack([hits, count]).float())

    def track_policy(self, batch):
        """The metrics every recipe shares: entropy, staleness, training-inference mismatch, raw weights. See README's glossary."""
        mask = batch.mask
        ratio, omega = _ratio(batch.logps, batch.old_logps), _ratio(batch.logps, batch.rollout_logps)
        log_mismatch = batch.old_logps - batch.rollout_logps
        mismatch = _ratio(batch.old_logps, batch.rollout_logps)
        self.track("entropy", batch.entropies, mask)
        self.track("mismatch/mean", mismatch, mask)
        self.track("mismatch/k1", -log_mismatch, mask)  # E_mu[log mu - log pi_old]
        self.track("mismatch/k3", k3(log_mismatch), mask)
        extreme = (torch.maximum(mismatch, 1 / mismatch) > 2).float()  # F(2)
        self.track("mismatch/extreme_frac", torch.where(mismatch.isnan(), mismatch, extreme), mask)
        self.track("ratio", ratio, mask, quantiles=True)
        self.track("omega", omega, mask, quantiles=True)
        self.track(
            "rho", sequence_weight(batch.logps, batch.rollout_logps, mask), mask.any(1, keepdim=True), quantiles=True
        )

    def flush(self):
        """Reduce the window into TRL's metric store when the optimizer step (or an evaluation batch) is complete."""
        mode = "train" if self.model.training else "eval"
        if mode == "train" and not self.accelerator.sync_gradients:
            return
        window = {k: torch.cat(v) for k, v in sorted(self._window.items())}
        means = [(name, v) for (name, quantiles), v in window.items() if not quantiles]
        shares = sorted(self._shares)
        sums = [torch.stack([v.sum(), v.new_tensor(float(v.numel()))]) for _, v in means]
        sums = torch.stack(sums + [torch.stack(self._shares[name]).sum(0) for name in shares])
        names = [name for name, _ in means] + shares
        for name, (total, count) in zip(names, self.accelerator.reduce(sums, "sum").tolist(), strict=True):
            self._record(name, total / count if count else None)
        for (name, quantiles), values in window.items():
            if quantiles:
                counts = self.accelerator.gather(torch.tensor([len(values)], device=values.device)).tolist()
                padded = self.accelerator.gather(self.accelerator.pad_across_processes(values))
                ranks = padded.view(len(counts), max(counts))
                values = torch.cat([row[:count] for row, count in zip(ranks, counts, strict=True)]).sort().values
                if values.isnan().any():  # sorted last: a broken log-prob must not hide behind finite quantiles
                    values = values[-1:]
                for label, q in (("min", 0.0), ("p01", 0.01), ("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
                    self._record(
                        f"{name}/{label}", values[round(q * (len(values) - 1))].item() if len(values) else None
                    )
        self._window.clear()
        self._shares.clear()

    def _record(self, name, value):
        """None: nothing was counted. NaN: a value was broken, which `log` must not lose."""
        self._metrics["train" if self.model.training else "eval"][name].append(math.nan if value is None else value)
        if value is not None and math.isnan(value):
            self._broken.add(name)

    def create_optimizer(self, model=None):
        """The one of --optim_method, or the Trainer's own."""
        if self.args.optim_method is None:
            return super().create_optimizer(model)
        if self.optimizer is None:
            self.optimizer = make_optimizer(self.model if model is None else model, self.args)
            self._ares = self.optimizer if isinstance(self.optimizer, Ares) else None
        return self.optimizer

    def log(self, logs, start_time=None):
        """TRL leaves NaN out of a window's mean; one broken log-prob must show."""
        for name in sorted(self._broken):
            self._metrics["train"].pop(name, None)
            logs[name] = math.nan
        self._broken.clear()
        if self._ares is not None and "loss" in logs:
            logs |= self._ares.metrics()
        if self.model.training and not torch.isfinite(self._tr_loss).all():
            self._tr_loss.zero_()  # the Trainer subtracts what it logged, and NaN - NaN would stay for ever
        super().log(logs, start_time)

    # data order and resume --------------------------------------------------------------------------------------------

    def _get_train_sampler(self, dataset=None):
        dataset = self.train_dataset if dataset is None else dataset
        self._sampler = EpochSampler(
            dataset,
            self.num_generations,
            self.args.generation_batch_size // self.num_generations,
            self.num_iterations * self.args.steps_per_generation,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
        )
        return self._sampler

    def _run_epoch(self, *args, epoch, **kwargs):
        self._sampler.epoch = epoch
        return super()._run_epoch(*args, epoch=epoch, **kwargs)

    def data_digest(self):
        """sha256 over the training rows: a checkpoint only resumes on the rows it was made with."""
        if self._data_digest is None:
            digest = hashlib.sha256()
            for row in self.train_dataset:
                digest.update(json.dumps(row, sort_keys=True, default=str).encode())
            self._data_digest = digest.hexdigest()
        return self._data_digest

    def create_model_card(self, *args, **kwargs):
        """None: TRL's draft would name neither the base model nor the method; metrics.jsonl says what was run."""

    def _rollout_state_path(self, checkpoint):
        return Path(checkpoint) / f"rollout_state_{self.accelerator.process_index}.pt"

    def _save_checkpoint(self, model, trial):
        self.settle()
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        failure = None
        try:
            super()._save_checkpoint(model, trial)  # deletes no older one before this one is complete
            if not self.args.save_only_model:
                self._save_rollout_state(trial)
        except (OSError, RuntimeError, SafetensorError) as error:
            if not stability.save_failed(self.guard, error):
                raise
            failure = error
        finally:
            self.args.save_total_limit = limit
        if self.guard is not None:
            self.guard.could_not_save(failure)
        self.accelerator.wait_for_everyone()  # every rank's part is written
        self._complete(trial)
        if self.args.should_save:
            stability.rotate(self, self._get_output_dir(trial=trial), limit)

    def _save_rollout_state(self, trial):
        checkpoint = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        checkpoint.mkdir(parents=True, exist_ok=True)
        state = {
            "micro_step": self._step,
            "buffered_inputs": self._buffered_inputs,
            "sequences_sampled": self._sequences_sampled,
            "sampled_with": self._sampled_with,
            "sampled_version": self._sampled_version,
            "recipe": type(self).__name__,
            "metrics": dict(self._metrics["train"]),
            "broken": sorted(self._broken),
            "num_processes": self.accelerator.num_processes,
            "data_digest": self.data_digest(),
            "guard": None if self.guard is None else self.guard.state_dict(),
            "controls": {name: self.controls()[name].get() for name in sorted(self.changed)},
            "gradients": None if self._attachment is None else self._attachment.state_dict(),
            "own": self.recipe_state(),
        }
        if self.accelerator.is_main_process:
            write_settings(checkpoint, self._asked, state["controls"])
        path = self._rollout_state_path(checkpoint)
        torch.save(state, path.with_suffix(".tmp"))
        if not self.accelerator.is_main_process:  # whose part makes the whole one complete
            os.replace(path.with_suffix(".tmp"), path)

    def _complete(self, trial):
        """The main process's part gets its name last: a checkpoint that has it is one that `last` may take, killed whenever."""
        checkpoint = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        path = self._rollout_state_path(checkpoint)
        if self.accelerator.is_main_process and path.with_suffix(".tmp").exists():
            os.replace(path.with_suffix(".tmp"), path)

    def _refuse_another_model(self, checkpoint):
        """Raise ValueError where the checkpoint's config describes a network of another shape: weights would load in part."""
        path = Path(checkpoint) / "config.json"
        if not path.exists():  # adapters only
            return
        saved, config = json.loads(path.read_text()), self.accelerator.unwrap_model(self.model).config.to_dict()
        for name in ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                     "num_key_value_heads", "head_dim", "num_experts", "moe_intermediate_size"):  # fmt: skip
            if saved.get(name) != config.get(name):
                raise ValueError(
                    f"{checkpoint} holds a model of {name} {saved.get(name)} and this run trains one of {config.get(name)}: resume "
                    "with the model it was made with"
                )

    def settle(self):
        """Before a checkpoint: wait for what runs beside the training and belongs into it."""

    def recipe_state(self):
        """What a recipe must keep in a checkpoint beside what every recipe keeps: plain numbers and tensors."""
        return {}

    def load_recipe_state(self, state):
        """The counterpart, before training goes on."""

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        """Also loads what is written under other names than it trains under: the experts of a MoE, which are saved one by one
        and trained as a stack. The Trainer's own loading leaves those at their initial values, with a warning.
        """
        self._refuse_another_model(resume_from_checkpoint)
        if self.routing is None or self.is_fsdp_enabled or isinstance(self.model, PeftModel):
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        saved, found = type(self.model).from_pretrained(
            resume_from_checkpoint, dtype=self.model.dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
        lacking = sorted({*found["missing_keys"], *(name for name, _, _ in found["mismatched_keys"])})
        if lacking:
            raise ValueError(
                f"{resume_from_checkpoint} does not hold {lacking} as this model needs it: resume from a complete checkpoint of the "
                "same model"
            )
        self.model.load_state_dict(saved.state_dict())

    def _init_training_state(self, max_steps, *args):
        places = super()._init_training_state(max_steps, *args)
        self.state.compute_steps(self.args, max_steps)  # not the checkpoint's --save_steps and --logging_steps
        return places

    def check_checkpoint(self, checkpoint):
        """Raise one sentence where `checkpoint` lacks a piece or was made by another run. -> this rank's rollout state."""
        self._refuse_another_model(checkpoint)
        path, rank = self._rollout_state_path(checkpoint), self.accelerator.process_index
        needed = [path.name, "rng_state.pth" if self.accelerator.num_processes == 1 else f"rng_state_{rank}.pth"]
        if not self.is_deepspeed_enabled:  # DeepSpeed keeps optimizer and scheduler in its own files and checks them
            needed += ["scheduler.pt"] + ([] if self.is_fsdp_enabled else ["optimizer.pt"])
        for name in needed:
            if not (Path(checkpoint) / name).exists():
                raise FileNotFoundError(
                    f"{checkpoint} holds no {name}: resuming would silently restart that state; "
                    "resume from a complete checkpoint (saved without --save_only_model, by as many processes)"
                )
        device = self.accelerator.device  # "cpu:0" under gloo, a name that torch.load does not know
        try:
            state = torch.load(path, map_location="cpu" if device.type == "cpu" else device, weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"{path} cannot be read ({error}): resume from another checkpoint") from error
        if state["recipe"] != type(self).__name__:
            raise ValueError(
                f"{checkpoint} was made by {state['recipe']} and this is {type(self).__name__}: name the run to continue "
                "with --output_dir, or the checkpoint itself"
            )
        if state["num_processes"] != self.accelerator.num_processes:
            raise ValueError(
                f"{checkpoint} was saved by {state['num_processes']} processes and this run has "
                f"{self.accelerator.num_processes}: launch as many"
            )
        if state["data_digest"] != self.data_digest():
            raise ValueError(
                f"{checkpoint} was made with other training rows than --dataset {self.args.dataset} gives now: resume "
                "with the same rows, limit, prompt style and seed"
            )
        return state

    def _load_optimizer_and_scheduler(self, checkpoint):
        if checkpoint is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        if self.state.global_step >= self.state.max_steps:
            raise ValueError(nothing_left(checkpoint, self.state.global_step, self.state.max_steps))
        state = self.check_checkpoint(checkpoint)
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.state.global_step == 0 and self.is_fsdp_enabled:  # a guard's start: see StabilityGuard._start
            self.optimizer.state.clear()
        self._step = state["micro_step"]
        self._buffered_inputs = state["buffered_inputs"]
        self._sequences_sampled = state["sequences_sampled"]
        self._sampled_with, self._sampled_version = state["sampled_with"], state["sampled_version"]
        self._metrics["train"] = defaultdict(list, state["metrics"])
        self._broken = set(state["broken"])
        changed = dict(state["controls"])  # else what the command line says
        self._lr_scale, self.changed = changed.pop("learning_rate_scale", 1.0), set(state["controls"])  # saved scaled
        for name, value in changed.items():
            self.controls()[name].set(value)
        if self.guard is not None and state["guard"] is not None:
            self.guard.load_state_dict(state["guard"])
        self.load_recipe_state(state["own"])
        if self._attachment is not None and state["gradients"] is not None:
            self._attachment.load_state_dict(state["gradients"])

    def closing_rows(self):
        """What a trainer adds to the closing table of a run: (left, right) texts."""
        return []

    # held-out accuracy ------------------------------------------------------------------------------------------------

    def held_out_accuracy(self, rows, samples):
        """avg@samples of the current weights on `rows`, sampled as in training. -> {"accuracy", "stderr", "problems"}.

        Problems are split over the processes. Each sample has its own fixed random stream, so two weights are
        compared under the same noise. An unscorable gold is left out.
        """
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        mine = range(rank, len(rows), world)
        prompts = [rows[i]["prompt"] for i in mine for _ in range(samples)]
        prompt_ids = self._tokenize_prompts(prompts)[0] if prompts else []
        if self.engine is not None:
            self.sync_engine()  # a collective where weights are sharded: also without problems of one's own
        if not prompts:
            ids = []
        elif self.engine is None:
            ids, _ = self._generate_single_turn(prompt_ids, None, {}, samples)
        else:
            streams = [EVAL_STREAM + i * samples + k for i in mine for k in range(samples)]
            ids = self.engine.generate(
                prompt_ids,
                self.max_completion_length,
                temperature=self.temperature,
                # a server that records sampling masks refuses requests without a bound
                top_k=self.top_k if self.args.engine == "vllm" and self.args.keep_sampling_mask else 0,
                batch_size=self.args.rollout_batch_size,
                sequence_ids=streams,
            ).completion_ids
        texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
        golds = [rows[i]["solution"] for i in mine for _ in range(samples)]
        rewards = self.reward_funcs[0](completions=texts, solution=golds) if texts else []
        means = [_mean(rewards[i : i + samples]) for i in range(0, len(rewards), samples)]
        means = [m for m in means if m is not None]
        sums = torch.tensor([sum(means), sum(m * m for m in means), len(means)], dtype=torch.float64)
        total, squares, count = self.accelerator.reduce(sums.to(self.accelerator.device), "sum").tolist()
        accuracy = total / max(count, 1)
        variance = max(squares / max(count, 1) - accuracy**2, 0.0)
        return {"accuracy": accuracy, "stderr": math.sqrt(variance / max(count, 1)), "problems": int(count)}


def _joined(outputs):
    """The parts of a pass, (log-probs, entropies, auxiliary loss) each, as one."""
    return tuple(
        None if x[0] is None else (torch.cat(x) if x[0].dim() else torch.stack(x).mean())
        for x in zip(*outputs, strict=True)
    )


EVAL_STREAM = 2**40  # random streams of evaluation samples start here; training counts up from 0


def _mean(rewards):
    scored = [r for r in rewards if r is not None]
    return sum(scored) / len(scored) if scored else None


class HeldOut(TrainerCallback):
    """Held-out accuracy every `--eval_every` steps, into the same metrics.jsonl line."""

    def __init__(self, trainer, rows):
        self.trainer, self.rows = trainer, rows

    def on_step_end(self, args, state, control, **kwargs):
        """Evaluates when a step of --eval_every is over, the last one excepted: `run` evaluates after it."""
        if args.eval_every and state.global_step % args.eval_every == 0 and state.global_step < state.max_steps:
            result = self.trainer.held_out_accuracy(self.rows, args.eval_samples)
            for name in ("accuracy", "stderr"):
                self.trainer._metrics["train"][f"eval/{name}"].append(result[name])


# --- the frame of a run -----------------------------------------------------------------------------------------------


def make_verifier(args):
    """The reward function that the flags describe."""
    return MathVerifier(
        workers=args.verifier_workers,
        timeout_s=args.verifier_timeout_s,
        memory_mb=args.verifier_memory_mb,
        exact=args.exact_answers,
    )


def load_rows(args, tokenizer):
    """Training rows of --dataset and held-out rows of --eval_source (None without one), over-long prompts dropped."""
    train = _rows("--dataset", args.dataset, args.dataset_limit, args)
    say(f"train: {load_math_rows_report(train)}")
    if args.max_prompt_tokens is not None:
        kept = train.filter(
            lambda row: (
                len(tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False))
                <= args.max_prompt_tokens
            )
        )
        say(
            f"train: {len(train) - len(kept)} of {len(train)} prompts longer than {args.max_prompt_tokens} tokens dropped"
        )
        train = kept
    if not len(train):
        raise ValueError(f"--dataset {args.dataset}: no row is left; raise --max_prompt_tokens")
    if args.eval_source is None:
        return train, None
    held_out = _rows("--eval_source", args.eval_source, args.eval_problems, args)
    say(f"held-out: {load_math_rows_report(held_out)}")
    return train, held_out


def _rows(flag, source, limit, args):
    """load_math_rows, with the flag in what it refuses."""
    try:
        return load_math_rows(source, limit=limit, seed=args.seed, prompt_style=args.prompt_style)
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"{flag} {source}: {error}") from error


def run(trainer, held_out=None):
    """Evaluate, train (or resume), evaluate, save, and say where everything is. All processes call it.

    A signal ends it with one line, the curve so far and the exit status 130 or 143.
    """
    report = RunReport(trainer.args.output_dir, bar=not trainer.args.disable_tqdm)
    try:
        with stoppable(), closing(trainer):
            _run(trainer, held_out, report)
    except Stopped as stop:
        if trainer.accelerator.is_main_process:
            _stopped(trainer, report)
        leave(stop.code)
    finally:
        let_go()


def _stopped(trainer, report):
    args, state = trainer.args, trainer.state
    report.stop()
    complete = complete_checkpoints(Path(args.output_dir))
    say(stop_line(state.global_step, state.max_steps, complete[-1] if complete else None, args.save_steps))


def _run(trainer, held_out, report):
    args = trainer.args
    if args.resume_from_checkpoint is not None:
        with one_sentence():  # not after an evaluation of minutes
            stability.refuse_damaged(args.resume_from_checkpoint)
            trainer.check_checkpoint(args.resume_from_checkpoint)
    say(batch_line(args))
    if trainer._attachment is not None and trainer._attachment.gradloc is not None:
        say(f"gradloc: {args.gradloc}, reports of gradient spikes go to {trainer._attachment.gradloc.folder}")
    report.replace_defaults(trainer)
    before = after = None
    if held_out is not None:
        trainer.add_callback(HeldOut(trainer, held_out))
        before = _evaluate("before", trainer, held_out, args.resume_from_checkpoint is not None)
        if trainer.accelerator.is_main_process and args.resume_from_checkpoint is None:
            report.write({"step": 0, "eval/accuracy": before["accuracy"], "eval/stderr": before["stderr"]})
    try:
        stability.train_from_whole(trainer, args.resume_from_checkpoint)
    except stability.GuardHalt as halt:
        if trainer.accelerator.is_main_process:
            report.draw()
            say(stability.write_acceptance(args.output_dir))
        sys.exit(f"error: {halt}")
    if held_out is not None:
        after = _evaluate("after", trainer, held_out)
    final = Path(args.output_dir) / "final"
    trainer.save_model(str(final))
    if trainer.accelerator.is_main_process:
        _close(report, trainer, before, after, final)
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()  # trackers, process group


def _close(report, trainer, before, after, final):
    """Last metrics line, last curve and the closing table."""
    if after is not None:
        last = {"eval/accuracy": after["accuracy"], "eval/stderr": after["stderr"]}
        report.write({"step": trainer.state.global_step, **last})
    report.draw()
    rows = []
    if after is not None:
        points = 100 * (after["accuracy"] - before["accuracy"])
        rows = [
            ("held-out accuracy before", _percent(before)),
            ("held-out accuracy after", f"{_percent(after)}   {points:+.1f} points"),
        ]
    gradloc = trainer._attachment.gradloc if trainer._attachment is not None else None
    if gradloc is not None:
        index = gradloc.folder / "index.html"
        rows.append(("gradient spikes", f"{gradloc.spikes or 'none'}" + (f": {index}" if index.exists() else "")))
    if trainer.guard is not None:
        print("\n" + stability.write_acceptance(trainer.args.output_dir), flush=True)
        rows.append(("events of the guard", str(trainer.guard.alerts.path)))
    rows += trainer.closing_rows()
    rows += [("metrics", str(report.metrics_path)), ("curves", str(report.curve_path)), ("model", str(final))]
    print("\n" + table(rows), flush=True)


def _percent(result):
    return f"{100 * result['accuracy']:5.1f} % +- {100 * result['stderr']:.1f}  ({result['problems']} problems)"


def _evaluate(when, trainer, rows, resumed=False):
    place = " (before step 1; the checkpoint is loaded next)" if resumed else ""
    say(f"held-out accuracy {when} training{place}: {len(rows)} problems x {trainer.args.eval_samples} samples ...")
    result = trainer.held_out_accuracy(rows, trainer.args.eval_samples)
    say(f"  {_percent(result)}")
    return result
