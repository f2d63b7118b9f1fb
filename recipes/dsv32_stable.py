r"""DeepSeek-V3.2's four stabilisers, each behind its own switch, under the guard.

    J = E_{o ~ mu} 1/G sum_i 1/|o_i| sum_t [ M_i min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) - beta KL_t ]    (eq. 5, 8)

    r    = pi_theta / mu             mu = the inference engine that sampled; A = R - mean(R) over the group
    KL_t = r (pi_ref/pi_theta - log(pi_ref/pi_theta) - 1), r live: an unbiased gradient of the reverse KL        (eq. 7)
    M_i  = 0 if A_i < 0 and mean_t log(mu/pi_theta) > delta, with the current weights, at each update            (eq. 9)
    keep routing         pi_theta uses the experts of the sampling pass (routing replay R3)
    keep sampling mask   every softmax runs over the tokens that top-k, top-p, min-p left over in sampling

One block holds the switches, in YAML or as dotted flags (--rl_stability.unbiased_kl.enabled false):

    rl_stability:
      unbiased_kl: {enabled: true, estimator: importance_sampling_corrected, clip_ratio: 5.0}
      sequence_masking: {enabled: true, divergence_threshold: 0.1, min_keep_ratio: 0.0}
      consistency: {keep_routing: true, keep_sampling_mask: true}

While it runs, `control.yaml` in the run folder changes beta, thresholds and the first two switches (needs a guard); --beta_schedule
0:0,100:0.01 changes the KL strength by step. --guard off|warn|halt|rollback, --guard_stages small:20,medium:50,full.

Papers: DeepSeek-V3.2 arXiv:2512.02556, section 3.1; its deployment guide for clip_ratio, min_keep_ratio, guard and stages. Neither
gives delta, beta, eps, p or k: what stands here is ours.

Smoke   accelerate launch recipes/dsv32_stable.py                      tiny Qwen3-MoE, all four mechanisms, CPU, under 4 minutes
Compare accelerate launch recipes/dsv32_stable.py --rl_stability.consistency.keep_sampling_mask false    (or another switch)
Full    accelerate launch --config_file recipes/configs/accelerate/fsdp2.yaml recipes/dsv32_stable.py \
            --config recipes/configs/qwen3_30b_a3b_dsv32.yaml
Report  python stability.py report runs/dsv32_stable
Expect  held-out accuracy rises by 15 points or more, a passing acceptance table; results/dsv32/report.md
Knobs   --beta, --top_p, --top_k, --num_minibatches, rl_stability.sequence_masking.divergence_threshold
Watch   off_policy_mask/masked_frac above 0.3: fewer updates a sampling. kl far above its start: raise beta. support/agreement or
        routing/rollout_agreement falling: the engines drift apart. The README explains every metric.
"""

import difflib
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from trl import get_peft_config

sys.path.insert(0, str(Path(__file__).parents[1]))  # run or copy a recipe without installing anything
from rlvr_common import (  # noqa: E402
    RLVRConfig,
    RLVRTrainer,
    aggregate,
    k3,
    keep_least_divergent,
    load_rows,
    make_verifier,
    masked_mean,
    off_policy_sequence_mask,
    ppo_clip_loss,
    refuse_unused,
    routing_shape,
    run,
    truncates,
    unbiased_kl,
)
from rlvr_launch import REPO, leave, one_sentence, parse_args, say  # noqa: E402
from stability_control import Control, number, parse_schedule, read_yaml, scheduled, switch  # noqa: E402


@dataclass
class UnbiasedKL:
    """Eq. 7. enabled: false = plain k3; clip_ratio: largest pi_theta/mu in the weight, null = no limit."""

    enabled: bool = True
    estimator: str = "importance_sampling_corrected"
    clip_ratio: float | None = 5.0  # paper: no clip; guide: a clip without a value; ours: MiniRL's 5


