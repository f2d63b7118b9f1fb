r"""MiniRL, synchronous: importance-corrected policy gradient with a decoupled clip, and routing replay for MoE models.

    J = E_{y ~ mu} [ sum_t M_t sg[ min(omega_t, cap) ] A log pi_theta(y_t) ]                                     (eq. 7)

    omega = pi_theta / mu        what the sampling weights lack: training-inference mismatch times staleness
    r     = pi_theta / pi_old    staleness alone, both in the training engine; it decides the clip
    M_t   = 0 if A > 0 and r_t > 1 + eps_high, or A < 0 and r_t < 1 - eps_low; else 1
    A     = R - mean(R) over the G samples of a prompt; no deviation, no 1/|y|: a length norm breaks the first-order identity

    --num_minibatches N          sample N mini-batches at once, then make N updates; the last weights sample next
    --routing_replay r2          every update uses the experts that pi_old chose in the training engine
    --routing_replay r3          pi_old and pi_theta use the experts that the inference engine used while sampling
    --no_is                      without the training-inference factor: weight = r         (the paper's "w/o train-infer-IS")
    --no_clip, --length_norm     the paper's other ablations

Papers: MiniRL arXiv:2512.01374 (eq. 7, section 4), R3 arXiv:2510.11370, R2 = GSPO's routing replay arXiv:2507.18071.
Which setting for which N (the paper's recommendation): N = 1 no replay; N = 2 clip and R2; N = 4 or 8 clip and R3.

Smoke   accelerate launch recipes/minirl_sync.py                       tiny Qwen3-MoE, N = 2, R2, arithmetic, CPU, about 2 minutes
Compare accelerate launch recipes/minirl_sync.py --num_minibatches 8 --routing_replay r3     (or --no_clip, --no_is, --length_norm)
Dense   accelerate launch recipes/minirl_sync.py --config recipes/configs/tiny_minirl.yaml --model_name_or_path tiny --routing_replay none
Full    accelerate launch --config_file recipes/configs/accelerate/fsdp2.yaml recipes/minirl_sync.py \
            --config recipes/configs/qwen3_30b_a3b_minirl_n4_r3.yaml         (also n1, n2_r2, n8_r3)
Expect  held-out accuracy rises by 15 points or more; results/minirl/report.md
Knobs   --num_minibatches, --routing_replay, --learning_rate, --is_cap, --epsilon, --epsilon_high
Watch   routing/rollout_agreement below 0.9: the engines route apart, replay helps. minirl/masked_frac above 0.2: too many updates
        a sampling. mismatch/k3 rising with entropy falling: the collapse that the paper describes. The README explains every metric.
"""

import math
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
    minirl_loss,
    refuse_unused,
    run,
)
from rlvr_launch import REPO, leave, one_sentence, parse_args  # noqa: E402


@dataclass
class MiniRLConfig(RLVRConfig):
    output_dir: str = field(default="runs/minirl_sync", metadata={"help": "where the run is written"})
    learning_rate: float = field(default=1e-6, metadata={"help": "paper: not stated; ours: 1e-6, usual for this size"})
    num_generations: int = field(default=16, metadata={"help": "samples a prompt, G. MiniRL: 16"})
    num_minibatches: int | None = field(
        default=1, metadata={"help": "updates of equal size a sampling, N. MiniRL: 1 to 8"}
    )
    epsilon: float = field(default=0.2, metadata={"help": "eps_low of the decoupled clip. MiniRL: 0.2"})
    epsilon_high: float | None = field(default=0.27, metadata={"help": "eps_high. MiniRL: 0.27"})
    scale_rewards: str = field(
        default="none", metadata={"help": "divide advantages by a deviation: none | group | batch"}
    )
    is_cap: float = field(default=5.0, metadata={"help": "truncation of omega from above. MiniRL: 5"})
    no_is: bool = field(default=False, metadata={"help": "ablation: weight r instead of omega"})
    no_clip: bool = field(default=False, metadata={"help": "ablation: M = 1 everywhere"})
    length_norm: bool = field(default=False, metadata={"help": "ablation: mean over a sequence's tokens, not the sum"})
    # sum over tokens, over the number of responses. paper: the constant is not stated; ours: it only scales the learning rate
    aggregation: str = field(default="seq_sum", metadata={"help": "set by --length_norm"})

    def __post_init__(self):
        if self.length_norm:
            if self.aggregation == "token_mean":
                raise ValueError("--length_norm is --aggregation seq_mean_token_mean: remove --aggregation token_mean")
            self.aggregation = "seq_mean_token_mean"
        for name, default in (("epsilon", 0.2), ("epsilon_high", 0.27)):
            if self.no_clip and getattr(self, name) != default:
                raise ValueError(f"--no_clip reads no bounds: remove --{name} {getattr(self, name)}")
        if not self.is_cap > 0:
            raise ValueError(f"--is_cap {self.is_cap} must be above 0")
        super().__post_init__()


class MiniRLTrainer(RLVRTrainer):
    def _compute_loss(self, model, inputs):
        # log-probs under the routing that --routing_replay asks for; old_logps equals logps while N = 1
        args, batch = self.args, self.score(model, inputs)
        logps, old_logps, rollout_logps = batch.logps, batch.old_logps, batch.rollout_logps  # (N, T)
        mask, advantages = batch.mask, batch.advantages  # (N, T), (N, 1)

        eps_low, eps_high = (math.inf, math.inf) if args.no_clip else (self.epsilon_low, self.epsilon_high)
        behaviour = old_logps if args.no_is else rollout_logps  # (N, T): what the weight's denominator is
        loss = minirl_loss(logps, old_logps, behaviour, advantages, eps_low, eps_high, args.is_cap)  # (N, T)

        ratio = (logps - old_logps).detach().exp()
        masked = ((advantages > 0) & (ratio > 1 + eps_high)) | ((advantages < 0) & (ratio < 1 - eps_low))
        self.track("minirl/masked_frac", masked.float(), mask)
        self.track("minirl/truncated_frac", ((logps - behaviour).detach().exp() > args.is_cap).float(), mask)
        self.track_policy(batch)  # entropy, mismatch, raw ratio, omega and rho: what every recipe logs
        self.flush()  # reduced once per optimizer step, over micro-batches and processes
        # the denominator counts the whole optimizer step on all processes, before any mask
        return aggregate(loss, mask, args.aggregation, self.normalizer(args.aggregation))


def main():
    args, model_args = parse_args(MiniRLConfig, __doc__, default=REPO / "recipes" / "configs" / "tiny_minirl.yaml")
    with make_verifier(args) as verifier:
        with one_sentence():  # wrong input ends in a sentence; an error in training keeps its traceback
            refuse_unused(
                args, {"scale_rewards", "mask_truncated_completions", "num_iterations", "epsilon", "epsilon_high"}
            )
            tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, padding_side="left")
            train, held_out = load_rows(args, tokenizer)
            trainer = MiniRLTrainer(
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
