r"""GRPO with TokenClip and SeqClip: stop training-inference mismatch from exploding the gradient.

    r     = pi_theta / pi_old        staleness; both in the training engine
    omega = pi_theta / mu            mu = the inference engine that sampled
    rho   = exp(mean_t log omega)    one number a sequence: a geometric mean, not the product

    J = 1/G sum_i keep_i 1/|o_i| sum_t psi_it A_i          A_i = R_i - mean(R) over the G samples of a prompt
                                                           (--scale_rewards group divides by their deviation, as GRPO does)

    --token_clip none     psi A = min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)                        plain GRPO
    --token_clip tis      psi A = min(pi_old/mu, high) * min(r A, clip(r, ...) A)                       shrinks from above
    --token_clip icepop   psi   = omega if low <= omega <= high else 0, gradient through log pi_theta   masks both sides
    --seq_clip_low/high   keep_i = 1 if low < rho_i < high else 0; dropped sequences stay in the denominators

Papers: GRPO arXiv:2402.03300 (eq. 3); TokenClip, SeqClip: Tencent Hunyuan, "GradLoc" blog, 2026-02 (types A.1 and A.2);
clip-higher: DAPO arXiv:2503.14476. The blog is the only specification of the clips; what it leaves open is marked
"paper: not stated; we: ..." in rlvr_common.py.

Smoke   accelerate launch recipes/grpo_tokenclip.py                    tiny Qwen3, arithmetic, CPU, about 2 minutes
Compare accelerate launch recipes/grpo_tokenclip.py --seq_clip_low 0.995 --seq_clip_high 1.005     (or --token_clip none)
Full    accelerate launch --config_file recipes/configs/accelerate/fsdp2.yaml recipes/grpo_tokenclip.py \
            --config recipes/configs/qwen3_4b_grpo_tokenclip.yaml
Expect  results/grpo_tokenclip/report.md (three seeds, with and without the clips)
Knobs   --learning_rate, --num_generations, --token_clip, --token_clip_low/high, --seq_clip_low/high, --epsilon_high, --temperature
Watch   mismatch/k3 rising tenfold, or omega/max far above token_clip_high: the engines disagree. token_clip/masked_frac
        above a few percent, or seq_clip/masked_frac above a half: little is left to learn from. entropy falling to 0,
        or frac_reward_zero_std near 1: nothing to learn. The README explains every metric.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoTokenizer
from trl import get_peft_config

sys.path.insert(0, str(Path(__file__).parents[1]))  # run or copy a recipe without installing anything
from rlvr_common import (  # noqa: E402
    RLVRConfig,
    RLVRTrainer,
    aggregate,
    load_rows,
    make_verifier,
    ppo_clip_loss,
    refuse_unused,
    run,
    seq_clip,
    sequence_weight,
    token_clip,
    unbiased_kl,
    weighted_logp_loss,
)
from rlvr_launch import leave, one_sentence, parse_args  # noqa: E402


@dataclass
class GRPOTokenClipConfig(RLVRConfig):
    output_dir: str = field(default="runs/grpo_tokenclip", metadata={"help": "where the run is written"})
    learning_rate: float = field(default=2e-6, metadata={"help": "GradLoc blog: 2e-6"})
    num_generations: int = field(default=8, metadata={"help": "samples a prompt, G. GradLoc blog: 8"})
    epsilon: float = field(default=0.2, metadata={"help": "eps_low of the ratio clip"})
    epsilon_high: float | None = field(default=None, metadata={"help": "eps_high; unset = epsilon"})
    scale_rewards: str = field(
        default="none", metadata={"help": "divide advantages by a deviation: none | group | batch"}
    )
    beta: float = field(default=0.0, metadata={"help": "weight of the unbiased KL to the initial model"})
    token_clip: str = field(default="icepop", metadata={"help": "none | tis | icepop"})
    token_clip_low: float = field(default=0.5, metadata={"help": "icepop's lower bound on omega. GradLoc blog: 0.5"})
    token_clip_high: float = field(default=5.0, metadata={"help": "upper bound (icepop, tis). GradLoc blog: 5.0"})
    seq_clip_low: float | None = field(default=None, metadata={"help": "lower bound on rho. GradLoc blog: 0.995"})
    seq_clip_high: float | None = field(default=None, metadata={"help": "upper bound on rho. GradLoc blog: 1.005"})

    def __post_init__(self):
        super().__post_init__()
        if self.token_clip not in ("none", "tis", "icepop"):
            raise ValueError(f"--token_clip {self.token_clip} is unknown: use none, tis or icepop")
        if not 0 <= self.token_clip_low < self.token_clip_high:
            raise ValueError(
                f"--token_clip_low {self.token_clip_low} --token_clip_high {self.token_clip_high}: need 0 <= low < high"
            )
        if (self.seq_clip_low is None) != (self.seq_clip_high is None):
            raise ValueError("SeqClip needs both bounds: --seq_clip_low 0.995 --seq_clip_high 1.005")
        if self.seq_clip_low is not None and not 0 <= self.seq_clip_low < self.seq_clip_high:
            raise ValueError(
                f"--seq_clip_low {self.seq_clip_low} --seq_clip_high {self.seq_clip_high}: need 0 <= low < high"
            )


class GRPOTokenClipTrainer(RLVRTrainer):
    def _compute_loss(self, model, inputs):
        # log-probs of both engines; old_logps equals logps while one sampling feeds one update
        args, batch = self.args, self.score(model, inputs)
        logps, old_logps, rollout_logps = batch.logps, batch.old_logps, batch.rollout_logps  # (N, T)
        mask, advantages = batch.mask, batch.advantages  # (N, T), (N, 1)

        loss = ppo_clip_loss(logps, old_logps, advantages, self.epsilon_low, self.epsilon_high)  # (N, T)
        if args.token_clip != "icepop":  # icepop has no r-clip
            ratio = (logps - old_logps).detach().exp()
            above, below = ratio > 1 + self.epsilon_high, ratio < 1 - self.epsilon_low
            self.track("ppo_clip/frac", ((advantages > 0) & above | (advantages < 0) & below).float(), mask)
        if args.token_clip != "none":
            weight = token_clip(
                logps, old_logps, rollout_logps, args.token_clip, args.token_clip_low, args.token_clip_high
            )  # (N, T), detached
            loss = weight * loss if args.token_clip == "tis" else weighted_logp_loss(weight, advantages, logps)
            self.track("token_clip/weight", weight, mask, quantiles=True)
            changed = weight == (0 if args.token_clip == "icepop" else args.token_clip_high)
            self.track("token_clip/masked_frac", changed.float(), mask)
        if args.seq_clip_low is not None:
            keep = seq_clip(logps, rollout_logps, mask, args.seq_clip_low, args.seq_clip_high)  # (N, 1), detached
            loss = keep * loss
            rho = sequence_weight(logps, rollout_logps, mask)
            self.track("seq_clip/masked_frac", 1 - keep, mask.any(1, keepdim=True))
            self.track("seq_clip/rho_kept", rho[keep == 1], quantiles=True)
        if self.beta:
            # without a token clip the KL is TRL's (pi_b = pi_old); with one, mu sampled, so mu is the behaviour policy
            # (a token whose omega explodes must not come back through the KL: same cap as the clip)
            plain = args.token_clip == "none"
            kl = unbiased_kl(
                logps, old_logps if plain else rollout_logps, batch.ref_logps, None if plain else args.token_clip_high
            )  # (N, T)
            loss = loss + self.beta * kl
            self.track("kl", kl, mask)

        self.track_policy(batch)  # entropy, mismatch, raw ratio, omega and rho: what every recipe logs
        self.flush()  # reduced once per optimizer step, over micro-batches and processes
        # the denominator counts the whole optimizer step on all processes, before any clip
        return aggregate(loss, mask, args.aggregation, self.normalizer(args.aggregation))


def main():
    args, model_args = parse_args(GRPOTokenClipConfig, __doc__)
    ratio_clip = set() if args.token_clip == "icepop" else {"epsilon", "epsilon_high"}
    with make_verifier(args) as verifier:
        with one_sentence():  # wrong input ends in a sentence; an error in training keeps its traceback
            refuse_unused(args, {"beta", "num_iterations", "scale_rewards", "mask_truncated_completions"} | ratio_clip)
            tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, padding_side="left")
            train, held_out = load_rows(args, tokenizer)
            trainer = GRPOTokenClipTrainer(
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