@dataclass
class SequenceMasking:
    """Eq. 9. divergence_threshold: delta, in nats; min_keep_ratio: least share of the sequences that stays."""

    enabled: bool = True
    # paper: not stated; ours: inside the 0.05 to 0.2 that public runs found reasonable
    divergence_threshold: float = 0.1
    # guide: not stated; ours: off. A share of the optimizer step, whatever its split into micro-batches and processes; above 0
    # a step of several micro-batches is scored once more, without a gradient: 15 % of a step of the tiny MoE
    min_keep_ratio: float = 0.0


@dataclass
class Consistency:
    """keep_routing: R3, on a MoE; keep_sampling_mask: where --top_p, --top_k or --min_p truncate. Both are off where they do not apply."""

    keep_routing: bool = True
    keep_sampling_mask: bool = True


@dataclass
class RLStability:
    """The guide's configuration block."""

    unbiased_kl: UnbiasedKL = field(default_factory=UnbiasedKL)
    sequence_masking: SequenceMasking = field(default_factory=SequenceMasking)
    consistency: Consistency = field(default_factory=Consistency)

    @classmethod
    def read(cls, tree):
        """The block of nested keys {part: {name: value}}, the rest as above. ValueError for an unknown key or a value out of range."""
        block = cls()
        if not isinstance(tree, dict):
            raise ValueError(
                f"--rl_stability {tree} must hold nested keys: {', '.join(CHECKS)} with keys of their own"
            )
        for part, values in tree.items():
            if part not in CHECKS or not isinstance(values, dict):
                raise ValueError(
                    f"--rl_stability.{part}: nobody reads it as it is; use {', '.join(CHECKS)} with keys of their own"
                    f"{_near(part, CHECKS)}"
                )
            target = getattr(block, part)
            for name, value in values.items():
                if name not in CHECKS[part]:
                    raise ValueError(
                        f"--rl_stability.{part}.{name}: nobody reads it; use {', '.join(CHECKS[part])}{_near(name, CHECKS[part])}"
                    )
                try:
                    setattr(target, name, CHECKS[part][name](value))
                except ValueError as error:
                    raise ValueError(f"--rl_stability.{part}.{name} {value!r} {error}") from error
        return block


def _near(word, known):
    near = difflib.get_close_matches(str(word), known, 1)
    return f" (did you mean {near[0]}?)" if near and near[0] != word else ""


def _as_yaml(flag, text):
    try:
        return read_yaml(text)
    except ValueError as error:
        raise ValueError(f"{flag} {text} is not YAML: {error}") from error


def _estimator(value):
    if value != "importance_sampling_corrected":
        raise ValueError("is unknown: use importance_sampling_corrected, or enabled: false for plain k3")
    return value


CHECKS = {
    "unbiased_kl": {"enabled": switch, "estimator": _estimator, "clip_ratio": number(1, none=True)},
    "sequence_masking": {"enabled": switch, "divergence_threshold": number(0), "min_keep_ratio": number(0, 1)},
    "consistency": {"keep_routing": switch, "keep_sampling_mask": switch},
}


@dataclass
class DSV32Config(RLVRConfig):
    output_dir: str = field(default="runs/dsv32_stable", metadata={"help": "where the run is written"})
    learning_rate: float = field(default=1e-6, metadata={"help": "paper: not stated; ours: 1e-6, usual for RL"})
    num_generations: int = field(default=8, metadata={"help": "samples a prompt, G"})
    num_minibatches: int | None = field(default=2, metadata={"help": "updates of equal size a sampling"})
    epsilon: float = field(default=0.2, metadata={"help": "eps_low of the ratio clip"})
    epsilon_high: float | None = field(default=None, metadata={"help": "eps_high; unset = epsilon"})
    scale_rewards: str = field(
        default="none", metadata={"help": "divide advantages by a deviation: none | group | batch"}
    )
    beta: float = field(default=0.001, metadata={"help": "KL strength. paper: by domain, weak or zero for maths"})
    beta_schedule: str | None = field(
        default=None, metadata={"help": "KL strength by step, e.g. 0:0,100:0.01; replaces --beta"}
    )
    top_p: float = field(default=0.95, metadata={"help": "paper: used in RL, value not stated; ours: 0.95"})
    guard: str = field(default="warn", metadata={"help": "off | warn | halt | rollback"})
    routing_replay: str = field(default="none", metadata={"help": "set by rl_stability.consistency.keep_routing"})
    keep_sampling_mask: bool = field(
        default=False, metadata={"help": "set by rl_stability.consistency.keep_sampling_mask"}
    )
    rl_stability: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "the block of switches: YAML mapping; single keys as --rl_stability.part.name value. min_keep_ratio above 0 costs "
            "a step of several micro-batches one more forward pass over them"
        },
    )

    def __post_init__(self):
        tree = self.rl_stability
        if isinstance(tree, str):
            tree = _as_yaml("--rl_stability", tree)
        if self.routing_replay != "none" or self.keep_sampling_mask:
            raise ValueError(
                "--routing_replay and --keep_sampling_mask are rl_stability.consistency's business here: change the block"
            )
        self.schedule = None
        if self.beta_schedule is not None:
            self.schedule = parse_schedule(self.beta_schedule)
            self.beta = max(value for _, value in self.schedule)  # above 0: the reference model is loaded
        self.override({} if tree is None else tree)
        super().__post_init__()

    def override(self, tree):
        """Lay nested keys over the block, and let it decide what the trainer base keeps."""
        RLStability.read(tree)  # else what is no mapping fails while the two are joined
        self.tree = {part: self.tree.get(part, {}) | values for part, values in tree.items()} | {
            part: values for part, values in self.tree.items() if part not in tree
        }
        self.block = RLStability.read(self.tree)
        self.rl_stability = asdict(self.block)  # as it counts: a checkpoint's settings are compared with it
        self.routing_replay = "r3" if self.block.consistency.keep_routing else "none"
        self.keep_sampling_mask = self.block.consistency.keep_sampling_mask and truncates(self)

    tree = {}  # what was set of the block so far


class DSV32Trainer(RLVRTrainer):
    def _compute_loss(self, model, inputs):
        # log-probs over the recorded experts and the recorded sets of tokens, where kept
        args, block, batch = self.args, self.args.block, self.score(model, inputs)
        logps, mu = batch.logps, batch.rollout_logps  # (N, T)
        mask, advantages = batch.mask, batch.advantages  # (N, T), (N, 1)

        # paper: eq. 9's pi_old is the engine's; whether eq. 6's and 7's is too is not stated; we: mu in all three, since mu sampled
        loss = ppo_clip_loss(logps, mu, advantages, self.epsilon_low, self.epsilon_high)  # (N, T)
        ratio = (logps - mu).detach().exp()
        above, below = ratio > 1 + self.epsilon_high, ratio < 1 - self.epsilon_low
        self.track("ppo_clip/frac", ((advantages > 0) & above | (advantages < 0) & below).float(), mask)
        masking = block.sequence_masking
        if masking.enabled:
            if masking.min_keep_ratio > 0:
                keep = self.keep_of_step(model, inputs, batch)  # (N, 1), detached
            else:
                keep = off_policy_sequence_mask(logps, mu, advantages, mask, masking.divergence_threshold)
            loss = keep * loss  # the policy term only: KL and denominators stay
            some = mask.any(1, keepdim=True)
            self.track("off_policy_mask/masked_frac", 1 - keep, some)
            self.track("off_policy_mask/divergence", masked_mean(mu - logps, mask), some, quantiles=True)
        beta = self.kl_strength()
        if batch.ref_logps is not None:
            if block.unbiased_kl.enabled:
                kl = unbiased_kl(logps, mu, batch.ref_logps, block.unbiased_kl.clip_ratio)  # (N, T)
            else:
                kl = k3(batch.ref_logps - logps)
            loss = loss + beta * kl
            self.track("kl", kl, mask)
        self.track("kl/beta", loss.new_tensor([beta]))
        self.track_policy(batch)  # entropy, mismatch, raw ratio, omega and rho: what every recipe logs
        self.flush()  # reduced once per optimizer step, over micro-batches and processes
        # the denominator counts the whole optimizer step on all processes, before any mask
        return aggregate(loss, mask, args.aggregation, self.normalizer(args.aggregation))

    def keep_of_step(self, model, inputs, batch):
        """Eq. 9 with a floor: which sequences stay is settled once an optimizer step, over all that it trains on. -> (N, 1)"""
        if self._kept_for is not self.step_inputs:  # its first micro-batch: the weights are those of the whole step
            masking = self.args.block.sequence_masking
            rows = self.step_divergences(model, batch)  # (M, N, 3)
            divergence, advantages, counted = rows.reshape(-1, 3, 1).unbind(1)
            keep = keep_least_divergent(
                divergence, advantages, counted.bool(), masking.divergence_threshold, masking.min_keep_ratio
            )
            self._kept_for, self._keep = self.step_inputs, keep.view(*rows.shape[:2], 1)
        place = next(i for i, x in enumerate(self.step_inputs) if x is inputs)
        return self._keep[self.accelerator.process_index * len(self.step_inputs) + place]

    _kept_for = None  # the step that _keep is of

    def kl_strength(self):
        """beta of this step: the schedule's or --beta's, as changed by control.yaml."""
        if self.args.schedule is None:
            return self.beta
        return scheduled(self.args.schedule, self.state.global_step)

    def _check_routing(self):
        if self.args.routing_replay == "r3" and routing_shape(self.accelerator.unwrap_model(self.model)) is None:
            self.args.routing_replay = "none"
            say("keep routing: the model is dense and has no routing; off")
        if self.args.block.consistency.keep_sampling_mask and not self.args.keep_sampling_mask:
            say("keep sampling mask: sampling is not truncated and there is no mask; off")
        return super()._check_routing()

    def controls(self):
        controls = super().controls()
        if self.args.schedule is not None:
            controls.pop("beta", None)
        for part in ("unbiased_kl", "sequence_masking"):
            for name in set(CHECKS[part]) - {"estimator"}:
                controls[f"rl_stability.{part}.{name}"] = self._control(
                    getattr(self.args.block, part), name, CHECKS[part][name]
                )
        return controls

    @staticmethod
    def _control(holder, name, check):
        return Control(lambda: getattr(holder, name), lambda value: setattr(holder, name, value), check)

    def settings(self):
        return {"rl_stability": asdict(self.args.block), "beta_schedule": self.args.beta_schedule}


def gather_dotted(argv):
    """--rl_stability.part.name value ... -> (the other arguments, {part: {name: value}}), values read as YAML."""
    rest, tree, words = [], {}, iter(argv)
    for word in words:
        name, _, value = word.partition("=")
        if not name.startswith("--rl_stability."):
            rest.append(word)
            continue
        path = name.split(".")[1:]
        if len(path) != 2:
            raise ValueError(
                f"{name}: give --rl_stability.part.name value, for example --rl_stability.unbiased_kl.enabled false"
            )
        value = value or next(words, None)
        if value is None:
            raise ValueError(f"{name} needs a value")
        tree.setdefault(path[0], {})[path[1]] = _as_yaml(name, value)
    return rest, tree


def main(argv=None):
    with one_sentence():
        argv, dotted = gather_dotted(sys.argv[1:] if argv is None else argv)
    default = REPO / "recipes" / "configs" / "tiny_dsv32.yaml"
    args, model_args = parse_args(DSV32Config, __doc__, argv, default, amend=lambda args: args.override(dotted))
    with make_verifier(args) as verifier:
        with one_sentence():  # wrong input ends in a sentence; an error in training keeps its traceback
            refuse_unused(
                args,
                {"beta", "num_iterations", "scale_rewards", "mask_truncated_completions", "epsilon", "epsilon_high"},
            )
            tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, padding_side="left")
            train, held_out = load_rows(args, tokenizer)
            trainer = DSV32Trainer(
                model_args.model_name_or_path,
                args,
                verifier,
                train,
                processing_class=tokenizer,
                peft_config=get_peft_config(model_args),
            )
        run(trainer, held_out)
    leave()


if __name__ == "__main__":
    main()
